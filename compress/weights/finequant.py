"""FineQuant (Kim et al., 2023, arXiv:2308.09723): a group size for each matrix, chosen by how much smaller groups
reduce the ranges."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import Format, IntGroup
from compress.formats.scales import SCALE_DTYPES
from compress.grid.nearest import rtn
from compress.method import knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import BITS

SCALE_BITS = 16  # of a group's scale, in the price of smaller groups


@dataclass(frozen=True, kw_only=True)
class FineQuant(LayerwiseMethod):
    """Rounds to nearest in groups whose size each matrix chooses: halved as long as that pays in smaller ranges."""

    name: ClassVar[str] = "finequant"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2308.09723"

    bits: int = knob(4, "bits per weight", choices=BITS, describes=True)
    alpha: float = knob(
        25.0,
        "groups are halved while their squared ranges, in mean squares of the weights, fall by more than this for each "
        "bit per weight of further scales",
        range=(0, 10_000),
        describes=True,
    )
    smallest: int = knob(16, "columns of the smallest groups", range=(2, 1 << 20))
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale_dtype: str = knob("bfloat16", "how scales are stored", choices=tuple(SCALE_DTYPES))

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        size = group_sizes(shape[1], self.smallest)[-1]
        return [IntGroup.spec_of(shape, bits=self.bits, group_size=size, symmetric=self.symmetric)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        size = group_size(W, self.alpha, self.smallest)
        statistics.note(f"groups of {size} columns")
        how = {"symmetric": self.symmetric, "scale": "absmax", "scale_dtype": self.scale_dtype}
        return [rtn(W, bits=self.bits, group_size=size, **how)]


def group_sizes(columns: int, smallest: int) -> list[int]:
    """A whole row, its half, and so on, while the sizes are whole numbers and at least `smallest`."""
    sizes = [columns]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    return sizes


def group_size(W: Tensor, alpha: float, smallest: int) -> int:
    """The group size of a matrix W [out, in]: halved while that lowers the squared ranges enough for its scales.

    The range of a group is max - min, and the error of rounding grows with its square; outliers keep it large in the
    groups that hold them alone, once groups are small. A halving is worth it if the mean square of the ranges, over the
    mean square of the weights, falls by more than `alpha` for each bit per weight that the further scales take.

    Source: arXiv:2308.09723, the heuristic of adaptive granularity. Deviation: it compares the fall of the range with a
    share of the range. On normal weights that fall grows slowly from halving to halving (8 % of a row of 576, 12 % of
    72 columns), so that every threshold keeps whole rows or goes to the end in nearly all matrices of a model.
    """

    def squared_range(size: int) -> Tensor:
        lowest, highest = W.unflatten(1, (-1, size)).aminmax(dim=2)  # [out, groups]
        return (highest - lowest).square().mean() / W.square().mean().clamp(min=1e-30)

    sizes = group_sizes(W.shape[1], smallest)
    for size, finer in zip(sizes, sizes[1:], strict=False):
        added = SCALE_BITS / finer - SCALE_BITS / size  # bits per weight
        if squared_range(size) - squared_range(finer) <= alpha * added:
            return size
    return sizes[-1]
