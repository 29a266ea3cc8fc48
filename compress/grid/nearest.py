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
