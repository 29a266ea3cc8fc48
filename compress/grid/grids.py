"""The grids of the methods: integers with scales and zero points, or tables with scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.formats import CodebookGroup, Format, IntGroup
from compress.formats.scales import SCALE_DTYPES, SCALE_KINDS, ScaleRule
from compress.grid import integer
from compress.grid.integer import AT_ONCE, SEARCH_STEPS, check_group_size
from compress.grid.tables import TABLES, padded
from kernels.int_matmul import BITS

GRIDS = ("int", *TABLES)
FAINTEST = 1e-30  # least scale of a group of zeros on a grid without a zero
STEPS = 1 << 12  # even steps that the search cuts a table's range into; a weight nearer to an edge may miss its entry


@dataclass(frozen=True)
class Integers:
    """Integers of `bits` bits: w = scale * (code - zero)."""

    bits: int
    symmetric: bool
    table = None

    def choose(
        self, w: Tensor, rule: Callable[[Tensor], Tensor], *, how: str, importance: Tensor | None, norm: float
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero point [...] of each group of w [..., group_size]; see `integer.choose`."""
        return integer.choose(w, self.bits, self.symmetric, rule, how=how, importance=importance, norm=norm)

    def candidates(self, w: Tensor, rule: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Scales and zero points [candidates, ...] that the search chooses from."""
        return integer.candidates(w, self.bits, self.symmetric, rule)

    def rounded(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The dequantised values of w, in new memory."""
        return self.dequantize(self.quantize(w, scale, zero), scale, zero)

    def cover(self, w: Tensor) -> Tensor:
        """Scales [...], not rounded, with which the grid just covers each group of w [..., group_size]; 0 for zeros."""
        return integer.absmax(w, self.bits, self.symmetric, "float32")[0] * (w != 0).any(-1)

    @property
    def largest(self) -> float:
        return ((1 << self.bits) - 1) / 2

    def quantize(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return integer.quantize(w, scale, zero, self.bits)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return integer.dequantize(codes, scale, zero)

    def stored(self, codes: Tensor, scale: Tensor, zero: Tensor, *, group_size: int, rule: ScaleRule) -> Format:
        """The stored format of codes [out, in], scales and zero points [out, groups]."""
        return IntGroup.from_codes(
            codes,
            scale,
            None if self.symmetric else zero,
            bits=self.bits,
            group_size=group_size,
            scale_dtype=rule.kind,
            scales=rule.stored(scale),
        )

    def spec_of(self, shape: tuple[int, int], group_size: int, scale_dtype: str) -> dict[str, Any]:
        """The `Format.spec()` of the result of `stored`."""
        return IntGroup.spec_of(
            shape, bits=self.bits, group_size=group_size, symmetric=self.symmetric, scale_dtype=scale_dtype
        )


@dataclass(frozen=True, eq=False)
class Table:
    """Values of a table: w = scale * table[code].

    Attributes:
        bits: of a code. table: float32 [entries], ascending, of either sign.
    """

    bits: int
    table: Tensor

    def choose(
        self, w: Tensor, rule: Callable[[Tensor], Tensor], *, how: str, importance: Tensor | None, norm: float
    ) -> tuple[Tensor, Tensor]:
        """Scale [...] of each group of w [..., group_size], and the code of 0 (that of the value nearest to it).

        "absmax" covers the group; "clip" and "search" minimise sum(importance * |w - ŵ|^norm) over clipping ratios and,
        for "search" and a table that is not its own mirror image, over signs, as `integer.search` does.
        """
        if how == "absmax":
            cover = rule(self.cover(w))
            return cover, torch.full_like(cover, self.code_of_zero)
        tried, zeros = self.candidates(w, rule, signs=how == "search")
        w = w.contiguous()
        at_once = max(1, AT_ONCE // w.numel())
        losses = [self._loss(w, scale, importance, norm) for scale in tried.split(at_once)]
        best = torch.cat(losses).argmin(0, keepdim=True)
        return tried.gather(0, best)[0], zeros[0]

    def candidates(self, w: Tensor, rule: Callable[[Tensor], Tensor], *, signs: bool = True) -> tuple[Tensor, Tensor]:
        """Scales and codes of 0 [candidates, ...] that the search chooses from: the covering scale first."""
        both = signs and not torch.equal(self.table, -self.table.flip(0))
        ratios = torch.tensor([1 - 0.5 * step / SEARCH_STEPS for step in range(SEARCH_STEPS)], device=w.device)
        ratios = ratios.view(-1, *[1] * (w.dim() - 1))
        tried = torch.cat([rule(sign * ratios * self.cover(sign * w)) for sign in ((1, -1) if both else (1,))])
        return tried, torch.full_like(tried, self.code_of_zero)

    def rounded(self, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The dequantised values of w, in new memory; near the middle of two entries, the farther may be taken."""
        nearest, low, density = self._steps(w.device)
        places = (
            (w * (density / scale).clamp_(-1e30, 1e30)).add_(0.5 - low * density).clamp_(0, STEPS - 1).to(torch.int32)
        )
        return nearest.index_select(0, places.view(-1)).view(places.shape).mul_(scale)

    @property
    def code_of_zero(self) -> int:
        """The code of the entry nearest to 0."""
        return int(self.table.abs().argmin())

    def cover(self, w: Tensor) -> Tensor:
        """Scales [...], not rounded, with which the table covers each group of w [..., group_size]; of zeros 0, or
        FAINTEST if the table has no 0 and would turn them into its own values."""
        least = 0.0 if bool((self.table == 0).any()) else FAINTEST
        return torch.maximum(w.amax(-1) / self.table[-1].item(), w.amin(-1) / self.table[0].item()).clamp(min=least)

    @property
    def largest(self) -> float:
        return self.table.abs().max().item()

    def quantize(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        table = self.table.to(w.device)
        return torch.bucketize((w / scale).contiguous(), (table[:-1] + table[1:]) / 2, out_int32=True)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return self.table.to(codes.device)[codes.int()] * scale

    def stored(self, codes: Tensor, scale: Tensor, zero: Tensor, *, group_size: int, rule: ScaleRule) -> Format:
        """The stored format of codes [out, in] and scales [out, groups]."""
        return CodebookGroup.from_codes(
            codes,
            padded(self.table, self.bits).to(codes.device),
            scale,
            group_size=group_size,
            scale_dtype=rule.kind,
            scales=rule.stored(scale),
        )

    def spec_of(self, shape: tuple[int, int], group_size: int, scale_dtype: str) -> dict[str, Any]:
        """The `Format.spec()` of the result of `stored`."""
        return CodebookGroup.spec_of(shape, bits=self.bits, group_size=group_size, scale_dtype=scale_dtype)

    def _steps(self, device: torch.device) -> tuple[Tensor, float, float]:
        """The nearest entry at STEPS even places of the table's range, the first place, and places per unit."""
        low, high = self.table[0].item(), self.table[-1].item()
        places = torch.linspace(low, high, STEPS)
        nearest = self.table[torch.bucketize(places, (self.table[:-1] + self.table[1:]) / 2)]
        return nearest.to(device), low, (STEPS - 1) / (high - low)

    def _loss(self, w: Tensor, scale: Tensor, importance: Tensor | None, norm: float) -> Tensor:
        """sum(importance * |w - ŵ|^norm) per group, for scales [candidates, ...]."""
        error = self.rounded(w, scale[..., None], None).sub_(w)
        error = error.square_() if norm == 2 else error.abs_().pow_(norm)
        return (error if importance is None else error.mul_(importance)).sum(-1)


@dataclass(frozen=True, eq=False)
class Signs(Table):
    """Two values of either sign, which cover nothing: the scale of a group is the mean magnitude of its weights.

    Source: XNOR-Net (arXiv:1603.05279, section 3.1): for w = scale * sign(w) this scale has the least squared error.
    """

    def choose(
        self, w: Tensor, rule: Callable[[Tensor], Tensor], *, how: str, importance: Tensor | None, norm: float
    ) -> tuple[Tensor, Tensor]:
        """Scale [...] of each group of w [..., group_size]: the mean magnitude, weighted by the importance unless `how`
        is "absmax". Deviation: `norm` is taken as 2."""
        scale = self.cover(w) if how == "absmax" or importance is None else _weighted_mean(w.abs(), importance)
        scale = rule(scale.clamp(min=FAINTEST))
        return scale, torch.full_like(scale, self.code_of_zero)

    def candidates(self, w: Tensor, rule: Callable[[Tensor], Tensor], *, signs: bool = True) -> tuple[Tensor, Tensor]:
        scale = rule(self.cover(w))[None]
        return scale, torch.full_like(scale, self.code_of_zero)

    def cover(self, w: Tensor) -> Tensor:
        """Mean magnitudes [...] of the groups of w [..., group_size]."""
        return w.abs().mean(-1).clamp(min=FAINTEST)


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Means over the last dimension; plain ones where all weights are 0."""
    sums = weights.sum(-1)
    return torch.where(sums > 0, (values * weights).sum(-1) / sums.clamp(min=FAINTEST), values.mean(-1))


Grid = Integers | Table


def make_grid(name: str, bits: int, symmetric: bool = True) -> Grid:
    """The grid of these knobs, which must fit each other (`check_grid`)."""
    if name == "int":
        return Integers(bits, symmetric)
    values = TABLES[name]
    return Signs(values.bits, values.table) if values.bits == 1 else Table(values.bits, values.table)


def scales_of(grid: str, scale_dtype: str) -> str:
    """The kind of stored scales: that of the number format, else that of the knob."""
    return scale_dtype if grid == "int" else TABLES[grid].scale_dtype or scale_dtype


def scale_rule(grid: Grid, kind: str, W: Tensor, group_size: int) -> ScaleRule:
    """The rule for the scales of the groups of W [out, in]."""
    if kind in SCALE_DTYPES:
        return ScaleRule(kind)
    return ScaleRule.fit(kind, grid.cover(W.view(len(W), -1, group_size)), group_size, grid.largest)


def check_grid(method: Any, name: str, shape: tuple[int, int]) -> None:
    """Raise ValueError unless the knobs `grid`, `bits`, `symmetric`, `group_size` and `scale_dtype` of a method fit
    each other and a weight [out, in]."""
    check_group_size(method.group_size, name, shape)
    if method.grid == "int":
        if method.bits not in BITS:
            raise ValueError(
                f"`bits` (={method.bits}) of {method.name}: integers have {', '.join(map(str, BITS))} bits; signs "
                "alone are grid='binary'"
            )
        if method.scale_dtype in ("shift4", "e8m0", "tile16", "e4m3") and not method.symmetric:
            raise ValueError(f"`scale_dtype` (={method.scale_dtype!r}) needs `symmetric` (=False) to be True")
        return
    values = TABLES[method.grid]
    shown = f"`grid` (={method.grid!r}) of {method.name}"
    if method.bits != values.bits:
        same = [other for other, one in TABLES.items() if one.bits == method.bits]
        raise ValueError(
            f"{shown} has codes of {values.bits} bits: `bits` (={method.bits}) must be {values.bits}; grids of "
            f"{method.bits} bits: {', '.join([*(['int'] if method.bits in BITS else []), *same])}"
        )
    if values.group_size not in (None, method.group_size):
        raise ValueError(f"{shown} has groups of {values.group_size}: `group_size` (={method.group_size}) must be that")


def has_zero(grid: str) -> bool:
    """Whether 0 is a value of the grid with this name."""
    return grid == "int" or bool((TABLES[grid].table == 0).any())


def check_zeros(method: Any, before: Sequence[Any]) -> None:
    """Raise ValueError if a weight that an earlier method of the recipe pruned could not keep its zeros here."""
    pruning = next((other for other in before if other.stage == "sparsify"), None)
    if pruning is None:
        return
    if not has_zero(method.grid):
        raise ValueError(f"`grid` (={method.grid!r}) of {method.name} has no 0, which {pruning} before it needs")
    if method.grid == "int" and method.scale_dtype not in SCALE_DTYPES:
        raise ValueError(
            f"`scale_dtype` (={method.scale_dtype!r}) of {method.name}: a weight that {pruning} pruned is stored with "
            f"scales in one of {', '.join(SCALE_DTYPES)}"
        )


__all__ = ["GRIDS", "SCALE_KINDS", "Grid", "Integers", "Table", "check_grid", "check_zeros", "has_zero", "make_grid",
           "scale_rule", "scales_of"]  # fmt: skip
