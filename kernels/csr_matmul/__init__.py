"""`csr_matmul`: y = x Wᵀ, where the few nonzero weights of W are stored row by row. See README.md."""

import torch
from torch import Tensor

from kernels.csr_matmul import library, reference
from kernels.csr_matmul.layout import Csr, to_csr
from kernels.registry import ran

__all__ = ["Csr", "csr_matmul", "to_csr"]


def csr_matmul(x: Tensor, w: Csr, *, impl: str = "auto") -> Tensor:
    """Product with a sparse weight.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in], in compressed rows (`Csr`).
        impl: "reference" (look up and add; any device), "library" (torch's product of compressed rows in float32: MKL
            on a CPU, cuSPARSE on a GPU) or "auto": "library".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    if impl not in ("auto", "reference", "library"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'library'")
    use = "reference" if impl == "reference" or not x.numel() or not w.values.numel() else "library"
    ran("csr_matmul", use)
    return _op(x, w.values, w.columns, w.offsets, w.shape[0], w.shape[1], use)


@torch.library.custom_op("workbench::csr_matmul", mutates_args=())
def _op(
    x: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, out_features: int, in_features: int, use: str
) -> Tensor:
    # Opaque to the compiler, which cannot trace sparse tensors.
    w = Csr(values, columns, offsets, (out_features, in_features))
    flat = x.reshape(-1, in_features)
    y = reference.csr_matmul(flat, w) if use == "reference" else library.csr_matmul(flat, w)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, values, columns, offsets, out_features, in_features, use):
    return x.new_empty(*x.shape[:-1], out_features)
