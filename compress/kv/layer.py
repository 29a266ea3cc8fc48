"""One layer of a compressed cache: it takes new keys and values, attends, keeps, and evicts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from compress.kv.allocation import kept
from compress.kv.attention import attend
from compress.kv.growing import Growing
from compress.kv.policy import Evicting
from compress.kv.precision import Precision
from compress.kv.seen import Seen
from compress.kv.storage import DividedSlab, Slab, joined, lend_slabs, right_packed, slabs_of, taken
from kernels.kv_decode import MAX_TOKENS as KERNEL_TOKENS
from kernels.kv_decode import Listed
from kernels.kv_decode.apart import kv_decode_apart
from kernels.kv_decode.ranked import Ranked
from kernels.step.cache_view import CacheView

EXACT = Precision()
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STATES = ("conv_states", "recurrent_states")  # of linear attention, state spaces and convolutions


def states_of(layer: CacheLayerMixin) -> list[tuple[str, int, Tensor]]:
    """Every state of a layer: the name of the dict that holds it, its key there, and itself [rows, ...]."""
    held = [(name, getattr(layer, name, None) or {}) for name in STATES]
    return [(name, key, one) for name, states in held for key, one in states.items() if one is not None]


class KVLayer(DynamicLayer):
    """The kept keys and values of one layer, as `storage.Slab`s.

    `seen` counts all tokens, as transformers does, with padding; `tokens` [B] counts the tokens of each row without
    padding. The cache decides which positions are evicted and when; a layer does not know its cache or its policy.

    Args:
        number: the number of the layer in the model.
        precision: the precision of kept positions after the eviction.
        lesser: precision of the positions that `divide` chooses; None: there are none.
        evicts: there will be an eviction after the prompt; until then positions are kept without compression.
        remembers: keep a number for every position, `memory`, for a policy to fill, in this dtype after an eviction.
        traces: keep the place of every position, `positions`.
    """

    def __init__(
        self,
        number: int,
        *,
        precision: Precision = EXACT,
        lesser: Precision | None = None,
        evicts: bool = False,
        remembers: torch.dtype | None = None,
        traces: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.precision, self.lesser = number, precision, lesser
        self.evicts, self.remembers, self.traces = evicts, remembers, traces
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.slabs: list[Slab | DividedSlab] = []
        self.seen, self.fresh = 0, 0  # fresh: number of tokens since the last `evict`
        self.evicted = False  # whether any position was evicted
        self.unpadded = True  # whether no token that this layer met was padding
        self.idle_until = 0  # tokens seen before which no row can be due for an eviction
        self._tokens: Tensor | None = None
        self._since: Tensor | None = None
        self._lent = 0  # tokens of every row that `lend` has counted, but not yet these two
        self.memory: Growing | None = None  # [B, H, length], a policy's number for each position
        self.positions: Growing | None = None  # [B, H, length], original positions
        self.queries: Tensor | None = None  # [B, H_q, n, D] the last ones
        self.asked: Tensor | None = None
        self.carried: Tensor | None = None  # [B, H], numbers that a merging policy keeps between evictions
        self.hidden: Tensor | None = None  # [B, n, hidden], inputs of the queries' tokens, if a cache observes
        self.about: dict[str, Any] = {}  # scaling, softcap, turn of the last attention
        self.incoming: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False

    # The interface of a cache layer of transformers.

    def get_seq_length(self) -> int:
        """Tokens seen, kept or not: the next token's position."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of transformers' mask, which covers only the new tokens: kept positions lie before all of them."""
        return query_length, self.seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new keys and values [B, H_kv, n, D]; the attention that follows keeps them."""
        if self.incoming is not None:
            self.incoming = None
            raise RuntimeError(
                f"layer {self.number} of the compressed cache got keys twice without attention in between: the model "
                "must be attached (`compress.kv.attach`), and its attention must take the keys as the cache gives them"
            )
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.incoming = (key_states, value_states)
        return key_states, value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is given as a negative number.

        Raises:
            ValueError: an eviction has already scored them, or they are stored as codes.
        """
        count = abs(tokens_to_remove)
        if count == 0 or not self.slabs:
            self.seen -= count
            return
        if self.evicts and count > self.fresh:
            raise ValueError(
                f"the last {count} tokens cannot be taken back: an eviction came after all but {self.fresh} of them. "
                "Assisted "
                "decoding needs that: generate without an assistant, or without a policy that evicts (storage alone "
                "will do)"
            )
        for slab in self.slabs:
            slab.drop_last(count)
        for one in filter(None, (self.memory, self.positions)):
            one.drop_last(count)
        self.seen, self.fresh, self.tokens = self.seen - count, max(self.fresh - count, 0), self.tokens - count
        self.idle_until = 0
        if self.queries is not None:
            self.queries, self.asked = self.queries[:, :, :-count], self.asked[:, :-count]
        if self.hidden is not None:
            self.hidden = self.hidden[:, :-count]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row beam_idx[i]."""
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._rows(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._rows(lambda x: x.repeat_interleave(repeats, 0))

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for slab in self.slabs:
            slab.rows(change)
        for one in filter(None, (self.memory, self.positions)):
            one.rows(change)
        for name in ("tokens", "since", "queries", "asked", "carried", "hidden"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    # The kept positions.

    @property
    def lengths(self) -> Tensor:
        """Positions that each row keeps, [B, H_kv]."""
        return torch.cat([slab.lengths for slab in self.slabs], 1)

    @property
    def length(self) -> int:
        """Positions of the longest row."""
        return max((slab.length for slab in self.slabs), default=0)

    @property
    def valid(self) -> Tensor:
        """bool [B, H_kv, length]"""
        longest = self.length
        return torch.arange(longest, device=self.device) >= (longest - self.lengths)[..., None]

    @property
    def held(self) -> list[Tensor]:
        """Every tensor that this layer holds from one pass to the next."""
        buffers = [x for slab in self.slabs for x in slab.held]
        more = [one.buffer for one in (self.memory, self.positions) if one is not None]
        single = (self.queries, self.asked, self.tokens, self.since, self.carried, self.hidden)
        return [*buffers, *more, *(x for x in single if x is not None)]

    def kept_positions(self) -> list[list[Tensor]]:
        """By row and head, the original positions of the kept tokens, counted over the row's real tokens; needs
        `traces`."""
        return [
            [row[valid] for row, valid in zip(rows, valids, strict=True)]
            for rows, valids in zip(self.positions.view, self.valid, strict=True)
        ]

    # A pass.

    def take_incoming(self, module: nn.Module, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the current pass, once.

        Raises:
            ValueError: the attention module was given other keys than those that `update` returned.
        """
        k, v = self.incoming
        self.incoming = None
        if key is not k:
            raise ValueError(
                f"{type(module).__name__} changes keys that the cache gave it: a compressed cache cannot serve it"
            )
        return k, v

    def attend_beside(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, about: dict[str, Any]) -> Tensor:
        """Attention of the new tokens to kept and new positions, [B, n, H_q, D]; the layer does not change.

        Args:
            q: [B, H_q, n, D], of the last n new tokens. k, v: [B, H_kv, new, D].
            mask: bool [B, 1, n, new] among the new tokens; None: each new token sees the new tokens up to itself.
            about: scaling, softcap and sinks of the attention.
        """
        if not self.slabs:
            return attend(q, k, v, mask, **about)
        old_k, old_v, starts = joined(self.slabs)
        visible = visible_positions(starts, old_k.shape[2], mask, q.shape[2], k.shape[2])
        return attend(q, torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), visible, **about)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        real: Tensor,
        about: dict[str, Any],
        *,
        whole: bool,
        by_kernel: bool,
        count: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `attend_beside` does, and then keep the new tokens.

        Args:
            real: bool [B, n], False for padding.
            whole: there is no padding.
            by_kernel: decode with the kernel, if it supports this attention.
            count: also sum up the attention that each position gets, if the kernel can do so.

        Returns:
            y [B, n, H_q, D], and the attention that each position got, [B, H_kv, length], or None.
        """
        n = k.shape[2]
        if not self.slabs or not whole or n > KERNEL_TOKENS:
            y = self.attend_beside(q, k, v, mask, about)
            self.keep(k, v, real, whole)
            return y, None
        self.keep(k, v, real, whole)  # decoding: new tokens may become codes before they are read
        if by_kernel and self.kernel_takes(q, about):
            return self.decode(q, about["scaling"], about["softcap"], count)
        k, v, starts = joined(self.slabs)
        return attend(q, k, v, visible_positions(starts, k.shape[2] - n, mask, n), **about), None

    def kernel_takes(self, q: Tensor, about: dict[str, Any]) -> bool:
        """Whether the decode kernel supports this attention."""
        return about["sinks"] is None and q.dtype in KERNEL_DTYPES

    def split(self, q: Tensor) -> tuple[Tensor, ...]:
        """Queries [B, H_q, n, D] by slab."""
        heads = [slab.starts.shape[1] for slab in self.slabs]
        return q.split([q.shape[1] // sum(heads) * count for count in heads], 1)

    def decode(
        self,
        q: Tensor,
        scaling: float,
        softcap: float | None,
        count: bool,
        lists: Sequence[Listed | Ranked] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the kernel for each slab: y [B, n, H_q, D], and each position's attention, [B, H_kv, length].

        lists: by slab, the positions that are read; empty: all.
        """
        if len(self.slabs) > 1 and not count and not lists:
            return self._decode_apart(q, scaling, softcap).transpose(1, 2).contiguous(), None
        ys, masses = [], []
        for i, (slab, of) in enumerate(zip(self.slabs, self.split(q), strict=True)):
            listed = lists[i] if lists else None
            y, mass = slab.attend(of, scale=scaling, softcap=softcap, count=count, listed=listed)
            ys.append(y)
            if count:
                masses.append(nn.functional.pad(mass, (self.length - slab.length, 0)))
        y = torch.cat(ys, 1) if len(ys) > 1 else ys[0]
        return y.transpose(1, 2).contiguous(), torch.cat(masses, 1) if count else None

    def _decode_apart(self, q: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Run the kernel once for all slabs: [B, H_q, n, D]."""
        caches, starts = [slab.kv() for slab in self.slabs], [slab.starts for slab in self.slabs]
        if all(slab.as_they_came for slab in self.slabs):
            return kv_decode_apart(q, caches, starts, scale=scaling, softcap=softcap)
        queries = torch.cat([slab.queries(of) for slab, of in zip(self.slabs, self.split(q), strict=True)], 1)
        y = kv_decode_apart(queries, caches, starts, scale=scaling, softcap=softcap)
        return torch.cat([slab.lifted(of) for slab, of in zip(self.slabs, self.split(y), strict=True)], 1)

    def keep(self, k: Tensor, v: Tensor, real: Tensor, whole: bool) -> None:
        """Append k, v [B, H_kv, n, D] without padding (real [B, n] is False there). whole: there is no padding."""
        B, H, n, _ = k.shape
        new = real[:, None].expand(B, H, n)
        self._count(real.sum(1) if self.tokens is None or not whole else n)
        place = None
        if self.traces or self.positions is not None:
            place = (self.tokens[:, None] - real.flip(1).cumsum(1).flip(1)).to(torch.int32)[:, None].expand(B, H, n)
        if not self.slabs:
            # Codes are made after the eviction, or as soon as the precision of each position is known.
            self.slabs = slabs_of(k, v, new, EXACT if self.evicts or self.lesser else self.precision)
            self._start_traces(place, new)
        else:
            for slab, (a, b) in self._heads():
                slab.append(k[:, a:b], v[:, a:b])
            self._extend_memory(n)
            if self.positions is not None:
                self.positions.append(place)
        self.seen, self.fresh = self.seen + n, self.fresh + n
        if not whole and self.length > n:  # remove padding between tokens
            self.keep_only(torch.cat([self.valid[..., :-n], new], -1))

    def lend(self) -> CacheView | None:
        """The kept positions, for a step of decoding that itself appends a token to every row; this token is counted
        as kept. None if the step would have to do more than append."""
        if not self.slabs or self.divided or self.traces or (given := lend_slabs(self.slabs)) is None:
            return None
        self.count_one()
        return given

    def count_one(self) -> None:
        """Count one more token of every row, which a step writes into the slabs."""
        self._lent += 1
        self._extend_memory(1)
        self.seen, self.fresh = self.seen + 1, self.fresh + 1

    def _count(self, tokens: int | Tensor) -> None:
        """Count this number of further tokens in each row, [B] or one number for all."""
        if self._tokens is None:
            self._tokens, self._since = tokens, tokens.clone()
        else:
            self._tokens, self._since = self._tokens + tokens, self._since + tokens

    def _settle_count(self) -> None:
        if self._lent:
            lent, self._lent = self._lent, 0
            self._count(lent)

    @property
    def tokens(self) -> Tensor | None:
        """[B] tokens per row, without padding; None before the first."""
        self._settle_count()
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: Tensor) -> None:
        self._settle_count()
        self._tokens = tokens

    @property
    def since(self) -> Tensor | None:
        """[B] tokens per row since the row's last eviction."""
        self._settle_count()
        return self._since

    @since.setter
    def since(self, since: Tensor) -> None:
        self._settle_count()
        self._since = since

    def _extend_memory(self, n: int) -> None:
        if self.memory is not None:
            self.memory.extend(n)

    def _start_traces(self, place: Tensor | None, new: Tensor) -> None:
        index, _ = right_packed(new)
        if self.remembers is not None:
            self.memory = Growing(torch.zeros(index.shape, device=index.device))
        if self.traces:
            self.positions = Growing(taken(place, index))

    def _heads(self) -> Iterator[tuple[Slab, tuple[int, int]]]:
        at = 0
        for slab in self.slabs:
            yield slab, (at, at + slab.starts.shape[1])
            at += slab.starts.shape[1]

    def seen_by(
        self,
        queries: Tensor,
        asked: Tensor,
        mass: Tensor | None = None,
        hidden: Tensor | None = None,
        known: dict[str, Tensor] | None = None,
    ) -> Seen:
        """The data for a policy's scores: the present cache and the queries of the last tokens; without keys if `mass`
        is given; `known` as in `Seen`."""
        k, v, _ = joined(self.slabs) if mass is None else (queries[:, :, :0], queries[:, :, :0], None)
        place = self.tokens[:, None] - asked.flip(1).cumsum(1).flip(1)
        memory, places = (None if one is None else one.view for one in (self.memory, self.positions))
        if not self.evicted and not self.divided:
            places = None  # all tokens are kept in their order; the last ones are the queries' own
        return Seen(
            k,
            v,
            self.valid,
            queries,
            asked,
            positions=place,
            tokens=self.tokens,
            layer=self.number,
            memory=memory,
            mass=mass,
            places=places,
            hidden=hidden,
            known={} if known is None else known,
            **self.about,
        )

    def keep_only(self, keep: Tensor, merge: Callable[[Evicting], Evicting] | None = None) -> None:
        """Keep these positions, bool [B, H_kv, length], and free the others, which `merge` merges into them before."""
        k, v, _ = joined(self.slabs)
        if merge is not None:
            k, v, _, _, self.carried = merge(Evicting(k, v, keep, self.valid, self.carried))
        if self.divided:
            keep = self.slabs[0].part.masked_fill(~keep, 0)
            self.slabs = [DividedSlab(k, v, keep, self.lesser, self.precision)]
        else:
            self.slabs = slabs_of(k, v, keep, self.precision if self.lesser is None else EXACT, fill=True)
        self._follow(keep)

    @property
    def divided(self) -> bool:
        """Whether positions are stored in two precisions."""
        return bool(self.slabs) and isinstance(self.slabs[0], DividedSlab)

    def divide(self, important: Tensor) -> None:
        """Store positions that are not important, bool [B, H_kv, length], permanently in the lesser precision."""
        k, v, _ = joined(self.slabs)
        part = torch.where(important, 2, 1).to(torch.uint8).masked_fill(~self.valid, 0)
        if self.divided:
            part = torch.minimum(part, self.slabs[0].part)
        self.slabs = [DividedSlab(k, v, part, self.lesser, self.precision)]
        self._follow(part)

    def _follow(self, keep: Tensor) -> None:
        """Reorder `memory` and `positions` like the slabs, which were packed by keep, [B, H_kv, length]."""
        index, _ = right_packed(keep, self.length)
        if self.memory is not None:
            self.memory = Growing(taken(self.memory.view, index).to(self.remembers))
        if self.positions is not None:
            self.positions = Growing(taken(self.positions.view, index))

    def evict(self, scores: Tensor, counts: Tensor, merge: Callable[[Evicting], Evicting] | None = None) -> None:
        """Keep the `counts` [B, H_kv] highest scores [B, H_kv, length] of every row; `merge`: of a policy, or None."""
        valid = self.valid
        if bool((counts < valid.sum(-1)).any()) or self.slabs[0].precision != self.precision:
            self.keep_only(kept(scores, valid, counts), merge)
            self.evicted = True
        self.fresh = 0


class HybridLayer(KVLayer, LinearAttentionAndFullAttentionLayer):
    """The kept keys and values of a layer that has attention and a state space side by side, as Falcon-H1 and Zamba2
    have, with its states. Only keys and values are compressed.

    Args:
        states: the number of states. more: see `KVLayer`.
    """

    def __init__(self, number: int, *, states: int = 1, **more: Any) -> None:
        KVLayer.__init__(self, number, **more)
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self._of_states = [name for name, value in vars(self).items() if isinstance(value, dict) and name != "about"]

    def copy_states(self) -> dict[str, Any]:
        """A copy of the states, and of what says which of them are there, as attributes."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self._of_states}

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be removed."""
        return LinearAttentionLayer.is_croppable.fget(self)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        KVLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is given as a negative number."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KVLayer.crop(self, tokens_to_remove)

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, key, state in states_of(self):
            getattr(self, name)[key] = change(state)
        super()._rows(change)


def packed(queries: Tensor, asked: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Queries [B, H, n, D] with real tokens last, as their keys are in the cache; common padding is removed. whole: all
    tokens are known to be real; else the host waits for the device to see it."""
    if whole or bool(asked.all()):
        return queries, asked
    order = asked.to(torch.uint8).argsort(dim=1, stable=True)[:, asked.shape[1] - max(int(asked.sum(1).max()), 1) :]
    return taken(queries, order[:, None].expand(-1, queries.shape[1], -1)), asked.gather(1, order)


def visible_positions(starts: Tensor, kept: int, mask: Tensor | None, n: int, new: int | None = None) -> Tensor:
    """bool [B, H_kv or 1, n, kept + new]: the kept positions of a row, and the new tokens (n, if `new` is None) up to
    each of the last n. One mask serves all heads if they keep the same number, which is tested on CPUs alone: other
    devices would have to be waited for."""
    device = starts.device
    if device.type == "cpu" and bool((starts == starts[:, :1]).all()):
        starts = starts[:, :1]
    new = n if new is None else new
    own = torch.ones(n, new, dtype=torch.bool, device=device).tril(new - n)[None, None] if mask is None else mask
    old = torch.arange(kept, device=device) >= starts[..., None]  # [B, H, kept]
    B, H = starts.shape
    return torch.cat([old[:, :, None].expand(B, H, n, kept), own[..., -new:].expand(B, H, n, new)], -1)
