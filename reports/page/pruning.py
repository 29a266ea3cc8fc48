"""Parts and weights that were removed: zeros by layer, their cost, the importance of layers, accuracy by strength."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.record.compression import DropRecord, LayerRecord
from eval.record.rows import RunRecord, Strengths, typed
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, SECOND, BlockLine
from reports.parts.strengths import strength_tables

SPARSE = 0.005  # a weight with a smaller share of zeros is not called sparse: rounding makes some zeros, too
_KINDS = {"attention": "attention", "mlp": "MLPs", "block": "blocks"}
_NARROWER = {
    "units": ("units", "MLP"),
    "heads": ("key-value heads", "attention"),
    "experts": ("experts", "mixture"),
}


def figures(layers: Iterable[Any], drops: Iterable[Any]) -> Figures:
    """The figures of `Result.layers` and `Result.drops` (or of a record's), for a notebook."""
    shown = context(typed({"layers": list(layers), "drops": list(drops)}))
    if not shown:
        return Figures("Nothing was set to 0 or dropped.", {})
    titles = {"importance": "Importance of each layer", "sparsity": "Zeros by layer"}
    titles["distortion"] = "Distortion curves"
    return Figures(" ".join(shown["said"]), {title: shown[key] for key, title in titles.items()})


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/pruning.html from a record; {} if nothing was pruned, dropped or scored at several
    strengths."""
    layers, drops = run.layers, run.drops
    whole = [drop for drop in drops if drop.left is None]
    sparse = [layer for layer in layers if (layer.sparsity or 0) >= SPARSE] if _pruned(layers) else []
    if not (sparse or drops or run.strengths.lines):
        return {}
    curved = [layer for layer in layers if layer.distortion]
    return {
        "said": [*_said_drops(whole), *_said_narrower(drops), *_said_zeros(layers, sparse), *_said_speed(run, sparse)],
        "importance": _importance(whole) if whole else "",
        "measure": _measure(whole),
        "sparsity": _sparsity(layers) if sparse and not _even(layers) else "",
        "distortion": _distortion(curved) if curved else "",
        "drops": sorted(whole, key=lambda drop: drop.importance or 0.0),
        "strengths": strength_tables(run.strengths),
        "figures": against_strength(run.strengths),
    }


def _pruned(layers: Sequence[LayerRecord]) -> bool:
    """Were weights set to 0 on purpose? A 3-bit grid also rounds some to 0, but is not a format of sparse weights."""
    return any(layer.distortion or layer.format in ("bitmap", "sparse24", "dense") for layer in layers)


def _even(layers: Sequence[LayerRecord]) -> bool:
    """Has every linear lost the same share, so that there is nothing to draw?"""
    shares = [layer.sparsity or 0.0 for layer in layers]
    return max(shares) - min(shares) <= 0.01


def _said_drops(drops: Sequence[DropRecord]) -> list[str]:
    said = []
    for kind, name in _KINDS.items():
        own = [drop for drop in drops if drop.kind == kind]
        gone = sorted((drop for drop in own if drop.order), key=lambda drop: drop.block or 0)
        if gone:
            blocks, size = ", ".join(str(drop.block) for drop in gone), sum(drop.parameters or 0 for drop in gone)
            said.append(
                f"Dropped: the {name} {'of block ' if kind != 'block' else ''}{blocks} ({len(gone)} of {len(own)}; "
                f"{size / 1e6:.1f} M parameters)."
            )
    return said


def _said_narrower(drops: Sequence[DropRecord]) -> list[str]:
    """What was removed of the width of MLPs and of attention."""
    said = []
    for kind, of in dict.fromkeys((drop.kind, drop.of) for drop in drops if drop.left is not None):
        unit, part = _NARROWER[kind]
        if own := [drop for drop in drops if (drop.kind, drop.of) == (kind, of)]:
            size, lost = sum(drop.parameters or 0 for drop in own), [100 * (drop.importance or 0.0) for drop in own]
            said.append(
                f"Narrower: {own[0].left:,} of {own[0].of:,} {unit} are left in the {part} of each of {len(own)} "
                f"blocks; {size / 1e6:.1f} M parameters were removed. By the calibration text, those that are gone had "
                f"{min(lost):.1f} to {max(lost):.1f} % of the importance of all {unit} of their block."
            )
    return said


def _said_zeros(layers: Sequence[LayerRecord], sparse: Sequence[LayerRecord]) -> list[str]:
    weights = sum(layer.weights for layer in layers)
    if not sparse or not weights:
        return []
    zeros = sum((layer.sparsity or 0) * layer.weights for layer in layers) / weights
    shares = [(layer.sparsity or 0) * 100 for layer in layers]
    each = "as many of each" if _even(layers) else f"between {min(shares):.0f} and {max(shares):.0f} % of each"
    bits = sum((layer.bits_per_weight or 0) * layer.weights for layer in layers) / weights
    return [
        f"{zeros * 100:.1f} % of the weights of {len(layers)} linears are 0, {each}. They are stored at {bits:.2f} "
        "bits per weight, which counts the zeros and the positions of the others."
    ]


def _said_speed(run: RunRecord, sparse: Sequence[LayerRecord]) -> list[str]:
    """A text on whether zeros save time, which does not follow from the number of unnecessary operations."""
    speeds = {"decodes": "decode_tokens_per_s", "reads prompts": "prefill_tokens_per_s"}
    ratios = {does: ratio for does, metric in speeds.items() if (ratio := run.ratio(metric)) is not None}
    alone = not any(drop.order for drop in run.drops) and all("+" not in layer.format for layer in sparse)
    floats = all((layer.bits_per_weight or 0) > 8 for layer in sparse)  # quantised weights are faster for that
    if not (ratios and sparse and alone and floats):
        return []
    measured = " and ".join(f"{does} {ratio:.2f}×" for does, ratio in ratios.items())
    if not any(run.counts(speeds[does]) and ratio > 1 for does, ratio in ratios.items()):
        said = f"The zeros take less room and save no time here: it {measured} as fast as the dense baseline"
        skips = "sparse_matmul" in run.kernels
        return [f"{said}." if skips else f"{said}, because the weights are multiplied together with their zeros."]
    return [f"With these zeros it {measured} as fast as the dense baseline."]


def _importance(drops: Sequence[DropRecord]) -> str:
    panels = {}
    for kind, name in _KINDS.items():
        own = [(d.block, d.importance, d.order) for d in drops if d.kind == kind and d.block is not None]
        panels[name] = [
            BlockLine("dropped", SECOND, [(block, value) for block, value, order in own if order], "none", 6),
            BlockLine("all", ACCENT, [(block, value) for block, value, _ in own]),
        ]
    label, _, summary = _measure(drops)
    return plots.by_depth(panels, key="importance", label=label, summary=f"{summary}, by block, log scale.")


def _measure(drops: Sequence[DropRecord]) -> tuple[str, str, str]:
    """What the importance of the layers is: a label, a caption, and a summary of the figure."""
    by_output = {drop.metric == "output" for drop in drops}
    if len(by_output) > 1:
        return "importance", "The importance of each layer, by the metric of its method", "Importance of each layer"
    if by_output == {True}:
        caption = "How much the predictions change without each layer alone: KL from those of the whole model"
        return "KL, nats per token", caption, "Divergence of the predictions without each layer"
    caption = "How much each layer changes the residual stream: 1 − cosine between its input and its output"
    return "1 − cosine", caption, "One minus the cosine of the residual stream before and after each layer"


def _sparsity(layers: Sequence[LayerRecord]) -> str:
    lines = {
        kind: [BlockLine("zeros", ACCENT, [(block, 100 * (layer.sparsity or 0)) for block, layer in of])]
        for kind, of in plots.by_kind(layers).items()
    }
    summary = "Share of zeros of each linear by block."
    return plots.by_depth(lines, key="sparsity", label="zeros, %", summary=summary, log=False)


def _distortion(layers: Sequence[LayerRecord]) -> str:
    panels = {
        kind: [
            plots.Curve(
                block,
                [(100 * level, kl) for text, kl in layer.distortion.items() if (level := _as_number(text)) is not None],
                100 * (layer.sparsity or 0),
            )
            for block, layer in of
        ]
        for kind, of in plots.by_kind(layers).items()
    }
    return plots.curves(
        panels,
        key="distortion",
        x_label="zeros in this linear alone, %",
        y_label="KL, nats per token",
        summary="Divergence of the predictions against zeros in one linear alone, a line per block.",
    )


def against_strength(strengths: Strengths) -> str:
    """The figure of recipes that were scored at several strengths; "" for none with more than one number."""
    panels: Mapping[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for table in strength_tables(strengths):
        for recipe, cells in table.rows:
            points = [(_as_number(v), cell) for v, cell in zip(table.values, cells, strict=True) if cell]
            if len(points) > 1 and all(x is not None for x, _ in points):
                whole = all(x == round(x) for x, _ in points)  # counts and shares do not share an axis
                panels[f"{table.corpus}, {'counts' if whole else 'shares'}"][recipe] = points
    summary = "Perplexity of each recipe against its strength, log scale."
    labels = {"x_label": "the value in place of {}", "y_label": "perplexity"}
    return plots.against(panels, key="strengths", summary=summary, **labels) if panels else ""


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
