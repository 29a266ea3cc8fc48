"""The comparison of every model with every other: which are on the front, within its noise, or dominated.

Two things are weighed: how much worse than its own baseline a model is (its cost), and what it takes (bytes) or gives
(tokens per second). A model is *dominated* where another is at least as good in both and better beyond noise in one.
Where another looks better, but only within the noise, they are *indistinguishable* at this number of samples, and both
stay. Whether a difference is noise is decided by `eval.record.noise`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eval.record.noise import SAME_SIZE, counts, difference, faster_by

MAX_ALIKE = 6  # models that a page names
RULE = (
    "A recipe is dominated only where another is at least as good in both and better beyond noise in one. Accuracies "
    "differ beyond noise where their difference exceeds 1.96 of its standard errors. Each accuracy is first paired "
    "with the baseline of its own run (same questions, same text) where the record has that, and the two errors are "
    "combined; this is careful, because mistakes that two recipes have in common count twice. Where another recipe "
    "looks better, but not beyond noise, the two are indistinguishable at this n, and both stay. Sizes differ where "
    "they do so by more than 0.5 %. Speeds differ where they do so by more than one model that was timed twice in the "
    "same turns (in earlier records: where the quartiles of their rounds do not overlap), and, between runs, where the "
    "difference also exceeds that between the baselines of these runs; those of a disturbed run are not told apart. An "
    "accuracy without a standard error counts as exact."
)


class Effect(NamedTuple):
    """A model's loss of accuracy relative to its own baseline (0 for the baseline), and the standard error or None."""

    cost: float
    stderr: float | None = None


class Amount(NamedTuple):
    """Bytes or speed. sign: 1 if more is better, else -1; low and high: the interval of a speed
    (`eval.record.noise.speed_ends`); run: the run of the measurement."""

    value: float
    sign: int
    low: float | None = None
    high: float | None = None
    run: str = ""


@dataclass(frozen=True)
class Standing:
    """front, noise or dominated; by: index of the model that dominates it, or is better within the noise; alike:
    indices of the first `MAX_ALIKE` models that are indistinguishable from it in both quantities, and their number."""

    status: str
    by: int | None = None
    alike: tuple[int, ...] = ()
    alike_count: int = 0


def better(a: Effect, b: Effect) -> bool:
    """Is a better than b, beyond noise?"""
    gap = b.cost - a.cost
    return gap > 0 and counts(*difference(gap, math.hypot(a.stderr or 0.0, b.stderr or 0.0)))


def ahead(a: Amount, b: Amount, drift: float = 1.0) -> bool:
    """Does a have fewer bytes, or a higher speed, than b, beyond noise?

    Args:
        drift: variation of the same baseline between runs, largest over smallest.
    """
    if a.sign < 0:
        return a.value < b.value * (1 - SAME_SIZE)
    own, other = (None if one.low is None or one.high is None else (one.low, one.high) for one in (a, b))
    apart = a.value > b.value and counts(*faster_by(own, other))
    return apart and (a.run == b.run or a.value > b.value * drift)


def standings(points: Sequence[tuple[Effect, Amount]], drift: float = 1.0) -> list[Standing]:
    """The standing of each model among all: `better` and `ahead` for every pair, one row at a time."""
    if not points:
        return []
    cost, error = (np.array([p[0][i] or 0.0 for p in points]) for i in (0, 1))
    value = np.array([p[1].value for p in points], dtype=float)
    low, high = (np.array([np.nan if (end := p[1][i]) is None else end for p in points], dtype=float) for i in (2, 3))
    run = np.array([p[1].run for p in points])
    sign = points[0][1].sign
    found: list[Standing] = []
    better_looking = []  # of each model: a bit per model that is better within the noise
    for i in range(len(points)):
        apart = counts(*difference(cost[i] - cost, np.hypot(error, error[i])))
        if sign < 0:
            beyond, behind = value < value[i] * (1 - SAME_SIZE), value[i] < value * (1 - SAME_SIZE)
        else:
            told = counts(low - high[i], high - low[i]) & (
                (run == run[i]) | (np.maximum(value, value[i]) > np.minimum(value, value[i]) * drift)
            )
            beyond, behind = told & (value > value[i]), told & (value < value[i])
        wins = (apart & (cost < cost[i])) | beyond
        loses = (apart & (cost > cost[i])) | behind
        as_good = (cost <= cost[i]) & (value <= value[i] * (1 + SAME_SIZE) if sign < 0 else value >= value[i])
        others = np.arange(len(points)) != i
        over = np.flatnonzero(as_good & wins & others)
        alike = ~wins & ~loses & others
        looks = alike & as_good & ((cost < cost[i]) | (sign * (value - value[i]) > 0))
        better_looking.append(np.packbits(looks))
        if len(over):
            found.append(Standing("dominated", int(over[np.argmin(cost[over])])))
        else:
            same = np.flatnonzero(alike)
            found.append(
                Standing("noise" if looks.any() else "front", None, tuple(same[:MAX_ALIKE].tolist()), len(same))
            )
    front = np.array([s.status == "front" for s in found])
    for i, (standing, bits) in enumerate(zip(found, better_looking, strict=True)):
        if standing.status == "noise":
            looks = np.unpackbits(bits, count=len(points)).astype(bool)
            found[i] = replace(standing, by=int(np.argmax(looks & front if (looks & front).any() else looks)))
    return found
