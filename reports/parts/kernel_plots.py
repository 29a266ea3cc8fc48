"""Figures of a kernel benchmark: the roofline, and speed-ups against tokens."""

from collections import defaultdict
from collections.abc import Sequence

from eval.record.measured import BenchCeilings, ContestRow
from reports.parts.plots import ACCENT, MAX_PANELS, MUTED, SECOND, drawn, finite, grid, styled, svg
from reports.parts.text import clean


@drawn
def roofline(rows: Sequence[ContestRow], ceilings: BenchCeilings) -> str:
    """Each timed row as a point: operations per byte against operations per second, under the measured ceilings."""
    rows = [row for row in rows if row.flops and row.least_bytes and row.seconds.get(row.ours) and finite(row.flops)]
    if not rows or not ceilings.bandwidth:
        return ""
    figure, axes = grid(1, 1, height=4.4, extra=0)
    ax = axes[0, 0]
    intensity = {id(row): row.flops / row.least_bytes for row in rows}
    low, high = min(intensity.values()) / 2, max(intensity.values()) * 4
    rates = {name: rate for name, rate in ceilings.rates.items() if name in {row.rate for row in rows}}
    for name, rate in (rates or ceilings.rates).items():
        ridge = rate / ceilings.bandwidth
        ax.plot([low, ridge, max(high, 2 * ridge)], [low * ceilings.bandwidth, rate, rate], color=MUTED, lw=1.2)
        ax.annotate(name, (max(high, 2 * ridge), rate), ha="right", va="bottom", color=MUTED, fontsize=9)
    base = [(intensity[id(row)], row.flops / s) for row in rows if (s := row.seconds.get(row.baseline))]
    if base:
        words = "baseline, at the same operations"
        ax.scatter(*zip(*base, strict=True), s=16, facecolors="none", edgecolors=SECOND, label=words)
    ours = [(intensity[id(row)], row.flops / row.seconds[row.ours]) for row in rows]
    ax.scatter(*zip(*ours, strict=True), s=18, color=ACCENT, label="ours")
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    ax.grid(True, lw=0.6)
    ax.minorticks_off()
    ax.legend(loc="lower right")
    return svg(
        figure, "roofline", "Operations per second of every contest against operations per byte, under the ceilings."
    )


@drawn
def speedups(rows: Sequence[ContestRow]) -> str:
    """Speed-up over the baseline against tokens: a panel per op and shape, a line per format; nothing where the number
    of tokens does not vary."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.speedup and finite(row.speedup) and row.tokens:
            shape = " × ".join(map(str, row.shape))
            panels[f"{row.op}\n{shape}"][row.detail].append((row.tokens, row.speedup))
    lines = {
        title: {detail: sorted(points) for detail, points in of.items() if len(dict(points)) > 1}
        for title, of in panels.items()
    }
    shown = [(title, of) for title, of in lines.items() if of][:MAX_PANELS]
    if not shown:
        return ""
    figure, axes = grid(len(shown), 4, height=2.5)
    for ax, (title, details) in zip(axes.flat, shown, strict=False):
        ax.axhline(1, color=MUTED, lw=1)
        for i, (detail, points) in enumerate(details.items()):
            look = styled(i, (ACCENT, SECOND))
            ax.plot(*zip(*points, strict=True), lw=1.5, ms=3.5, label=clean(detail, 40), **look)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}×")
        ax.set_title(clean(title, 60), fontsize=9, loc="left")
        ax.grid(True, axis="y", lw=0.6)
        ax.minorticks_off()
        ax.legend(fontsize=8, handlelength=1.6)
    figure.supxlabel("tokens at once", fontsize=10)
    figure.supylabel("speed-up", fontsize=10)
    return svg(
        figure, "speedups", "Speed-up over the baseline against tokens, by op, shape and number format, log scales."
    )
