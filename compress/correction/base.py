"""Shared code of the stage `correct`: the allowed places in a recipe, and the matrix by which errors are weighted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.method import Method, knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class Correction(LayerwiseMethod):
    """Adds parts to every weight that an earlier method of the recipe stored, fitted to its quantisation error.

    `solve` is given R = W - Ŵ, with W the weight before the recipe stored it, and returns the parts to add to Ŵ. The
    walk measures the inputs again, as the outputs of the compressed and corrected layers before them.
    """

    stage: ClassVar[str] = "correct"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram", "starts")
    adds: ClassVar[bool] = True

    sink_weight: float = knob(
        64.0,
        "weight in H of each calibration window's first token, to which the later ones attend; 1: as any other token",
        range=(0, 1e6),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(f"`where` (={self.where!r}) of {self.name} must be 'blocks': it corrects no embedding")

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        if not any(method.stage in ("sparsify", "quantize_weights") for method in before):
            raise ValueError(
                f"`recipe`: {self} corrects what an earlier method of the recipe stored, and none before it stores "
                "weights: rtn or gptq before it works"
            )
        for method in after:
            if method.stage == "quantize_activations" and method.stores((64, 64)) is not None:
                raise ValueError(
                    f"`recipe`: {method} would store weights anew, including the parts that {self} added: leave one out"
                )
        return self

    def gram(self, statistics: LayerStatistics) -> Tensor | None:
        """H [in, in] of the layer's inputs, with the windows' first tokens counted `sink_weight` times; None without
        inputs.

        Linears that read the same input share it.
        """
        return gram_with_sinks(statistics, self.sink_weight, self.stage)


def gram_with_sinks(statistics: LayerStatistics, sink_weight: float, stage: str) -> Tensor | None:
    """H [in, in] of a layer's inputs, with the windows' first tokens counted `sink_weight` times; None without inputs.

    Linears that read the same input share it among the methods of one stage.
    """
    if not statistics.tokens:
        return None
    key = (stage, sink_weight)
    if key not in statistics.shared:
        H, first = statistics.values["gram"], statistics.values["starts"]
        more = (sink_weight - 1) * 2 / statistics.tokens
        statistics.shared[key] = H.addmm(first.t(), first, alpha=more) if more and len(first) else H
    return statistics.shared[key]
