"""Prompts out of chunks that were read apart: the same as the whole prompt where they should be, and nearer to it the
more is computed again."""

import pytest
import torch

from compress.kv.reuse import ChunkStore, blend
from compress.kv.reuse.blend import CHOICES

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


def test_chunks_are_kept_in_a_folder(tiny, tmp_path, monkeypatch):
    model = tiny("llama")
    prefix, a, question = texts(1, 10, 3)
    first = ChunkStore(model, prefix, tmp_path)
    chunk = first.read(a)
    assert chunk is first.read(a[0]) and chunk.nbytes == sum(k.nbytes for k in (*chunk.keys, *chunk.values)) > 0
    monkeypatch.setattr(ChunkStore, "_computed", lambda *_: pytest.fail("it is in the folder"))
    later = ChunkStore(model, prefix, tmp_path)
    results = [blend(model, [s.prefix, s.read(a)], question, share=0.0).logits for s in (first, later)]
    assert torch.equal(*results)
    with pytest.raises(pytest.fail.Exception):
        ChunkStore(tiny("llama", seed=1), prefix, tmp_path)  # other weights, other chunks
    with pytest.raises(pytest.fail.Exception):
        ChunkStore(tiny("llama").bfloat16(), prefix, tmp_path)  # other precision, other chunks
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_what_cannot_be_blended_is_refused(tiny):
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
    with pytest.raises(ValueError, match="`prefix` holds no token"):
        ChunkStore(model, prefix[:, :0])
    with pytest.raises(ValueError, match="no rotary position embeddings"):
        ChunkStore(tiny("gpt2"), prefix)
