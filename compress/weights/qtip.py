"""QTIP (Tseng et al., 2024, arXiv:2406.11235): weights as walks through a trellis, corrected as GPTQ does."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import Format, TrellisWeight
from compress.formats.trellis import signs_for, turn
from compress.method import knob
from compress.walk.hessian import Factor, factorise
from compress.walk.statistics import LayerStatistics
from compress.weights.on_grid import HessianMethod
from kernels.trellis_matmul import BITS, STATES, UNIT, length_for, pack_symbols, values, viterbi, walk_states

BLOCK = 128  # columns whose updates are applied at once to the rest


@dataclass(frozen=True, kw_only=True)
class QTIP(HessianMethod):
    """Rotates the inputs, and stores each column as walks through a trellis, corrected for the columns before it."""

    name: ClassVar[str] = "qtip"
    source: ClassVar[str] = "arXiv:2406.11235"
    working_set: ClassVar[tuple[float, float]] = (10.0, 3.0)
    alike_rows: ClassVar[bool] = True

    bits: int = knob(3, "bits per weight", choices=BITS, describes=True)
    states: int = knob(
        14, "bits of a trellis state: two more lower the error by 2 to 6 %, for 4 times the work", choices=STATES
    )
    min_tokens: int = knob(
        128, "below this many calibration tokens a linear (an expert) is stored without correction", range=(1, 1 << 30)
    )
    seed: int = knob(0, "seed of the random signs", range=(0, 1 << 30))

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [TrellisWeight.spec_of(shape, bits=self.bits, states=self.states)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        signs = signs_for(W.shape[1], self.seed).to(W.device)
        factor = None
        if statistics.tokens < self.min_tokens:
            statistics.note(f"not corrected: {statistics.tokens} tokens, min_tokens is {self.min_tokens}")
        else:
            factor = self.factor(statistics, signs)
            for text in factor.notes:
                statistics.note(text)
        return [qtip(W, factor, signs, bits=self.bits, states=self.states)]

    def factor(self, statistics: LayerStatistics, signs: Tensor) -> Factor:
        """The factor of the Hessian of the rotated inputs; the linears that read the same input share it."""
        key = "rotated factor", self.damp, self.sink_weight, self.seed
        if key not in statistics.shared:
            H = turn(turn(statistics.values["gram"], signs).t().contiguous(), signs)
            first = self.first_tokens(statistics)
            first = first and (turn(first[0], signs), first[1])
            statistics.shared[key] = factorise(H, self.damp, torch.arange(len(H), device=H.device), first)
        return statistics.shared[key]


def qtip(W: Tensor, factor: Factor | None, signs: Tensor, *, bits: int, states: int) -> TrellisWeight:
    """Store W so that (W - Ŵ) H (W - Ŵ)ᵀ is small.

    Args:
        W: [out, in].
        factor: of the Hessian of the inputs rotated by these signs, its columns in their order; None: of the identity.
        signs: ±1 [in].

    Source: arXiv:2406.11235, section 3 and algorithm 3 (BlockLDLQ). Deviations: a walk goes down the rows of one
    column, not over a tile of 16 x 16, so that every column is corrected for all before it; outputs are not rotated,
    because each row has a factor of its own; each column has one too, because the corrections make later ones larger.
    """
    Wt = turn(W.float(), signs).t().contiguous()  # [in, out]
    row = Wt.square().mean(0).sqrt()  # [out]
    table = values(states, W.device) / UNIT
    if factor is None:
        symbols, column, Q = _encode(Wt, row, table, bits)
    else:
        symbols, column, Q = _corrected(Wt, row, factor, table, bits)
        R = factor.R
        wanted, given = R.t() @ Wt, R.t() @ Q  # [in, out]: the error is the squared distance of the two
        row = row * (wanted * given).sum(0) / given.square().sum(0).clamp_(min=1e-30)
    codes = pack_symbols(symbols.transpose(0, 1), bits)  # [segments, in, bytes]
    return TrellisWeight.from_codes(tuple(W.shape), codes, row / UNIT, column, signs, bits=bits, states=states)


def _corrected(Wt: Tensor, row: Tensor, factor: Factor, table: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_encode` column by column, each one corrected for the errors of those before it."""
    columns = len(Wt)
    errors, found = torch.empty_like(Wt), []
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        U = factor.inverse(start, end)
        weights = factor.updated(Wt, errors, start, end, U)  # [columns of the block, out]
        for i in range(end - start):
            found.append(_encode(weights[i : i + 1], row, table, bits))
            q = found[-1][2][0]
            weights[i + 1 :] -= torch.outer(U[i, i + 1 :], (weights[i] - q) / U[i, i])
            errors[start + i] = Wt[start + i] - q
    symbols, column, Q = (torch.cat(parts) for parts in zip(*found, strict=True))
    return symbols, column, Q


def _encode(Wt: Tensor, row: Tensor, table: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest walks of columns [n, out] whose rows have these factors.

    Returns:
        symbols uint8 [n, segments, length]; the columns' factors [n]; the stored values, [n, out].
    """
    n, out = Wt.shape
    length = length_for(out)
    segments = -(-out // length)
    x = torch.zeros(n, segments * length, device=Wt.device)
    x[:, :out] = torch.where(row > 0, Wt / row, 0)
    column = (x.square().sum(1) / out).sqrt().to(torch.bfloat16).float()
    column = torch.where(column > 0, column, 1)
    symbols = viterbi((x / column[:, None]).view(-1, length), table, bits=bits)
    state = walk_states(symbols, bits, len(table).bit_length() - 1)
    Q = table[state].view(n, -1)[:, :out] * column[:, None] * row
    return symbols.view(n, segments, length), column, Q
