"""Compares two models on the same questions: bootstrap intervals, changed answers and McNemar's test."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eval.record.measured import Paired

_RESAMPLES = 2000
_AT_ONCE = 1 << 20  # number of drawn indices in memory at a time

BINS = 15  # of the certainty


def calibration_error(x: np.ndarray) -> np.ndarray:
    """The expected calibration error of answers [..., n, 2], each of which is (certainty, 1 if it is right, else 0):
    the mean distance between the certainty and the share of right answers, over bins of equal width.

    Source: Guo et al. 2017, arXiv:1706.04599, equation 3, with its 15 bins.
    """
    certain, excess = np.minimum((np.nan_to_num(x[..., 0]) * BINS).astype(int), BINS - 1), x[..., 1] - x[..., 0]
    return sum(np.abs(np.where(certain == b, excess, 0.0).mean(-1)) for b in range(BINS))


# By the name of lm-eval's function or ours, for values [..., n] or, if an item is a pair, [..., n, 2]. Pairs are
# (log-likelihood, length), or those of `calibration_error`.
AGGREGATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda x: x.mean(-1),
    "perplexity": lambda x: np.exp(-x.mean(-1)),
    "weighted_perplexity": lambda x: np.exp(-x[..., 0].sum(-1) / x[..., 1].sum(-1)),
    "calibration_error": calibration_error,
    "bits_per_byte": lambda x: -x[..., 0].sum(-1) / x[..., 1].sum(-1) / math.log(2),
}
_OF_PAIRS = ("weighted_perplexity", "bits_per_byte", "calibration_error")


def fits(aggregate: str, values: Sequence[Any]) -> bool:
    """Can these values be aggregated, and resampled, by the function of this name?"""
    if aggregate not in AGGREGATES or not values:
        return False
    if aggregate in _OF_PAIRS:
        return all(isinstance(value, list | tuple) and len(value) == 2 for value in values)
    return all(isinstance(value, int | float) for value in values)


def stderr(values: Sequence[Any], aggregate: str = "mean") -> float | None:
    """Standard error: for a mean in closed form (as in lm-eval), for any other aggregate from 2,000 resamples; None for
    one value."""
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return None
    if aggregate == "mean":
        return float(x.std(ddof=1) / math.sqrt(len(x)))
    return float(np.std(_resampled(AGGREGATES[aggregate], [x], 0)[0], ddof=1))


def compare(
    baseline: Sequence[Any],
    other: Sequence[Any],
    metric: str = "",
    *,
    aggregate: str = "mean",
    higher_is_better: bool = True,
    seed: int = 0,
) -> Paired:
    """One metric of two models, from its values on the same questions in the same order.

    Args:
        baseline, other: a number per question, or (log-likelihood, length) if the aggregate needs such pairs.
        aggregate: one of AGGREGATES.

    Returns:
        The comparison; the intervals are the 2.5th and 97.5th percentile of 2,000 resamples of the questions.
    """
    pair = [np.asarray(values, dtype=float) for values in (baseline, other)]
    assert pair[0].shape == pair[1].shape and len(pair[0]), "values of the same questions"
    of = AGGREGATES[aggregate]
    before, after = (float(of(x)) for x in pair)
    drawn = _resampled(of, pair, seed)

    def recovery(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.divide(b, a) if higher_is_better else np.divide(a, b)

    recovered = finite(float(recovery(np.float64(before), np.float64(after)))), *_percentiles(recovery(*drawn))
    gap = finite(after - before), *_percentiles(drawn[1] - drawn[0])
    return Paired(metric, len(pair[0]), finite(before), finite(after), *recovered, *gap, *_turned(*pair))


def finite(value: Any) -> Any:
    """The value, with None for numbers that strict JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mcnemar(right_to_wrong: int, wrong_to_right: int) -> float:
    """Exact two-sided p of McNemar's test: the probability of changes as uneven as these if both directions are equally
    likely.

    Source: McNemar, Psychometrika 12 (1947); exact: twice the smaller tail of a binomial of the changes with p = 1/2,
        at most 1.
    """
    turns, fewer = right_to_wrong + wrong_to_right, min(right_to_wrong, wrong_to_right)
    return min(1.0, 2 * sum(math.comb(turns, i) for i in range(fewer + 1)) / 2**turns)


def _turned(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int, float] | tuple[()]:
    """right_to_wrong, wrong_to_right, same and mcnemar_p; nothing if some values are neither 0 nor 1."""
    if a.ndim > 1 or not np.isin([a, b], (0, 1)).all():
        return ()
    worse, better = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return worse, better, len(a) - worse - better, mcnemar(worse, better)


def _resampled(of: Callable[[np.ndarray], np.ndarray], many: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """The aggregate of each of `many`, [2,000], on the same resamples of the items."""
    n, generator = len(many[0]), np.random.default_rng(seed)
    rows, found = max(1, _AT_ONCE // n), []
    for start in range(0, _RESAMPLES, rows):
        drawn = generator.integers(0, n, (min(rows, _RESAMPLES - start), n))  # [rows, n]
        with np.errstate(all="ignore"):
            found.append([of(x[drawn]) for x in many])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _percentiles(values: np.ndarray) -> tuple[float | None, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None
    # Percentiles are existing values, not interpolated ones, because some values may be infinite.
    low, high = np.percentile(known, (2.5, 97.5), method="inverted_cdf")
    return finite(low), finite(high)
