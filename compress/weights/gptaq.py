"""GPTAQ (Li et al., 2025, arXiv:2504.02692): GPTQ whose targets are the outputs of the linears in the unquantised
model."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.formats import Format
from compress.method import knob
from compress.walk.hessian import Factor
from compress.walk.statistics import LayerStatistics
from compress.weights.gptq import GPTQ


@dataclass(frozen=True, kw_only=True)
class GPTAQ(GPTQ):
    """GPTQ that also corrects the error of the earlier blocks: each layer's target is its output in the unquantised
    model."""

    name: ClassVar[str] = "gptaq"
    source: ClassVar[str] = "arXiv:2504.02692"
    statistics: ClassVar[tuple[str, ...]] = ("gram", "starts", "cross", "cross_starts")
    working_set: ClassVar[tuple[float, float]] = (9.0, 4.0)

    alpha: float = knob(0.25, "share of the earlier blocks' error that is corrected; 0: the same as GPTQ", range=(0, 1))

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        if not len(statistics.values["cross"]):
            statistics.note("the inputs of this linear in the unquantised model are unknown, so this is plain GPTQ")
        elif statistics.tokens >= self.min_tokens:
            P = statistics.shared.get(key := ("gptaq", *self.key(W)))
            if P is None:
                P = statistics.shared[key] = correction(self.cross(statistics), self.factor(W, statistics))
            W = torch.addmm(W.float(), W.float(), P, alpha=self.alpha)
        return super().solve(W, statistics)

    def cross(self, statistics: LayerStatistics) -> Tensor:
        """C [in, in] = (2/n) Σ (x̃ - x) xᵀ with the first tokens counted as often as in H; x̃: of the unquantised
        model."""
        C, first = statistics.values["cross"], self.first_tokens(statistics)
        if first is None or not len(statistics.values["cross_starts"]):
            return C
        rows, weight = first
        return torch.addmm(C, statistics.values["cross_starts"].t(), rows, alpha=weight)


def correction(C: Tensor, factor: Factor) -> Tensor:
    """P [in, in] such that GPTQ has to quantise W (I + P), so that Ŵ X comes near to W X̃.

    Args:
        C: [in, in], (X̃ - X) Xᵀ up to the factor of H: X the input of the linear, X̃ its input in the unquantised
            model.
        factor: of H = X Xᵀ.

    Source: arXiv:2504.02692, algorithm 1: P = ((C Uᵀ) ∘ M) U with H⁻¹ = Uᵀ U and M strictly upper triangular, in the
    order of the columns. Deviations: the paper adds w_j P_j when column j is reached, with w_j after the updates before
    it; here w_j is the original column, whose product with X̃ is the target, so that the whole correction can be added
    before the first column. Systems with R = U⁻¹ are solved, because `Factor` holds R.
    """
    order, R = factor.order, factor.R
    M = torch.linalg.solve_triangular(R.t(), C[order][:, order], upper=False, left=False).triu_(1)  # C Uᵀ
    P = torch.linalg.solve_triangular(R, M, upper=True, left=False)
    natural = torch.empty_like(P)
    natural[order[:, None], order[None]] = P
    return natural
