"""`hadamard`: y = x H / sqrt(n) along the last dimension, by fast Walsh-Hadamard transforms. See README.md."""

import numpy as np
import torch
from torch import Tensor

from kernels.capability import described
from kernels.hadamard import cpu, reference
from kernels.hadamard.matrix import base, near, paley, sylvester
from kernels.hadamard.plan import plan, spread_plan
from kernels.interpreter import triton_takes
from kernels.registry import ran

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def hadamard(x: Tensor, *, scale: float | None = None, impl: str = "auto") -> Tensor:
    """y = scale x H, where H is `hadamard_matrix(n)`; rotations use the default scale, which preserves lengths.

    H is symmetric, so the gradient has the same transform; with the default scale, the transform is its own inverse.

    Args:
        x: [..., n]; float32, bfloat16 or float16 (and float64 for "reference"); any strides; may be empty.
        scale: None for 1/sqrt(n).
        impl: "reference" (butterflies, any device), "cpu" (products with small Kronecker factors), "triton" (CUDA, or
            the interpreter; n that `plan` or `spread_plan` factors) or "auto": "triton" on CUDA if it supports x, "cpu"
            on a CPU, else "reference".

    Returns:
        [..., n] in x's dtype; computed in float32 (or as exactly) and rounded once.

    Raises:
        ValueError: n has no Hadamard matrix here, or an implementation that does not support x.
    """
    n = x.shape[-1] if x.dim() else 0
    _check_size(n, "`x` must end in")
    if x.dtype not in DTYPES:
        raise ValueError(f"`x` ({x.dtype}) must be float32, bfloat16, float16 or float64")
    wide = x.dtype == torch.float64
    triton = triton_takes(x.device) and not wide and (plan(n) or spread_plan(n)) is not None
    takes = {"reference": True, "cpu": x.device.type == "cpu" and not wide, "triton": triton}
    if impl != "auto" and impl not in takes:
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference', 'cpu' or 'triton'")
    if impl != "auto" and not takes[impl]:
        here = f"{x.dtype} on {described(x.device)} with n = {n}"
        other = " or ".join(repr(name) for name, able in takes.items() if able)
        raise ValueError(f"`impl` (={impl!r}) does not take {here}; {other} works")
    if impl == "auto":
        impl = next(
            name for name in (*(["triton"] if x.device.type == "cuda" else []), "cpu", "reference") if takes[name]
        )
    ran("hadamard", impl)
    return _op(x, n**-0.5 if scale is None else scale, impl)


def widest_block(n: int, most: int = 0) -> int:
    """The largest divisor of n for which there is a Hadamard matrix, at most `most` if that is not 0."""
    return next(d for d in range(min(n, most or n), 0, -1) if n % d == 0 and base(d))


def hadamard_blocks(x: Tensor) -> Tensor:
    """x [..., n] times H / sqrt(m) in blocks of the widest divisor m of n that has a matrix; its own inverse."""
    return hadamard(x.unflatten(-1, (-1, widest_block(x.shape[-1])))).view(x.shape)


def turned(x: Tensor, signs: Tensor, gains: Tensor) -> Tensor:
    """y = (x · signs) H / sqrt(m) · gains, with H in blocks of the widest divisor m of n that has a matrix.

    Args:
        x: [..., n]; signs, gains: [n].

    Returns:
        [..., n] in x's dtype; computed in float32 and rounded once.
    """
    n = x.shape[-1]
    block = widest_block(n)
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (x, signs, gains))
    if not torch.compiler.is_compiling() and not wants_gradient and x.numel() and cpu.in_rows(x, block):
        ran("hadamard", "cpu")
        y = cpu.turned_rows(x.reshape(-1, n), signs.float(), gains.float(), block, block**-0.5)
        return y.view(x.shape)
    return (hadamard_blocks(x.float() * signs) * gains).to(x.dtype)


def hadamard_matrix(n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
    """H [n, n] of ±1, symmetric, H H = n I: Paley's matrix of order `base(n)`, doubled by Sylvester's rule.

    Raises:
        ValueError: there is no Hadamard matrix of order n here.
    """
    _check_size(n, "a Hadamard matrix needs `n` =")
    m = base(n)
    return torch.from_numpy(np.kron(paley(m), sylvester(n // m))).to(device, dtype)


def _check_size(n: int, what: str) -> None:
    if base(n) is None:
        sizes = " and ".join(map(str, near(n)))
        raise ValueError(
            f"{what} 2^k or m 2^k with m the order of a matrix of Paley's (12, 20, 28, ...), not {n}; near it: {sizes}"
        )


@torch.library.custom_op("workbench::hadamard", mutates_args=())
def _op(x: Tensor, scale: float, use: str) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if use == "triton":
        from kernels.hadamard import triton

        y = triton.hadamard(flat, scale)
    else:
        y = (cpu if use == "cpu" else reference).hadamard(flat, scale)
    return y.view(x.shape)


@_op.register_fake
def _(x, scale, use):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx, inputs, output) -> None:
    _, ctx.scale, ctx.use = inputs


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return _op(grad, ctx.scale, ctx.use), None, None  # H is its own transpose


_op.register_autograd(_backward, setup_context=_keep)
