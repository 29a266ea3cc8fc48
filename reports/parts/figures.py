"""Figures of a report shown in a notebook."""

import base64
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


# A picture cannot read the colours around it, and is shown on a light ground.
_ALONE = "--ink:#1c1f24;--muted:#5b626d;--line:#dcdad3;--panel:#ffffff;--accent:#1f5fae;--second:#a9631f"
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
# Notebooks that are not trusted, such as one that papermill wrote, lose scripts and inline SVG, but keep pictures. In
# trusted ones the picture becomes the SVG that it holds, with the notebook's colours, and with titles to point at.
_INLINE = """<script>{
const picture = document.currentScript?.previousElementSibling, box = document.createElement("div");
if (picture?.src) {
  box.innerHTML = new TextDecoder().decode(Uint8Array.from(atob(picture.src.split(",")[1]), one => one.charCodeAt(0)));
  box.firstChild.removeAttribute("style");
  picture.replaceWith(box.firstChild);
}
}</script>"""


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
    return f"<div style='width:{width};max-width:100%'>{heading}{_picture(svg)}</div>"


def _picture(svg: str) -> str:
    """A figure as a picture and a script that shows it as SVG."""
    if not svg.startswith("<svg"):  # a sentence in place of a figure
        return svg
    style = f'style="{_ALONE};font-family:sans-serif;background:#ffffff"'
    alone = svg.replace("<svg", f"<svg {_NAMESPACES} {style}", 1).encode()
    label = re.search(r'aria-label="([^"]*)"', svg)
    return (
        f"<img style='width:100%' alt=\"{label[1] if label else ''}\" "
        f"src='data:image/svg+xml;base64,{base64.b64encode(alone).decode()}'>{_INLINE}"
    )
