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
    layers behind them, anew for every token. Its correction of the cache's errors by dense passes now and then is left
    out.

    The paper chooses for every head by its scores. Here all heads of a layer share one choice, by the sum of their
    attention, because a head is not kin to the head of the same number in another layer: on SmolLM2-135M, with a
    quarter of 1,024 tokens read, 10 of 16 answers are right and the KL is 0.29 nats per token, where each kv head
    choosing for its own number gives 4 and 1.63 (second choice in layer 15 of 30, `again=0.5`).

    The layer of the second choice is a property of the model: one whose heads look up what is asked for serves the
    layers behind it, and its neighbours do not. On SmolLM2-135M that is layer 17 or 18 (15 of 16 right, KL 0.02 and
    0.03, as many right as with the full cache, and 14 or 15 with a tenth read); 16, 19 and 21 are far worse. Layer 18
    is the default; for another model try several: `workbench run kv_eviction -p recipe "tidaldecode" -p curves
    "tidaldecode(again={0.4, 0.45, 0.5, 0.55, 0.6, 0.65})"`.
    """

    full_layers: int = knob(
        2, "layers at the beginning that read everything, before the first that chooses", range=(0, 1024)
    )
    again: float = knob(
        0.6, "depth of the second layer that chooses, as a share of the layers; 1: none", range=(0.0, 1.0)
    )

    name = "tidaldecode"
    source = "Yang et al. 2024, arXiv:2410.05076, section 3"
    shares: ClassVar[bool] = True

    def roles(self, layers: int) -> list[Role]:
        choosing = {self.full_layers, max(int(self.again * layers), self.full_layers)}
        return [Role(i < self.full_layers or i in choosing, i in choosing) for i in range(layers)]

    def scores(self, glance: Glance) -> Tensor:
        return glance.mass.sum(1, keepdim=True).expand_as(glance.mass)
