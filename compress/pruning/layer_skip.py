"""Unified layer skipping (Liu et al., 2024, arXiv:2404.06954): the same evenly spaced blocks are left out for every
token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from compress.method import Method, knob
from compress.pruning.layer_drop import LayerDrop
from compress.walk.blocks import find_blocks
from compress.walk.context import Context
from eval.record.compression import DropRecord


@dataclass(frozen=True, kw_only=True)
class LayerSkip(Method):
    """Removes evenly spaced blocks, so many that the others take the asked share of the time.

    The first and the last block stay where two do. All tokens skip the same blocks, which therefore keep nothing in
    the cache, and batches stay whole. `layer_drop(target=block)` removes those that change the stream least instead.
    """

    name: ClassVar[str] = "layer_skip"
    stage: ClassVar[str] = "drop"
    source: ClassVar[str] = "arXiv:2404.06954"
    needs_calibration: ClassVar[bool] = True

    speed: float = knob(
        1.25,
        "how many times as fast the blocks together should be: of n blocks, n / speed stay, rounded; the embedding and "
        "the head take as long as before",
        range=(1.0, 100.0),
        describes=True,
    )

    def check(self, model: nn.Module) -> None:
        self._drop(model).check(model)

    def own_passes(self) -> str:
        return "how much each layer turns the residual stream"

    def outline(self, model: nn.Module) -> None:
        self._drop(model).outline(model)

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[DropRecord]:
        return self._drop(model).apply(model, batches, context)

    def _drop(self, model: nn.Module) -> LayerDrop:
        """The blocks of this model that are left out, as a drop."""
        count = len(find_blocks(model)[1])
        skipped = skipped_blocks(count, self.speed)
        if not skipped:
            raise ValueError(
                f"`speed` (={self.speed:g}) of layer_skip leaves out none of {count} blocks: it must be more than "
                f"{count / (count - 0.5):.3g} for this model"
            )
        return LayerDrop(target="block", layers=", ".join(map(str, skipped)))


def skipped_blocks(count: int, speed: float) -> list[int]:
    """The numbers of the blocks that are left out, of `count` ones: those between evenly spaced ones that stay."""
    kept = max(1, min(count, int(count / speed + 0.5)))
    stay = {round(i * (count - 1) / max(1, kept - 1)) for i in range(kept)}
    return [index for index in range(count) if index not in stay]
