"""Exact sums of products of codes, group by group, in plain torch: the reference for every other implementation."""

import torch
from torch import Tensor

from kernels.int_matmul import Packed, to_rows, unpack
from kernels.lut_matmul import Codebook, unpack_codebook
from kernels.lut_matmul import to_rows as codebook_rows
from kernels.w4a8_matmul.groups import common_group, holds_integers
from kernels.w8a8_matmul import quantize_rows
from kernels.w8a8_matmul.reference import product


def w4a8_matmul(
    x: Tensor,
    w: Packed | Codebook,
    x_bits: int,
    x_group: int | None,
    x_scale: Tensor | None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype: float32 sums of scale · step · (sum over a group, exact for
    integers)."""
    codes, step = rounded(x, x_bits, x_group, x_scale, x_wide, x_order, x_float)
    return multiplied(codes, step, w, x.dtype)


def multiplied(codes: Tensor, step: Tensor, w: Packed | Codebook, dtype: torch.dtype) -> Tensor:
    """y [tokens, out] of codes [tokens, in] and steps [tokens, groups]."""
    weights, zero, scale = integers_of(w)
    wide = w.shape[1] // step.shape[1]  # columns that share a step
    group = common_group(w, wide)
    y = torch.zeros(codes.shape[0], w.shape[0], device=codes.device)
    for start in range(0, w.shape[1], group):
        columns, g = slice(start, start + group), start // w.group_size
        sums = product(codes[:, columns], weights[:, columns])  # [tokens, out], int32, or float32 for float8
        if zero is not None:
            total = (codes if codes.dtype == torch.int8 else codes.float())[:, columns].sum(1, dtype=sums.dtype)
            sums = sums - total[:, None] * zero[:, g]
        y += sums.float() * scale[:, g].float() * step[:, start // wide, None]
    return y.to(dtype)


def rounded(
    x: Tensor,
    x_bits: int,
    x_group: int | None,
    x_scale: Tensor | None = None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes [tokens, in], int8 or float8_e4m3fn, in the order of W's columns, and steps [tokens, in / x_group]."""
    x = x if x_order is None else x.index_select(-1, x_order)
    if x_float:
        return quantize_rows(x, torch.float8_e4m3fn, scale=x_scale, block=x_group)
    border = x_wide * (x_group or x.shape[-1])
    parts = []
    for bits, columns, groups in (8, slice(border), slice(x_wide)), (x_bits, slice(border, None), slice(x_wide, None)):
        part = x[..., columns]
        scale = x_scale if x_scale is None or x_scale.numel() == 1 else x_scale.flatten()[groups]
        if part.shape[-1]:
            parts.append(quantize_rows(part, torch.int8, scale=scale, block=x_group, bits=bits))
    codes, steps = zip(*parts, strict=True)
    return torch.cat(codes, -1), torch.cat(steps, -1)


def integers_of(w: Packed | Codebook) -> tuple[Tensor, Tensor | None, Tensor]:
    """(integers int8 [out, in], offset to subtract int32 [out, groups] or None, scale [out, groups]).

    Raises:
        ValueError: the table has values that are not integers from -127 to 127.
    """
    if isinstance(w, Codebook):
        if not holds_integers(w.table):
            raise ValueError(
                "`w` is a codebook whose table does not hold integers from -127 to 127; lut_matmul takes it"
            )
        w = codebook_rows(w) if w.layout == "panels" else w
        return w.table[unpack_codebook(w).long()].to(torch.int8), None, w.scale
    w = to_rows(w)
    codes, zero = unpack(w)
    middle = 1 << (w.bits - 1)
    centred = (codes.to(torch.int16) - middle).to(torch.int8)
    return centred, None if w.zero is None else zero.int() - middle, w.scale
