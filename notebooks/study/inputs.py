"""What the weights of several models meet: how far channels stand out, by depth, and pictures of single inputs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.rotations.ranges import summary_of
from compress.transforms import parted
from compress.walk.blocks import targets
from compress.walk.capture import device_of
from compress.walk.groups import hooked
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.heat import heat
from reports.parts.plots import ACCENT, INK, MUTED, SECOND, Line

TOKENS = 48  # that a picture shows
PICTURES = 2  # inputs that are shown as pictures
STYLES = ((SECOND, "-"), (INK, ":"), (MUTED, "--"), (INK, "-."), (SECOND, "--"))


@dataclass(frozen=True)
class Inputs:
    """What was found of the inputs of each model; shows itself in Jupyter.

    Attributes:
        ranges: {model: {linear: {"max", "p99", "median" of the channels' largest magnitudes, "kurtosis"}}}, of linears
            that share an input the first one.
        pictures: {linear: {model: |x| over the root mean square of the token, [tokens, channels]}}.
    """

    ranges: dict[str, dict[str, dict[str, float]]]
    pictures: dict[str, dict[str, np.ndarray]]

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return {}

    def found(self) -> dict[str, Any]:
        """As the record keeps it: without the pictures."""
        return self.ranges

    def _repr_html_(self) -> str:
        figures = {
            "Channels by tokens": heat(self.pictures, key="heat", summary="Magnitudes of inputs, channels by tokens."),
            "The largest channel against the typical one, by depth": self._by_depth("outlier"),
            "Kurtosis of a token's values, by depth (3: normal)": self._by_depth("kurtosis"),
        }
        return Figures(self._said(), figures)._repr_html_()

    def _said(self) -> str:
        """The medians over all inputs, model by model."""
        parts = []
        for name, inputs in self.ranges.items():
            outlier, kurtosis = (np.median([_measure(one, m) for one in inputs.values()]) for m in MEASURES)
            parts.append(f"{name}: {outlier:,.1f}× and {kurtosis:,.1f}")
        return (
            "Before they are rounded, the largest channel against the typical one, and the kurtosis of a token's "
            f"values, as medians over the inputs: {'; '.join(parts)}."
        )

    def _by_depth(self, measure: str) -> str:
        kinds: dict[str, list[Line]] = defaultdict(list)
        for i, (model, inputs) in enumerate(self.ranges.items()):
            last = i + 1 == len(self.ranges)
            colour, style = (ACCENT, "-") if last else STYLES[i % len(STYLES)]
            points: dict[str, list[tuple[int, float]]] = defaultdict(list)
            for position, (name, one) in enumerate(inputs.items()):
                block, kind = plots.place_of(name, position)
                points[kind].append((block, _measure(one, measure)))
            for kind, found in points.items():
                kinds[f"input of {kind}"].append(Line(model, colour, found, style))
        return plots.by_depth(kinds, key=measure, label=MEASURES[measure], summary=f"{MEASURES[measure]} by block.")


MEASURES = {"outlier": "largest over median channel", "kurtosis": "kurtosis"}


def inputs_of(models: Mapping[str, nn.Module], batches: Sequence[Tensor]) -> Inputs:
    """What the weights of these models meet on the first batch, before it is rounded.

    Args:
        models: by name; the first is the model as it was, whose largest outliers decide which inputs become pictures.
    """
    seen = {name: _seen(model, batches[0]) for name, model in models.items()}
    ranges = {name: {linear: summary_of(x) for linear, x in inputs.items()} for name, inputs in seen.items()}
    first = next(iter(ranges.values()))
    largest = sorted(first, key=lambda linear: -_measure(first[linear], "outlier"))
    kinds = {plots.place_of(linear, 0)[1]: linear for linear in reversed(largest)}  # the largest of each kind
    chosen = sorted(kinds.values(), key=largest.index)[:PICTURES]
    pictures = {
        linear: {name: _picture(inputs[linear]) for name, inputs in seen.items() if linear in inputs}
        for linear in chosen
    }
    return Inputs(ranges, pictures)


@torch.no_grad()
def _seen(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """What the weights meet [tokens, in] by the name of the linear, the first of those that are given the same."""
    linears = {name: model.get_submodule(name) for name in targets(model)}
    found: dict[str, Tensor] = {}
    given: list[Tensor] = []  # held, so that no memory is used twice

    def on_input(name: str, x: Tensor) -> None:
        if any(x is other for other in given[-2:]):
            return
        given.append(x)
        for step in parted(getattr(linears[name], "transform", None))[0]:
            x = step(x)
        found.setdefault(name, x.reshape(-1, x.shape[-1]).float().cpu())

    with hooked(linears, on_input):
        model(batch.to(device_of(model)), use_cache=False)
    return found


def _measure(ranges: Mapping[str, float], measure: str) -> float:
    return ranges["max"] / max(ranges["median"], 1e-30) if measure == "outlier" else ranges[measure]


def _picture(x: Tensor) -> np.ndarray:
    x = x[:TOKENS].abs()
    return (x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)).numpy()
