"""`ternary_matmul`: y = x Wᵀ with three different values in each row of W, coded in words of 16 bits. See README.md."""

import torch
from torch import Tensor

from kernels.registry import ran
from kernels.ternary_matmul import reference
from kernels.ternary_matmul.layout import P0, Ternary, decode_symbols, dictionary, encode
from kernels.ternary_matmul.reference import decode

__all__ = ["P0", "Ternary", "decode", "decode_symbols", "dictionary", "encode", "ternary_matmul"]


def ternary_matmul(x: Tensor, w: Ternary, *, impl: str = "auto") -> Tensor:
    """Product with a ternary weight in QMoE's code (arXiv:2310.16795, section 4).

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in] (`Ternary`).
        impl: "reference" (decode and multiply; any device) or "auto": "reference".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    if impl not in ("auto", "reference"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference'")
    ran("ternary_matmul", "reference")
    return _op(x, w.codes, w.counts, w.low, w.high, w.shape[1], w.p0)


@torch.library.custom_op("workbench::ternary_matmul", mutates_args=())
def _op(x: Tensor, codes: Tensor, counts: Tensor, low: Tensor, high: Tensor, in_features: int, p0: float) -> Tensor:
    # Opaque to the compiler on purpose: if the decoder were traced, freezing would fold it into a dense weight.
    w = Ternary(codes, counts, low, high, (len(counts), in_features), p0)
    return reference.ternary_matmul(x.reshape(-1, in_features), w).view(*x.shape[:-1], len(counts))


@_op.register_fake
def _(x, codes, counts, low, high, in_features, p0):
    return x.new_empty(*x.shape[:-1], len(counts))
