"""Figures of a report shown in a notebook."""

from dataclasses import dataclass

from markupsafe import escape

_LIGHT = {
    "ink": "#1c1f24", "muted": "#5b626d", "line": "#dcdad3", "accent": "#1f5fae", "second": "#a9631f",
    "panel": "#ffffff",
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Some sentences and figures by title, without empty ones, with a representation for Jupyter."""

    said: str
    svgs: dict[str, str]

    def _repr_html_(self) -> str:
        colours = "".join(f"--{name}:{colour};" for name, colour in _LIGHT.items())
        shown = "".join(f"<h4>{escape(title)}</h4>{svg}" for title, svg in self.svgs.items() if svg)
        style = f"{colours}background:#fff;color:#1c1f24;max-width:60rem;padding:.5rem"
        return f"<div style='{style}'><p>{escape(self.said)}</p>{shown}</div>"
