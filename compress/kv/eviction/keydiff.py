"""KeyDiff (Park et al., 2025, arXiv:2504.15364): keep the keys that differ most from the others."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from compress.kv.policy import Policy
from compress.kv.seen import Seen


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keeps the keys whose direction differs most from the mean direction of the head's keys."""

    name = "keydiff"
    source = "Park et al. 2025, arXiv:2504.15364, algorithm 1"
    budget_free = True

    def scores(self, seen: Seen) -> Tensor:
        keys = seen.keys.float()
        real = seen.valid[..., None]
        anchor = (normalize(keys, dim=-1) * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(
            min=1
        )  # [B, H, 1, D]
        return -cosine_similarity(keys, anchor, dim=-1)
