"""Any-Precision LLM (Park et al., 2024, arXiv:2402.10517): one file that can be loaded at several precisions."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.formats import Format, RowTables
from compress.grid.kmeans import nested_rows
from compress.method import knob
from compress.walk.statistics import LayerStatistics
from compress.weights.by_fisher import FisherMethod


@dataclass(frozen=True, kw_only=True)
class AnyPrecision(FisherMethod):
    """Gives each row nested tables, so that the upper bits of a code are its code in fewer bits.

    Source: arXiv:2402.10517, section 3 (incremental upscaling of a k-means seed, weighted by the Fisher matrix): each
    cluster is cut in two where that gains most. `formats.sizes.row_tables.at_bits` takes a loaded model in fewer bits.
    """

    name: ClassVar[str] = "any_precision"
    source: ClassVar[str] = "arXiv:2402.10517"
    working_set: ClassVar[tuple[float, float]] = (24.0, 0.0)

    bits: int = knob(
        4, "stored bits per weight, the largest precision at which the model can run", choices=(3, 4), describes=True
    )
    seed_bits: int = knob(
        2, "bits of the first table, the smallest precision at which the model can run", choices=(2, 3)
    )

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [RowTables.spec_of(shape, bits=self.bits, least=self.seed_bits)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [RowTables.from_codes(*nested_rows(W, self.fisher_of(statistics, W), self.seed_bits, self.bits))]
