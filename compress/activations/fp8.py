"""Weights and activations in fp8, 4 bits of exponent and 3 of mantissa (Micikevicius et al., 2022,
arXiv:2209.05433)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from compress.activations.w8a8 import W8A8


@dataclass(frozen=True, kw_only=True)
class FP8(W8A8):
    """Rounds weights and activations to float8 e4m3, scaled so that the largest magnitude takes the code 448."""

    name: ClassVar[str] = "fp8"
    source: ClassVar[str] = "arXiv:2209.05433"
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def remarks(self, device: torch.device) -> list[str]:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
            return []
        return [
            f"{self.name} is emulated: this device ({device.type}) has no fp8 products, so weights and activations "
            "are rounded "
            "to fp8 and multiplied in float32; the accuracy is that of fp8, the speed is not"
        ]
