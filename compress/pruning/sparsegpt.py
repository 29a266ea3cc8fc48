"""SparseGPT (Frantar and Alistarh, 2023, arXiv:2301.00774): prune column by column, and correct the later columns for
the error."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import Dense, Format
from compress.formats.masked import masked
from compress.formats.scales import SCALE_DTYPES
from compress.grid.grids import GRIDS, check_grid, has_zero, make_grid, scale_rule, scales_of
from compress.method import knob
from compress.pruning.base import PruningMethod
from compress.pruning.patterns import kept, parse_pattern
from compress.walk.hessian import Factor, factorise
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import BITS

BLOCK = 128  # columns whose mask is chosen at once, and whose updates are applied at once to the rest
LAZY = 32  # columns after which the rest of the block is updated, as in kernels.gptq_block


@dataclass(frozen=True, kw_only=True)
class SparseGPT(PruningMethod):
    """Prunes by the Hessian and corrects the weights that stay; `bits` below 16 quantises them in the same pass."""

    name: ClassVar[str] = "sparsegpt"
    source: ClassVar[str] = "arXiv:2301.00774, algorithm 1"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram",)
    working_set: ClassVar[tuple[float, float]] = (8.0, 1.0)

    bits: int = knob(16, "bits per kept weight; 16: they stay floats", choices=(*BITS, 16))
    group_size: int = knob(
        64, "columns that share a scale, where bits is below 16; -1 for a whole row", range=(-1, 1 << 20)
    )
    grid: str = knob(
        "int",
        "values that a kept weight may take, where bits is below 16: integers, or a table with a 0, which is stored "
        "without a mask; `bits` must be the bits of the table",
        choices=GRIDS,
    )
    symmetric: bool = knob(True, "no zero point: the grid lies around 0")
    scale_dtype: str = knob("bfloat16", "how scales are stored", choices=tuple(SCALE_DTYPES))
    damp: float = knob(0.01, "damping added to diag(H), as a fraction of its mean", range=(0, 1))
    min_tokens: int = knob(
        128, "below this many calibration tokens a linear (an expert) is pruned by magnitude", range=(1, 1 << 30)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not has_zero(self.grid):
            raise ValueError(f"`grid` (={self.grid!r}) of {self.name} has no 0, which pruned weights need; int works")
        if self.grid != "int" and self.pattern == "2:4":
            raise ValueError(
                f"`grid` (={self.grid!r}) of {self.name}: `pattern` (='2:4') packs integers and floats; grid=int, or "
                "another pattern, works"
            )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        super().check_layer(name, shape)
        if self.bits < 16 or self.grid != "int":
            check_grid(self, name, shape)

    def plain(self, shape: tuple[int, int]) -> dict[str, Any]:
        if self.bits == 16:
            return super().plain(shape)
        values = make_grid(self.grid, self.bits, self.symmetric)
        return values.spec_of(shape, self.group_size, scales_of(self.grid, self.scale_dtype))

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        H = statistics.values["gram"] if statistics.tokens >= self.min_tokens else None
        if H is None:  # with H = 1 magnitudes are compared and nothing is corrected
            statistics.note(f"by magnitude: {statistics.tokens} tokens, min_tokens is {self.min_tokens}")
            H = torch.eye(W.shape[1], device=W.device)
        key = ("sparsegpt", self.damp, statistics.tokens)
        if key not in statistics.shared:
            statistics.shared[key] = factorise(H, self.damp, torch.arange(len(H), device=H.device))
        factor: Factor = statistics.shared[key]
        for text in factor.notes:
            statistics.note(text)
        group_size = W.shape[1] if self.group_size == -1 else self.group_size
        plain, keep = sparsegpt(
            W,
            factor,
            ratio=self.ratio_of(statistics),
            pattern=parse_pattern(self.pattern),
            bits=self.bits,
            group_size=group_size,
            grid=self.grid,
            symmetric=self.symmetric,
            scale_dtype=scales_of(self.grid, self.scale_dtype),
        )
        return [masked(plain, keep, two_of_four=self.pattern == "2:4")]


def sparsegpt(
    W: Tensor,
    factor: Factor,
    *,
    ratio: float,
    pattern: tuple[int, int] | None,
    bits: int = 16,
    group_size: int = 64,
    grid: str = "int",
    symmetric: bool = True,
    scale_dtype: str = "bfloat16",
) -> tuple[Format, Tensor]:
    """Prune W [out, in] so that (W - Ŵ) H (W - Ŵ)ᵀ is small.

    Args:
        factor: of H, with its columns in their own order.
        ratio: the share of weights to remove in each block of 128 columns, anywhere in it; unused with a pattern.
        pattern: (N, M), chosen as each M columns are reached, or None.
        bits, group_size, grid, symmetric, scale_dtype: for the kept weights (`compress.grid.grids`); 16 bits: floats.

    Returns:
        The weight with zeros, and the mask [out, in] of the kept weights.

    Source: arXiv:2301.00774, algorithm 1; scales by the search of compress.grid when a group is reached.
    """
    out, columns = W.shape
    diagonal = factor.diagonal  # U_ii
    original = W.float().t().contiguous()  # [in, out]: a column of W is a row here, contiguous
    original[factor.dead] = 0
    Wt = original.clone()
    done = torch.empty_like(Wt)  # W - Ŵ of the columns that are done
    keep = torch.ones_like(Wt, dtype=torch.bool)
    M = pattern[1] if pattern else 1
    lazy = max(LAZY // M, 1) * M
    block = -(-BLOCK // lazy) * lazy
    values = make_grid(grid, bits, symmetric) if bits < 16 else None
    if values is not None:
        rule = scale_rule(values, scale_dtype, W.float(), group_size)
        codes = torch.empty_like(Wt, dtype=torch.uint8)
        scales = torch.ones(columns // group_size, out, device=W.device)
        zeros = torch.zeros_like(scales)

    def mask(first: int, last: int) -> Tensor:
        """The mask of the kept weights in the columns [first, last), by w² / U_ii²: [last - first, out]."""
        scores = (Wt[first:last] / diagonal[first:last, None]).square().t().contiguous()
        return kept(scores, ratio, pattern, by_row=False).t()

    def expected(first: int, last: int) -> Tensor:
        """The predicted mask of a group at the time when it is reached: [last - first, out]."""
        if pattern is None:
            return keep[first:last]
        start = first // M * M
        return mask(start, -(-last // M) * M)[first - start : last - start]

    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = torch.empty(end - start, out, device=W.device)
        U = factor.inverse(start, end)
        Wt[start:end] = factor.updated(original, done, start, end, U)
        if pattern is None:
            keep[start:end] = mask(start, end)
        for a in range(start, end, lazy):
            b = min(a + lazy, end)
            for i in range(a, b):
                if pattern and i % M == 0:
                    keep[i : i + M] = mask(i, i + M)
                w = Wt[i].clone()
                if values is None:
                    q = w * keep[i]
                else:
                    group = i // group_size
                    if i % group_size == 0:
                        if i + group_size > end:  # the later columns, corrected for the done ones
                            Wt[i : i + group_size] = factor.updated(original, done, i, i + group_size)
                        weights = (Wt[i : i + group_size] * expected(i, i + group_size)).t()
                        scales[group], zeros[group] = values.choose(
                            weights, rule.of_group(group), how="search", importance=None, norm=2.0
                        )
                    q = values.quantize(w, scales[group], zeros[group])
                    codes[i] = q = torch.where(keep[i], q, zeros[group].to(q.dtype))
                    q = values.dequantize(q, scales[group], zeros[group])
                errors[i - start] = error = (w - q) / diagonal[i]
                Wt[i] = q
                done[i] = original[i] - q
                Wt[i + 1 : b].addr_(U[i - start, i + 1 - start : b - start], error, alpha=-1)
            later = U[a - start : b - start, b - start :]
            Wt[b:end].addmm_(later.t(), errors[a - start : b - start], alpha=-1)
    keep = keep.t().contiguous()
    if values is None:
        return Dense(Wt.t().contiguous()), keep
    return values.stored(codes.t(), scales.t(), zeros.t(), group_size=group_size, rule=rule), keep
