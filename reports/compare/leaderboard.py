"""The leaderboard: one row for every model of every run, the baselines on top, with marks for the best of each column
and for values that are indistinguishable from it."""

import statistics
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from eval.record.metrics import described, fmt, percent
from eval.record.metrics import number as significant
from reports.compare.noise import Amount, ahead, better
from reports.compare.outcome import RunOutcome
from reports.compare.variants import Number, Quantity, Variant, drift, variants
from reports.parts.files import environment
from reports.parts.table import markdown_table
from reports.parts.text import clean, link, plural

MAX_ROWS = 400
LOST = "lost"  # in the cell of a measure of accuracy that is not finite, or missing
_KINDS = ("task", "perplexity", "kl", "exact", "stored", "bits", "decode", "prefill", "cache")
_HEADS = {
    # kind: label, unit, factor of the shown number, digits, direction (1: more is better, -1: less, 0: neither)
    "task": ("", "", 1, 1, 1),  # depends on its metric
    "perplexity": ("perplexity", "", 1, 2, -1),
    "kl": ("KL", "nats", 1, 4, -1),
    "exact": ("exact", "%", 100, 0, 1),
    "stored": ("stored", "MB", 1e-6, 1, -1),
    "bits": ("bits", "per weight", 1, 2, 0),
    "decode": ("decode", "tokens/s", 1, 1, 1),
    "prefill": ("prefill", "tokens/s", 1, 0, 1),
    "cache": ("KV cache", "MB", 1e-6, 2, -1),
}  # fmt: skip


class Column(NamedTuple):
    """A column: its quantity, its head, the small print below, and the better direction (1, -1, or 0: neither)."""

    what: Quantity
    label: str
    detail: str
    better: int


class BoardMark(NamedTuple):
    """text: in the column's unit; error: ± or the spread; change: relative to the baseline; mark: best, alike or
    nothing."""

    value: float | None = None
    text: str = "–"
    error: str = ""
    change: str = ""
    mark: str = ""


@dataclass(frozen=True)
class BoardRow:
    """A model. number: 0 for a baseline; run: key of its run (the number of runs, for a baseline of several), marked if
    it is stale; href: of the run's report."""

    number: int
    recipe: str
    name: str
    model: str
    run: str
    href: str
    cells: tuple[BoardMark, ...]


@dataclass(frozen=True)
class Leaderboard:
    """Rows as data, with a representation for Jupyter and, as `markdown()`, for a terminal."""

    columns: tuple[Column, ...]
    rows: tuple[BoardRow, ...]
    hidden: int = 0

    @property
    def several_models(self) -> bool:
        return len({row.model for row in self.rows}) > 1

    def markdown(self) -> str:
        """The table as Markdown: ★ is the best of its column, ≈ values that are indistinguishable from it."""
        said = markdown_table(self.head, self.lines, 3)
        return said + (f"\n{plural(self.hidden, 'more row')} not shown.\n" if self.hidden else "")

    def _repr_html_(self) -> str:
        """The table, sorted by a click on a header, and filtered as one types."""
        down = [False] * 3 + [column.better > 0 for column in self.columns]
        values = [
            [row.number or "", self._recipe(row), row.run]
            + ["" if cell.value is None else f"{cell.value:.10g}" for cell in row.cells]
            for row in self.rows
        ]
        pairs = [list(zip(*both, strict=True)) for both in zip(self.lines, values, strict=True)]
        return (
            environment()
            .get_template("board.html")
            .render(
                id=f"board-{uuid.uuid4().hex[:8]}",
                head=list(zip(self.head, down, strict=True)),
                rows=[(not row.number, cells) for row, cells in zip(self.rows, pairs, strict=True)],
                hidden=plural(self.hidden, "more row") if self.hidden else "",
            )
        )

    @property
    def lines(self) -> list[list[str]]:
        """The rows as text."""
        return [
            [str(row.number or ""), self._recipe(row), row.run, *(_flat(cell) for cell in row.cells)]
            for row in self.rows
        ]

    @property
    def head(self) -> list[str]:
        """The names of the columns."""
        return ["#", "recipe", "run", *(f"{c.label}, {c.detail}" if c.detail else c.label for c in self.columns)]

    @property
    def data(self) -> dict[str, list[dict[str, object]]]:
        """The rows with numbers, for a file."""
        return {
            "rows": [
                {"number": row.number, "recipe": row.recipe, "model": row.model, "run": row.run}
                | {name: cell.value for name, cell in zip(self.head[3:], row.cells, strict=True)}
                for row in self.rows
            ]
        }

    def _recipe(self, row: BoardRow) -> str:
        return f"{row.recipe}, {row.model}" if self.several_models else row.recipe


def leaderboard(outcomes: Sequence[RunOutcome], most: int = MAX_ROWS) -> Leaderboard:
    """The models of all runs that have scores; if there are more than `most`, the main one of every run comes
    first."""
    return of_variants(variants(outcomes), most)


def of_variants(found: Sequence[Variant], most: int = MAX_ROWS) -> Leaderboard:
    """The same, from variants."""
    columns = _columns(found)
    marks = _marks(found, columns)
    bases = [
        list(same)
        for _, same in groupby(
            sorted((v for v in found if v.baseline), key=lambda v: str(v.identity)), key=lambda v: v.identity
        )
    ]
    rest = [v for v in found if not v.baseline]
    kept = sorted(sorted(rest, key=lambda v: v.name != "compressed")[:most], key=lambda v: v.number)
    twins = Counter(same[0].weights for same in bases)
    rows = [_baseline(same, columns, twins[same[0].weights] > 1) for same in bases[:most]]
    for v in kept:
        cells = tuple(
            BoardMark(text=LOST)
            if c.what in v.lost
            else _cell(v.numbers.get(c.what), c, marks.get((v.number, c.what), ""))
            for c in columns
        )
        named = (
            "" if v.name in ("compressed", v.recipe) or "(" in v.name else clean(v.name, 80)
        )  # otherwise it repeats the recipe
        rows.append(BoardRow(v.number, v.recipe, named, v.model, _run(v), link(v.run.href, "report.html"), cells))
    return Leaderboard(tuple(columns), tuple(rows), len(rest) - len(kept) + max(len(bases) - most, 0))


def _run(v: Variant) -> str:
    return (
        clean(v.run.key, 100) + (" (stale)" if v.run.stale else "") + (" (noisy)" if v.run.measured.disturbed else "")
    )


def _columns(found: Sequence[Variant]) -> list[Column]:
    """Columns for all quantities that any model has; the amount of data is shown if it differs between models."""
    quantities = sorted(dict.fromkeys(w for v in found for w in v.numbers), key=lambda w: _KINDS.index(w.kind))
    columns = []
    for what in quantities:
        label, unit, _, _, way = _HEADS[what.kind]
        twins = [w for w in quantities if w[:2] == what[:2]]
        if what.kind == "task":
            name, _, metric = what.of.rpartition(" ")
            label, way = clean(name, 60), next(1 if v.higher[what] else -1 for v in found if what in v.higher)
            called, unit, _ = described(clean(metric, 40))
            detail = [called.lower(), unit]
        else:
            detail = [clean(what.of, 40), unit]
        detail += [clean(what.protocol, 80)] if len(twins) > 1 else []
        columns.append(Column(what, label, ", ".join(filter(None, detail)), way))
    return columns


def _baseline(same: list[Variant], columns: Sequence[Column], several: bool) -> BoardRow:
    """A baseline that was measured in these runs: medians, and the range if they differ."""
    first, cells = same[0], []
    for column in columns:
        numbers = [v.numbers[column.what] for v in same if column.what in v.numbers]
        if not numbers:
            cells.append(BoardMark())
            continue
        values = [n.value for n in numbers]
        number = numbers[0]._replace(value=statistics.median(values), ratio=None)
        if max(values) > min(values) * 1.001:
            number = Number(number.value, low=min(values), high=max(values))
        cells.append(_cell(number, column, ""))
    run, href = (_run(first), first.run.href) if len(same) == 1 else (plural(len(same), "run"), "")
    name = f"{first.run.measured.provenance.dtype}, {first.machine}" if several else ""
    return BoardRow(0, first.label, name, first.model, clean(run, 100), link(href, "report.html"), tuple(cells))


def _cell(number: Number | None, column: Column, mark: str) -> BoardMark:
    if number is None:
        return BoardMark()
    _, _, factor, digits, _ = _HEADS[column.what.kind]
    kind = column.what.kind
    if kind == "task":
        _, unit, factor = described(column.what.of.rpartition(" ")[2])
        digits = 1 if unit == "%" else 3
    value = number.value * factor
    small = kind in ("kl", "cache") and 0 < abs(value) < 0.01
    text = significant(value) if small else fmt(value, f",.{digits if abs(value) < 1000 else 0}f")
    error = change = ""
    if number.stderr is not None:
        shown = number.stderr * factor
        error = f"± {shown:,.0f}" if shown >= 100 else f"± {shown:.2g}"
    elif number.low is not None and number.high is not None:
        error = "–".join(fmt(end, f",.{digits}f", factor) for end in (number.low, number.high))
    if number.ratio is not None and kind == "task":
        change = f"{number.ratio * 100:.1f} %"
        if number.ratio_low is not None and number.ratio_high is not None:
            change += f" [{number.ratio_low * 100:.1f}, {number.ratio_high * 100:.1f}]"
    elif number.ratio and kind == "perplexity":
        change = percent(1 / number.ratio - 1) if number.ratio > 1e-4 else "> 10,000 ×"
    elif number.ratio is not None and kind in ("stored", "cache"):
        change = f"{number.ratio * 100:.0f} %"
    elif number.ratio is not None:
        change = f"{number.ratio:.2f}×"
    return BoardMark(number.value, text, error, change, mark)


def _marks(found: Sequence[Variant], columns: Sequence[Column]) -> dict[tuple[int, Quantity], str]:
    """The best of each column, among models of the same weights (and, for speeds, of the same machine), and the values
    that are equally good. A model that lost a measure of accuracy is the best of nothing."""
    marks = {}
    for what, way in ((c.what, c.better) for c in columns if c.better):
        timed = what.kind in ("decode", "prefill")
        groups: dict[tuple, list[Variant]] = {}
        for v in found:
            if not v.baseline and not v.lost and what in v.numbers:
                groups.setdefault(v.timing if timed else (v.weights,), []).append(v)
        for group in (g for g in groups.values() if len({v.numbers[what].value for v in g}) > 1):
            best = max(group, key=lambda v: way * v.numbers[what].value)
            drifted = drift(found, best, what) if timed else 1.0
            for v in group:
                if v is best or _same(v, best, what, way, drifted):
                    marks[v.number, what] = "best" if v.numbers[what].value == best.numbers[what].value else "alike"
    return marks


def _same(v: Variant, best: Variant, what: Quantity, way: int, drifted: float) -> bool:
    if what in v.effects and what in best.effects:
        return not better(best.effects[what], v.effects[what])
    (mine, theirs) = (
        Amount(o.numbers[what].value, way, o.numbers[what].low, o.numbers[what].high, v.run.key) for o in (v, best)
    )
    return not ahead(theirs, mine, drifted)


def _flat(cell: BoardMark) -> str:
    mark = {"best": "★ ", "alike": "≈ "}.get(cell.mark, "")
    return " ".join(filter(None, (f"{mark}{cell.text}", cell.error, f"({cell.change})" if cell.change else "")))
