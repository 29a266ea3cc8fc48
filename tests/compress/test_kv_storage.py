"""What a compressed cache holds: codes that lose what they say, and no more bytes than it says."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from compress import METHODS
from compress.kv import attached
from compress.kv.eviction.knorm import KNorm
from compress.kv.precision import Precision
from compress.kv.storage import joined, right_packed, slabs_of, taken
from compress.kv.timed import check_sized, sizes
from compress.recipe import methods_of
from kernels.kv_decode import dequantize_kv, quantize_kv

KV_INT, KV_FP8, SNAPKV, H2O = (METHODS[name] for name in ("kv_int", "kv_fp8", "snapkv", "h2o"))


@dataclass(frozen=True, kw_only=True)
class Lopsided(KNorm):
    """The keys of later heads matter more than all those of earlier ones."""

    def scores(self, seen):
        return KNorm.scores(self, seen) + 1000 * torch.arange(seen.keys.shape[1])[:, None]


def read(model, cache, ids) -> None:
    at = cache.get_seq_length() + torch.arange(ids.shape[1])
    model(ids, position_ids=at[None], past_key_values=cache)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_lose_half_a_step_and_the_residual_nothing(tiny, tokens, bits):
    model, ids, plain = tiny("llama"), torch.cat(tokens(2, 150)), DynamicCache()
    read(model, plain, ids)
    with attached(model, [KV_INT(bits=bits, group_size=32, residual=20)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
    for layer, exact in zip(cache.own, plain.layers, strict=True):
        slab = layer.slabs[0]
        assert slab.coded == 128 and layer.length == 150  # whole groups of 32 once 20 lie behind them
        steps_k, steps_v = (one.view[..., 0].float() for one in slab.codes[2:])  # [B, H, groups, D], [B, H, n]
        steps = steps_k.repeat_interleave(32, 2), steps_v[..., None]
        for stored, true, step in zip(slab.dense(), (exact.keys, exact.values), steps, strict=True):
            assert torch.equal(stored[:, :, 128:], true[:, :, 128:])
            off = (stored - true)[:, :, :128].abs() / step
            assert 0.49 < off.max() < 0.501
        assert slab.codes[0].nbytes == slab.codes[1].nbytes == 4 * 128 * 16 * bits // 8  # 4: rows and heads
        assert slab.codes[2].nbytes == 4 * 4 * 16 * 2 * 2 and slab.codes[3].nbytes == 4 * 128 * 2 * 2
        assert slab.k.nbytes == slab.v.nbytes == 4 * 22 * 16 * 4


@pytest.mark.parametrize("scales", ["group", "one"])
def test_floats_lose_a_sixteenth_and_the_residual_nothing(tiny, tokens, scales):
    model, ids, plain = tiny("llama"), torch.cat(tokens(2, 150)), DynamicCache()
    read(model, plain, ids)
    with attached(model, [KV_FP8(group_size=32, residual=20, scales=scales)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
    for layer, exact in zip(cache.own, plain.layers, strict=True):
        slab = layer.slabs[0]
        assert slab.coded == 128 and layer.length == 150
        for stored, true, held in zip(slab.dense(), (exact.keys, exact.values), slab.codes[2:], strict=True):
            assert torch.equal(stored[:, :, 128:], true[:, :, 128:])
            assert scales == "group" or torch.all(held.view == 1)
            most = torch.maximum(true[:, :, :128].abs() / 16, held.view.repeat_interleave(32, 2)[..., None] / 1024)
            assert torch.all((stored - true)[:, :, :128].abs() <= most * (1 + 1e-6))
            assert not torch.equal(stored, true)
        assert slab.codes[0].nbytes == slab.codes[1].nbytes == 4 * 128 * 16  # 4: rows and heads
        assert slab.codes[2].nbytes == slab.codes[3].nbytes == 4 * 4 * 4


HOW = {"int4": {"bits": 4}, "e4m3": {"bits": 8, "float8": True}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("residual", [0, 5, 40])
def test_appended_codes_are_those_of_all_at_once(residual, how):
    precision = Precision(group=32, residual=residual, **HOW[how])
    k, v = torch.randn(2, 2, 3, 150, 16)
    keep = torch.ones(2, 3, 150, dtype=torch.bool)
    keep[1, :, :7] = False
    whole = slabs_of(k, v, keep, precision)[0]
    for pieces in ([1] * 110, [3, 90, 17]):
        slab, at = slabs_of(k[:, :, :40], v[:, :, :40], keep[..., :40], precision)[0], 40
        for size in pieces:
            slab.append(k[:, :, at : at + size], v[:, :, at : at + size])
            at += size
        assert slab.length == whole.length == 150 and slab.coded == whole.coded == (150 - residual) // 32 * 32
        for a, b in zip(slab.tensors, whole.tensors, strict=True):
            assert torch.equal(a.view, b.view)
    with pytest.raises(ValueError, match="`residual` of 80"):
        slab.drop_last(80)


def test_groups_are_filled_up_where_that_takes_fewer_bytes():
    """21 of 32 positions as codes of a whole group, 8 of 32 as they are; what is kept is what it was."""
    k, v = torch.randn(2, 2, 3, 100, 16)
    counts = torch.tensor([[21, 40, 64], [20, 37, 50]])
    keep = torch.arange(100) >= 100 - counts[..., None]
    for residual, coded, tail in ((0, [32, 32, 64], [0, 8, 0]), (5, [32, 32, 64], [5, 8, 5])):
        slabs = slabs_of(k, v, keep, Precision(4, 32, residual), fill=True)
        assert [slab.coded for slab in slabs] == coded and [slab.k.length for slab in slabs] == tail
        assert torch.equal(torch.cat([slab.lengths for slab in slabs], 1), counts)
        for h, slab in enumerate(slabs):
            q = torch.randn(2, 1, 1, 16)
            y, _ = slab.attend(q, scale=0.3, softcap=None)
            for b in range(2):
                n = int(counts[b, h])
                for stored, true in zip(slab.dense(), (k, v), strict=True):
                    assert (stored[b, 0, -n:] - true[b, h, -n:]).abs().max() < 0.3
                alone = [x[b : b + 1, :, -n:] for x in slab.dense()]
                expected = torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], *alone, scale=0.3)
                torch.testing.assert_close(y[b : b + 1], expected, rtol=1e-3, atol=1e-3)
    assert [slab.coded for slab in slabs_of(k, v, keep, Precision(4, 32, 0))] == [0, 32, 64]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("length", [0, 5, 60])
def test_kept_positions_come_last_in_their_order(share, length):
    for n in (1, 7, 50):
        keep = torch.rand(3, 2, n) < share
        index, starts = right_packed(keep, length)
        sorted_index, sorted_starts = right_packed(keep.to(torch.uint8), length)
        assert torch.equal(starts, sorted_starts) and index.shape == sorted_index.shape
        x = torch.randn(3, 2, n, 4)
        for b in range(3):
            for h in range(2):
                kept = keep[b, h].nonzero()[:, 0]
                assert index[b, h, starts[b, h] :].tolist() == kept.tolist()
                if len(kept):
                    assert torch.equal(index[b, h], sorted_index[b, h])
                    assert (index[b, h, : starts[b, h]] == kept[0]).all()
                assert torch.equal(taken(x, index)[b, h], x[b, h, index[b, h]])


def test_places_that_an_evaluation_traces_are_not_counted(tiny, tokens):
    model, ids = tiny("llama").bfloat16(), tokens(1, 150)[0]
    for policy in (SNAPKV(budget=40), SNAPKV(budget=40, observed=4, decoding=True)):
        with attached(model, [policy]) as attachment:
            caches = [attachment.cache(), attachment.cache(traces=True)]
            for cache in caches:
                read(model, cache, ids)
        assert caches[0].nbytes_16 == caches[1].nbytes_16 == caches[0].nbytes
        assert (caches[1].nbytes > caches[0].nbytes) == (not policy.decoding)


def test_evicted_then_coded(tiny, tokens):
    """In either order of the recipe."""
    model, ids, caches = tiny("llama"), tokens(1, 150)[0], []
    alone, storage = SNAPKV(budget=80), KV_INT(group_size=32, residual=8)
    for methods in ([alone], [alone, storage], [storage, alone]):
        with attached(model, methods) as attachment:
            caches.append(attachment.cache())
            read(model, caches[-1], ids)
    for only, *both in zip(*(cache.own for cache in caches), strict=True):
        exact = joined(only.slabs)[:2]
        coded = dequantize_kv(quantize_kv(*(x[:, :, :64] for x in exact), 4, 32))
        for one in both:
            for found, codes, rest in zip(joined(one.slabs)[:2], coded, exact, strict=True):
                assert torch.equal(found, torch.cat([codes, rest[:, :, 64:]], 2))


def reachable(thing, found: dict) -> dict:
    """Bytes of every piece of memory that is held below a thing, by where it is; the model and scalars left out."""
    if isinstance(thing, Tensor) and thing.dim():
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, (list, tuple, dict)):
        [reachable(one, found) for one in (thing.values() if isinstance(thing, dict) else thing)]
    elif type(thing).__module__.startswith("compress.kv"):
        reachable({name: one for name, one in vars(thing).items() if name not in ("model", "cache", "policy")}, found)
    return found


@pytest.mark.parametrize(
    "methods",
    [
        [],
        [KV_INT(group_size=32)],
        [H2O(budget=20, decoding=True)],
        [Lopsided(budget=40, allocation="ada"), KV_INT(group_size=32)],
        [SNAPKV(budget=20, observed=4, allocation="global", decoding=True)],
        [METHODS["kvzip"](budget=20)],
        [SNAPKV(budget=60), KV_FP8(group_size=32, residual=0)],
        [METHODS["expected_attention"](budget=50, decoding=True), KV_INT(bits=8, group_size=32, residual=0)],
    ],
    ids=str,
)
def test_bytes_are_those_of_all_tensors(tiny, tokens, methods):
    model, ids, sizes = tiny("llama"), torch.cat(tokens(2, 120)), []
    for dtype in (torch.float32, torch.bfloat16):
        with attached(copy.deepcopy(model).to(dtype), methods) as attachment:
            cache = attachment.cache()
            for part in ids.split([110, 1, 1, 8], 1):
                read(attachment.model, cache, part)
                assert cache.nbytes == sum(reachable(cache, {}).values())
            sizes.append((cache.nbytes, cache.nbytes_16))
    if attachment.policy is None or attachment.policy.allocation == "uniform":  # bfloat16 may choose other heads
        assert sizes[0][1] == sizes[1][0] == sizes[1][1] <= sizes[0][0]


def test_fewer_bytes(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 600))
    full = 2 * 2 * 2 * 2 * 600 * 16 * 4  # layers, keys and values, rows, heads, positions, channels, bytes
    for methods, share in (
        ([], 1),
        ([SNAPKV(budget=0.25)], 0.25),
        ([H2O(budget=0.25, decoding=True)], 0.26),
        ([Lopsided(budget=0.25, allocation="ada")], 0.25),
        ([Lopsided(budget=0.25, allocation="global")], 0.25),
        ([SNAPKV(budget=0.25), KV_INT(bits=4, group_size=32, residual=0)], 0.046),
    ):
        with attached(model, methods) as attachment:
            cache = attachment.cache()
            read(model, cache, ids)
        assert share * full * 0.95 < cache.nbytes < share * full * 1.1
        rectangle = full / 600 * max(layer.length for layer in cache.own)
        assert not methods or not isinstance(methods[0], Lopsided) or cache.nbytes < 0.65 * rectangle


RECIPES = (
    "kv_fp8", "kv_int(bits=8)", "kv_int(bits=4, group_size=32, residual=5)", "kv_int(bits=2, value_bits=3)",
    "kv_int(bits=4, keys=token)", "knorm(budget=0.5)", "snapkv(budget=0.3), kv_int(bits=4, group_size=32, residual=0)",
    "kvzip(budget=0.5, allocation=uniform), kv_int(bits=4, rotate_keys=True)", "h2o(budget=100)",
)  # fmt: skip


@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("tokens_read", [20, 301, 512])
def test_bytes_follow_from_shapes(text, tokens_read, tiny, tokens):
    """As the cache of a real model holds them behind a prompt, but for its counters."""
    model = tiny("gemma3_text", layers=4, sliding_window=64, max_position_embeddings=1024).bfloat16()
    methods = methods_of(text)
    check_sized(methods)
    outline = copy.deepcopy(model).to("meta")
    with attached(model, methods) as attachment:
        cache = attachment.cache()
        read(model, cache, torch.cat(tokens(1, tokens_read)))
    held = {layer.number: sum(t.untyped_storage().nbytes() for t in layer.held) for layer in cache.filled}
    found = sizes(methods, outline, tokens_read)
    assert found.keys() == held.keys() and len(found) == 2
    for number, layer in found.items():
        assert layer.bytes == pytest.approx(held[number], abs=64)
        assert layer.positions == cache.layers[number].lengths.max()


def test_shared_budgets_count_as_equal_ones(tiny, tokens):
    model, methods = tiny("llama", max_position_embeddings=1024).bfloat16(), methods_of("kvzip(budget=0.5)")
    with attached(model, methods) as attachment:
        cache = attachment.cache()
        read(model, cache, torch.cat(tokens(1, 512)))
    assert len({layer.length for layer in cache.filled}) == 2, "layers keep different numbers"
    assert sum(layer.bytes for layer in sizes(methods, model, 512).values()) == pytest.approx(cache.nbytes, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipvl", "what zipvl.* keeps depends on the text"),
        ("xkv", "what xkv.* keeps depends on the text"),
        ("quest(budget=0.5)", "chooses what a token reads and not what is kept"),
        ("rtn(bits=4)", "is not a method of the cache"),
    ],
)
def test_sizes_that_do_not_follow_from_shapes(text, message):
    with pytest.raises(ValueError, match=message):
        check_sized(methods_of(text))
