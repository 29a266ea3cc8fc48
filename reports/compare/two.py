"""Two runs: does the second keep the accuracy of the first? A verdict with an exit code, for continuous integration."""

import math
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from eval.record.html import html_table
from eval.record.metrics import fmt
from eval.record.noise import Z, counts
from eval.record.rows import RunRecord, typed
from reports.compare.noise import Amount, ahead
from reports.compare.outcome import RunOutcome
from reports.compare.variants import INTERVAL, Quantity, Variant, drift, of_run
from reports.parts.table import Record
from reports.parts.text import clean, listed

_TRIED = ("task", "perplexity", "exact")


class VerdictRow(NamedTuple):
    """A metric of both runs. recovery: b / a (a / b for a perplexity), with the ends of its 95 % interval, None if a
    standard error is unknown."""

    metric: str
    a: float
    b: float
    recovery: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Verdict:
    """text: plain sentences; exit_code: 0 if the second run keeps the accuracy, 1 if not; rows: a row per metric of
    accuracy, then the ratios of size and speed."""

    text: str
    exit_code: int
    rows: list[VerdictRow]

    def _repr_html_(self) -> str:
        lines = [(row.metric, f"{row.a:.6g}", f"{row.b:.6g}", f"{row.recovery:.4f}", _range(row)) for row in self.rows]
        return f"<p>{escape(self.text)}</p>{html_table(('metric', 'a', 'b', 'b / a', '95 %'), lines)}"


def compare_two(a: Record, b: Record, *, recovery_threshold: float = 0.99) -> Verdict:
    """Compare the compressed model of run `b` with that of run `a` (or with a's baseline, if a compressed nothing).

    The recovery of a task is its accuracy in b divided by that in a; if no task has the same settings in both runs, the
    perplexity of a divided by that of b; else the exact answers of caches. The verdict uses the mean over these.
    Intervals (95 %) come from the paired differences of both to their baselines if the records have them, else from the
    standard errors.

    A measure of accuracy that b lost fails it, whatever the others say: one that is not finite, or that its own
    baseline or the compressed model of a has, and b has not.

    Args:
        recovery_threshold: the least mean recovery, as a share, with which b passes.

    Raises:
        ValueError: runs of different models, without a metric of accuracy that both have, or a threshold that is not
            above 0.
    """
    if not (isinstance(recovery_threshold, int | float) and 0 < recovery_threshold < math.inf):
        raise ValueError(f"`recovery_threshold` (={recovery_threshold!r}) must be a share above 0, such as 0.99")
    a, b = typed(a), typed(b)
    for name, one in (("a", a), ("b", b)):
        if not one.scores or not one.model.name:
            raise ValueError(
                f"`{name}` (={one.run.key!r}) is the record of a run without scores of a model; compare two records "
                "with scores"
            )
    first, second = _main(a), _main(b)
    if first.weights != second.weights:
        raise ValueError(
            f"`a` and `b` are runs of different models: {first.model!r} in {a.run.key} and {second.model!r} in "
            f"{b.run.key} (weights {first.weights[:12]} and {second.weights[:12]}); compare runs of the same model"
        )
    rows, gone = _recoveries(first, second), _gone(first, second)
    if not rows and not second.lost:
        raise ValueError(
            f"`a` (={a.run.key!r}) and `b` (={b.run.key!r}) share no metric of accuracy: a has {_names(first)}, b has "
            f"{_names(second)}; score both on the same tasks, or on the same amount of the same text"
        )
    said = [f"{clean(b.run.key, 100)}, {second.label}, against {clean(a.run.key, 100)}, {first.label}:"]
    holds = not gone
    if gone:
        said.append(f"it lost {listed(gone, 5)}, not finite or missing there: it does not hold.")
    if rows:
        recovery = sum(row.recovery for row in rows) / len(rows)
        known = all(row.low is not None for row in rows)
        half = math.hypot(*((row.high - row.low) / 2 for row in rows)) / len(rows) if known else None
        said.append(_said(rows, recovery, half))
        if not gone:
            holds = recovery >= recovery_threshold
            said.append(_decided(holds, recovery_threshold, recovery, half))
    ratios, told = _ratios(first, second)
    return Verdict(" ".join(said + told), 0 if holds else 1, rows + ratios)


def _gone(a: Variant, b: Variant) -> list[str]:
    """The measures of accuracy that b lost, and those that a has and b was not measured by, with any amount of data."""
    there = {(q.kind, q.of) for q in b.numbers}
    missing = {q for q in a.numbers if q.kind in _TRIED and (q.kind, q.of) not in there}
    return sorted({q.words for q in b.lost | missing})


def _main(record: RunRecord) -> Variant:
    found = {v.name: v for v in of_run(RunOutcome(record.run.key, record.run.notebook, "finished", record=record))}
    if "compressed" in found and found["compressed"].numbers:
        return found["compressed"]
    return found.get("baseline") or next(iter(found.values()))


def _recoveries(a: Variant, b: Variant) -> list[VerdictRow]:
    for kind in _TRIED:
        shared = [w for w in a.numbers if w.kind == kind and w in b.numbers and a.higher.get(w, True)]
        rows = [
            _row(a, b, w)
            for w in shared
            if a.numbers[w].value > 0 <= b.numbers[w].value and (b.numbers[w].value or kind != "perplexity")
        ]
        if rows:
            return rows
    return []


def _row(a: Variant, b: Variant, what: Quantity) -> VerdictRow:
    before, after = a.numbers[what].value, b.numbers[what].value
    recovery = before / after if what.kind == "perplexity" else after / before
    errors = [_relative(v, what) for v in (a, b)]
    half = None if None in errors else Z * recovery * math.hypot(*errors)
    if half is not None and what.kind != "perplexity" and not after:
        half = Z * (b.numbers[what].stderr or 0.0) / before
    ends = (None, None) if half is None else (recovery - half, recovery + half)
    return VerdictRow(what.words, before, after, recovery, *ends)


def _relative(v: Variant, what: Quantity) -> float | None:
    """The relative standard error of a number: if known, that of its ratio to the baseline's, which is paired."""
    number, effect = v.numbers[what], v.effects.get(what)
    if what.kind == "perplexity" and effect is not None and effect.stderr is not None:
        return effect.stderr
    if number.ratio and number.ratio_low is not None and number.ratio_high is not None:
        return (number.ratio_high - number.ratio_low) / INTERVAL / number.ratio
    if v.baseline:
        return 0.0  # the other's difference is paired with it
    if what.kind == "exact" and effect is not None and effect.stderr is not None and number.value:
        return effect.stderr / number.value
    return number.stderr / number.value if number.stderr is not None and number.value else None if number.value else 0.0


def _said(rows: list[VerdictRow], recovery: float, half: float | None) -> str:
    least = min(rows, key=lambda row: row.recovery)
    said = f"recovery {recovery * 100:.1f} %"
    said += "" if half is None else f" [{(recovery - half) * 100:.1f}, {(recovery + half) * 100:.1f}]"
    if len(rows) == 1:
        return f"{said} of {rows[0].metric} ({fmt(rows[0].a, ',.4f')} → {fmt(rows[0].b, ',.4f')})."
    return f"{said}, the mean of {len(rows)}; the least is that of {least.metric}, {least.recovery * 100:.1f} %."


def _decided(holds: bool, threshold: float, recovery: float, half: float | None) -> str:
    said = f"That is {'not ' if holds else ''}below {threshold * 100:g} %: it {'holds' if holds else 'does not hold'}."
    if half is None:
        return said + " How far noise reaches is unknown."
    if counts(recovery - half - threshold, recovery + half - threshold):
        return said + (" So is the whole interval." if holds else " The whole interval is below.")
    return said + (
        " The interval reaches below the threshold."
        if holds
        else " The interval reaches the threshold: noise alone could do this."
    )


def _ratios(a: Variant, b: Variant) -> tuple[list[VerdictRow], list[str]]:
    rows, said = [], []
    kinds = {
        "stored": "stored bytes",
        "cache": "bytes of the cache",
        "decode": "decode tokens/s",
        "prefill": "prefill tokens/s",
    }
    for w in (w for w in a.numbers if w.kind in kinds and w in b.numbers and a.numbers[w].value):
        timed = w.kind in ("decode", "prefill")
        if timed and a.timing != b.timing:
            continue
        ratio = b.numbers[w].value / a.numbers[w].value
        name = f"{kinds[w.kind]}{f', {w.of}' if w.of else ''}"
        rows.append(VerdictRow(name, a.numbers[w].value, b.numbers[w].value, ratio))
        noise = ", within the noise" if timed and not _told(a, b, w) else ""
        said.append(f"{name[0].upper()}{name[1:]}: {ratio:.2f}×{noise}.")
    if (
        a.machine != b.machine
        and any(w.kind == "decode" for w in a.numbers)
        and any(w.kind == "decode" for w in b.numbers)
    ):
        said.append("Speeds were measured on different machines and are not compared.")
    return rows, said


def _told(a: Variant, b: Variant, what: Quantity) -> bool:
    """Do the speeds of two runs differ by more than noise, and by more than those of their baselines?"""
    one, other = (
        Amount(v.numbers[what].value, 1, v.numbers[what].low, v.numbers[what].high, v.run.key) for v in (a, b)
    )
    drifted = drift([base for v in (a, b) for base in of_run(v.run)], a, what)
    return ahead(one, other, drifted) or ahead(other, one, drifted)


def _names(v: Variant) -> str:
    return clean(", ".join(" ".join(filter(None, w)) for w in v.numbers if w.kind in _TRIED) or "none", 300)


def _range(row: VerdictRow) -> str:
    return "" if row.low is None else f"{row.low:.4f} to {row.high:.4f}"
