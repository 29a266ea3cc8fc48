"""A second bit for the columns whose errors weigh most (BiLLM, Huang et al., 2024, arXiv:2402.04291)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.correction.base import Correction
from compress.formats import CodebookGroup, Columns, Format
from compress.grid.grids import FAINTEST
from compress.grid.tables import TABLES
from compress.method import knob
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class SalientSigns(Correction):
    """Adds to a few columns of each stored weight the signs of its error, with a scale per row: a second bit for them.

    Source: BiLLM's binary residual approximation of salient weights. Behind `gptq(bits=1, grid=binary)` it is the
    paper's W = a B + a' B' on salient columns. Deviations: columns are chosen by how much a change of each alone would
    lower the error of the layer's output, not by w² / diag(H⁻¹)²; signs and scales are those of the best change of the
    chosen columns, because the error itself is compensated in other columns; the columns that are not chosen are not
    split by magnitude; and a row has one scale for all chosen columns.
    """

    name: ClassVar[str] = "salient_signs"
    source: ClassVar[str] = "arXiv:2402.04291"
    working_set: ClassVar[tuple[float, float]] = (6.0, 1.0)

    share: float = knob(0.1, "share of each linear's columns that get a second bit", range=(0, 0.5), describes=True)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        out, columns = shape
        count = column_count(self.share, columns)
        return [Columns.spec_of(shape, CodebookGroup.spec_of((out, count), bits=1, group_size=count))]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [salient_signs(W, self.gram(statistics), share=self.share)]


def column_count(share: float, columns: int) -> int:
    """The number of columns that a share is, at least 1."""
    return max(1, round(share * columns))


def salient_signs(R: Tensor, H: Tensor | None, *, share: float) -> Columns:
    """Signs Δ in a share of the columns of R [out, in], with a scale per row, that lower tr((R - Δ) H (R - Δ)ᵀ).

    With (R H)_S H_SS⁻¹, the best change of the chosen columns S, B are its signs, and a row's scale is the best one for
    its signs, b (R H)_S / b H_SS bᵀ, so that no row's error rises.

    Args:
        H: [in, in], positive semidefinite; None: the identity.
    """
    count = column_count(share, R.shape[1])
    RH = R if H is None else R @ H  # [out, in]
    gain = RH.square().sum(0) / (torch.ones_like(R[0]) if H is None else H.diagonal().clamp(min=FAINTEST))
    chosen = torch.zeros(R.shape[1], dtype=torch.bool, device=R.device)
    chosen[gain.topk(count).indices] = True
    falls = RH[:, chosen].double()  # [out, count]
    own = torch.eye(count, dtype=torch.double, device=R.device) if H is None else H[chosen][:, chosen].double()
    best = torch.linalg.solve(damped(own), falls.t()).t()
    codes = (best > 0).to(torch.uint8)
    B = codes.double() * 2 - 1  # [out, count]
    energy = ((B @ own) * B).sum(1)
    scale = torch.where(energy > 0, (B * falls).sum(1) / energy.clamp(min=FAINTEST), 0.0).float()
    scale = torch.where(scale.abs() < FAINTEST, FAINTEST, scale)
    table = TABLES["binary"].table.to(R.device)
    inner = CodebookGroup.from_codes(codes, table, scale[:, None], group_size=count, scale_dtype="bfloat16")
    return Columns(inner, chosen)


def damped(H: Tensor) -> Tensor:
    """H with a millionth of its mean diagonal added to it."""
    return H + 1e-6 * H.diagonal().mean().clamp(min=FAINTEST) * torch.eye(len(H), dtype=H.dtype, device=H.device)
