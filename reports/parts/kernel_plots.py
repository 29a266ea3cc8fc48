"""Figures of a kernel benchmark: the roofline, and speed-ups against tokens."""

from collections import defaultdict
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from reports.parts.plots import ACCENT, MAX_PANELS, MUTED, SECOND, STYLE, svg


def roofline(rows: list[dict[str, Any]], ceilings: dict[str, Any]) -> str:
    """Each timed row as a point: operations per byte against operations per second, under the measured ceilings."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        ax = figure.subplots()
        points = [(r["flops"] / r["least_bytes"], r["flops"] / r["seconds"][r["ours"]], r) for r in rows]
        low, high = min(p[0] for p in points) / 2, max(p[0] for p in points) * 4
        used = {r["rate"] for r in rows}
        rates = {name: rate for name, rate in ceilings["rates"].items() if name in used} or ceilings["rates"]
        for name, rate in rates.items():
            ridge = rate / ceilings["bandwidth"]
            ax.plot([low, ridge, max(high, 2 * ridge)], [low * ceilings["bandwidth"], rate, rate], color=MUTED, lw=1.2)
            ax.annotate(name, (max(high, 2 * ridge), rate), ha="right", va="bottom", color=MUTED, fontsize=9)
        base = [(r["flops"] / r["least_bytes"], r["flops"] / s) for r in rows if (s := r["seconds"].get(r["baseline"]))]
        if base:
            ax.scatter(
                *zip(*base, strict=True),
                s=16,
                facecolors="none",
                edgecolors=SECOND,
                label="baseline, at the same operations",
            )
        ax.scatter([p[0] for p in points], [p[1] for p in points], s=18, color=ACCENT, label="ours")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("operations per byte")
        ax.set_ylabel("operations per second")
        ax.grid(True, lw=0.6)
        ax.minorticks_off()
        ax.legend(loc="lower right")
        return svg(
            figure,
            "roofline",
            "Operations per second of every contest against operations per byte, under the ceilings.",
        )


def speedups(rows: list[dict[str, Any]]) -> str:
    """Speed-up over the baseline against tokens: a panel per op and shape, a line per format; nothing where no tokens
    vary."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get("speedup") and row["tokens"]:
            shape = " × ".join(map(str, row["shape"]))
            panels[f"{row['op']}\n{shape}"][row["detail"]].append((row["tokens"], row["speedup"]))
    lines = {
        title: {detail: points for detail, points in of.items() if len(dict(points)) > 1}
        for title, of in panels.items()
    }
    shown = [(title, of) for title, of in lines.items() if of][:MAX_PANELS]
    if not shown:
        return ""
    columns = min(len(shown), 4)
    deep = -(-len(shown) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.5 + 2.5 * deep), layout="constrained")
        axes = figure.subplots(deep, columns, squeeze=False)
        for ax, (title, details) in zip(axes.flat, shown, strict=False):
            ax.axhline(1, color=MUTED, lw=1)
            for i, (detail, points) in enumerate(details.items()):
                points.sort()
                style = {
                    "color": (ACCENT, SECOND)[i % 2],
                    "ls": ("-", "--", ":", "-.")[i // 2 % 4],
                    "marker": "os^D"[i // 2 % 4],
                }
                ax.plot(*zip(*points, strict=True), lw=1.5, ms=3.5, label=detail, **style)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_major_formatter("{x:g}×")
            ax.set_title(title, fontsize=9, loc="left")
            ax.grid(True, axis="y", lw=0.6)
            ax.minorticks_off()
            ax.legend(fontsize=8, handlelength=1.6)
        for ax in axes.flat[len(shown) :]:
            ax.axis("off")
        figure.supxlabel("tokens at once", fontsize=10)
        figure.supylabel("speed-up", fontsize=10)
        return svg(
            figure, "speedups", "Speed-up over the baseline against tokens, by op, shape and number format, log scales."
        )
