"""The inputs of the linears of several models: the size of the largest channels, by depth, and pictures of single
inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from compress.rotations.ranges import summary_of
from compress.transforms import parted
from compress.walk.blocks import targets
from compress.walk.capture import device_of
from compress.walk.groups import hooked
from eval.record.compression import Magnitudes
from reports.page.inputs import by_depth, said
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.heat import heat

TOKENS = 48  # number of tokens in a picture
PICTURES = 2  # inputs that are shown as pictures


@dataclass(frozen=True)
class Inputs:
    """The measured inputs of each model; shows itself in Jupyter.

    Attributes:
        ranges: {model: {linear: of the channels' largest magnitudes}}; for linears that share an input, only the first
            one.
        pictures: {input: {model: |x| over the root mean square of the token, [tokens, channels]}}.
    """

    ranges: dict[str, dict[str, Magnitudes]]
    pictures: dict[str, dict[str, np.ndarray]]

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return {}

    def found(self) -> dict[str, dict[str, Magnitudes]]:
        """The record's entry `inputs`: the ranges, without the pictures."""
        return self.ranges

    def _repr_html_(self) -> str:
        figures = {
            "Channels by tokens": heat(self.pictures, key="heat", summary="Magnitudes of inputs, channels by tokens."),
            "The largest channel against the typical one, by depth": by_depth(self.ranges, "outlier"),
            "Kurtosis of a token's values, by depth (3: normal)": by_depth(self.ranges, "kurtosis"),
        }
        return Figures(said(self.ranges), figures)._repr_html_()


def inputs_of(models: Mapping[str, nn.Module], batches: Sequence[Tensor]) -> Inputs:
    """The inputs of the linears of these models on the first batch, before they are rounded.

    Args:
        models: by name; the first is the original model. Pictures are made of the inputs with the largest outliers in
            that model, at most one of each kind.
    """
    seen = {name: _seen(model, batches[0]) for name, model in models.items()}
    ranges = {name: {linear: one.ranges for linear, one in found.items()} for name, found in seen.items()}
    first = next(iter(seen.values()))
    largest = sorted(first, key=lambda linear: -first[linear].standing_out)
    kinds = {plots.place_of(linear, 0)[1]: linear for linear in reversed(largest)}  # the largest of each kind
    chosen = sorted(kinds.values(), key=largest.index)[:PICTURES]
    pictures = {
        _title(linear): {name: found[linear].picture.numpy() for name, found in seen.items() if linear in found}
        for linear in chosen
    }
    return Inputs(ranges, pictures)


@dataclass(frozen=True)
class _Seen:
    """Data of one input: its ranges; its first tokens, as |x| over the root mean square of the token; the largest
    channel against the typical one, by means of this ratio over all tokens."""

    ranges: Magnitudes
    picture: Tensor
    standing_out: float

    @classmethod
    def of(cls, x: Tensor) -> "_Seen":
        relative = x.abs() / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        mean = relative.mean(0)
        standing_out = (mean.amax() / mean.median().clamp_min(1e-30)).item()
        return cls(summary_of(x), relative[:TOKENS].cpu(), standing_out)


@torch.no_grad()
def _seen(model: nn.Module, batch: Tensor) -> dict[str, _Seen]:
    """The data of the inputs, by the name of the first of the linears that are given the same input."""
    linears = {name: model.get_submodule(name) for name in targets(model)}
    found: dict[str, _Seen] = {}
    given: list[Tensor] = []  # the latest inputs, held so that no memory is used twice

    def on_input(name: str, x: Tensor) -> None:
        if any(x is other for other in given):
            return
        given[:] = [*given[-1:], x]
        for step in parted(getattr(linears[name], "transform", None))[0]:
            x = step(x)
        found.setdefault(name, _Seen.of(x.reshape(-1, x.shape[-1]).float()))

    with hooked(linears, on_input):
        model(batch.to(device_of(model)), use_cache=False)
    return found


def _title(linear: str) -> str:
    block, kind = plots.place_of(linear, 0)
    return f"block {block}\n{kind}"
