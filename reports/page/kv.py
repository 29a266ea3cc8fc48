"""What the page of a run on KV caches shows: answers against bytes, what survives, and speed against context."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from reports.page.caches import FULL, MAIN, cache_rows, speed_rows
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, INK, LINE, MUTED, SECOND, STYLE, svg, wrapped
from reports.parts.table import recipe_text

_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def context(record: dict[str, Any]) -> dict[str, Any]:
    """Everything that templates/cache.html asks for."""
    cache = record["cache"]
    rows = cache["answers"]
    visibilities = list(dict.fromkeys(row["visibility"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    labels = {name: label(record, name) for name in names}
    lengths = sorted({row["length"] for row in rows})
    table = [row | {"label": labels[row["name"]]} for row in cache_rows(cache)]
    speed = cache.get("speed")
    return {
        "title": f"{labels[MAIN]} on the cache of {record['model']['name']}",
        "verdict": verdict(record, table, visibilities),
        "cards": _cards(table, visibilities, speed),
        "visibilities": visibilities,
        "rows": table,
        "lengths": lengths,
        "tasks": list(dict.fromkeys(row["task"] for row in rows)),
        "samples": max(len(row["exact"]) for row in rows),
        "pareto": _pareto(cache, table, visibilities),
        "by_token": _by_token(rows, labels, visibilities, _shown(cache)),
        "survival": _survival(cache, labels),
        "budgets": _budgets(cache, labels),
        "errors": _errors(cache, labels),
        "depth": _depth(cache, labels),
        "speed": _speed(speed, labels) if speed else "",
        "speed_rows": [
            row | {"label": labels.get(row["name"], row["name"])} for row in (speed_rows(speed) if speed else [])
        ],
        "contexts": sorted(int(c) for c in speed["tokens_per_s"][FULL]) if speed else [],
        "left_alone": cache.get("left_alone", {}),
    }


def figures(record: dict[str, Any]) -> Figures:
    """The figures of a record, for a notebook."""
    told = context(record)
    titles = {
        "pareto": "Accuracy against bytes",
        "depth": "Where the needle lies",
        "survival": "What survives of the needle",
        "budgets": "Positions that each head keeps",
        "errors": "Error of attention",
        "by_token": "Divergence by token",
        "speed": "Speed against context",
    }
    return Figures(" ".join(told["verdict"]), {title: told[key] for key, title in titles.items() if told[key]})


def label(record: dict[str, Any], name: str) -> str:
    """What a variant is called on the page."""
    if name == FULL:
        return "full cache"
    return recipe_text(record["recipe"]) if name == MAIN else name


def _shown(cache: dict[str, Any]) -> list[str]:
    """Variants with figures of their own: the main one and those beside it."""
    return [name for name in cache["timed"] if name in cache["kept"]]


def verdict(record: dict[str, Any], table: list[dict[str, Any]], visibilities: list[str]) -> list[str]:
    """Plain sentences: bytes, answers with and without the question in sight, and speed."""
    full, main = (next(row for row in table if row["name"] == name) for name in (FULL, MAIN))
    said = []
    if main["share"] is not None:
        said.append(
            f"The cache holds {main['share'] * 100:.0f} % of the bytes of a full 16-bit one, scales and slack counted."
        )
    for visibility in visibilities:
        mine, whole = main["by"][visibility], full["by"][visibility]
        low, high = (100 * v for v in mine["against"][1:])
        how = {
            "agnostic": "With the question unknown when it was compressed",
            "visible": "With the question in sight",
            "follow-up": "When a second question follows",
        }[visibility]
        noise = " (within the noise)" if low <= 0 <= high else ""
        said.append(
            f"{how}, {mine['exact'] * 100:.0f} % of the answers are exact, against {whole['exact'] * 100:.0f} % of a "
            "full "
            f"cache{noise}."
        )
    speed = record["cache"].get("speed")
    if speed:
        longest = max(speed["tokens_per_s"][FULL], key=int)
        ratio = speed["tokens_per_s"][MAIN][longest][0] / speed["tokens_per_s"][FULL][longest][0]
        said.append(
            f"Behind {int(longest):,} tokens the model decodes {ratio:.2f}× as fast as with a full cache in the same "
            f"compiled step; its attention takes {speed['attention_speedup'][MAIN][longest]:.2f}× less time."
        )
    if kinds := record["cache"].get("left_alone"):
        what = ", ".join(f"{count} of kind {kind}" for kind, count in kinds.items())
        said.append(f"Layers that do not keep all positions were left alone: {what}.")
    return said


def _cards(table: list[dict[str, Any]], visibilities: list[str], speed: dict[str, Any] | None) -> list[tuple[str, str]]:
    main = next(row for row in table if row["main"])
    full = next(row for row in table if row["name"] == FULL)
    cards = [
        (f"{1 / main['share']:.2f}×", f"smaller cache: {full['bytes'] / 1e6:,.1f} → {main['bytes'] / 1e6:,.1f} MB")
    ]
    cards += [
        (
            f"{main['by'][v]['exact'] * 100:.0f} %",
            f"exact answers, {v}; full cache {full['by'][v]['exact'] * 100:.0f} %",
        )
        for v in visibilities
    ]
    if speed:
        longest = max(speed["tokens_per_s"][FULL], key=int)
        ratio = speed["tokens_per_s"][MAIN][longest][0] / speed["tokens_per_s"][FULL][longest][0]
        cards.append((f"{ratio:.2f}×", f"decode speed behind {int(longest):,} tokens"))
    return cards


def _styles(names: list[str], plain_ones: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Colours, marks and dashes; the plain ones pale."""
    styles = {}
    for i, name in enumerate(names):
        plain = name in (plain_ones or [])
        styles[name] = {
            "color": MUTED if plain else (ACCENT, SECOND, INK)[i % 3],
            "marker": _MARKS[i % len(_MARKS)],
            "ls": ":" if plain else ("-", "--", "-.")[i // 3 % 3],
        }
    return styles


def _pareto(cache: dict[str, Any], table: list[dict[str, Any]], visibilities: list[str]) -> str:
    """Exact answers and KL against the share of bytes: a column per visibility."""
    rows = {row["name"]: row for row in table if row["share"]}
    lines = {
        text.replace("(budget={})", ""): [rows[n] for _, n in points if n in rows]
        for text, points in cache["curves"].items()
    }
    on_lines = {row["name"] for line in lines.values() for row in line}
    lines |= {row["label"]: [row] for row in rows.values() if row["name"] not in on_lines and row["name"] != FULL}
    if not lines or FULL not in rows:
        return ""
    styles = _styles(list(lines), [text.replace("(budget={})", "") for text in cache["references"]])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.4 + 0.17 * len(lines)), layout="constrained")
        axes = figure.subplots(2, len(visibilities), sharex=True, sharey="row", squeeze=False)
        for column, visibility in zip(axes.T, visibilities, strict=True):
            for name, line in lines.items():
                line = sorted(line, key=lambda row: row["share"])
                x = [row["share"] * 100 for row in line]
                for ax, metric, error, scale in zip(
                    column, ("exact", "kl"), ("stderr", "kl_stderr"), (100, 1), strict=True
                ):
                    y = [max(scale * row["by"][visibility][metric], 1e-4 if metric == "kl" else 0) for row in line]
                    e = [scale * row["by"][visibility][error] for row in line]
                    ax.errorbar(x, y, yerr=e, label=wrapped(name, 60), ms=4.5, lw=1.4, elinewidth=0.7, **styles[name])
            column[0].axhline(100 * rows[FULL]["by"][visibility]["exact"], color=LINE, lw=1.2, zorder=0)
            column[0].set_title(visibility, fontsize=10, loc="left")
            column[1].set_yscale("log")
            for ax in column:
                ax.grid(True, lw=0.6)
                ax.minorticks_off()
        axes[0, 0].set_ylim(-4, 104)
        axes[0, 0].set_ylabel("exact answers, %")
        axes[1, 0].set_ylabel("KL to the full cache's\nanswers, nats per token")
        for ax in axes[1]:
            ax.set_xlabel("bytes, % of the full cache's")
        handles, found = axes[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, found, loc="outside lower center", ncols=2 if len(lines) > 4 else len(lines), fontsize=8.5
        )
        return svg(
            figure, "pareto", "Exact answers and divergence of the answers against bytes of the cache, by visibility."
        )


def _by_token(rows: list[dict[str, Any]], labels: dict[str, str], visibilities: list[str], names: list[str]) -> str:
    """KL against the position in the answer."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.9), layout="constrained")
        axes = figure.subplots(1, len(visibilities), sharey=True, squeeze=False)[0]
        styles = _styles(names)
        for ax, visibility in zip(axes, visibilities, strict=True):
            for name in names:
                own = [r["kl_by_token"] for r in rows if r["variant"] == name and r["visibility"] == visibility]
                means = [float(np.mean([kl[i] for kl in own if i < len(kl)])) for i in range(max(map(len, own)))]
                ax.plot(
                    range(1, len(means) + 1),
                    [max(v, 1e-5) for v in means],
                    ms=4,
                    lw=1.4,
                    label=wrapped(labels[name], 60),
                    **styles[name],
                )
            ax.set_yscale("log")
            ax.set_title(visibility, fontsize=10, loc="left")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(True, axis="y", lw=0.6)
            ax.minorticks_off()
            ax.set_xlabel("token of the answer")
        axes[0].set_ylabel("KL, nats")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
        return svg(
            figure, "by-token", "KL to the full cache's predictions by token of the answer, for each visibility."
        )


def _maps(maps: dict[str, np.ndarray], key: str, bar: str, summary: str) -> str:
    """Heat maps of layers and heads, one per variant."""
    if not maps:
        return ""
    shown = dict(list(maps.items())[:4])
    heads = max(m.shape[1] for m in shown.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.9 + (0.28 * heads + 0.75) * len(shown)), layout="constrained")
        axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, (title, values) in zip(axes, shown.items(), strict=True):
            _cells(ax, values.T)
            ax.set_title(wrapped(title, 90), fontsize=9.5, loc="left")
            ax.set_ylabel("head")
        axes[-1].set_xlabel(f"layer; {bar}")
        return svg(figure, key, summary)


def _cells(ax: Axes, values: np.ndarray) -> None:
    """A cell per share, filled as strongly as it is large; none where there is no number."""
    rows, columns = values.shape
    small = columns > 20
    for y, x in zip(*np.nonzero(~np.isnan(values)), strict=True):
        part = min(max(values[y, x], 0), 1)
        ax.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fc=ACCENT, alpha=0.04 + 0.8 * part, lw=0))
        ax.text(x, y, f"{values[y, x] * 100:.0f}", ha="center", va="center", fontsize=6 if small else 8, color=INK)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_yticks(range(rows))
    ax.set_xticks(range(0, columns, 2 if small else 1))
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _survival(cache: dict[str, Any], labels: dict[str, str]) -> str:
    maps = {}
    for name in _shown(cache):
        shares = [np.asarray(one["share"]) for one in cache["survival"].get(name, [])]
        if shares and len({len(row) for one in shares for row in one}) == 1:
            maps[labels[name]] = np.mean(shares, 0)
    maps = {
        name: shares for name, shares in maps.items() if shares.min() < 1
    }  # where all stay, there is nothing to draw
    return _maps(
        maps,
        "survival",
        "per cent of the needle's tokens that stay, question unknown",
        "Share of the needle that stays by layer and head.",
    )


def _budgets(cache: dict[str, Any], labels: dict[str, str]) -> str:
    maps = {}
    for name in _shown(cache):
        length = max(cache["kept"][name], key=int)
        kept, full = np.asarray(cache["kept"][name][length]), np.asarray(cache["kept"][FULL][length])
        share = kept / full
        if share.max() - share.min() > 0.02:  # where all are the same, there is nothing to draw
            maps[labels[name]] = share
    return _maps(
        maps, "budgets", "per cent of the positions that stay", "Share of the positions that each head keeps, by layer."
    )


def _errors(cache: dict[str, Any], labels: dict[str, str]) -> str:
    names = [name for name in _shown(cache) if cache["errors"].get(name)]
    if not names:
        return ""
    styles = _styles(names)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.8), layout="constrained")
        ax = figure.subplots()
        for name in names:
            values = [max(v, 1e-8) for v in cache["errors"][name]]
            ax.plot(range(len(values)), values, ms=3.5, lw=1.4, label=wrapped(labels[name], 60), **styles[name])
        ax.set_yscale("log")
        ax.set_xlabel("layer")
        ax.set_ylabel("relative error of the\nattention's output")
        ax.grid(True, axis="y", lw=0.6)
        ax.minorticks_off()
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
        return svg(figure, "errors", "Relative error of each attention layer's output for question and answer.")


def _depth(cache: dict[str, Any], labels: dict[str, str]) -> str:
    """Exact answers of the main variant by the needle's depth and the context's length, question unknown; a panel per
    task."""
    depths = {(one["task"], one["length"]): one["depths"] for one in cache["depths"]}
    own = {
        (row["task"], row["length"]): row["exact"]
        for row in cache["answers"]
        if row["variant"] == MAIN and row["visibility"] == "agnostic"
    }
    lengths = sorted({length for _, length in own})
    edges = [0, 0.2, 0.4, 0.6, 0.8, 1.0001]
    grids = {}
    for task in dict.fromkeys(task for task, _ in own):
        grid = np.full((len(lengths), 5), np.nan)
        for i, length in enumerate(lengths):
            pairs = [
                (d, e) for d, e in zip(depths[task, length], own.get((task, length), []), strict=False) if d is not None
            ]
            for j in range(5):
                inside = [e for d, e in pairs if edges[j] <= d < edges[j + 1]]
                grid[i, j] = np.mean(inside) if inside else np.nan
        if not np.isnan(grid).all():
            grids[task] = grid
    if not grids or sum(len(v) for v in own.values()) < 10:
        return ""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 1.0 + 0.42 * len(lengths)), layout="constrained")
        for ax, (task, grid) in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids.items(), strict=True):
            _cells(ax, grid)
            ax.set_xticks(range(5), ["0–20", "20–40", "40–60", "60–80", "80–100"])
            ax.set_yticks(range(len(lengths)), [f"{n:,}" for n in lengths])
            ax.set_title(task, fontsize=10, loc="left")
        figure.supxlabel("depth of the needle, % of the context", fontsize=10)
        figure.supylabel("tokens", fontsize=10)
        return svg(figure, "depth", "Per cent of exact answers by depth of the needle and length of the context.")


def _speed(speed: dict[str, Any], labels: dict[str, str]) -> str:
    """Tokens per second against context; and milliseconds of all attention layers."""
    names = list(speed["tokens_per_s"])
    styles = _styles(names)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        whole, alone = figure.subplots(1, 2)
        for name in names:
            found = sorted((int(c), v) for c, v in speed["tokens_per_s"][name].items())
            y = [v[0] for _, v in found]
            spread = [[v[0] - v[1] for _, v in found], [v[2] - v[0] for _, v in found]]
            whole.errorbar(
                [c for c, _ in found],
                y,
                yerr=spread,
                ms=4.5,
                lw=1.4,
                elinewidth=0.7,
                label=wrapped(labels[name], 60),
                **styles[name],
            )
        for name, of in speed["attention_s"].items():
            found = sorted((int(c), v[0] * 1e3) for c, v in of.items())
            style = styles.get(name) or {"color": MUTED, "ls": ":", "marker": "x"}
            alone.plot(*zip(*found, strict=True), ms=4.5, lw=1.4, label=labels.get(name, name), **style)
        whole.set_ylim(0, None)
        whole.set_ylabel("decoded tokens per second")
        alone.set_ylim(0, None)
        alone.set_ylabel("attention of all layers, ms a token")
        for ax in (whole, alone):
            ax.set_xlabel("tokens before")
            ax.grid(True, lw=0.6)
            ax.minorticks_off()
            ax.xaxis.set_major_formatter("{x:,.0f}")
        figure.legend(*alone.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
        return svg(figure, "speed", "Decode speed and time of attention against the length of the context, by variant.")
