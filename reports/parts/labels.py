"""Points in a plane with labels that do not cover one another."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.parts.plots import ACCENT, MUTED, PANEL, SECOND, drawn, finite, power, svg, wrapped


class Point(NamedTuple):
    """One model in a plane: its label, its place, and whether it is the page's main model."""

    label: str
    x: float
    y: float
    main: bool = False


@drawn
def scatter(points: list[Point], *, key: str, x_label: str, y_label: str, summary: str, unit: str = "%") -> str:
    """Models in a plane, each with its label beside it; y, in per cent or in no unit, is bent into a logarithm where it
    spans much."""
    points = [point for point in points if finite(point.x, point.y)]
    if len(points) < 3:
        return ""
    figure = Figure(figsize=(9.6, 4.2))
    ax = figure.add_axes((0.105, 0.13, 0.88, 0.84))
    low, high = min(p.x for p in points), max(p.x for p in points)
    room = (high - low or high or 1) * 0.12
    ax.set_xlim(low - room, high + room)
    straight = 1.0 if unit else min((abs(p.y) for p in points if p.y), default=1.0)  # the scale is linear below it
    if max(abs(p.y) for p in points) > 20 * straight:
        ax.set_yscale("symlog", linthresh=straight, linscale=0.6)
    ax.yaxis.set_major_formatter(_percent if unit else power)
    ax.axhline(0, color=MUTED, lw=1)
    for i, point in enumerate(points):
        look = {"ms": 7 if point.main else 5.5, "color": ACCENT if point.main else SECOND, "zorder": 5}
        ax.plot(point.x, point.y, "o", gid=f"mark{i}", **look)
    ax.margins(y=0.14)
    ax.grid(True, lw=0.6)
    ax.minorticks_off()
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.autoscale_view()  # now: labels are placed where the points will be
    widest = max(len(label.get_text()) for label in ax.get_yticklabels())
    left = max(0.105, 0.06 + 0.009 * widest)  # of the figure's width: the label and the widest number beside the axis
    ax.set_position((left, 0.13, 0.985 - left, 0.84))
    label_points(ax, points)
    shown = ax.yaxis.get_major_formatter()
    titles = {
        f"mark{i}": [f"{p.label}: {p.x:,.4g} {x_label}, {shown(p.y, None)} {y_label}"] for i, p in enumerate(points)
    }
    return svg(figure, key, summary, titles)


def _percent(y: float, _: int) -> str:
    """A tick of an axis in per cent."""
    number = f"{y:+,.0f}" if abs(y) >= 1000 else f"{y:+g}"
    return f"{number} %".replace("-", "−") if y else "0 %"


@dataclass
class _Label:
    """A label beside its point (x, y): on its right (side 1) or left (-1), its middle at `height`; all in pixels."""

    point: Point
    x: float
    y: float
    height: float
    side: int
    size: tuple[float, float]
    text: str

    def reach(self, gap: float = 0.0) -> tuple[float, float]:
        near = self.x + self.side * gap
        far = near + self.side * self.size[0]
        return min(near, far), max(near, far)


def label_points(ax: Axes, points: list[Point], font_size: float = 9) -> None:
    """Put each label beside its point; labels that would cover one another move apart, in order, and a line leads to
    each."""
    em = font_size * ax.figure.dpi / 72
    left, bottom, right, top = ax.bbox.extents
    labels = []
    for point in points:
        x, y = ax.transData.transform((point.x, point.y))
        text = wrapped(point.label, 34)
        size = (0.58 * em * max(map(len, text.splitlines())), 1.3 * em * len(text.splitlines()))
        labels.append(_Label(point, x, y, y, 1, size, text))
    for one in labels:

        def covered(side: int, one: _Label = one) -> int:
            low, high = replace(one, side=side).reach(0.9 * em)
            return 100 * (low < left or high > right) + sum(
                low < o.x < high and abs(o.y - one.y) < one.size[1] for o in labels
            )

        one.side = min((1, -1), key=covered)
    labels.sort(key=lambda one: one.y)
    for _ in range(400):  # far more than needed for labels that fit
        for low, high in combinations(labels, 2):
            (a, b), (c, d) = low.reach(0.9 * em), high.reach(0.9 * em)
            lacks = (low.size[1] + high.size[1]) / 2 - (high.height - low.height)
            if lacks > 0 and a < d and c < b:
                low.height, high.height = low.height - lacks / 2, high.height + lacks / 2
        for one in labels:
            one.height = min(max(one.height, bottom + one.size[1] / 2), top - one.size[1] / 2)
    for one in labels:
        led = abs(one.height - one.y) > 0.5 * em
        at = ax.transData.inverted().transform((one.x + one.side * (2.1 if led else 0.9) * em, one.height))
        line = {"arrowstyle": "-", "color": MUTED, "lw": 0.6, "shrinkA": 0, "shrinkB": 0, "zorder": 1}
        bold, side = "bold" if one.point.main else "normal", "left" if one.side > 0 else "right"
        style = {"fontsize": font_size, "fontweight": bold, "va": "center", "ha": side, "zorder": 2}
        lead = line | {"relpos": (one.side < 0, 0.5)} if led else None
        ax.annotate(
            one.text, one.point[1:3], at, bbox={"fc": PANEL, "ec": "none", "pad": 0.5}, arrowprops=lead, **style
        )
