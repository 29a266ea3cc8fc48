"""The allocation of a budget of bytes to layers: bits by depth, and predicted loss against size."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from eval.record.compression import AllocationRecord, LayerRecord
from eval.record.rows import RunRecord, typed
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, BlockLine
from reports.parts.text import clean

_LOSSES = {
    "kl": "measured divergence of the predictions, nats per token",
    "kl_scaled": "measured divergence of the predictions, nats per token",
    "fisher": "estimated divergence of the predictions, nats per token",
}


def figures(layers: Iterable[Any], allocation: Any) -> Figures:
    """The figures of `Result.layers` and `Result.allocation` (or of a record's), for a notebook."""
    shown = context(typed({"layers": list(layers), "allocation": allocation}))
    if not shown:
        return Figures("No budget was shared out.", {})
    titles = {"bits": "Bits by layer", "curve": "Predicted loss against size"}
    return Figures(" ".join(shown["said"]), {title: shown[key] for key, title in titles.items()})


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/allocation.html from a record; {} if no budget was allocated."""
    made = run.allocation
    if made is None:
        return {}
    return {"said": _said(run.layers, made), "bits": bits_by_depth(run.layers), "curve": _curve(made)}


def _said(layers: Sequence[LayerRecord], made: AllocationRecord) -> list[str]:
    counts = Counter(layer.choice for layer in layers if layer.choice)
    shares = ", ".join(f"{count} by {clean(choice, 80)}" for choice, count in counts.most_common())
    beside, size = made.beside_bytes or 0.0, made.chosen[0] if made.chosen else float("nan")
    stored = f"{len(layers)} linears are stored: {shares}."
    if made.max_loss:
        return [
            f"The model is the smallest in which {made.layers or 0} layers lose at most {made.max_loss:g} nats per "
            f"token together: it takes {size / 1e6:.1f} MB, {beside / 1e6:.1f} MB of them for what stays in "
            f"16 bits. {stored}"
        ]
    return [
        f"A budget of {(made.budget_bytes or 0) / 1e6:.1f} MB for the whole model was shared out among "
        f"{made.layers or 0} layers, after {beside / 1e6:.1f} MB for what stays in 16 bits: the model takes "
        f"{size / 1e6:.1f} MB. {stored}"
    ]


def bits_by_depth(layers: Sequence[LayerRecord]) -> str:
    """Stored bits per weight of each linear against its block, a panel for each kind of linear."""
    panels = {
        kind: [BlockLine("bits", ACCENT, [(block, layer.bits_per_weight) for block, layer in of])]
        for kind, of in plots.by_kind(layers).items()
    }
    summary = "Stored bits per weight of each linear by block."
    return plots.by_depth(panels, key="bits", label="bits per weight", summary=summary, log=False)


def _curve(made: AllocationRecord) -> str:
    """Only measured or estimated losses: a rule that orders blocks predicts none."""
    points = [(point[0] / 1e6, point[1]) for point in (*made.curve, made.chosen) if len(point) == 2]
    if made.loss not in _LOSSES or len(points) < 3:
        return ""
    lines = {"best choices for each size": points[:-1], "chosen": points[-1:]}
    return plots.against(
        {"": lines},
        key="allocation",
        x_label="megabytes of the whole model",
        y_label="sum of losses",
        summary=f"Least sum over the layers of the {_LOSSES[made.loss]}, against the model's size, log scale.",
    )
