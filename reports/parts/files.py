"""Pages as files: the environment of the templates, and writing a page whole or not at all."""

import os
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.record.files import write_whole
from eval.record.metrics import fmt, kind_of, number, percent, with_error
from reports.parts.text import clean

LIMIT_BYTES = 1_000_000  # of every page
MAX_NAME = 100  # characters of a file's name


@dataclass(frozen=True)
class Report:
    """A page that was written; shows its outline and a link to itself in Jupyter.

    Attributes:
        outline: HTML for a notebook's cell.
        beside: whether the executed notebook will lie in the folder of the page.
    """

    path: Path
    outline: str = ""
    beside: bool = False

    def _repr_html_(self) -> str:
        path = self.path.resolve()
        link = path.name if self.beside else _relative(path)
        return (
            f"{self.outline}<p>The whole page: <a href='{quote(link)}' target='_blank'>{escape(link)}</a>"
            f"{'' if self.beside else f' (<code>{escape(str(path))}</code>)'}</p>"
        )


def _relative(path: Path) -> str:
    """A path from the folder of the notebook of this kernel, as links in its cells need it: JupyterLab and VS Code
    resolve them so, and a page of nbconvert lies there. file:// is blocked in all of them."""
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))  # the server's variable
    folder = notebook.parent if notebook.is_absolute() and notebook.parent.is_dir() else Path.cwd()
    return os.path.relpath(path, folder).replace(os.sep, "/")


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
    made.filters |= {"fmt": fmt, "num": number, "percent": percent, "kind_of": kind_of}
    made.filters["mb"] = lambda size: fmt(size, ",.1f", 1e-6)
    made.globals["with_error"] = with_error
    return made


def write_page(html: str, path: str | Path, outline: str = "") -> Report:
    """Write a page, whole or not at all. A name that no file can have is shortened, or replaced by report.html.

    Args:
        outline: HTML for a notebook's cell.
    """
    path = Path(path)
    name = clean(path.name.encode(errors="replace").decode(), MAX_NAME)
    if os.path.isdir(path) or name.strip(". ") == "":
        path, name = path / "report.html", "report.html"
    return Report(write_whole(html.encode(errors="replace").decode(), path.with_name(name)), outline)
