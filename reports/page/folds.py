"""Scales and transforms that were moved from activations into weights: ranges before and after, errors, the check."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from eval.record.compression import FoldRecord
from eval.record.metrics import fmt
from eval.record.reading import row
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, SECOND, BlockLine, finite

MAX_CHANNELS = 4  # links shown channel by channel
_Kinds = dict[str, list[tuple[int, FoldRecord]]]  # links of a kind with the numbers of their blocks


def figures(folds: Iterable[Any]) -> Figures:
    """The figures of these folds (`Result.folds`, or a record's), for a notebook."""
    shown = context([row(FoldRecord, fold) for fold in folds])
    if not shown:
        return Figures("Nothing was moved from activations into weights.", {})
    titles = {"channels": "Channel by channel", "magnitudes": "By depth", "alphas": "Strength"}
    titles["errors"] = "Error of rounded outputs"
    return Figures(shown["said"], {title: shown[key] for key, title in titles.items()})


def context(folds: Sequence[FoldRecord]) -> dict[str, Any]:
    """The data for templates/folds.html from a record's `folds`; {} if there are none."""
    if not folds:
        return {}
    kinds: _Kinds = defaultdict(list)
    for i, fold in enumerate(folds):
        kinds[title(fold)].append((plots.place_of(fold.name, i)[0], fold))
    moved = [fold.alpha for fold in folds if fold.alpha is not None]
    return {
        "said": " ".join(filter(None, (_said(folds), _said_of_rotations(folds), _said_of_keys(folds)))),
        "rotated": any(map(_is_rotation, folds)),
        "channels": _channels(folds),
        "magnitudes": _magnitudes(kinds),
        "alphas": _alphas(kinds) if len(set(moved)) > 1 else "",
        "errors": _errors(kinds),
        "rows": [(fold, consumers(fold)) for fold in folds],
    }


def title(fold: FoldRecord) -> str:
    """The kind of a link: input_layernorm → q, k, v."""
    return f"{plots.place_of(fold.name, 0)[1]}\n→ {consumers(fold)}"


def consumers(fold: FoldRecord) -> str:
    """Short names of the linears that read the producer."""
    short = dict.fromkeys(
        plots.place_of(name, 0)[1].rpartition(".")[2].removesuffix("_proj") for name in fold.consumers
    )
    return ", ".join(list(short)[:4]) + (", …" if len(short) > 4 else "")


def _is_rotation(fold: FoldRecord) -> bool:
    return "rotation" in fold.kind or fold.kind == "online map"


def _is_of_keys(fold: FoldRecord) -> bool:
    return fold.kind == "keys"


def _said_of_rotations(folds: Sequence[FoldRecord]) -> str:
    """The number of rotated inputs, the change of their outliers, and why the stream was not rotated; "" for none."""
    rotations = [fold for fold in folds if _is_rotation(fold)]
    if not rotations:
        return ""
    kinds = Counter(fold.kind for fold in rotations)
    counted = ", ".join(f"{count} by {kind}" for kind, count in kinds.items())
    text = f"The inputs of {len(rotations)} groups of linears are transformed ({counted}). {_outliers(rotations)}."
    before, after = (
        [k for fold in rotations if (k := getattr(fold, f"x_{when}").kurtosis) is not None]
        for when in ("before", "after")
    )
    if before and after:
        text += (
            " The median kurtosis of a token's values in these inputs goes from "
            f"{fmt(statistics.median(before), '.1f')} to {fmt(statistics.median(after), '.1f')}, where a normal "
            "distribution has 3."
        )
    text += _error_ratio(
        rotations, " The error of the rounded outputs goes to {:.2f}× of what it was (geometric mean)."
    )
    reasons = dict.fromkeys(note for fold in rotations if fold.kind != "online map" for note in fold.notes)
    return text + "".join(f" Note: {reason}." for reason in reasons)


def _outliers(folds: Sequence[FoldRecord]) -> str:
    """The size of the largest input channels relative to the others, before and after."""
    before, after = (
        fmt(statistics.median(getattr(fold, f"x_{when}").outlier for fold in folds), ".1f")
        for when in ("before", "after")
    )
    return f"Over them, the median of the largest input channel against the typical one goes from {before}× to {after}×"


def _said_of_keys(folds: Sequence[FoldRecord]) -> str:
    """The number of blocks with scaled keys, and the change of their largest channels; "" for none."""
    keys = [fold for fold in folds if _is_of_keys(fold)]
    if not keys:
        return ""
    before, after = (
        fmt(statistics.median(getattr(fold, f"x_{when}").outlier for fold in keys), ".1f")
        for when in ("before", "after")
    )
    return (
        f"The keys of {len(keys)} blocks are scaled pair by pair before RoPE, and their queries inversely. The median "
        f"of the largest channel of keys against the typical one goes from {before}× to {after}×."
    )


def _said(folds: Sequence[FoldRecord]) -> str:
    folds = [fold for fold in folds if not _is_rotation(fold) and not _is_of_keys(fold)]
    moved = [fold.alpha for fold in folds if fold.alpha is not None]
    if not folds:
        return ""
    if not moved:
        return f"None of {len(folds)} links was moved."
    low, high = min(moved), max(moved)
    strength = f"alpha {low:g}" if low == high else f"alpha {low:g} to {high:g}, median {statistics.median(moved):g}"
    text = f"{len(moved)} of {len(folds)} links were scaled ({strength}). {_outliers(folds)}"
    text += _error_ratio(folds, ", and the error of the rounded outputs to {:.2f}× of what it was (geometric mean)")
    moved_by = max((fold.difference for fold in folds if fold.difference is not None), default=None)
    return f"{text}. Without rounding, no block's output moved by more than {fmt(moved_by, '.1e')} of itself."


def _error_ratio(folds: Sequence[FoldRecord], sentence: str) -> str:
    """A sentence with the mean ratio of the errors after and before; "" if they were not measured."""
    measured = [
        (f.error_before, f.error_after) for f in folds if finite(f.error_before, f.error_after) and f.error_before > 0
    ]
    if not measured:
        return ""
    return sentence.format(statistics.geometric_mean([max(after, 1e-30) / before for before, after in measured]))


def _channels(folds: Sequence[FoldRecord]) -> str:
    """The links with the largest outliers, of those with magnitudes per channel: first one of each kind; in the model's
    order."""
    there = [i for i, fold in enumerate(folds) if fold.channels]
    there.sort(key=lambda i: -folds[i].x_before.outlier)
    first = {title(folds[i]): i for i in reversed(there)}.values()  # the largest of each kind
    largest = sorted(there, key=lambda i: i not in first)[:MAX_CHANNELS]
    named = {
        f"block {plots.place_of(folds[i].name, i)[0]}, {title(folds[i])}".replace("\n", " "): folds[i].channels
        for i in sorted(largest)
    }
    return plots.channels(named) if named else ""


def _magnitudes(kinds: _Kinds) -> str:
    lines = [
        (measure, when, colour, style)
        for when, colour in (("after", ACCENT), ("before", SECOND))
        for measure, style in (("max", "-"), ("median", ":"))
    ]
    panels = {
        kind: [
            BlockLine(
                f"{measure} {when}", colour, [(b, getattr(getattr(f, f"x_{when}"), measure)) for b, f in of], style
            )
            for measure, when, colour, style in lines
        ]
        for kind, of in kinds.items()
    }
    summary = "Largest and median magnitude of the input channels of every link by block, before and after, log scale."
    return plots.by_depth(panels, key="magnitudes", label="magnitude of the inputs", summary=summary)


def _alphas(kinds: _Kinds) -> str:
    panels = {
        kind: [BlockLine("alpha", ACCENT, [(block, fold.alpha) for block, fold in of])] for kind, of in kinds.items()
    }
    summary = "Chosen alpha of every link by block."
    return plots.by_depth(panels, key="alphas", label="alpha", summary=summary, log=False)


def _errors(kinds: _Kinds) -> str:
    measured = {kind: [(b, f) for b, f in of if f.error_before and f.error_after] for kind, of in kinds.items()}
    moved = "transform" if any(_is_rotation(fold) for of in kinds.values() for _, fold in of) else "scales"
    panels = {
        kind: [
            BlockLine(f"with the {moved}", ACCENT, [(block, fold.error_after) for block, fold in of]),
            BlockLine("without", SECOND, [(block, fold.error_before) for block, fold in of], "--"),
        ]
        for kind, of in measured.items()
    }
    summary = f"Relative error of the rounded outputs of every link by block, with and without the {moved}, log scale."
    return plots.by_depth(panels, key="fold-errors", label="relative error of the outputs", summary=summary)
