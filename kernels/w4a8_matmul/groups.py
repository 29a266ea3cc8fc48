"""The columns that share a scale of the weight and a step of the activations, and the support by implementations."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul import Packed
from kernels.int_matmul.panels import UNIT, WORD, in_planes
from kernels.lut_matmul import Codebook

MOST_COLUMNS = 1 << 16  # in a group: 2^16 products of at most 2^15 are below 2^31
SHORTEST = 64  # least columns of a group: the tensor cores multiply half of them, the columns of one nibble, at once


def common_group(w: Packed | Codebook, x_group: int | None) -> int:
    """The number of columns over which codes are summed as integers: they share a scale of W and a step of x."""
    return min(w.group_size, x_group or w.shape[1])


def check_groups(w: Packed | Codebook, x_group: int | None) -> None:
    """ValueError if groups of columns of x and W do not nest, or if x's do not divide `in`."""
    if x_group is None:
        return
    if x_group < 1 or w.shape[1] % x_group:
        raise ValueError(f"`x_group` (={x_group}) must divide in_features (={w.shape[1]})")
    if x_group % w.group_size and w.group_size % x_group:
        raise ValueError(f"`x_group` (={x_group}) must divide the weight's group_size (={w.group_size}) or a multiple")


def holds_integers(table: Tensor) -> bool:
    """Are these values integers that fit in a byte, so that products with them can be summed as integers?"""
    return table.dim() == 1 and bool(((table == table.round()) & (table.abs() <= 127)).all())


def native_takes(w: Packed | Codebook, x_group: int | None) -> bool:
    """Are these panels in groups of whole units? (A unit of bit planes has 16 columns, any other 8.) Tables must have
    16 values, all integers."""
    if isinstance(w, Codebook) and (w.bits != 4 or w.codes.dtype != torch.int32):
        return False
    group = common_group(w, x_group)
    unit = UNIT if in_planes(w.bits, w.group_size) else WORD
    return w.layout == "panels" and w.group_size % WORD == 0 and group % unit == 0 and group <= MOST_COLUMNS


def decoded_once(x: Tensor, w: Packed | Codebook) -> bool:
    """Are these so many tokens that the C++ kernel decodes the weight to bytes for all of them? A byte cannot hold an
    8-bit code minus a zero point."""
    return x.numel() > native.FEW_ROUNDED * w.shape[1] and (isinstance(w, Codebook) or w.bits < 8 or w.zero is None)


def tiles_take(x: Tensor, w: Packed | Codebook, x_group: int | None) -> bool:
    """Would a CPU with AMX multiply these in tiles of bytes?"""
    return x.dtype == torch.bfloat16 and x_group is None and decoded_once(x, w)


def triton_reads(w: Packed | Codebook, x_group: int | None) -> bool:
    """Are these rows of symmetric nibbles in groups that the Triton kernel supports?"""
    group = common_group(w, x_group)
    integers = isinstance(w, Packed) and w.zero is None
    return integers and w.layout == "rows" and w.bits == 4 and group % SHORTEST == 0
