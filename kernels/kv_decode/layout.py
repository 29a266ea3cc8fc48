"""The layout of keys and values: not quantised, or in 8 (integers or e4m3), 4 or 2 bits with a 16-bit tail. See
README.md."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUPS = (32, 64, 128)
VALUE_BITS = (8, 4, 3, 2)  # possible bits of the values' codes, independent of the keys'
LARGEST_E4M3 = 448.0  # largest value of float8_e4m3fn


class KV(NamedTuple):
    """Keys and values of one layer. Positions are counted over S, then over the tail's R.

    All tensors may be slices of larger, preallocated ones: strides are free except for the last dimension, or the last
    two of quantised v, params_k and params_v.

    bits 16: k, v [B, H_kv, S, D], in the dtype of the queries (float32 too); no tail.
    bits 8:  k uint8 [B, H_kv, S, D]; v uint8 [B, H_kv, S / group, D, group]: within a group, channel by channel.
    bits 4:  k uint8 [B, H_kv, S, D / 2]: channel i in the low nibble of byte i, channel i + D / 2 in its high one;
             v uint8 [B, H_kv, S / group, D, group / 2]: position i of the group low, i + group / 2 high.
    bits 2:  likewise in quarters: k uint8 [B, H_kv, S, D / 4], channel i + j D / 4 in bits 2j and 2j + 1 of byte i.
    values:  may have codes of fewer bits than keys, v uint8 [B, H_kv, S / group, D, group * value_bits / 8]; codes of 3
             bits are stored as their two low bits, as for bits 2, followed by the group's high bits in eighths.
    float8:  bits 8, where bytes are the bits of float8_e4m3fn (none may be NaN) instead of integers.

    params_k: bfloat16 [B, H_kv, S / group, D, 2], pairs (scale, offset): key = scale * code + offset; or, for keys by
        token, [B, H_kv, S, 2], one pair per position.
    params_v: bfloat16 [B, H_kv, S, 2], likewise, one pair per position.
        For float8 both are float32 [B, H_kv, S / group], one scale for a group of positions of a head: key = scale *
        code, value = scale * code. A scale per head or per tensor is the same number in all groups.
    tail_k, tail_v: [B, H_kv, R, D] in the dtype of the queries, or None: positions that are not quantised yet, which
        follow position S - 1.
    group: number of positions that share a key's scale: 32, 64 or 128; divides S. Only with codes.
    """

    k: Tensor
    v: Tensor
    params_k: Tensor | None = None
    params_v: Tensor | None = None
    tail_k: Tensor | None = None
    tail_v: Tensor | None = None
    bits: int = 16
    group: int = 0

    @property
    def float8(self) -> bool:
        """Are codes float8_e4m3fn, with scales alone?"""
        return self.params_k is not None and self.params_k.dim() == 3

    @property
    def by_token(self) -> bool:
        """Does each position have one scale for its whole key?"""
        return self.params_k is not None and self.params_k.dim() == 4

    @property
    def value_bits(self) -> int:
        """Bits of the values' codes, which may be fewer than the keys'."""
        return self.bits if self.bits == 16 else self.v.shape[-1] * 8 // self.group

    @property
    def positions(self) -> int:
        """S + R"""
        return self.k.shape[2] + (0 if self.tail_k is None else self.tail_k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors: codes, parameters, tail."""
        return sum(t.numel() * t.element_size() for t in self[:6] if t is not None)


def gathered(cache: KV, indices: Tensor, dtype: torch.dtype) -> KV:
    """The positions `indices` [B, H_kv, n] of a cache side by side, dequantised; entries out of range are clamped to
    the nearest position."""
    at = indices.long().clamp(0, max(cache.positions - 1, 0))[..., None]
    k, v = (x.gather(2, at.expand(*at.shape[:3], x.shape[-1])) for x in dequantize_kv(cache, dtype))
    return KV(k, v)


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The exact attention over several parts of a cache, computed from the attention over each part.

    The softmax over a union is the mean of the softmaxes over its parts, weighted by their sums of exponentials (Lean
    Attention, Sanovar et al., 2024, arXiv:2405.10480, section 3).

    Args:
        parts: (y [B, H_q, T_q, D], lse [B, H_q, T_q]) of each part, as `kv_decode(..., return_lse=True)` gives them.

    Returns:
        y, in the dtype of the parts, and lse, in float32, over all parts; zeros and -inf for queries for which no part
        has a position.
    """
    lse = torch.stack([one for _, one in parts])
    whole = lse.logsumexp(0)
    weights = (lse - whole.masked_fill(whole == -torch.inf, 0)).exp()  # [parts, B, H_q, T_q]
    y = sum(weight[..., None] * one.float() for weight, (one, _) in zip(weights, parts, strict=True))
    return y.to(parts[0][0].dtype), whole


def quantize_kv(
    k: Tensor,
    v: Tensor,
    bits: int,
    group: int = 64,
    *,
    value_bits: int = 0,
    by_token: bool = False,
    symmetric: bool = False,
) -> KV:
    """Keys per channel and group of positions, values per position, asymmetric (KIVI, arXiv:2402.02750, section 3.2).

    The last S % group positions are not quantised and form the tail. Scales and offsets are rounded outwards to
    bfloat16 before the codes are chosen, so every error is at most half a scale. KIVI gives values a scale per 32
    channels; here one scale serves all D channels, because the kernel multiplies it into the probabilities.

    Args:
        k, v: [B, H_kv, S, D], any floating dtype; values may have another D than keys.
        bits: 8, 4 or 2.
        group: 32, 64 or 128.
        value_bits: bits of the values: 8, 4, 3 or 2; 0: as many as for keys.
        by_token: quantise keys per position, too, with one scale for all D channels.
        symmetric: keys on a grid around 0 (-8 to 7 in 4 bits), as in FireQ (arXiv:2505.20839); else on a grid from the
            smallest to the largest key.

    Raises:
        ValueError: bits, group or D that the layout does not have.
    """
    if bits not in (8, 4, 2):
        raise ValueError(f"`bits` (={bits}) must be 8, 4 or 2; for 16 make `KV(k, v)`")
    if value_bits not in (0, *VALUE_BITS):
        choices = ", ".join(map(str, VALUE_BITS))
        raise ValueError(f"`value_bits` (={value_bits}) must be {choices}, or 0 for those of keys")
    if group not in GROUPS:
        raise ValueError(f"`group` (={group}) must be one of {', '.join(map(str, GROUPS))}")
    if k.shape[-1] * bits % 8:
        raise ValueError(
            f"`k` {tuple(k.shape)} must have a multiple of {8 // bits} channels to be stored in {bits} bits"
        )
    B, H, S, D = k.shape
    full = S // group * group
    grouped = k[:, :, :full] if by_token else k[:, :, :full].reshape(B, H, full // group, group, D)
    k_codes, params_k = (_encode_around_0 if symmetric else _encode)(
        grouped, 3, bits
    )  # params [B, H, groups, 1, D, 2], or [B, H, full, 1, 2]
    v_codes, params_v = _encode(v[:, :, :full], 3, value_bits or bits)  # params [B, H, full, 1, 2]
    v_codes = v_codes.view(B, H, full // group, group, v.shape[3]).transpose(3, 4)
    tail = (k[:, :, full:].clone(), v[:, :, full:].clone()) if full < S else (None, None)
    return KV(
        _pack(k_codes.view(B, H, full, D), bits),
        _pack(v_codes, value_bits or bits),
        params_k.squeeze(3),
        params_v.squeeze(3),
        *tail,
        bits,
        group,
    )


def quantize_kv_float8(k: Tensor, v: Tensor, group: int = 64, *, scale: float | None = None) -> KV:
    """Keys and values in float8_e4m3fn (Micikevicius et al., 2022, arXiv:2209.05433), with a scale for each group of
    positions of a head.

    The last S % group positions are not quantised and form the tail. The error of an element is at most a sixteenth of
    it, or scale / 1024 if that is more.

    Args:
        k, v: [B, H_kv, S, D], any floating dtype; values may have another D than keys.
        group: 32, 64 or 128.
        scale: one scale for all keys and values, as vLLM's `k_scale` and `v_scale` (1.0 without calibration); elements
            beyond 448 times the scale are clipped. None: the largest magnitude of each group becomes code 448.

    Raises:
        ValueError: a group that the layout does not have, or a scale that is not positive.
    """
    if group not in GROUPS:
        raise ValueError(f"`group` (={group}) must be one of {', '.join(map(str, GROUPS))}")
    if scale is not None and not scale > 0:
        raise ValueError(f"`scale` (={scale}) must be positive, or None for one that fits each group")
    S = k.shape[2]
    full = S // group * group
    (k_codes, scale_k), (v_codes, scale_v) = (_encode_float8(x[:, :, :full], group, scale) for x in (k, v))
    tail = (k[:, :, full:].clone(), v[:, :, full:].clone()) if full < S else (None, None)
    return KV(k_codes.flatten(2, 3), v_codes.transpose(3, 4).contiguous(), scale_k, scale_v, *tail, 8, group)


def _encode_float8(x: Tensor, group: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [B, H, groups, group, D] and scales float32 [B, H, groups] of x [B, H, groups * group, D]."""
    grouped = x.float().unflatten(2, (x.shape[2] // group, group))
    if scale is None:
        largest = grouped.abs().amax((3, 4)) if grouped.numel() else grouped.new_zeros(grouped.shape[:3])
        scales = torch.where(largest > 0, largest / LARGEST_E4M3, 1)
    else:
        scales = grouped.new_full(grouped.shape[:3], scale)
    codes = (grouped / scales[..., None, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantize_kv(cache: KV, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """k, v [B, H_kv, S + R, D], computed in float32 and rounded once to `dtype`."""
    return dequantized_keys(cache, dtype), dequantized_values(cache, dtype)


def dequantized_keys(cache: KV, dtype: torch.dtype) -> Tensor:
    if cache.bits == 16:
        return cache.k.to(dtype)
    if cache.float8:
        scale = cache.params_k.repeat_interleave(cache.group, 2)[..., None]  # [B, H, S, 1]
        return _with_tail(from_float8(cache.k) * scale, cache.tail_k, dtype)
    scale, offset = cache.params_k.float().unsqueeze(3).unbind(-1)  # [B, H, groups, 1, D] each, or [B, H, S, 1]
    if cache.by_token:
        return _with_tail(torch.addcmul(offset, unpack(cache.k, cache.bits).float(), scale), cache.tail_k, dtype)
    groups = cache.v.shape[2]
    codes = unpack(cache.k, cache.bits).unflatten(2, (groups, cache.group)).float()
    return _with_tail(torch.addcmul(offset, codes, scale).flatten(2, 3), cache.tail_k, dtype)


def dequantized_values(cache: KV, dtype: torch.dtype) -> Tensor:
    if cache.bits == 16:
        return cache.v.to(dtype)
    if cache.float8:
        values = from_float8(cache.v) * cache.params_v[..., None, None]  # [B, H, groups, D, group]
        return _with_tail(values.transpose(3, 4).flatten(2, 3), cache.tail_v, dtype)
    pairs = cache.params_v.float().unflatten(2, (cache.v.shape[2], 1, cache.group))
    scale, offset = pairs.unbind(-1)  # [B, H, groups, 1, group] each
    values = torch.addcmul(offset, unpack(cache.v, cache.value_bits).float(), scale)  # [B, H, groups, D, group]
    return _with_tail(values.transpose(3, 4).flatten(2, 3), cache.tail_v, dtype)


def _with_tail(main: Tensor, tail: Tensor | None, dtype: torch.dtype) -> Tensor:
    return main.to(dtype) if tail is None else torch.cat([main.to(dtype), tail.to(dtype)], 2)


def from_float8(codes: Tensor) -> Tensor:
    """Bytes of float8_e4m3fn -> float32, exactly.

    Shifted left by seven bits, exponent and mantissa are those of a float16 that is 2^8 times too small.
    """
    wide = codes.to(torch.int16)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).view(torch.float16).float() * 256


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] from bytes [..., n * bits / 8]: low nibbles are the first half, low pairs the first quarter, and
    3 bits are stored as 2 and 1."""
    if bits == 8:
        return codes
    if bits == 3:
        low = codes.shape[-1] // 3 * 2
        return unpack(codes[..., :low], 2) | (unpack(codes[..., low:], 1) << 2)
    return torch.cat([(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    codes = codes.contiguous()
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack(codes >> 2, 1)], -1)
    packed, *more = codes.chunk(8 // bits, -1)
    for i, part in enumerate(more, 1):
        packed = packed | (part << i * bits)
    return packed


def _encode(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 like x, and bfloat16 (scale, offset) pairs [..., 2] that cover the range of x along `dim`."""
    x = x.float()
    low, high = x.aminmax(dim=dim, keepdim=True)
    levels = (1 << bits) - 1
    offset = _towards(low, -torch.inf)
    scale = _towards((high - offset.float()) / levels, torch.inf)
    scale = torch.where(scale > 0, scale, 1)  # all values are equal
    codes = ((x - offset.float()) / scale.float()).round_().clamp_(0, levels).to(torch.uint8)
    return codes, torch.stack([scale, offset], -1)


def _encode_around_0(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """`_encode` with an offset that makes the middle code 0."""
    x, middle = x.float(), 1 << (bits - 1)
    scale = _towards(x.abs().amax(dim, keepdim=True) / (middle - 1), torch.inf)
    scale = torch.where(scale > 0, scale, 1)
    codes = ((x / scale.float()).round_() + middle).clamp_(0, 2 * middle - 1).to(torch.uint8)
    return codes, torch.stack([scale, -middle * scale], -1)


def _towards(x: Tensor, limit: float) -> Tensor:
    """float32 -> bfloat16, rounded down (limit -inf) or up (inf)."""
    near = x.bfloat16()
    wrong = near.float() > x if limit < 0 else near.float() < x
    return torch.where(wrong, near.nextafter(torch.full_like(near, limit)), near)
