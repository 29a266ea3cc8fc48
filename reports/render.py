"""render: one run record -> one self-contained HTML page."""

import math
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from reports import folds, kernels, kv, plots, pruning, table
from reports.verdict import verdict

METRICS = (
    # prefix of the metric, label, unit, which way is better
    ("perplexity_", "Perplexity", "", -1),
    ("kl_", "KL to the baseline", "nats per token", -1),
    ("top1_agreement_", "Same most likely token", "%", 1),
    ("acc_", "Accuracy", "%", 1),
    ("decode_tokens_per_s", "Decode", "tokens/s", 1),
    ("prefill_tokens_per_s", "Prefill", "tokens/s", 1),
    ("time_to_first_token_s", "Time to first token", "ms", -1),
    ("stored_bytes", "Stored", "MB", -1),
    ("resident_bytes", "In memory", "MB", -1),
    ("bits_per_weight", "Bits per weight, whole model", "", -1),
    ("peak_memory_bytes", "Peak memory", "MB", -1),
    ("cache_bytes", "KV cache", "MB", -1),
)
MAX_OTHERS = 2  # models beside baseline and compressed that the table of scores has columns for
_SCALE = {"%": 100, "ms": 1000, "MB": 1e-6}


@dataclass(frozen=True)
class Report:
    """A page that was written; shows a link to itself in Jupyter."""

    path: Path

    def _repr_html_(self) -> str:
        path = escape(str(self.path.resolve()))
        return f"<p>Report: <a href='file://{path}' target='_blank'><code>{path}</code></a></p>"


def render(record: dict[str, Any], path: str | Path) -> Report:
    """Write the page of a run record (`eval.record`), whole or not at all."""
    path, html = Path(path), page(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(html, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return Report(path)


def page(record: dict[str, Any]) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"mb": lambda b: f"{b / 1e6:,.1f}", "num": number, "percent": table.percent, "faster": faster}
    if record.get("bench"):
        return environment.get_template("kernels.html").render(r=record, **kernels.context(record))
    if record.get("cache"):
        return environment.get_template("cache.html").render(r=record, **kv.context(record))
    recipe = " → ".join(step["method"] for step in record["recipe"])
    return environment.get_template("report.html").render(
        r=record,
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
        for metric in _names(scores, prefix):
            detail = metric[len(prefix) :] if prefix.endswith("_") else ""
            scale = _SCALE.get(unit, 1)
            if not any(metric in scores[model] for model in models):
                continue
            cells = [_cell(scores[model], metric, scale) for model in models]
            rows.append({
                "label": label, "detail": detail, "unit": unit, "cells": cells,
                "change": _change(scores["baseline"].get(metric), scores["compressed"].get(metric), better),
            })  # fmt: skip
    return {"models": models, "rows": rows}


def compared(record: dict[str, Any]) -> dict[str, Any]:
    """All models of the run as rows, and the figure of them; {} where the table of scores says it all."""
    rows = table.rows(record)
    others = rows[2:]
    if len(others) <= MAX_OTHERS and not any(row["decode"] for row in others):
        return {}
    corpora = table.corpora([record])
    return {
        "rows": rows, "corpora": corpora,
        "by_size": _cost(rows, corpora[:1], "stored_bytes", 1e-6, "stored megabytes"),
        "by_speed": _cost(rows, corpora[:1], "decode", 1, "decoded tokens per second"),
    }  # fmt: skip


def _cost(rows: list[dict[str, Any]], corpora: list[str], against: str, scale: float, label: str) -> str:
    """The change of the perplexity of every model against another of its numbers."""
    points = [
        plots.Point(
            row["recipe"] if row["name"] == "compressed" else "16-bit baseline" if row["name"] == "baseline" else row["name"],
            row[against] * scale, 100 * (row["texts"][corpus]["change"] or 0.0), row["name"] == "compressed",
        )
        for corpus in corpora for row in rows if row[against] and row["texts"][corpus]["perplexity"]
    ]  # fmt: skip
    if len(points) < 3:
        return ""
    return plots.scatter(points, key=f"cost-{against}", x_label=label, y_label=f"change of the perplexity on {corpora[0]}",
                         summary=f"Change of the perplexity against {label}, one point per model.")  # fmt: skip


def faster(ratio: float) -> str:
    """Is a speed-up good or bad, or neither?"""
    return "" if 0.97 <= ratio <= 1.03 else "good" if ratio > 1 else "bad"


def number(value: float | None) -> str:
    """A number with three or four significant digits."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))) - (abs(value) >= 100))}f}"


def _names(scores: dict[str, dict[str, float]], prefix: str) -> list[str]:
    found = dict.fromkeys(m for one in scores.values() for m in one if not m.endswith("_stderr"))
    return [m for m in found if (m.startswith(prefix) if prefix.endswith("_") else m == prefix)]


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
        rows.append({
            "kind": kind, "count": len(members), "error": error, "rtn": rtn, "ratio": error / rtn if rtn else None,
            "bits": sum(m["bits_per_weight"] for m in members) / len(members),
        })  # fmt: skip
    return rows
