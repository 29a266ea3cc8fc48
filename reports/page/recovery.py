"""Training after the compression: the divergence of held-out text by tokens, and the layers that moved most."""

from collections.abc import Iterable, Mapping
from typing import Any

from eval.record.compression import RecoveryRecord
from eval.record.metrics import fmt, number
from eval.record.rows import RunRecord, typed
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.text import clean

MOST_MOVED = 5  # weights that the text names


def figures(recoveries: Iterable[Any], name: str = "compressed") -> Figures:
    """The figure of `Result.recoveries` (or of a record's), for a notebook."""
    shown = context(typed({"recoveries": {name: list(recoveries)}}))
    if not shown:
        return Figures("Nothing was trained after the compression.", {})
    said = " ".join(text for one in shown["models"] for text in one["said"])
    return Figures(said, {"Divergence of held-out text": shown["curve"]})


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/recovery.html from a record; {} if no model was trained."""
    trained = {name: [one for one in own if one.curve] for name, own in run.recoveries.items()}
    trained = {name: own for name, own in trained.items() if own}
    if not trained:
        return {}
    models = [
        {"name": name, "said": [_said(one) for one in own], "moved": [_moved(one.moved) for one in own if one.moved]}
        for name, own in trained.items()
    ]
    return {"models": models, "curve": _curve(trained)}


def _said(one: RecoveryRecord) -> str:
    first, last = one.curve[0], one.curve[-1]
    kept = next((point for point in one.curve if point.step == one.kept), first)
    trained = (one.windows or 0) - (one.held_out or 0)
    brought = (
        f"The divergence of {fmt(one.held_out, 'd')} held-out windows went from {number(first.divergence)} to "
        f"{number(kept.divergence)} nats per token"
        if one.kept
        else f"No update lowered the divergence of held-out text ({number(first.divergence)} nats per token), so that "
        "the model is as it was before training"
    )
    fixed = f" Nothing learned in {one.fixed} compressed linears." if one.fixed else ""
    return (
        f"{clean(one.method, 120)}: {fmt(one.learned, ',d')} values learned in {fmt(last.step, ',d')} updates, "
        f"{fmt(last.tokens, ',d')} tokens of {fmt(trained, ',d')} windows, {fmt(last.seconds / 60, '.1f')} minutes, "
        f"after {fmt((one.teacher_seconds or 0) / 60, '.1f')} minutes for the original model's predictions. {brought}. "
        f"It ended because {clean(one.ended, 200)}; the values are those after update {fmt(one.kept, ',d')}.{fixed}"
    )


def _moved(moved: Mapping[str, float]) -> str:
    largest = sorted(moved.items(), key=lambda pair: -pair[1])[:MOST_MOVED]
    shown = ", ".join(f"{clean(name, 80)} ({fmt(share, '.2g', 100)} %)" for name, share in largest)
    return f"The largest changes, relative to the norm of the weight: {shown}"


def _curve(trained: Mapping[str, Iterable[RecoveryRecord]]) -> str:
    lines = {}
    for name, own in trained.items():
        for i, one in enumerate(own):
            lines[name if i == 0 else f"{name}, {i + 1}"] = [(p.tokens / 1000, p.divergence) for p in one.curve]
    return plots.against(
        {"": lines},
        key="recovery",
        x_label="thousands of tokens trained on",
        y_label="KL of held-out text",
        summary="Divergence of held-out calibration text by tokens trained on, log scale.",
    )
