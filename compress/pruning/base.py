"""Shared code of the pruning methods: the number and the pattern of removed weights, and the storage of the others."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from compress.allocation.sparsity import LEVELS, allocate, distortion_curves, global_ratios
from compress.formats import Dense, Format
from compress.formats.masked import masked, masked_spec
from compress.method import knob
from compress.pruning.patterns import UNSTRUCTURED, kept, parse_pattern
from compress.walk.blocks import targets
from compress.walk.context import Context
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from eval.record.compression import LayerRecord

HALF = 0.5  # of the weights: the usual ratio


@dataclass(frozen=True, kw_only=True)
class PruningMethod(LayerwiseMethod):
    """Keeps the weights with the largest scores. 2:4 patterns have a format of their own; others have a mask with a bit
    per weight."""

    stage: ClassVar[str] = "sparsify"
    by_row: ClassVar[bool] = False  # whether scores are compared within each row, or over the whole matrix
    comparable: ClassVar[bool] = False  # whether scores are comparable between linears, without calibration

    ratio: float = knob(
        HALF,
        "share of each linear's weights set to 0, below 1; a pattern N:M implies its own share",
        range=(0, 1),
        describes=True,
    )
    pattern: str = knob(
        UNSTRUCTURED, "weights that may stay: any (unstructured), or N of every M neighbours in a row (2:4, 4:8, ...)"
    )
    allocation: str = knob(
        "uniform",
        "how the ratio is shared out: equally to every linear (uniform), by measured distortions of the model's "
        "predictions (adaptive), or by comparing the magnitudes of all linears (global)",
        choices=("uniform", "adaptive", "global"),
    )
    curve_tokens: int = knob(
        256, "calibration tokens on which allocation='adaptive' measures distortions", range=(1, 1 << 30)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = parse_pattern(self.pattern)
        if self.ratio >= 1:
            raise ValueError(
                f"`ratio` (={self.ratio}) of {self.name} must lie below 1, because 1 would remove all weights"
            )
        if pattern and self.ratio not in (HALF, implied := 1 - pattern[0] / pattern[1]):
            raise ValueError(
                f"`ratio` (={self.ratio}) of {self.name} is not that of `pattern` (={self.pattern!r}), which is "
                f"{implied:g}: leave it out"
            )
        if pattern:
            object.__setattr__(self, "ratio", implied)
        if pattern and self.allocation != "uniform":
            raise ValueError(
                f"`allocation` (={self.allocation!r}) of {self.name} has no effect: `pattern` (={self.pattern!r}) "
                "gives every linear the same ratio"
            )
        if self.allocation == "global" and not self.comparable:
            raise ValueError(
                f"`allocation` (='global') of {self.name}: its scores cannot be compared over linears; 'adaptive' or "
                "'uniform' works"
            )
        if self.allocation == "adaptive" and self.ratio > LEVELS[-1]:
            raise ValueError(
                f"`ratio` (={self.ratio}) of {self.name} must be at most {LEVELS[-1]} with `allocation` (='adaptive'), "
                "which removes no more from any linear"
            )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        pattern = parse_pattern(self.pattern)
        if pattern and shape[1] % pattern[1]:
            raise ValueError(
                f"`pattern` (={self.pattern!r}) of {self.name} needs rows of a multiple of {pattern[1]} columns; "
                f"{name} has "
                f"{shape[1]}: another M, or `skip`, works"
            )

    def scores(self, W: Tensor, statistics: LayerStatistics) -> Tensor:
        """[out, in]: the importance of each weight; only the order of scores counts."""
        raise NotImplementedError

    @property
    def needs_calibration(self) -> bool:
        return self.allocation == "adaptive"

    def ratio_of(self, statistics: LayerStatistics) -> float:
        """The share of a linear's weights that is removed; `allocation` may have set one for each."""
        return statistics.measured.get("ratio", self.ratio)

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord]:
        curves: dict[str, dict[float, float]] = {}
        if self.allocation == "global":
            ratios = global_ratios(model, targets(model, self.skip), self.scores, self.ratio)
            context = context.with_measured(ratio=ratios)
        elif self.allocation == "adaptive":
            kept_curves = context.store and context.store.beside("curves", without=("ratio",))
            methods = {level: dataclasses.replace(self, ratio=level, allocation="uniform") for level in LEVELS}
            curves = distortion_curves(
                model, methods, batches, tokens=self.curve_tokens, device=context.device, store=kept_curves
            )
            weights = {name: rows * columns for name, (rows, columns) in targets(model, self.skip).items()}
            context = context.with_measured(ratio=allocate(curves, weights, self.ratio))
        records = LayerwiseMethod.apply(self, model, batches, context)
        shown = {name: {f"{level:g}": value for level, value in curve.items()} for name, curve in curves.items()}
        return [dataclasses.replace(record, distortion=shown.get(record.name, {})) for record in records]

    @property
    def zeros(self) -> float:
        return self.ratio

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [masked_spec(self.plain(shape), self.zeros, two_of_four=self.pattern == "2:4")]

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        return all(part["format"] == Dense.name for part in parts)

    def plain(self, shape: tuple[int, int]) -> dict[str, Any]:
        """The `Format.spec()` of a weight [out, in] if it were stored with its zeros."""
        return Dense.spec_of(shape)

    def own_passes(self) -> str:
        return "the distortions that allocation='adaptive' measures" if self.allocation == "adaptive" else ""

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        keep = kept(
            self.scores(W, statistics), self.ratio_of(statistics), parse_pattern(self.pattern), by_row=self.by_row
        )
        return [masked(Dense(W * keep), keep, two_of_four=self.pattern == "2:4")]
