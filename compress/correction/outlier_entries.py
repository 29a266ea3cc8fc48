"""Sparse correction of quantisation errors: the few entries with the largest effect, in compressed rows."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compress.correction.base import Correction
from compress.formats import CsrWeight, Format
from compress.formats.csr import entry_count, largest
from compress.method import knob
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Outliers(Correction):
    """Adds to each stored weight the few entries whose correction lowers the error of the layer's output most."""

    name: ClassVar[str] = "outlier_entries"
    source: ClassVar[str] = "arXiv:2306.07629, section 4.2; arXiv:2306.03078"
    working_set: ClassVar[tuple[float, float]] = (10.0, 1.0)

    share: float = knob(0.005, "share of each linear's weights that are corrected", range=(0, 0.5), describes=True)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [CsrWeight.spec_of(shape, entries=entry_count(self.share, shape))]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [outliers(W, self.gram(statistics), share=self.share)]


def outliers(R: Tensor, H: Tensor | None, *, share: float) -> CsrWeight:
    """A share of the entries of R [out, in]: those with the largest diag(H) r².

    Args:
        H: [in, in]; None: the identity.
    """
    gain = R.square() if H is None else R.square() * H.diagonal()
    return CsrWeight.from_chosen(R, largest(gain, share))
