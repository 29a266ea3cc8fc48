"""Contests of products y = x Wᵀ with stored weights, beside dense ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.onednn import lay_out, lays_out, product
from kernels.support.declarations import Contest, Expected, times

ROTATED = 256 << 20  # bytes of stored weights in rotation
MOST = 1024  # largest number of copies: small weights are in a cache anyway


@dataclass(frozen=True)
class Dense:
    """The product with dense weights in x's dtype, the baseline: by torch, and where a CPU has oneDNN for this dtype,
    with weights that were laid out for it beforehand."""

    name: str
    weights: list[Tensor]
    call: Callable[[int], object]


def copies_of(nbytes: int) -> int:
    """The number of copies of a weight that are rotated on a GPU."""
    return min(MOST, max(2, -(-ROTATED // nbytes)))


def cpu_copies(shape: tuple[int, int]) -> int:
    """The number of copies on a CPU, by the bytes of the dense weight in 16 bits."""
    return max(2, min(64, (128 << 20) // (2 * shape[0] * shape[1])))


def group_size_of(columns: int, wanted: int) -> int:
    """The largest group up to `wanted` that divides the columns, a multiple of 8 if there is one."""
    divisors = [size for size in range(min(wanted, columns), 0, -1) if columns % size == 0]
    return next((size for size in divisors if size % 8 == 0), divisors[0])


def dense(x: Tensor, shape: tuple[int, int], copies: int) -> Dense:
    """The baseline for x [tokens, in] and weights [out, in]."""
    name = str(x.dtype).removeprefix("torch.")
    weights = [torch.randn(shape, device=x.device, dtype=x.dtype) for _ in range(copies)]
    if x.device.type != "cpu" or x.dtype == torch.float16 or not lays_out(x.dtype):
        return Dense(name, weights, lambda i: F.linear(x, weights[i]))
    packed = [lay_out(W, len(x)) for W in weights]
    return Dense(f"{name} prepacked", weights, lambda i: product(x, packed[i]))


def contest(
    op: str,
    detail: str,
    x: Tensor,
    shape: tuple[int, int],
    stored: int,
    calls: dict[str, Callable[[int], object]],
    expected: dict[str, Expected],
    rival: Dense,
    **more: Any,
) -> Contest:
    """A contest of products of x [tokens, in] with W [out, in], of which `stored` bytes are read; ours is the first of
    the calls. more: other fields of `Contest`."""
    tokens, (out, columns) = len(x), shape
    settings = {
        "shape": shape, "tokens": tokens, "copies": len(rival.weights), "ours": next(iter(calls)),
        "baseline": rival.name, "least_bytes": stored + x.element_size() * tokens * (out + columns),
        "flops": 2 * tokens * out * columns, "rate": str(x.dtype).removeprefix("torch."),
        "contestants": {**calls, rival.name: rival.call},
        "expected": {**expected, rival.name: times(x, lambda: rival.weights[0])},
    }  # fmt: skip
    return Contest(op=op, detail=detail, **settings | more)
