"""D2O (Wan et al., 2024, arXiv:2406.13035): layers share the budget by the variance of their attention, and evicted
positions are merged into similar ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.kv.policy import ALLOCATIONS, MASS_ALLOCATIONS, Evicting, Policy
from compress.kv.seen import Seen
from compress.method import knob

ROWS = 256  # evicted keys that are compared with all others at a time


@dataclass(frozen=True, kw_only=True)
class D2O(Policy):
    """Keeps the positions with the most attention and the last ones, and merges evicted positions into similar ones.

    An evicted position is merged into the kept one with the most similar key, if their cosine reaches a threshold: the
    mean of these cosines, which is updated at every further eviction. Keys and values become means with weights
    e^cosine, where the kept position has a cosine of 1. Rotated keys of distant positions are hardly similar, so merged
    keys may lie between rotations; with `merged=values` keys are not changed. Layers share the budget by the variance
    of their attention (`allocation=variance`).

    The authors' code differs from their paper, which is followed here: it takes plain means of rows scaled by their
    cosines, decides for all heads together what is merged, always keeps the first four tokens, and does not compress
    the first two layers and the last one at all. Its budgets are followed here (`allocation.by_variance`).

    Merging keys does not help on the models at hand: on the plain text behind 1,024 tokens, half of them kept with even
    budgets, KL in nats per token is 0.039 merged, 0.025 with values alone, and 0.022 unmerged on SmolLM2-135M (0.037,
    0.024 and 0.023 on gemma3-270m; `seeds/cache_continuation.py`, 4 texts; the ledger has the commands).
    """

    allocation: str = knob("variance", "how the budget is shared out", choices=(*ALLOCATIONS, *MASS_ALLOCATIONS))
    recent: float = knob(0.25, "share of the budget for the last tokens", range=(0.0, 1.0))
    merged: str = knob(
        "both",
        "what evicted positions are merged into: keys and values, values alone, or neither",
        choices=("both", "values", "none"),
        describes=True,
    )
    smoothing: float = knob(
        0.7, "weight of the last eviction in the threshold, against all before it", range=(0.0, 1.0)
    )

    name = "d2o"
    source = "Wan et al. 2024, arXiv:2406.13035, section 3"
    window = 1
    remembers = True
    mass: ClassVar[bool] = True

    @property
    def merges(self) -> bool:
        return self.merged != "none"

    def remember(self, seen: Seen) -> Tensor:
        return seen.memory + seen.summed_attention()

    def scores(self, seen: Seen) -> Tensor:
        recent = (self.target(seen.tokens) * self.recent).long()
        return seen.memory.masked_fill(seen.last(recent), torch.inf)

    def merge(self, evicting: Evicting) -> Evicting:
        cosine, nearest = most_similar(evicting.keys, evicting.keep)
        gone = evicting.valid & ~evicting.keep & (cosine > -torch.inf)
        count = gone.sum(-1)  # [B, H]
        mean = cosine.masked_fill(~gone, 0).sum(-1) / count.clamp(min=1)
        threshold = mean
        if evicting.carried is not None:
            moved = (1 - self.smoothing) * evicting.carried + self.smoothing * mean
            threshold = torch.where(count > 0, moved, evicting.carried)
        joins = gone & (cosine >= threshold[..., None])
        keys, values = (merge_into(x, nearest, cosine, joins) for x in (evicting.keys, evicting.values))
        keys = keys if self.merged == "both" else evicting.keys
        return evicting._replace(keys=keys, values=values, carried=threshold)


def most_similar(keys: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """For every key [B, H, T, D], its largest cosine with a kept key (keep: bool [B, H, T]), and the place of that key,
    [B, H, T]; -inf if no key is kept."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    cosine, nearest = [], []
    for rows in unit.split(ROWS, 2):
        found = (rows @ unit.mT).masked_fill(~keep[:, :, None], -torch.inf).max(-1)
        cosine.append(found.values)
        nearest.append(found.indices)
    return torch.cat(cosine, 2), torch.cat(nearest, 2)


def merge_into(x: Tensor, nearest: Tensor, cosine: Tensor, joins: Tensor) -> Tensor:
    """x [B, H, T, D] with positions that join, bool [B, H, T], averaged into their nearest ones: a joining position has
    the weight e^cosine, the nearest one itself the weight e."""
    weight = cosine.exp().masked_fill(~joins, 0)  # [B, H, T]
    own = torch.full_like(weight, torch.e)
    total = own.scatter_add(2, nearest, weight)
    summed = own[..., None] * x.float()
    added = (weight[..., None] * x.float()).masked_fill(~joins[..., None], 0)
    return (summed.scatter_add(2, nearest[..., None].expand_as(x), added) / total[..., None]).to(x.dtype)
