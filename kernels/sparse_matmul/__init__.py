"""`sparse_matmul`: y = x Wᵀ with a weight in 16 bits whose zeros are not stored. See README.md.

From Flash-LLM (arXiv:2309.10285): weights are loaded sparse and multiplied as dense ones. From Fast Sparse ConvNets
(arXiv:1911.09723): on a CPU, a few columns of inputs share each load of sparse weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described
from kernels.int_matmul import unpack_bits
from kernels.interpreter import triton_takes
from kernels.linear import linear
from kernels.registry import ran
from kernels.sparse_matmul.layout import SparseRows, starts_of

__all__ = [
    "COLUMNS", "SparseRows", "dense_rows", "in_tiles", "products", "skips_zeros", "sparse_matmul", "starts_of",
    "triton_fits",
]  # fmt: skip

IMPLS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = 32  # the loops take so many at a time
FEW = 8  # largest number of tokens for which weights are put to their places in registers rather than in memory
SLAB = 1 << 20  # weights that are put to their places in memory at a time; 2 MB stay in a cache near the core


def skips_zeros(dtype: torch.dtype, device: torch.device, columns: int) -> bool:
    """Are there loops here that read only the entries that are kept, for rows of so many columns?

    They need an x86 processor with AVX2; with AVX512-VBMI2 (Intel since Ice Lake, AMD since Zen 4) they are shorter.
    """
    return (
        device.type == "cpu"
        and dtype in DTYPES
        and columns % COLUMNS == 0
        and native.why_not() is None
        and _kept_runs()
    )


@torch.compiler.assume_constant_result
def _kept_runs() -> bool:
    return torch.ops.workbench.kept_runs()


@torch.compiler.assume_constant_result
def _tiles_of_kept() -> bool:
    return bool(native.tiles()) and native.rows_isa(torch.bfloat16, COLUMNS, kept=True).startswith("avx512")


def sparse_matmul(x: Tensor, w: SparseRows, *, impl: str = "auto") -> Tensor:
    """Product with a weight whose zeros are not read.

    Args:
        x: [..., in], in the dtype of the values; any strides; may be empty.
        w: [out, in].
        impl: "reference" (puts the zeros back and multiplies; any device, has gradients), "cpu" (C++: up to 8 tokens
            entries are put to their places in registers; for more, in bfloat16 with AMX or AVX512-BF16, rows
            become tiles; else they are put together in memory, some at a time),
            "triton" (CUDA, or the interpreter: in registers up to 64 tokens), or "auto": "cpu" if available.

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes or dtypes that do not match, or an implementation that does not exist or does not support the
            tensors.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(
            f"`x` {tuple(x.shape)} {x.dtype} must end in in_features (={w.shape[1]}) and have the weight's {w.dtype}"
        )
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    fits = skips_zeros(x.dtype, x.device, w.shape[1]) and not (torch.is_grad_enabled() and x.requires_grad)
    if impl == "cpu" and not fits:
        raise ValueError(
            f"`impl` (='cpu') needs an x86 CPU with AVX2, the C++ kernels, 16-bit tensors without gradients and "
            f"in_features that {COLUMNS} divides, not {x.dtype} {list(x.shape)} on {x.device}"
        )
    if impl == "triton":
        _check_triton(x, w)
        from kernels.sparse_matmul import triton

        ran("sparse_matmul", "triton")
        return triton.sparse_matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])
    if impl == "reference" or not fits:
        ran("sparse_matmul", "reference")
        return linear(x, dense_rows(w).to(x.dtype))
    if in_tiles(x, [w]):
        return products(x, [w])[0]
    ran("sparse_matmul", f"cpu {native.rows_isa(x.dtype, w.shape[1], kept=True)}")
    return _op(x, w.mask, w.values, w.starts)


def in_tiles(x: Tensor, weights: Sequence[SparseRows]) -> bool:
    """Are the products of these tokens those of tiles, into which rows are put strip by strip?"""
    return (
        _tiles_of_kept()
        and x.numel() > FEW * x.shape[-1]
        and x.dtype == torch.bfloat16
        and all(w.dtype == torch.bfloat16 and skips_zeros(w.dtype, x.device, w.shape[1]) for w in weights)
    )


def products(x: Tensor, weights: Sequence[SparseRows]) -> list[Tensor]:
    """x [..., in] times several weights, [..., out_i] for each, by tiles; see `in_tiles`."""
    ran("sparse_matmul", f"cpu {native.tiles()}")
    stored = [w.mask for w in weights], [w.values for w in weights], [w.starts for w in weights]
    return torch.ops.workbench.kept_tiles(x.contiguous(), *stored, "auto")


def triton_fits(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """Does the Triton kernel take 16-bit tensors of this dtype, on this device, with so many columns?"""
    return triton_takes(device) and dtype in DTYPES and columns % 8 == 0


def _check_triton(x: Tensor, w: SparseRows) -> None:
    if not triton_fits(x.device, x.dtype, w.shape[1]) or (torch.is_grad_enabled() and x.requires_grad):
        raise ValueError(
            f"`impl` (='triton') needs triton, a CUDA tensor or TRITON_INTERPRET=1, and 16-bit tensors without "
            f"gradients, not {x.dtype} on {described(x.device)}"
        )


def dense_rows(w: SparseRows) -> Tensor:
    """W [out, in] with its zeros, in the dtype of the values."""
    keep = unpack_bits(w.mask, 1, w.shape[1]).bool()
    return w.values.new_zeros(w.shape).masked_scatter_(keep, w.values)


@torch.library.custom_op("workbench::sparse_matmul", mutates_args=())
def _op(x: Tensor, mask: Tensor, values: Tensor, starts: Tensor) -> Tensor:
    flat, out = x.reshape(-1, x.shape[-1]), len(mask)
    if len(flat) <= FEW:
        return torch.ops.workbench.kept_matmul(flat, mask, values, starts, "auto").reshape(*x.shape[:-1], out)
    y = x.new_empty(len(flat), out)
    for begin in range(0, out, rows := max(1, SLAB // x.shape[-1])):
        end = min(out, begin + rows)
        W = torch.ops.workbench.kept_rows(mask, values, starts, begin, end)
        y[:, begin:end] = linear(flat, W)
    return y.reshape(*x.shape[:-1], out)


@_op.register_fake
def _(x, mask, values, starts):
    return x.new_empty(*x.shape[:-1], len(mask))


@native.shapes_of("kept_matmul")
def _(x, mask, values, starts, isa):
    return x.new_empty(*x.shape[:-1], len(mask))


@native.shapes_of("kept_tiles")
def _(x, masks, values, starts, isa):
    return [x.new_empty(*x.shape[:-1], len(mask)) for mask in masks]


@native.shapes_of("kept_rows")
def _(mask, values, starts, begin, end):
    return values.new_empty(end - begin, 8 * mask.shape[1])
