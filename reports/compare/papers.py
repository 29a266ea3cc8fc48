"""The list of papers (seeds/papers.yml) as a page: the claim of each paper, and our measurement."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.record.reading import row
from reports.parts.files import Report, environment, write_page
from reports.parts.text import link

_ARXIV = re.compile(r"(?:arXiv:)?(\d{4}\.\d{4,5}(?:v\d+)?)")


@dataclass(frozen=True)
class Claim:
    metric: str
    value: str
    setting: str


@dataclass(frozen=True)
class Measurement(Claim):
    command: str


@dataclass(frozen=True)
class Paper:
    """An entry of the ledger (seeds/README.md has its shape)."""

    id: str
    title: str
    paper: str
    claim: Claim
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
