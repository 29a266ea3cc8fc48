"""A basis of tokens that layers share: the best one there is, exact at full rank, counted once, right for any batch."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compress import METHODS, apply, load_compressed, load_model, save_compressed
from compress.inputs.calibration import held_out
from compress.kv import attach, attached, attachment_of
from compress.kv.projecting import xkv as module
from compress.kv.projecting.shared import SharedSlab, factors, ranks_of
from compress.kv.storage import joined
from compress.kv.timed import FilledCache
from kernels.registry import recording

XKV, KV_INT, SNAPKV, QUEST = (METHODS[name] for name in ("xkv", "kv_int", "snapkv", "quest"))
NEAR = {"rtol": 1e-3, "atol": 1e-3}


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 60)), (torch.arange(60) >= torch.tensor([[0], [9]])).long()


@pytest.fixture
def full_rank(monkeypatch):
    """Factors of all that there is, which take more bytes than what they are of."""
    monkeypatch.setattr(module, "ranks_of", lambda share, tokens, channels: tokens.clamp(max=channels))


def in_steps(model, methods, ids, mask, sizes=(30, 22, 1, 1, 1, 4, 1)) -> Tensor:
    """Logits: a prompt in chunks, single tokens, and several at once."""
    with attached(model, methods) as attachment:
        cache, at, found = attachment.cache(), 0, []
        for size in sizes:
            found.append(read(model, cache, ids[:, at : at + size], mask[:, : at + size]))
            at += size
    return torch.cat([x * mask[:, :at][:, -x.shape[1] :, None] for x in found[2:]], 1)


@pytest.mark.parametrize("shape", [(2, 30, 12), (2, 12, 30)])
def test_factors_are_a_truncated_singular_value_decomposition(shape):
    x, ranks = torch.randn(shape), torch.tensor([5, 3])
    left, right = factors(x, ranks)
    assert left.shape == (2, shape[1], 5) and right.shape == (2, 5, shape[2])
    for row, rank in enumerate(ranks):
        u, s, vh = torch.linalg.svd(x[row].double(), full_matrices=False)
        assert_close(left[row] @ right[row], u[:, :rank] * s[:rank] @ vh[:rank])
    assert_close(left[0].square().mean(0), torch.ones(5, dtype=torch.float64))


def test_ranks_take_the_share_of_bytes_at_most():
    tokens = torch.tensor([1, 20, 300, 5000])
    for share in (0.1, 0.25, 0.5):
        ranks = ranks_of(share, tokens, 96)
        assert (ranks * (tokens + 96) <= share * tokens * 96)[ranks > 1].all()
        assert ((ranks + 1) * (tokens + 96) > share * tokens * 96)[ranks < tokens].all() and ranks.min() == 1


@pytest.mark.parametrize(
    ("architecture", "group"),
    [("llama", 1), ("llama", 2), ("gpt2", 2), ("gpt_oss", 1),
     pytest.param("qwen3", 2, marks=pytest.mark.slow), pytest.param("gemma3_text", 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_at_full_rank_nothing_changes(tiny, padded, full_rank, architecture, group):
    """With padding, grouped heads, a prompt in chunks, single tokens and several."""
    model = tiny(architecture)
    assert_close(in_steps(model, [XKV(group=group, key_share=0.5, value_share=0.5)], *padded),
                 in_steps(model, [], *padded), **NEAR)  # fmt: skip


def test_the_cache_keeps_one_basis_for_a_group_of_layers(tiny, tokens):
    """By torch's own decomposition of what the projections give, before RoPE."""
    model, ids, rows = tiny("llama"), tokens(1, 60)[0], {"k_proj": [], "v_proj": []}
    hooks = [getattr(layer.self_attn, name).register_forward_hook(lambda m, a, out, to=to: to.append(out[0]))
             for layer in model.model.layers for name, to in rows.items()]  # fmt: skip
    model(ids)
    for hook in hooks:
        hook.remove()
    with attached(model, [XKV(group=2, key_share=0.4, value_share=0.3)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
    for share, name, kind in ((0.4, "k_proj", "keys"), (0.3, "v_proj", "values")):
        u, s, vh = torch.linalg.svd(torch.cat(rows[name], 1), full_matrices=False)
        rank = int(share * 60 * 64 / 124)
        expected = (u[:, :rank] * s[:rank] @ vh[:rank]).unflatten(1, (2, 2, 16)).permute(1, 2, 0, 3)  # [layer, H, T, D]
        for layer, own in zip(cache.own, expected, strict=True):
            held = getattr(layer.slabs[0], kind)
            assert held.basis.tokens.shape == (1, 1, 60, rank) and held.lift.shape == (1, 2, rank, 16)
            assert_close(held.dense()[0], own, **NEAR)
            if kind == "keys":
                assert_close(layer.about["turn"](joined(layer.slabs)[0], torch.arange(60)[None], True)[0], own, **NEAR)


def test_bytes_are_those_asked_for_and_a_basis_counts_once(tiny, tokens):
    """Also of copies and other orders of rows, which share it still."""
    model, ids = tiny("llama"), torch.cat(tokens(2, 120))
    with attached(model, [XKV(group=2, key_share=0.25, value_share=1.0)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
        rank = int(0.25 * 120 * 64 / 184)
        expected = 2 * (rank * (120 + 64) + 2 * 120 * 32) * 4
        assert 0 <= cache.nbytes - expected < 400 and rank * 184 <= 0.25 * 120 * 64
        first, second = (layer.slabs[0].keys for layer in cache.own)
        assert first.basis is second.basis
        for change in (lambda c: c.reorder_cache(torch.tensor([1, 0])), copy.deepcopy):
            before = [joined(layer.slabs)[0] for layer in cache.own]
            cache = change(cache) or cache
            first, second = (layer.slabs[0].keys for layer in cache.own)
            assert first.basis is second.basis and 0 <= cache.nbytes - expected < 400
            now = [joined(layer.slabs)[0] for layer in cache.own]
            same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            flipped = all(torch.equal(a.flip(0), b) for a, b in zip(before, now, strict=True))
            assert same or flipped


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_batch_is_its_rows(tiny, padded, architecture):
    """Each row has the rank of its own length."""
    model, (ids, mask) = tiny(architecture).double(), padded
    model.generation_config.eos_token_id = None
    more = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with attached(model, [XKV(group=2, key_share=0.4, value_share=0.5)]) as attachment:
        both = model.generate(ids, attention_mask=mask, **more)
        logits = in_steps(model, [], ids, mask, (40, 18, 1, 1))
        for i, row in enumerate(mask.bool()):
            own = ids[i : i + 1, row], mask[i : i + 1, row]
            assert torch.equal(model.generate(own[0], attention_mask=own[1], **more)[0, -8:], both[i, -8:])
            sizes = (int(mask[i, :40].sum()), 18, 1, 1)
            assert_close(in_steps(model, [], *own, sizes)[0], logits[i], **NEAR)
        beams = model.generate(ids, attention_mask=mask, num_beams=2, **more)
        assert beams.shape == (2, 68) and attachment.projecting is not None


def test_tokens_behind_the_prompt_stay_as_they_came(tiny, padded):
    """The kernel and the plain path read the same; a short prompt is left alone, and a second one joins the first."""
    model, (ids, _), method = tiny("llama"), padded, XKV(group=2, key_share=0.3, value_share=0.3)
    logits = {}
    for by_kernel in (True, False):
        with attached(model, [method]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids[:, :40])
            with recording() as ran:
                logits[by_kernel] = torch.cat([read(model, cache, ids[:, i : i + 1]) for i in range(40, 50)], 1)
            assert ("kv_decode" in ran) == by_kernel
            assert [(layer.slabs[0].prompt, layer.slabs[0].tail.length) for layer in cache.own] == [(40, 10)] * 2
            cache.crop(-4)
            with pytest.raises(ValueError, match="last 7 tokens cannot be taken back: all but 6"):
                cache.crop(-7)
            read(model, cache, ids[:, 46:])
    assert_close(logits[True], logits[False], **NEAR)
    assert [layer.slabs[0].prompt for layer in cache.own] == [60] * 2 and not cache.is_croppable
    with attached(model, [method]) as attachment, attached(model):
        cache = attachment.cache()
        for size in (3, *[1] * 10):
            read(model, cache, ids[:, :size])
    assert all(isinstance(layer.slabs[0], SharedSlab) and layer.slabs[0].prompt == 0 for layer in cache.own)


def test_an_observing_cache_is_decomposed_as_if_it_had_always_been(tiny, padded):
    model, (ids, mask), method = tiny("llama"), padded, XKV(key_share=0.3, value_share=0.4)
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        read(model, observed, ids, mask)
        made = observed.compressed(None, None, None, method)
    with attached(model, [method]) as attachment:
        whole = attachment.cache()
        read(model, whole, ids, mask)
    for a, b in zip(made.own, whole.own, strict=True):
        assert_close(joined(a.slabs), joined(b.slabs), **NEAR)


def test_refused_with_what_it_cannot_serve(tiny, tmp_path):
    model, method = tiny("llama"), XKV()
    for other in (SNAPKV(), KV_INT(), QUEST(full_layers=0)):
        for refuse in (lambda o=other: apply([method, o], model), lambda o=other: attach(model, [o, method])):
            with pytest.raises(ValueError, match="cannot be combined with it"):
                refuse()
    with pytest.raises(ValueError, match="both decide which channels"):
        apply([method, XKV(group=1)], model)
    with pytest.raises(ValueError, match="`key_share` .=0. of xkv must be above 0"):
        XKV(key_share=0.0)
    with pytest.raises(ValueError, match="in factors, which timed steps do not read"):
        FilledCache(tiny("llama"), 100, None, None, None, method)
    result = apply([METHODS["rtn"](bits=8, group_size=16), method], model)
    save_compressed(result, tmp_path / "saved")
    assert attachment_of(load_compressed(tmp_path / "saved")).projecting == method


@pytest.mark.slow
def test_a_shared_basis_loses_less_than_one_for_each_layer_at_the_same_bytes():
    """On the embedded model, a text of which nothing was tuned."""
    model, tokenizer = load_model("smollm2-135m")
    ids = held_out(tokenizer, corpus="pydocs")[:, :176]
    with attached(model) as attachment:
        observed, found = attachment.cache(observes=True), {}
        model(ids[:, :160], past_key_values=observed, logits_to_keep=1)
        for group in (0, 1, 5):
            method = XKV(group=group, key_share=0.25, value_share=1.0) if group else None
            cache = observed.compressed(None, None, None, method)
            cache.paused, held = True, cache.nbytes_16
            found[group] = model(ids[:, 160:], past_key_values=cache).logits.log_softmax(-1), held
    full, most = found[0]
    kl = {group: (full.exp() * (full - logits)).sum(-1).mean().item() for group, (logits, _) in found.items()}
    assert kl[5] < kl[1] and found[5][1] < 0.64 * most and found[1][1] < 0.64 * most
