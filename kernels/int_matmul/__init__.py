"""`int_matmul`: y = x Wᵀ with W stored in 2 to 8 bits, group by group. See README.md for layouts, cost and limits."""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described
from kernels.int_matmul import panels, reference, tiles
from kernels.int_matmul.layout import BITS, Packed, pack, pack_bits, unpack, unpack_bits
from kernels.int_matmul.panels import panels_fit, to_panels
from kernels.int_matmul.reference import dequantize
from kernels.int_matmul.rows import look_up
from kernels.int_matmul.tiles import tiles_fit, to_tiles
from kernels.interpreter import triton_takes
from kernels.registry import ran

__all__ = [
    "BITS", "Packed", "dequantize", "int_matmul", "look_up", "pack", "pack_bits", "panels_fit", "tiles_fit",
    "to_panels", "to_rows", "to_tiles", "unpack", "unpack_bits",
]  # fmt: skip

IMPLS = ("auto", "reference", "cpu", "triton")


def int_matmul(x: Tensor, w: Packed, *, impl: str = "auto") -> Tensor:
    """Product with an integer-quantised weight.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in], packed (`Packed`).
        impl: "reference" (dequantise and multiply; any layout, any device), "cpu" (`panels`; or `tiles`, with the
            16-bit dtype that they were made for), "triton" (`rows`, on a CUDA GPU) or "auto".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist or does not support the tensors.
    """
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    here = f"not {w.layout} with {x.dtype} on"
    cpu = (w.layout == "panels" and panels_fit(w, x.dtype, x.device)) or (
        w.layout == "tiles" and x.dtype == w.scale.dtype and x.device.type == "cpu"
    )
    if impl == "cpu" and not cpu:
        raise ValueError(f"`impl` (='cpu') needs panels, or tiles of x's dtype, on a CPU, {here} {x.device}")
    triton = w.layout == "rows" and triton_takes(x.device) and x.dtype in panels.DTYPES
    if impl == "triton" and not triton:
        raise ValueError(
            f"`impl` (='triton') needs rows on a CUDA GPU, and triton installed, {here} {described(x.device)}"
        )
    if impl == "triton" or (impl == "auto" and triton and x.is_cuda):
        return _opaque(x, w, "triton")
    if impl == "reference" or not cpu:
        return _opaque(x, w, "reference")
    if w.layout == "panels":
        ran("int_matmul", f"cpu {native.isa(x.dtype, x.numel() > native.most_in_loops() * w.shape[1])}")
        return panels.matmul(x, w)
    tokens = x.numel() // w.shape[1]
    if 0 < tokens < tiles.CROSSOVER:
        ran("int_matmul", "cpu int4pack")
        return tiles.small(x, w.codes, w.scale, w.group_size, w.shape)
    return _opaque(x, w, "cpu dequantise")


def to_rows(w: Packed) -> Packed:
    """Any layout -> `rows`; exact, except that scales keep the dtype in which the layout stores them."""
    return {"rows": lambda w: w, "panels": panels.to_rows, "tiles": tiles.to_rows}[w.layout](w)


def _opaque(x: Tensor, w: Packed, use: str) -> Tensor:
    ran("int_matmul", use)
    return _op(x, w.codes, w.scale, w.zero, w.layout, w.bits, w.group_size, w.shape[0], w.shape[1], use)


@torch.library.custom_op("workbench::int_matmul", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    layout: str,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
    use: str,
) -> Tensor:
    # Opaque to the compiler on purpose: if the dequantisation were traced, freezing would fold it into a dense weight.
    w = Packed(layout, codes, scale, zero, bits, group_size, (out_features, in_features))
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], out_features)
    flat = x.reshape(-1, in_features)
    if use == "triton":
        from kernels.int_matmul import triton

        y = triton.int_matmul(flat, w)
    else:
        y = tiles.large(flat, w) if use == "cpu dequantise" else reference.int_matmul(flat, w)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, codes, scale, zero, layout, bits, group_size, out_features, in_features, use):
    return x.new_empty(*x.shape[:-1], out_features)
