"""Rounding to nearest: a method of its own, and what others fall back to or are compared with."""

from torch import Tensor

from compress.formats import IntGroup
from compress.grid import integer as grid


def rtn(
    W: Tensor,
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool = True,
    scale: str = "absmax",
    norm: float = 2.0,
    scale_dtype: str = "bfloat16",
    importance: Tensor | None = None,
) -> IntGroup:
    """Round W [out, in] to nearest on a grid per group of columns.

    Args:
        scale: "absmax" covers each group; "clip" and "search" choose by the error (see `grid.integer.search`).
        importance: [in], weights of the columns in that error, diag(H) for instance; None for equal ones.
    """
    out, columns = W.shape
    group_size = columns if group_size == -1 else group_size
    groups = W.float().view(out, -1, group_size)
    weights = None if importance is None else importance.view(-1, group_size)
    s, zero = grid.choose(groups, bits, symmetric, scale_dtype, how=scale, importance=weights, norm=norm)
    codes = grid.quantize(groups, s[..., None], zero[..., None], bits).view(out, columns)
    return IntGroup.from_codes(
        codes, s, None if symmetric else zero, bits=bits, group_size=group_size, scale_dtype=scale_dtype
    )
