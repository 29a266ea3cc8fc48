"""Pages as files: the environment of the templates, and writing a page whole or not at all."""

import os
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.record.files import write_whole
from reports.parts.metrics import faster, fmt, number, percent, with_error
from reports.parts.text import clean

LIMIT_BYTES = 1_000_000  # of every page
MAX_NAME = 100  # characters of a file's name


@dataclass(frozen=True)
class Report:
    """A page that was written; shows a link to itself in Jupyter."""

    path: Path

    def _repr_html_(self) -> str:
        path = escape(str(self.path.resolve()))
        return f"<p>Report: <a href='file://{path}' target='_blank'><code>{path}</code></a></p>"


@cache
def environment() -> Environment:
    """The templates; everything is escaped unless a template says `| safe`."""
    made = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"fmt": fmt, "num": number, "percent": percent, "faster": faster}
    made.filters["mb"] = lambda size: fmt(size, ",.1f", 1e-6)
    made.globals["with_error"] = with_error
    return made


def write_page(html: str, path: str | Path) -> Report:
    """Write a page, whole or not at all. A name that no file can have is shortened, or replaced by report.html."""
    path = Path(path)
    name = clean(path.name.encode(errors="replace").decode(), MAX_NAME)
    if os.path.isdir(path) or name.strip(". ") == "":
        path, name = path / "report.html", "report.html"
    return Report(write_whole(html.encode(errors="replace").decode(), path.with_name(name)))
