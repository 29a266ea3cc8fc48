"""Checks the outputs of a contest, at the same shape and in the same configuration that will be timed.

Checks run at small, odd shapes; tiles for many tokens, and loops over all columns, are reached only in contests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.harness.timing import settle
from kernels.support.declarations import TOLERANCE, Contest, poisoned, relative_rms
from kernels.support.errors import kind_and_first_line


@dataclass(frozen=True)
class OpVerdict:
    """red: contestant -> the fault in its output; unchecked: contestants whose right output is not known."""

    red: dict[str, str]
    unchecked: tuple[str, ...]


def verify(contest: Contest, device: torch.device) -> OpVerdict:
    """Compare every contestant's output for copy 0, in memory that held NaN, with the contest's expected output.

    The contestant that is ours runs twice and must give the same bits, unless its `repeats` is false.

    Raises:
        RuntimeError: the device no longer answers.
    """
    red = {}
    for name, call in contest.contestants.items():
        if name not in contest.expected:
            continue
        try:
            why = _wrong(contest, name, call)
        except Exception as error:
            settle(device)
            why = kind_and_first_line(error)
        if why:
            red[name] = why
    if device.type == "cuda":
        torch.cuda.empty_cache()  # float64 copies of large operands
    return OpVerdict(red, tuple(name for name in contest.contestants if name not in contest.expected))


def _wrong(contest: Contest, name: str, call: Callable[[int], object]) -> str | None:
    result = fresh(call)
    found = result()
    if name == contest.ours and contest.repeats and apart(found, result(), exact=True):
        return "two runs of the same call differ, or an element was never written"
    expected = contest.expected[name](found if len(found) > 1 else found[0])
    for y, e in zip(found, tensors(expected), strict=True):
        allowed, error = 0.0, relative_rms(y, e)
        if y.is_floating_point():
            allowed = max(TOLERANCE.get(y.dtype, 0.0), contest.tolerance.get(name, 0.0))
        if math.isnan(error):
            return "NaN: an element was never written, or is not a number"
        if error > allowed:
            return f"relative RMS error {error:.2e} is over {allowed:.0e}"
    return None


def fresh(call: Callable[[int], object]) -> Callable[[], list[Tensor]]:
    """A function that gives copies of the outputs of `call(0)`; outputs changed in place begin at 0 in each call."""
    kept, again = tensors(call(0)), tensors(call(0))
    sums = [a for a, b in zip(kept, again, strict=True) if a.numel() and a.data_ptr() == b.data_ptr()]
    del kept, again

    def result() -> list[Tensor]:
        for tensor in sums:
            tensor.zero_()
        with poisoned():
            return [t.clone() for t in tensors(call(0))]

    return result


def apart(outputs: object, expected: object, *, exact: bool = False) -> str | None:
    """The reason why two results of a call differ more than their type's rounding allows (`exact`: at all); None if
    they do not."""
    pairs = list(zip(tensors(outputs), tensors(expected), strict=True))
    if not pairs:
        return "it returns no tensor to compare"
    for y, e in pairs:
        if exact or not e.is_floating_point():
            if not torch.equal(y, e):
                return "differs"
        elif not (error := relative_rms(y, e)) <= TOLERANCE.get(e.dtype, 1e-2):
            return f"differs from the heuristic's result by {error:.1e}"
    return None


def tensors(outputs: object) -> list[Tensor]:
    """The tensors in the result of a call."""
    return [t for t in (outputs if isinstance(outputs, tuple | list) else (outputs,)) if isinstance(t, Tensor)]
