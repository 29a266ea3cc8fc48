"""Rotated keys: attention does not change without codes, codes are those of the rotated keys, and all readers
agree."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS, apply, load_compressed, save_compressed
from compress.kv import attached, attachment_of
from compress.kv.precision import Precision
from compress.kv.storage import slabs_of
from kernels.kv_decode import dequantize_kv, quantize_kv
from kernels.kv_decode.ranked import Ranked
from kernels.registry import recording

KV_INT, QUEST, TIDALDECODE = (METHODS[name] for name in ("kv_int", "quest", "tidaldecode"))
ROTATED, NEAR = KV_INT(bits=4, group_size=32, residual=4, rotate_keys=True), {"rtol": 1e-3, "atol": 1e-3}


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def written_out(D: int) -> Tensor:
    """The normalised Sylvester matrix of a power of two: entry (i, j) is negative where i and j share an odd number of
    bits."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)]) / D**0.5


def test_codes_are_those_of_the_rotated_keys():
    """Also of what is appended; values are what they were, and keys come back as they were given."""
    k, v = torch.randn(2, 1, 2, 90, 16)
    k[..., 3] *= 30  # one channel far larger than the others
    keep, H = torch.ones(1, 2, 90, dtype=torch.bool), written_out(16)
    slab = slabs_of(k[:, :, :70], v[:, :, :70], keep[..., :70], Precision(8, 32, 5, True))[0]
    slab.append(k[:, :, 70:], v[:, :, 70:])
    expected = quantize_kv((k @ H)[:, :, :64], v[:, :, :64], 8, 32)
    stored = slab.kv()
    assert slab.coded == 64
    found_k, found_v = dequantize_kv(stored)
    coded_k, coded_v = dequantize_kv(expected)
    assert_close(found_v, torch.cat([coded_v, v[:, :, 64:]], 2))
    steps = expected.params_k[..., 0].float().amax()  # rounding of H may move a code by one
    assert (found_k[:, :, :64] - coded_k).abs().max() <= 1.01 * steps
    assert ((found_k[:, :, :64] - coded_k).abs() > 1e-4).float().mean() < 0.01
    assert_close(stored.tail_k, (k @ H)[:, :, 64:], rtol=1e-4, atol=1e-4)
    assert_close(slab.dense()[0], found_k @ H.T, rtol=1e-4, atol=1e-4)
    assert_close(slab.keys_from(66), k[:, :, 66:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("D", [2, 12, 34, 40, 64, 72, 96, 112, 128, 256])
def test_any_width_is_turned_by_an_orthogonal_matrix_that_is_its_own_inverse(D):
    turned = Precision(rotates=True).turned(torch.eye(D))
    assert_close(turned @ turned.T, torch.eye(D), atol=1e-5, rtol=0)
    assert_close(turned @ turned, torch.eye(D), atol=1e-5, rtol=0)
    assert turned.abs().max() < 0.9
    assert torch.equal(Precision().turned(turned), turned)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("methods", [[], [METHODS["snapkv"](budget=30, observed=4, allocation="ada", decoding=True)]])
def test_without_codes_nothing_changes(tiny, tokens, architecture, methods):
    """All positions in the residual: a padded batch, a prompt in chunks, single tokens, and several at once."""
    model, ids, found = tiny(architecture), torch.cat(tokens(2, 60)), []
    mask = (torch.arange(60) >= torch.tensor([[0], [9]])).long()
    for storage in (KV_INT(residual=100), KV_INT(residual=100, rotate_keys=True)):
        with attached(model, [*methods, storage]) as attachment:
            cache, at = attachment.cache(), 0
            for size in (30, 22, 1, 1, 1, 4, 1):
                logits = read(model, cache, ids[:, at : at + size], mask[:, : at + size])
                at += size
        found.append(logits)
    assert_close(found[1], found[0], **NEAR)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_kernel_and_the_plain_path_read_the_same(tiny, tokens, bits):
    """Codes meet rotated queries in the kernel; the plain path turns keys back."""
    model, ids, found = tiny("llama"), torch.cat(tokens(2, 75)), {}
    for by_kernel in (True, False):
        with attached(model, [KV_INT(bits=bits, group_size=32, residual=4, rotate_keys=True)]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids[:, :70])
            with recording() as ran:
                found[by_kernel] = torch.cat([read(model, cache, ids[:, i : i + 1]) for i in range(70, 75)], 1)
            assert ("kv_decode" in ran) == by_kernel and "hadamard" in ran
    assert_close(found[True], found[False], **NEAR)


def test_attention_reads_keys_rounded_in_the_rotated_basis(tiny, tokens):
    """Written out with matrices, from the exact keys of a plain cache."""
    model, ids, plain = tiny("llama"), tokens(1, 70)[0], DynamicCache()
    model(ids, past_key_values=plain)
    with attached(model, [ROTATED]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
    for layer, exact in zip(cache.own, plain.layers, strict=True):
        H = written_out(exact.keys.shape[-1])
        coded, _ = dequantize_kv(quantize_kv((exact.keys @ H)[:, :, :64], exact.values[:, :, :64], 4, 32))
        expected = torch.cat([coded @ H.T, exact.keys[:, :, 64:]], 2)
        found = layer.slabs[0].dense()[0]
        assert ((found - expected).abs() > 1e-3).float().mean() < 0.01  # a code may be rounded the other way


def set_of(reader) -> list[set[int]]:
    """The positions that the last token chose, by row and head; without its own."""
    page = reader.reading.page
    if reader.lists:
        chosen = reader.lists[0].listed() if isinstance(reader.lists[0], Ranked) else reader.lists[0]
        rows = zip(chosen.indices.flatten(0, 1), chosen.lengths.flatten(), strict=True)
        return [set(row[: int(n) - 1].tolist()) for row, n in rows]
    rows = reader.last[0].flatten(0, 2)
    return [{n for p in row.tolist() if p >= 0 for n in range(page * p, page * p + page) if n < 84} for row in rows]


@pytest.mark.parametrize("reading", [QUEST(page=4, full_layers=0, budget=0.3), TIDALDECODE(full_layers=0, again=0.0)])
def test_readings_choose_what_they_choose_of_keys_that_are_not_rotated(tiny, tokens, reading):
    """Whichever path reads."""
    model, ids, step, found = tiny("llama"), torch.cat(tokens(2, 80)), torch.cat(tokens(2, 5, seed=4)), []
    for storage in (KV_INT(residual=100), KV_INT(residual=100, rotate_keys=True)):
        for by_kernel in (True, False):
            with attached(model, [reading, storage]) as attachment:
                cache = attachment.cache()
                cache.by_kernel = by_kernel
                read(model, cache, ids)
                logits = [read(model, cache, step[:, i : i + 1]) for i in range(5)]
                found.append((torch.cat(logits, 1), set_of(cache.reader)))
    for logits, read_positions in found[1:]:
        assert_close(logits, found[0][0], rtol=1e-4, atol=1e-4)
        assert read_positions == found[0][1]


def test_saved_with_the_recipe_and_said(tiny, tokens, tmp_path):
    model, ids = tiny("llama"), tokens(1, 80)[0]
    result = apply([METHODS["rtn"](bits=8, group_size=16), ROTATED], copy.deepcopy(model))
    assert "rotate_keys=True" in str(ROTATED) and "rotate_keys" not in str(KV_INT())
    save_compressed(result, tmp_path / "saved")
    loaded = load_compressed(tmp_path / "saved")
    assert attachment_of(loaded).storage == ROTATED
    found = [one(ids, use_cache=True).past_key_values for one in (result.model, loaded)]
    for a, b in zip(*(cache.own for cache in found), strict=True):
        assert a.slabs[0].precision.rotates and torch.equal(a.slabs[0].kv().k, b.slabs[0].kv().k)
