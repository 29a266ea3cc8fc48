"""Round to nearest: the baseline of every weight quantiser, on the same grid and in the same format."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.formats import Format, IntGroup
from compress.grid import integer as grid
from compress.method import LayerwiseMethod, knob
from compress.pruning.base import stored_like
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import BITS


@dataclass(frozen=True, kw_only=True)
class RTN(LayerwiseMethod):
    """Each weight to the nearest point of its group's grid. Needs no calibration."""

    name: ClassVar[str] = "rtn"
    stage: ClassVar[str] = "quantize_weights"
    strength: ClassVar[str] = "bits"
    source: ClassVar[str] = "the baseline of arXiv:2210.17323"

    bits: int = knob(4, "bits per weight", choices=BITS)
    group_size: int = knob(64, "columns that share a scale; -1 for a whole row", range=(-1, 1 << 20))
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale: str = knob(
        "absmax",
        "cover each group (absmax) or search the clipping of least error (search)",
        choices=("absmax", "search"),
    )
    norm: float = knob(2.0, "exponent of the error that search minimises", range=(0.5, 8))
    scale_dtype: str = knob("bfloat16", "how scales are stored", choices=tuple(grid.SCALE_DTYPES))

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_group_size(self.group_size, name, shape)

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        plain = rtn(
            W,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            scale=self.scale,
            norm=self.norm,
            scale_dtype=self.scale_dtype,
        )
        return [stored_like(statistics.stored, plain)]  # 0 lies on every grid


def rtn(
    W: Tensor,
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool = True,
    scale: str = "absmax",
    norm: float = 2.0,
    scale_dtype: str = "bfloat16",
) -> IntGroup:
    """Round W [out, in] to nearest on a grid per group of columns."""
    out, columns = W.shape
    group_size = columns if group_size == -1 else group_size
    groups = W.float().view(out, -1, group_size)
    if scale == "search":
        s, zero = grid.search(groups, bits, symmetric, scale_dtype, norm=norm)  # [out, groups]
    else:
        s, zero = grid.absmax(groups, bits, symmetric, scale_dtype)
    codes = grid.quantize(groups, s[..., None], zero[..., None], bits).view(out, columns)
    return IntGroup.from_codes(
        codes, s, None if symmetric else zero, bits=bits, group_size=group_size, scale_dtype=scale_dtype
    )


def check_group_size(group_size: int, name: str, shape: tuple[int, int]) -> None:
    """Raise ValueError unless `group_size` divides the rows of this weight; say which sizes near it would."""
    columns = shape[1]
    if group_size == -1 or (group_size > 0 and columns % group_size == 0):
        return
    divisors = [d for d in range(8, columns + 1) if columns % d == 0]
    near = sorted(sorted(divisors, key=lambda d: abs(d - group_size))[:3])
    raise ValueError(
        f"`group_size` (={group_size}) must divide in_features (={columns}) of {name}; "
        f"divisors near it: {', '.join(map(str, near)) or columns}; -1 takes whole rows"
    )
