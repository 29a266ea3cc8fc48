"""StreamingLLM (Xiao et al., 2024, arXiv:2309.17453): the first tokens, which get much attention in any text, and the
last ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Keeps a few tokens at the beginning (sinks) and a window of the last tokens.

    The paper gives kept tokens new positions; here keys keep their positions, so that the cache is read like those of
    other policies.
    """

    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))

    name = "streaming"
    reference = True
    source = "Xiao et al. 2024, arXiv:2309.17453, section 3"

    def scores(self, seen: Seen) -> Tensor:
        order = seen.order().float()
        return torch.where((order >= 0) & (order < self.sinks), torch.inf, order)
