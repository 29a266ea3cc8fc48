"""Low-rank correction of quantisation errors: LoRC (ZeroQuant-FP, arXiv:2307.09782), LQER (arXiv:2402.02446), EoRA
(arXiv:2410.21271)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.correction.base import Correction
from compress.formats import Format, LowRankWeight
from compress.formats.low_rank import BITS, rounded
from compress.method import knob
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class LowRank(Correction):
    """Adds to each stored weight the low-rank matrix that corrects its quantisation error best.

    Source: LoRC (arXiv:2307.09782, section 3) takes the singular vectors of W - Ŵ (weights=none); LQER
    (arXiv:2402.02446, equation 9) scales its columns by the mean magnitudes of the inputs (scale); EoRA
    (arXiv:2410.21271, algorithm 1) by a square root of the Gram matrix, which minimises the error of the layer's output
    (hessian). Deviations: the first tokens' weight in H, and int8 factors that are rounded to nearest, where the second
    factor is fitted to the rounded first one. If a later method of the recipe rounds the inputs of linears, the
    low-rank part still reads them in 16 bits, before they are rounded.
    """

    name: ClassVar[str] = "low_rank"
    source: ClassVar[str] = "arXiv:2307.09782, arXiv:2402.02446, arXiv:2410.21271"
    statistics: ClassVar[tuple[str, ...]] = ("gram", "starts", "absmean")
    working_set: ClassVar[tuple[float, float]] = (8.0, 6.0)

    rank: int = knob(8, "columns of the left factor", range=(1, 1 << 14), describes=True)
    weights: str = knob(
        "hessian",
        "errors count by the inputs' Gram matrix (hessian, as EoRA), by their mean magnitudes (scale, as LQER), "
        "or all alike (none, as LoRC)",
        choices=("hessian", "scale", "none"),
    )
    bits: int = knob(16, "bits per entry of the factors", choices=BITS)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [LowRankWeight.spec_of(shape, rank=min(self.rank, *shape), bits=self.bits)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [low_rank(W, self.weighting(statistics), rank=self.rank, bits=self.bits)]

    def weighting(self, statistics: LayerStatistics) -> Tensor | None:
        """H [in, in], or its diagonal [in], by which errors are weighted; None if all have the same weight."""
        if self.weights == "none" or not statistics.tokens:
            return None
        return self.gram(statistics) if self.weights == "hessian" else statistics.values["absmean"].square()


def low_rank(R: Tensor, H: Tensor | None, *, rank: int, bits: int = 16) -> LowRankWeight:
    """The low-rank matrix Δ that minimises tr((R - Δ) H (R - Δ)ᵀ).

    With S any square root of H and U the first left singular vectors of R S, it is U Uᵀ R (Eckart-Young): S need not be
    inverted.

    Args:
        R: [out, in], the error to correct.
        H: [in, in], positive semidefinite; its diagonal [in]; or None: the identity.
        bits: for the factors' entries, 16 or 8.
    """
    rank = min(rank, *R.shape)
    U = left_vectors(R, H, rank)
    left, right = U, U.t() @ R
    if bits < 16:
        scale, codes = rounded(right)
        right = scale * codes
        left = fitted_left(R, H, right)
    return LowRankWeight.from_factors(left, right, bits=bits)


def left_vectors(R: Tensor, H: Tensor | None, rank: int) -> Tensor:
    """The first left singular vectors [out, rank] of R S, where S Sᵀ = H, by the smaller of its two Gram matrices."""
    out, columns = R.shape
    if out <= columns:
        return torch.linalg.eigh((weighted(R, H) @ R.t()).double()).eigenvectors[:, -rank:].flip(1).to(R.dtype)
    E = R if H is None else R * H.sqrt() if H.dim() == 1 else R @ square_root(H)
    V = torch.linalg.eigh((E.t() @ E).double()).eigenvectors[:, -rank:].flip(1).to(R.dtype)
    return torch.linalg.qr(E @ V).Q


def square_root(H: Tensor) -> Tensor:
    """S [in, in] with S Sᵀ = H, up to a millionth of H's mean diagonal."""
    damped = H.double()
    damped.diagonal().add_(1e-6 * damped.diagonal().mean())
    return torch.linalg.cholesky(damped).to(H.dtype)


def weighted(R: Tensor, H: Tensor | None) -> Tensor:
    """R H [out, in]."""
    return R if H is None else R * H if H.dim() == 1 else R @ H


def fitted_left(R: Tensor, H: Tensor | None, right: Tensor) -> Tensor:
    """The left factor [out, rank] that minimises the error for this right factor [rank, in]."""
    B = weighted(right, H).double()  # [rank, in]
    inverse = torch.linalg.pinv(B @ right.double().t(), hermitian=True)
    return (R.double() @ B.t() @ inverse).to(R.dtype)
