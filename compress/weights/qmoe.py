"""QMoE (Frantar and Alistarh, 2023, arXiv:2310.16795): three values a row, in less than one bit per weight."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import Format, TernaryWeight
from compress.formats.ternary.words import P0
from compress.method import knob
from compress.walk.hessian import Factor, diagonal_with, factorise
from compress.walk.statistics import LayerStatistics
from compress.weights.on_grid import HessianMethod

BLOCK = 128  # columns whose updates are applied at once to the rest


@dataclass(frozen=True, kw_only=True)
class QMoE(HessianMethod):
    """Rounds each weight to 0 or to one of two values per row, with the correction of GPTQ, in less than a bit."""

    name: ClassVar[str] = "qmoe"
    source: ClassVar[str] = "arXiv:2310.16795"
    working_set: ClassVar[tuple[float, float]] = (6.0, 1.0)

    reach: float = knob(
        1.0,
        "the two values of a row besides 0, as a share of its smallest and largest weight; less than 1 gives less "
        "error, fewer zeros and more bits",
        range=(0.05, 1),
        describes=True,
    )
    p0: float = knob(0.885, "share of zeros for which the dictionary of the code is made", range=P0)
    damp: float = knob(0.1, "damping added to diag(H), as a fraction of its mean", range=(0, 1))

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [TernaryWeight.spec_of(shape, p0=self.p0)]

    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [qmoe(W, None, reach=self.reach, p0=self.p0)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        factor = None
        if statistics.tokens < self.min_tokens:
            statistics.note(f"rounded to nearest: {statistics.tokens} tokens, min_tokens is {self.min_tokens}")
        else:
            factor = self.factor(statistics)
            for text in factor.notes:
                statistics.note(text)
        return [qmoe(W, factor, reach=self.reach, p0=self.p0, keep=statistics.keep)]

    def factor(self, statistics: LayerStatistics) -> Factor:
        """The factor of H, with columns by falling diagonal; the linears that read the same input share it."""
        key = "ternary factor", self.damp, self.sink_weight
        if key not in statistics.shared:
            gram, first = statistics.values["gram"], self.first_tokens(statistics)
            order = diagonal_with(gram, first).argsort(descending=True, stable=True)
            statistics.shared[key] = factorise(gram, self.damp, order, first)
        return statistics.shared[key]


def qmoe(
    W: Tensor, factor: Factor | None, *, reach: float = 1.0, p0: float = 0.885, keep: Tensor | None = None
) -> TernaryWeight:
    """Round W to three values a row so that (W - Ŵ) H (W - Ŵ)ᵀ is small.

    Args:
        W: [out, in].
        factor: of H; None: round to nearest.
        reach: see the knob. p0: of the code's dictionary (`TernaryWeight`).
        keep: [out, in] bool, false for weights that stay 0; None: all are free.

    Source: arXiv:2310.16795, section 3 (GPTQ onto the minimum, 0 and the maximum of each row, damping of a tenth) and
    section 4 (the code). Deviation: columns are taken by falling diag(H), which costs no bits if a row has one grid.
    """
    W = W.float()
    low, high = ((reach * edge).to(torch.bfloat16).float() for edge in (W.amin(1).clamp(max=0), W.amax(1).clamp(min=0)))
    if factor is None:
        return TernaryWeight.from_symbols(_nearest(W, low[:, None], high[:, None]), low, high, p0=p0)
    order = factor.order
    Wt = W.t()[order].contiguous()  # [in, out]: a column of W is a row here, contiguous
    Wt[factor.dead] = 0
    free = None if keep is None else keep.t()[order]
    symbols = torch.empty_like(Wt, dtype=torch.uint8)
    errors = Wt.clone()
    for start in range(0, len(Wt), BLOCK):
        end = min(start + BLOCK, len(Wt))
        U = factor.inverse(start, end)
        weights = factor.updated(Wt, errors, start, end, U)  # [columns of the block, out]
        for i in range(end - start):
            symbol = _nearest(weights[i], low, high)
            if free is not None:
                symbol *= free[start + i]
            q = torch.where(symbol == 2, high, 0.0) + torch.where(symbol == 1, low, 0.0)
            weights[i + 1 :] -= torch.outer(U[i, i + 1 :], (weights[i] - q) / U[i, i])
            errors[start + i] = Wt[start + i] - q
            symbols[start + i] = symbol
    natural = torch.empty_like(symbols)
    natural[order] = symbols
    return TernaryWeight.from_symbols(natural.t(), low, high, p0=p0)


def _nearest(w: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The symbols uint8 of the values nearest to w: 1 for low, at most 0; 2 for high, at least 0; 0 for 0."""
    return (w < low / 2).to(torch.uint8) + 2 * (w > high / 2).to(torch.uint8)
