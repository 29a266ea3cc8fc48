"""The ledger of papers (seeds/papers.yml) as a page: what each claims, and what we measured."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.parts.files import Report, environment, write_page
from reports.parts.text import link

_ARXIV = re.compile(r"(?:arXiv:)?(\d{4}\.\d{4,5}(?:v\d+)?)")


def render_papers(
    entries: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    records: Mapping[str, str] = {},
    root: str = "",
) -> Report:
    """Write the page of the ledger, whole or not at all.

    Args:
        entries: what seeds/papers.yml holds, read: id, title, paper, claim, module, notebook, measured (README.md
            there).
        records: where the page of a measurement's run is, relative to this page, by the command as the ledger writes
            it, or by the id of the paper for all of its measurements.
        root: of the code, relative to this page; modules and notebooks are links if it is given.
    """
    return write_page(papers_page(entries, records=records, root=root), path)


def papers_page(entries: Sequence[Mapping[str, Any]], *, records: Mapping[str, str] = {}, root: str = "") -> str:
    """The page as HTML."""
    papers = [_paper(entry, records, root) for entry in entries]
    return (
        environment()
        .get_template("papers.html")
        .render(
            papers=papers,
            measured=sum(bool(paper["measured"]) for paper in papers),
            measurements=sum(len(paper["measured"]) for paper in papers),
            linked=sum(bool(one["href"]) for paper in papers for one in paper["measured"]),
        )
    )


def _paper(entry: Mapping[str, Any], records: Mapping[str, str], root: str) -> dict[str, Any]:
    found = _ARXIV.fullmatch(str(entry.get("paper") or ""))
    measured = []
    for one in entry.get("measured") or []:
        href = records.get(one.get("command") or "") or records.get(entry["id"]) or ""
        measured.append({**one, "href": link(href.lstrip("/"))})
    paths = [entry[key] for key in ("module", "notebook") if entry.get(key)]
    files = [{"path": path, "href": link(root, path) if root else ""} for path in paths]
    return {
        "id": entry["id"],
        "title": entry["title"],
        "paper": entry.get("paper") or "",
        "claim": entry["claim"],
        "files": files,
        "url": f"https://arxiv.org/abs/{found[1]}" if found else "",
        "measured": measured,
    }
