"""Prompts out of chunks that were read apart: the same as the whole prompt where they should be, and nearer to it the
more is computed again."""

import math

import pytest
import torch
from scipy.stats import kendalltau

from compress.kv.reuse import ChunkStore, blend
from compress.kv.reuse.blend import CHOICES
from compress.kv.reuse.context import ChunkContext, places_by_context

ARCHITECTURES = ["llama", "qwen2", "mistral", "gemma3_text", "phi", "gpt_neox"]  # sliding layers, partial rotations


def texts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (1, n), generator=generator) for n in lengths]


def kl(model, chunks, question, **how) -> float:
    """Of the answer behind a blended prompt from that behind the whole one."""
    ids = torch.cat([*(chunk.ids[None] for chunk in chunks), question], 1)
    with torch.no_grad():
        right = model(ids).logits[:, -question.shape[1] :].log_softmax(-1)
    got = blend(model, chunks, question, **how).logits.log_softmax(-1)
    return (right.exp() * (right - got)).sum(-1).mean().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_computed_again_is_the_whole_prompt_and_generation_goes_on(tiny, architecture):
    model = tiny(architecture)
    prefix, a, b, question = texts(1, 12, 9, 5)
    store = ChunkStore(model, prefix)
    chunks = [store.prefix, store.read(a), store.read(b)]
    whole = torch.cat([prefix, a, b, question], 1)
    with torch.no_grad():
        right = model(whole, use_cache=True)
    blended = blend(model, chunks, question, share=1.0)
    torch.testing.assert_close(blended.logits, right.logits[:, -5:], atol=1e-4, rtol=1e-4)
    assert blended.places.tolist() == list(range(1, 22)) and blended.share == 26 / 27
    assert blended.cache.get_seq_length() == whole.shape[1]
    following = blended.logits[:, -1:].argmax(-1)
    with torch.no_grad():
        later, expected = (model(following, past_key_values=c).logits for c in (blended.cache, right.past_key_values))
    torch.testing.assert_close(later, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(blended.ids, whole)
    again = blend(model, chunks, question, share=1.0)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(1, 28)}
    written = model.generate(torch.cat([again.ids, following], 1), past_key_values=again.cache, **how)
    assert torch.equal(written, model.generate(torch.cat([whole, following], 1), **how))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox"])
def test_one_chunk_behind_its_prefix_needs_nothing_again(tiny, architecture):
    model = tiny(architecture)
    prefix, a, question = texts(3, 14, 4)
    store = ChunkStore(model, prefix)
    assert kl(model, [store.prefix, store.read(a)], question, share=0.0) == pytest.approx(0, abs=1e-5)


def test_keys_are_moved_to_their_places(tiny):
    """In the first layer nothing depends on what stands before: a chunk's keys there are those of the prompt."""
    model = tiny("llama")
    prefix, a, b, question = texts(2, 12, 9, 1)
    store = ChunkStore(model, prefix)
    blended = blend(model, [store.prefix, store.read(a), store.read(b)], question, share=0.0)
    with torch.no_grad():
        right = model(torch.cat([prefix, a, b, question], 1), use_cache=True).past_key_values
    torch.testing.assert_close(blended.cache.layers[0].keys, right.layers[0].keys, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(blended.cache.layers[1].values, right.layers[1].values, atol=1e-3), "b has not seen a"


@pytest.mark.parametrize("choose", CHOICES)
def test_more_computed_again_is_nearer(tiny, choose):
    model = tiny("llama")
    prefix, *others, question = texts(1, 16, 16, 16, 6)
    store = ChunkStore(model, prefix)
    chunks = [store.prefix, *map(store.read, others)]
    losses = [kl(model, chunks, question, share=share, choose=choose) for share in (0.0, 0.5, 1.0)]
    assert losses[0] > losses[2] and losses[1] > losses[2] and losses[2] < 1e-6 < losses[0]
    again = blend(model, chunks, question, share=0.25, choose=choose).places
    assert len(again) == 12 and again.min() >= 1 and again.tolist() == sorted(set(again.tolist()))
    if choose == "first":
        assert again.tolist() == [start + i for start in (1, 17, 33) for i in range(4)]
    if choose == "deviation":
        assert again.min() >= 17, "the first chunk saw all that stands before it when it was read"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox"])
def test_a_prompt_that_was_read_together_needs_nothing_again(tiny, architecture):
    model = tiny(architecture)
    prefix, a, b, c, question = texts(2, 12, 9, 7, 4)
    store = ChunkStore(model, prefix)
    chunks = store.read_together([a, b, c])
    assert kl(model, chunks, question, share=0.0) == pytest.approx(0, abs=1e-5)
    assert blend(model, chunks, question, share=0.5, choose="context").places.tolist() == []
    assert [chunk.start for chunk in chunks] == [0, 2, 14, 23] and chunks[3].name == store.read(c).name
    for n, chunk in zip((12, 9, 7), chunks[1:], strict=True):  # what each token sees adds up to 1, with the prefix
        seen = chunk.context.intra + sum(chunk.context.inter)
        assert 0 < seen < n and chunk.context.outside.sum().item() == pytest.approx(sum(chunk.context.inter), rel=1e-5)
    moved = [chunks[0], chunks[3], chunks[1]]
    losses = [kl(model, moved, question, share=share, choose="context") for share in (0.0, 1.0)]
    assert losses[0] > 1e-4 and losses[1] < 1e-6


def test_attention_to_other_texts_is_that_of_the_model(tiny):
    model = tiny("llama")
    prefix, a, b, c = texts(2, 12, 9, 7)
    got = ChunkStore(model, prefix).read_together([a, b, c])[3].context
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.cat([prefix, a, b, c], 1), output_attentions=True).attentions
    mean = torch.stack([layer[0].mean(0) for layer in maps]).mean(0)[23:]
    torch.testing.assert_close(got.outside, mean[:, 2:23].sum(1))
    assert got.inter == pytest.approx([mean[:, 2:14].sum().item(), mean[:, 14:23].sum().item()])
    assert got.intra == pytest.approx(mean[:, 23:].sum().item()) and got.lengths == (12, 9)


def test_impact_and_overlap_are_those_of_the_paper():
    context = ChunkContext(("a", "b", "c"), (10, 20, 40), (2.0, 3.0, 5.0), 4.0, torch.ones(8))
    outside, inside = 2 / (8 * 10) + 3 / (8 * 20) + 5 / (8 * 40), 4 / 8**2
    assert context.impact == pytest.approx(1 / (1 + math.exp(-outside / inside)))
    assert context.overlap(["a", "b", "c"]) == 1 and context.overlap(["x"]) == context.overlap([]) == 0
    assert context.overlap(["c", "x"]) == pytest.approx(0.5) and context.overlap(["a", "b"]) == pytest.approx(0.5)
    for now in (["b", "a", "c"], ["c", "b", "a"], ["c", "a", "x", "b"]):
        tau = kendalltau([0, 1, 2], [now.index(name) for name in "abc"]).statistic
        assert context.overlap(now) == pytest.approx(1 - (1 - tau) / 2)
    assert context.overhead(["c"]) == pytest.approx(context.impact / 2)
    alone = ChunkContext((), (), (), 1.0, torch.zeros(8))
    assert (alone.overhead([]), alone.overhead(["a"])) == (0, 1), "a text before it, of which it saw none"


def test_chunks_share_the_tokens_by_their_overheads():
    alone = ChunkContext((), (), (), 1.0, torch.zeros(8))
    settled = ChunkContext(("a",), (8,), (1.0,), 4.0, torch.arange(8.0))
    foreign = ChunkContext(("x",), (8,), (4.0,), 4.0, torch.tensor([0.0, 3, 1, 2, 9, 0, 0, 8]))
    counted = [places.tolist() for places in places_by_context([alone, settled, foreign], ["a", "b", "c"], 4)]
    assert counted == [[], [], [4, 7, 1, 3]], "the first one stands where it was read, the second one behind the same"
    counted = [places.tolist() for places in places_by_context([alone, settled, foreign], ["a", "b", "c"], 12)]
    assert counted == [[], [], foreign.outside.argsort(descending=True, stable=True).tolist()], "no more than needed"
    counted = [len(places) for places in places_by_context([alone, alone, foreign], ["a", "b", "c"], 10)]
    assert counted == [0, 6, 4] and foreign.impact == pytest.approx(0.731, abs=1e-3)


def test_the_reading_that_fits_is_selected(tiny, tmp_path):
    model = tiny("llama")
    prefix, a, b, c, new = texts(1, 10, 8, 6, 5)
    store = ChunkStore(model, prefix, tmp_path)
    first, second = store.read_together([a, b, c]), store.read_together([c, b])
    for some in (store, ChunkStore(model, prefix, tmp_path)):
        assert [chunk.start for chunk in some.select([a, b, c])] == [chunk.start for chunk in first]
        assert [chunk.start for chunk in some.select([c, b, new])] == [*(chunk.start for chunk in second), 1]
        some.read(b)
        assert some.select([new, b])[2].start > 1, (
            "what was read behind other texts lacks less than what was read alone"
        )
        got = some.select([a, b, c])[3]
        assert got.context.before == first[3].context.before and got.context.inter == first[3].context.inter
        assert torch.equal(got.keys[1], first[3].keys[1]) and torch.equal(got.context.outside, first[3].context.outside)


def test_chunks_are_kept_in_a_folder(tiny, tmp_path, monkeypatch):
    model = tiny("llama")
    prefix, a, question = texts(1, 10, 3)
    first = ChunkStore(model, prefix, tmp_path)
    chunk = first.read(a)
    assert chunk is first.read(a[0]) and chunk.nbytes == sum(k.nbytes for k in (*chunk.keys, *chunk.values)) > 0
    monkeypatch.setattr(ChunkStore, "_layers", lambda *_: pytest.fail("it is in the folder"))
    later = ChunkStore(model, prefix, tmp_path)
    results = [blend(model, [s.prefix, s.read(a)], question, share=0.0).logits for s in (first, later)]
    assert torch.equal(*results)
    with pytest.raises(pytest.fail.Exception):
        ChunkStore(tiny("llama", seed=1), prefix, tmp_path)  # other weights, other chunks
    with pytest.raises(pytest.fail.Exception):
        ChunkStore(tiny("llama").bfloat16(), prefix, tmp_path)  # other precision, other chunks
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_impossible_arguments_of_blend_are_refused(tiny):
    model = tiny("llama")
    prefix, a, question = texts(1, 10, 3)
    store = ChunkStore(model, prefix)
    chunks = [store.prefix, store.read(a)]
    for wrong, message in [
        ({"chunks": chunks[1:]}, "`chunks` must begin with one that was read at position 0"),
        ({"question": question.repeat(2, 1)}, r"`question` \(2, 3\) must be \[1, q\]"),
        ({"share": 1.5}, r"`share` \(=1.5\) must be from 0 to 1"),
        ({"choose": "best"}, r"`choose` \(='best'\) must be one of 'deviation'"),
    ]:
        with pytest.raises(ValueError, match=message):
            blend(model, **{"chunks": chunks, "question": question, **wrong})
    shallow = tiny("llama", num_hidden_layers=1)
    store_of_one = ChunkStore(shallow, prefix)
    with pytest.raises(ValueError, match=r"`choose` \(='deviation'\) compares second layers"):
        blend(shallow, [store_of_one.prefix, store_of_one.read(a)], question)
    with pytest.raises(ValueError, match="the tokens of one text"):
        store.read(a.repeat(2, 1))
    with pytest.raises(ValueError, match="`texts` is empty"):
        store.read_together([])
    with pytest.raises(ValueError, match="the tokens of one text"):
        store.read_together([a, a.repeat(2, 1)])
    with pytest.raises(ValueError, match="`prefix` holds no token"):
        ChunkStore(model, prefix[:, :0])
    with pytest.raises(ValueError, match="no rotary position embeddings"):
        ChunkStore(tiny("gpt2"), prefix)
