"""Limits by metric that a model must keep: a YAML file and two records -> an answer with an exit status, for CI.

    kl_pydocs: {max: 0.2}                            # of the second run itself
    perplexity_*: {max_ratio: 1.03}                  # second run / first run, of each metric of that name
    acc_hellaswag: {max_fall: 0.01}                  # first run - second run
    decode_tokens_per_s: {min: 100, min_ratio: 0.9}

A metric has the name that it has in a record's scores. A limit is not kept where its metric is missing or not finite in
one of the runs that it reads, or was measured otherwise in the first run, so that a model that lost a measure never
passes. A gate that bounds a metric only where it is good is refused: no model would break it by being bad.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from eval.record.metrics import better
from eval.record.noise import Ends, counts, difference, faster_by
from eval.record.rows import PHASES, RunRecord
from reports.compare.variants import machine
from reports.parts.text import clean

COMPRESSED, STDERR = "compressed", "_stderr"
RULES = {
    "min": "the least value",
    "max": "the largest value",
    "min_ratio": "the least share of the first run's value",
    "max_ratio": "the largest multiple of the first run's value",
    "max_rise": "the most by which it may be above the first run's value",
    "max_fall": "the most by which it may be below the first run's value",
}
_OF_ONE = ("min", "max")  # rules that read the second run alone
_GUARDS = {1: ("min", "min_ratio", "max_fall"), -1: ("max", "max_ratio", "max_rise")}  # 1: more is better, -1: less


class Limit(NamedTuple):
    """One rule for the metrics of one name, in which * stands for any characters."""

    metric: str
    rule: str
    value: float


class Checked(NamedTuple):
    """A limit of one metric. a, b: its values in both runs; None: missing. kept: whether b keeps it; said: why not, or
    how near it is."""

    metric: str
    limit: Limit
    a: float | None
    b: float | None
    kept: bool
    said: str


@dataclass(frozen=True)
class GateResult:
    """Every limit with the values that it was given."""

    rows: tuple[Checked, ...]

    @property
    def exit_code(self) -> int:
        """0: all limits are kept. 1: at least one is not."""
        return int(not all(row.kept for row in self.rows))

    def __str__(self) -> str:
        cells = [("metric", "first run", "second run", "limit", "")]
        cells += [
            (row.metric, _shown(row.a), _shown(row.b), f"{row.limit.rule} {row.limit.value:g}", _words(row))
            for row in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        lost = sum(not row.kept for row in self.rows)
        count = f"{len(self.rows)} limit{'s' * (len(self.rows) != 1)}"
        total = f"The gate does not hold: {lost} of {count} not kept." if lost else f"The gate holds: {count} kept."
        return "\n".join([*lines, "", total])


@dataclass(frozen=True)
class Gate:
    """The limits of a file, in its order."""

    limits: tuple[Limit, ...]
    file: str

    def of(self, a: RunRecord, b: RunRecord) -> GateResult:
        """The answer for the compressed model of run `b`, compared with that of run `a`.

        Raises:
            ValueError: no run has a metric that the gate names.
        """
        both = dict.fromkeys(name for one in (a, b) for name in one.scores.get(COMPRESSED) or {})
        known = [name for name in both if not name.endswith(STDERR)]
        rows = []
        for limit in self.limits:
            names = [name for name in known if fnmatchcase(name, limit.metric)]
            if not names:
                near = difflib.get_close_matches(limit.metric, known, n=3, cutoff=0.4) or known
                raise ValueError(
                    f"`--gate` (={self.file!r}): no run has the metric {limit.metric!r}; "
                    f"there are {clean(', '.join(near), 400) or 'none'}"
                )
            rows += [_checked(name, limit, a, b) for name in names]
        self._check_guards(rows)
        return GateResult(tuple(rows))

    def _check_guards(self, rows: list[Checked]) -> None:
        """Raise ValueError if the limits of a metric leave it free where it is bad."""
        for name in dict.fromkeys(row.metric for row in rows):
            rules, guards = {row.limit.rule for row in rows if row.metric == name}, _GUARDS.get(better(name), RULES)
            if not rules & set(guards):
                more = "more" if better(name) > 0 else "less"
                raise ValueError(
                    f"`--gate` (={self.file!r}): `{clean(name, 100)}` has only {', '.join(sorted(rules))}, and {more} "
                    f"of it is better: it needs one of {', '.join(guards)}, too"
                )


def gate_of(content: Any, file: str) -> Gate:
    """The gate that the content of a YAML file describes.

    Raises:
        ValueError: it holds something else than metrics with rules that have finite numbers.
    """
    where = f"`--gate` (={file!r})"
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{where} must name metrics with limits, such as: kl_pydocs: {{max: 0.2}}")
    return Gate(tuple(limit for metric, rules in content.items() for limit in _limits(where, metric, rules)), file)


def _limits(where: str, metric: Any, rules: Any) -> list[Limit]:
    if not isinstance(metric, str) or not isinstance(rules, Mapping) or not rules:
        raise ValueError(
            f"{where}: {str(metric)[:100]!r} must have limits in braces, such as {{max: 0.2}}; "
            f"there are {', '.join(RULES)}"
        )
    for rule, value in rules.items():
        if rule not in RULES:
            near = difflib.get_close_matches(str(rule), RULES, n=1)
            hint = f"did you mean {near[0]}? There" if near else "there"
            raise ValueError(
                f"{where}: `{metric}` has the unknown limit {str(rule)[:40]!r}; {hint} are {', '.join(RULES)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{where}: `{rule}` (={str(value)[:40]!r}) of `{metric}` must be a finite number")
    return [Limit(metric, rule, float(value)) for rule, value in rules.items()]


def _checked(name: str, limit: Limit, first: RunRecord, second: RunRecord) -> Checked:
    a, b = (one.score(COMPRESSED, name) for one in (first, second))
    read = {"second run": b} if limit.rule in _OF_ONE else {"first run": a, "second run": b}
    lost = [
        f"{'missing' if value is None else 'not finite'} in the {run}" for run, value in read.items() if _gone(value)
    ]
    if lost:
        return Checked(name, limit, a, b, False, " and ".join(lost))
    if limit.rule not in _OF_ONE and (apart := _apart(name, first, second)):
        return Checked(name, limit, a, b, False, f"the runs cannot be compared: {apart}")
    if limit.rule.endswith("_ratio") and not a > 0:
        return Checked(name, limit, a, b, False, "the first run's value is not above 0")
    amount, kept = _amount(limit, a, b)
    said = "" if limit.rule in _OF_ONE else f"{amount:.4g}"
    if not kept and not _beyond_noise(name, limit, first, second):
        said += f"{', ' * bool(said)}noise alone could do this"
    return Checked(name, limit, a, b, kept, said)


def _apart(name: str, first: RunRecord, second: RunRecord) -> str:
    """Why a metric of two runs is not the same measure; "" if it is, as far as the records tell."""
    ours, theirs = (_measured(name, one) for one in (first, second))
    return next((f"other {what}" for what in ours if what in theirs and ours[what] != theirs[what]), "")


def _measured(name: str, record: RunRecord) -> dict[str, object]:
    """How a metric was measured, as far as a record tells."""
    told: dict[str, object] = {}
    if corpus := max((one for one in record.texts if name.endswith(f"_{one}")), key=len, default=""):
        told["amounts of text"] = record.texts[corpus]
    for row in record.tasks.rows:
        if name == f"{row.metric}_{row.task}":
            told["questions"] = row.n, row.num_fewshot, row.version, bool(record.tasks.settings.chat)
    if name in PHASES and (timed := record.speed.get(COMPRESSED)):
        how = timed.settings
        told["lengths of the timing"] = how.prompt_tokens, how.new_tokens, how.batch
        told["machines"], told["kinds of decoding"] = machine(record), record.by_generate
    return told


def _gone(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def _amount(limit: Limit, a: float | None, b: float) -> tuple[float, bool]:
    """The number that a limit bounds, and whether it keeps it."""
    match limit.rule:
        case "min" | "max":
            amount = b
        case "min_ratio" | "max_ratio":
            amount = b / a
        case "max_rise":
            amount = b - a
        case _:
            amount = a - b
    return amount, amount >= limit.value if limit.rule.startswith("min") else amount <= limit.value


def _beyond_noise(name: str, limit: Limit, first: RunRecord, second: RunRecord) -> bool:
    """Is a limit broken by a difference that counts (`eval.record.noise`)?"""
    a, b = (one.score(COMPRESSED, name) or 0.0 for one in (first, second))
    share, added = {"min_ratio": (limit.value, 0.0), "max_ratio": (limit.value, 0.0), "max_rise": (1.0, limit.value),
                    "max_fall": (1.0, -limit.value)}.get(limit.rule, (0.0, limit.value))  # fmt: skip
    if name in PHASES and second.speed.get(COMPRESSED):  # b against share · a + added
        edge = _ends(name, first) if share else (0.0, 0.0)
        edge = edge and (share * edge[0] + added, share * edge[1] + added)
        return bool(counts(*faster_by(_ends(name, second), edge)))
    errors = [one.score(COMPRESSED, name + STDERR) or 0.0 for one in (first, second)]
    return bool(counts(*difference(b - (share * a + added), math.hypot(share * errors[0], errors[1]))))


def _ends(name: str, record: RunRecord) -> Ends | None:
    """The interval of a speed, or of the time to the first token, which is that of the prompt's speed turned over."""
    timed, value = record.speed.get(COMPRESSED), record.score(COMPRESSED, name)
    ends = timed.ends(PHASES[name]) if timed else None
    if ends is None or not name.endswith("_s") or name.endswith("_per_s"):
        return ends
    speed = timed.prefill_tokens_per_s
    return value * speed / ends[1], value * speed / ends[0]


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:,.6g}"


def _words(row: Checked) -> str:
    return f"{'kept' if row.kept else 'NOT KEPT'}{f': {row.said}' if row.said else ''}"
