"""`w4a8_matmul`: y = x Wᵀ with W in 2 to 8 bits by group and x rounded to 8 or 4 bits in the call. See README.md."""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described, too_old
from kernels.int_matmul import Packed
from kernels.interpreter import triton_takes
from kernels.lut_matmul import Codebook
from kernels.registry import ran
from kernels.w4a8_matmul import reference
from kernels.w4a8_matmul.groups import (
    check_groups,
    decoded_once,
    holds_integers,
    native_takes,
    tiles_take,
    triton_reads,
)

__all__ = ["fast", "holds_integers", "w4a8_matmul"]

IMPLS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def w4a8_matmul(
    x: Tensor,
    w: Packed | Codebook,
    *,
    x_bits: int = 8,
    x_group: int | None = None,
    x_scale: Tensor | None = None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Product of activations, rounded to 8 or 4 bits in the call, with an integer-quantised weight.

    A token that contains a NaN or an infinity gives a row of NaN.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty. Rounded symmetrically, see
            `kernels.w8a8_matmul.quantize_rows`: codes are -127 to 127, or -7 to 7.
        w: [out, in], packed (`kernels.int_matmul.Packed`): the same panels that `int_matmul` reads; or indices into
            one table of integers from -127 to 127 (`kernels.lut_matmul.Codebook`, `holds_integers`), with scales.
        x_bits: 8 or 4.
        x_group: number of columns of a token that share a step, or None for all of them. It divides `in`, and divides
            the weight's group_size or is a multiple of it.
        x_scale: None (steps are computed in the call), one positive float32 step for all of x, or with x_group one for
            each group of columns [in / x_group]; codes beyond the largest are clamped to it.
        x_wide: number of first groups of x_group columns with codes of 8 bits, independent of `x_bits`.
        x_order: int32 [in], for each column of W the column of x by which it is multiplied; each column once. Groups
            and steps refer to x in this order. None: the columns of x are in order.
        x_float: whether x is rounded to float8_e4m3fn in place of integers (`x_bits` 8, no `x_wide`). Only "triton", on
            a GPU that multiplies this type, and "reference" do that.
        impl: "reference" (exact integer sums; any layout, any device), "cpu" (panels, and tables of 16 values, on a
            CPU with AVX512-VNNI or NEON's dot products), "triton" (rows, with symmetric 4-bit codes) or "auto":
            "triton" on CUDA, "cpu" if it supports the weight, else "reference".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes, dtypes or groups that do not match, or an implementation that does not exist or does not
            support these tensors.
    """
    _check(x, w, x_bits, x_group, x_scale)
    _check_order(x, w, x_group, x_wide, x_order)
    if x_float and (x_bits != 8 or x_wide):
        raise ValueError(f"`x_float` goes with `x_bits` (={x_bits}) = 8 and `x_wide` (={x_wide}) = 0")
    use = _implementation(x, w, x_group, impl, x_float)
    zero, table = (None, w.table) if isinstance(w, Codebook) else (w.zero, None)
    if use == "cpu" and x.numel():
        matrices = native.matrices() if decoded_once(x, w) else ""
        ran("w4a8_matmul", f"cpu {matrices or native.integers(tiles_take(x, w, x_group))}")
        return torch.ops.workbench.panels_w4a8(
            x, w.codes, w.scale, zero, table, w.shape[0], x_bits, x_group or 0, x_scale, x_wide, x_order
        )
    use = use if use == "triton" and x.numel() else "reference"
    ran("w4a8_matmul", use)
    about = (w.layout, w.bits, w.group_size, list(w.shape), x_bits, x_group, x_wide, x_float, use)
    return _op(x, w.codes, w.scale, zero, table, x_scale, x_order, *about)


def fast(x: Tensor, w: Packed | Codebook, x_group: int | None, x_float: bool = False) -> bool:
    """Is there a kernel for these arguments on this device, so that "auto" does not use the reference?"""
    nested = x_group is None or not (w.shape[1] % x_group or (x_group % w.group_size and w.group_size % x_group))
    return nested and _implementation(x, w, x_group, "auto", x_float) != "reference"


def _check(x: Tensor, w: Packed | Codebook, x_bits: int, x_group: int | None, x_scale: Tensor | None) -> None:
    columns = w.shape[1]
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={columns})")
    if x.dtype not in DTYPES:
        raise ValueError(f"`x` (={x.dtype}) must be float32, bfloat16 or float16")
    if x_bits not in (4, 8):
        raise ValueError(f"`x_bits` (={x_bits}) must be 4 or 8")
    check_groups(w, x_group)
    if isinstance(w, Codebook) and (w.scale is None or w.table.dim() != 1):
        raise ValueError("`w` is a codebook without scales or with a table for each row; give one table, and scales")
    if x_scale is None:
        return
    sizes = (1,) if x_group is None else (1, columns // x_group)
    if x_scale.dtype != torch.float32 or x_scale.numel() not in sizes or x_scale.device != x.device:
        kind = f"{x_scale.dtype} {tuple(x_scale.shape)} on {x_scale.device}"
        raise ValueError(f"`x_scale` must be None or {' or '.join(map(str, sizes))} float32 on {x.device}, not {kind}")


def _check_order(x: Tensor, w: Packed | Codebook, x_group: int | None, x_wide: int, x_order: Tensor | None) -> None:
    columns = w.shape[1]
    groups = columns // (x_group or columns)
    if not 0 <= x_wide <= groups:
        raise ValueError(f"`x_wide` (={x_wide}) must lie between 0 and the groups of a token (={groups})")
    if x_order is not None and (
        x_order.dtype != torch.int32 or x_order.shape != (columns,) or x_order.device != x.device
    ):
        kind = f"{x_order.dtype} {tuple(x_order.shape)} on {x_order.device}"
        raise ValueError(f"`x_order` must be None or int32 [{columns}] on {x.device}, not {kind}")


def _implementation(x: Tensor, w: Packed | Codebook, x_group: int | None, impl: str, x_float: bool = False) -> str:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    here = f"not {w.layout} of {w.bits} bits in groups of {w.group_size} (x: {x_group}) on"
    cpu = native_takes(w, x_group) and x.device.type == "cpu" and native.w4a8_runs() and not x_float
    if impl == "cpu" and not cpu:
        needs = "needs panels, rounding to integers, a CPU with AVX512-VNNI or NEON's dot products, and the C++ kernels"
        raise ValueError(f"`impl` (='cpu') {needs}, {here} {x.device}")
    triton = triton_takes(x.device) and triton_reads(w, x_group) and too_old(x.device, float8=x_float) is None
    if impl == "triton" and not triton:
        needs = (
            "needs triton, CUDA (on a CPU: TRITON_INTERPRET=1) and symmetric 4-bit rows in groups of a multiple of 64"
        )
        raise ValueError(f"`impl` (='triton') {needs}, {here} {described(x.device, float8=x_float)}")
    if impl != "auto":
        return impl
    if triton and x.is_cuda:
        return "triton"
    return "cpu" if cpu else "reference"


@torch.library.custom_op("workbench::w4a8_matmul", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor | None,
    x_scale: Tensor | None,
    x_order: Tensor | None,
    layout: str,
    bits: int,
    group_size: int,
    shape: list[int],
    x_bits: int,
    x_group: int | None,
    x_wide: int,
    x_float: bool,
    use: str,
) -> Tensor:
    # Opaque to the compiler on purpose: if the unpacking were traced, freezing would fold it into a dense weight.
    size = shape[0], shape[1]
    w: Packed | Codebook = Packed(layout, codes, scale, zero, bits, group_size, size)
    if table is not None:
        w = Codebook(layout, codes, table, scale, bits, group_size, size)
    flat = x.reshape(-1, shape[1])
    if use == "triton":
        from kernels.w4a8_matmul import triton

        y = triton.w4a8_matmul(flat, w, x_bits, x_group, x_scale, x_wide, x_order, x_float)
    else:
        y = reference.w4a8_matmul(flat, w, x_bits, x_group, x_scale, x_wide, x_order, x_float)
    return y.view(*x.shape[:-1], shape[0])


@_op.register_fake
def _(
    x, codes, scale, zero, table, x_scale, x_order, layout, bits, group_size, shape, x_bits, x_group, x_wide, x_float,
    use,
):  # fmt: skip
    return x.new_empty(*x.shape[:-1], shape[0])


@native.shapes_of("panels_w4a8")
def _(x, codes, scale, zero, table, out, x_bits, x_group, x_scale, x_wide=0, x_order=None):
    return x.new_empty(*x.shape[:-1], out)
