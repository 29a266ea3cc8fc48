"""Pages as files: the templates' environment, and a page written whole or not at all."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.record.files import write_whole
from reports.parts import table
from reports.parts.metrics import number

LIMIT_BYTES = 1_000_000  # of every page


@dataclass(frozen=True)
class Report:
    """A page that was written; shows a link to itself in Jupyter."""

    path: Path

    def _repr_html_(self) -> str:
        path = escape(str(self.path.resolve()))
        return f"<p>Report: <a href='file://{path}' target='_blank'><code>{path}</code></a></p>"


def environment() -> Environment:
    """Jinja with the templates; everything is escaped unless it says `| safe`."""
    made = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"mb": lambda b: f"{b / 1e6:,.1f}", "num": number, "percent": table.percent, "faster": faster}
    return made


def write_page(html: str, path: str | Path) -> Report:
    """Write a page, whole or not at all."""
    return Report(write_whole(html, Path(path)))


def faster(ratio: float) -> str:
    """Is a speed-up good or bad, or neither?"""
    return "" if 0.97 <= ratio <= 1.03 else "good" if ratio > 1 else "bad"
