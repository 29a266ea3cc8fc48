"""Magnitude pruning: removes the smallest weights. It is the baseline of every pruning method."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.pruning.base import PruningMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Magnitude(PruningMethod):
    """Sets the weights of smallest magnitude to zero, compared over each linear's matrix."""

    name: ClassVar[str] = "magnitude"
    source: ClassVar[str] = "the baseline of arXiv:2306.11695 (Han et al., 2015, arXiv:1506.02626)"
    comparable: ClassVar[bool] = True

    def scores(self, W: Tensor, statistics: LayerStatistics) -> Tensor:
        return W.abs()
