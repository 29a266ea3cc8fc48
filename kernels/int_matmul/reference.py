"""Dequantise and multiply, in plain torch on any device: what every other implementation is held against."""

import torch
from torch import Tensor

from kernels.int_matmul.layout import Packed, tile_nibbles, unpack
from kernels.linear import linear


def dequantize(w: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [out, in] = scale * (code - zero), computed in float32 and rounded once to `dtype`.

    Tiles give the weights that their kernel multiplies by: at 4 bits with a zero point their 16-bit offset is rounded.
    """
    out, columns = w.shape
    if w.layout == "tiles":
        scale, offset = w.scale.float().permute(2, 1, 0)[..., None].contiguous()  # [out, groups, 1] each
        nibbles = tile_nibbles(w).view(out, -1, w.group_size).float()
        return torch.addcmul(offset, nibbles - 8, scale).view(out, columns).to(dtype)
    codes, zero = unpack(w)
    centred = codes.view(out, -1, w.group_size).float() - zero[..., None].float()
    return (centred * w.scale[..., None].float()).view(out, columns).to(dtype)


def int_matmul(x: Tensor, w: Packed) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype."""
    return linear(x, dequantize(w, x.dtype))
