"""Activation sparsity without training: the smallest inputs of every linear become 0 (TEAL, Liu et al., 2024,
arXiv:2408.14690)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import FORMATS as STORED
from compress.formats import Dense, Format
from compress.method import knob
from compress.transforms import Threshold, Transform
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Teal(LayerwiseMethod):
    """Sets the smallest inputs of each linear to 0, below a limit that a given share of the calibration inputs is
    under; the weights stay as the methods before it stored them.

    A kernel that reads only the columns of the weight whose inputs are not 0 would read that share less of it. Here
    the products are computed in full: the loss is that of the method, and nothing is faster. All tokens are treated
    alike, those of the prompt, too, and all linears have the same share; the paper's greedy search of shares inside a
    block is left out.
    """

    name: ClassVar[str] = "teal"
    stage: ClassVar[str] = "quantize_activations"
    source: ClassVar[str] = "arXiv:2408.14690, without its search of shares by layer"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("rows",)
    working_set: ClassVar[tuple[float, float]] = (2.0, 0.0)

    ratio: float = knob(0.25, "share of the inputs of every linear that become 0", range=(0.0, 0.99))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(
                f"`where` (={self.where!r}) of {self.name} must be 'blocks': the inputs of the head stay as they are"
            )

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        return not all(STORED[part["format"]].exact for part in parts)

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return list(statistics.stored) or [Dense(W.to(statistics.dtype))]

    def rounding(self, statistics: LayerStatistics) -> Transform:
        rows, key = statistics.values["rows"], (self.name, self.ratio)
        if not len(rows):
            statistics.note("no input becomes 0: no calibration token came here")
            return Threshold(torch.zeros(()))
        if key not in statistics.shared:  # linears that read the same input have the same limit
            place = int(self.ratio * rows.numel())
            statistics.shared[key] = rows.abs().flatten().kthvalue(place).values.cpu() if place else torch.zeros(())
        limit = statistics.shared[key]
        statistics.note(f"inputs of at most {limit.item():.3g} become 0")
        return Threshold(limit.clone())
