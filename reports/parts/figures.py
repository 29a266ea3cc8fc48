"""Figures of a report shown in a notebook."""

import re
from dataclasses import dataclass

from markupsafe import escape

# The colours of the page around a cell's output: JupyterLab's and nbconvert's, or VS Code's; the others can be read on
# light and on dark grounds. No rules in a style sheet, which Jupyter removes from notebooks that are not trusted.
_COLOURS = {
    "ink": "var(--jp-content-font-color1, var(--vscode-foreground, #1c1f24))",
    "muted": "var(--jp-content-font-color2, var(--vscode-descriptionForeground, #5b626d))",
    "line": "var(--jp-border-color2, var(--vscode-panel-border, #dcdad3))",
    "panel": "var(--jp-layout-color0, var(--vscode-editor-background, #ffffff))",
    "accent": "#3f83cf", "second": "#c0762b",
}  # fmt: skip
NOTEBOOK = "".join(f"--{name}:{colour};" for name, colour in _COLOURS.items()) + "color:var(--ink);max-width:60rem"


@dataclass(frozen=True)
class Figures:
    """Some sentences and figures by title, without empty ones, with a representation for Jupyter."""

    said: str
    svgs: dict[str, str]

    def _repr_html_(self) -> str:
        shown = "".join(framed(svg, f"<h4>{escape(title)}</h4>") for title, svg in self.svgs.items() if svg)
        said = f"<p>{escape(self.said)}</p>" if self.said else ""
        return f"<div style='{NOTEBOOK}'>{said}<div style='display:flex;flex-wrap:wrap;gap:0 1.5em'>{shown}</div></div>"


def framed(svg: str, heading: str = "") -> str:
    """A figure as large as it was drawn, or smaller where the notebook is narrow, below its heading (HTML)."""
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', svg)  # in points
    width = f"{float(box[1]) / 0.75:.0f}px" if box else "60rem"
    return f"<div style='width:{width};max-width:100%'>{heading}{svg}</div>"
