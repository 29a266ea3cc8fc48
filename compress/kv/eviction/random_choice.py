"""Random eviction: the baseline that any other policy must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class RandomEviction(Policy):
    """Keeps cached positions that are drawn at random, for each head separately."""

    seed: int = knob(0, "seed of the draw")

    name = "random_kv"
    remembers = True
    reference = True
    source = "a baseline"

    def scores(self, seen: Seen) -> Tensor:
        return seen.memory

    def remember(self, seen: Seen) -> Tensor:
        """A fixed number for each token, computed from its place alone, so that it is the same in any batch."""
        order = seen.order()
        place = (
            seen.tokens[:, None, None] - order[..., -1:] + order
        )  # correct for the latest tokens, and only these are new
        head = torch.arange(seen.valid.shape[1], device=seen.valid.device)[:, None]
        mixed = place * 0x9E3779B1 + head * 0x85EBCA77 + seen.layer * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
            mixed = ((mixed & 0x7FFFFFFF) ^ ((mixed & 0x7FFFFFFF) >> shift)) * factor
        drawn = ((mixed & 0x7FFFFFFF) ^ ((mixed & 0x7FFFFFFF) >> 15)).float() + 1
        return torch.where(seen.memory == 0, drawn, seen.memory)
