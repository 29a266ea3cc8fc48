"""Rounding to nearest: a method of its own, and the fallback and the baseline of other methods."""

from torch import Tensor

from compress.formats import Format
from compress.grid.grids import make_grid, scale_rule


def rtn(
    W: Tensor,
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool = True,
    grid: str = "int",
    scale: str = "absmax",
    norm: float = 2.0,
    scale_dtype: str = "bfloat16",
    importance: Tensor | None = None,
) -> Format:
    """Round W [out, in] to nearest on a grid per group of columns.

    Args:
        grid: one of `compress.grid.grids.GRIDS`; `symmetric` is for "int" alone.
        scale: "absmax" covers each group; "clip" and "search" choose by the error (see `grid.integer.search`).
        scale_dtype: one of `compress.formats.scales.SCALE_KINDS`.
        importance: [in], weights of the columns in that error, diag(H) for instance; None for equal ones.
    """
    out, columns = W.shape
    group_size = columns if group_size == -1 else group_size
    values, W = make_grid(grid, bits, symmetric), W.float()
    rule = scale_rule(values, scale_dtype, W, group_size)
    groups = W.view(out, -1, group_size)
    weights = None if importance is None else importance.view(-1, group_size)
    s, zero = values.choose(groups, rule.rounded, how=scale, importance=weights, norm=norm)
    codes = values.quantize(groups, s[..., None], zero[..., None]).view(out, columns)
    return values.stored(codes, s, zero, group_size=group_size, rule=rule)
