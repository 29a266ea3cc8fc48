"""The page of a run on KV caches: answers against bytes, the kept positions, and speed against context."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from eval.record.measured import CacheAnswers, CacheMeasurements
from eval.record.metrics import fmt
from eval.record.rows import RunRecord, typed
from eval.record.speed import CacheSpeed
from reports.page.verdict import timing_note
from reports.parts.caches import FULL, MAIN, OWN_TEXT, WHEN, CacheRow, cache_rows, own_text_rows, speed_rows
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, INK, LINE, MUTED, SECOND, drawn, finite, grid, legend, logarithmic, svg, wrapped
from reports.parts.table import Record
from reports.parts.text import clean

_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LEGEND = {"loc": "outside lower center", "ncols": 2, "fontsize": 8.5}


def context(run: RunRecord) -> dict[str, Any]:
    """Everything that templates/cache.html needs."""
    cache, speed = run.cache, run.cache.speed
    labels = _Labels(run)
    visibilities = list(dict.fromkeys(one.visibility for one in cache.answers))
    table = cache_rows(cache)
    return {
        "title": _title(run, table),
        "labels": labels,
        "verdict": verdict(run, table, visibilities),
        "cards": _cards(run, table, visibilities),
        "visibilities": visibilities,
        "rows": table,
        "lengths": sorted({one.length for one in cache.answers}),
        "tasks": list(dict.fromkeys(one.task for one in cache.answers)),
        "samples": max((len(one.exact) for one in cache.answers), default=0),
        "own_texts": own_text_rows(run),
        "own_text_heads": [head for _, head, _ in OWN_TEXT],
        "pareto": _pareto(cache, table, visibilities, labels),
        "by_token": _by_token(cache.answers, labels, visibilities, _shown(cache)),
        "survival": _survival(cache, labels),
        "budgets": _budgets(cache, labels),
        "errors": _errors(cache, labels),
        "depth": _depth(cache),
        "speed": _speed(speed, labels) if speed else "",
        "speed_rows": speed_rows(speed) if speed else [],
        "timing_note": timing_note(speed.spread, speed.load) if speed else "",
        "contexts": sorted(speed.tokens_per_s.get(FULL, {})) if speed else [],
    }


def _title(run: RunRecord, table: Sequence[CacheRow]) -> str:
    """The model, the share of its cache, and the methods; the knobs are on the line below."""
    share = next((row.share for row in table if row.main and finite(row.share)), None)
    held = "and its KV cache" if share is None else f"with {share * 100:.0f} % of its KV cache"
    return f"{clean(run.model.name, 100)} {held}: {' + '.join(clean(step.method, 60) for step in run.recipe)}"


def figures(record: Record) -> Figures:
    """The figures of a record, for a notebook."""
    shown = context(typed(record))
    titles = {
        "pareto": "Accuracy against bytes", "depth": "Exact answers by the place of the needle",
        "survival": "Tokens of the needle that stay", "budgets": "Positions that each head keeps",
        "errors": "Error of attention", "by_token": "Divergence by token", "speed": "Speed against context",
    }  # fmt: skip
    return Figures(" ".join(shown["verdict"]), {title: shown[key] for key, title in titles.items()})


class _Labels(dict):
    """The names of the variants on the page, by their names in the record."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__({FULL: "full cache", MAIN: run.recipe_of(MAIN) or MAIN})

    def __missing__(self, name: str) -> str:
        return name


def _shown(cache: CacheMeasurements) -> list[str]:
    """Variants with their own figures: the main one and those that were timed with it."""
    return [name for name in cache.timed if name in cache.kept]


def verdict(run: RunRecord, table: Sequence[CacheRow], visibilities: Sequence[str]) -> list[str]:
    """Plain sentences: bytes, answers with and without the question known before compression, and speed."""
    rows, speed = {row.name: row for row in table}, run.cache.speed
    said = []
    if MAIN in rows and finite(rows[MAIN].share):
        share = f"{rows[MAIN].share * 100:.0f}"
        said.append(f"The cache holds {share} % of the bytes of a full 16-bit one, scales and slack counted.")
        far, whole = (sum(of.get(MAIN, {}).values()) for of in (run.cache.elsewhere_bytes, run.cache.cache_bytes))
        if far:
            said.append(f"Of these, {far / whole * 100:.0f} % lie outside of the memory that attention reads.")
    for visibility in visibilities if MAIN in rows and FULL in rows else ():
        mine, whole = rows[MAIN].by[visibility], rows[FULL].by[visibility]
        noise = "" if mine.verdict or len(mine.against) < 3 else " (within the noise)"
        said.append(
            f"Of the answers {WHEN.get(visibility, visibility)}, {fmt(mine.exact, '.0f', 100)} % are exact, against "
            f"{fmt(whole.exact, '.0f', 100)} % of a full cache{noise}."
        )
    if speed and (longest := speed.decode_ratio(MAIN, FULL)):
        attention = speed.attention_speedup.get(MAIN, {}).get(longest[0])
        noise = "" if speed.counts(MAIN, FULL, longest[0]) else " (within the noise)"
        said.append(
            f"Behind {longest[0]:,} tokens the model decodes {fmt(longest[1])}× as fast as with a full cache in the "
            f"same kind of step{noise}; its attention takes {fmt(attention)}× less time."
        )
    if run.cache.left_alone:
        kinds = ", ".join(f"{count} of kind {kind}" for kind, count in run.cache.left_alone.items())
        said.append(f"Layers that do not keep all positions were left alone: {kinds}.")
    return said


def _cards(run: RunRecord, table: Sequence[CacheRow], visibilities: Sequence[str]) -> list[tuple[str, str]]:
    rows, speed = {row.name: row for row in table}, run.cache.speed
    main, full = rows.get(MAIN), rows.get(FULL)
    if not main or not full:
        return []
    cards = []
    if main.share:
        sizes = f"{fmt(full.bytes, ',.1f', 1e-6)} → {fmt(main.bytes, ',.1f', 1e-6)} MB"
        cards.append((fmt(1 / main.share, unit="×"), f"smaller cache: {sizes}"))
    for v in visibilities:
        mine, whole = (fmt(row.by[v].exact, ".0f", 100, " %") for row in (main, full))
        cards.append((mine, f"exact answers, {v}; full cache {whole}"))
    if speed and (longest := speed.decode_ratio(MAIN, FULL)):
        noise = "" if speed.counts(MAIN, FULL, longest[0]) else ", within the noise"
        cards.append((fmt(longest[1], unit="×"), f"decode speed behind {longest[0]:,} tokens{noise}"))
    return cards


def _styles(names: Sequence[str], plain_ones: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Colours, marks and dashes; the plain ones pale."""
    return {
        name: {
            "color": MUTED if name in plain_ones else (ACCENT, SECOND, INK)[i % 3],
            "marker": _MARKS[i % len(_MARKS)],
            "ls": ":" if name in plain_ones else ("-", "--", "-.")[i // 3 % 3],
        }
        for i, name in enumerate(names)
    }


@drawn
def _pareto(cache: CacheMeasurements, table: Sequence[CacheRow], visibilities: Sequence[str], labels: _Labels) -> str:
    """Exact answers, KL and NLL against the share of bytes: a column per visibility."""
    rows = {row.name: row for row in table if row.share and finite(row.share)}
    curves = {text.replace("(budget={})", ""): points for text, points in cache.curves.items()}
    lines = {text: [rows[p[-1]] for p in points if p and p[-1] in rows] for text, points in curves.items()}
    on_lines = {row.name for line in lines.values() for row in line}
    lines |= {labels[name]: [row] for name, row in rows.items() if name not in on_lines and name != FULL}
    if not lines or FULL not in rows:
        return ""
    styles = _styles(list(lines), [text.replace("(budget={})", "") for text in cache.references])
    height, columns = 2.7 + 0.085 * len(lines), len(visibilities)
    figure, axes = grid(3 * columns, columns, height=height, extra=0, sharex=True, sharey="row")
    for (above, below, last), visibility in zip(axes.T, visibilities, strict=True):
        for name, line in lines.items():
            line = sorted(line, key=lambda row: row.share)
            shares = [row.share * 100 for row in line]
            cells = [row.by[visibility] for row in line]
            answers = [(c.exact, *c.interval) if c.interval else (None,) for c in cells]
            _points(above, name, styles, shares, [[None if v is None else 100 * v for v in of] for of in answers])
            for ax, metric in ((below, "kl"), (last, "nll")):
                ends = [(getattr(c, metric), getattr(c, f"{metric}_stderr")) for c in cells]
                _points(
                    ax, name, styles, shares, [(v, v - e, v + e) if finite(v, e) else (None,) for v, e in ends], 1e-4
                )
        full = rows[FULL].by[visibility]
        for ax, level in ((above, full.exact and 100 * full.exact), (last, full.nll)):
            if finite(level):
                ax.axhline(level, color=LINE, lw=1.2, zorder=0)
        above.set_title(visibility, fontsize=10, loc="left")
        last.set_xlabel("bytes, % of full" if columns > 3 else "bytes, % of the full cache's")
        for ax in (above, below, last):
            ax.grid(True, lw=0.6)
            ax.minorticks_off()
    logarithmic(axes[1:, 0])
    axes[0, 0].set_ylim(-4, 104)
    axes[0, 0].set_ylabel("exact answers, %")
    axes[1, 0].set_ylabel("KL to the full cache's\nanswers, nats per token")
    axes[2, 0].set_ylabel("NLL of the answers,\nnats per token")
    legend(figure, axes[:1, :1], [wrapped(name, 60) for name in lines], **_LEGEND)
    return svg(
        figure,
        "pareto",
        "Exact answers, divergence and likelihood of the answers against bytes of the cache, by visibility.",
    )


def _points(
    ax: Axes,
    name: str,
    styles: dict[str, dict[str, str]],
    x: Sequence[float],
    rows: Sequence[Sequence],
    floor: float = 0.0,
) -> None:
    """One line of values with their intervals, (value, low, high), without those that are not finite."""
    kept = [(at, *(max(v, floor) for v in of)) for at, of in zip(x, rows, strict=True) if finite(*of)]
    if kept:
        at, y, low, high = map(np.asarray, zip(*kept, strict=True))
        look = {"ms": 4.5, "lw": 1.4, "elinewidth": 0.7} | styles[name]
        ax.errorbar(at, y, yerr=np.maximum([y - low, high - y], 0), label=wrapped(name, 60), **look)


@drawn
def _by_token(
    answers: Sequence[CacheAnswers], labels: _Labels, visibilities: Sequence[str], names: Sequence[str]
) -> str:
    """KL against the position in the answer."""
    if not names or not visibilities:
        return ""
    figure, axes = grid(len(visibilities), len(visibilities), height=2.9, extra=0, sharey=True)
    styles = _styles(names)
    for ax, visibility in zip(axes.flat, visibilities, strict=True):
        for name in names:
            own = [one.kl_by_token for one in answers if one.variant == name and one.visibility == visibility]
            longest = max(map(len, own), default=0)
            means = [float(np.mean([kl[i] for kl in own if i < len(kl)])) for i in range(longest)]
            points = [(i + 1, max(mean, 1e-5)) for i, mean in enumerate(means) if finite(mean)]
            if points:
                ax.plot(*zip(*points, strict=True), ms=4, lw=1.4, label=wrapped(labels[name], 60), **styles[name])
        ax.set_title(visibility, fontsize=10, loc="left")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(True, axis="y", lw=0.6)
        ax.set_xlabel("token of the answer")
    logarithmic(axes[:, 0])
    axes[0, 0].set_ylabel("KL, nats")
    legend(figure, axes[:, :1], [wrapped(labels[name], 60) for name in names], **_LEGEND)
    return svg(figure, "by-token", "KL to the full cache's predictions by token of the answer, for each visibility.")


@drawn
def _maps(maps: dict[str, np.ndarray], key: str, bar: str, summary: str) -> str:
    """Heat maps of layers and heads, one per variant."""
    if not maps:
        return ""
    shown = dict(list(maps.items())[:4])
    heads = max(m.shape[1] for m in shown.values())
    figure, axes = grid(len(shown), 1, height=0.28 * heads + 0.75, extra=0.9)
    for ax, (title, values) in zip(axes[:, 0], shown.items(), strict=True):
        _cells(ax, values.T)
        ax.set_title(wrapped(title, 90), fontsize=9.5, loc="left")
        ax.set_ylabel("head")
    axes[-1, 0].set_xlabel(f"layer; {bar}")
    return svg(figure, key, summary)


def _cells(ax: Axes, values: np.ndarray) -> None:
    """A cell per share, whose opacity grows with the share; no cell if there is no number."""
    rows, columns = values.shape
    small = columns > 20
    for y, x in zip(*np.nonzero(np.isfinite(values)), strict=True):
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


def _array(rows: Sequence[Sequence[float]]) -> np.ndarray | None:
    """Numbers by layer and head; None if layers have different numbers of heads."""
    return np.asarray(rows, dtype=float) if rows and len({len(row) for row in rows}) == 1 and rows[0] else None


def _survival(cache: CacheMeasurements, labels: _Labels) -> str:
    maps = {}
    for name in _shown(cache):
        shares = [_array(one.share) for one in cache.survival.get(name, ())]
        if shares and all(one is not None and one.shape == shares[0].shape for one in shares):
            with np.errstate(all="ignore"):
                mean = np.mean(shares, 0)
            if not mean.min() >= 1:  # if all positions stay, there is nothing to draw
                maps[labels[name]] = mean
    bar = "per cent of the needle's tokens that stay, question unknown"
    return _maps(maps, "survival", bar, "Share of the needle that stays by layer and head.")


def _budgets(cache: CacheMeasurements, labels: _Labels) -> str:
    maps = {}
    for name in _shown(cache):
        length = max(cache.kept[name], default=None)
        kept, full = (_array(cache.kept.get(variant, {}).get(length, ())) for variant in (name, FULL))
        if kept is None or full is None or kept.shape != full.shape:
            continue
        with np.errstate(all="ignore"):
            share = kept / full
        if not np.ptp(share) <= 0.02:  # if all are the same, there is nothing to draw
            maps[labels[name]] = share
    summary = "Share of the positions that each head keeps, by layer."
    return _maps(maps, "budgets", "per cent of the positions that stay", summary)


@drawn
def _errors(cache: CacheMeasurements, labels: _Labels) -> str:
    names = [name for name in _shown(cache) if cache.errors.get(name)]
    if not names:
        return ""
    styles = _styles(names)
    figure, axes = grid(1, 1, height=2.8, extra=0)
    ax = axes[0, 0]
    for name in names:
        points = [(i, max(v, 1e-8)) for i, v in enumerate(cache.errors[name]) if finite(v)]
        if points:
            ax.plot(*zip(*points, strict=True), ms=3.5, lw=1.4, label=wrapped(labels[name], 60), **styles[name])
    logarithmic([ax])
    ax.set_xlabel("layer")
    ax.set_ylabel("relative error of the\nattention's output")
    ax.grid(True, axis="y", lw=0.6)
    legend(figure, axes, [wrapped(labels[name], 60) for name in names], **_LEGEND)
    return svg(figure, "errors", "Relative error of each attention layer's output for question and answer.")


@drawn
def _depth(cache: CacheMeasurements) -> str:
    """Exact answers of the main variant by the needle's depth and the context's length, question unknown; a panel per
    task."""
    depths = {(one.task, one.length): one.depths for one in cache.depths}
    own = {
        (one.task, one.length): one.exact
        for one in cache.answers
        if one.variant == MAIN and one.visibility == "agnostic"
    }
    lengths = sorted({length for _, length in own})
    edges = [0, 0.2, 0.4, 0.6, 0.8, 1.0001]
    grids = {}
    for task in dict.fromkeys(task for task, _ in own):
        means = np.full((len(lengths), 5), np.nan)
        for i, length in enumerate(lengths):
            pairs = list(zip(depths.get((task, length), ()), own.get((task, length), ()), strict=False))
            for j in range(5):
                inside = [e for d, e in pairs if d is not None and edges[j] <= d < edges[j + 1]]
                means[i, j] = np.mean(inside) if inside else np.nan
        if not np.isnan(means).all():
            grids[task] = means
    if not grids or sum(len(v) for v in own.values()) < 10:
        return ""
    figure, axes = grid(len(grids), len(grids), height=1.0 + 0.42 * len(lengths), extra=0)
    for ax, (task, means) in zip(axes.flat, grids.items(), strict=True):
        _cells(ax, means)
        ax.set_xticks(range(5), ["0–20", "20–40", "40–60", "60–80", "80–100"])
        ax.set_yticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        ax.set_title(wrapped(task, 40), fontsize=10, loc="left")
    figure.supxlabel("depth of the needle, % of the context", fontsize=10)
    figure.supylabel("tokens", fontsize=10)
    return svg(figure, "depth", "Per cent of exact answers by depth of the needle and length of the context.")


@drawn
def _speed(speed: CacheSpeed, labels: _Labels) -> str:
    """Tokens per second against context; and milliseconds of all attention layers."""
    styles = _styles(list(speed.tokens_per_s))
    figure, axes = grid(2, 2, height=3.9, extra=0)
    whole, alone = axes.flat
    for name, of in speed.tokens_per_s.items():
        points = [(c, *v) for c, v in sorted(of.items()) if len(v) == 3 and finite(*v)]
        if points:
            x, y, low, high = zip(*points, strict=True)
            spread = np.maximum([np.subtract(y, low), np.subtract(high, y)], 0)
            look = {"ms": 4.5, "lw": 1.4, "elinewidth": 0.7} | styles[name]
            whole.errorbar(x, y, yerr=spread, label=wrapped(labels[name], 60), **look)
    for name, of in speed.attention_s.items():
        points = [(c, v[0] * 1e3) for c, v in sorted(of.items()) if v and finite(v[0])]
        style = styles.get(name) or {"color": MUTED, "ls": ":", "marker": "x"}
        if points:
            alone.plot(*zip(*points, strict=True), ms=4.5, lw=1.4, label=wrapped(labels[name], 60), **style)
    whole.set_ylabel("decoded tokens per second")
    alone.set_ylabel("attention of all layers, ms a token")
    for ax in (whole, alone):
        ax.set_ylim(0, None)
        ax.set_xlabel("tokens before")
        ax.grid(True, lw=0.6)
        ax.minorticks_off()
        ax.xaxis.set_major_formatter("{x:,.0f}")
    legend(figure, axes[:, 1:], [wrapped(labels[name], 60) for name in speed.attention_s], **_LEGEND)
    return svg(figure, "speed", "Decode speed and time of attention against the length of the context, by variant.")
