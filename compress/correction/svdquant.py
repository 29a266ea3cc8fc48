"""A branch of low rank in 16 bits that takes the largest directions off each weight before it is quantised (SVDQuant,
Li et al., 2024, arXiv:2411.05007)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.correction.low_rank import low_rank
from compress.formats import Dense, Format, LowRankWeight
from compress.method import Method, knob
from compress.walk.folds.folding import FoldingMethod
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class SVDQuant(LayerwiseMethod):
    """Splits each weight into a branch of low rank, which stays in 16 bits, and a rest, which later methods quantise.

    The branch reads the inputs before they are rounded for the rest: y = L (R x) + Q(W - L R) Q(x). Its factors are the
    first singular vectors of W, so that the rest has the least norm and the outliers stay in 16 bits. Outliers of the
    inputs must be moved into the weights first: `smoothquant, svdquant, gptq(bits=4), activations(bits=4)`. The method
    `low_rank` corrects a weight after it was stored.
    """

    name: ClassVar[str] = "svdquant"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2411.05007, section 4.2"
    working_set: ClassVar[tuple[float, float]] = (6.0, 0.0)

    rank: int = knob(32, "rank of the 16-bit branch", range=(1, 1 << 14), describes=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(f"`where` (={self.where!r}) of {self.name} must be 'blocks': an embedding has no branch")

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for method in after:
            if method.stage in ("transform", "sparsify") or isinstance(method, FoldingMethod):
                what = "prunes" if method.stage == "sparsify" else "changes"
                raise ValueError(
                    f"`recipe`: {method} {what} whole weights, and {self} before it has split them: leave one of the "
                    "two out, or put methods that scale and rotate first"
                )
        return self

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [Dense.spec_of(shape), LowRankWeight.spec_of(shape, rank=min(self.rank, *shape), bits=16)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        branch = low_rank(W, None, rank=self.rank)
        return [Dense((W - branch.dequantize()).to(statistics.dtype)), branch]
