"""Horizontal bars: decode speeds with their limits, and stored bytes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.text import Text

from eval.record.speed import Speed
from reports.parts.plots import ACCENT, INK, SECOND, drawn, finite, grid, svg, wrapped


@drawn
def speed_bars(speed: dict[str, Speed]) -> str:
    """Decode speed of every variant, with quartiles, and a line at the speed if only reading its bytes once took
    time."""
    shown = {name: one for name, one in speed.items() if finite(one.decode_tokens_per_s)}
    rows = [(name, one.decode_tokens_per_s, one.decode_quartiles) for name, one in shown.items()]
    rows = [(name, value, ends if len(ends) == 2 else (value, value)) for name, value, ends in rows]
    if not rows:
        return ""
    labels = [wrapped(name, 26) for name, *_ in rows]
    deep = 0.36 * len(rows) + 0.06 * sum(1 + label.count("\n") * 2 for label in labels)
    figure, axes = grid(1, 1, width=4.7, height=deep, extra=0.7)
    ax, values = axes[0, 0], [value for _, value, _ in rows]
    errors = [[max(v - ends[0], 0) for _, v, ends in rows], [max(ends[1] - v, 0) for _, v, ends in rows]]
    colours = [ACCENT if name == "compressed" else SECOND for name, *_ in rows]
    ax.barh(range(len(rows)), values, height=0.62, color=colours)
    ax.errorbar(values, range(len(rows)), xerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    numbers = [
        ax.text(max(value, *ends), i, f"\u2002{value:,.{0 if value >= 20 else 1}f}", va="center")
        for i, (_, value, ends) in enumerate(rows)
    ]
    limits = [(i, one.memory_limit_tokens_per_s) for i, one in enumerate(shown.values())]
    limits = [(i, limit) for i, limit in limits if finite(limit)]
    for i, limit in limits:
        ax.plot([limit, limit], [i - 0.36, i + 0.36], color=INK, lw=1.4, ls=(0, (2, 1)))
    summary = "Decode speed of every variant in tokens per second."
    end = max(max(values) * 1.2, *(1.06 * limit for _, limit in limits), 0)
    _laid_out(ax, labels, end, "decoded tokens per second")
    _clear_of(ax, [(numbers[i], limit) for i, limit in limits])
    return svg(figure, "speed", summary)


def _clear_of(ax: Axes, labels: Sequence[tuple[Text, float]]) -> None:
    """Move each label to the right of the line at its x if they would cross, and make room for it there."""
    ax.figure.draw_without_rendering()
    gap = 0.3 * ax.figure.dpi * 10 / 72  # pixels; the page's font may be a little wider than the one measured here
    moved = []
    for label, x in labels:
        box, at = label.get_window_extent(), ax.transData.transform((x, 0))[0]
        if box.x0 - gap < at < box.x1 + gap:
            label.set_x(x)
            moved.append((x, min((box.width + 2 * gap) / ax.bbox.width, 0.8)))
    ax.set_xlim(0, max([ax.get_xlim()[1], *(x / (1 - share) for x, share in moved)]))


@drawn
def size_bars(sizes: dict[str, tuple[float, float]]) -> str:
    """Stored megabytes, split into compressed linears and the rest: {model: bytes of both}."""
    figure, axes = grid(1, 1, width=4.7, height=0.42 * len(sizes), extra=0.7)
    ax = axes[0, 0]
    for i, parts in enumerate(sizes.values()):
        left = 0.0
        for colour, value in zip((ACCENT, SECOND), parts, strict=True):
            ax.barh(i, value / 1e6, left=left / 1e6, height=0.62, color=colour)
            left += value
        ax.text(left / 1e6, i, f"\u2002{left / 1e6:,.0f} MB", va="center")
    summary = "Stored megabytes of each model, split into the linears that were compressed and the rest."
    _laid_out(ax, list(sizes), max(map(sum, sizes.values())) / 1e6 * 1.25, "stored megabytes")
    return svg(figure, "size", summary)


def _laid_out(ax: Axes, labels: list[str], end: float, x_label: str) -> None:
    """Labels and axes of horizontal bars."""
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlim(0, end or 1)
    ax.set_xlabel(x_label)
    ax.tick_params(axis="y", length=0)
