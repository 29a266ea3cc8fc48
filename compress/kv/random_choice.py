"""Random eviction: what any other policy must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy, Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class RandomEviction(Policy):
    """Keep positions drawn at random, for every head by itself."""

    seed: int = knob(0, "of the draw")

    name = "random_kv"
    reference = True
    source = "a baseline"

    def scores(self, seen: Seen) -> Tensor:
        head = torch.arange(seen.keys.shape[1], device=seen.keys.device)[:, None]
        mixed = (seen.order() + 1) * 0x9E3779B1 + head * 0x85EBCA77 + seen.layer * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # of a token's place alone: the same in any batch
            mixed = ((mixed & 0x7FFFFFFF) ^ ((mixed & 0x7FFFFFFF) >> shift)) * factor
        return ((mixed & 0x7FFFFFFF) ^ ((mixed & 0x7FFFFFFF) >> 15)).float()
