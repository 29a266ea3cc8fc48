"""`int_matmul`: y = x Wᵀ with W stored in 2 to 8 bits, group by group. See README.md for layouts, cost and limits."""

import torch
from torch import Tensor

from kernels.int_matmul import cpu, reference
from kernels.int_matmul.layout import BITS, Packed, pack, tiles_fit, to_rows, to_tiles, unpack
from kernels.int_matmul.reference import dequantize
from kernels.registry import ran

__all__ = ["BITS", "Packed", "dequantize", "int_matmul", "pack", "tiles_fit", "to_rows", "to_tiles", "unpack"]


def int_matmul(x: Tensor, w: Packed, *, impl: str = "auto") -> Tensor:
    """Product with an integer-quantised weight.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in], packed (`Packed`).
        impl: "reference" (dequantise and multiply; any layout, any device), "cpu" (the `tiles` layout with the 16-bit
            dtype that it was made for) or "auto".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not fit, or an implementation that does not exist or cannot take these tensors.
    """
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    takes = w.layout == "tiles" and x.dtype == w.scale.dtype and x.device.type == "cpu"
    if impl not in ("auto", "reference", "cpu"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'cpu'")
    if impl == "cpu" and not takes:
        raise ValueError(f"`impl` (='cpu') needs tiles of x's dtype on a CPU, not {w.layout} with {x.dtype} on {x.device}")
    tokens = x.numel() // w.shape[1]
    if impl != "reference" and takes and 0 < tokens < cpu.CROSSOVER:
        ran("int_matmul", "cpu int4pack")
        return cpu.small(x, w.codes, w.scale, w.group_size, w.shape)
    use = "cpu dequantise" if impl != "reference" and takes and tokens else "reference"
    ran("int_matmul", use)
    return _op(x, w.codes, w.scale, w.zero, w.layout, w.bits, w.group_size, w.shape[0], w.shape[1], use)


@torch.library.custom_op("workbench::int_matmul", mutates_args=())
def _op(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None,
    layout: str, bits: int, group_size: int, out_features: int, in_features: int, use: str,
) -> Tensor:  # fmt: skip
    # Opaque to the compiler on purpose: were the dequantisation traced, freezing would fold it into a dense weight.
    w = Packed(layout, codes, scale, zero, bits, group_size, (out_features, in_features))
    flat = x.reshape(-1, in_features)
    y = cpu.large(flat, w) if use == "cpu dequantise" else reference.int_matmul(flat, w)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, codes, scale, zero, layout, bits, group_size, out_features, in_features, use):
    return x.new_empty(*x.shape[:-1], out_features)
