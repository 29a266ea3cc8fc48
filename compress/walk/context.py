"""What a method is given beside the model and the calibration tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """

    device: torch.device
    store: BlockStore | None = None
    originals: Mapping[str, nn.Module] = field(default_factory=dict)
    saved: SavedStatistics | None = None
