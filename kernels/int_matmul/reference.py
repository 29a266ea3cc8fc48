"""Dequantise and multiply, in plain torch on any device: the reference for every other implementation."""

import torch
from torch import Tensor

from kernels.int_matmul import panels, tiles
from kernels.int_matmul.layout import Packed, unpack
from kernels.linear import linear


def dequantize(w: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [out, in] = scale * (code - zero), computed in float32 and rounded once to `dtype`.

    For `tiles`, the result has the weights that their kernel uses: at 4 bits with a zero point, the 16-bit offset is
    rounded.
    """
    if w.layout == "tiles":
        return tiles.dequantize(w).to(dtype)
    if w.layout == "panels":
        w = panels.to_rows(w)
    out, columns = w.shape
    codes, zero = unpack(w)
    centred = codes.view(out, -1, w.group_size).float() - zero[..., None].float()
    return (centred * w.scale[..., None].float()).view(out, columns).to(dtype)


def int_matmul(x: Tensor, w: Packed) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype."""
    return linear(x, dequantize(w, x.dtype))
