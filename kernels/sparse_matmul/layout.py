"""A weight in 16 bits without its zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.int_matmul import unpack_bits


@dataclass(frozen=True)
class SparseRows:
    """W [out, in], of which only some entries are kept.

    mask: uint8 [out, in / 8], low bits first, 1 for an entry that is kept. values: [kept], row by row, left to right,
        bfloat16 or float16. starts: int64 [out + 1], the first value of each row, and their number.
    """

    mask: Tensor
    values: Tensor
    starts: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.mask), 8 * self.mask.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype


def starts_of(mask: Tensor) -> Tensor:
    """The first kept entry of each row of a mask [out, in / 8], and the number of all: int64 [out + 1]."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(unpack_bits(mask, 1, 8 * mask.shape[1]).sum(1, dtype=torch.int64), 0, out=starts[1:])
    return starts
