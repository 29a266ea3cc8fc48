"""The information about a layer with which a policy scores the cached positions."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

ROWS = 256  # queries whose attention is computed at a time
ON_CPU = 1 << 19, 16  # on CPUs: numbers at a time, which fit its caches, and the least number of queries


@dataclass
class Seen:
    """The data of a layer when positions are scored. T positions lie in the cache; the last of them belong to the
    queries.

    Attributes:
        keys, values: [B, H_kv, T, D], as attention reads them (keys are rotated); empty if there is `mass`.
        valid: [B, H_kv, T]: False for positions that are no token of that row.
        queries: [B, H_q, n, D] of the last n tokens, n <= T, rotated.
        asked: [B, n]: False for queries that are padding.
        tokens: [B]: real tokens seen so far, kept or not.
        memory: [B, H_kv, T] float32: the result of `Policy.remember` for each position, 0 for new ones; None for
            policies without memory.
        mass: [B, H_kv, T] float32: attention summed over the queries and query heads, if a kernel has summed it up
            already.
        scaling, softcap, sinks: of the attention; sinks [H_q] are scores of an extra position without a value.
        positions: [B, n]: positions of the queries, counted over real tokens.
        layer: this layer's number.
        hidden: [B, n, hidden]: inputs of the attention module for the queries' tokens; None if no policy reads them.
        places: [B, H_kv, T]: original positions, if some queries are of earlier passes; None: the last n positions are
            the queries' own.
        turn: (x [B, H, n, D], positions [B, n], back: bool) -> x rotated to these positions, or back from them.
        known: sums over queries that were computed already, by name; policies that score the same tokens share them.
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
    known: dict[str, Tensor] = field(default_factory=dict)

    def attention(self, last: int) -> Tensor:
        """Attention of the last `last` queries, [B, H_kv, heads that share one, last, T], float32; 0 for those that are
        padding."""
        B, H, T, _ = self.keys.shape
        n = min(last, self.queries.shape[2])
        if n == 0:
            return self.keys.new_zeros(B, H, self.queries.shape[1] // H, 0, T, dtype=torch.float32)
        weights = self._scores(n)
        if self.sinks is not None:
            weights = torch.cat([weights, self._sinks(weights)], -1).softmax(-1)[..., :-1]
        else:
            weights = weights.softmax(-1)
        if self._causal and _all(self.asked):
            return weights
        return weights.masked_fill(~(self.visible(n) & self.asked[:, None, None, -n:, None]), 0.0)

    def _scores(self, n: int) -> Tensor:
        """Scores of the last n queries, as `attention` has them, -inf where a query does not see a position."""
        B, H, T, _ = self.keys.shape
        q = (self.queries[:, :, -n:].float() * self.scaling).unflatten(1, (H, -1))  # [B, H, G, n, D]
        scores = (q.flatten(2, 3) @ self.keys.float().mT).unflatten(2, (-1, n))
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self._causal:
            later = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., T - n :].masked_fill_(later, -torch.inf)
            return scores
        return scores.masked_fill_(~self.visible(n), -torch.inf)

    def _sinks(self, scores: Tensor) -> Tensor:
        return self.sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)

    @property
    def _causal(self) -> bool:
        """Whether queries see all positions up to their own."""
        return self.places is None and _all(self.valid)

    def visible(self, last: int) -> Tensor:
        """bool [B, H_kv, 1, last, T]: whether each of the last queries sees a position."""
        if self.places is None:
            at = torch.arange(self.keys.shape[2], device=self.keys.device)
            seen = at <= at[len(at) - last :, None]  # [last, T]
        else:
            seen = self.places[:, :, None, None] <= self.positions[:, None, None, -last:, None]
        return seen & self.valid[:, :, None, None]

    def probes(self, last: int) -> Tensor:
        """The number of the last queries, without padding, that see a position, [B, H_kv, T]."""
        n = min(last, self.queries.shape[2])
        return (self.visible(n) & self.asked[:, None, None, -n:, None]).sum((2, 3))

    def summed_attention(self) -> Tensor:
        """Attention that each position got, summed over the queries and the heads that share its kv head, [B, H_kv,
        T]."""
        if self.mass is not None:
            return self.mass
        if "summed" not in self.known:
            self.known["summed"] = self.over_queries(
                lambda before, piece: before + piece.attention(len(piece.asked[0])).sum((2, 3))
            )
        return self.known["summed"]

    def largest_attention(self, first: int | None = None) -> Tensor:
        """The largest attention that each position, or each of the `first` ones, got from any query and any head that
        shares its kv head, [B, H_kv, T]."""
        return self.over_queries(lambda before, piece: torch.maximum(before, piece._largest(before.shape[2])), first)

    def _largest(self, first: int) -> Tensor:
        """`largest_attention` of all queries at once."""
        return self.attention(self.queries.shape[2])[..., :first].amax((2, 3))

    def over_queries(self, add: Callable[[Tensor, "Seen"], Tensor], first: int | None = None) -> Tensor:
        """The result [B, H_kv, first or all T] of `add(result so far, piece)` over all pieces of the queries."""
        count, (B, H, T, _) = self.queries.shape[2], self.keys.shape
        total = torch.zeros(B, H, T if first is None else min(first, T), device=self.keys.device)
        rows, whole = ROWS, self.keys.float()  # converted once, not for every piece
        if total.device.type == "cpu":
            most, least = ON_CPU
            rows = max(most // max(B * self.queries.shape[1] * T, 1), least)
        for end in range(count, 0, -rows):  # queries of one piece see nothing behind it
            begin, seen = max(0, end - rows), T - (count - end) if self.places is None else T
            piece = replace(
                self,
                keys=whole[:, :, :seen],
                valid=self.valid[:, :, :seen],
                queries=self.queries[:, :, begin:end],
                asked=self.asked[:, begin:end],
                positions=self.positions[:, begin:end],
                known={},
            )
            total[:, :, :seen] = add(total[:, :, :seen], piece)
        return total

    def order(self) -> Tensor:
        """[B, H_kv, T]: the number of each position among the tokens of its row, from 0; negative for positions that
        are no token."""
        return self.valid.long().cumsum(-1) - 1

    def last(self, count: int | Tensor) -> Tensor:
        """[B, H_kv, T]: whether a position is among the last `count` tokens of its row (count: [B], or for all)."""
        order = self.order()
        count = count[:, None, None] if isinstance(count, Tensor) else count
        return (order > order[..., -1:] - count) & self.valid


def _all(flags: Tensor) -> bool:
    """Whether all flags are True; False for flags on other devices than a CPU, which are not waited for."""
    return flags.device.type == "cpu" and bool(flags.all())
