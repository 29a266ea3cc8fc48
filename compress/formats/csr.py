"""A weight with few entries that are not 0, in compressed rows, which take fewer bytes than a mask with a bit per
weight."""

import math
import warnings
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.stored import INDICES, Stored, check_range
from kernels.registry import ran


class CsrWeight(AsStored):
    """The stored entries, row by row and from left to right.

    Buffers: `values` float16 [entries], `columns` [entries] and `counts` [out], entries of each row, int16 or int32
    where rows are longer than 32,767. That is 4 bytes an entry and 2 bytes a row. Multiplied in float32 by torch's own
    product of compressed rows, which is MKL's on a CPU and cuSPARSE's on a GPU.
    """

    name: ClassVar[str] = "csr"
    settings: ClassVar[tuple[str, ...]] = ("entries",)
    exact: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], values: Tensor, columns: Tensor, counts: Tensor) -> None:
        super().__init__()
        self.shape = shape
        for name, tensor in (("values", values), ("columns", columns), ("counts", counts)):
            self.register_buffer(name, tensor)

    @classmethod
    def from_chosen(cls, W: Tensor, chosen: Tensor) -> "CsrWeight":
        """Store the entries of W [out, in] that `chosen` [out, in] bool selects; the others become 0."""
        rows, columns = chosen.nonzero(as_tuple=True)
        counts, index = torch.bincount(rows, minlength=W.shape[0]), index_dtype(W.shape[1])
        return cls((W.shape[0], W.shape[1]), W[rows, columns].half(), columns.to(index), counts.to(index))

    def dequantize(self) -> Tensor:
        W = torch.zeros(self.shape, device=self.values.device)
        rows = torch.arange(self.shape[0], device=W.device).repeat_interleave(self.counts.long())
        W[rows, self.columns.long()] = self.values.float()
        return W

    def matmul(self, x: Tensor) -> Tensor:
        ran("csr_matmul", "library")
        return _csr_matmul(x, self.values_wide, self.columns_wide, self.offsets, self.shape[0])

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        offsets = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).int()
        return {"values_wide": self.values.float(), "columns_wide": self.columns.int(), "offsets": offsets}

    @property
    def entries(self) -> int:
        """The number of stored entries."""
        return len(self.values)

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return (32 * spec["entries"] + 16 * spec["shape"][0]) / math.prod(spec["shape"])

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "CsrWeight":
        stored = Stored(spec, tensors)
        values = stored.tensor("values", (None,), torch.float16)
        columns = stored.tensor("columns", (len(values),), INDICES)
        check_range("columns", columns, stored.columns)
        return cls(stored.shape, values, columns, stored.counted("counts", len(values)))


@torch.library.custom_op("workbench::csr_matmul", mutates_args=())  # the compiler cannot trace sparse tensors
def _csr_matmul(x: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, out_features: int) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, multiplied in float32: MKL does not support 16-bit values.

    Row i of W has the entries from offsets[i] to offsets[i + 1], the last one excluded.
    """
    y = x.new_zeros(*x.shape[:-1], out_features)
    if not x.numel() or not len(values):
        return y
    _warn_nobody()
    W = torch.sparse_csr_tensor(offsets, columns, values, (out_features, x.shape[-1]), check_invariants=False)
    flat = x.reshape(-1, x.shape[-1]).float()
    if len(flat) == 1:
        return (W @ flat[0]).view(y.shape).to(x.dtype)
    columns_of_x = flat.contiguous().t()  # [in, tokens]: always this layout, so that one of cuSPARSE's loops runs
    return y.copy_((W @ columns_of_x).t().reshape(y.shape))


@_csr_matmul.register_fake
def _(x, values, columns, offsets, out_features):
    return x.new_empty(*x.shape[:-1], out_features)


@cache
def _warn_nobody() -> None:
    """Suppress torch's warning that compressed rows are in beta state, about which our users can do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1))


def index_dtype(columns: int) -> torch.dtype:
    """The dtype in which column numbers of rows of this length are stored."""
    return torch.int16 if columns <= torch.iinfo(torch.int16).max else torch.int32


def entry_count(share: float, shape: tuple[int, int]) -> int:
    """The number of entries in a share of a weight [out, in]."""
    return round(share * shape[0] * shape[1])


def largest(scores: Tensor, share: float) -> Tensor:
    """Mask [out, in] of the share of the entries with the largest scores [out, in], `entry_count` of them."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    chosen[scores.flatten().topk(entry_count(share, (scores.shape[0], scores.shape[1]))).indices] = True
    return chosen.view_as(scores)
