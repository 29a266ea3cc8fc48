"""Values in fewer bits than keys, and turned: what is stored, what it takes, and that all readers agree."""

import pytest
import torch
from torch.testing import assert_close

from compress import METHODS
from compress.kv import attached
from compress.kv.precision import Precision
from compress.kv.storage import slabs_of
from kernels.kv_decode import KV, dequantize_kv, kv_decode, quantize_kv
from kernels.kv_decode.apart import kv_decode_apart
from kernels.kv_decode.layout import unpack

KV_INT = METHODS["kv_int"]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value_bits", [8, 4, 3, 2])
@pytest.mark.parametrize("group", [32, 64])
def test_values_have_bits_of_their_own(bits, value_bits, group):
    """Keys are those of a cache of one width; values use all their codes and are off by half a step at most."""
    k, v = torch.randn(2, 2, 3, 150, 16)
    cache = quantize_kv(k, v, bits, group, value_bits=value_bits)
    full = 150 // group * group
    assert cache.value_bits == value_bits and cache.v.shape == (2, 3, full // group, 16, group * value_bits // 8)
    back_k, back_v = dequantize_kv(cache)
    assert torch.equal(back_k, dequantize_kv(quantize_kv(k, v, bits, group))[0])
    assert torch.equal(back_v[:, :, full:], v[:, :, full:])
    step = cache.params_v[..., :1].float()
    assert torch.all((back_v - v)[:, :, :full].abs() <= step * 0.5 + 1e-4)
    assert set(unpack(cache.v, value_bits).unique().tolist()) <= set(range(2**value_bits))
    span = v[:, :, :full].amax(-1) - v[:, :, :full].amin(-1)
    assert torch.all(cache.params_v[..., 0].float() * (2**value_bits - 1) <= span * 1.05 + 0.05)


def test_codes_of_three_bits_come_back():
    codes = torch.randint(0, 8, (1, 1, 64, 16))
    codes[:, :, :, :2] = torch.tensor([0, 7])
    cache = quantize_kv(torch.zeros(1, 1, 64, 16), codes.float(), 4, 32, value_bits=3)
    assert torch.equal(dequantize_kv(cache)[1], codes.float())


def test_heads_of_their_own_lengths_and_widths_that_no_layout_has():
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    cache, lengths = quantize_kv(k, v, 4, 32, value_bits=3), torch.full((1, 2), 70)
    y = kv_decode(q, cache, lengths)
    assert_close(y, kv_decode(q, KV(*dequantize_kv(cache)), lengths, impl="reference"), rtol=1e-3, atol=1e-4)
    apart = [quantize_kv(k[:, h : h + 1], v[:, h : h + 1], 4, 32, value_bits=3) for h in (0, 1)]
    starts = [torch.zeros(1, 1, dtype=torch.int32)] * 2
    assert_close(kv_decode_apart(q, apart, starts, scale=0.25), y)
    with pytest.raises(ValueError, match=r"`value_bits` \(=5\) must be 8, 4, 3, 2, or 0"):
        quantize_kv(k, v, 4, 32, value_bits=5)


@pytest.mark.parametrize("value_bits", [0, 3])
def test_turned_values_come_back(value_bits):
    """Appended and decoded as one whole; exact positions are the values that were given."""
    k, v = torch.randn(2, 2, 3, 150, 16)
    v[..., 5] *= 20  # a channel that rotation spreads over all
    keep = torch.ones(2, 3, 150, dtype=torch.bool)
    plain, turned = (
        Precision(4, 32, 5, rotates=True, value_bits=value_bits, rotates_values=on) for on in (False, True)
    )
    slab = slabs_of(k[:, :, :70], v[:, :, :70], keep[..., :70], turned)[0]
    slab.append(k[:, :, 70:], v[:, :, 70:])
    whole = slabs_of(k, v, keep, turned)[0]
    for a, b in zip(slab.tensors, whole.tensors, strict=True):
        assert_close(a.view, b.view)
    back = slab.dense()[1]
    assert_close(back[:, :, 128:], v[:, :, 128:], rtol=1e-4, atol=1e-4)
    unturned = slabs_of(k, v, keep, plain)[0].dense()[1]
    assert 0 < (back - v).square().mean() < 0.6 * (unturned - v).square().mean()
    q = torch.randn(2, 6, 1, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, *slab.dense(), scale=0.3, enable_gqa=True)
    assert_close(slab.attend(q, scale=0.3, softcap=None)[0], expected, rtol=1e-3, atol=1e-3)


def test_bytes_of_a_cache_are_those_of_its_codes():
    k, v = torch.randn(2, 1, 2, 128, 64)
    keep = torch.ones(1, 2, 128, dtype=torch.bool)

    def nbytes(value_bits: int) -> int:
        slab = slabs_of(k, v, keep, Precision(4, 64, 0, value_bits=value_bits, rotates_values=True))[0]
        return sum(one.buffer.nbytes for one in slab.codes)

    per_position = 32 + 4 + 4  # a key, its share of the scales of a group of 64, and the scale of a value
    for value_bits, stored in ((0, 32), (4, 32), (3, 24), (2, 16)):
        assert nbytes(value_bits) == 2 * 128 * (per_position + stored)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_without_codes_turned_values_change_nothing(tiny, tokens, architecture):
    """All positions in the residual: what attention sums up is turned back, in a prompt and behind it."""
    model, ids, found = tiny(architecture), torch.cat(tokens(2, 60)), []
    for turned in (False, True):
        with attached(model, [METHODS["knorm"](budget=0.5), KV_INT(residual=100, rotate_values=turned)]) as attachment:
            cache = attachment.cache()
            model(ids[:, :50], past_key_values=cache)
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(50, 60)]
            found.append(torch.cat(steps, 1))
    assert_close(*found, rtol=1e-3, atol=1e-3)
