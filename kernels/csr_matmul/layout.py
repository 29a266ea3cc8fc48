"""Compressed rows: the layout of a weight with few nonzero entries."""

from typing import NamedTuple

import torch
from torch import Tensor


class Csr(NamedTuple):
    """A weight [out, in] of n entries, row by row and from left to right within a row.

    values: float32 [n]. columns: int32 [n]. offsets: int32 [out + 1]; row i has the entries offsets[i] to
    offsets[i + 1], the last one excluded.
    """

    values: Tensor
    columns: Tensor
    offsets: Tensor
    shape: tuple[int, int]  # (out, in)


def to_csr(W: Tensor, chosen: Tensor) -> Csr:
    """The entries of W [out, in] where `chosen` [out, in] bool is true; the others count as 0."""
    rows, columns = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=W.shape[0])
    return Csr(W[rows, columns].float(), columns.int(), offsets_of(counts), (W.shape[0], W.shape[1]))


def offsets_of(counts: Tensor) -> Tensor:
    """Offsets int32 [out + 1] for the numbers of entries of the rows, `counts` [out]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def rows_of(w: Csr) -> Tensor:
    """The row of each entry, int64 [n]."""
    counts = w.offsets.diff().long()
    return torch.arange(w.shape[0], device=counts.device).repeat_interleave(counts)
