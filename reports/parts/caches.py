"""The caches of a run as rows: bytes, answers by visibility, speed by context."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eval.record.measured import CacheMeasurements
from eval.record.metrics import with_error
from eval.record.noise import counts, wilson
from eval.record.rows import RunRecord
from eval.record.speed import CacheSpeed, Interval

FULL, MAIN = "full", "compressed"
OWN_TEXT = (  # metrics of the texts that are written behind a cache, with headings and scales
    ("free_running_same_tokens", "tokens before a difference", 1),
    ("guess_acceptance", "same most likely token, %", 100),
    ("free_running_kl", "KL", 1),
    ("free_running_repetition", "% repeated", 100),
    ("free_running_tokens", "length", 1),
)
WHEN = {  # of a visibility, in words
    "agnostic": "with the question unknown when the cache was compressed",
    "another": "to a second question that is asked of the same compressed cache",
    "turns": "to a second question that follows the first one after compression",
    "visible": "with the question in sight when the cache was compressed",
    "follow-up": "to a question before which another one was read, and answered, before compression",
}


class CacheCell(NamedTuple):
    """Answers at one visibility. n: their number; against: the difference of exact answers from the full cache's, with
    its interval."""

    n: int
    exact: float | None
    stderr: float | None
    nll: float | None
    nll_stderr: float | None
    kl: float | None
    kl_stderr: float | None
    against: Interval

    @property
    def interval(self) -> tuple[float, float] | tuple[()]:
        """The 95 % interval of the share of exact answers."""
        return () if self.exact is None else wilson(self.exact, self.n)

    @property
    def verdict(self) -> str:
        """bad or good if the interval does not contain 0."""
        if len(self.against) < 3 or not counts(*self.against[1:]):
            return ""
        return "good" if self.against[1] > 0 else "bad"


@dataclass(frozen=True)
class CacheRow:
    """A variant: bytes at the largest length, their share of the full cache's over all lengths, seconds to compress."""

    name: str
    bytes: float | None
    share: float | None
    seconds: float | None
    by: dict[str, CacheCell]

    @property
    def main(self) -> bool:
        return self.name == MAIN


class OwnTextRow(NamedTuple):
    """A cache's own texts; a number and its standard error for each of OWN_TEXT."""

    name: str
    cells: list[tuple[str, str]]

    @property
    def main(self) -> bool:
        return self.name == MAIN


class SpeedCell(NamedTuple):
    """Tokens per second of the model, milliseconds of attention, and the speed-up of attention."""

    tokens: float | None
    ms: float | None
    ratio: float | None


@dataclass(frozen=True)
class CacheSpeedRow:
    name: str
    cells: list[SpeedCell]
    execution: str

    @property
    def main(self) -> bool:
        return self.name == MAIN


def cache_rows(cache: CacheMeasurements) -> list[CacheRow]:
    """A row per variant of a record's `cache`."""
    full = cache.cache_bytes.get(FULL, {})
    rows = []
    for name in dict.fromkeys(one.variant for one in cache.answers):
        sizes = cache.cache_bytes.get(name, {})
        cells = {}
        for visibility in dict.fromkeys(one.visibility for one in cache.answers):
            own = [one for one in cache.answers if one.variant == name and one.visibility == visibility]
            exact, nll, kl = (_mean([v for one in own for v in getattr(one, key)]) for key in ("exact", "nll", "kl"))
            n, against = sum(len(one.exact) for one in own), cache.against.get(name, {}).get(visibility, ())
            cells[visibility] = CacheCell(n, *exact, *nll, *kl, _with_width(against, n))
        share = sum(sizes.values()) / sum(full.values()) if sizes and sum(full.values()) else None
        largest = sizes[max(sizes)] if sizes else None
        rows.append(CacheRow(name, largest, share, cache.seconds.get(name), cells))
    return rows


def own_text_rows(run: RunRecord) -> list[OwnTextRow]:
    """A row per cache whose own texts were measured, the full one first."""
    rows = []
    for model in run.models:
        own = run.scores[model]
        if "free_running_tokens" in own:
            values = [(own.get(metric), own.get(f"{metric}_stderr"), scale) for metric, _, scale in OWN_TEXT]
            rows.append(OwnTextRow(FULL if model == "baseline" else model, [with_error(*one) for one in values]))
    return rows


def _with_width(against: Interval, n: int) -> Interval:
    """An interval of a mean difference, with a width also if all n differences are the same: the bootstrap gives it
    none, although another of them could differ as often as Wilson's interval of n in n says."""
    if len(against) != 3 or against[1] != against[2] or n < 1:
        return against
    half = 1 - wilson(1.0, n)[0]
    return against[0], max(against[0] - half, -1.0), min(against[0] + half, 1.0)


def speed_rows(speed: CacheSpeed) -> list[CacheSpeedRow]:
    """A row per variant that was timed, with a cell per context."""
    rows = []
    for name, attention in speed.attention_s.items():
        whole, ratios = speed.tokens_per_s.get(name, {}), speed.attention_speedup.get(name, {})
        cells = [
            SpeedCell(whole[c][0] if whole.get(c) else None, seconds[0] * 1e3 if seconds else None, ratios.get(c))
            for c, seconds in sorted(attention.items())
        ]
        rows.append(CacheSpeedRow(name, cells, speed.execution.get(name, "")))
    return rows


def _mean(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error."""
    x = np.asarray(values, dtype=float)
    if not len(x):
        return None, None
    with np.errstate(all="ignore"):
        return float(x.mean()), float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else 0.0
