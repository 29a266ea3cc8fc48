"""The layouts of integer codes in memory: `rows` is the canonical one; `panels` and `tiles`, for CPUs, are made from
it."""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)


class Packed(NamedTuple):
    """An integer-quantised weight: w = scale * (code - zero).

    layout "rows":   codes uint8 [out, ceil(in/8) * bits]; scale [out, groups];
                     zero uint8 [out, ceil(groups/8) * bits], or None for the middle code 2^(bits-1).
    layout "panels": codes int32 [out/16, in/8, 16], nibbles code - middle + 8; of 2, 3, 5 and 6 bits
                     uint8 [out/16, in/16, 32 * bits], bit planes; of 8 bits int8 [out/16, in/8, 8 * 16], code - middle;
                     scale [out/16, groups, 16]; zero int8 alike, zero - middle, or None. `out` is rounded up to 16.
                     See `panels`.
    layout "tiles":  codes uint8 [out, in/2] in the order of torch's int4 CPU kernel;
                     scale [groups, out, 2], a 16-bit pair (s, offset) with w = s (nibble - 8) + offset; zero as in
                     "rows". At 4 bits the nibble is the code and offset = (8 - zero) s; below, the nibble is
                     code - zero + 8 and offset = 0, which loses nothing. See `tiles`.
    """

    layout: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]  # (out, in)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[rows, n] integers below 2^bits -> uint8 [rows, ceil(n/8) * bits]: eight codes in `bits` bytes, low bits
    first."""
    rows, n = codes.shape
    if 8 % bits == 0:  # each byte holds whole codes: no wide integers are needed
        small = torch.zeros(rows, -(-n // 8) * 8, dtype=torch.uint8, device=codes.device)
        small[:, :n] = codes
        packed = small[:, :: 8 // bits].clone()
        for place in range(1, 8 // bits):
            packed |= small[:, place :: 8 // bits] << (place * bits)
        return packed
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
            code = code | (triples[..., byte + 1] << (8 - shift))  # uint8 drops the higher bits
        codes.append(code & ((1 << bits) - 1))
    return torch.stack(codes, -1).view(rows, -1)[:, :n]


def pack(codes: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, group_size: int) -> Packed:
    """Store codes in the canonical layout.

    Args:
        codes: [out, in] integers in [0, 2^bits).
        scale: [out, groups].
        zero: [out, groups] integers in [0, 2^bits), or None (symmetric).
        bits: one of 2, 3, 4, 5, 6, 8.
        group_size: number of columns that share a scale; divides `in`.

    Raises:
        ValueError: bits or group_size that cannot be stored.
    """
    if bits not in BITS:
        raise ValueError(f"`bits` (={bits}) must be one of {', '.join(map(str, BITS))}")
    out, columns = codes.shape
    if columns % group_size or scale.shape != (out, columns // group_size):
        raise ValueError(
            f"`scale` {tuple(scale.shape)} must be [out, in / group_size] of {(out, columns)}, {group_size}"
        )
    packed_zero = None if zero is None else pack_bits(zero, bits)
    return Packed("rows", pack_bits(codes, bits), scale.contiguous(), packed_zero, bits, group_size, (out, columns))


def unpack(w: Packed) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, in] and zero points uint8 [out, groups] ([1, 1] when symmetric), from `rows`."""
    assert w.layout == "rows"
    zero = torch.full((1, 1), 1 << (w.bits - 1), dtype=torch.uint8, device=w.codes.device)
    if w.zero is not None:
        zero = unpack_bits(w.zero, w.bits, w.shape[1] // w.group_size)
    return unpack_bits(w.codes, w.bits, w.shape[1]), zero
