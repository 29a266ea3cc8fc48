"""Weights of low rank (SVD-LLM, Wang et al., 2024, arXiv:2403.07378): the product of two thin matrices that changes the
layer's output least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from compress.allocation.program import BudgetProgram, Choice
from compress.allocation.sparsity import distortion_curves
from compress.correction.base import gram_with_sinks
from compress.correction.low_rank import low_rank
from compress.formats import Dense, Format, LowRankWeight
from compress.formats.low_rank import BITS
from compress.method import Method, knob
from compress.walk.blocks import targets
from compress.walk.context import Context
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from eval.record.compression import LayerRecord

LEVELS = (0.2, 0.4, 0.6, 0.8)  # ratios at which the losses of a linear are measured, from the least to the largest
STEP = 0.02  # distance between the ratios from which each linear's ratio is chosen


@dataclass(frozen=True, kw_only=True)
class SVD(LayerwiseMethod):
    """Stores each weight as the product of two thin matrices, with the rank that its share of the bytes allows.

    Source: SVD-LLM truncates the singular values of W S, with S Sᵀ the Gram matrix of the inputs, so that the sum of
    the squares that it drops is the loss of the output (3.1); ASVD (arXiv:2312.05821) scales columns instead, and the
    plain decomposition weights all alike. SVD-LLM V2 (arXiv:2503.12340) gives ranks by the loss of each weight matrix.
    Deviations: the factors are U and Uᵀ W, with U the first directions of the outputs, so that S is not inverted;
    nothing is trained afterwards; ranks are shared out by the measured divergence of the predictions, and linears of
    which little can be removed stay as they are.
    """

    name: ClassVar[str] = "svd"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2403.07378, section 3.1; ranks by layer: arXiv:2503.12340"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram", "starts", "absmean")
    working_set: ClassVar[tuple[float, float]] = (8.0, 6.0)

    ratio: float = knob(
        0.2, "share of the 16-bit bytes of the linears that is removed", range=(0, 0.95), describes=True
    )
    weights: str = knob(
        "hessian",
        "errors count by the inputs' Gram matrix (hessian, as SVD-LLM), by their mean magnitudes (scale, as ASVD), or "
        "all alike (none)",
        choices=("hessian", "scale", "none"),
    )
    bits: int = knob(16, "bits per entry of the factors", choices=BITS)
    allocation: str = knob(
        "uniform",
        "how the ratio is shared out: equally to every linear (uniform), or by measured distortions of the model's "
        "predictions (adaptive)",
        choices=("uniform", "adaptive"),
    )
    curve_tokens: int = knob(
        256, "calibration tokens on which allocation='adaptive' measures distortions", range=(1, 1 << 30)
    )
    sink_weight: float = knob(
        64.0,
        "weight in H of each calibration window's first token, to which the later ones attend; 1: as any other token",
        range=(0, 1e6),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(f"`where` (={self.where!r}) of {self.name} must be 'blocks': it stores no embedding")
        if self.allocation == "adaptive" and self.ratio > LEVELS[-1]:
            raise ValueError(
                f"`ratio` (={self.ratio}) of {self.name} must be at most {LEVELS[-1]} with `allocation` (='adaptive'), "
                "which removes no more from any linear"
            )

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for method in before:
            if method.stage == "sparsify":
                raise ValueError(f"`recipe`: {self} would fill the zeros that {method} made: leave one of the two out")
        for method in after:
            if method.stage == "quantize_activations":
                raise ValueError(
                    f"`recipe`: {method} would round nothing after {self}, whose factors read inputs as they are"
                )
        return self

    def own_passes(self) -> str:
        return "the distortions that allocation='adaptive' measures" if self.allocation == "adaptive" else ""

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [LowRankWeight.spec_of(shape, rank=rank_of(shape, self.ratio, self.bits), bits=self.bits)]

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord]:
        if self.allocation == "uniform":
            return LayerwiseMethod.apply(self, model, batches, context)
        methods = {level: replace(self, ratio=level, allocation="uniform") for level in LEVELS}
        kept = context.store and context.store.beside("curves", without=("ratio",))
        how = {"tokens": self.curve_tokens, "device": context.device, "store": kept}
        curves = distortion_curves(model, methods, batches, **how)
        sizes = {name: rows * columns for name, (rows, columns) in targets(model, self.skip).items()}
        context = context.with_measured(ratio=share_out(curves, sizes, self.ratio))
        records = LayerwiseMethod.apply(self, model, batches, context)
        shown = {name: {f"{level:g}": value for level, value in curve.items()} for name, curve in curves.items()}
        return [replace(record, distortion=shown.get(record.name, {})) for record in records]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        ratio = statistics.measured.get("ratio", self.ratio)
        if self.allocation == "adaptive" and not ratio:
            statistics.note("stays as it is")
            return [Dense(W.to(statistics.dtype))]
        rank = rank_of((W.shape[0], W.shape[1]), ratio, self.bits)
        statistics.note(f"rank {rank} of {min(W.shape)}")
        return [low_rank(W, self._weighting(statistics), rank=rank, bits=self.bits)]

    def _weighting(self, statistics: LayerStatistics) -> Tensor | None:
        """H [in, in], or its diagonal [in], by which errors are weighted; None if all have the same weight."""
        if self.weights == "none" or not statistics.tokens:
            return None
        if self.weights == "scale":
            return statistics.values["absmean"].square()
        return gram_with_sinks(statistics, self.sink_weight, self.stage)


def rank_of(shape: tuple[int, int], ratio: float, bits: int = 16) -> int:
    """The largest rank, at least 1, at which the factors of a weight [out, in] take 1 - ratio of its 16-bit bytes."""
    out, columns = shape
    return max(1, min(int((1 - ratio) * out * columns * 16 / (bits * (out + columns)) + 1e-9), out, columns))


def share_out(curves: Mapping[str, Mapping[float, float]], sizes: Mapping[str, int], ratio: float) -> dict[str, float]:
    """The ratio of each linear, 0 if it stays as it is, so that at least `ratio` of all bytes are removed and the sum
    of distortions is least.

    Between measured levels the root of the distortion is assumed to be linear.

    Args:
        curves: {linear: {level: distortion}}. sizes: {linear: its number of weights}.
    """
    layers: dict[str, list[Choice]] = {}
    levels = sorted(next(iter(curves.values())))
    steps = [0.0, *np.arange(levels[0], levels[-1] + STEP / 2, STEP).round(4).tolist()]
    for name, curve in curves.items():
        roots = np.interp(steps[1:], levels, [max(curve[level], 0.0) ** 0.5 for level in levels])
        lost = [0.0, *(roots**2).tolist()]
        made = zip(steps, lost, strict=True)
        layers[name] = [Choice(sizes[name] * round((1 - step) / STEP), loss) for step, loss in made]
    numbers = BudgetProgram(layers).within((1 - ratio) / STEP * sum(sizes.values()) * (1 + 1e-9))
    return {name: steps[number] for name, number in numbers.items()}
