"""Figures of numbers with their spread: differences as a forest, lines with bars, predictions against measurements."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.ticker import LogLocator, NullLocator

from reports.parts.plots import ACCENT, INK, LINE, MUTED, SECOND, drawn, finite, grid, legend, svg
from reports.parts.text import clean

MAX_LINES = 8  # number of models that a figure can distinguish
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Interval(NamedTuple):
    """One row of a forest: its label, its value and the ends of its interval, and whether the page is about it."""

    label: str
    value: float
    low: float | None
    high: float | None
    main: bool = False


class Panel(NamedTuple):
    """Lines by name in one panel, each of (x, y, low, high); and marks by name, of (x, y), in the colours of these
    lines."""

    title: str
    y_label: str
    lines: dict[str, list[tuple[float, float, float | None, float | None]]]
    marks: dict[str, list[tuple[float, float]]] = {}


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, mark and dash of each model: the baseline pale, "compressed" in the page's colour, the others apart."""
    others = [name for name in names if name not in ("baseline", "compressed")]
    found = {
        name: {"color": (SECOND, INK)[i % 2], "marker": _MARKS[1 + i % 7], "ls": ("--", "-.", ":")[i // 2 % 3]}
        for i, name in enumerate(others)
    }
    plain = {"marker": "o", "ls": "-"}
    return {"baseline": plain | {"color": MUTED}, "compressed": plain | {"color": ACCENT}} | found


@drawn
def forest(panels: dict[str, dict[str, list[Interval]]], *, key: str, summary: str) -> str:
    """Values and their intervals against a line at 0: a panel per unit of the axis, in it a group of rows per title."""
    rows = [sum(1.25 + len(group) for group in groups.values()) for groups in panels.values()]
    deep = 0.6 + 0.24 * sum(rows) / len(panels)
    figure, axes = grid(len(panels), 1, height=deep, extra=0, height_ratios=[1 + count for count in rows])
    for ax, (label, groups) in zip(axes.flat, panels.items(), strict=True):
        at, ticks, names = 0.0, [], []
        for title, group in groups.items():
            side = ax.get_yaxis_transform()
            ax.text(0.005, at, clean(title, 70), transform=side, va="center", fontsize=9, fontweight="bold")
            at += 1
            for one in group:
                colour = ACCENT if one.main else SECOND
                if finite(one.low, one.high):
                    ax.plot([one.low, one.high], [at, at], color=colour, lw=2.2, solid_capstyle="butt")
                if finite(one.value):
                    ax.plot(one.value, at, "o", ms=6, color=colour)
                ticks.append(at)
                names.append(clean(one.label, 44))
                at += 1
            at += 0.25
        ax.axvline(0, color=INK, lw=1)
        ax.set_yticks(ticks, names)
        ax.set_ylim(at - 0.4, -0.9)
        ax.margins(x=0.06)
        ax.grid(True, axis="x", lw=0.6)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel(label)
    return svg(figure, key, summary)


@drawn
def spread(panels: Sequence[Panel], *, columns: int, key: str, x_label: str, summary: str, log_x: bool = False) -> str:
    """Lines with bars from low to high against a number, from 0 up; at most `MAX_LINES` models, the same in every
    panel."""
    panels = [
        panel._replace(
            lines={name: kept for name, of in panel.lines.items() if (kept := [p for p in of if finite(*p[:2])])}
        )
        for panel in panels
    ]
    there = dict.fromkeys(name for panel in panels for name in panel.lines)
    names = sorted(there, key=lambda name: name != "baseline")[:MAX_LINES]
    if not names:
        return ""
    looks = styles(names)
    figure, axes = grid(len(panels), columns, height=2.3, extra=0.75 + 0.2 * -(-len(names) // 3))
    ticks = sorted({x for panel in panels for line in panel.lines.values() for x, *_ in line})
    for ax, panel in zip(axes.flat, panels, strict=False):
        for name in names:
            points = sorted(panel.lines.get(name, []), key=lambda p: p[0])
            if points:
                below = [max(y - low, 0) if finite(low) else 0 for _, y, low, _ in points]
                above = [max(high - y, 0) if finite(high) else 0 for _, y, _, high in points]
                style = {"ms": 4.5, "lw": 1.5, "elinewidth": 0.8, "capsize": 2} | looks[name]
                ax.errorbar([p[0] for p in points], [p[1] for p in points], yerr=[below, above], label=name, **style)
            marks = [mark for mark in panel.marks.get(name, []) if finite(*mark)]
            if marks:
                look = looks[name] | {"ls": ""}
                ax.plot(*zip(*marks, strict=True), ms=8, mfc="none", mew=1.6, zorder=5, **look)
        if log_x:
            ax.set_xscale("log", base=2)
        if len(ticks) <= 8:
            ax.set_xticks(ticks)
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.margins(y=0.12)
        ax.set_ylim(0, None)
        ax.set_title(panel.title, fontsize=10, loc="left")
        ax.set_ylabel(panel.y_label, fontsize=9)
        ax.grid(True, axis="y", lw=0.6)
    figure.supxlabel(x_label, fontsize=10)
    legend(figure, axes, names, "outside upper left", ncols=min(3, len(names)), fontsize=9)
    return svg(figure, key, summary)


@drawn
def agreement(
    points: dict[str, list[tuple[float, float]]], *, key: str, x_label: str, y_label: str, summary: str
) -> str:
    """(predicted, measured) by model, both logarithmic, and the line on which they are the same."""
    points = {name: kept for name, of in points.items() if (kept := [p for p in of if finite(*p) and min(p) > 0])}
    names = list(points)[:MAX_LINES]
    if not names:
        return ""
    looks = styles(names)
    both = [value for name in names for point in points[name] for value in point]
    low, high = min(both) / 1.3, max(both) * 1.3
    figure, axes = grid(1, 1, height=4.2, extra=0.2 * -(-len(names) // 3))
    ax = axes[0, 0]
    for factor, words in ((1, "as predicted"), (2, "twice"), (4, "four times")):
        ax.plot([low, high], [factor * low, factor * high], color=MUTED if factor == 1 else LINE, lw=1.2, zorder=0)
        if factor * low < high:
            style = {"color": MUTED, "fontsize": 8.5, "ha": "right", "va": "top", "textcoords": "offset points"}
            ax.annotate(words, (high / factor, high), xytext=(-8, -6), **style)
    for name in names:
        ax.plot(*zip(*points[name], strict=True), ms=6.5, label=name, **looks[name] | {"ls": ""})
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel=x_label, ylabel=y_label)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        if high < 100 * low:  # powers of ten alone would give only one or two ticks
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:,g}")
    ax.grid(True, lw=0.6)
    legend(figure, axes, names, "outside upper left", ncols=min(3, len(names)), fontsize=9)
    return svg(figure, key, summary)
