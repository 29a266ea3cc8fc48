"""A Hadamard transform whose results are rounded to integer codes before they are written to memory."""

import torch
from torch import Tensor

from kernels.capability import described, has_shared
from kernels.hadamard import hadamard
from kernels.hadamard.plan import codes_fit, plan, shared_of, whole_codes_fit
from kernels.interpreter import triton_takes
from kernels.registry import ran
from kernels.w4a8_matmul.codes import even_first
from kernels.w4a8_matmul.reference import rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hadamard_codes(
    x: Tensor,
    signs: Tensor,
    *,
    block: int,
    bits: int = 8,
    group: int | None = None,
    wide: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Codes of a rotated input, for `w4a8_codes_matmul`: x times `signs`, transformed by `hadamard` for every `block`
    columns, in x's dtype, and rounded as `kernels.w4a8_matmul` rounds its input.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        signs: int8 [in], ±1.
        block: number of columns that are transformed together; it divides `in`, which is even.
        bits: 8 or 4.
        group: number of columns that share a step, or None for all columns of a token.
        wide: number of first groups of a token whose codes have 8 bits, independent of `bits`.
        impl: "reference" (`hadamard` and then the rounding), "triton" (both in one kernel; CUDA, or the interpreter) or
            "auto": "triton" on CUDA if `takes` is true, else "reference".

    Returns:
        codes: int8 [..., in], codes of the even columns first, then of the odd ones; step: float32 [..., in / group].
        The step of a group that contains a NaN or an infinity is NaN.

    Raises:
        ValueError: sizes that do not match, or an implementation that does not support x.
    """
    columns = x.shape[-1] if x.dim() else 0
    groups = columns // (group or columns or 1)
    if x.dtype not in DTYPES:
        raise ValueError(f"`x` (={x.dtype}) must be float32, bfloat16 or float16")
    if not columns or columns % 2:
        raise ValueError(f"`x` {tuple(x.shape)} must end in an even number of columns")
    if block < 1 or columns % block or columns % (group or columns):
        raise ValueError(f"`block` (={block}) and `group` (={group}) must divide in_features (={columns})")
    if signs.shape != (columns,) or signs.dtype != torch.int8:
        raise ValueError(f"`signs` ({signs.dtype} {tuple(signs.shape)}) must be int8 [{columns}]")
    if bits not in (4, 8) or not 0 <= wide <= groups:
        raise ValueError(f"`bits` (={bits}) must be 4 or 8, and `wide` (={wide}) lie between 0 and {groups}")
    able = triton_takes(x.device) and takes(x, block, group)
    if impl not in ("auto", "reference", "triton") or impl == "triton" and not able:
        here = f"blocks of {block} and groups of {group} on {described(x.device)}"
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference', or 'triton' where that takes {here}")
    use = ("triton" if able and x.is_cuda else "reference") if impl == "auto" else impl
    ran("hadamard_codes", use)
    return _op(x, signs, block, bits, group, wide, use)


def rotates_into_codes(x: Tensor, block: int, group: int | None) -> bool:
    """Is there one kernel for the transform and the rounding of x, on its device?"""
    return x.is_cuda and triton_takes(x.device) and takes(x, block, group)


def takes(x: Tensor, block: int, group: int | None) -> bool:
    """Do the Triton kernels support these arguments?"""
    whole = whole_codes_fit(block, group, x.shape[-1]) and has_shared(x.device, shared_of(plan(block)))
    return whole or codes_fit(block, group)


@torch.library.custom_op("workbench::hadamard_codes", mutates_args=())
def _op(
    x: Tensor, signs: Tensor, block: int, bits: int, group: int | None, wide: int, use: str
) -> tuple[Tensor, Tensor]:
    flat = x.reshape(-1, x.shape[-1])
    if use == "triton":
        from kernels.hadamard import triton

        codes, step = triton.hadamard_codes(flat, signs, block, bits, group, wide)
    else:
        turned = hadamard((flat * signs.to(x.dtype)).unflatten(-1, (-1, block))).flatten(-2)
        codes, step = rounded(turned, bits, group, None, wide)
        codes = even_first(codes)
    return codes.view(x.shape), step.view(*x.shape[:-1], step.shape[-1])


@_op.register_fake
def _(x, signs, block, bits, group, wide, use):
    groups = x.shape[-1] // (group or x.shape[-1])
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(*x.shape[:-1], groups, dtype=torch.float32)
