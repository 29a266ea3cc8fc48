"""What the page of a run shows of its resources: efficiency, speed by batch and prompt, predicted and measured
costs."""

import statistics
from typing import Any

from reports.parts.intervals import Panel, agreement, spread
from reports.parts.metrics import number
from reports.parts.text import listed

MAX_ROWS = 300  # of a table; the record has all
METRICS = (
    # metric, label
    ("memory_use", "memory use"), ("compute_use", "compute use"), ("latency", "latency"), ("throughput", "throughput"),
    ("energy", "energy"), ("compression_rate", "compression rate"),
)  # fmt: skip
_SHOWN = {
    "bytes": (1e-6, "MB"),
    "s": (1e3, "ms"),
    "share": (100, "%"),
}  # unit of the record: scale and unit of the page


def context(record: dict[str, Any]) -> dict[str, Any]:
    """What templates/resources.html shows of a record's `efficiency`, `speed_grid` and `cost`; {} where it has none."""
    made = {
        "efficiency": _efficiency(record.get("efficiency") or {}),
        "grid": _grid(record.get("speed_grid") or {}),
        "cost": _cost(record.get("cost") or {}),
    }
    return made if any(made.values()) else {}


def _efficiency(found: dict[str, Any]) -> dict[str, Any]:
    if not found:
        return {}
    notes: dict[tuple[str, str], list[str]] = {}
    rows = []
    for model, of in found.items():
        cells = []
        for metric, label in METRICS:
            one = of.get(metric) or {}
            scale, unit = _SHOWN.get(one.get("unit", ""), (1, one.get("unit", "")))
            value = one.get("value")
            cells.append({"value": None if value is None else number(value * scale), "unit": unit})
            if one.get("note"):
                notes.setdefault((label, one["note"]), []).append(model)
        rows.append({"model": model, "main": model == "compressed", "cells": cells})
    return {
        "labels": [label for _, label in METRICS],
        "rows": rows,
        "notes": [f"{label.capitalize()}{_of(models, len(found))}: {note}" for (label, note), models in notes.items()],
    }


def _of(models: list[str], count: int) -> str:
    return "" if len(models) == count else f" ({', '.join(models)})"


def _grid(found: dict[str, Any]) -> dict[str, Any]:
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in found.get("rows") or []:
        cells.setdefault((row["prompt_tokens"], row["batch"]), []).append(row)
    if not cells and not found.get("load"):
        return {}
    total = sum(map(len, cells.values()))
    groups, count = [], 0
    for (prompt, batch), rows in sorted(cells.items()):
        shown = [_timed(row) for row in rows[: max(0, MAX_ROWS - count)]]
        count += len(shown)
        if shown:
            groups.append(
                {"name": f"{prompt:,} tokens, {'batch 1' if batch == 1 else f'batch {batch:,}'}", "rows": shown}
            )
    executed: dict[str, dict[str, None]] = {}
    for row in found.get("rows") or []:
        if row.get("execution"):
            executed.setdefault(row["execution"], {})[row["model"]] = None
    settings = found.get("settings") or {}
    load = [
        row | {"share": row.get("offered_share"), "main": row["model"] == "compressed"}
        for row in found.get("load") or []
    ]
    return {
        "groups": groups,
        "left": total - count,
        "figure": _grid_figure(cells),
        "load": load,
        "executed": [f"{listed(list(models))}: {how}" for how, models in executed.items()],
        "rounds": settings.get("rounds"),
        "new_tokens": settings.get("new_tokens"),
    }


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """One model in one cell of the grid, as text."""
    made = {"model": row["model"], "main": row["model"] == "compressed"}
    for what in ("decode", "prefill"):
        quartiles, ratio = row.get(f"{what}_quartiles"), row.get(f"{what}_ratio")
        made[what] = {
            "value": number(row.get(f"{what}_tokens_per_s")),
            "spread": f"{number(quartiles[0])}–{number(quartiles[1])}" if quartiles else "",
            "ratio": None if row["model"] == "baseline" else ratio,
        }
    first = row.get("time_to_first_token_s")
    return made | {"first": "–" if first is None else number(first * 1e3)}


def _grid_figure(cells: dict[tuple[int, int], list[dict[str, Any]]]) -> str:
    """Decode and prefill against the batch, a column per prompt length; against the prompt length, where one batch was
    timed."""
    prompts, batches = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    if len(cells) < 2:
        return ""
    by_batch = len(batches) > 1
    columns = prompts[:4] if by_batch else batches
    panels = []
    for what in ("decode", "prefill"):
        for column in columns:
            lines: dict[str, list] = {}
            for (prompt, batch), rows in sorted(cells.items()):
                for row in rows if (prompt if by_batch else batch) == column else []:
                    value = row.get(f"{what}_tokens_per_s")
                    if value is not None:
                        ends = row.get(f"{what}_quartiles") or (None, None)
                        lines.setdefault(row["model"], []).append((batch if by_batch else prompt, value, *ends))
            title = f"{what}, {f'{column:,} tokens of prompt' if by_batch else f'batch {column}'}"
            panels.append(Panel(title, "tokens/s", lines))
    x_label = "batch" if by_batch else "tokens of prompt"
    summary = f"Decode and prefill speed of every model in tokens per second against {x_label}, with quartiles."
    return spread(panels, columns=len(columns), key="grid", x_label=x_label, log_x=True, summary=summary)


def _cost(found: dict[str, Any]) -> dict[str, Any]:
    rows = found.get("rows") or []
    if not rows:
        return {}
    made = [
        {
            "model": row["model"],
            "main": row["model"] == "compressed",
            "batch": row["batch"],
            "context": row["context"],
            "weights": number(row["weight_bytes"] / 1e6),
            "cache": number(row["cache_bytes"] / 1e6),
            "flops": number(row["flops"] / 1e9),
            "predicted": number(row["predicted_s"] * 1e3),
            "bound": row.get("bound") or "",
            "measured": None if row.get("measured_s") is None else number(row["measured_s"] * 1e3),
            "ratio": row["measured_s"] / row["predicted_s"] if row.get("measured_s") and row["predicted_s"] else None,
        }
        for row in rows
    ]
    ratios: dict[str, list[float]] = {}
    for one in made:
        if one["ratio"] is not None:
            ratios.setdefault(one["model"], []).append(one["ratio"])
    ceilings = found.get("ceilings") or {}
    return {
        "rows": made[:MAX_ROWS],
        "left": len(made[MAX_ROWS:]),
        "said": _cost_said(ratios),
        "agreement": _agreement(rows),
        "lines": _cost_lines(rows),
        "how": ceilings.get("how") or "",
        "read": _rate(ceilings.get("read_bytes_per_s"), 1e9, "GB/s"),
        "flops": _rate(ceilings.get("flops_per_s"), 1e12, "TFLOP/s"),
    }


def _rate(value: float | None, scale: float, unit: str) -> str:
    return "" if value is None else f"{number(value / scale)} {unit}"


def _cost_said(ratios: dict[str, list[float]]) -> list[str]:
    """How far each model is from its prediction: what is left to be won."""
    shown = [name for name in ("baseline", "compressed") if name in ratios] or list(ratios)[:2]
    said = []
    for name in shown:
        middle, low, high = statistics.median(ratios[name]), min(ratios[name]), max(ratios[name])
        among = f" ({low:.2f}× to {high:.2f}×)" if len(ratios[name]) > 1 else ""
        said.append(f"A step of {name} takes {middle:.2f}× the predicted time{', median' if among else ''}{among}.")
    return said


def _agreement(rows: list[dict[str, Any]]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("measured_s") and row["predicted_s"]:
            points.setdefault(row["model"], []).append((row["predicted_s"] * 1e3, row["measured_s"] * 1e3))
    if not points:
        return ""
    summary = "Measured against predicted time of a step of decoding, one point per model, batch and context."
    return agreement(
        points, key="agreement", x_label="predicted ms per step", y_label="measured ms per step", summary=summary
    )


def _cost_lines(rows: list[dict[str, Any]]) -> str:
    """Predicted times against the context, a panel per batch, with what was measured as open marks; "" for one
    context."""
    batches = sorted({row["batch"] for row in rows})[:4]
    if len({row["context"] for row in rows}) < 2:
        return ""
    panels = []
    for batch in batches:
        lines, marks = {}, {}
        for row in (row for row in rows if row["batch"] == batch):
            lines.setdefault(row["model"], []).append((row["context"], row["predicted_s"] * 1e3, None, None))
            if row.get("measured_s"):
                marks.setdefault(row["model"], []).append((row["context"], row["measured_s"] * 1e3))
        panels.append(Panel(f"batch {batch}", "ms per step", lines, marks))
    summary = "Predicted time of a step of decoding of every model against the context, and what was measured."
    columns = min(2, len(panels))
    return spread(panels, columns=columns, key="costs", x_label="tokens of context", log_x=True, summary=summary)
