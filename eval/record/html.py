"""Tables as HTML for Jupyter: the only place where values in results are escaped."""

from collections.abc import Iterable, Sequence
from html import escape

# Colours of changes that can be read on the light and on the dark ground of a notebook.
CELL_COLOURS = {"good": "#2a8a52", "bad": "#cf4b47", "noise": "#7c828b"}


def html_table(head: Sequence[object], lines: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table whose lines begin with a name, on the left, before their numbers; every cell is escaped."""

    def line(name: object, *cells: object) -> str:
        shown = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        return f"<tr><th style='text-align:left'>{escape(str(name))}</th>{shown}</tr>"

    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    names = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    return f"<table>{said}<thead><tr>{names}</tr></thead><tbody>{''.join(line(*of) for of in lines)}</tbody></table>"
