"""The list of papers (seeds/papers.yml) as a page: the claim of each paper, and our measurement."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.record.reading import row
from reports.parts.files import Report, environment, write_page
from reports.parts.text import link

_FIGURE = re.compile(r"([+-]?)([\d,]+(?:\.(\d+))?)(?: (%|MB|of \d+))?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_ARXIV = re.compile(r"(?:arXiv:)?(\d{4}\.\d{4,5}(?:v\d+)?)")


@dataclass(frozen=True)
class Claim:
    metric: str
    value: str
    setting: str


@dataclass(frozen=True)
class FigureSource:
    """The record of a measurement: its file below reports/published, and the figures of the value by key path."""

    file: str
    figures: dict[str, str]

    @property
    def date(self) -> str:
        """The date in the file's name; "" if there is none."""
        found = _DATE.search(self.file)
        return found[0] if found else ""


@dataclass(frozen=True)
class Measurement(Claim):
    command: str
    record: FigureSource | None


@dataclass(frozen=True)
class Paper:
    """An entry of the ledger (seeds/README.md has its shape)."""

    id: str
    title: str
    paper: str
    claim: Claim
    order: str
    module: str
    notebook: str
    measured: tuple[Measurement, ...]

    @property
    def url(self) -> str:
        number = _ARXIV.fullmatch(self.paper)
        return f"https://arxiv.org/abs/{number[1]}" if number else ""

    @property
    def files(self) -> list[str]:
        return [path for path in (self.module, self.notebook) if path]


def recorded(record: Mapping[str, object], path: str) -> float:
    """The number in a record that a key path of the ledger names.

    Args:
        path: keys with " / " between them; an entry of a list is named by its recipe, value, model, key or place. A
            list of numbers stands for their median. " and " averages two such numbers of one part of the record, and
            " over " divides two.

    Raises:
        KeyError: the record has no such key.
    """
    numerator, over, denominator = path.partition(" over ")
    if over:
        return recorded(record, numerator) / recorded(record, denominator)
    numbers = []
    for one in re.split(f" and (?={re.escape(path.partition(' / ')[0])} / )", path):  # names of models may hold " and "
        found: Any = record
        for key in one.split(" / "):
            found = _entry(found, key) if isinstance(found, list) else found[key]
        numbers.append(statistics.median(found) if isinstance(found, list) else found)
    return sum(numbers) / len(numbers)


def _entry(rows: Sequence[Any], key: str) -> Any:
    """The entry of a record's list that bears a name, or that at a place in the list."""
    for one in rows:
        if isinstance(one, Mapping) and key in (one.get(name) for name in ("recipe", "value", "model", "key")):
            return one
    if key.isdecimal() and int(key) < len(rows):
        return rows[int(key)]
    raise KeyError(key)


def agrees(figure: str, number: float) -> bool:
    """Whether a figure of the ledger is a number of a record, rounded to the figure's decimals.

    Args:
        figure: such as "24.61", "+8.8 %", "113.1 MB" or "86 of 100". A sign means the change that a ratio is.

    Raises:
        ValueError: the figure has none of these forms.
    """
    shown = _FIGURE.fullmatch(figure)
    if shown is None:
        raise ValueError(f"`figures` (={figure!r}) of the ledger must be a number such as 24.61, +8.8 %, 1 MB, 8 of 10")
    sign, digits, decimals, unit = shown.groups()
    unit = unit or ""
    scale = 100.0 if unit == "%" else 1e-6 if unit == "MB" else float(unit.removeprefix("of ") or 1)
    value = (number - 1 if sign else number) * scale
    return abs(value - float(sign + digits.replace(",", ""))) <= 0.5001 * 10 ** -len(decimals or "")


def render_papers(
    entries: Sequence[Mapping[str, object]], path: str | Path, *, records: Mapping[str, str] = {}, root: str = ""
) -> Report:
    """Write the page of the ledger, whole or not at all.

    Args:
        entries: the content of seeds/papers.yml.
        records: links to the pages of the measurements' runs, relative to this page, by the command in the ledger, or
            by the id of the paper for all of its measurements.
        root: of the code, relative to this page; modules and notebooks are links if it is given.
    """
    return write_page(papers_page(entries, records=records, root=root), path)


def papers_page(entries: Sequence[Mapping[str, object]], *, records: Mapping[str, str] = {}, root: str = "") -> str:
    """The page as HTML."""
    papers = [row(Paper, entry) for entry in entries]

    def run_of(paper: Paper, one: Measurement) -> str:
        if one.record and root:
            return link(root, f"reports/published/{one.record.file}")
        return link((records.get(one.command) or records.get(paper.id) or "").lstrip("/"))

    return (
        environment()
        .get_template("papers.html")
        .render(
            papers=papers,
            run_of=run_of,
            file_of=lambda path: link(root, path) if root else "",
            measured=sum(bool(paper.measured) for paper in papers),
            measurements=sum(len(paper.measured) for paper in papers),
            linked=sum(bool(run_of(paper, one)) for paper in papers for one in paper.measured),
        )
    )
