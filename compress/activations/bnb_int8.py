"""LLM.int8() computed by bitsandbytes itself, as its Linear8bitLt does, for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats import BnbInt8, Format
from compress.formats.bnb import library
from compress.method import Method, knob, refuse_stored
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class BitsandbytesInt8(LayerwiseMethod):
    """LLM.int8() as bitsandbytes quantises, stores and multiplies it.

    It needs no calibration. With calibration tokens, the recorded errors are errors of the outputs.
    """

    name: ClassVar[str] = "bnb_int8"
    stage: ClassVar[str] = "quantize_activations"
    source: ClassVar[str] = "arXiv:2208.07339, bitsandbytes"
    statistics: ClassVar[tuple[str, ...]] = ("rows",)

    threshold: float = knob(
        6.0, "columns where an input reaches this are multiplied in 16 bits; 0: none", range=(0, 1e9)
    )

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        refuse_stored(self, before, "stores weights in int8 itself")
        return self

    def check(self, model: nn.Module) -> None:
        library()
        super().check(model)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [BnbInt8.spec_of(shape, threshold=self.threshold)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [BnbInt8.from_weight(W, threshold=self.threshold)]

    def remarks(self, device: torch.device) -> list[str]:
        if device.type != "cpu":
            return []
        return [
            f"{self.name}: bitsandbytes {library().__version__} has no CPU kernel for it: torch's int8 product "
            "between plain "
            "torch operations; its speeds here say nothing about a GPU"
        ]
