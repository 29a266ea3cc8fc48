"""Key norms (Devoto et al., 2024, arXiv:2406.11430): keys of small norm get the attention."""

from dataclasses import dataclass

from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen


@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """Keeps the positions whose keys have the smallest L2 norm."""

    name = "knorm"
    source = "Devoto et al. 2024, arXiv:2406.11430, section 3"

    def scores(self, seen: Seen) -> Tensor:
        return -seen.keys.float().norm(dim=-1)
