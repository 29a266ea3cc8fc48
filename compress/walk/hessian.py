"""The factor of the Hessian that the second-order methods share (GPTQ; SparseGPT)."""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMP_STEPS = 6  # number of times that the damping is raised tenfold before an error
ROWS = 1024  # rows of H that are permuted at once


@dataclass(frozen=True)
class Factor:
    """H = R Rᵀ with R upper triangular, for H with its columns in `order`; R is never inverted as a whole.

    GPTQ is written with U, where H⁻¹ = Uᵀ U, so that U = R⁻¹, and pushes each error of quantisation on to all later
    columns. The same updates can be pulled when columns are reached (`updated`), as in LDLQ (Chee et al., 2023,
    arXiv:2307.13304, theorem 6, which proves both alike); that takes R, and of U only its blocks on the diagonal, which
    are the inverses of R's. Inverting R took longer than all other work together on wide matrices.

    L: [in, in] float32, lower triangular: R with its rows and columns in reverse, as the Cholesky routine leaves it.
    order: [in] permutation; dead: [in] bool, columns (in that order) whose input was always 0; damp: fraction of
    mean(diag H) that was added; notes: the measures that the factorisation needed.
    """

    L: Tensor
    order: Tensor
    dead: Tensor
    damp: float
    notes: tuple[str, ...]

    @property
    def R(self) -> Tensor:
        """The whole of R [in, in], made anew."""
        return self.L.flip(0, 1)

    @property
    def diagonal(self) -> Tensor:
        """U_ii = 1 / R_ii, [in]."""
        return self.L.diagonal().flip(0).reciprocal()

    def inverse(self, start: int, end: int) -> Tensor:
        """The block [start:end, start:end] of U, [end - start, end - start]."""
        n = len(self.L)
        block = self.L[n - end : n - start, n - end : n - start].flip(0, 1)
        eye = torch.eye(end - start, device=block.device)
        return torch.linalg.solve_triangular(block, eye, upper=True)

    def updated(self, W: Tensor, errors: Tensor, start: int, end: int, U: Tensor | None = None) -> Tensor:
        """The columns [start, end) of the weight that best compensate the errors of the columns before `start`.

        They minimise (W - Ŵ) H (W - Ŵ)ᵀ with the columns before `start` fixed and all others free: the same values that
        result from pushing every error on to the later columns.

        Args:
            W: [in, out], the original weight with a column in each row, in `order`.
            errors: [in, out], W - Ŵ in its first `start` rows; the others are not read.
            U: `inverse(start, end)`, if it is known.

        Returns:
            [end - start, out], not a view.
        """
        if not start:
            return W[:end].clone()
        n = len(self.L)
        panel = self.L[n - start :, n - end : n - start].flip(0, 1)  # R[:start, start:end]
        U = self.inverse(start, end) if U is None else U
        return torch.addmm(W[start:end], U.t(), panel.t() @ errors[:start])


def factorise(H: Tensor, damp: float, order: Tensor, more: tuple[Tensor, float] | None = None) -> Factor:
    """Factorise H [in, in], damped by `damp` * mean(diag H).

    With P the reversal of rows, P H P = L Lᵀ gives H = R Rᵀ with R = P L P upper triangular: one Cholesky. It needs the
    memory of one more matrix of the size of H.

    Args:
        order: [in] permutation of the columns.
        more: rows [n, in] and a factor: factor * rowsᵀ rows is added to H, which stays as it is.

    Raises:
        ValueError: H holds NaN or infinity, or cannot be factorised at any damping tried.
    """
    diagonal = diagonal_with(H, more)[order]
    if not torch.isfinite(H.sum()) and not torch.isfinite(H).all():
        raise ValueError("the Hessian holds NaN or infinity: the calibration set gives activations that are not finite")
    notes = []
    dead = diagonal == 0
    mean = diagonal.mean().item() or 1.0  # over live and dead columns, as in the paper
    if dead.any():
        notes.append(f"{int(dead.sum())} input columns are always 0: their weights were set to 0")
    tried, reverse = damp, order.flip(0)
    for _ in range(DAMP_STEPS):
        L = _ordered(H, reverse).t()  # H is symmetric, and LAPACK copies what is not column-major
        if more is not None:
            rows = more[0][:, reverse]
            L.addmm_(rows.t(), rows, alpha=more[1])
        L.diagonal()[dead.flip(0)] = mean
        L.diagonal().add_(tried * mean)
        info = torch.empty(0, dtype=torch.int32, device=H.device)
        torch.linalg.cholesky_ex(L, out=(L, info))
        if info.item() == 0 and torch.isfinite(L.diagonal()).all():
            if tried != damp:
                notes.append(f"damping raised from {damp:g} to {tried:g}: the Hessian was not positive definite")
            return Factor(L, order, dead, tried, tuple(notes))
        tried = max(10 * tried, 1e-3)
    raise ValueError(
        f"`damp` (={damp}): the Hessian cannot be factorised even with {tried:g}; use more calibration tokens"
    )


def diagonal_with(H: Tensor, more: tuple[Tensor, float] | None) -> Tensor:
    """diag(H) [in] with the addition of `more`, as in `factorise`."""
    return H.diagonal() if more is None else H.diagonal() + more[1] * more[0].square().sum(0)


def _ordered(H: Tensor, order: Tensor) -> Tensor:
    """H with its rows and columns in this order, in new memory."""
    ordered = torch.empty_like(H)
    for start in range(0, len(H), ROWS):
        ordered[start : start + ROWS] = H[order[start : start + ROWS]][:, order]
    return ordered
