"""GPTQ (Frantar et al., 2022, arXiv:2210.17323): round column by column, and correct the later columns for the
error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.formats import Format
from compress.grid.grids import check_zeros, make_grid, scale_rule
from compress.grid.integer import SCALES
from compress.grid.nearest import rtn
from compress.method import Method, knob
from compress.walk.hessian import Factor, diagonal_with, factorise
from compress.walk.statistics import LayerStatistics
from compress.weights.on_grid import GridMethod, HessianMethod
from kernels.gptq_block import gptq_block

BLOCK = 128  # columns whose updates are applied at once to the rest (lazy batch updates)


@dataclass(frozen=True, kw_only=True)
class GPTQ(HessianMethod, GridMethod):
    """Quantises a weight column by column and corrects the later columns for each rounding error, by the Hessian."""

    name: ClassVar[str] = "gptq"
    source: ClassVar[str] = "arXiv:2210.17323"

    scale: str = knob(
        "search",
        "cover each group (absmax), or search the least error over clipping (clip), or over clipping and sign (search)",
        choices=SCALES,
    )
    norm: float = knob(2.0, "exponent of the error that search minimises", range=(0.5, 8))
    refit: bool = knob(
        True,
        "choose a group's scale when it is reached, from the updated weights; False: beforehand, "
        "from the original ones",
    )
    order: str = knob(
        "group",
        "how columns are sorted by falling diag(H): groups, and the columns inside each group (group); single columns, "
        "with scales fixed beforehand (activation); not at all (none)",
        choices=("group", "activation", "none"),
    )

    @property
    def working_set(self) -> tuple[float, float]:
        return (8.0 if self.scale == "search" else 3.0), 1.0  # a search tries many scales on the whole weight at once

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        check_zeros(self, before)
        return self

    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        """Rounding to nearest with scales chosen in the same way, without the correction of later columns."""
        importance = self.diagonal(statistics).clone() if statistics.tokens >= self.min_tokens else None
        return [self._rounded(W, importance)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        if statistics.tokens < self.min_tokens:
            statistics.note(f"rounded to nearest: {statistics.tokens} tokens, min_tokens is {self.min_tokens}")
            return [self._rounded(W, None)]
        factor = self.factor(W, statistics)
        for text in factor.notes:
            statistics.note(text)
        stored = gptq(
            W,
            factor,
            **self.aim(W.shape[1]),
            scale=self.scale,
            norm=self.norm,
            refit=self.refit and self.order != "activation",
            keep=statistics.keep,
        )
        return [stored]

    def factor(self, W: Tensor, statistics: LayerStatistics) -> Factor:
        """The factor of H, in the order of the columns; the linears that read the same input share it."""
        key = self.key(W)
        if key not in statistics.shared:
            order = column_order(self.diagonal(statistics), self.order, key[2])
            statistics.shared[key] = factorise(
                statistics.values["gram"], self.damp, order, self.first_tokens(statistics)
            )
        return statistics.shared[key]

    def key(self, W: Tensor) -> tuple:
        """The data on which the factor depends, beside H."""
        return "factor", self.order, self.aim(W.shape[1])["group_size"], self.damp, self.sink_weight

    def diagonal(self, statistics: LayerStatistics) -> Tensor:
        """diag(H) [in], the first tokens counted `sink_weight` times."""
        return diagonal_with(statistics.values["gram"], self.first_tokens(statistics))

    def _rounded(self, W: Tensor, importance: Tensor | None) -> Format:
        return rtn(W, **self.aim(W.shape[1]), scale=self.scale, norm=self.norm, importance=importance)


def column_order(diagonal: Tensor, order: str, group_size: int) -> Tensor:
    """Permutation [in] in which the columns are quantised: the ones with the largest inputs first."""
    if order == "none":
        return torch.arange(len(diagonal), device=diagonal.device)
    if order == "activation":
        return diagonal.argsort(descending=True, stable=True)
    groups = diagonal.view(-1, group_size)
    within = groups.argsort(descending=True, stable=True, dim=1)
    among = groups.amax(1).argsort(descending=True, stable=True)
    start = torch.arange(len(groups), device=diagonal.device) * group_size
    return (within + start[:, None])[among].reshape(-1)


def gptq(
    W: Tensor,
    factor: Factor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = True,
    grid: str = "int",
    scale: str = "search",
    norm: float = 2.0,
    refit: bool = True,
    scale_dtype: str = "bfloat16",
    keep: Tensor | None = None,
) -> Format:
    """Quantise W so that (W - Ŵ) H (W - Ŵ)ᵀ is small.

    Args:
        W: [out, in].
        factor: of H, in the order of the columns (`hessian.factorise`).
        group_size: divides `in`.
        grid: one of `compress.grid.grids.GRIDS`; `symmetric` is for "int" alone.
        scale_dtype: one of `compress.formats.scales.SCALE_KINDS`; factors that the scales of a row share are fixed
            first, so that each group chooses among scales that can be stored.
        keep: [out, in] bool, false for weights that were pruned and stay 0; None: all are kept.
        refit: scales from the updated weights as each group is reached; needs an order that keeps groups whole.

    Source: arXiv:2210.17323, algorithm 1. Deviation: groups keep their place in any order, so that no index has to be
    stored; scales are searched by the resulting error of GPTQ, |w - ŵ|^norm / U_ii², and may be negative; a block's
    updates are pulled when it is reached (`Factor.updated`), not pushed by the blocks before.
    """
    out, columns = W.shape
    values = make_grid(grid, bits, symmetric)
    rule = scale_rule(values, scale_dtype, W.float(), group_size)
    order = factor.order
    Wt = W.float().t()[order].contiguous()  # [in, out]: a column of W is a row here, contiguous
    Wt[factor.dead] = 0
    codes = torch.empty_like(Wt, dtype=torch.uint8)
    mask = None if keep is None else keep.t()[order]
    group_of = order // group_size  # [in]
    errors = Wt  # W - Ŵ of the done columns replaces them
    importance = factor.diagonal.square().reciprocal()  # [in], in processing order
    groups, table = columns // group_size, None if values.table is None else values.table.to(W.device)
    reached = group_of[::group_size].tolist()  # with whole groups, in their order
    scales = torch.empty(groups, out, device=W.device)
    zeros = torch.empty(groups, out, device=W.device)

    def choose(weights: Tensor, rows: Tensor | slice, group: int) -> None:
        """Scales of a group from its columns, [group_size, out], which stand at these places of the order."""
        weights = weights if mask is None else weights * mask[rows]
        scales[group], zeros[group] = values.choose(
            weights.t(), rule.of_group(group), how=scale, importance=importance[rows], norm=norm
        )

    if not refit:
        place = order.argsort()
        for group in range(groups):
            members = place[group * group_size : (group + 1) * group_size]
            choose(Wt[members], members, group)
    block = max(BLOCK // group_size, 1) * group_size
    if group_size == columns or group_size % BLOCK == 0:  # no group begins inside a block, before all its updates
        block = BLOCK
    for start in range(0, columns, block):
        end = min(start + block, columns)
        U = factor.inverse(start, end)
        weights = factor.updated(Wt, errors, start, end, U)  # [later columns of the block, out]
        step = min(group_size, block) if refit else block
        for a in range(start, end, step):
            b = min(a + step, end)
            if refit and a % group_size == 0:
                whole = slice(a, a + group_size)
                inside = whole.stop <= end
                members = weights[:group_size] if inside else factor.updated(Wt, errors, a, whole.stop)
                choose(members, whole, reached[a // group_size])
            codes[a:b], _, weights = gptq_block(
                weights,
                U[a - start : b - start, a - start :].contiguous(),
                scales,
                zeros,
                group_of[a:b],
                bits=bits,
                keep=None if mask is None else mask[a:b],
                table=table,
            )
            own = group_of[a:b]
            errors[a:b] = Wt[a:b] - values.dequantize(codes[a:b].float(), scales[own], zeros[own])
    del Wt, errors, weights  # room for packing
    natural = torch.empty_like(codes)
    natural[order] = codes
    return values.stored(natural.t(), scales.t(), zeros.t(), group_size=group_size, rule=rule)
