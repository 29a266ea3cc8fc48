"""PrefixKV (Wang et al., 2024, arXiv:2412.03409): every layer keeps the same share of its attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.kv.policy import ALLOCATIONS, MASS_ALLOCATIONS, Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class PrefixKV(Policy):
    """Keeps the positions with the most attention, so that every layer keeps the same share of its attention.

    The positions are ranked by the sum of attention from all tokens so far, averaged over heads. The share is chosen so
    that all layers together keep the budget; layers with spread attention keep more positions. The paper finds the
    share once on samples; here it is found for each prompt. `allocation=prefix` gives such budgets to other policies of
    attention.
    """

    allocation: str = knob("prefix", "how the budget is shared out", choices=(*ALLOCATIONS, *MASS_ALLOCATIONS))
    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))

    name = "prefixkv"
    source = "Wang et al. 2024, arXiv:2412.03409, section 3"
    window = 1
    remembers = True
    mass: ClassVar[bool] = True

    def remember(self, seen: Seen) -> Tensor:
        return seen.memory + seen.summed_attention().mean(1, keepdim=True)

    def scores(self, seen: Seen) -> Tensor:
        order = seen.order()
        certain = ((order >= 0) & (order < self.sinks)) | seen.last(1)
        return seen.memory.masked_fill(certain, torch.inf)
