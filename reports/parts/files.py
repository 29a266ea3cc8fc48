"""Pages as files: the environment of the templates, and writing a page whole or not at all."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape, unescape
from pathlib import Path
from urllib.parse import quote, unquote

import psutil
from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.record.files import write_whole
from eval.record.metrics import fmt, kind_of, number, percent, with_error
from reports.parts.text import clean, coded, link, public

LIMIT_BYTES = 1_000_000  # of every page
MAX_NAME = 100  # characters of a file's name
_CONTENTS = "<!-- contents -->"
_LINKS = re.compile("<!-- links -->.*?<!-- end of links -->", re.S)


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
    for notebook in (Path(os.environ.get("JPY_SESSION_NAME", "")), _papermills_output()):  # the server's variable
        if notebook.is_absolute() and notebook.parent.is_dir():
            return os.path.relpath(path, notebook.parent.resolve()).replace(os.sep, "/")
    return os.path.relpath(path, Path.cwd()).replace(os.sep, "/")


def _papermills_output() -> Path:
    """The notebook that papermill writes, if its command line has started this kernel; papermill tells it to nobody
    else."""
    try:
        starter = psutil.Process(os.getppid())
        words, folder = starter.cmdline(), starter.cwd()
    except psutil.Error:
        return Path()
    notebooks = [word for word in words if word.endswith(".ipynb")]
    by_papermill = any("papermill" in word for word in words[:3])
    return Path(folder, notebooks[1]) if by_papermill and len(notebooks) > 1 else Path()


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
    made.filters |= {"clean": clean, "coded": coded, "public": public, "link": link}
    made.filters["mb"] = lambda size: fmt(size, ",.1f", 1e-6)
    made.globals["with_error"] = with_error
    return made


def with_contents(html: str) -> str:
    """A page whose headings have ids, and which lists them where its template leaves room for that."""
    found: list[tuple[str, str]] = []

    def named(heading: re.Match) -> str:
        text = re.sub(r"<[^>]*>", "", heading["text"])
        own = re.search(r'id="([^"]+)"', heading["attributes"])
        name = own[1] if own else "part-" + re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
        found.append((name, text))
        attributes = heading["attributes"] if own else f'{heading["attributes"]} id="{name}"'
        return f"<h2{attributes}>{heading['text']}</h2>"

    html = re.sub(r"<h2(?P<attributes>[^>]*)>(?P<text>.*?)</h2>", named, html)
    listed = "".join(f'<li><a href="#{name}">{text}</a></li>' for name, text in found)
    return html.replace(_CONTENTS, f"<ul>{listed}</ul>", 1)


def with_links(html: str, links: Mapping[str, str]) -> str:
    """A page with links to the pages and files around it, in place of those that it has.

    Args:
        links: {label: address relative to the page}.
    """
    shown = " · ".join(f'<a href="{quote(at, safe="/.~-_#")}">{escape(label)}</a>' for label, at in links.items())
    return _LINKS.sub(lambda _: f"<!-- links -->{shown}<!-- end of links -->", html, count=1)


def links_of(html: str) -> dict[str, str]:
    """The links of a page, as `with_links` wrote them."""
    shown = _LINKS.search(html)
    found = re.findall(r'<a href="([^"]*)">([^<]*)</a>', shown[0]) if shown else []
    return {unescape(label): unquote(at) for at, label in found}


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
