"""Scores of answers from compressed caches: exact matches, likelihood and divergence, by cache and question."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from eval.contexts.written import OwnText, own_text_metrics
from eval.record.html import html_table
from eval.record.measured import CacheAnswers, CacheMeasurements, NeedleDepths, Survival

FULL = "full"  # the cache with which all others are compared
_RESAMPLES = 2000


class Answer(NamedTuple):
    """One answer: is it exact, its negative log-likelihood (nats per token), and the KL divergence from the full cache,
    token by token."""

    exact: bool
    nll: float
    kl: list[float]


@dataclass(repr=False)
class LongContextScores:
    """The measured results.

    Attributes:
        answers: {variant: {(task, length, visibility): [Answer of each sample]}}.
        depths: {(task, length): [depth of each sample's needle, or None]}.
        cache_bytes: {variant: {length: bytes of the cache in 16 bits, mean over samples}}, after compression, including
            everything that the cache holds beside keys and values.
        elsewhere_bytes: those of these bytes that are outside the memory that attention reads.
        survival: {variant: {(task, length): [layers][heads]}}: share of the needle's tokens that are kept.
        kept: {variant: {length: [layers][heads]}}: number of kept positions, mean over samples.
        errors: {variant: [layers]}: ||a - a'||² / ||a||² of the attention's outputs for question and answer.
        seconds: {variant: [compression time of each sample]}. These four are for the first requested visibility.
        written: {variant: [its text after the first question of each sample]}, if texts were asked for.
    """

    answers: dict[str, dict[tuple[str, int, str], list[Answer]]] = field(default_factory=dict)
    depths: dict[tuple[str, int], list[float | None]] = field(default_factory=dict)
    cache_bytes: dict[str, dict[int, float]] = field(default_factory=dict)
    elsewhere_bytes: dict[str, dict[int, float]] = field(default_factory=dict)
    survival: dict[str, dict[tuple[str, int], Any]] = field(default_factory=dict)
    kept: dict[str, dict[int, Any]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    written: dict[str, list[OwnText]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LongContextScores({len(self.answers)} variants, {sum(map(len, self.depths.values()))} contexts)"

    def _repr_html_(self) -> str:
        seen = list(dict.fromkeys(visibility for groups in self.answers.values() for _, _, visibility in groups))
        head = ("cache", "kB", *(f"exact, {v}" for v in seen), *(f"KL, {v}" for v in seen))
        lines = []
        for name, groups in self.answers.items():
            by = [[a for (_, _, v), answers in groups.items() if v == one for a in answers] for one in seen]
            cells = [
                f"{max(self.cache_bytes[name].values()) / 1e3:,.0f}",
                *(f"{np.mean([a.exact for a in of]) * 100:.0f} %" for of in by),
                *(f"{np.mean([np.mean(a.kl) for a in of]):.3g}" for of in by),
            ]
            lines.append((name, *cells))
        return html_table(head, lines)

    def metrics(self) -> dict[str, dict[str, float]]:
        """{variant: {metric: value}} for the record: exact_<task>_<length>_<visibility>, nll_..., kl_..., with
        _stderr, and those of `eval.writing.free_running` if texts were written."""
        found: dict[str, dict[str, float]] = {}
        for name, groups in self.answers.items():
            mine = found.setdefault(name, {})
            for (task, length, visibility), answers in groups.items():
                about = f"{task}_{length}_{visibility.replace('-', '_')}"
                for metric, values in (
                    ("exact", [float(a.exact) for a in answers]),
                    ("nll", [a.nll for a in answers]),
                    ("kl", [sum(a.kl) / len(a.kl) for a in answers]),
                ):
                    mine[f"{metric}_{about}"] = float(np.mean(values))
                    if len(values) > 1:
                        mine[f"{metric}_{about}_stderr"] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
            if name in self.written:
                mine |= own_text_metrics(self.written[name], self.written[FULL] if name != FULL else None)
            for length, size in self.cache_bytes.get(name, {}).items():
                mine[f"cache_bytes_{length}"] = size
        return found

    def found(self, **more: Any) -> CacheMeasurements:
        """All results: the record's entry `cache`; more: its parts that were not measured here."""
        rows = [
            CacheAnswers(
                name,
                task,
                length,
                visibility,
                tuple(int(a.exact) for a in answers),
                tuple(round(a.nll, 5) for a in answers),
                tuple(round(sum(a.kl) / len(a.kl), 5) for a in answers),
                _by_token([a.kl for a in answers]),
            )
            for name, groups in self.answers.items()
            for (task, length, visibility), answers in groups.items()
        ]
        visibilities = dict.fromkeys(row.visibility for row in rows)
        return CacheMeasurements(
            tuple(rows),
            against={
                name: {v: self.against(name, visibility=v) for v in visibilities}
                for name in self.answers
                if name != FULL
            },
            cache_bytes=self.cache_bytes,
            elsewhere_bytes=self.elsewhere_bytes,
            seconds={name: float(np.median(values)) for name, values in self.seconds.items()},
            kept=self.kept,
            survival={
                name: tuple(Survival(t, n, share) for (t, n), share in of.items()) for name, of in self.survival.items()
            },
            errors={name: tuple(of) for name, of in self.errors.items()},
            depths=tuple(NeedleDepths(t, n, tuple(d)) for (t, n), d in self.depths.items()),
            **more,
        )

    def against(self, name: str, other: str = FULL, *, visibility: str, seed: int = 0) -> tuple[float, float, float]:
        """Difference of the share of exact answers over all tasks and lengths, and its 95 % interval by paired
        bootstrap."""
        pairs = [
            float(a.exact) - float(b.exact)
            for key, answers in self.answers[name].items()
            if key[2] == visibility
            for a, b in zip(answers, self.answers[other][key], strict=True)
        ]
        return bootstrap(pairs, seed)


def _by_token(kls: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean KL of the answers' first token, of the second, and so on, as long as half of the answers have the token."""
    longest = sorted(map(len, kls))[len(kls) // 2]
    return tuple(round(float(np.mean([kl[i] for kl in kls if i < len(kl)])), 5) for i in range(longest))


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the values, and the 2.5th and 97.5th percentile of the means of 2,000 resamples."""
    x = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(x), (_RESAMPLES, len(x)))
    low, high = np.percentile(x[drawn].mean(1), (2.5, 97.5))
    return float(x.mean()), float(low), float(high)
