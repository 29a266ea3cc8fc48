"""Steps of decoding by torch.compile, the way of users that our own graphs must beat."""

import os

import torch

from kernels.step.gpu.body import OwnBody
from kernels.step.gpu.graphs import WARMING, Graphs
from kernels.step.gpu.stored import Room
from kernels.step.recognition.parts import NotNative


class CompiledGraphs(Graphs):
    """Steps of the model's own code in `torch.compile(mode="reduce-overhead")`, which captures CUDA graphs itself.

    Attributes:
        how: the way, and whether it captured a graph.
    """

    how = 'torch.compile(mode="reduce-overhead")'

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, fused=False, capture=False)

    def _body(self, batch: int, positions: int, room: Room | None) -> OwnBody:
        """Compiled and warmed up. An error of the compiler, or a model for which it has given up, is raised."""
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            raise NotNative("the compiler is switched off")
        from torch._dynamo.utils import counters  # the compiler takes a second to import

        body, skipped = super()._body(batch, positions, room), counters["inductor"]["cudagraph_skips"]
        body.model = torch.compile(self.model, mode="reduce-overhead", dynamic=False)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(WARMING + 1):
                body.at(0)
                body(torch.zeros(batch, 1, dtype=torch.int64, device=body.device))
        body.at(0)
        if counters["inductor"]["cudagraph_skips"] > skipped:
            self.how = f"{CompiledGraphs.how}, a part without a CUDA graph"
        return body
