"""The input channels of linears in descending order, so that outliers share groups (COMET, Liu et al., 2024,
arXiv:2410.12168)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import Dense, Format
from compress.method import Method
from compress.transforms import Permutation, Transform
from compress.walk.folds.folding import FoldingMethod
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Gather(LayerwiseMethod):
    """Reorders the input channels of linears by their largest magnitude, so that outliers share groups; the model
    computes the same.

    Linears that read the same input share the order. It is applied to the input while the model runs, and to the
    columns of the weight once. Later methods then quantise groups of channels of similar size: with
    `activations(bits=4, group_size=32, outliers=0.1)` the first tenth of the groups, which hold the largest channels,
    has 8 bits, and the product still multiplies integers. Methods that scale or rotate channels come first:
    `smoothquant, gather, gptq(bits=4), activations(bits=4, group_size=32, outliers=0.1)`.
    """

    name: ClassVar[str] = "gather"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2410.12168 (the full order of the channels is ours)"
    needs_calibration: ClassVar[bool] = True
    moves_inputs: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("rows", "absmax")
    working_set: ClassVar[tuple[float, float]] = (2.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(
                f"`where` (={self.where!r}) of {self.name} must be 'blocks': the inputs of the head stay in 16 bits"
            )

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for method in after:
            splits = isinstance(method, LayerwiseMethod) and not isinstance(method, FoldingMethod)
            if method.stage == "transform" and not splits or isinstance(method, FoldingMethod):
                raise ValueError(
                    f"`recipe`: {method} scales or rotates the channels that {self} orders by magnitude: {self} must "
                    f"come after {method}, or be left out"
                )
        return self

    def outline(self, model: Any) -> None:
        model.to_be_rotated = True

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        return all(part["format"] == Dense.name for part in parts)

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        statistics.note("its input channels are reordered while the model runs")
        return [Dense(W[:, descending(statistics)].to(statistics.dtype))]

    def rounding(self, statistics: LayerStatistics) -> Transform:
        return Permutation(descending(statistics))


def descending(statistics: LayerStatistics) -> Tensor:
    """The input channels [in] in descending order of their largest magnitude."""
    return statistics.values["absmax"].argsort(descending=True, stable=True)
