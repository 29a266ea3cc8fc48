"""TOVA (Oren et al., 2024, arXiv:2401.06104): keep what the last token attends to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keeps the positions with the most attention from the last token, averaged over the heads of the layer."""

    name = "tova"
    source = "Oren et al. 2024, arXiv:2401.06104, section 3.2"
    window = 1
    mass = True
    budget_free = True

    def scores(self, seen: Seen) -> Tensor:
        weights = seen.attention(1).mean((1, 2, 3))  # [B, T]
        return weights[:, None].expand(seen.valid.shape).masked_fill(seen.last(1), torch.inf)
