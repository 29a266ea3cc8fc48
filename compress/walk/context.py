"""What a method is given beside the model and the calibration tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compress.walk.resume import BlockStore
from compress.walk.statistics.saved import SavedStatistics


@dataclass(frozen=True)
class Context:
    """What a method is given beside the model and the calibration tokens.

    Attributes:
        device: where to compute.
        store: where finished blocks are kept, so that a run that is killed continues after them; None: nowhere.
        originals: by name, the linears before an earlier method of the recipe stored them, as the reference for errors;
            where there is none, the present linear is.
        saved: statistics of the model before the recipe; if they are given, no pass over the model is needed for the
            statistics that a method `collects`, and nothing is propagated.
        prepared: what the method's `prepare` gave for the model before the recipe.
        measured: what a method itself has measured before its linears are solved: {name of the value: {linear: value}}.
    """

    device: torch.device
    store: BlockStore | None = None
    originals: Mapping[str, nn.Module] = field(default_factory=dict)
    saved: SavedStatistics | None = None
    prepared: Any = None
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_measured(self, **values: Mapping[str, Any]) -> "Context":
        """The same, with these values by linear, which `solve` finds in `statistics.measured`."""
        return replace(self, measured={**self.measured, **values})

    def of(self, linear: str) -> dict[str, Any]:
        """What was measured of this linear, by the names of the values."""
        return {name: values[linear] for name, values in self.measured.items() if linear in values}
