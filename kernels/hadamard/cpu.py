"""Products with small Kronecker factors, row by row in C++, or with torch, some rows at a time, so that they stay in
cache."""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad

from kernels import native
from kernels.hadamard.matrix import base, paley, sylvester

VECTOR = 16  # numbers of the widest vector, of which rows are a multiple in C++
LARGEST = 64  # order of a factor that is multiplied in C++; torch's product of larger ones is faster
AT_ONCE = 1 << 18  # elements; measured, see seeds/log.md
WIDEST = 5  # largest number of bits of a factor if more than one is needed; measured


def hadamard(x: Tensor, scale: float) -> Tensor:
    """y = scale x H [rows, n], computed in float32 and rounded once."""
    rows, n = x.shape
    if in_rows(x, n):
        return turned_rows(x, None, None, n, scale)
    y = torch.empty(rows, n, dtype=x.dtype)
    step = max(1, AT_ONCE // n)
    for start in range(0, rows, step):
        part, right = x[start : start + step].float().contiguous(), 1
        for H in reversed(factors(n)):
            f = len(H)
            part = torch.mm(part.view(-1, f), H) if right == 1 else torch.matmul(H, part.view(-1, f, right))
            right *= f
        y[start : start + step] = part.view(-1, n).mul_(scale) if right > 1 else part * scale
    return y


def in_rows(x: Tensor, block: int) -> bool:
    """Can C++ transform the rows of x [rows, n] in blocks of this size?"""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.shape[-1] % VECTOR == 0
        and max(map(len, factors(block)), default=1) <= LARGEST
        and native.why_not() is None
    )


def turned_rows(x: Tensor, signs: Tensor | None, gains: Tensor | None, block: int, scale: float) -> Tensor:
    """y = scale (x · signs) H · gains [rows, n], with H in blocks of this size; signs and gains: float32 [n] or None.
    Computed in float32 and rounded once."""
    return torch.ops.workbench.hadamard_rows(x.contiguous(), signs, _padded(block), gains, scale, "auto")


@cache
def _padded(n: int) -> list[Tensor]:
    """The factors of order n, the one of neighbouring numbers first, each with a vector of zeros or more behind it."""
    with unset_fake_temporarily():
        return [pad(H, (0, 0, 0, -(-VECTOR // len(H)))) for H in reversed(factors(n))]


@native.shapes_of("hadamard_rows")
def _(x, signs, factors, gains, scale, isa):
    return torch.empty_like(x)


@cache
def factors(n: int) -> tuple[Tensor, ...]:
    """Matrices whose Kronecker product, in this order, is H of order n."""
    m = base(n)
    bits = (n // m).bit_length() - 1
    parts = 1 if bits <= WIDEST + 1 else -(-bits // WIDEST)
    widths = [bits // parts + (i < bits % parts) for i in range(parts)]
    matrices = [paley(m), *(sylvester(1 << width) for width in widths)]
    with unset_fake_temporarily():  # they are kept
        return tuple(torch.from_numpy(H).float() for H in matrices if len(H) > 1)
