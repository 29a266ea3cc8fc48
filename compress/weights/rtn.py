"""Round to nearest: the baseline of every weight quantiser, on the same grid and in the same format."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import Format, IntGroup
from compress.grid import integer as grid
from compress.grid.integer import check_group_size
from compress.grid.nearest import rtn
from compress.method import knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import BITS


@dataclass(frozen=True, kw_only=True)
class RTN(LayerwiseMethod):
    """Rounds each weight to the nearest point of its group's grid: the baseline of every weight quantiser."""

    name: ClassVar[str] = "rtn"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "the baseline of arXiv:2210.17323"

    bits: int = knob(4, "bits per weight", choices=BITS, describes=True)
    group_size: int = knob(64, "columns that share a scale; -1 for a whole row", range=(-1, 1 << 20), describes=True)
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale: str = knob(
        "absmax",
        "cover each group (absmax), or search the least error over clipping (clip), or over clipping and sign (search)",
        choices=grid.SCALES,
    )
    norm: float = knob(2.0, "exponent of the error that search minimises", range=(0.5, 8))
    scale_dtype: str = knob("bfloat16", "how scales are stored", choices=tuple(grid.SCALE_DTYPES))

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_group_size(self.group_size, name, shape)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [IntGroup.spec_of(shape, bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        stored = rtn(
            W,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            scale=self.scale,
            norm=self.norm,
            scale_dtype=self.scale_dtype,
        )
        return [stored]
