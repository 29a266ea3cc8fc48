"""Products of a few tokens with 16-bit weights stored row by row: the C++ kernel for decoding on a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kernels import native
from kernels.linear.onednn import lay_out, lays_out, product

FEW = 8  # largest number of tokens for which the kernel is tried
DTYPES = (torch.bfloat16, torch.float16)
CACHES = 96 << 20  # bytes that are read between two products of a trial, so that weights come from memory
ROUNDS = 12


def rows_fit(weight: Tensor, tokens: int) -> bool:
    """Can the C++ kernel multiply `tokens` tokens by weights of this dtype on this machine?"""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and 0 < tokens <= FEW
        and native.why_not() is None
        and native.isa(weight.dtype) != "portable"
    )


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], isa: str = "auto") -> list[Tensor]:
    """x [..., in] times each of the weights [out_i, in], plus its bias [out_i]: [..., out_i] in x's 16-bit dtype.

    Sums are in float32. Several weights in one call are distributed together over the threads.

    Raises:
        RuntimeError: tensors that do not match, or an `isa` that this machine does not have.
    """
    return torch.ops.workbench.half_matmul(x, list(weights), list(biases), isa)


@cache
def faster_than_onednn(out: int, columns: int, tokens: int, dtype: torch.dtype) -> bool:
    """Is the kernel faster than oneDNN with its own layout for this shape on this machine? Both are timed in turns.

    oneDNN is faster if the processor has instructions that the kernel does not use (AMX).
    """
    if not lays_out(dtype):
        return True
    with unset_fake_temporarily():  # also called while a compiler traces
        x, plain = torch.ones(tokens, columns, dtype=dtype), torch.ones(out, columns, dtype=dtype)
        packed, other = lay_out(plain, tokens), torch.ones(CACHES // 4)
        ways: tuple[Callable[[], object], ...] = (
            lambda: products(x, [plain], [None]),
            lambda: product(x, packed),
        )
        seconds: tuple[list[float], ...] = ([], [])
        for _ in range(ROUNDS):
            for way, taken in zip(ways, seconds, strict=True):
                other.sum()
                start = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start)
    kernel, onednn = map(statistics.median, seconds)
    return kernel < onednn


@native.shapes_of("half_matmul")
def _(x, weights, biases, isa):
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
