"""Shared code of the methods that weight errors by the squared gradients of the model's loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.method import Method
from compress.walk.context import Context
from compress.walk.fisher import fisher
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from eval.record.compression import LayerRecord


@dataclass(frozen=True, kw_only=True)
class FisherMethod(LayerwiseMethod):
    """A method that is given F [out, in] of every linear, measured in a pass of its own before the first is solved."""

    stage: ClassVar[str] = "quantize_weights"
    needs_calibration: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where != "blocks":
            raise ValueError(f"`where` (={self.where!r}) of {self.name} must be 'blocks': it cannot store embeddings")

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord]:
        folder = context.store and context.store.folder.parent
        gradients = fisher(model, batches, device=context.device, folder=folder)
        return LayerwiseMethod.apply(self, model, batches, context.with_measured(fisher=gradients))

    def own_passes(self) -> str:
        return "the squared gradients"

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for method in before:
            if method.stage == "sparsify":
                raise ValueError(
                    f"`recipe`: {self} takes gradients of floats, and {method} before it stores weights: leave "
                    f"{method} out"
                )
        return self

    def fisher_of(self, statistics: LayerStatistics, W: Tensor) -> Tensor:
        """F of a linear; ones, if no calibration token reached it."""
        F = statistics.measured["fisher"].to(W.device)
        if F.any():
            return F
        statistics.note("no gradient reached it: all weights count alike")
        return torch.ones_like(W)
