"""What a policy of the KV cache is: a rule that scores cached positions, a budget, and how the budget is shared out.

How others fit: D2O's merging and low rank (xKV, MatryoshkaKV) are stages of storage, after eviction
(`Storage.precision` grows); PrefixKV, ZipVL and Locret are `scores` and `allocation`s; GemFilter is a policy whose
`read_again` runs the first layers only, where kvzip's runs the model; TidalDecode and ShadowKV choose at every token
what is read, which is a mode of `KVLayer.attend`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from compress.kv.storage import Precision
from compress.method import Method, knob

if TYPE_CHECKING:
    from compress.kv.cache import CompressedCache

ALLOCATIONS = ("uniform", "pyramid", "ada", "global")
ROWS = 256  # queries whose attention is made at a time


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
        if self.places is None:
            at = torch.arange(T, device=scores.device)
            visible = at <= at[T - n :, None]  # [n, T]
        else:
            visible = self.places[:, :, None, None] <= self.positions[:, None, None, -n:, None]
        visible = visible & self.valid[:, :, None, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, H, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.masked_fill(~(visible & self.asked[:, None, None, -n:, None]), 0.0)

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


@dataclass(frozen=True, kw_only=True)
class CacheMethod(Method):
    """A method that changes how a model's KV cache is kept, during generation; the weights stay as they are."""

    stage = "cache"

    def apply(self, model: nn.Module, batches=(), *, device=None, store=None, originals=None) -> list:
        from compress.kv.attach import attach

        attach(model, [self])
        return []

    def check(self, model: nn.Module) -> None:
        from compress.kv.attach import check_model

        check_model(model)

    def remarks(self, device: torch.device) -> list[str]:
        return [
            f"{self.name} acts on the cache while text is generated: what is scored without a cache, such as "
            "perplexity, does "
            "not see it, timed decoding keeps its own cache, and a saved model is saved without it."
        ]


@dataclass(frozen=True, kw_only=True)
class Storage(CacheMethod):
    """How what stays is stored."""

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        if others := [other for other in (*before, *after) if isinstance(other, Storage)]:
            raise ValueError(f"`recipe`: {self} and {others[0]} both decide how positions are stored; keep one")
        return self

    @property
    def precision(self) -> Precision:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Policy(CacheMethod):
    """Which positions stay. Subclasses implement `scores`, and what it needs of `remember` and `read_again`."""

    budget: float | int = knob(
        0.5, "what stays: a share of the tokens (a float up to 1), or a number of tokens per head"
    )
    allocation: str = knob(
        "uniform",
        "how the budget is shared out: as much for every head; more for early layers (pyramid); "
        "to the highest scores of a layer (ada) or of all (global)",
        choices=ALLOCATIONS,
    )
    decoding: bool = knob(False, "evict while text is generated too, every eighth of the budget (8 tokens at least)")

    strength: ClassVar[str] = "budget"
    reference: ClassVar[bool] = False  # is it what any other policy must beat?
    window: ClassVar[int] = 0  # how many queries `scores` reads while text is generated; 0: none
    remembers: ClassVar[bool] = False  # is there something to remember of each position from pass to pass?
    runs_model: ClassVar[bool] = False  # does scoring take passes of the whole model?

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.budget >= 1 and self.budget == int(self.budget) if self._counts else 0 < self.budget <= 1):
            raise ValueError(
                f"`budget` (={self.budget!r}) of {self.name} must be a share above 0, up to 1.0, or a number of "
                "tokens, 1 or more"
            )
        if self.decoding and self.runs_model:
            raise ValueError(
                f"`decoding` (=True): {self.name} reads the prompt again to score it, which it cannot do "
                "at every token; leave it out"
            )

    @property
    def _counts(self) -> bool:
        """Is the budget a number of tokens? 1.0 is all of them, and 1 is one; command lines may write 256 as 256.0."""
        return type(self.budget) is int or 1 < self.budget < math.inf

    def scores(self, seen: Seen) -> Tensor:
        """How much each position matters.

        Returns:
            [B, H_kv, T] float32, finite or inf; the highest stay, inf before all others. Comparable between heads, if
            allocations that compare them are to mean something.
        """
        raise NotImplementedError

    def remember(self, seen: Seen) -> Tensor:
        """For policies with `remembers`, at every pass: what `seen.memory` becomes, before `scores` is asked; no knob
        of the budget has a say in it."""
        raise NotImplementedError

    def read_again(self, model: nn.Module, cache: "CompressedCache") -> None:
        """For policies with `runs_model`, after a prompt: fill the `memory` of every layer with passes over it."""
        raise NotImplementedError

    def target(self, tokens: Tensor) -> Tensor:
        """How many positions of a row stay, of `tokens` [B] that it has seen."""
        if self._counts:
            return torch.full_like(tokens, int(self.budget))
        return (tokens * self.budget).round().long().clamp(min=1)

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if isinstance(other, Policy):
                raise ValueError(f"`recipe`: {self} and {other} both decide which positions stay; keep one")
        return self


def kept(scores: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [B, H] highest scores [B, H, T] of valid positions; the latest of equal, and of too many infinite,
    ones."""
    place = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)
    certain = torch.isposinf(scores) & valid
    crowded = certain.sum(-1, keepdim=True) > counts[..., None]
    scores = torch.where(crowded, torch.where(certain, place, -1.0), scores).masked_fill(~valid, -torch.inf)
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = (
        torch.empty_like(order)
        .scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
        .flip(-1)
    )
    return (rank < counts[..., None]) & valid
