"""What was moved from activations into weights: the ranges before and after, the strengths, the errors, and the
check."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, SECOND, Line

MAX_CHANNELS = 4  # links shown channel by channel


def figures(folds: Iterable[Any]) -> Figures:
    """The figures of these folds (`Result.folds`, or a record's), for a notebook."""
    told = context([dataclasses.asdict(f) if dataclasses.is_dataclass(f) else f for f in folds])
    titles = {
        "channels": "Channel by channel",
        "magnitudes": "By depth",
        "alphas": "Strength",
        "errors": "Error of rounded outputs",
    }
    if not told:
        return Figures("Nothing was moved from activations into weights.", {})
    return Figures(told["said"], {title: told[key] for key, title in titles.items() if told[key]})


def context(folds: list[dict[str, Any]]) -> dict[str, Any]:
    """What templates/folds.html shows of a record's `folds`; {} where there are none."""
    if not folds:
        return {}
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for i, fold in enumerate(folds):
        kinds[title(fold)].append((plots.place_of(fold["name"], i)[0], fold))
    moved = [fold["alpha"] for fold in folds if fold["alpha"] is not None]
    return {
        "said": _said(folds, moved),
        "channels": _channels(folds),
        "magnitudes": _magnitudes(kinds),
        "alphas": _alphas(kinds) if len(set(moved)) > 1 else "",
        "errors": _errors(kinds),
        "rows": [{**fold, "reads": consumers(fold)} for fold in folds],
    }


def title(fold: dict[str, Any]) -> str:
    """The kind of a link: input_layernorm → q, k, v."""
    return f"{plots.place_of(fold['name'], 0)[1]}\n→ {consumers(fold)}"


def consumers(fold: dict[str, Any]) -> str:
    """Short names of the linears that read the producer."""
    short = dict.fromkeys(
        plots.place_of(name, 0)[1].rpartition(".")[2].removesuffix("_proj") for name in fold["consumers"]
    )
    return ", ".join(list(short)[:4]) + (", …" if len(short) > 4 else "")


def _said(folds: list[dict[str, Any]], moved: list[float]) -> str:
    if not moved:
        return f"None of {len(folds)} links was moved."
    low, high = min(moved), max(moved)
    strength = f"alpha {low:g}" if low == high else f"alpha {low:g} to {high:g}, median {statistics.median(moved):g}"
    peaks = {when: statistics.median(_outlier(fold[f"x_{when}"]) for fold in folds) for when in ("before", "after")}
    text = (
        f"{len(moved)} of {len(folds)} links were scaled ({strength}). Over the links, the median of the largest "
        "input channel "
        f"against the typical one goes from {peaks['before']:.1f}× to {peaks['after']:.1f}×"
    )
    measured = [fold for fold in folds if fold["error_before"] and fold["error_after"] is not None]
    if measured:
        ratio = statistics.geometric_mean([max(fold["error_after"], 1e-30) / fold["error_before"] for fold in measured])
        text += f", and the error of the rounded outputs to {ratio:.2f}× of what it was (geometric mean)"
    return f"{text}. Without rounding, no block's output moved by more than {max(fold['difference'] for fold in folds):.1e} of itself."


def _outlier(magnitudes: dict[str, float]) -> float:
    return magnitudes["max"] / max(magnitudes["median"], 1e-30)


def _channels(folds: list[dict[str, Any]]) -> str:
    """Of the links with magnitudes channel by channel those with the largest outliers, of each kind first, in the
    model's order."""
    there = sorted(
        (i for i, fold in enumerate(folds) if fold.get("channels")), key=lambda i: -_outlier(folds[i]["x_before"])
    )
    first = {title(folds[i]): i for i in reversed(there)}.values()  # the largest of each kind
    largest = sorted(there, key=lambda i: i not in first)[:MAX_CHANNELS]
    if not largest:
        return ""
    named = {}
    for i in sorted(largest):
        named[f"block {plots.place_of(folds[i]['name'], i)[0]}, {title(folds[i]).replace(chr(10), ' ')}"] = folds[i][
            "channels"
        ]
    return plots.channels(named)


def _magnitudes(kinds: dict[str, list[tuple[int, dict[str, Any]]]]) -> str:
    lines = [
        (what, when, colour, style)
        for when, colour in (("after", ACCENT), ("before", SECOND))
        for what, style in (("max", "-"), ("median", ":"))
    ]
    panels = {
        kind: [
            Line(f"{what} {when}", colour, [(block, fold[f"x_{when}"][what]) for block, fold in found], style)
            for what, when, colour, style in lines
        ]
        for kind, found in kinds.items()
    }
    summary = "Largest and median magnitude of the input channels of every link by block, before and after, log scale."
    return plots.by_depth(panels, key="magnitudes", label="magnitude of the inputs", summary=summary)


def _alphas(kinds: dict[str, list[tuple[int, dict[str, Any]]]]) -> str:
    panels = {
        kind: [Line("alpha", ACCENT, [(block, fold["alpha"]) for block, fold in found if fold["alpha"] is not None])]
        for kind, found in kinds.items()
    }
    return plots.by_depth(
        panels, key="alphas", label="alpha", summary="Chosen alpha of every link by block.", log=False
    )


def _errors(kinds: dict[str, list[tuple[int, dict[str, Any]]]]) -> str:
    measured = {
        kind: [(b, f) for b, f in found if f["error_before"] and f["error_after"]] for kind, found in kinds.items()
    }
    panels = {
        kind: [
            Line("with the scales", ACCENT, [(block, fold["error_after"]) for block, fold in found]),
            Line("without", SECOND, [(block, fold["error_before"]) for block, fold in found], "--"),
        ]
        for kind, found in measured.items()
        if found
    }
    if not panels:
        return ""
    summary = "Relative error of the rounded outputs of every link by block, with and without the scales, log scale."
    return plots.by_depth(panels, key="fold-errors", label="relative error of the outputs", summary=summary)
