"""How a model uses its depth: what every block adds, what is lost without it, and what could be read off behind it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from eval.record.compression import DepthRow
from eval.record.metrics import fmt
from eval.record.rows import RunRecord, typed
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, BlockLine

_ADDED = {"attention": "attention", "mlp": "MLPs", "later": "largest change of\na later block without it"}
_COLUMNS = ("attention", "mlp", "turned", "later", "output", "lens")
_LOST = {"output": "predictions without it", "lens": "predictions from the\nstream behind it"}


def figures(rows: Iterable[DepthRow]) -> Figures:
    """The figures of `compress.pruning.depth.Depth.rows` (or of a record's), for a notebook."""
    shown = context(typed({"depth": list(rows)}))
    if not shown:
        return Figures("The work of the blocks was not measured.", {})
    titles = {"added": "What every block adds to the residual stream", "lost": "What the predictions owe to it"}
    return Figures(" ".join(shown["said"]), {title: shown[key] for key, title in titles.items()})


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/depth.html from a record; {} if the work of the blocks was not measured."""
    rows = sorted((row for row in run.depth if row.block is not None), key=lambda row: row.block or 0)
    if not rows:
        return {}
    label, summary = "relative length", "What attention, MLPs and blocks add to the stream, by block, log scale."
    lost = "KL divergence of the predictions without each block, and of those read off behind it, by block, log scale."
    return {
        "said": _said(rows),
        "added": plots.by_depth(_panels(rows, _ADDED), key="added", label=label, summary=summary),
        "lost": plots.by_depth(_panels(rows, _LOST), key="lost", label="KL, nats per token", summary=lost),
        "rows": [(row.block, *(fmt(getattr(row, name)) for name in _COLUMNS)) for row in rows],
    }


def _panels(rows: Sequence[DepthRow], titles: dict[str, str]) -> dict[str, list[BlockLine]]:
    return {
        title: [BlockLine("", ACCENT, [(row.block, getattr(row, name)) for row in rows])]
        for name, title in titles.items()
    }


def _said(rows: Sequence[DepthRow]) -> list[str]:
    """The findings in sentences."""
    half = len(rows) // 2
    said = []
    for name, what in (("attention", "attention adds"), ("mlp", "the MLPs add")):
        first, second = (_median(part, name) for part in (rows[:half], rows[half:]))
        if first and second:
            said.append(
                f"In the second half of the blocks {what} {fmt(second, '.2g')} of the stream's length, in the first "
                f"half {fmt(first, '.2g')} (medians)."
            )
    first, second = (_median(part, "output") for part in (rows[:half], rows[half:]))
    if first and second:
        said.append(
            f"Without a block of the second half the predictions lie {fmt(second, '.2g')} nats per token from the "
            f"whole model's, without one of the first half {fmt(first, '.2g')}."
        )
    agreement = rank_correlation([row.turned for row in rows], [row.output for row in rows])
    if agreement is not None:
        said.append(
            "The rank correlation of 1 − cosine, the score of layer_drop, with what the predictions lose without a "
            f"block is {fmt(agreement, '.2f')} (1: the same order of the blocks)."
        )
    reads = next((row.block for row in rows if (row.lens_agreement or 0) > 0.5), None)
    if reads is not None:
        said.append(f"Behind block {reads} of {len(rows)}, half of the model's likeliest tokens can be read off.")
    return said


def _median(rows: Sequence[DepthRow], name: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, name)) is not None and math.isfinite(value)]
    return statistics.median(values) if values else None


def rank_correlation(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    """Spearman's correlation of two lists of numbers; None with fewer than three pairs of finite ones, or if all of a
    list are equal."""
    from scipy.stats import spearmanr  # takes a second to import, which other pages need not wait for

    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None and math.isfinite(x + y)]
    if len(pairs) < 3 or any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)
