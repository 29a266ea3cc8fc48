"""LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339): the few input columns with outliers in 16 bits, the rest in
int8."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.activations.w8a8 import check_columns, slow_int8
from compress.formats import Columns, Dense, EightBit, Format
from compress.method import Method, knob, refuse_stored
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels.w8a8_matmul import quantize_weight


@dataclass(frozen=True, kw_only=True)
class LLMInt8(LayerwiseMethod):
    """Rounds weights and activations to int8, and keeps the columns that read large inputs in 16 bits.

    Source: arXiv:2208.07339, equation 8. Deviations: the columns are those that reach the threshold on the calibration
    tokens. They are fixed once, where the paper looks for them in every batch, so that no batch has to be searched and
    the weight is stored once. A maximum over many tokens finds more columns than a single batch (in some models half of
    the columns of the down projections), so `most` limits their number. Weights of these columns are stored in the
    model's dtype, and in bfloat16 for a float32 model.
    """

    name: ClassVar[str] = "llm_int8"
    stage: ClassVar[str] = "quantize_activations"
    source: ClassVar[str] = "arXiv:2208.07339"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("rows", "absmax")

    threshold: float = knob(
        6.0, "columns whose inputs reach this on the calibration tokens stay in 16 bits", range=(0, 1e9)
    )
    most: float = knob(
        0.01,
        "largest share of a linear's columns that stay in 16 bits; the columns with the largest inputs come first",
        range=(0, 1),
    )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_columns(self.name, torch.int8, name, shape)

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        refuse_stored(self, before, "stores weights in int8 and 16 bits itself")
        return self

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        out, columns = shape
        most = math.ceil(self.most * columns)  # in 16 bits
        codes = EightBit.spec_of((out, columns - most), torch.int8, in_blocks=False, static=False)
        if not most:
            return [codes]
        if most == columns:
            return [Dense.spec_of(shape)]
        return [Columns.spec_of(shape, codes), Columns.spec_of(shape, Dense.spec_of((out, most)))]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        if not statistics.tokens:
            statistics.note("all columns in int8: 0 calibration tokens show no outliers")
            return [EightBit(quantize_weight(W, torch.int8))]
        outlier = outliers(statistics.values["absmax"], self.threshold, self.most)
        found, reached = int(outlier.sum()), int((statistics.values["absmax"] >= self.threshold).sum())
        all_of_them = "" if found == reached else f", the largest of {reached} that reach the threshold"
        statistics.note(f"{found} of {len(outlier)} columns in 16 bits{all_of_them}")
        # A float32 model is deployed in bfloat16: the errors are measured for that.
        dtype = torch.bfloat16 if statistics.dtype == torch.float32 else statistics.dtype
        return llm_int8(W, outlier, dtype)

    def remarks(self, device: torch.device) -> list[str]:
        return slow_int8(self.name, device)


def outliers(absmax: Tensor, threshold: float, most: float) -> Tensor:
    """Mask [in] of the columns whose largest magnitude [in] reaches the threshold; if these are more than the share
    `most`, only the largest ones."""
    order = absmax.argsort(descending=True, stable=True)[: math.ceil(most * len(absmax))]
    mask = torch.zeros_like(absmax, dtype=torch.bool)
    mask[order] = absmax[order] >= threshold
    return mask


def llm_int8(W: Tensor, outlier: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Format]:
    """W [out, in] as int8 columns and, for the columns in `outlier` [in], columns of this 16-bit dtype."""
    if not outlier.any():
        return [EightBit(quantize_weight(W, torch.int8))]
    kept = W[:, outlier]
    if outlier.all():
        return [Dense(W.to(dtype))]
    rest = Columns(EightBit(quantize_weight(W[:, ~outlier], torch.int8)), ~outlier)
    return [rest, Columns(Dense(kept.to(dtype)), outlier)]
