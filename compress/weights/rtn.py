"""Round to nearest: the baseline of every weight quantiser, on the same grid and in the same format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import Format
from compress.grid.grids import GRIDS, SCALE_KINDS, check_grid, check_zeros, make_grid, scales_of
from compress.grid.integer import SCALES
from compress.grid.nearest import rtn
from compress.method import Method, knob
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
    grid: str = knob(
        "int",
        "values that a weight may take, times its scale: integers, or a table of numbers; `bits` must be the bits of "
        "the table",
        choices=GRIDS,
    )
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale: str = knob(
        "absmax",
        "cover each group (absmax), or search the least error over clipping (clip), or over clipping and sign (search)",
        choices=SCALES,
    )
    norm: float = knob(2.0, "exponent of the error that search minimises", range=(0.5, 8))
    scale_dtype: str = knob(
        "bfloat16",
        "how scales are stored: as floats; int6, int8: integers times a factor for 512 columns; shift4: such a factor "
        "divided by powers of two; e8m0: powers of two; tile16: powers of two that 16 rows share",
        choices=SCALE_KINDS,
    )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_grid(self, name, shape)

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        check_zeros(self, before)
        return self

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        grid = make_grid(self.grid, self.bits, self.symmetric)
        return [grid.spec_of(shape, self.group_size, scales_of(self.grid, self.scale_dtype))]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        stored = rtn(
            W,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            grid=self.grid,
            scale=self.scale,
            norm=self.norm,
            scale_dtype=scales_of(self.grid, self.scale_dtype),
        )
        return [stored]
