"""Shared code of the methods that round to a grid, and of those that correct the rounding by the Hessian."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.grid.grids import GRIDS, SCALE_KINDS, check_grid, make_grid, scales_of
from compress.method import knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import BITS


@dataclass(frozen=True, kw_only=True)
class GridMethod(LayerwiseMethod):
    """A method that stores each weight as values of a grid, with a scale for each group of columns."""

    alike_rows: ClassVar[bool] = True

    bits: int = knob(4, "bits per weight; 1 with grid=binary", choices=(1, *BITS), describes=True)
    group_size: int = knob(64, "columns that share a scale; -1 for a whole row", range=(-1, 1 << 20), describes=True)
    grid: str = knob(
        "int",
        "values that a weight may take, times its scale: integers, or a table of numbers; `bits` must be the bits of "
        "the table",
        choices=GRIDS,
    )
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale_dtype: str = knob(
        "bfloat16",
        "how scales are stored: as floats; int6, int8: integers times a factor for 512 columns; shift4: such a factor "
        "divided by powers of two; e8m0: powers of two; tile16: powers of two that 16 rows share",
        choices=SCALE_KINDS,
    )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_grid(self, name, shape)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]] | None:
        grid = make_grid(self.grid, self.bits, self.symmetric)
        return [grid.spec_of(shape, self.group_size, scales_of(self.grid, self.scale_dtype))]

    def aim(self, columns: int) -> dict[str, Any]:
        """The grid and the groups of a weight with this number of columns, as arguments of the mathematics."""
        return {
            "bits": self.bits,
            "group_size": columns if self.group_size == -1 else self.group_size,
            "grid": self.grid,
            "symmetric": self.symmetric,
            "scale_dtype": scales_of(self.grid, self.scale_dtype),
        }


@dataclass(frozen=True, kw_only=True)
class HessianMethod(LayerwiseMethod):
    """A method that corrects later columns for the error of earlier ones, by the Hessian H = 2/n X Xᵀ."""

    stage: ClassVar[str] = "quantize_weights"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram", "starts")

    damp: float = knob(0.01, "damping added to diag(H), as a fraction of its mean", range=(0, 1))
    sink_weight: float = knob(
        64.0,
        "weight in H of each calibration window's first token, to which the later ones attend; 1: as any other token",
        range=(0, 1e6),
    )
    min_tokens: int = knob(
        128, "below this many calibration tokens a linear (an expert) is rounded to nearest", range=(1, 1 << 30)
    )

    def first_tokens(self, statistics: LayerStatistics) -> tuple[Tensor, float] | None:
        """The inputs of the windows' first tokens, and the factor of their Gram matrix for `factorise`, so that these
        tokens count `sink_weight` times in H; None if they count as any other token.

        Deviation from the papers, which count all tokens alike: every later token attends to the first one (an
        attention sink, arXiv:2309.17453), so its error reaches all of them; see seeds/log.md for the effect.
        """
        first, more = statistics.values["starts"], (self.sink_weight - 1) * 2 / max(statistics.tokens, 1)
        return (first, more) if more and len(first) else None
