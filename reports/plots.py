"""Figures as inline SVG that follow the page's colours, light or dark."""

import re
from collections import defaultdict
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Colours that matplotlib writes down and the page replaces by its own variables.
_COLOURS = {
    "ink": "#010101", "muted": "#020202", "line": "#030303", "accent": "#040404", "second": "#050505", "panel": "#060606",
}  # fmt: skip
INK, MUTED, LINE, ACCENT, SECOND, PANEL = _COLOURS.values()
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": LINE, "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip
MAX_PANELS = 12


def layer_errors(layers: list[dict[str, Any]], method: str) -> str:
    """Error of each linear's output against depth: one panel per kind of linear, the method against round-to-nearest."""
    kinds: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for i, layer in enumerate(layers):
        block, kind = place_of(layer["name"], i)
        kinds[kind].append((block, layer["error"], layer.get("rtn_error")))
    shown = list(kinds.items())[:MAX_PANELS]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 0.5 + 1.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax, (kind, points) in zip(axes.flat, shown, strict=False):
            points.sort()
            blocks = [p[0] for p in points]
            peer = [(b, rtn) for b, _, rtn in points if rtn is not None]
            if peer:
                ax.plot(
                    *zip(*peer, strict=True), color=SECOND, lw=1.3, ls="--", marker="o", ms=2.5, label="round to nearest, absmax"
                )
            ax.plot(blocks, [p[1] for p in points], color=ACCENT, lw=1.6, marker="o", ms=2.5, label=method)
            ax.set_title(kind, fontsize=10, loc="left")
            ax.set_yscale("log")
            ax.grid(True, axis="y", lw=0.6)
            ax.minorticks_off()
        for ax in axes.flat[len(shown) :]:
            ax.axis("off")
        figure.supxlabel("block", fontsize=10)
        figure.supylabel("relative error of the output", fontsize=10)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside upper right", ncols=2)
        summary = f"Relative output error of each linear by block: {method} against round to nearest, log scale."
        return _svg(figure, "errors", summary)


def speed_bars(speed: dict[str, dict[str, Any]]) -> str:
    """Decode speed of every variant, with quartiles."""
    return _bars("speed", list(speed), [s["decode_tokens_per_s"] for s in speed.values()],
                 [s["decode_quartiles"] for s in speed.values()], "decoded tokens per second",
                 "Decode speed of every variant in tokens per second.")  # fmt: skip


def size_bars(sizes: dict[str, dict[str, float]]) -> str:
    """Stored megabytes, split into compressed linears and the rest: {model: {part: bytes}}."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.7, 0.7 + 0.42 * len(sizes)), layout="constrained")
        ax = figure.subplots()
        for i, parts in enumerate(sizes.values()):
            left = 0.0
            for colour, value in zip((ACCENT, SECOND), parts.values(), strict=True):
                ax.barh(i, value / 1e6, left=left / 1e6, height=0.62, color=colour)
                left += value
            ax.text(left / 1e6, i, f" {left / 1e6:,.0f} MB", va="center")
        ax.set_yticks(range(len(sizes)), list(sizes))
        ax.invert_yaxis()
        ax.set_xlim(0, max(sum(p.values()) for p in sizes.values()) / 1e6 * 1.25)
        ax.set_xlabel("stored megabytes")
        ax.tick_params(axis="y", length=0)
        return _svg(figure, "size", "Stored megabytes of each model, split into the linears that were compressed and the rest.")


def roofline(rows: list[dict[str, Any]], ceilings: dict[str, Any]) -> str:
    """Each timed row as a point: operations per byte against operations per second, under the measured ceilings."""
    with matplotlib.rc_context(_STYLE):
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
                *zip(*base, strict=True), s=16, facecolors="none", edgecolors=SECOND, label="baseline, at the same operations"
            )
        ax.scatter([p[0] for p in points], [p[1] for p in points], s=18, color=ACCENT, label="ours")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("operations per byte")
        ax.set_ylabel("operations per second")
        ax.grid(True, lw=0.6)
        ax.minorticks_off()
        ax.legend(loc="lower right")
        return _svg(figure, "roofline", "Operations per second of every contest against operations per byte, under the ceilings.")


def speedups(rows: list[dict[str, Any]]) -> str:
    """Speed-up over the baseline against tokens: a panel per op and shape, a line per format; nothing where no tokens vary."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get("speedup") and row["tokens"]:
            shape = " × ".join(map(str, row["shape"]))
            panels[f"{row['op']}\n{shape}"][row["detail"]].append((row["tokens"], row["speedup"]))
    lines = {title: {detail: points for detail, points in of.items() if len(dict(points)) > 1} for title, of in panels.items()}
    shown = [(title, of) for title, of in lines.items() if of][:MAX_PANELS]
    if not shown:
        return ""
    columns = min(len(shown), 4)
    deep = -(-len(shown) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 0.5 + 2.5 * deep), layout="constrained")
        axes = figure.subplots(deep, columns, squeeze=False)
        for ax, (title, details) in zip(axes.flat, shown, strict=False):
            ax.axhline(1, color=MUTED, lw=1)
            for i, (detail, points) in enumerate(details.items()):
                points.sort()
                style = {"color": (ACCENT, SECOND)[i % 2], "ls": ("-", "--", ":", "-.")[i // 2 % 4], "marker": "os^D"[i // 2 % 4]}
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
        return _svg(figure, "speedups", "Speed-up over the baseline against tokens, by op, shape and number format, log scales.")


def _bars(key: str, names: list[str], values: list[float], spread: list[list[float]], label: str, summary: str) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.7, 0.7 + 0.42 * len(names)), layout="constrained")
        ax = figure.subplots()
        errors = [[v - s[0] for v, s in zip(values, spread, strict=True)], [s[1] - v for v, s in zip(values, spread, strict=True)]]
        colours = [ACCENT if name == "compressed" else SECOND for name in names]
        ax.barh(range(len(names)), values, height=0.62, color=colours)
        ax.errorbar(values, range(len(names)), xerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for i, (value, s) in enumerate(zip(values, spread, strict=True)):
            ax.text(max(value, s[1]), i, f"  {value:,.0f}", va="center")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(0, max(values) * 1.2)
        ax.set_xlabel(label)
        ax.tick_params(axis="y", length=0)
        return _svg(figure, key, summary)


def place_of(name: str, position: int) -> tuple[int, str]:
    """Block number and kind of a linear, from its name: model.layers.3.mlp.up_proj -> 3, mlp.up_proj."""
    match = re.search(r"\.(\d+)\.", name)
    if not match:
        return position, name
    kind = re.sub(r"\.\d+(?=\.|$)", ".*", name[match.end() :])
    return int(match.group(1)), kind


def _svg(figure: Figure, key: str, summary: str) -> str:
    """The figure as an SVG element, with its own ids and the page's colours."""
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{key}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    start, end = svg.index("<svg"), svg.index(">", svg.index("<svg")) + 1
    box = re.search(r'viewBox="[^"]+"', svg[start:end])[0]
    return f'<svg {box} role="img" aria-label="{escape(summary)}">{svg[end:]}'
