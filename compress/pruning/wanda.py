"""Wanda (Sun et al., 2023, arXiv:2306.11695): prune by weights and activations, without changing the kept weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.pruning.base import PruningMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Wanda(PruningMethod):
    """Sets the weights of smallest `abs(W_ij) * norm(X_j)` in each output row to zero."""

    name: ClassVar[str] = "wanda"
    source: ClassVar[str] = "arXiv:2306.11695, equation 1"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram",)
    by_row: ClassVar[bool] = True

    def scores(self, W: Tensor, statistics: LayerStatistics) -> Tensor:
        if not statistics.tokens:
            statistics.note("by magnitude: no calibration token reached it")
            return W.abs()
        return W.abs() * statistics.values["gram"].diagonal().sqrt()
