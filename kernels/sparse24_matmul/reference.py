"""Decompress and multiply, in plain torch on any device: the reference for the libraries."""

from torch import Tensor

from kernels.linear import linear
from kernels.sparse24_matmul.layout import Sparse24, decompress24


def sparse24_matmul(x: Tensor, w: Sparse24) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype."""
    return linear(x, decompress24(w).to(x.dtype))
