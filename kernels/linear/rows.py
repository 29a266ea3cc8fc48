"""Products of a few tokens with 16-bit weights as they are stored, row by row: the C++ kernel for decoding on a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kernels import native
from kernels.linear.onednn import lay_out, product

FEW = 8  # tokens up to which the kernel is tried
DTYPES = (torch.bfloat16, torch.float16)
TRIAL_BYTES = 96 << 20  # of weights that a trial goes through, so that they come from memory and not from a cache
ROUNDS = 12


def rows_fit(weight: Tensor, tokens: int) -> bool:
    """Can the C++ kernel multiply so many tokens by weights of this dtype, on this machine?"""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and 0 < tokens <= FEW
        and native.why_not() is None
        and native.isa(weight.dtype) != "portable"
    )


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], isa: str = "auto") -> list[Tensor]:
    """x [..., in] times each of the weights [out_i, in], plus its bias [out_i]: [..., out_i] in x's 16-bit dtype.

    Sums are in float32. Several weights in one call are shared out among the threads together.

    Raises:
        RuntimeError: tensors that do not fit together, or an `isa` that this machine does not have.
    """
    return torch.ops.workbench.half_matmul(x, list(weights), list(biases), isa)


@cache
def faster_than_onednn(out: int, columns: int, tokens: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is faster than oneDNN with its own layout for this shape, here: both are tried in turns.

    oneDNN wins where the processor has instructions that the kernel does not use (AMX).
    """
    count = max(2, TRIAL_BYTES // (2 * out * columns))
    with unset_fake_temporarily():  # the compiler asks while it traces
        x = torch.zeros(tokens, columns, dtype=dtype)
        plain = [torch.zeros(out, columns, dtype=dtype) for _ in range(count)]
        packed = [lay_out(weight, tokens) for weight in plain]
        ways: tuple[Callable[[int], object], ...] = (
            lambda i: products(x, [plain[i]], [None]),
            lambda i: product(x, packed[i]),
        )
        seconds: tuple[list[float], ...] = ([], [])
        for turn in range(ROUNDS):
            for way, taken in zip(ways, seconds, strict=True):
                start = time.perf_counter()
                way(turn % count)
                taken.append(time.perf_counter() - start)
    kernel, onednn = map(statistics.median, seconds)
    return kernel < onednn
