"""Weights as indices into a small table: the layout, and the tables of NF4 and FP4."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.int_matmul.layout import pack_bits, unpack_bits

BITS = (1, 2, 3, 4, 5, 6, 8)  # of an index; the fast kernels read tables of 8 and 16 entries


class Codebook(NamedTuple):
    """A weight W[n, k] = table[code[n, k]] * scale[n, k // group_size].

    layout "rows": codes uint8 [out, ceil(in/8) * bits] as `kernels.int_matmul.layout.pack_bits` packs them;
                   table [2^bits] for the whole weight or [out, 2^bits], one for each row; scale [out, groups] or None.
    layout "panels": for the C++ kernel on a CPU, with one table for the whole weight: see `panels`.
    """

    layout: str
    codes: Tensor
    table: Tensor
    scale: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]  # (out, in)


def pack_codebook(
    codes: Tensor, table: Tensor, scale: Tensor | None = None, *, group_size: int | None = None
) -> Codebook:
    """Store indices and their table.

    Args:
        codes: [out, in] integers below the table's length.
        table: [2^bits], or [out, 2^bits] for one table per row, bits in BITS; any floating dtype.
        scale: [out, groups], or None: the table holds the weights themselves.
        group_size: number of columns that share a scale; divides `in`; None: all. Ignored without scales.

    Raises:
        ValueError: a table, a group size or scales that cannot be stored, or indices beyond the table.
    """
    out, columns = codes.shape
    entries = table.shape[-1]
    if entries not in [1 << bits for bits in BITS] or table.dim() > 2 or (table.dim() == 2 and table.shape[0] != out):
        raise ValueError(f"`table` {tuple(table.shape)} must be [n] or [{out}, n] with n = 2^bits, bits in {BITS}")
    group_size = columns if group_size is None or scale is None else group_size
    if group_size < 1 or columns % group_size:
        raise ValueError(f"`group_size` (={group_size}) must divide in_features (={columns})")
    if scale is not None and scale.shape != (out, columns // group_size):
        raise ValueError(
            f"`scale` {tuple(scale.shape)} must be [out, in / group_size] (={(out, columns // group_size)})"
        )
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < entries:
        raise ValueError(f"`codes` lie in [{int(codes.min())}, {int(codes.max())}]; the table has {entries} entries")
    bits = entries.bit_length() - 1
    return Codebook("rows", pack_bits(codes, bits), table, scale, bits, group_size, (out, columns))


def unpack_codebook(w: Codebook) -> Tensor:
    """Indices uint8 [out, in], from `rows`."""
    return unpack_bits(w.codes, w.bits, w.shape[1])


def normal_float(positive: int, negative: int) -> Tensor:
    """NormalFloat: quantiles of N(0, 1) at evenly spaced probabilities, `negative` below zero, zero, `positive` above;
    / max.

    The outermost probability leaves 1/2 (1/32 + 1/30) to each side (QLoRA, arXiv:2305.14314, appendix E).
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, n + 1, dtype=torch.float64)[:-1])
        for n in (positive, negative)
    )
    values = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (values / values.max()).float()


# As printed in QLoRA's appendix E, ascending: equals `normal_float(8, 7)` up to 2e-7; other programs round with these
# values.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
# A sign, two bits of exponent and one of mantissa in the order that bitsandbytes gives them; code 1 is its subnormal.
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12  # [16]
