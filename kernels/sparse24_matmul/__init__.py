"""`sparse24_matmul`: y = x Wᵀ with two of every four weights stored. See README.md for layouts, cost and limits."""

import torch
from torch import Tensor

from kernels.registry import ran
from kernels.sparse24_matmul import cuda, reference
from kernels.sparse24_matmul.layout import Sparse24, compress24, decompress24, library, to_library, to_rows

__all__ = ["Sparse24", "compress24", "decompress24", "library", "sparse24_matmul", "to_library", "to_rows"]


def sparse24_matmul(x: Tensor, w: Sparse24, *, impl: str = "auto") -> Tensor:
    """Product with a 2:4 sparse weight.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in], compressed (`Sparse24`).
        impl: "reference" (decompress and multiply; any layout, any device), "library" (cuSPARSELt or CUTLASS, whose
            layout `to_library` makes; x in w's 16-bit dtype on CUDA) or "auto": "library" if it supports these tensors.

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist or does not support the tensors.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    if impl not in ("auto", "reference", "library"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'library'")
    takes = w.layout != "rows" and x.dtype == w.values.dtype and x.device.type == "cuda"
    if impl == "library" and not takes:
        raise ValueError(
            f"`impl` (='library') needs a weight from `to_library` and x of its dtype on CUDA, "
            f"not {w.layout} in {w.values.dtype} with {x.dtype} on {x.device}"
        )
    use = w.layout if takes and impl != "reference" and x.numel() else "reference"
    ran("sparse24_matmul", use)
    return _op(x, w.values, w.places, w.layout, w.shape[0], w.shape[1], use)


@torch.library.custom_op("workbench::sparse24_matmul", mutates_args=())
def _op(
    x: Tensor, values: Tensor, places: Tensor | None, layout: str, out_features: int, in_features: int, use: str
) -> Tensor:
    w = Sparse24(layout, values, places, (out_features, in_features))
    flat = x.reshape(-1, in_features)
    y = reference.sparse24_matmul(flat, w) if use == "reference" else cuda.sparse24_matmul(flat, w)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, values, places, layout, out_features, in_features, use):
    return x.new_empty(*x.shape[:-1], out_features)
