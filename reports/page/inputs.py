"""The inputs of the linears of several models before rounding: the size of the largest channels, by depth."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from eval.record.compression import Magnitudes
from eval.record.metrics import fmt
from reports.parts import plots
from reports.parts.plots import ACCENT, INK, MUTED, SECOND, BlockLine
from reports.parts.text import clean

STYLES = ((SECOND, "-"), (INK, ":"), (MUTED, "--"), (INK, "-."), (SECOND, "--"))
MEASURES = {"outlier": "largest over median channel", "kurtosis": "kurtosis"}
Inputs = Mapping[str, Mapping[str, Magnitudes]]  # by model, and by the linear that reads the input


def context(inputs: Inputs) -> dict[str, Any]:
    """The data for templates/inputs.html from a record's `inputs`; {} if there are none."""
    if not any(inputs.values()):
        return {}
    return {"said": said(inputs), **{measure: by_depth(inputs, measure) for measure in MEASURES}}


def said(inputs: Inputs) -> str:
    """The medians over all inputs, model by model."""
    parts = []
    for name, found in inputs.items():
        middle = [fmt(statistics.median(_values(found, measure)), ",.1f") for measure in MEASURES if found]
        parts += [f"{clean(name, 80)}: {'× and '.join(middle)}"] if middle else []
    return (
        "Before inputs are rounded, the largest channel against the typical one, and the kurtosis of a token's values "
        f"(3 for a normal distribution), as medians over all inputs: {'; '.join(parts)}."
    )


def by_depth(inputs: Inputs, measure: str) -> str:
    """A panel for each kind of input, with a line for each model; the last line is on top."""
    kinds: dict[str, list[BlockLine]] = defaultdict(list)
    for i, (model, found) in enumerate(reversed(inputs.items())):
        colour, style = STYLES[(i - 1) % len(STYLES)] if i else (ACCENT, "-")
        points: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for position, (name, value) in enumerate(zip(found, _values(found, measure), strict=True)):
            block, kind = plots.place_of(name, position)
            points[kind].append((block, value))
        for kind, of in points.items():
            kinds[f"input of\n{kind}"].append(BlockLine(model, colour, of, style))
    label = MEASURES[measure]
    return plots.by_depth(kinds, key=f"inputs-{measure}", label=label, summary=f"{label} by block, log scale.")


def _values(found: Mapping[str, Magnitudes], measure: str) -> list[float]:
    return [getattr(one, measure) or 0.0 for one in found.values()]
