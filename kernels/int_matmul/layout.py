"""How integer codes lie in memory: `rows`, the canonical layout, and `tiles`, the one that the CPU kernel reads."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)
TILE_GROUP_SIZES = (32, 64, 128, 256)


class Packed(NamedTuple):
    """An integer-quantised weight: w = scale * (code - zero).

    layout "rows":  codes uint8 [out, ceil(in/8) * bits]; scale [out, groups];
                    zero uint8 [out, ceil(groups/8) * bits], or None for the middle code 2^(bits-1).
    layout "tiles": codes uint8 [out, in/2] in the order of torch's int4 CPU kernel;
                    scale [groups, out, 2], a 16-bit pair (s, offset) with w = s (nibble - 8) + offset; zero as in
                    "rows". At 4 bits the nibble is the code and offset = (8 - zero) s; below, the nibble is
                    code - zero + 8 and offset = 0, which loses nothing.
    """

    layout: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]  # (out, in)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[rows, n] integers below 2^bits -> uint8 [rows, ceil(n/8) * bits]: eight codes to `bits` bytes, low bits first."""
    rows, n = codes.shape
    padded = torch.zeros(rows, -(-n // 8) * 8, dtype=torch.int64, device=codes.device)
    padded[:, :n] = codes
    shifts = torch.arange(8, device=codes.device) * bits
    words = (padded.view(rows, -1, 8) << shifts).sum(-1)  # [rows, n/8], 8*bits <= 64 bits each
    byte_shifts = torch.arange(bits, device=codes.device) * 8
    return ((words[..., None] >> byte_shifts) & 255).to(torch.uint8).view(rows, -1)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [rows, n]."""
    rows = packed.shape[0]
    if bits == 8:
        return packed[:, :n]
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).view(rows, -1)[:, :n]
    if bits == 2:
        return torch.stack([packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6], -1).view(rows, -1)[:, :n]
    triples = packed.view(rows, -1, bits)
    codes = []
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = triples[..., byte] >> shift
        if shift + bits > 8:
            code = code | (triples[..., byte + 1] << (8 - shift))  # uint8 drops what lies above
        codes.append(code & ((1 << bits) - 1))
    return torch.stack(codes, -1).view(rows, -1)[:, :n]


def pack(codes: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, group_size: int) -> Packed:
    """Store codes in the canonical layout.

    Args:
        codes: [out, in] integers in [0, 2^bits).
        scale: [out, groups].
        zero: [out, groups] integers in [0, 2^bits), or None (symmetric).
        bits: one of 2, 3, 4, 5, 6, 8.
        group_size: columns that share a scale; divides `in`.

    Raises:
        ValueError: bits or group_size that cannot be stored.
    """
    if bits not in BITS:
        raise ValueError(f"`bits` (={bits}) must be one of {', '.join(map(str, BITS))}")
    out, columns = codes.shape
    if columns % group_size or scale.shape != (out, columns // group_size):
        raise ValueError(f"`scale` {tuple(scale.shape)} must be [out, in / group_size] of {(out, columns)}, {group_size}")
    packed_zero = None if zero is None else pack_bits(zero, bits)
    return Packed("rows", pack_bits(codes, bits), scale, packed_zero, bits, group_size, (out, columns))


def unpack(w: Packed) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, in] and zero points uint8 [out, groups] ([1, 1] when symmetric), out of either layout, exactly."""
    groups = w.shape[1] // w.group_size
    zero = torch.full((1, 1), 1 << (w.bits - 1), dtype=torch.uint8, device=w.codes.device)
    if w.zero is not None:
        zero = unpack_bits(w.zero, w.bits, groups)
    if w.layout == "rows":
        return unpack_bits(w.codes, w.bits, w.shape[1]), zero
    nibbles = tile_nibbles(w)
    if w.bits == 4:
        return nibbles, zero
    shift = (8 - zero).expand(w.shape[0], groups).repeat_interleave(w.group_size, 1)
    return nibbles - shift, zero


def tiles_fit(shape: tuple[int, int], bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Can torch's int4 CPU kernel take this weight with activations of this dtype?"""
    out, columns = shape
    return (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float16)
        and bits <= 4
        and group_size in TILE_GROUP_SIZES
        and columns % group_size == 0
        and out % 16 == 0
    )


def to_tiles(w: Packed, dtype: torch.dtype) -> Packed:
    """`rows` -> `tiles` for activations of `dtype`; codes of 2 and 3 bits take the place of 4 there."""
    codes, zero = unpack(w)
    scale, shift = w.scale.float(), 8 - zero.float()
    if w.bits < 4:
        codes = codes.to(torch.int32) + shift.to(torch.int32).expand(scale.shape).repeat_interleave(w.group_size, 1)
    offset = shift * scale if w.bits == 4 else torch.zeros_like(scale)  # [out, groups]
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    pair = torch.stack([scale, offset], -1).transpose(0, 1).to(dtype).contiguous()  # [groups, out, 2]
    return Packed("tiles", tiles, pair, w.zero, w.bits, w.group_size, w.shape)


def to_rows(w: Packed) -> Packed:
    """`tiles` -> `rows`, exactly: the inverse of `to_tiles`; scales come back in the tiles' dtype."""
    return Packed("rows", pack_bits(unpack(w)[0], w.bits), w.scale[..., 0].t().contiguous(), w.zero, *w[4:])


def tile_nibbles(w: Packed) -> Tensor:
    """Nibbles uint8 [out, in] out of the `tiles` layout."""
    assert w.layout == "tiles"
    out, columns = w.shape
    flat = w.codes.reshape(-1)
    full = tile_height()
    parts, start = [], 0
    for height, count in ((full, out // full), (out % full, 1)):
        if height == 0 or count == 0:
            continue
        nibbles = flat[start : start + count * height * columns // 2].view(count, columns, height // 2)
        start += count * height * columns // 2
        both = torch.cat([nibbles & 15, nibbles >> 4], -1)  # [count, in, height]
        order = nibble_of_row(height)
        rows = both if order is None else both[..., order]
        parts.append(rows.transpose(1, 2).reshape(-1, columns))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


@cache
def tile_height() -> int:
    """Rows per tile: 64 with AVX-512, 32 otherwise; found by looking where row 32 of a probe goes."""
    probe = torch.zeros(64, 2, dtype=torch.int32)
    probe[32, 0] = 1
    return 64 if torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1).reshape(-1)[:32].any() else 32


@cache
def nibble_of_row(height: int) -> Tensor | None:
    """[height]: where each row of a tile lies among its low nibbles, then its high ones (None: in order).

    Read off two probes, because torch orders full and partial tiles differently, and by instruction set.
    """
    row = torch.arange(height, dtype=torch.int32)
    place = torch.zeros(height, dtype=torch.int64)
    for digit, shift in ((1, 0), (16, 4)):
        probe = ((row >> shift) & 15)[:, None].expand(height, 2).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1).reshape(-1)[: height // 2]
        place += digit * torch.cat([packed & 15, packed >> 4]).long()  # [position] -> row
    return None if torch.equal(place, torch.arange(height)) else place.argsort()
