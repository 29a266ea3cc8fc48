"""The rule of noise: whether a difference between two models counts.

A difference of accuracy counts if its paired 95 % interval excludes 0. A difference of speed counts if it exceeds the
spread of one model that was timed twice in the same turns; in records from before 26 November 2026, which have no such
pair, if the quartiles over the rounds do not overlap. Speeds that were measured while other programs used the processor
are not told apart at all. Sizes are counted, not measured: they differ by half a per cent or more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.96  # standard errors on each side of a 95 % interval
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


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n answers (Wilson 1927), which has a width for shares of 0 and 1, too."""
    if n < 1 or not math.isfinite(share):
        return math.nan, math.nan
    centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * math.sqrt(max(share * (1 - share), 0.0) / n + Z**2 / (4 * n**2))
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
