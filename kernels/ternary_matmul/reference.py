"""Decode and multiply, in plain torch on any device."""

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.ternary_matmul.layout import Ternary, decode_symbols


def decode(w: Ternary) -> Tensor:
    """W [out, in] in float32."""
    symbols = decode_symbols(w)
    low, high = w.low.float()[:, None], w.high.float()[:, None]
    return torch.where(symbols == 1, low, 0.0) + torch.where(symbols == 2, high, 0.0)


def ternary_matmul(x: Tensor, w: Ternary) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype."""
    return linear(x, decode(w).to(x.dtype))
