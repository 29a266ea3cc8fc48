"""The exact product of codes, in plain torch on any device: the reference for every other implementation."""

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.w8a8_matmul.layout import BLOCK, W8, quantize_rows, to_rows

EXACT = 1024  # columns of int8 products whose sum float32 holds exactly: 1024 * 2^14 = 2^24


def w8a8_matmul(x: Tensor, w: W8, x_scale: Tensor | None) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype."""
    w = to_rows(w)
    block = BLOCK if w.scale.dim() == 2 else None
    return multiplied(*quantize_rows(x, w.codes.dtype, scale=x_scale, block=block), w, x.dtype)


def multiplied(codes: Tensor, scale: Tensor, w: W8, dtype: torch.dtype) -> Tensor:
    """y [tokens, out] in this dtype, of codes [tokens, in] and their scale [tokens, 1], or [tokens, ceil(in / 128)] for
    a block-wise w; w in rows."""
    if w.scale.dim() == 1:
        return (product(codes, w.codes).float() * w.scale * scale).to(dtype)
    y = torch.zeros(codes.shape[0], w.shape[0], device=codes.device)
    for i in range(w.scale.shape[1]):
        columns = slice(i * BLOCK, (i + 1) * BLOCK)
        step = w.scale[:, i].repeat_interleave(BLOCK)[: w.shape[0]]  # [out]
        y += product(codes[:, columns], w.codes[:, columns]).float() * (step * scale[:, i : i + 1])
    return y.to(dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [tokens, in] bᵀ [in, out]: int32 and exact for int8, float32 for float8, whose products are exact."""
    if a.dtype != torch.int8:
        return linear(a.float(), b.float())
    wide = torch.float64 if a.device.type == "cuda" else torch.float32  # never TF32
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], EXACT):
        columns = slice(start, start + EXACT)
        total += linear(a[:, columns].to(wide), b[:, columns].to(wide)).to(torch.int32)
    return total
