"""Expected attention (Devoto et al., 2025, arXiv:2510.00636): keep the positions that future queries will attend to, as
predicted from past queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Keeps the positions that future queries are expected to attend to, as past queries predict them.

    Queries before rotation are modelled as normally distributed, so that the expectation has a closed form:
    E exp(q·k / √d) = exp(μ·k / √d + kᵀ Σ k / 2d), with μ and Σ rotated by the mean rotation of the future positions.
    The score is this expectation, normalised over positions without the sinks, times the norm of the value, which says
    how much a position adds to the output.
    """

    future: int = knob(512, "number of future positions that are averaged over", range=(1, 65536))
    sinks: int = knob(4, "tokens at the beginning that always stay, and whose queries are not counted", range=(0, 1024))
    epsilon: float = knob(
        1e-2,
        "number added to every expected attention; with 0, the norm of a value has no effect where no attention is "
        "expected",
        range=(0.0, 1.0),
    )

    name = "expected_attention"
    source = "Devoto et al. 2025, arXiv:2510.00636, section 3"
    window = 128
    turns = True
    budget_free = True

    def scores(self, seen: Seen) -> Tensor:
        B, H, T, D = seen.keys.shape
        mean, covariance = self._statistics(seen)  # [B, H_q, D], [B, H_q, D, D]
        turned = self._mean_rotation(seen, D)  # [B, D, D]: row j is the image of e_j
        mean = (mean @ turned).unflatten(1, (H, -1))  # [B, H, G, D]
        covariance = (turned.mT[:, None] @ covariance @ turned[:, None]).unflatten(1, (H, -1))
        keys = seen.keys.float() * seen.scaling
        logits = torch.einsum("bhgd,bhtd->bhgt", mean, keys)
        logits += torch.einsum("bhtd,bhgde,bhte->bhgt", keys, covariance, keys) / 2
        if seen.softcap:
            logits = seen.softcap * torch.tanh(logits / seen.softcap)
        order = seen.order()
        sinks = (order >= 0) & (
            order < self.sinks
        )  # which take most of the attention, and would leave epsilon alone to decide
        expected = (
            logits.masked_fill((~seen.valid | sinks)[:, :, None], -torch.inf).softmax(-1).mean(2).nan_to_num()
        )  # [B, H, T]
        return ((expected + self.epsilon) * seen.values.float().norm(dim=-1)).masked_fill(sinks, torch.inf)

    def _statistics(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the queries before rotation, padding and sinks left out."""
        queries = seen.turn(seen.queries.float(), seen.positions.clamp(min=0), True)  # [B, H_q, n, D]
        counted = seen.asked & (seen.positions >= self.sinks)
        counted = torch.where(counted.any(1, keepdim=True), counted, seen.asked)[:, None, :, None].float()
        count = counted.sum(2).clamp(min=1)  # [B, 1, 1]
        mean = (queries * counted).sum(2) / count
        apart = (queries - mean[:, :, None]) * counted
        return mean, apart.mT @ apart / count[..., None]

    def _mean_rotation(self, seen: Seen, channels: int) -> Tensor:
        basis = torch.eye(channels, device=seen.keys.device)[None, :, None].expand(
            len(seen.tokens), -1, self.future, -1
        )
        positions = seen.tokens[:, None] + torch.arange(self.future, device=seen.keys.device)
        return seen.turn(basis, positions, False).mean(2)
