"""Figures of numbers with their spread: differences as a forest, lines with bars, predictions against measurements."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from reports.parts.plots import ACCENT, INK, LINE, MUTED, SECOND, STYLE, svg
from reports.parts.text import clean

PLAIN = STYLE | {"text.parse_math": False}  # names are names, whatever dollars they hold
MAX_LINES = 8  # models that a figure tells apart
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


def forest(panels: dict[str, dict[str, list[Interval]]], *, key: str, summary: str) -> str:
    """Values and their intervals against a line at 0: a panel per unit of the axis, in it a group of rows per title."""
    rows = {label: sum(1.25 + len(group) for group in groups.values()) for label, groups in panels.items()}
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(9.6, 0.6 * len(panels) + 0.24 * sum(rows.values())), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[rows[label] + 1 for label in panels])
        for ax, (label, groups) in zip(axes.flat, panels.items(), strict=True):
            at, ticks, names = 0.0, [], []
            for title, group in groups.items():
                side = ax.get_yaxis_transform()
                ax.text(0.005, at, clean(title, 70), transform=side, va="center", fontsize=9, fontweight="bold")
                at += 1
                for one in group:
                    colour = ACCENT if one.main else SECOND
                    if one.low is not None and one.high is not None:
                        ax.plot([one.low, one.high], [at, at], color=colour, lw=2.2, solid_capstyle="butt")
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


def spread(panels: Sequence[Panel], *, columns: int, key: str, x_label: str, summary: str, log_x: bool = False) -> str:
    """Lines with bars from low to high against a number, from 0 up; at most `MAX_LINES` models, the same in every
    panel."""
    found = dict.fromkeys(name for panel in panels for name in panel.lines)
    names = sorted(found, key=lambda name: name != "baseline")[:MAX_LINES]
    looks = styles(names)
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(9.6, 0.75 + 2.3 * rows + 0.2 * (-(-len(names) // 3))), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        ticks = sorted({x for panel in panels for line in panel.lines.values() for x, *_ in line})
        for ax, panel in zip(axes.flat, panels, strict=False):
            for name in names:
                points = sorted(panel.lines.get(name, []))
                ends = [
                    (y - (y if low is None else low), (y if high is None else high) - y) for _, y, low, high in points
                ]
                if points:
                    ax.errorbar(
                        [p[0] for p in points],
                        [p[1] for p in points],
                        yerr=[[max(e[i], 0) for e in ends] for i in (0, 1)],
                        label=name,
                        ms=4.5,
                        lw=1.5,
                        elinewidth=0.8,
                        capsize=2,
                        **looks[name],
                    )
                if panel.marks.get(name):
                    look = {"color": looks[name]["color"], "marker": looks[name]["marker"]}
                    ax.plot(*zip(*panel.marks[name], strict=True), ls="", ms=8, mfc="none", mew=1.6, zorder=5, **look)
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
        for ax in list(axes.flat)[len(panels) :]:
            ax.axis("off")
        figure.supxlabel(x_label, fontsize=10)
        _legend(figure, axes, names)
        return svg(figure, key, summary)


def agreement(
    points: dict[str, list[tuple[float, float]]], *, key: str, x_label: str, y_label: str, summary: str
) -> str:
    """(predicted, measured) by model, both logarithmic, and the line on which they are the same."""
    names = list(points)[:MAX_LINES]
    looks = styles(names)
    both = [value for name in names for point in points[name] for value in point]
    low, high = min(both) / 1.3, max(both) * 1.3
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(9.6, 4.2 + 0.2 * (-(-len(names) // 3))), layout="constrained")
        axes = figure.subplots(squeeze=False)
        ax = axes[0, 0]
        for factor, words in ((1, "as predicted"), (2, "twice"), (4, "four times")):
            ax.plot([low, high], [factor * low, factor * high], color=MUTED if factor == 1 else LINE, lw=1.2, zorder=0)
            if factor * low < high:
                ax.annotate(
                    words,
                    (high / factor, high),
                    color=MUTED,
                    fontsize=8.5,
                    ha="right",
                    va="top",
                    xytext=(-8, -6),
                    textcoords="offset points",
                )
        for name in names:
            look = {"color": looks[name]["color"], "marker": looks[name]["marker"]}
            ax.plot(*zip(*points[name], strict=True), ls="", ms=6.5, label=name, **look)
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel=x_label, ylabel=y_label)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_locator(NullLocator())
            if high < 100 * low:  # powers of ten alone would be one tick or two
                axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:,g}")
        ax.grid(True, lw=0.6)
        _legend(figure, axes, names)
        return svg(figure, key, summary)


def _legend(figure: Figure, axes: Any, names: Sequence[str]) -> None:
    found = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in found]
    if len(shown) > 1:
        figure.legend(
            [found[name] for name in shown],
            [clean(name, 40) for name in shown],
            loc="outside upper left",
            ncols=min(3, len(shown)),
            fontsize=9,
        )
