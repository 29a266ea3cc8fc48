"""TidalDecode (Yang et al., 2024, arXiv:2410.05076): two layers read everything and choose positions for the others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.kv.reading.method import Glance, Reading, Role
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class TidalDecode(Reading):
    """Keeps everything, and lets most layers read only the positions to which an earlier layer attended most.

    The first layers read everything; the layer after them and one further on do so too and choose the positions for the
    layers behind them, anew for every token. The paper chooses for every query head by its scores; here query heads
    that share a kv head share the choice, by the sum of their attention, because what one of them reads the kernel
    reads for all. Its correction of the cache's errors by dense passes now and then is left out.
    """

    full_layers: int = knob(
        2, "layers at the beginning that read everything, before the first that chooses", range=(0, 1024)
    )
    again: float = knob(
        0.5, "depth of the second layer that chooses, as a share of the layers; 1: none", range=(0.0, 1.0)
    )

    name = "tidaldecode"
    source = "Yang et al. 2024, arXiv:2410.05076, section 3"
    shares: ClassVar[bool] = True

    def roles(self, layers: int) -> list[Role]:
        choosing = {self.full_layers, max(int(self.again * layers), self.full_layers)}
        return [Role(i < self.full_layers or i in choosing, i in choosing) for i in range(layers)]

    def scores(self, glance: Glance) -> Tensor:
        return glance.mass
