"""Matrices as pictures: magnitudes of channels by tokens, for several models beside one another."""

from collections.abc import Mapping

import numpy as np

from reports.parts.plots import drawn, grid, svg
from reports.parts.text import clean

SHADES = 8.0  # the value that has the last colour
PIXELS = 192  # width of a panel; if neighbouring channels share a pixel, the largest is shown


@drawn
def heat(rows: Mapping[str, Mapping[str, np.ndarray]], *, key: str, summary: str) -> str:
    """A row of panels for each title of `rows`, and in it a panel for each matrix [tokens, channels] by its title.

    All panels share their colours, from 0 to 8.
    """
    across = max(map(len, rows.values()))
    figure, axes = grid(across * len(rows), across, height=1.55)
    for line, (title, panels) in zip(axes, rows.items(), strict=True):
        for ax in line[len(panels) :]:
            ax.axis("off")
        for ax, (name, values) in zip(line, panels.items(), strict=False):
            shown = _binned(values)
            extent = (0, values.shape[1], len(values), 0)
            image = ax.imshow(shown, aspect="auto", cmap="magma_r", vmin=0, vmax=SHADES, extent=extent,
                              interpolation="nearest")  # fmt: skip
            ax.set_title(clean(name, 40), fontsize=9, loc="left")
            ax.tick_params(labelsize=8)
        line[0].set_ylabel(clean(title, 60), fontsize=9)
    figure.supxlabel("channels; tokens from top to bottom", fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=40, extend="max")
    bar.ax.tick_params(labelsize=8)
    bar.set_label("|x| / root mean square of the token", fontsize=9)
    return svg(figure, key, summary)


def _binned(values: np.ndarray) -> np.ndarray:
    """At most PIXELS columns: the largest of each run of neighbours."""
    size = -(-values.shape[1] // PIXELS)
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % size)))
    return padded.reshape(len(values), -1, size).max(-1)
