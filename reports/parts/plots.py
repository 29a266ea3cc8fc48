"""Figures as inline SVG that follow the page's colours, light or dark."""

import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from itertools import combinations
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

# Colours that matplotlib writes down and the page replaces by its own variables.
_COLOURS = {
    "ink": "#010101", "muted": "#020202", "line": "#030303", "accent": "#040404", "second": "#050505", "panel": "#060606",
}  # fmt: skip
INK, MUTED, LINE, ACCENT, SECOND, PANEL = _COLOURS.values()
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": LINE, "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip
MAX_PANELS = 12


class Line(NamedTuple):
    """One line of a panel: its label, its colour, and (block, value) for each point."""

    label: str
    colour: str
    points: list[tuple[int, float]]
    style: str = "-"
    dot: float = 2.5


def layer_errors(layers: list[dict[str, Any]], method: str) -> str:
    """Error of each linear's output against depth: one panel per kind of linear, the method against
    round-to-nearest."""
    kinds: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for i, layer in enumerate(layers):
        block, kind = place_of(layer["name"], i)
        kinds[kind].append((block, layer["error"], layer.get("rtn_error")))
    panels = {
        kind: [
            Line(method, ACCENT, [(b, error) for b, error, _ in points]),
            Line("round to nearest", SECOND, [(b, rtn) for b, _, rtn in points if rtn is not None], "--"),
        ]
        for kind, points in kinds.items()
    }
    summary = f"Relative output error of each linear by block: {method} against round to nearest, log scale."
    return by_depth(panels, key="errors", label="relative error of the output", summary=summary)


def by_depth(panels: dict[str, list[Line]], *, key: str, label: str, summary: str, log: bool = True) -> str:
    """Values against the number of the block: a panel per title, in which the first lines lie on top."""
    shown = list(panels.items())[:MAX_PANELS]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(STYLE):
        titled = max(len(title.splitlines()) for title, _ in shown)
        figure = Figure(figsize=(9.6, 0.5 + (1.75 + 0.15 * titled) * rows + 0.3 * (rows == 1)), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax, (title, lines) in zip(axes.flat, shown, strict=False):
            for line in lines[::-1]:
                if line.points:
                    ax.plot(
                        *zip(*sorted(line.points), strict=True),
                        color=line.colour,
                        lw=1.5,
                        ls=line.style,
                        marker="o",
                        ms=line.dot,
                        label=line.label,
                    )
            ax.set_title(title, fontsize=10 if max(map(len, title.splitlines())) < 26 else 8, loc="left")
            if log:
                ax.set_yscale("log")
            ax.grid(True, axis="y", lw=0.6)
            ax.minorticks_off()
        low, high = axes.flat[0].get_ylim()
        if log and high < 100 * low:  # powers of ten alone would be one tick or two
            axes.flat[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.flat[0].yaxis.set_major_formatter("{x:g}")
        for ax in axes.flat[len(shown) :]:
            ax.axis("off")
        figure.supxlabel("block", fontsize=10)
        figure.supylabel(label, fontsize=10)
        found = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
        order = [line.label for lines in panels.values() for line in lines if line.label in found]
        labels = list(dict.fromkeys(order))
        if len(labels) > 1:
            figure.legend([found[name] for name in labels], labels, loc="outside upper right", ncols=len(labels))
        return svg(figure, key, summary)


def channels(links: dict[str, dict[str, list[float]]]) -> str:
    """Largest magnitude of every channel, before and after: a row per link, activations left and weights right.

    Args:
        links: {title: {"x_before", "x_after", "w_before", "w_after"}}, each [channels].
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.5 + 1.8 * len(links)), layout="constrained")
        axes = figure.subplots(len(links), 2, squeeze=False)
        for row, (title, of) in zip(axes, links.items(), strict=True):
            for when, colour in (("before", SECOND), ("after", ACCENT)):
                at, largest = _envelope(of[f"x_{when}"])
                row[0].fill([at[0], *at, at[-1]], [0, *largest, 0], fc=(colour, 0.3), ec=colour, lw=0.9, label=when)
                row[1].plot(*_envelope(of[f"w_{when}"]), color=colour, lw=0.9)
            row[0].set_ylim(0, None)
            row[1].set_yscale("log")  # all columns grow, some by much
            for ax, what in zip(row, ("|X|", "|W|"), strict=True):
                ax.set_xticks([])
                ax.set_ylabel(f"max {what}")
                ax.margins(x=0)
                ax.minorticks_off()
            row[0].set_title(f"{title}: activations", fontsize=9, loc="left")
            row[1].set_title("columns of the weights, log scale", fontsize=9, loc="left")
        figure.supxlabel("channels", fontsize=10)
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        summary = "Largest magnitude of every input channel before and after smoothing: activations and columns of the weights."
        return svg(figure, "channels", summary)


def _envelope(values: list[float], bins: int = 240) -> tuple[list[float], list[float]]:
    """Positions and values of at most so many points: the largest of each run of neighbours, so that no peak is
    lost."""
    size = -(-len(values) // bins)
    starts = range(0, len(values), size)
    return [start + size / 2 for start in starts], [max(values[start : start + size]) for start in starts]


class Curve(NamedTuple):
    """One line of a panel of curves: its block, its points, and the x that was chosen on it."""

    block: int
    points: list[tuple[float, float]]
    chosen: float


def curves(panels: dict[str, list[Curve]], *, key: str, x_label: str, y_label: str, summary: str) -> str:
    """A panel per kind of linear, a line per block, from the first (pale) to the last (full), and a dot at what was
    chosen."""
    shown = list(panels.items())[:MAX_PANELS]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    last = max((curve.block for _, of in shown for curve in of), default=0) or 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.5 + 1.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax, (title, of) in zip(axes.flat, shown, strict=False):
            for curve in of:
                if not curve.points:
                    continue
                x, y = zip(*sorted(curve.points), strict=True)
                ax.plot(x, y, color=ACCENT, alpha=0.25 + 0.6 * curve.block / last, lw=0.9)
                if x[0] <= curve.chosen <= x[-1]:
                    at = next(i for i in range(1, len(x)) if curve.chosen <= x[i])
                    share = (curve.chosen - x[at - 1]) / (x[at] - x[at - 1])
                    height = (
                        y[at - 1] ** (1 - share) * y[at] ** share
                    )  # on the line, which is straight where y is logarithmic
                    ax.plot(curve.chosen, height, "o", color=SECOND, ms=3, zorder=5)
            ax.set_title(title, fontsize=9, loc="left")
            ax.set_yscale("log")
            ax.grid(True, axis="y", lw=0.6)
            ax.minorticks_off()
        for ax in axes.flat[len(shown) :]:
            ax.axis("off")
        figure.supxlabel(x_label, fontsize=10)
        figure.supylabel(y_label, fontsize=10)
        return svg(figure, key, summary)


def against(
    panels: dict[str, dict[str, list[tuple[float, float]]]], *, key: str, x_label: str, y_label: str, summary: str
) -> str:
    """Lines by name against a number, y logarithmic, a panel per title."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.9 + 3.4 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False)
        for ax, (title, lines) in zip(axes.flat, panels.items(), strict=True):
            for i, (name, points) in enumerate(lines.items()):
                style = {
                    "color": (ACCENT, SECOND, INK)[i % 3],
                    "ls": ("-", "--", ":", "-.")[i // 3 % 4],
                    "marker": "os^D"[i // 3 % 4],
                }
                if points:
                    ax.plot(*zip(*sorted(points), strict=True), lw=1.5, ms=4, label=wrapped(name, 44), **style)
            ax.set_yscale("log")
            low, high = ax.get_ylim()
            if high < 10_000 * low:
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter("{x:,g}")
            ax.minorticks_off()
            ax.grid(True, axis="y", lw=0.6)
            ax.set_title(title, fontsize=10, loc="left")
            ax.set_ylabel(y_label)
            ax.legend(fontsize=8.5, handlelength=2.4, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
            ax.set_xlabel(x_label)
        return svg(figure, key, summary)


class Point(NamedTuple):
    """One model in a plane: its label, where it is, and whether it is the one that the page is about."""

    label: str
    x: float
    y: float
    main: bool = False


def scatter(points: list[Point], *, key: str, x_label: str, y_label: str, summary: str) -> str:
    """Models in a plane, each with its label beside it; y in per cent, bent into a logarithm where it spans much."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2))
        ax = figure.add_axes((0.105, 0.13, 0.88, 0.84))
        low, high = min(p.x for p in points), max(p.x for p in points)
        room = (high - low or high or 1) * 0.12
        ax.set_xlim(low - room, high + room)
        if max(abs(p.y) for p in points) > 20:
            ax.set_yscale("symlog", linthresh=1, linscale=0.6)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:+g} %".replace("-", "−") if y else "0 %")
        ax.axhline(0, color=MUTED, lw=1)
        for point in points:
            ax.plot(
                point.x, point.y, "o", ms=7 if point.main else 5.5, color=ACCENT if point.main else SECOND, zorder=5
            )
        ax.margins(y=0.14)
        ax.grid(True, lw=0.6)
        ax.minorticks_off()
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
        ax.autoscale_view()  # now: labels are placed where the points will be
        label_points(ax, points)
        return svg(figure, key, summary)


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
    for _ in range(400):  # far more than it takes for labels that fit
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
        line = {
            "arrowstyle": "-",
            "color": MUTED,
            "lw": 0.6,
            "shrinkA": 0,
            "shrinkB": 0,
            "zorder": 1,
            "relpos": (one.side < 0, 0.5),
        }
        ax.annotate(
            one.text,
            one.point[1:3],
            at,
            fontsize=font_size,
            va="center",
            ha="left" if one.side > 0 else "right",
            zorder=2,
            fontweight="bold" if one.point.main else "normal",
            bbox={"fc": PANEL, "ec": "none", "pad": 0.5},
            arrowprops=line if led else None,
        )


def wrapped(text: str, width: int) -> str:
    """Text in lines of about this width, broken at spaces."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)) or text


def speed_bars(speed: dict[str, dict[str, Any]]) -> str:
    """Decode speed of every variant, with quartiles."""
    return _bars(
        "speed",
        list(speed),
        [s["decode_tokens_per_s"] for s in speed.values()],
        [s["decode_quartiles"] for s in speed.values()],
        "decoded tokens per second",
        "Decode speed of every variant in tokens per second.",
    )


def size_bars(sizes: dict[str, dict[str, float]]) -> str:
    """Stored megabytes, split into compressed linears and the rest: {model: {part: bytes}}."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.7, 0.7 + 0.42 * len(sizes)), layout="constrained")
        ax = figure.subplots()
        for i, parts in enumerate(sizes.values()):
            left = 0.0
            for colour, value in zip((ACCENT, SECOND), parts.values(), strict=True):
                ax.barh(i, value / 1e6, left=left / 1e6, height=0.62, color=colour)
                left += value
            ax.text(left / 1e6, i, f"\u2002{left / 1e6:,.0f} MB", va="center")
        ax.set_yticks(range(len(sizes)), list(sizes))
        ax.invert_yaxis()
        ax.set_xlim(0, max(sum(p.values()) for p in sizes.values()) / 1e6 * 1.25)
        ax.set_xlabel("stored megabytes")
        ax.tick_params(axis="y", length=0)
        return svg(
            figure, "size", "Stored megabytes of each model, split into the linears that were compressed and the rest."
        )


def _bars(key: str, names: list[str], values: list[float], spread: list[list[float]], label: str, summary: str) -> str:
    labels = [wrapped(name, 26) for name in names]
    deep = 0.36 * len(names) + 0.06 * sum(1 + label.count("\n") * 2 for label in labels)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.7, 0.7 + deep), layout="constrained")
        ax = figure.subplots()
        errors = [
            [v - s[0] for v, s in zip(values, spread, strict=True)],
            [s[1] - v for v, s in zip(values, spread, strict=True)],
        ]
        colours = [ACCENT if name == "compressed" else SECOND for name in names]
        ax.barh(range(len(names)), values, height=0.62, color=colours)
        ax.errorbar(values, range(len(names)), xerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for i, (value, s) in enumerate(zip(values, spread, strict=True)):
            ax.text(max(value, s[1]), i, f"\u2002{value:,.{0 if value >= 20 else 1}f}", va="center")
        ax.set_yticks(range(len(names)), labels)
        ax.invert_yaxis()
        ax.set_xlim(0, max(values) * 1.2)
        ax.set_xlabel(label)
        ax.tick_params(axis="y", length=0)
        return svg(figure, key, summary)


def place_of(name: str, position: int) -> tuple[int, str]:
    """Block number and kind of a linear, from its name: model.layers.3.mlp.up_proj -> 3, mlp.up_proj."""
    match = re.search(r"\.(\d+)\.", name)
    if not match:
        return position, name
    kind = re.sub(r"\.\d+(?=\.|$)", ".*", name[match.end() :])
    return int(match.group(1)), kind


def svg(figure: Figure, key: str, summary: str) -> str:
    """The figure as an SVG element, with its own ids and the page's colours."""
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(
        r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg
    )  # a hundredth of a pixel is enough
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{key}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's own
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    start, end = svg.index("<svg"), svg.index(">", svg.index("<svg")) + 1
    box = re.search(r'viewBox="[^"]+"', svg[start:end])[0]
    return f'<svg {box} role="img" aria-label="{escape(summary)}">{svg[end:]}'
