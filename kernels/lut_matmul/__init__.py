"""`lut_matmul`: y = x Wᵀ with W stored as indices into a table of 8 or 16 values. See README.md."""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described
from kernels.interpreter import triton_takes
from kernels.lut_matmul import panels, reference
from kernels.lut_matmul.layout import BITS, FP4, NF4, Codebook, normal_float, pack_codebook, unpack_codebook
from kernels.lut_matmul.panels import panels_fit, to_panels, to_rows
from kernels.lut_matmul.reference import dequantize, look_up
from kernels.registry import ran

__all__ = [
    "BITS", "FP4", "NF4", "Codebook", "dequantize", "look_up", "lut_matmul", "normal_float", "pack_codebook",
    "panels_fit", "to_panels", "to_rows", "unpack_codebook",
]  # fmt: skip

IMPLS = ("auto", "reference", "cpu", "triton")


def lut_matmul(x: Tensor, w: Codebook, *, impl: str = "auto") -> Tensor:
    """Product with a weight of table entries: NF4, FP4, SqueezeLLM (arXiv:2306.07629), any other codebook.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in], packed (`Codebook`).
        impl: "reference" (dequantise and multiply; any layout, any device), "cpu" (`panels`, see `to_panels`), "triton"
            (`rows`, on a CUDA GPU) or "auto".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist or does not support the tensors.
    """
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    triton = w.layout == "rows" and w.bits in (3, 4) and triton_takes(x.device) and x.dtype in panels.DTYPES
    if impl == "triton" and not triton:
        raise ValueError(
            f"`impl` (='triton') needs rows of 3 or 4 bits on a CUDA GPU, and triton installed, not {w.layout} of "
            f"{w.bits} bits with {x.dtype} on {described(x.device)}"
        )
    cpu = w.layout == "panels" and panels_fit(w, x.dtype, x.device)
    if impl == "cpu" and not cpu:
        raise ValueError(f"`impl` (='cpu') needs panels on a CPU, not {w.layout} with {x.dtype} on {x.device}")
    if cpu and impl != "reference":
        ran("lut_matmul", f"cpu {native.isa(x.dtype, x.numel() > native.most_in_loops() * w.shape[1])}")
        return panels.matmul(x, w)
    use = "triton" if impl == "triton" or (impl == "auto" and triton and x.is_cuda) else "reference"
    ran("lut_matmul", use)
    return _op(x, w.codes, w.table, w.scale, w.layout, w.bits, w.group_size, w.shape[0], w.shape[1], use)


@torch.library.custom_op("workbench::lut_matmul", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor | None,
    layout: str,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
    use: str,
) -> Tensor:
    # Opaque to the compiler on purpose: if the look-up were traced, freezing would fold it into a dense weight.
    w = Codebook(layout, codes, table, scale, bits, group_size, (out_features, in_features))
    flat = x.reshape(-1, in_features)
    if use == "triton":
        from kernels.lut_matmul import triton

        y = triton.lut_matmul(flat, w)
    else:
        y = reference.lut_matmul(flat, w)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, codes, table, scale, layout, bits, group_size, out_features, in_features, use):
    return x.new_empty(*x.shape[:-1], out_features)
