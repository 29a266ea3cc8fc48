"""What a policy knows of a layer when it scores the cached positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS = 256  # queries whose attention is computed at a time


@dataclass
class Seen:
    """What a layer knows when positions are scored. T positions lie in the cache, the last of them are the queries'
    own.

    Attributes:
        keys, values: [B, H_kv, T, D], as attention reads them (keys are rotated); empty where there is `mass`.
        valid: [B, H_kv, T]: False for what is no token of that row.
        queries: [B, H_q, n, D] of the last n tokens, n <= T, rotated.
        asked: [B, n]: False for queries that are padding.
        tokens: [B]: real tokens seen so far, kept or not.
        memory: [B, H_kv, T] float32: what `Policy.remember` said of each position, 0 for new ones; None where it says
            nothing.
        mass: [B, H_kv, T] float32: attention summed over the queries and query heads where a kernel has counted it
            already.
        scaling, softcap, sinks: of the attention; sinks [H_q] are scores of something without a value.
        positions: [B, n]: positions of the queries, counted over real tokens.
        layer: this layer's number.
        hidden: [B, n, hidden]: what the attention module got for the queries' tokens; None where nobody reads it.
        places: [B, H_kv, T]: positions of what is kept, where queries are of earlier passes too; None: the last n are
            their own.
        turn: (x [B, H, n, D], positions [B, n], back: bool) -> x rotated to these positions, or back from them.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    queries: Tensor
    asked: Tensor
    scaling: float
    positions: Tensor
    tokens: Tensor
    layer: int
    turn: Callable[[Tensor, Tensor, bool], Tensor]
    softcap: float | None = None
    sinks: Tensor | None = None
    memory: Tensor | None = None
    mass: Tensor | None = None
    places: Tensor | None = None
    hidden: Tensor | None = None

    def attention(self, last: int) -> Tensor:
        """Attention of the last `last` queries, [B, H_kv, heads that share one, last, T], float32; 0 for those that are
        padding."""
        B, H, T, _ = self.keys.shape
        n = min(last, self.queries.shape[2])
        if n == 0:
            return self.keys.new_zeros(B, H, self.queries.shape[1] // H, 0, T, dtype=torch.float32)
        q = self.queries[:, :, -n:].unflatten(1, (H, -1)).float()  # [B, H, G, n, D]
        scores = torch.einsum("bhgnd,bhtd->bhgnt", q, self.keys.float()) * self.scaling
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        visible = self.visible(n)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, H, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.masked_fill(~(visible & self.asked[:, None, None, -n:, None]), 0.0)

    def visible(self, last: int) -> Tensor:
        """bool [B, H_kv, 1, last, T]: does each of the last queries see a position?"""
        if self.places is None:
            at = torch.arange(self.keys.shape[2], device=self.keys.device)
            seen = at <= at[len(at) - last :, None]  # [last, T]
        else:
            seen = self.places[:, :, None, None] <= self.positions[:, None, None, -last:, None]
        return seen & self.valid[:, :, None, None]

    def probes(self, last: int) -> Tensor:
        """How many of the last queries that are no padding see a position, [B, H_kv, T]."""
        n = min(last, self.queries.shape[2])
        return (self.visible(n) & self.asked[:, None, None, -n:, None]).sum((2, 3))

    def summed_attention(self) -> Tensor:
        """Attention that each position got, summed over the queries and the heads that share its kv head, [B, H_kv,
        T]."""
        if self.mass is not None:
            return self.mass
        return self._over_queries(lambda before, weights: before + weights.sum((2, 3)))

    def largest_attention(self) -> Tensor:
        """The most attention that each position got from any query and head that shares its kv head, [B, H_kv, T]."""
        return self._over_queries(lambda before, weights: torch.maximum(before, weights.amax((2, 3))))

    def _over_queries(self, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        count, T = self.queries.shape[2], self.keys.shape[2]
        total = torch.zeros(self.keys.shape[:3], device=self.keys.device)
        for end in range(count, 0, -ROWS):  # queries of one piece see nothing behind it
            begin, seen = max(0, end - ROWS), T - (count - end) if self.places is None else T
            piece = replace(
                self,
                keys=self.keys[:, :, :seen],
                valid=self.valid[:, :, :seen],
                queries=self.queries[:, :, begin:end],
                asked=self.asked[:, begin:end],
                positions=self.positions[:, begin:end],
            )
            total[:, :, :seen] = add(total[:, :, :seen], piece.attention(ROWS))
        return total

    def order(self) -> Tensor:
        """[B, H_kv, T]: the number of each position among the tokens of its row, from 0; negative for what is no
        token."""
        return self.valid.long().cumsum(-1) - 1

    def last(self, count: int | Tensor) -> Tensor:
        """[B, H_kv, T]: is it among the last `count` tokens of its row ([B], or for all)?"""
        order = self.order()
        count = count[:, None, None] if isinstance(count, Tensor) else count
        return (order > order[..., -1:] - count) & self.valid
