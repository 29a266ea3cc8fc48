"""Exact sums of products of codes, group by group, in plain torch: what every other implementation is held against."""

import torch
from torch import Tensor

from kernels.int_matmul import Packed, to_rows, unpack
from kernels.w4a8_matmul.groups import common_group
from kernels.w8a8_matmul import quantize_rows
from kernels.w8a8_matmul.reference import product


def w4a8_matmul(x: Tensor, w: Packed, x_bits: int, x_group: int | None, x_scale: Tensor | None) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype: float32 sums of scale · step · (an exact sum of a group)."""
    w = to_rows(w)
    codes, step = quantize_rows(x, torch.int8, scale=x_scale, block=x_group, bits=x_bits)  # step [tokens, in / x_group]
    weights, zero = unpack(w)
    middle = 1 << (w.bits - 1)
    weights = (weights.to(torch.int16) - middle).to(torch.int8)  # [out, in]
    group, wide = common_group(w, x_group), x_group or w.shape[1]
    y = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    for start in range(0, w.shape[1], group):
        columns, g = slice(start, start + group), start // w.group_size
        sums = product(codes[:, columns], weights[:, columns])  # [tokens, out], int32
        if w.zero is not None:
            total = codes[:, columns].sum(1, dtype=torch.int32)
            sums = sums - total[:, None] * (zero[:, g].int() - middle)
        y += sums.float() * w.scale[:, g].float() * step[:, start // wide, None]
    return y.to(x.dtype)
