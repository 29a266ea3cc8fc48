"""Rounding of the inputs of linears, for weights in any format: the A of W4A8 and W4A4.

With `outliers` the largest channels share groups in 8 bits, as in COMET (Liu et al., 2024, arXiv:2410.12168).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import FORMATS as STORED
from compress.formats import Dense, Format
from compress.grid.integer import check_group_size
from compress.method import knob
from compress.transforms import Rounding, Transform
from compress.transforms.rounding import FORMATS, GROUPS, SMALLEST
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics

BITS = {"fp8": 8, "mxfp4": 4, "nvfp4": 4}  # bits of a code, for formats that fix them


@dataclass(frozen=True, kw_only=True)
class Activations(LayerwiseMethod):
    """Rounds the inputs of linears to few bits; the weights stay as the methods before it stored them.

    With 4-bit integer weights a CPU with VNNI multiplies the codes themselves, and a GPU with Triton too, those of fp8
    included where it has this type (Hopper, Ada). Everywhere else, and with `outliers` whose channels no earlier method
    has put in order, the rounding is emulated: the result is the same, but it is not faster.
    """

    name: ClassVar[str] = "activations"
    stage: ClassVar[str] = "quantize_activations"
    source: ClassVar[str] = "arXiv:2206.01861, section 3.1 (a step per token); OCP Microscaling Formats 1.0"
    statistics: ClassVar[tuple[str, ...]] = ("rows", "absmax")
    working_set: ClassVar[tuple[float, float]] = (2.0, 0.0)

    bits: int = knob(8, "bits of an integer code on a symmetric grid; for format='int' only", choices=(8, 4))
    format: str = knob(
        "int",
        "integers, fp8 (e4m3), mxfp4 or nvfp4 (e2m1 with a step for 32 or 16 columns)",
        choices=FORMATS,
    )
    group_size: int = knob(-1, "columns of a token that share a step; -1: all of them", range=(-1, 1 << 20))
    static: bool = knob(
        False, "one step for all inputs of a linear, from the calibration tokens; False: one step per token"
    )
    clip: float = knob(1.0, "the share of the largest magnitude that the largest code stands for", range=(0.1, 1.0))
    outliers: float = knob(
        0.0,
        "share of a token's groups that keep 8 bits; these groups hold the channels that were largest on the "
        "calibration tokens, or are the first groups if an earlier method of the recipe has put the largest channels "
        "first",
        range=(0.0, 1.0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = BITS.get(self.format, self.bits)
        if self.format != "int" and self.bits not in (8, wanted):
            raise ValueError(
                f"`bits` (={self.bits}) of {self.name} is for format='int', and format={self.format!r} has {wanted} "
                "bits: leave `bits` out"
            )
        if self.where != "blocks":
            raise ValueError(
                f"`where` (={self.where!r}) of {self.name} must be 'blocks': the inputs of the head stay in 16 bits"
            )
        if self.group_size == 0:
            raise ValueError(f"`group_size` (=0) of {self.name} must be -1 (all columns) or at least 1")
        if self.static and (self.group_size != -1 or self.format in GROUPS):
            raise ValueError(
                f"`static` (=True) of {self.name} is one step for all columns: it needs group_size=-1, and format "
                "'int' or 'fp8'"
            )

        if self.outliers and (self.group_size == -1 or self.format != "int" or self.bits != 4):
            raise ValueError(
                f"`outliers` (={self.outliers}) of {self.name} is a share of groups of 4-bit integers: it needs "
                "bits=4, format='int' and group_size=64 or 128"
            )

    @property
    def code_bits(self) -> int:
        """Bits of a code, for any format."""
        return BITS.get(self.format, self.bits)

    @property
    def needs_calibration(self) -> bool:
        return self.static or self.outliers > 0

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_group_size(GROUPS.get(self.format, self.group_size), name, shape)

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        return not all(STORED[part["format"]].exact for part in parts)  # such parts read inputs as they are

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return list(statistics.stored) or [Dense(W.to(statistics.dtype))]

    def rounding(self, statistics: LayerStatistics) -> Transform:
        bits = self.code_bits
        made = Rounding(bits, self.format, group_size=self.group_size, clip=self.clip)
        if self.outliers:
            absmax = statistics.values["absmax"]
            wide = math.ceil(self.outliers * len(absmax) / self.group_size)
            # Ordered inputs have their largest channels first already, and the groups are those of the product.
            order = None if statistics.ordered else absmax.argsort(descending=True, stable=True)
            return Rounding(bits, group_size=self.group_size, clip=self.clip, order=order, wide=wide)
        if not self.static:
            return made
        largest = statistics.values["absmax"].amax() if statistics.tokens else torch.zeros(())
        if largest < SMALLEST:
            statistics.note(f"a step per token: {statistics.tokens} calibration tokens were all 0")
            return made
        return Rounding(bits, self.format, clip=self.clip, step=largest.float() * self.clip / made.largest)
