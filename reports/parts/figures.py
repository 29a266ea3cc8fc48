"""Figures of a report shown in a notebook."""

from dataclasses import dataclass

_LIGHT = {
    "ink": "#1c1f24",
    "muted": "#5b626d",
    "line": "#dcdad3",
    "accent": "#1f5fae",
    "second": "#a9631f",
    "panel": "#ffffff",
}


@dataclass(frozen=True)
class Figures:
    """Titles and figures; shows itself in Jupyter."""

    said: str
    svgs: dict[str, str]

    def _repr_html_(self) -> str:
        colours = "".join(f"--{name}:{colour};" for name, colour in _LIGHT.items())
        shown = "".join(f"<h4>{title}</h4>{svg}" for title, svg in self.svgs.items())
        return f"<div style='{colours}background:#fff;color:#1c1f24;max-width:60rem;padding:.5rem'><p>{self.said}</p>{shown}</div>"
