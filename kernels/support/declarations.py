"""The declarations of an op: the checks that it must pass, and the contests in which it is timed afterwards.

`kernels/<op>/cases.py` has `checks(device)` and `contests(device, toy, asked)`. The tests, `kernels.harness.validate`
and `kernels.harness.bench` all run these, so that everything timed has been compared with float64 on the same machine.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# By value: what a budget leaves out are the last ones.
OPS = (
    "int_matmul", "kv_decode", "w8a8_matmul", "w4a8_matmul", "lut_matmul", "hadamard", "gptq_block", "gram",
    "trellis_matmul", "sparse_matmul", "step",
)  # fmt: skip

# Relative root mean square errors allowed against float64 on the same quantised operands.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class TimedSizes:
    """The sizes that a user wants timed; ops without weights keep their own.

    shapes: (out, in) of the weights; empty: the op's own shapes, with their goals.
    tokens: rows of x; empty: the op's own.
    dtype:  of the activations.
    only:   lists of words; a contest is timed if its name has all words of one list; empty: all are timed.
    rivals: whether other libraries' kernels take part; making their weights takes seconds.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    tokens: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    only: tuple[tuple[str, ...], ...] = ()
    rivals: bool = True

    def wants(self, name: str) -> bool:
        """Was a contest of this name ("int_matmul W4 g128 14336x4096 M=1") requested?"""
        return not self.only or any(set(words) <= set(name.split()) for words in self.only)


OWN = TimedSizes()
Expected = Callable[[Any], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Check:
    """One call of one op.

    run:      given an implementation's name ("reference", "cpu", "triton", ...), calls the op on inputs made once,
              when the check was made, and returns its output or outputs.
    expected: the same outputs in float64, from the same quantised operands, computed by a method other than the op's.
    impls:    the implementations that support these inputs, besides "reference".
    tolerances: implementation -> allowed relative RMS error, if `tolerance` is too small for its hardware.
    repeats:  must two runs give the same bits? False for a library that adds in no fixed order; both runs must then be
              within the tolerance.
    """

    op: str
    name: str
    run: Callable[[str], Tensor | tuple[Tensor, ...]]
    expected: Callable[[], Tensor | tuple[Tensor, ...]]
    tolerance: float
    impls: tuple[str, ...] = ("triton",)
    tolerances: dict[str, float] = field(default_factory=dict)
    repeats: bool = True

    def allowed(self, impl: str) -> float:
        """The relative RMS error that is allowed for this implementation."""
        return max(self.tolerance, self.tolerances.get(impl, 0.0))

    def error(self, impl: str) -> float:
        """Largest relative RMS error of the outputs; NaN if an element was never written or, with `repeats`, two runs
        differ in any bit."""
        with poisoned():
            first, second = _tuple(self.run(impl)), _tuple(self.run(impl))
        if self.repeats and not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            return float("nan")
        expected = _tuple(self.expected())
        runs = (first,) if self.repeats else (first, second)
        errors = [relative_rms(y, e) for ys in runs for y, e in zip(ys, expected, strict=True)]
        return next(filter(math.isnan, errors), max(errors))  # `max` alone can lose a NaN


@dataclass(frozen=True)
class Contest:
    """One shape at which implementations of the same product are timed in turns.

    contestants: name -> call with the index of the operands to use, 0 <= index < copies.
    copies:      number of sets of operands that are rotated, so that no cache holds them.
    ours:        the contestant that is this op; `baseline` the one to which `goal` (a ratio of times) refers; with
                 `rivals`, the goal refers to the fastest of them and the baseline.
    graph:       may calls be replayed from a CUDA graph? False if launches are part of the comparison.
    goal_bandwidth: share of the measured bandwidth of a copy at which ours must move `least_bytes`.
    goals_us:    microseconds that ours may take, by a part of the GPU's name; `goal_us` is the one that holds here.
    least_bytes: bytes to read each operand once and to write each output once.
    flops:       floating-point (or integer) operations of the product itself; `rate` names their type.
    pairs:       of attention, whose shape ends with the channels of a head: queries times the keys that each of them
                 sees, over all heads. From them follow the bytes that no order of tiles can save.
    tune_key, candidates: the key for `tuning.configuration`, and at most 8 configurations to try.
    configurations: contestant that runs this op as well -> its configuration, which is recorded under `tune_key` if it
                 is faster than ours by more than noise.
    expected:    contestant -> a function that gives the right result for the operands of copy 0, in float64 and by
                 another method; its argument is the contestant's output, since several results may be right.
                 `kernels.harness.verify` compares them before anything is timed.
    tolerance:   contestant -> allowed relative RMS error, if the one for its output's dtype is too small.
    repeats:     must two runs of ours give the same bits? See `Check`.
    """

    op: str
    detail: str  # "W4 g128", "fp8", "int4 KV"
    shape: tuple[int, ...]
    tokens: int
    contestants: dict[str, Callable[[int], object]]
    copies: int
    ours: str
    baseline: str
    least_bytes: int
    flops: int
    rate: str = "bfloat16"
    pairs: int = 0
    goal: float | None = None
    goal_us: float | None = None
    goals_us: dict[str, float] = field(default_factory=dict)
    goal_bandwidth: float | None = None
    tune_key: str | None = None
    candidates: list[dict] = field(default_factory=list)
    configurations: dict[str, dict] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    graph: bool = True
    expected: dict[str, Expected] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)
    repeats: bool = True


def times(x: Tensor, W: Callable[[], Tensor]) -> Expected:
    """A function that gives x Wᵀ [..., out] in float64; W [out, in], which may be large, is made only when needed."""
    return lambda _: x.double() @ W().double().t()


def relative_rms(y: Tensor, expected: Tensor) -> float:
    """‖y - expected‖ / ‖expected‖ in float64; 0 if both are empty."""
    if y.shape != expected.shape:
        raise AssertionError(f"shape {tuple(y.shape)} instead of {tuple(expected.shape)}")
    exact = expected.double()
    return ((y.to(exact.device).double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


@contextmanager
def poisoned() -> Iterator[None]:
    """While the block runs, memory that torch allocates without filling it holds NaN (integers: their largest
    value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
