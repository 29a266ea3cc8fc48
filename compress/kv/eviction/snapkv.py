"""SnapKV (Li et al., 2024, arXiv:2404.14469): keep what the last tokens of the prompt attend to, and its neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keeps the positions that the last tokens of the prompt attend to most, and those last tokens.

    The paper pools by the maximum over 7 or 5 positions in its experiments; the average over 5 is what later work
    settled on.
    """

    observed: int = knob(32, "tokens at the end whose attention counts, and which stay", range=(1, 1024))
    pool: int = knob(5, "positions that are averaged over; odd", range=(1, 101))

    name = "snapkv"
    source = "Li et al. 2024, arXiv:2404.14469, section 4"
    mass = True
    budget_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"`pool` (={self.pool}) of {self.name} must be odd, such as {self.pool + 1}")

    @property
    def window(self) -> int:
        return self.observed

    def scores(self, seen: Seen) -> Tensor:
        recent = seen.last(self.observed)
        weights = seen.attention(self.observed).mean((2, 3)).masked_fill(recent, 0)  # [B, H, T]
        return avg_pool1d(weights, self.pool, stride=1, padding=self.pool // 2).masked_fill(recent, torch.inf)
