"""The rule of noise: whether a difference between two models counts.

`counts` decides for verdicts, tiles, colours, ranks, fronts and gates; the other functions give the interval that it
needs. A difference of accuracy counts if its paired 95 % interval excludes 0. A difference of speed counts if it
exceeds the spread of one model that was timed twice in the same turns; in records from before 26 November 2026, which
have no such pair, if the quartiles over the rounds do not overlap, there and in the record's grid of speeds. Speeds
that were measured while others used the processor are not told apart at all. Sizes are counted, not measured: they
differ by half a per cent or more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Ends = tuple[float, float]  # of an interval: low, high
Z = 1.96  # standard errors on each side of a 95 % interval
SAME_SIZE = 0.005  # relative difference up to which sizes count as equal
EXACT = 1e-9  # largest difference of numbers without an error that comes from rounding
DISTURBED = 0.10  # share of the cores' time that others may use during a timing
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # Student's t for 1 to 10 pairs
_OF_A_MEDIAN = 1.2533  # its standard error over that of a mean, for normal errors


@dataclass(frozen=True)
class Load:
    """What else used the cores of a timing, as shares of their time.

    others: by other processes; stolen: by other virtual machines on the same processor, as far as the system shows it.
    mhz_low, mhz_high: the clock of the cores between the rounds, None where it cannot be read. seconds: length of the
    timing.
    """

    others: float | None = None
    stolen: float | None = None
    mhz_low: float | None = None
    mhz_high: float | None = None
    seconds: float | None = None


def spread(ratios: Sequence[float], rounds: int) -> float | None:
    """The relative difference of two medians over `rounds` rounds that chance alone exceeds in one case of twenty.

    Args:
        ratios: of the two timings of one model in the same turn. Their logarithms have the expectation 0.
        rounds: number of rounds of each median.
    """
    logs = [math.log(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    if not logs:
        return None
    n = len(logs)
    deviation = math.sqrt(sum(x * x for x in logs) / n)
    t = _T95[n - 1] if n <= len(_T95) else Z + 2.5 / n
    return math.expm1(min(t * _OF_A_MEDIAN * deviation / math.sqrt(rounds), 700.0))


def counts(low: Any, high: Any) -> Any:
    """Does a difference count: does its interval exclude 0? For numbers, or for arrays element by element."""
    return (low > 0) | (high < 0)


def difference(gap: Any, stderr: Any = None) -> tuple[Any, Any]:
    """The 95 % interval of a difference; one without a standard error is exact. Numbers or arrays."""
    half = EXACT if stderr is None else Z * stderr + EXACT
    return gap - half, gap + half


def speed_ends(
    value: float | None,
    quartiles: Sequence[float] = (),
    spread: float | None = None,
    load: Load | None = None,
    rounds: int | None = None,
) -> Ends | None:
    """The interval of a speed: two speeds of a run differ if these do not touch. None: it cannot be told from any.

    Args:
        quartiles: over the rounds, used without a `spread`.
        spread: of one model timed twice (`spread`).
        rounds: their number; the quartiles of a single one say nothing.
    """
    if disturbed(load):
        return None
    if spread is not None and value is not None and spread >= 0:
        half = math.sqrt(1 + spread)
        return value / half, value * half
    return (quartiles[0], quartiles[1]) if len(quartiles) == 2 and rounds != 1 else None


def faster_by(own: Ends | None, other: Ends | None) -> Ends:
    """The interval of the difference of two speeds, from theirs; one that `counts` never, if one of them is None."""
    return (-math.inf, math.inf) if own is None or other is None else (own[0] - other[1], own[1] - other[0])


def disturbed(load: Load | None) -> str:
    """What made a timing too noisy for comparisons, in words; "" if nothing did, or if it was not recorded."""
    taken = [] if load is None else [(load.others, "other processes"), (load.stolen, "other virtual machines")]
    if not sum(share or 0.0 for share, _ in taken) > DISTURBED:
        return ""
    said = " and ".join(f"{words} took {min(share, 1):.0%}" for share, words in taken if share and share >= 0.01)
    return f"{said} of the processor while it was timed".replace("%", " %")


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n answers (Wilson 1927), which has a width for shares of 0 and 1, too."""
    if n < 1 or not math.isfinite(share):
        return math.nan, math.nan
    centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * math.sqrt(max(share * (1 - share), 0.0) / n + Z**2 / (4 * n**2))
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
