"""`gptq_block`: quantise a block of columns one after another; each column is corrected for the errors of the earlier
ones. See README.md."""

import torch
from torch import Tensor

from kernels.capability import described
from kernels.gptq_block import reference
from kernels.interpreter import triton_takes
from kernels.registry import ran

IMPLEMENTATIONS = ("reference", "cpu", "triton")
LAZY = 32  # number of columns after which the CPU path updates the rest by a product; measured, see README.md


def gptq_block(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    *,
    bits: int,
    keep: Tensor | None = None,
    table: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The inner loop of GPTQ (arXiv:2210.17323, algorithm 1) over the first `steps` of `columns` columns.

    For i = 0 .. steps-1: code = clamp(round(w_i / scale) + zero, 0, 2^bits - 1), q = (code - zero) scale,
    error_i = (w_i - q) / U_ii, and w_k -= U_ik error_i for every later column k < columns. With a table, code is the
    index of the entry nearest to w_i / scale (the lower one half-way between two), and q = table[code] scale.

    Args:
        W: [columns, out] float32: a column of the weight is a row here, in the order of processing; not changed.
        U: [steps, columns] float32: these rows and columns of the upper triangular factor, H⁻¹ = Uᵀ U.
        scale, zero: [groups, out] float32; no scale is 0.
        group: [steps] int64 or int32: the row of `scale` and `zero` with which each column is quantised.
        bits: 1 to 8.
        keep: [steps, out] bool; false: q = 0 and the zero point's code, for any w. None: all weights are kept.
        table: [2 to 256] float32, ascending: the value of each code; `zero` is then only the code of weights that are
            not kept. None: integers.
        impl: "reference" (plain torch, update after update), "cpu" (updates gathered into products), "triton" (one
            launch; CUDA, or the interpreter) or "auto".

    Every tensor may have a leading [batch]: several blocks of one shape, each with its own factor, in one launch.

    Returns:
        codes uint8 [steps, out], errors float32 [steps, out], rest float32 [columns - steps, out]: the columns that
        were not quantised, updated.

    Raises:
        ValueError: tensors that do not match, or an implementation that does not support them.
    """
    _check(W, U, scale, zero, group, bits, keep, table)
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference', 'cpu' or 'triton'")
    if impl == "triton" and not triton_takes(W.device):
        raise ValueError(
            f"`impl` (='triton') needs triton and a CUDA tensor, or TRITON_INTERPRET=1; `W` is on {described(W.device)}"
        )
    if impl == "cpu" and W.device.type != "cpu":
        raise ValueError(f"`impl` (='cpu') needs CPU tensors; `W` is on {W.device}: 'triton' or 'reference' works")
    if impl == "auto":
        impl = "cpu" if W.device.type == "cpu" else "triton" if triton_takes(W.device) else "reference"
    ran("gptq_block", impl)
    return _op(W, U, scale, zero, group, bits, keep, table, impl)


def _check(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    bits: int,
    keep: Tensor | None,
    table: Tensor | None,
) -> None:
    if W.dim() not in (2, 3):
        raise ValueError(f"`W` {tuple(W.shape)} must be [columns, out] or [batch, columns, out]")
    *batch, columns, out = W.shape
    steps, groups = U.shape[-2] if U.dim() > 1 else 0, scale.shape[-2] if scale.dim() > 1 else 0
    if tuple(U.shape) != (*batch, steps, columns) or steps > columns:
        raise ValueError(f"`U` {tuple(U.shape)} must be {(*batch, 'steps', columns)} with steps <= {columns}")
    for name, tensor in (("scale", scale), ("zero", zero)):
        if tuple(tensor.shape) != (*batch, groups, out):
            raise ValueError(f"`{name}` {tuple(tensor.shape)} must be {(*batch, 'groups', out)}")
    if tuple(group.shape) != (*batch, steps) or group.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`group` {group.dtype} {tuple(group.shape)} must be int64 or int32 {(*batch, steps)}")
    for name, tensor in (("W", W), ("U", U), ("scale", scale), ("zero", zero)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"`{name}` ({tensor.dtype}) must be float32")
    if keep is not None and (tuple(keep.shape) != (*batch, steps, out) or keep.dtype != torch.bool):
        raise ValueError(f"`keep` {keep.dtype} {tuple(keep.shape)} must be None or bool {(*batch, steps, out)}")
    if table is not None and (table.dim() != 1 or not 2 <= len(table) <= 256 or table.dtype != torch.float32):
        raise ValueError(f"`table` {table.dtype} {tuple(table.shape)} must be None or float32 [2 to 256]")
    operands = {"U": U, "scale": scale, "zero": zero, "group": group, "keep": keep, "table": table}
    for name, tensor in operands.items():
        if tensor is not None and tensor.device != W.device:
            raise ValueError(f"`{name}` (on {tensor.device}) must be where `W` is, on {W.device}")
    if not 1 <= bits <= 8:
        raise ValueError(f"`bits` (={bits}) must be between 1 and 8")


@torch.library.custom_op("workbench::gptq_block", mutates_args=())
def _op(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    bits: int,
    keep: Tensor | None,
    table: Tensor | None,
    use: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if use == "triton":
        from kernels.gptq_block import triton

        return triton.gptq_block(W, U, scale, zero, group, bits, keep, table)
    lazy = LAZY if use == "cpu" else None
    if W.dim() == 2:
        return reference.gptq_block(W, U, scale, zero, group, bits, keep, table, lazy)
    codes, errors, rest = _op_outputs(W, U)
    for b in range(len(W)):
        own = None if keep is None else keep[b]
        results = reference.gptq_block(W[b], U[b], scale[b], zero[b], group[b], bits, own, table, lazy)
        for output, result in zip((codes, errors, rest), results, strict=True):
            output[b] = result
    return codes, errors, rest


def _op_outputs(W: Tensor, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *batch, columns, out = W.shape
    steps = U.shape[-2]
    codes = W.new_empty(*batch, steps, out, dtype=torch.uint8)
    return codes, W.new_empty(*batch, steps, out), W.new_empty(*batch, columns - steps, out)


@_op.register_fake
def _(W, U, scale, zero, group, bits, keep, table, use):
    return _op_outputs(W, U)
