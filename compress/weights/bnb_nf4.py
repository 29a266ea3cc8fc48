"""NF4 computed by bitsandbytes itself, as a model loaded with its Linear4bit has it, for comparison."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats import BnbNF4, Format
from compress.formats.bnb import BLOCKSIZES, cpu_kernel, library
from compress.method import knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics


@dataclass(frozen=True, kw_only=True)
class BitsandbytesNF4(LayerwiseMethod):
    """NF4 as bitsandbytes quantises, stores and multiplies it.

    As in bitsandbytes, blocks run over the flattened weight, so that they need not divide the columns. One difference:
    on a CPU with AVX512-BF16, Linear4bit rounds float32 activations to bfloat16, and this method does not.
    """

    name: ClassVar[str] = "bnb_nf4"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2305.14314, bitsandbytes"

    blocksize: int = knob(64, "weights that share a scale, counted row by row", choices=BLOCKSIZES)
    double_quant: bool = knob(
        True, "store scales in 8 bits, with one float32 for 256 of them; False: scales in float32"
    )

    def check(self, model: nn.Module) -> None:
        library()
        super().check(model)

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        if shape[0] * shape[1] % 2:
            raise ValueError(
                f"{self.name} cannot store an odd number of weights, {shape[0]} x {shape[1]} of {name}; name it in "
                "`skip`"
            )

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [BnbNF4.spec_of(shape, blocksize=self.blocksize)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [BnbNF4.from_weight(W, blocksize=self.blocksize, double_quant=self.double_quant)]

    def remarks(self, device: torch.device) -> list[str]:
        if device.type != "cpu":
            return []
        version = f"{self.name}: bitsandbytes {library().__version__}"
        if cpu_kernel(device):
            return [
                f"{version} multiplies bfloat16 activations with its own AVX512-BF16 kernel (its scales in bfloat16) "
                "where the "
                f"rows are a multiple of 32, and dequantises for others: its speeds here say nothing about a GPU"
            ]
        return [
            f"{version} has no fused kernel for this CPU and dequantises for every product: its speeds here say "
            "nothing about "
            "a GPU"
        ]
