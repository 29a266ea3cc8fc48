"""render: one run record -> one self-contained HTML page, and its outline for a notebook's cell."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval.record.compression import LayerRecord
from eval.record.metrics import METRICS, MetricTable, fmt, metric_table, number, percent
from eval.record.rows import RunRecord, typed
from reports.compare.decision import decisions, standing
from reports.compare.outcome import RunOutcome
from reports.compare.pareto import plane_models
from reports.compare.variants import variants
from reports.page import (
    allocation,
    answers,
    depth,
    evaluation,
    folds,
    inputs,
    kernels,
    kv,
    lossless,
    pruning,
    recovery,
    resources,
    search,
    serving,
)
from reports.page.verdict import timing_note, verdict
from reports.parts import bars, plots, table
from reports.parts.downloads import numbers, with_downloads
from reports.parts.figures import NOTEBOOK, Figures, framed
from reports.parts.files import Report, environment, with_contents, with_links, write_page
from reports.parts.labels import Point, scatter
from reports.parts.text import clean, measured_up_to

MAX_OTHERS = 2  # further models, besides baseline and compressed, with columns in the table of scores


@dataclass(frozen=True)
class Page:
    """A page of a record: its template and the data for it.

    cards: its main numbers, each with its meaning. figures: the figures that may stand for the page in a notebook's
    cell, the best one first.
    """

    template: str
    context: dict[str, Any]
    cards: list[tuple[str, str]]
    figures: list[str]

    @classmethod
    def of(cls, run: RunRecord, folder: Path | None = None) -> "Page":
        """The page of a record.

        Args:
            folder: of the record, in which the files lie that it names; None: it is by itself.
        """
        if run.bench:
            of_bench = kernels.context(run)
            return cls("kernels.html", of_bench, of_bench["cards"], [of_bench["speedups"], of_bench["roofline"]])
        found = variants([RunOutcome(run.run.key, run.run.notebook, "finished", record=run)])
        on = plane_models(found)
        measured = {"evaluated": evaluation.context(run), "resources": resources.context(run)}
        measured |= {"decisions": decisions(on, numbered=False), "answers": answers.context(run, folder)}
        largest = measured_up_to([run.model.parameters])
        if run.cache:
            of_cache = kv.context(run)
            of_cache["verdict"] += standing(on, found, "compressed") + largest
            return cls("cache.html", {**measured, **of_cache}, of_cache["cards"], [of_cache["pareto"]])
        context = {**measured, **_context(run)}
        context["verdict"] = [*standing(on, found, "compressed"), *context["verdict"], *largest]
        pruned, compared = context["pruned"].get("figures", ""), context["compared"].get("by_size", "")
        figures = [pruned, compared, context["speed"], context["errors"], context["size"]]
        return cls("report.html", context, context["cards"], figures)

    def html(self, run: RunRecord) -> str:
        return environment().get_template(self.template).render(r=run, **self.context)

    def cell(self) -> str:
        """The verdict, the main numbers and one figure, in the colours of the notebook around them."""
        figure = next(filter(None, self.figures), "")
        said = [*map(str, self.context.get("decisions", ())), *self.context["verdict"]]
        parts = {"verdict": said, "cards": self.cards, "figure": framed(figure) if figure else ""}
        return environment().get_template("cell.html").render(style=NOTEBOOK, **parts)


def render(record: table.Record, path: str | Path, links: Mapping[str, str] = {}) -> Report:
    """Write the page of a run record (`eval.run_record`), whole or not at all.

    Args:
        links: to the pages and files around it, {label: address relative to the page}.
    """
    made = Page.of(typed(record), Path(path).parent)
    return write_page(with_links(_whole(record, made), links), path, made.cell())


def page(record: table.Record) -> str:
    """The page as HTML, without links to other files."""
    return _whole(record, Page.of(typed(record)))


def _whole(record: table.Record, made: Page) -> str:
    run = typed(record)
    data = record if isinstance(record, Mapping) else None
    html = with_downloads(made.html(run), run.run.key, numbers(run), data, "the record of this run")
    return with_contents(html)


def _context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/report.html, beside what is measured of tasks and resources."""
    recipe = " → ".join(clean(step.method, 60) for step in run.recipe)
    return {
        "title": f"{recipe} on {clean(run.model.name, 100)}",
        "verdict": verdict(run),
        "cards": _cards(run),
        "table": scores_table(run),
        "compared": compared(run),
        "inputs": inputs.context(run.inputs),
        "folds": folds.context(run.folds),
        "pruned": pruning.context(run),
        "deep": depth.context(run),
        "allocated": allocation.context(run),
        "recovered": recovery.context(run),
        "lossless": lossless.context(run),
        "searched": search.context(run),
        "served": serving.context(run),
        "errors": plots.layer_errors(run.layers, recipe),
        "speed": bars.speed_bars(run.speed),
        "timing_note": next((timing_note(one.spread, one.load) for one in run.speed.values()), ""),
        "size": _size_figure(run),
        "kinds": _kinds(run.layers),
    }


def scores_table(run: RunRecord) -> MetricTable:
    """The scores of the first models of a run; a speed that is that of the step alone is called so."""
    own = metric_table(run.models[: 2 + MAX_OTHERS], run.scores, run.counts)
    if run.by_generate:
        return own
    labels = {prefix: label for prefix, label, *_ in METRICS}
    decode, step = labels["decode_tokens_per_s"], labels["step_tokens_per_s"]
    return own._replace(rows=[row._replace(label=step) if row.label == decode else row for row in own.rows])


def _noise(run: RunRecord, metric: str) -> str:
    return "" if run.counts(metric) else ", within the noise"


def _cards(run: RunRecord) -> list[tuple[str, str]]:
    """The main numbers of a run, each with its meaning."""
    cards = []
    if smaller := run.ratio("stored_bytes"):
        before, after = (fmt(run.score(name, "stored_bytes"), ",.1f", 1e-6) for name in ("baseline", "compressed"))
        cards.append((fmt(1 / smaller, unit="×"), f"smaller: {before} → {after} MB, against 16 bits"))
    for corpus in run.corpora:
        if ratio := run.ratio(f"perplexity_{corpus}"):
            before, after = (number(run.score(name, f"perplexity_{corpus}")) for name in ("baseline", "compressed"))
            noise = _noise(run, f"perplexity_{corpus}")
            cards.append((percent(ratio - 1), f"perplexity on {corpus}: {before} → {after}{noise}"))
    for phase in ("decode", "prefill"):
        if ratio := run.ratio(f"{phase}_tokens_per_s"):
            noise = _noise(run, f"{phase}_tokens_per_s")
            alone = phase == "decode" and not run.by_generate
            speed = "speed of the decoding step" if alone else f"{phase} speed"
            cards.append((fmt(ratio, unit="×"), f"{speed} against the strongest 16-bit baseline{noise}"))
    if recovered := evaluation.recovery_card(run):
        cards.append(recovered)
    return cards


def layer_figures(result: Any) -> Figures:
    """The error of every layer of a compression (`compress.apply`), for a notebook."""
    run = typed({"layers": list(result.layers)})
    drawn = plots.layer_errors(run.layers, ", ".join(clean(str(method), 60) for method in result.recipe))
    if not drawn:
        return Figures("No linear was stored in another form.", {})
    said = "Each linear's error on the calibration tokens, ‖WX − Y‖² / ‖WX‖², by block; lower is better."
    return Figures(said, {"Error of every layer": drawn})


def cost_figures(scores: Any) -> Figures:
    """What the models of a run take and lose (`eval.evaluate`), for a notebook: divergence against stored bytes for
    several models, bytes, and speed."""
    run = typed({"scores": scores.metrics, "speed": scores.speed})
    sizes = {name: size for name in run.models if (size := run.score(name, "stored_bytes"))}
    figures = {f"Divergence on {clean(corpus, 40)} against bytes": _divergence(run, corpus) for corpus in run.corpora}
    figures = {title: figure for title, figure in figures.items() if figure}
    if not figures and len(sizes) > 1:
        figures["Size"] = bars.size_bars({name: (size, 0.0) for name, size in sizes.items()})
    figures["Speed"] = bars.speed_bars(run.speed)
    said = "Nothing was timed."
    if run.speed:
        said = "Whiskers are the quartiles of the rounds in which the models took turns."
        if any(one.memory_limit_tokens_per_s for one in run.speed.values()):
            said += " A dashed line is the speed at which only reading the weights and the cache once would take time."
    return Figures(said, figures)


def _divergence(run: RunRecord, corpus: str) -> str:
    """The divergence of every model from the baseline against its bytes."""
    points = [
        Point(run.recipe_of(name) or name, size / 1e6, kl or 0.0, name == "compressed")
        for name in run.models
        if (size := run.score(name, "stored_bytes"))
        and ((kl := run.score(name, f"kl_{corpus}")) is not None or name == "baseline")
    ]
    return scatter(
        points,
        key="kl-bytes",
        x_label="stored megabytes",
        y_label="KL to the baseline, nats per token",
        summary="Divergence from the baseline against stored megabytes, one point per model.",
        unit="",
    )


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
    return bars.size_bars({"baseline": (linears, before - linears), "compressed": (stored, after - stored)})


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


def _kinds(layers: Sequence[LayerRecord]) -> list[KindRow]:
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
