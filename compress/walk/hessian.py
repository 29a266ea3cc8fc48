"""The factor of the inverse Hessian that the second-order methods share (GPTQ; SparseGPT)."""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMP_STEPS = 6  # times that the damping is raised tenfold before giving up


@dataclass(frozen=True)
class Factor:
    """H⁻¹ = Uᵀ U with U upper triangular, for H with its columns in `order`.

    U: [in, in] float32; order: [in] permutation; dead: [in] bool, columns (in that order) whose input was always 0;
    damp: fraction of mean(diag H) that was added; notes: what had to be done to get there.
    """

    U: Tensor
    order: Tensor
    dead: Tensor
    damp: float
    notes: tuple[str, ...]


def factorise(H: Tensor, damp: float, order: Tensor) -> Factor:
    """Factorise H [in, in], damped by `damp` * mean(diag H).

    With P the reversal of rows, P H P = L Lᵀ gives H = R Rᵀ with R = P L P upper triangular, so U = R⁻¹: one Cholesky
    and one triangular inverse, where inverting H first would take two Choleskys and lose digits.

    Raises:
        ValueError: H holds NaN or infinity, or cannot be factorised at any damping tried.
    """
    if not torch.isfinite(H).all():
        raise ValueError("the Hessian holds NaN or infinity: the calibration set gives activations that are not finite")
    notes = []
    H = H[order][:, order].clone()
    diagonal = H.diagonal()
    dead = diagonal == 0
    mean = diagonal.mean().item() or 1.0
    diagonal[dead] = mean
    if dead.any():
        notes.append(f"{int(dead.sum())} input columns are always 0: their weights were set to 0")
    tried = damp
    for _ in range(DAMP_STEPS):
        flipped = H.flip(0, 1)
        flipped.diagonal().add_(tried * mean)
        L, info = torch.linalg.cholesky_ex(flipped)
        if info.item() == 0:
            eye = torch.eye(len(H), device=H.device)
            U = torch.linalg.solve_triangular(L.flip(0, 1), eye, upper=True)
            if torch.isfinite(U).all():
                if tried != damp:
                    notes.append(f"damping raised from {damp:g} to {tried:g}: the Hessian was not positive definite")
                return Factor(U, order, dead, tried, tuple(notes))
        tried = max(10 * tried, 1e-3)
    raise ValueError(
        f"`damp` (={damp}): the Hessian cannot be factorised even with {tried:g}; use more calibration tokens"
    )
