"""TidalDecode (Yang et al., 2024, arXiv:2410.05076): two layers read everything and choose positions for the others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.kv.reading.method import LayerQuery, Reading, Role
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class TidalDecode(Reading):
    """Keeps everything, and lets most layers read only the positions to which an earlier layer attended most.

    The first layers read everything. The layer after them and one later layer also read everything, and choose the
    positions for the layers behind them, again for every token. The paper's correction of the cache's errors by
    occasional dense passes is left out.

    The paper chooses for every head by its scores. Here all heads of a layer share one choice, by the sum of their
    attention, because heads with the same number in different layers have nothing in common. On SmolLM2-135M, with a
    quarter of 1,024 tokens read, 10 of 16 answers are right and the KL is 0.29 nats per token; if each kv head chooses
    for the heads with its own number, 4 are right and the KL is 1.63 (second choice in layer 15 of 30, `again=0.5`).

    The best layer for the second choice depends on the model: it is a layer whose heads look up what the question asks
    for, and the layers next to it can be far worse. On SmolLM2-135M it is layer 17 or 18 (15 of 16 right, KL 0.02 and
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

    def scores(self, query: LayerQuery) -> Tensor:
        return query.mass.sum(1, keepdim=True).expand_as(query.mass)
