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


@dataclass(frozen=True, kw_only=True)
class FineQuant(LayerwiseMethod):
    """Rounds to nearest in groups whose size each matrix chooses: halved as long as that shrinks the groups' ranges."""

    name: ClassVar[str] = "finequant"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2308.09723"

    bits: int = knob(4, "bits per weight", choices=BITS, describes=True)
    alpha: float = knob(
        0.1, "groups are halved while their mean range falls by more than this share", range=(0, 1), describes=True
    )
    smallest: int = knob(32, "columns of the smallest groups", range=(2, 1 << 20))
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
    """The group size of a matrix W [out, in]: halved while the mean range of its groups falls by more than `alpha`.

    The range of a group is max - min; outliers keep it large in the groups that hold them alone, once groups are small.

    Source: arXiv:2308.09723, the heuristic of adaptive granularity. It is our reading that the ranges are averaged over
    groups, and that the threshold is a share of the previous range.
    """

    def mean_range(size: int) -> Tensor:
        lowest, highest = W.unflatten(1, (-1, size)).aminmax(dim=2)  # [out, groups]
        return (highest - lowest).mean()

    sizes = group_sizes(W.shape[1], smallest)
    for size, finer in zip(sizes, sizes[1:], strict=False):
        if mean_range(finer) >= (1 - alpha) * mean_range(size):
            return size
    return sizes[-1]
