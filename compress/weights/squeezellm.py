"""SqueezeLLM (Kim et al., 2023, arXiv:2306.07629): a table for every row, by k-means, and a few outliers that are
stored separately."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import CsrWeight, Format, RowTables
from compress.formats.csr import entry_count, largest
from compress.grid.kmeans import kmeans_rows
from compress.method import knob
from compress.walk.statistics import LayerStatistics
from compress.weights.by_fisher import FisherMethod


@dataclass(frozen=True, kw_only=True)
class SqueezeLLM(FisherMethod):
    """Gives each row a table of its own by k-means, weighted by squared gradients, and stores outliers beside it.

    Source: arXiv:2306.07629, equation 4 (k-means by the diagonal Fisher matrix) and section 4.2 (dense and sparse).
    Deviation: the sparse part holds the difference between an outlier and its table entry, so that the parts add up.
    """

    name: ClassVar[str] = "squeezellm"
    source: ClassVar[str] = "arXiv:2306.07629"
    working_set: ClassVar[tuple[float, float]] = (24.0, 0.0)

    bits: int = knob(
        4, "bits per weight, which is stored as an index into the table of its row", choices=(2, 3, 4), describes=True
    )
    sensitive: float = knob(
        0.0005,
        "share of the weights that are stored apart because their squared gradients F are the largest",
        range=(0, 0.1),
    )
    largest: float = knob(
        0.004, "share of the weights that are stored apart because their magnitudes are the largest", range=(0, 0.1)
    )

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        parts = [RowTables.spec_of(shape, bits=self.bits, least=self.bits)]
        entries = entry_count(self.sensitive, shape) + entry_count(self.largest, shape)
        return [*parts, CsrWeight.spec_of(shape, entries=entries)] if entries else parts

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        F = self.fisher_of(statistics, W)
        apart = outlying(W, F, self.sensitive, self.largest)
        codes, table = kmeans_rows(W, F.masked_fill(apart, 0), 1 << self.bits)
        dense = RowTables.from_codes(codes, [table])
        return [dense, CsrWeight.from_chosen(W - dense.dequantize(), apart)] if apart.any() else [dense]


def outlying(W: Tensor, F: Tensor, sensitive: float, biggest: float) -> Tensor:
    """Mask [out, in] of the share of the largest F, and then of the largest magnitudes among the others."""
    apart = largest(F, sensitive)
    return apart | largest(W.abs().masked_fill(apart, -1), biggest)
