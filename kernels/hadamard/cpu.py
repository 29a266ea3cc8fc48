"""Products with small Kronecker factors, some rows at a time, so that the rows stay in cache."""

from functools import cache

import torch
from torch import Tensor

from kernels.hadamard.matrix import base, paley, sylvester

AT_ONCE = 1 << 18  # elements; measured, see seeds/log.md
WIDEST = 5  # largest number of bits of a factor if more than one is needed; measured


def hadamard(x: Tensor, scale: float) -> Tensor:
    """y = scale x H [rows, n], computed in float32 and rounded once."""
    rows, n = x.shape
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


@cache
def factors(n: int) -> tuple[Tensor, ...]:
    """Matrices whose Kronecker product, in this order, is H of order n."""
    m = base(n)
    bits = (n // m).bit_length() - 1
    parts = 1 if bits <= WIDEST + 1 else -(-bits // WIDEST)
    widths = [bits // parts + (i < bits % parts) for i in range(parts)]
    matrices = [paley(m), *(sylvester(1 << width) for width in widths)]
    return tuple(torch.from_numpy(H).float() for H in matrices if len(H) > 1)
