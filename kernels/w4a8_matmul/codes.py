"""Products of codes that were made elsewhere, such as by `kernels.hadamard.codes` or by a step's norms, with an
integer-quantised weight."""

import torch
from torch import Tensor

from kernels.capability import described, too_old
from kernels.int_matmul import Packed
from kernels.interpreter import triton_takes
from kernels.lut_matmul import Codebook
from kernels.registry import ran
from kernels.w4a8_matmul import reference
from kernels.w4a8_matmul.groups import check_groups, triton_reads
from kernels.w8a8_matmul.layout import LARGEST


def w4a8_codes_matmul(
    codes: Tensor, step: Tensor, w: Packed | Codebook, *, dtype: torch.dtype, impl: str = "auto"
) -> Tensor:
    """The product of `w4a8_matmul` for activations whose codes and steps are already known.

    Args:
        codes: int8 or float8_e4m3fn [..., in], codes of the even columns first, then of the odd ones.
        step: float32 [..., groups], one step for each group of columns of equal width, in the original column order.
        w: [out, in], as in `w4a8_matmul`.
        dtype: of the result.
        impl: "reference", "triton" (rows, with symmetric 4-bit codes; CUDA, or the interpreter) or "auto": "triton" on
            CUDA if it supports the weight and the type of the codes, else "reference".

    Returns:
        [..., out]

    Raises:
        ValueError: shapes, dtypes or groups that do not match, or an implementation that does not support the tensors.
    """
    columns, groups = w.shape[1], step.shape[-1] if step.dim() else 0
    if codes.dtype not in LARGEST or codes.dim() == 0 or codes.shape[-1] != columns or columns % 2:
        kinds = " or ".join(map(str, LARGEST))
        raise ValueError(f"`codes` ({codes.dtype} {tuple(codes.shape)}) must be {kinds} [..., {columns}], even")
    if step.dtype != torch.float32 or step.shape[:-1] != codes.shape[:-1] or not groups or columns % groups:
        kind = f"{step.dtype} {tuple(step.shape)}"
        raise ValueError(f"`step` ({kind}) must be float32 {list(codes.shape[:-1])} and groups")
    group = columns // groups
    check_groups(w, group)
    float8 = codes.dtype == torch.float8_e4m3fn
    able = triton_takes(codes.device) and triton_reads(w, group) and too_old(codes.device, float8=float8) is None
    if impl not in ("auto", "reference", "triton") or impl == "triton" and not able:
        where = described(codes.device, float8=float8)
        here = f"{w.layout} of {w.bits} bits in groups of {w.group_size} (x: {group}) on {where}"
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference', or 'triton' where that takes {here}")
    use = ("triton" if able and codes.is_cuda else "reference") if impl == "auto" else impl
    ran("w4a8_codes_matmul", use)
    zero, table = (None, w.table) if isinstance(w, Codebook) else (w.zero, None)
    about = (w.layout, w.bits, w.group_size, list(w.shape), dtype, float8, use)
    return _op(codes.view(torch.int8), step, w.codes, w.scale, zero, table, *about)


def multiplies_codes(w: Packed | Codebook, group: int | None, device: torch.device) -> bool:
    """Is there a kernel that multiplies this weight by given codes, on this device?"""
    return device.type == "cuda" and triton_takes(device) and triton_reads(w, group)


def even_first(codes: Tensor) -> Tensor:
    """Codes [..., in], even columns first: the order in which the two nibbles of W's bytes are multiplied."""
    return torch.cat([codes[..., ::2], codes[..., 1::2]], -1)


@torch.library.custom_op("workbench::w4a8_codes_matmul", mutates_args=())
def _op(
    x: Tensor,
    step: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor | None,
    layout: str,
    bits: int,
    group_size: int,
    shape: list[int],
    dtype: torch.dtype,
    float8: bool,
    use: str,
) -> Tensor:
    size = shape[0], shape[1]
    w: Packed | Codebook = Packed(layout, codes, scale, zero, bits, group_size, size)
    if table is not None:
        w = Codebook(layout, codes, table, scale, bits, group_size, size)
    flat, steps = x.reshape(-1, size[1]), step.reshape(-1, step.shape[-1])
    flat = flat.view(torch.float8_e4m3fn) if float8 else flat
    if use == "triton":
        from kernels.w4a8_matmul import triton

        y = triton.multiplied(flat, steps, w, dtype)
    else:
        half = size[1] // 2
        columns = torch.stack([flat[:, :half], flat[:, half:]], -1).flatten(1)  # in their own order
        y = reference.multiplied(columns, steps, w, dtype)
    return y.view(*x.shape[:-1], size[0])


@_op.register_fake
def _(x, step, codes, scale, zero, table, layout, bits, group_size, shape, dtype, float8, use):
    return x.new_empty(*x.shape[:-1], shape[0], dtype=dtype)
