"""render: one run record -> one self-contained HTML page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.record.rows import LayerRow, RunRecord, typed
from reports.page import allocation, evaluation, folds, inputs, kernels, kv, pruning, resources
from reports.page.verdict import verdict
from reports.parts import plots, table
from reports.parts.files import Report, environment, write_page
from reports.parts.labels import Point, scatter
from reports.parts.metrics import METRICS, SCALE, with_error, with_prefix
from reports.parts.text import clean

MAX_OTHERS = 2  # further models, besides baseline and compressed, with columns in the table of scores


def render(record: table.Record, path: str | Path) -> Report:
    """Write the page of a run record (`eval.run_record`), whole or not at all."""
    return write_page(page(record), path)


def page(record: table.Record) -> str:
    """The page as HTML."""
    run, templates = typed(record), environment()
    if run.bench:
        return templates.get_template("kernels.html").render(r=run, **kernels.context(run))
    measured = {"evaluated": evaluation.context(run), "resources": resources.context(run)}
    if run.cache:
        return templates.get_template("cache.html").render(r=run, **measured, **kv.context(run))
    recipe = " → ".join(clean(step.method, 60) for step in run.recipe)
    return templates.get_template("report.html").render(
        r=run,
        **measured,
        title=f"{recipe} on {clean(run.model.name, 100)}",
        verdict=verdict(run),
        table=metric_table(run),
        compared=compared(run),
        inputs=inputs.context(run.inputs),
        folds=folds.context(run.folds),
        pruned=pruning.context(run),
        allocated=allocation.context(run),
        errors=plots.layer_errors(run.layers, recipe),
        speed=plots.speed_bars(run.speed),
        size=_size_figure(run),
        kinds=_kinds(run.layers),
    )


class Change(NamedTuple):
    """The change from baseline to compressed, and whether it is good or bad."""

    text: str = ""
    kind: str = ""


class MetricRow(NamedTuple):
    """A metric. detail: its corpus or task; cells: a number and its standard error for every model."""

    label: str
    detail: str
    unit: str
    cells: list[tuple[str, str]]
    change: Change


class MetricTable(NamedTuple):
    models: list[str]
    rows: list[MetricRow]


def metric_table(run: RunRecord) -> MetricTable:
    """The scores: a row per metric, a column per model."""
    models = run.models[: 2 + MAX_OTHERS]
    rows = []
    for prefix, label, unit, better in METRICS:
        for metric in with_prefix((m for model in models for m in run.scores[model]), prefix):
            scale = SCALE.get(unit, 1)
            scores = [(run.score(model, metric), run.score(model, f"{metric}_stderr")) for model in models]
            cells = [_cell(*both, scale) for both in scores]
            detail = metric[len(prefix) :] if prefix.endswith("_") else ""
            rows.append(MetricRow(label, detail, unit, cells, _change(run.ratio(metric), better)))
    return MetricTable(models, rows)


def _cell(value: float | None, stderr: float | None, scale: float) -> tuple[str, str]:
    return with_error(value if value is None else value * scale, stderr if stderr is None else stderr * scale)


def _change(ratio: float | None, better: int) -> Change:
    if ratio is None or not plots.finite(ratio):
        return Change()
    text = f"{ratio:.2f}×" if ratio >= 2 or ratio <= 0.5 else f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")
    return Change(text, "" if abs(ratio - 1) < 0.005 else "good" if (ratio > 1) == (better > 0) else "bad")


def compared(run: RunRecord) -> dict[str, Any]:
    """All models of the run as rows, with their figures; {} if the table of scores shows all of them."""
    rows = table.rows(run)
    others = rows[2:]
    if len(others) <= MAX_OTHERS and not any(row.decode for row in others):
        return {}
    return {
        "rows": rows,
        "corpora": run.corpora,
        "by_size": _against(rows, run.corpora, "stored_bytes", 1e-6, "stored megabytes"),
        "by_speed": _against(rows, run.corpora, "decode", 1, "decoded tokens per second"),
    }


def _against(rows: Iterable[table.ModelRow], corpora: list[str], number: str, scale: float, label: str) -> str:
    """The change of the perplexity of every model on the first text against another of its numbers."""
    points = [
        Point(
            row.label if row.name in ("baseline", "compressed") else row.name,
            getattr(row, number) * scale,
            100 * (row.texts[corpus].change or 0.0),
            row.main,
        )
        for corpus in corpora[:1]
        for row in rows
        if getattr(row, number) and row.texts[corpus].perplexity
    ]
    return scatter(
        points,
        key=f"cost-{number}",
        x_label=label,
        y_label=f"change of the perplexity on {clean(corpora[0], 40)}" if corpora else "",
        summary=f"Change of the perplexity against {label}, one point per model.",
    )


def _size_figure(run: RunRecord) -> str:
    """Stored bytes of both models, split into the linears that were compressed and the rest."""
    before, after = (run.score(model, "stored_bytes") for model in ("baseline", "compressed"))
    if not plots.finite(before, after):
        return ""
    stored = sum(layer.weights * (layer.bits_per_weight or 0) / 8 for layer in run.layers)
    linears = before * sum(layer.weights for layer in run.layers) / (run.model.parameters or 1)
    return plots.size_bars({"baseline": (linears, before - linears), "compressed": (stored, after - stored)})


class KindRow(NamedTuple):
    """Mean errors of the linears of one kind."""

    kind: str
    count: int
    bits: float | None
    error: float | None
    rtn: float | None

    @property
    def ratio(self) -> float | None:
        return self.error / self.rtn if self.rtn and self.error is not None else None


def _kinds(layers: Sequence[LayerRow]) -> list[KindRow]:
    """The figure of layers as a table."""

    def mean(values: Iterable[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return sum(there) / len(there) if there else None

    return [
        KindRow(
            kind,
            len(of),
            *(mean(getattr(one, key) for _, one in of) for key in ("bits_per_weight", "error", "rtn_error")),
        )
        for kind, of in plots.by_kind(layers).items()
    ]
