"""Block-wise tuning: stored weights are trained, so that every block gives the outputs of the original block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.method import Method, knob
from compress.tuning.blocks import tune_blocks
from compress.tuning.training import Schedule
from compress.walk.context import Context
from eval.record.compression import LayerRecord

DTYPES = {"model": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
STORING = ("quantize_weights", "correct")


@dataclass(frozen=True, kw_only=True)
class Tune(Method):
    """Trains the roundings and scales that a quantiser stored, block by block, towards the original block's output."""

    name: ClassVar[str] = "tune"
    stage: ClassVar[str] = "tune"
    source: ClassVar[str] = "arXiv:2309.05516, arXiv:2407.11062"
    needs_calibration: ClassVar[bool] = True
    reads_originals: ClassVar[bool] = True
    working_set: ClassVar[tuple[float, float]] = (8.0, 0.0)  # of all linears of a block at once

    steps: int = knob(100, "updates of each block", range=(1, 1 << 20), describes=True)
    batch: int = knob(2, "calibration windows per update", range=(1, 1 << 16))
    rate: float = knob(
        0.01, "size of the first update of a rounding, in steps of the grid; it falls to 0", range=(0, 1)
    )
    scale_rate: float = knob(0.001, "size of the first update of a scale, as a fraction of the scale", range=(0, 1))
    norm_rate: float = knob(
        0.0,
        "size of the first update of the block's norms, as a fraction of their mean; 0: norms are not trained",
        range=(0, 1),
    )
    from_original: bool = knob(
        True,
        "a weight starts at the place of its original value within the step of its code; False: in the middle of the "
        "step",
    )
    sink_weight: float = knob(
        64.0,
        "weight in the loss of each calibration window's first token, to which the later ones attend; 1: as any other",
        range=(0, 1e6),
    )
    dtype: str = knob(
        "bfloat16",
        "dtype of products with the weights in training; model: the dtype of the activations",
        choices=DTYPES,
    )
    skip: str = knob("", "comma-separated name patterns (* and ?) of linears to leave as they are")
    keep_zeros: bool | None = knob(
        None, "weights that are stored as 0 stay 0; None: True if an earlier method of the recipe pruned"
    )

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        if not any(method.stage in STORING for method in before):
            raise ValueError(
                f"`recipe`: {self} trains weights that an earlier method has stored; a weight quantiser before it works"
            )
        pruned = any(method.zeros for method in before)
        return self if self.keep_zeros is not None else replace(self, keep_zeros=pruned)

    def own_passes(self) -> str:
        return "the training of each block"

    def trains(self, longest: int) -> tuple[str, int]:
        return "block", self.batch * longest

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord]:
        schedule = Schedule(
            steps=self.steps,
            batch=self.batch,
            rate=self.rate,
            scale_rate=self.scale_rate,
            norm_rate=self.norm_rate,
            from_original=self.from_original,
            sink_weight=self.sink_weight,
            keep_zeros=bool(self.keep_zeros),
            dtype=DTYPES[self.dtype],
        )
        return tune_blocks(
            model,
            batches,
            context.originals,
            schedule,
            name=self.name,
            skip=self.skip,
            device=context.device,
            store=context.store,
        )
