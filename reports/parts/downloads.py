"""The data of a page as links that hold them: the record as JSON, and its numbers as CSV."""

import base64
import csv
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

from eval.record.reading import plain
from eval.record.rows import RunRecord
from reports.parts.files import LIMIT_BYTES
from reports.parts.text import clean

_PLACE = "<!-- downloads -->"


def numbers(run: RunRecord) -> str:
    """The scores of every model of a record as CSV, and the answers about every cache: a line per number, with its
    standard error or the number of answers."""
    lines: list[Sequence[object]] = []
    for model, own in run.scores.items():
        recipe = run.recipe_of(model, whole=True) or ""
        metrics = [metric for metric in own if not metric.endswith("_stderr")]
        lines += [(model, recipe, metric, own[metric], own.get(f"{metric}_stderr", ""), "") for metric in metrics]
    for one in run.cache.answers if run.cache else ():
        where = f"{one.task}, {one.length} tokens, {one.visibility}"
        for metric in ("exact", "nll", "kl"):
            if values := getattr(one, metric):
                mean = sum(values) / len(values)
                lines.append(
                    (
                        one.variant,
                        run.recipe_of(one.variant, whole=True) or "",
                        f"{metric}: {where}",
                        mean,
                        "",
                        len(values),
                    )
                )
    return as_csv(("model", "recipe", "metric", "value", "stderr", "n"), lines)


def as_csv(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table as CSV. A text that a spreadsheet would compute is quoted by an apostrophe."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow(
            [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" and cell else cell for cell in line]
        )
    return out.getvalue()


def with_downloads(html: str, name: str, csv_text: str, data: Mapping[str, Any] | None, of: str) -> str:
    """A page with links that hold its data, in place of the mark in its template. The JSON is packed, and left out
    where the page would exceed its limit.

    Args:
        name: of the files, without ending.
        data: None: there is no JSON.
        of: what the data are, in words.
    """
    name = escape(clean(name, 80).replace("/", "-"))
    links = [f'<a download="{name}.csv" href="data:text/csv;base64,{_base64(csv_text.encode())}">numbers (CSV)</a>']
    if data is not None:
        packed = _base64(gzip.compress(json.dumps(plain(data), separators=(",", ":")).encode(), 9, mtime=0))
        link = (
            f'<a download="{name}.json.gz" data-gzip href="data:application/gzip;base64,{packed}">everything (JSON)</a>'
        )
        links = [link, *links] if len(html.encode()) + len(link) + len(links[0]) < LIMIT_BYTES - 2000 else links
    shown = f'<h2 id="data">Data</h2>\n<p>Download {escape(of)}: {", ".join(links)}.</p>'
    return html.replace(_PLACE, shown, 1)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
