"""A weight with few entries that are not 0, in compressed rows, which take fewer bytes than a mask with a bit per
weight."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.stored import INDICES, Stored, check_range
from kernels.csr_matmul import Csr, csr_matmul, to_csr
from kernels.csr_matmul.layout import offsets_of, rows_of


class CsrWeight(AsStored):
    """The stored entries, row by row and from left to right.

    Buffers: `values` float16 [entries], `columns` [entries] and `counts` [out], entries of each row, int16 or int32
    where rows are longer than 32,767. That is 4 bytes an entry and 2 bytes a row. Multiplied in float32.
    """

    name: ClassVar[str] = "csr"
    exact: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], values: Tensor, columns: Tensor, counts: Tensor) -> None:
        super().__init__()
        self.shape = shape
        for name, tensor in (("values", values), ("columns", columns), ("counts", counts)):
            self.register_buffer(name, tensor)

    @classmethod
    def from_chosen(cls, W: Tensor, chosen: Tensor) -> "CsrWeight":
        """Store the entries of W [out, in] that `chosen` [out, in] bool selects; the others become 0."""
        w = to_csr(W, chosen)
        index = index_dtype(w.shape[1])
        return cls(w.shape, w.values.to(torch.float16), w.columns.to(index), w.offsets.diff().to(index))

    def dequantize(self) -> Tensor:
        w = self._csr(self.values.float(), self.columns.int(), offsets_of(self.counts))
        W = torch.zeros(self.shape, device=w.values.device)
        W[rows_of(w), w.columns.long()] = w.values
        return W

    def matmul(self, x: Tensor) -> Tensor:
        return csr_matmul(x, self._csr(self.values_wide, self.columns_wide, self.offsets))

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "values_wide": self.values.float(),
            "columns_wide": self.columns.int(),
            "offsets": offsets_of(self.counts),
        }

    def spec(self) -> dict[str, Any]:
        return self.spec_of(self.shape, entries=len(self.values))

    @classmethod
    def spec_of(cls, shape: tuple[int, int], *, entries: int) -> dict[str, Any]:
        """The `spec()` of a weight of this shape with this number of stored entries."""
        return {"format": cls.name, "shape": list(shape), "entries": entries}

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

    def _csr(self, values: Tensor, columns: Tensor, offsets: Tensor) -> Csr:
        return Csr(values, columns, offsets, self.shape)


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
