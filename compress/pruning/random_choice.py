"""Random pruning: removes weights that are drawn at random. Any other method must be better."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.method import knob
from compress.pruning.base import PruningMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class RandomChoice(PruningMethod):
    """Sets weights that are drawn at random to zero: a lower bound for the other pruning methods."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "a baseline"
    comparable: ClassVar[bool] = True

    seed: int = knob(0, "seed of the draw", range=(0, (1 << 31) - 1))

    def scores(self, W: Tensor, statistics: LayerStatistics) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(statistics.name.encode()))
        return torch.rand(W.shape, generator=generator).to(W.device)
