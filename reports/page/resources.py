"""The resources of a run, as its page shows them: the parts of a decoding step, efficiency, speed by batch and prompt,
predicted and real costs."""

import statistics
from collections.abc import Sequence
from typing import Any

from eval.record.metrics import fmt, number
from eval.record.noise import disturbed
from eval.record.rows import RunRecord
from eval.record.speed import Cost, CostRow, GridRow, Measure, SpeedGrid
from eval.record.steps import Explanation
from reports.page.verdict import timing_note
from reports.parts.intervals import Panel, agreement, spread
from reports.parts.text import listed

MAX_ROWS = 300  # of a table; the record has all
METRICS = {
    "memory_use": "memory use", "compute_use": "compute use", "latency": "latency", "throughput": "throughput",
    "energy": "energy", "compression_rate": "compression rate",
}  # fmt: skip
_SHOWN = {
    "bytes": (1e-6, "MB"),
    "s": (1e3, "ms"),
    "share": (100, "%"),
}  # unit of the record: scale and unit of the page
_Cells = dict[tuple[int, int], list[GridRow]]  # by tokens of the prompt and batch


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/resources.html from a record's speeds, `efficiency`, `speed_grid` and `cost`; {} if none
    exist."""
    made = {
        "step": _step(Explanation.of(run.speed)),
        "efficiency": _efficiency(run.efficiency),
        "grid": _grid(run.speed_grid),
        "cost": _cost(run.cost),
    }
    return made if any(made.values()) else {}


def _step(found: Explanation | None) -> dict[str, Any]:
    """The parts of a decoding step, of the compressed model beside the baseline's."""
    if found is None or "compressed" not in found.steps:
        return {}
    before, after = next(iter(found.steps.values())), found.steps["compressed"]
    return {
        "said": found.sentences("compressed"),
        "rows": [(name, before.parts[name], part) for name, part in after.parts.items() if name in before.parts],
        "before": before,
        "after": after,
        "read": f"{number(found.bandwidth / 1e9)} GB/s",
    }


def _efficiency(measured: dict[str, dict[str, Measure]]) -> dict[str, Any]:
    if not measured:
        return {}
    notes: dict[tuple[str, str], list[str]] = {}
    rows = []
    for model, of in measured.items():
        cells = []
        for metric, label in METRICS.items():
            one = of.get(metric) or Measure(None, "", "")
            scale, unit = _SHOWN.get(one.unit, (1, one.unit))
            cells.append((None if one.value is None else number(one.value * scale), unit))
            if one.note:
                notes.setdefault((label, one.note), []).append(model)
        rows.append((model, cells))
    return {
        "labels": list(METRICS.values()),
        "rows": rows,
        "notes": [
            f"{label.capitalize()}{'' if len(models) == len(measured) else f' ({listed(models)})'}: {note}"
            for (label, note), models in notes.items()
        ],
    }


def _grid(grid: SpeedGrid) -> dict[str, Any]:
    cells: _Cells = {}
    for row in grid.rows:
        cells.setdefault((row.prompt_tokens or 0, row.batch or 0), []).append(row)
    if not cells:
        return {}
    groups, count = [], 0
    for (prompt, batch), rows in sorted(cells.items()):
        shown = rows[: max(0, MAX_ROWS - count)]
        count += len(shown)
        if shown:
            groups.append((f"{prompt:,} tokens, batch {batch:,}", shown))
    executed: dict[str, dict[str, None]] = {}
    for row in grid.rows:
        if row.execution:
            executed.setdefault(row.execution, {})[row.model] = None
    return {
        "groups": groups,
        "left": len(grid.rows) - count,
        "figure": _grid_figure(cells),
        "executed": [f"{listed(list(models))}: {how}" for how, models in executed.items()],
        "settings": grid.settings,
        "counts": grid.counts,
        "timing_note": timing_note(grid.spread, grid.load),
        "disturbed": disturbed(grid.load),
    }


def _grid_figure(cells: _Cells) -> str:
    """Decode and prefill against the batch, a column per prompt length; against the prompt length, where one batch was
    timed."""
    prompts, batches = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    if len(cells) < 2:
        return ""
    by_batch = len(batches) > 1
    columns = prompts[:4] if by_batch else batches
    panels = []
    for phase in ("decode", "prefill"):
        for column in columns:
            lines: dict[str, list] = {}
            for (prompt, batch), rows in sorted(cells.items()):
                for row in rows if (prompt if by_batch else batch) == column else []:
                    value, ends = getattr(row, f"{phase}_tokens_per_s"), getattr(row, f"{phase}_quartiles")
                    if value is not None:
                        low, high = ends if len(ends) == 2 else (None, None)
                        lines.setdefault(row.model, []).append((batch if by_batch else prompt, value, low, high))
            title = f"{phase}, {f'{column:,} tokens of prompt' if by_batch else f'batch {column}'}"
            panels.append(Panel(title, "tokens/s", lines))
    x_label = "batch" if by_batch else "tokens of prompt"
    summary = f"Decode and prefill speed of every model in tokens per second against {x_label}, with quartiles."
    return spread(panels, columns=len(columns), key="grid", x_label=x_label, log_x=True, summary=summary)


def _cost(cost: Cost) -> dict[str, Any]:
    if not cost.rows:
        return {}
    ratios: dict[str, list[float]] = {}
    for row in cost.rows:
        if row.ratio is not None:
            ratios.setdefault(row.model, []).append(row.ratio)
    read, flops = cost.ceilings.read_bytes_per_s, cost.ceilings.flops_per_s
    return {
        "rows": cost.rows[:MAX_ROWS],
        "left": len(cost.rows[MAX_ROWS:]),
        "said": _cost_said(ratios),
        "agreement": _agreement(cost.rows),
        "lines": _cost_lines(cost.rows),
        "how": cost.ceilings.how,
        "read": "" if read is None else f"{number(read / 1e9)} GB/s",
        "flops": "" if flops is None else f"{number(flops / 1e12)} TFLOP/s",
    }


def _cost_said(ratios: dict[str, list[float]]) -> list[str]:
    """The distance of each model from its prediction."""
    shown = [name for name in ("baseline", "compressed") if name in ratios] or list(ratios)[:2]
    said = []
    for name in shown:
        middle, low, high = statistics.median(ratios[name]), min(ratios[name]), max(ratios[name])
        among = f", median ({fmt(low)}× to {fmt(high)}×)" if len(ratios[name]) > 1 else ""
        said.append(f"A step of {name} takes {fmt(middle)}× the predicted time{among}.")
    return said


def _agreement(rows: Sequence[CostRow]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.ratio is not None:
            points.setdefault(row.model, []).append((row.predicted_s * 1e3, row.measured_s * 1e3))
    labels = {"x_label": "predicted ms per step", "y_label": "measured ms per step"}
    summary = "Measured against predicted time of a step of decoding, one point per model, batch and context."
    return agreement(points, key="agreement", summary=summary, **labels) if points else ""


def _cost_lines(rows: Sequence[CostRow]) -> str:
    """Predicted times against the context, a panel per batch, with what was measured as open marks; "" for one
    context."""
    rows = [row for row in rows if row.batch and row.context and row.predicted_s]
    batches = sorted({row.batch for row in rows})[:4]
    if len({row.context for row in rows}) < 2:
        return ""
    panels = []
    for batch in batches:
        lines, marks = {}, {}
        for row in (row for row in rows if row.batch == batch):
            lines.setdefault(row.model, []).append((row.context, row.predicted_s * 1e3, None, None))
            if row.measured_s:
                marks.setdefault(row.model, []).append((row.context, row.measured_s * 1e3))
        panels.append(Panel(f"batch {batch}", "ms per step", lines, marks))
    summary = "Predicted time of a step of decoding of every model against the context, and what was measured."
    columns = min(2, len(panels))
    return spread(panels, columns=columns, key="costs", x_label="tokens of context", log_x=True, summary=summary)
