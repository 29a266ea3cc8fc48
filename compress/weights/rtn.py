"""Round to nearest: the baseline of every weight quantiser, on the same grid and in the same format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.formats import Format
from compress.grid.grids import check_zeros
from compress.grid.integer import SCALES
from compress.grid.nearest import rtn
from compress.method import Method, knob
from compress.walk.statistics import LayerStatistics
from compress.weights.on_grid import GridMethod


@dataclass(frozen=True, kw_only=True)
class RTN(GridMethod):
    """Rounds each weight to the nearest point of its group's grid: the baseline of every weight quantiser."""

    name: ClassVar[str] = "rtn"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "the baseline of arXiv:2210.17323"

    scale: str = knob(
        "absmax",
        "cover each group (absmax), or search the least error over clipping (clip), or over clipping and sign (search)",
        choices=SCALES,
    )
    norm: float = knob(2.0, "exponent of the error that search minimises", range=(0.5, 8))

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        check_zeros(self, before)
        return self

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [rtn(W, **self.aim(W.shape[1]), scale=self.scale, norm=self.norm)]
