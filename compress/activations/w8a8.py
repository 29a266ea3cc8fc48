"""Weights and activations in the same 8 bits, rounded to nearest: shared code of the methods for each number
format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import EightBit, Format
from compress.method import Method, knob, refuse_stored
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels.w8a8_matmul import BLOCK, W8, quantize_weight
from kernels.w8a8_matmul.layout import LARGEST, MOST_COLUMNS, SMALLEST, integer_dots


@dataclass(frozen=True, kw_only=True)
class W8A8(LayerwiseMethod):
    """y = scale * step * (codes of W)(codes of x)ᵀ, in one 8-bit type, both grids symmetric around 0."""

    stage: ClassVar[str] = "quantize_activations"
    statistics: ClassVar[tuple[str, ...]] = ("rows", "absmax")
    dtype: ClassVar[torch.dtype]

    activations: str = knob(
        "token",
        "a step per token, computed while the model runs (token), or one step for all inputs of a linear, from the "
        "calibration tokens (tensor)",
        choices=("token", "tensor"),
    )
    weights: str = knob(
        "channel",
        f"a scale per output channel (channel) or per {BLOCK} x {BLOCK} weights (block)",
        choices=("channel", "block"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "block" and self.activations == "tensor":
            raise ValueError(
                f"`weights` (='block') of {self.name} takes steps per token and {BLOCK} columns, so `activations` "
                "(='tensor') "
                "does not go with it; activations='token', or weights='channel', works"
            )

    @property
    def needs_calibration(self) -> bool:
        return self.activations == "tensor"

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_columns(self.name, self.dtype, name, shape)

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        refuse_stored(self, before, "rounds the weights to a grid of its own")
        return self

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        in_blocks, static = self.weights == "block", self.activations == "tensor"
        return [EightBit.spec_of(shape, self.dtype, in_blocks=in_blocks, static=static)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [EightBit(self.weight(W, statistics), self.step(statistics))]

    def weight(self, W: Tensor, statistics: LayerStatistics) -> W8:
        """W [out, in] in 8 bits."""
        return quantize_weight(W, self.dtype, BLOCK if self.weights == "block" else None)

    def step(self, statistics: LayerStatistics) -> Tensor | None:
        """The step of all activations, float32 without dimensions; None: one for each token, computed on each call."""
        if self.activations == "token":
            return None
        largest = statistics.values["absmax"].amax() if statistics.tokens else torch.zeros(())
        if largest < SMALLEST:
            statistics.note(f"a step per token: {statistics.tokens} calibration tokens were all 0")
            return None
        return largest / LARGEST[self.dtype]


def check_columns(method: str, dtype: torch.dtype, name: str, shape: tuple[int, int]) -> None:
    """Raise ValueError if this weight has more columns than the product of this type may sum."""
    if shape[1] > MOST_COLUMNS[dtype]:
        raise ValueError(
            f"in_features (={shape[1]}) of {name} must be at most {MOST_COLUMNS[dtype]} for {method}; `skip` leaves "
            "it out"
        )


def slow_int8(name: str, device: torch.device, *, block: bool = False) -> list[str]:
    """A remark if int8 products are correct but not fast."""
    if device.type != "cpu" or (integer_dots(torch.empty(0)) and not block):
        return []
    why = "with a scale per block" if block else "without AVX512-VNNI"
    return [f"{name} is slow here: {why} a CPU multiplies the int8 codes as floats, exactly but not fast"]
