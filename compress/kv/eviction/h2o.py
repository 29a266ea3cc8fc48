"""H2O (Zhang et al., 2023, arXiv:2306.14048): keep heavy hitters, which got the most attention so far, and recent
tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keeps the positions with the largest sum of attention from all tokens so far, and the last tokens.

    With `decoding`, the decode kernels continue the sums while text is generated.
    """

    recent: float = knob(0.5, "share of the budget for the last tokens", range=(0.0, 1.0))

    name = "h2o"
    source = "Zhang et al. 2023, arXiv:2306.14048, algorithm 1"
    window = 1
    remembers = True
    mass = True

    def remember(self, seen: Seen) -> Tensor:
        return seen.memory + seen.summed_attention()

    def scores(self, seen: Seen) -> Tensor:
        recent = (self.target(seen.tokens) * self.recent).long()
        return seen.memory.masked_fill(seen.last(recent), torch.inf)
