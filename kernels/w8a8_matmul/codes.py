"""Products of codes that were made elsewhere, such as by the norm of a step of decoding, with a weight in 8 bits."""

import torch
from torch import Tensor

from kernels.capability import described, too_old
from kernels.interpreter import triton_takes
from kernels.registry import ran
from kernels.w8a8_matmul import reference
from kernels.w8a8_matmul.layout import W8

IMPLS = ("auto", "reference", "triton")


def w8a8_codes_matmul(codes: Tensor, step: Tensor, w: W8, *, dtype: torch.dtype, impl: str = "auto") -> Tensor:
    """The product of `w8a8_matmul` for activations whose codes and steps are already known.

    Args:
        codes: [tokens, in] in the type of w's codes; rows at any distance that is a multiple of 16.
        step: float32 [tokens, 1].
        w: [out, in] in the layout "rows", with a scale per output channel.
        dtype: of the result.
        impl: "reference", "triton" (CUDA, or the interpreter) or "auto": "triton" on CUDA, else "reference".

    Returns:
        [tokens, out]

    Raises:
        ValueError: shapes or dtypes that do not match, or an implementation that does not support the tensors.
    """
    columns = w.shape[1]
    if w.layout != "rows" or w.scale.dim() != 1:
        raise ValueError(f"`w` (of {w.layout}, scale {tuple(w.scale.shape)}) must be rows with a scale per channel")
    if codes.dtype != w.codes.dtype or codes.dim() != 2 or codes.shape[1] != columns:
        raise ValueError(f"`codes` ({codes.dtype} {tuple(codes.shape)}) must be {w.codes.dtype} [tokens, {columns}]")
    if codes.stride(0) % 16 or codes.stride(1) != 1:
        raise ValueError(f"`codes` of strides {codes.stride()} must have rows at a distance that is a multiple of 16")
    if step.dtype != torch.float32 or step.shape != (len(codes), 1):
        raise ValueError(f"`step` ({step.dtype} {tuple(step.shape)}) must be float32 {(len(codes), 1)}")
    float8 = codes.dtype == torch.float8_e4m3fn
    able = triton_takes(codes.device) and too_old(codes.device, float8=float8) is None
    if impl not in IMPLS or impl == "triton" and not able:
        here = described(codes.device, float8=float8)
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference', or 'triton' where that takes {here}")
    use = ("triton" if able and codes.is_cuda else "reference") if impl == "auto" else impl
    ran("w8a8_codes_matmul", use)
    return _op(codes.view(torch.int8), step, w.codes.view(torch.int8), w.scale, dtype, float8, use)


@torch.library.custom_op("workbench::w8a8_codes_matmul", mutates_args=())
def _op(
    x: Tensor, step: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype, float8: bool, use: str
) -> Tensor:  # torch's own tools for ops cannot compare float8
    kind = torch.float8_e4m3fn if float8 else torch.int8
    if use == "triton" and x.numel():
        from kernels.w8a8_matmul.triton import multiplied
    else:
        multiplied = reference.multiplied
    return multiplied(x.view(kind), step, W8("rows", codes.view(kind), scale, tuple(codes.shape)), dtype)


@_op.register_fake
def _(x, step, codes, scale, dtype, float8, use):
    return x.new_empty(len(x), len(codes), dtype=dtype)
