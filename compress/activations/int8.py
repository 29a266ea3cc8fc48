"""Weights and activations in int8, rounded to nearest: the W8A8 of SmoothQuant (Xiao et al., 2022, arXiv:2211.10438,
section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.activations.w8a8 import W8A8, slow_int8
from compress.formats import Format, IntGroup
from compress.method import Method
from compress.walk.statistics import LayerStatistics
from kernels.int_matmul import to_rows, unpack
from kernels.w8a8_matmul import W8

ROWS = {"bits": 8, "group_size": -1, "symmetric": True}  # knobs of a method whose codes can be kept


@dataclass(frozen=True, kw_only=True)
class Int8(W8A8):
    """Rounds weights and activations to int8.

    If an earlier method of the recipe stored 8 bits with one symmetric scale per row, its codes are kept as they are,
    including the code -128 and negative scales, which rounding to nearest does not produce.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "arXiv:2211.10438"
    dtype: ClassVar[torch.dtype] = torch.int8

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for method in before:
            if method.stage != "quantize_weights" or not method.places & self.places:
                continue
            if any(method.values().get(key) != value for key, value in ROWS.items()):
                wanted = ", ".join(f"{key}={value}" for key, value in ROWS.items())
                does = f"{method.name}({wanted}) works" if ROWS.keys() <= method.knobs().keys() else "leave it out"
                raise ValueError(
                    f"`recipe`: {self.name} keeps 8-bit weights with a scale per row, not those of {method}: {does}"
                )
            if self.weights != "channel":
                raise ValueError(
                    f"`weights` (={self.weights!r}) of {self.name} does not keep the codes of {method}: "
                    "weights='channel' does"
                )
        return self

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        rows = IntGroup.spec_of(tuple(parts[0]["shape"]), **ROWS)
        return super().takes(parts) or parts == [rows] and self.weights == "channel"

    def weight(self, W: Tensor, statistics: LayerStatistics) -> W8:
        kept = codes_per_row(statistics.stored)
        return super().weight(W, statistics) if kept is None else kept

    def remarks(self, device: torch.device) -> list[str]:
        return slow_int8(self.name, device, block=self.weights == "block")


def codes_per_row(parts: Sequence[Format]) -> W8 | None:
    """The stored codes, if the parts are only 8 bits with one symmetric scale per row; else None."""
    if len(parts) != 1 or not isinstance(parts[0], IntGroup):
        return None
    packed = to_rows(parts[0].packed)
    if packed.bits != 8 or packed.zero is not None or packed.group_size != packed.shape[1]:
        return None
    codes = unpack(packed)[0].to(torch.int16) - 128
    return W8("rows", codes.to(torch.int8).contiguous(), packed.scale.float().reshape(-1), packed.shape)
