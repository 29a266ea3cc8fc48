"""Limits by metric that a model must keep: a YAML file and two records -> an answer with an exit status, for CI.

    kl_pydocs: {max: 0.2}                            # of the second run itself
    perplexity_*: {max_ratio: 1.03}                  # second run / first run, of each metric of that name
    acc_hellaswag: {max_fall: 0.01}                  # first run - second run
    decode_tokens_per_s: {min: 100, min_ratio: 0.9}

A metric has the name that it has in a record's scores. A limit is not kept where its metric is missing or not finite in
one of the runs that it reads, so that a model that lost a measure never passes.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from eval.record.noise import Z
from eval.record.rows import RunRecord, Scores
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
class Answer:
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

    def of(self, a: RunRecord, b: RunRecord) -> Answer:
        """The answer for the compressed model of run `b`, compared with that of run `a`.

        Raises:
            ValueError: no run has a metric that the gate names.
        """
        first, second = (one.scores.get(COMPRESSED) or {} for one in (a, b))
        known = [name for name in dict.fromkeys((*first, *second)) if not name.endswith(STDERR)]
        rows = []
        for limit in self.limits:
            names = [name for name in known if fnmatchcase(name, limit.metric)]
            if not names:
                near = difflib.get_close_matches(limit.metric, known, n=3, cutoff=0.4) or known
                raise ValueError(
                    f"`--gate` (={self.file!r}): no run has the metric {limit.metric!r}; "
                    f"there are {clean(', '.join(near), 400) or 'none'}"
                )
            rows += [_checked(name, limit, first, second) for name in names]
        return Answer(tuple(rows))


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


def _checked(name: str, limit: Limit, first: Scores, second: Scores) -> Checked:
    a, b = first.get(name), second.get(name)
    read = {"second run": b} if limit.rule in _OF_ONE else {"first run": a, "second run": b}
    lost = [
        f"{'missing' if value is None else 'not finite'} in the {run}" for run, value in read.items() if _gone(value)
    ]
    if lost:
        return Checked(name, limit, a, b, False, " and ".join(lost))
    if limit.rule.endswith("_ratio") and not a:
        return Checked(name, limit, a, b, False, "the first run's value is 0")
    amount, kept = _amount(limit, a, b)
    said = "" if limit.rule in _OF_ONE else f"{amount:.4g}"
    errors = [scores.get(name + STDERR) or 0.0 for scores in (first, second)]
    if not kept and any(errors) and _amount(limit, *_nearest(limit, a, b, errors))[1]:
        said += f"{', ' * bool(said)}noise alone could do this"
    return Checked(name, limit, a, b, kept, said)


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


def _nearest(limit: Limit, a: float | None, b: float, errors: list[float]) -> tuple[float | None, float]:
    """The values within the noise of both runs that are best for the limit: b moves by 1.96 of the errors together."""
    wider = errors[1] if limit.rule in _OF_ONE else math.hypot(*errors)
    upwards = limit.rule.startswith("min") or limit.rule == "max_fall"
    return a, b + Z * wider * (1 if upwards else -1)


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:,.6g}"


def _words(row: Checked) -> str:
    return f"{'kept' if row.kept else 'NOT KEPT'}{f': {row.said}' if row.said else ''}"
