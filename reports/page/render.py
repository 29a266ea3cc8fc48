"""render: one run record -> one self-contained HTML page."""

from pathlib import Path
from typing import Any

from reports.page import evaluation, folds, kernels, kv, pruning, resources
from reports.page.verdict import verdict
from reports.parts import plots, table
from reports.parts.files import Report, environment, write_page
from reports.parts.metrics import METRICS, SCALE, number, with_prefix

MAX_OTHERS = 2  # models beside baseline and compressed that the table of scores has columns for


def render(record: dict[str, Any], path: str | Path) -> Report:
    """Write the page of a run record (`eval.run_record`), whole or not at all."""
    return write_page(page(record), path)


def page(record: dict[str, Any]) -> str:
    """The page as HTML."""
    templates = environment()
    if record.get("bench"):
        return templates.get_template("kernels.html").render(r=record, **kernels.context(record))
    measured = {"evaluated": evaluation.context(record), "resources": resources.context(record)}
    if record.get("cache"):
        return templates.get_template("cache.html").render(r=record, **measured, **kv.context(record))
    recipe = " → ".join(step["method"] for step in record["recipe"])
    return templates.get_template("report.html").render(
        r=record,
        **measured,
        title=f"{recipe} on {record['model']['name']}",
        recipe=table.recipe_text(record["recipe"]),
        verdict=verdict(record),
        table=metric_table(record),
        compared=compared(record),
        folds=folds.context(record.get("folds", [])),
        pruned=pruning.context(record["layers"], record.get("drops", []), record.get("strengths", {}), _ratios(record)),
        errors=plots.layer_errors(record["layers"], recipe) if record["layers"] else "",
        speed=plots.speed_bars(record["speed"]) if record.get("speed") else "",
        size=plots.size_bars(_sizes(record)) if "stored_bytes" in record["scores"]["compressed"] else "",
        kinds=_by_kind(record["layers"]),
    )


def metric_table(record: dict[str, Any]) -> dict[str, Any]:
    """Rows of scores: label, unit, a cell per model, and what changed from baseline to compressed."""
    scores = record["scores"]
    others = [name for name in scores if name not in ("baseline", "compressed")]
    models = ["baseline", "compressed", *others[:MAX_OTHERS]]
    rows = []
    for prefix, label, unit, better in METRICS:
        for metric in with_prefix((m for one in scores.values() for m in one), prefix):
            detail = metric[len(prefix) :] if prefix.endswith("_") else ""
            scale = SCALE.get(unit, 1)
            if not any(metric in scores[model] for model in models):
                continue
            cells = [_cell(scores[model], metric, scale) for model in models]
            rows.append(
                {
                    "label": label,
                    "detail": detail,
                    "unit": unit,
                    "cells": cells,
                    "change": _change(scores["baseline"].get(metric), scores["compressed"].get(metric), better),
                }
            )
    return {"models": models, "rows": rows}


def compared(record: dict[str, Any]) -> dict[str, Any]:
    """All models of the run as rows, and the figure of them; {} where the table of scores says it all."""
    rows = table.rows(record)
    others = rows[2:]
    if len(others) <= MAX_OTHERS and not any(row["decode"] for row in others):
        return {}
    corpora = table.corpora([record])
    return {
        "rows": rows,
        "corpora": corpora,
        "by_size": _cost(rows, corpora[:1], "stored_bytes", 1e-6, "stored megabytes"),
        "by_speed": _cost(rows, corpora[:1], "decode", 1, "decoded tokens per second"),
    }


def _cost(rows: list[dict[str, Any]], corpora: list[str], against: str, scale: float, label: str) -> str:
    """The change of the perplexity of every model against another of its numbers."""
    points = [
        plots.Point(
            row["recipe"]
            if row["name"] == "compressed"
            else "16-bit baseline"
            if row["name"] == "baseline"
            else row["name"],
            row[against] * scale,
            100 * (row["texts"][corpus]["change"] or 0.0),
            row["name"] == "compressed",
        )
        for corpus in corpora
        for row in rows
        if row[against] and row["texts"][corpus]["perplexity"]
    ]
    if len(points) < 3:
        return ""
    return plots.scatter(
        points,
        key=f"cost-{against}",
        x_label=label,
        y_label=f"change of the perplexity on {corpora[0]}",
        summary=f"Change of the perplexity against {label}, one point per model.",
    )


def _cell(scores: dict[str, float], metric: str, scale: float) -> dict[str, str]:
    if metric not in scores:
        return {"value": "–", "stderr": ""}
    stderr = scores.get(f"{metric}_stderr")
    return {"value": number(scores[metric] * scale), "stderr": "" if stderr is None else f"± {stderr * scale:.2g}"}


def _change(before: float | None, after: float | None, better: int) -> dict[str, str]:
    if not before or after is None:
        return {"text": "", "kind": ""}
    ratio = after / before
    text = f"{ratio:.2f}×" if ratio >= 2 or ratio <= 0.5 else f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")
    kind = "" if abs(ratio - 1) < 0.005 else "good" if (ratio > 1) == (better > 0) else "bad"
    return {"text": text, "kind": kind}


def _ratios(record: dict[str, Any]) -> dict[str, float]:
    """Speeds of "compressed" over those of the baseline, where both were measured."""
    base, small = record["scores"]["baseline"], record["scores"]["compressed"]
    names = {what: f"{what}_tokens_per_s" for what in ("decode", "prefill")}
    return {what: small[name] / base[name] for what, name in names.items() if base.get(name) and name in small}


def _sizes(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in record["layers"])
    stored = sum(layer["shape"][0] * layer["shape"][1] * layer["bits_per_weight"] / 8 for layer in record["layers"])
    scores = record["scores"]
    before, after = scores["baseline"]["stored_bytes"], scores["compressed"]["stored_bytes"]
    linears = before * weights / record["model"]["parameters"]
    return {
        "baseline": {"linears": linears, "rest": before - linears},
        "compressed": {"linears": stored, "rest": after - stored},
    }


def _by_kind(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layer figure as a table: mean errors by kind of linear."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(plots.place_of(layer["name"], i)[1], []).append(layer)
    rows = []
    for kind, members in kinds.items():
        peers = [m["rtn_error"] for m in members if m.get("rtn_error") is not None]
        error = sum(m["error"] for m in members) / len(members)
        rtn = sum(peers) / len(peers) if peers else None
        rows.append(
            {
                "kind": kind,
                "count": len(members),
                "error": error,
                "rtn": rtn,
                "ratio": error / rtn if rtn else None,
                "bits": sum(m["bits_per_weight"] for m in members) / len(members),
            }
        )
    return rows
