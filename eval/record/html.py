"""Tables as HTML for Jupyter: the only place where values in results are escaped."""

from collections.abc import Iterable, Sequence
from html import escape

# Colours of changes that can be read on the light and on the dark ground of a notebook.
CELL_COLOURS = {"good": "#2a8a52", "bad": "#cf4b47", "noise": "#7c828b"}


def html_table(head: Sequence[object], lines: Iterable[Sequence[object]], text_columns: int = 1) -> str:
    """A table whose first columns are text, and the others numbers; every cell is escaped."""

    def cells(line: Sequence[object]) -> str:
        left = " style='text-align:left'"
        return "".join(f"<td{left * (i < text_columns)}>{escape(str(cell))}</td>" for i, cell in enumerate(line))

    names = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    body = "".join(f"<tr>{cells(line)}</tr>" for line in lines)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
