"""Figures as inline SVG that follow the page's colours, light or dark."""

import hashlib
import math
import pickle
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from html import escape
from io import StringIO
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterMathtext, LogLocator, MaxNLocator, NullFormatter

from eval.record.compression import Channels, LayerRecord
from reports.parts.text import clean

# Colours that matplotlib writes into the SVG and that the page replaces by its own variables.
_COLOURS = {
    "ink": "#010101", "muted": "#020202", "line": "#030303", "accent": "#040404", "second": "#050505",
    "panel": "#060606",
}  # fmt: skip
INK, MUTED, LINE, ACCENT, SECOND, PANEL = _COLOURS.values()
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": LINE, "axes.axisbelow": True, "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a name is shown as such
}  # fmt: skip
MAX_PANELS = 12
_MOST_KEPT = 256  # figures, of some 35 kB each
_kept: dict[bytes, str] = {}  # the SVG of a drawing, by its function and arguments


def drawn(draw: Callable[..., str]) -> Callable[..., str]:
    """A function that draws a figure, in the style of the pages. A figure that matplotlib cannot draw is replaced by a
    sentence, so that the rest of the page is still written. A figure that was drawn before, in a notebook's cell for
    example, is not drawn again for the page."""

    @wraps(draw)
    def safely(*args: Any, **kwargs: Any) -> str:
        key = _key_of(draw, args, kwargs)
        if key in _kept:
            return _kept[key]
        with matplotlib.rc_context(STYLE), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                figure = draw(*args, **kwargs)
            except Exception as error:
                return f"<p>This figure could not be drawn ({type(error).__name__}).</p>"
        if key is not None:
            if len(_kept) >= _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)  # the oldest
            _kept[key] = figure
        return figure

    return safely


def _key_of(draw: Callable[..., str], args: tuple, kwargs: dict[str, Any]) -> bytes | None:
    """A hash of a drawing's function and arguments; None if an argument, such as a generator, cannot be pickled."""
    try:
        content = pickle.dumps((draw.__module__, draw.__qualname__, args, kwargs))
    except Exception:
        return None
    return hashlib.sha256(content).digest()


def finite(*numbers: float | None) -> bool:
    """Are all of these numbers that can be drawn?"""
    return all(number is not None and math.isfinite(number) and abs(number) < 1e200 for number in numbers)


def grid(count: int, columns: int, width: float = 9.6, height: float = 2.0, extra: float = 0.5, **share: Any) -> Any:
    """A figure with this number of panels in rows of at most `columns`, each `height` inches high: (figure, axes)."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(width, extra + height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    for ax in axes.flat[count:]:
        ax.axis("off")
    return figure, axes


def legend(figure: Figure, axes: Any, names: Sequence[str], loc: str = "outside upper right", **style: Any) -> None:
    """One legend for all panels, in the order of `names`; none for a single line."""
    handles = {name: one for ax in axes.flat for one, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = [name for name in dict.fromkeys(names) if name in handles]
    if len(shown) > 1:
        style = {"ncols": len(shown)} | style
        figure.legend([handles[name] for name in shown], [clean(name, 120) for name in shown], loc=loc, **style)


def logarithmic(axes: Iterable[Axes]) -> None:
    """Logarithmic y axes (of panels that share it, one is enough) with at least two ticks that have a label."""
    for ax in axes:
        ax.set_yscale("log")
        ticked(ax)


def ticked(ax: Axes, decades: float = 2) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 if powers of ten alone would give only one or two ticks; evenly spaced
    ones if these would, too."""
    low, high = ax.get_ylim()
    if low > 0 and high < 5 * low:
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.yaxis.set_major_formatter("{x:,g}")
    elif low > 0 and high < 10**decades * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:,g}")
    ax.minorticks_off()


class BlockLine(NamedTuple):
    """One line of a panel: its label, its colour, and (block, value) for each point."""

    label: str
    colour: str
    points: Sequence[tuple[int, float | None]]
    style: str = "-"
    dot: float = 2.5


def layer_errors(layers: Sequence[LayerRecord], method: str) -> str:
    """Error of each linear's output against depth: one panel per kind of linear, the method against
    round-to-nearest."""
    panels = {
        kind: [
            BlockLine(method, ACCENT, [(block, layer.error) for block, layer in of]),
            BlockLine("round to nearest", SECOND, [(block, layer.rtn_error) for block, layer in of], "--"),
        ]
        for kind, of in by_kind(layers).items()
    }
    summary = f"Relative output error of each linear by block: {method} against round to nearest, log scale."
    return by_depth(panels, key="errors", label="relative error of the output", summary=summary)


@drawn
def by_depth(panels: dict[str, list[BlockLine]], *, key: str, label: str, summary: str, log: bool = True) -> str:
    """Values against the number of the block: a panel per title, with the first lines on top."""
    kept = {
        clean(title, 80): [
            line._replace(points=points)
            for line in lines
            if (points := sorted(p for p in line.points if finite(*p) and (p[1] > 0 or not log)))
        ]
        for title, lines in panels.items()
    }
    shown = [(title, lines) for title, lines in kept.items() if lines][:MAX_PANELS]
    if not shown:
        return ""
    titled = max(1 + title.count("\n") for title, _ in shown)
    figure, axes = grid(
        len(shown), 4, height=1.75 + 0.15 * titled, extra=0.8 if len(shown) <= 4 else 0.5, sharex=True, sharey=True
    )
    for ax, (title, lines) in zip(axes.flat, shown, strict=False):
        for line in lines[::-1]:
            style = {"color": line.colour, "ls": line.style, "ms": line.dot, "label": line.label}
            ax.plot(*zip(*line.points, strict=True), lw=1.5, marker="o", **style)
        ax.set_title(title, fontsize=10 if max(map(len, title.splitlines())) < 26 else 8, loc="left")
        if log:
            ax.set_yscale("log")
        ax.grid(True, axis="y", lw=0.6)
        ax.minorticks_off()
        ax.xaxis.get_major_locator().set_params(integer=True)  # block numbers are integers
    if log:
        ticked(axes.flat[0])
    figure.supxlabel("block", fontsize=10)
    figure.supylabel(label, fontsize=10)
    legend(figure, axes, [line.label for _, lines in shown for line in lines])
    return svg(figure, key, summary)


@drawn
def channels(links: dict[str, Channels]) -> str:
    """Largest magnitude of every channel, before and after: a row per link, activations left and weights right."""
    figure, axes = grid(2 * len(links), 2, height=1.8)
    for (left, right), (title, of) in zip(axes, links.items(), strict=True):
        for when, colour in (("before", SECOND), ("after", ACCENT)):
            at, largest = envelope(getattr(of, f"x_{when}"))
            if at:
                left.fill([at[0], *at, at[-1]], [0, *largest, 0], fc=(colour, 0.3), ec=colour, lw=0.9, label=when)
            right.plot(*envelope(getattr(of, f"w_{when}")), color=colour, lw=0.9)
        left.set_ylim(0, None)
        right.set_yscale("log")  # all columns grow, some by much
        for ax, what in ((left, "|X|"), (right, "|W|")):
            ax.set_xticks([])
            ax.set_ylabel(f"max {what}")
            ax.margins(x=0)
            ax.minorticks_off()
        left.set_title(f"{clean(title, 70)}: activations", fontsize=9, loc="left")
        right.set_title("columns of the weights, log scale", fontsize=9, loc="left")
    figure.supxlabel("channels", fontsize=10)
    legend(figure, axes, ["before", "after"])
    summary = "Largest magnitude of every input channel before and after smoothing: activations and columns of weights."
    return svg(figure, "channels", summary)


def envelope(values: Sequence[float], bins: int = 240) -> tuple[list[float], list[float]]:
    """Positions and values of at most this many points: the largest of each run of neighbours, so that no peak is
    lost."""
    values = [value if finite(value) else 0.0 for value in values]
    size = max(1, -(-len(values) // bins))
    starts = range(0, len(values), size)
    return [start + size / 2 for start in starts], [max(values[start : start + size]) for start in starts]


class Curve(NamedTuple):
    """One line of a panel of curves: its block, its points, and the chosen x."""

    block: int
    points: list[tuple[float, float]]
    chosen: float


@drawn
def curves(panels: dict[str, list[Curve]], *, key: str, x_label: str, y_label: str, summary: str) -> str:
    """A panel per kind of linear, a line per block, from the first (pale) to the last (full), and a dot at the chosen
    value."""
    shown = list(panels.items())[:MAX_PANELS]
    last = max((curve.block for _, of in shown for curve in of), default=0) or 1
    figure, axes = grid(len(shown), 4, height=1.9, sharex=True, sharey=True)
    for ax, (title, of) in zip(axes.flat, shown, strict=False):
        for curve in of:
            points = sorted(p for p in curve.points if finite(*p) and p[1] > 0)
            if not points:
                continue
            x, y = zip(*points, strict=True)
            ax.plot(x, y, color=ACCENT, alpha=0.25 + 0.6 * curve.block / last, lw=0.9)
            if x[0] <= curve.chosen <= x[-1]:  # on the line, which is straight where y is logarithmic
                ax.plot(curve.chosen, np.exp(np.interp(curve.chosen, x, np.log(y))), "o", color=SECOND, ms=3, zorder=5)
        ax.set_title(clean(title, 60), fontsize=9, loc="left")
        ax.set_yscale("log")
        ax.grid(True, axis="y", lw=0.6)
        ax.minorticks_off()
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return svg(figure, key, summary)


@drawn
def against(
    panels: dict[str, dict[str, list[tuple[float, float]]]], *, key: str, x_label: str, y_label: str, summary: str
) -> str:
    """Lines by name against a number, y logarithmic, a panel per title."""
    figure, axes = grid(len(panels), 1, height=3.4, extra=0.9)
    for ax, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for i, (name, points) in enumerate(lines.items()):
            points = sorted(p for p in points if finite(*p) and p[1] > 0)
            if points:
                ax.plot(*zip(*points, strict=True), lw=1.5, ms=4, label=wrapped(name, 44), **styled(i))
        ax.set_yscale("log")
        ticked(ax, 4)
        ax.grid(True, axis="y", lw=0.6)
        ax.set_title(clean(title, 80), fontsize=10, loc="left")
        ax.set_ylabel(y_label)
        ax.legend(fontsize=8.5, handlelength=2.4, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        ax.set_xlabel(x_label)
    return svg(figure, key, summary)


def styled(i: int, colours: Sequence[str] = (ACCENT, SECOND, INK)) -> dict[str, Any]:
    """Colour, dash and mark of the i-th line, a combination that no other of the first lines has."""
    turn = i // len(colours)
    return {"color": colours[i % len(colours)], "ls": ("-", "--", ":", "-.")[turn % 4], "marker": "os^D"[turn % 4]}


def wrapped(text: str, width: int) -> str:
    """Text in lines of about this width, broken at spaces; the rest of a very long text is left out."""
    text = clean(text, 5 * width)
    return "\n".join(textwrap.wrap(text, width, break_long_words=len(text) > 2 * width, break_on_hyphens=False)) or text


def place_of(name: str, position: int) -> tuple[int, str]:
    """Block number and kind of a linear, from its name: model.layers.3.mlp.up_proj -> 3, mlp.up_proj."""
    match = re.search(r"\.(\d{1,6})\.", name)
    if not match:
        return position, name
    return int(match.group(1)), re.sub(r"\.\d+(?=\.|$)", ".*", name[match.end() :])


def by_kind(layers: Iterable[LayerRecord]) -> dict[str, list[tuple[int, LayerRecord]]]:
    """The linears of each kind, with the numbers of their blocks; a head stands behind the last block."""
    kinds: dict[str, list[tuple[int, LayerRecord]]] = defaultdict(list)
    placed = [(*place_of(layer.name, -1), layer) for layer in layers]
    last = max((block for block, *_ in placed), default=-1)
    for i, (block, kind, layer) in enumerate(placed):
        kinds[kind].append((block if block >= 0 else last + 1 if last >= 0 else i, layer))
    return kinds


def _with_titles(text: str, gid: str, titles: Sequence[str]) -> str:
    """The marks of a line, which matplotlib writes as `use` elements in the order of its points, with titles."""
    begin = text.index(f'<g id="{gid}">')
    end = text.find('<g id="', begin + 1)
    inside = text[begin : end if end > 0 else len(text)]
    left = iter(titles)

    def titled(mark: re.Match) -> str:
        title = escape(clean(next(left, ""), 300))
        return f"<g><title>{title}</title>{mark[0]}</g>"

    return text[:begin] + re.sub(r"<use [^>]*/>", titled, inside) + text[begin + len(inside) :]


def apart(values: Sequence[float]) -> list[str]:
    """Numbers as text with as few significant digits as tell different ones apart, at least two."""
    for digits in range(2, 8):
        shown = [f"{value:.{digits}g}" for value in values]
        if len(set(shown)) == len(set(values)):
            break
    return shown


def power(value: float, _: object = None) -> str:
    """A tick of a logarithmic axis: 0.01, 100, 10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa} · 10{raised}"


def svg(figure: Figure, key: str, summary: str, titles: Mapping[str, Sequence[str]] = {}) -> str:
    """The figure as an SVG element, with its own ids and the page's colours.

    Args:
        titles: of the marks of lines, by the lines' gid: what a browser shows where the pointer rests on a mark.
    """
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # which writes mathematics
            axis.set_major_formatter(power)
            axis.set_minor_formatter(NullFormatter())
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # a hundredth of a pixel
    for gid, of in titles.items():
        text = _with_titles(text, gid, of)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{key}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's own
    for name, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    end = text.index(">") + 1
    box = re.search(r'viewBox="[^"]+"', text[:end])[0]
    return f'<svg {box} role="img" aria-label="{escape(clean(summary, 2000))}">{text[end:]}'
