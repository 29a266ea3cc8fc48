"""Several compressed caches in one batch: row i of the batch reads and extends cache i."""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from compress.kv.attention import expect, expect_again
from compress.kv.cache import CompressedCache, attend_new
from compress.kv.layer import KERNEL_DTYPES, STATES, KVLayer, states_of
from compress.kv.precision import Precision
from compress.kv.storage import DividedSlab, Slab
from compress.kv.support import storing_layers
from kernels.kv_decode import in_cpp
from kernels.kv_decode.apart import kv_append_decode
from kernels.step.cache import NewTokens


class CacheBatch(Cache):
    """A view of caches of one row each, all with the same number of tokens, as one batch for `past_key_values`.

    The layers of a pass are computed once for all rows, and attention to every cache in the form in which it keeps its
    positions: of single tokens on a CPU, where all rows only keep them, in one call of the kernel, else row by row.
    States of linear attention are joined, and the caches hold their rows of them. Caches grow as if each had been used
    alone; they must be `paused`, because nothing is evicted here.

    Raises:
        ValueError: a cache is not paused, or their numbers of tokens differ; states of linear attention are not there
            yet, or kept so that tokens can be removed.
    """

    def __init__(self, caches: Sequence[CompressedCache]) -> None:
        if not all(cache.paused for cache in caches):
            raise ValueError("`caches`: some may evict in this pass; set `paused` of all of them")
        if len(seen := {cache.get_seq_length() for cache in caches}) != 1:
            raise ValueError(f"`caches` have seen {sorted(seen)} tokens; they must have seen as many")
        linear = [x for c in caches for x in c.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        if any(
            layer.record_past or not (states_of(layer) or all(layer.has_previous_state.values())) for layer in linear
        ):
            raise ValueError(
                "`caches`: states of linear attention must be those behind a prompt, and not recorded for guesses; "
                "let the model read a prompt with each cache first"
            )
        # Those of the first cache give transformers the positions and the size of masks.
        super().__init__(layers=[_with_states(layers) for layers in zip(*(c.layers for c in caches), strict=True)])
        self.caches, self.model = list(caches), caches[0].model
        self._storing = storing_layers(self.model)
        self._kept: dict[int, _Kept] = {}  # by layer

    @property
    def knows_padding(self) -> bool:
        """Whether every layer leaves padding out."""
        return all(cache.knows_padding for cache in self.caches)

    def lend(self, number: int) -> None:
        """Nothing: `attend_new` reads the rows of a layer together."""

    def attend_new(self, number: int, module: nn.Module, new: NewTokens) -> Tensor:
        """Take a layer's new tokens and attend, for passes without transformers' modules."""
        return attend_new(self, number, module, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values [rows, H_kv, n, D] of a layer, a row for each cache."""
        if key_states.shape[2] == 1 and layer_idx not in self._storing and self._only_keep(layer_idx):
            expect(partial(self._attend_together, layer_idx, key_states, value_states))
            return key_states, value_states
        self._kept.pop(layer_idx, None)
        given = self._updated(layer_idx, key_states, value_states, *args, **kwargs)
        if not isinstance(self.layers[layer_idx], KVLayer):  # transformers' own attention, of a window
            return tuple(torch.cat(of) for of in zip(*given, strict=True))
        expect(partial(self._attend, layer_idx, [k for k, _ in given], key_states))
        if layer_idx in self._storing:
            expect_again(key_states, partial(self._attend_again, layer_idx, given))
        return key_states, value_states

    def pass_over(self, layer_idx: int, least: Tensor) -> None:
        """Count the tokens of `least` [rows, 1, n, 1] in a layer whose attention was dropped."""
        for cache, row in zip(self.caches, least.split(1), strict=True):
            cache.pass_over(layer_idx, row)

    def _updated(self, layer_idx: int, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
        """What the layer of each cache gives for its row of new keys and values."""
        rows = zip(self.caches, k.split(1), v.split(1), strict=True)
        return [cache.layers[layer_idx].update(*row, *args, **kwargs) for cache, *row in rows]

    def _only_keep(self, layer_idx: int) -> bool:
        """Whether the layer of every cache has a prompt, and only keeps a single token."""
        layers = (cache.layers[layer_idx] for cache in self.caches)
        return all(isinstance(layer, KVLayer) and layer.slabs and not layer.traces for layer in layers) and all(
            cache.only_keeps and cache.reader is None for cache in self.caches
        )

    def _attend_together(
        self,
        layer_idx: int,
        k: Tensor,
        v: Tensor,
        module: nn.Module,
        q: Tensor,
        key: Tensor,
        mask: Tensor | None,
        **about: Any,
    ) -> Tensor:
        """Attention [rows, 1, H_q, D] of one token of each row, k and v [rows, H_kv, 1, D], which is kept."""
        fits = in_cpp(q) and q.dtype in KERNEL_DTYPES and about["sinks"] is None and key is k
        if not fits or not (mask is None or bool(mask.all())):
            own = [k for k, _ in self._updated(layer_idx, k, v)]
            return self._attend(layer_idx, own, k, module, q, key, mask, **about)
        layers = [cache.layers[layer_idx] for cache in self.caches]
        kept = self._kept.get(layer_idx)
        if kept is None or kept.changed(layers):
            kept = self._kept[layer_idx] = _Kept(layers)
        how = {"scale": about["scaling"], "softcap": about["softcap"]}
        kv_heads, shared = k.shape[1], q.shape[1] // k.shape[1]
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        by_head = [x.reshape(len(q) * kv_heads, -1, x.shape[-1]) for x in (q, k, v)]
        alone = list(kept.others)
        for some in kept.forms:
            alone += some.take_one()
            at, held = some.places(len(by_head[0])), some.held
            if some.counts:
                queries, keys, values = (x[at] for x in by_head)
                queries, keys, values = held.turned(queries), held.turned(keys), held.values_turned(values)
                more = {**how, "bits": some.bits, "group": held.group}
                found = kv_append_decode(queries, keys, values, some.columns, some.counts, **more)
                y.view(len(by_head[0]), shared, -1)[at] = held.values_turned(found)
        for slab, numbers in alone:  # a group of positions becomes codes, or steps do not read this form
            row, head = divmod(numbers.start, kv_heads)
            end = head + len(numbers)
            of = slice(row, row + 1), slice(head * shared, end * shared)
            slab.append(k[row : row + 1, head:end], v[row : row + 1, head:end])
            y[of] = slab.attend(q[of], **how)[0]
        for layer in layers:
            layer.count_one()
        return y.transpose(1, 2).contiguous()

    def _attend(
        self,
        layer_idx: int,
        keys: Sequence[Tensor],
        given: Tensor,
        module: nn.Module,
        q: Tensor,
        key: Tensor,
        mask: Tensor | None,
        **about: Any,
    ) -> Tensor:
        """Attention [rows, n, H_q, D] of q [rows, H_q, n, D], row by row.

        Args:
            keys: the keys that each cache's `update` returned. given: the keys that `update` here returned.
        """
        ys = []
        for i, (cache, own, one) in enumerate(zip(self.caches, keys, self._masks(mask), strict=True)):
            # A changed key is passed on, so that the layer refuses it, as it does outside of a batch.
            own = own if key is given else key[i : i + 1]
            ys.append(cache._attend(cache.layers[layer_idx], module, q[i : i + 1], own, one, **about))
        return torch.cat(ys)

    def _masks(self, mask: Tensor | None) -> Sequence[Tensor | None]:
        """The mask of each cache's row."""
        return [None] * len(self.caches) if mask is None else mask.expand(len(self.caches), -1, -1, -1).split(1)

    def _attend_again(
        self,
        layer_idx: int,
        given: Sequence[tuple[Tensor, Tensor]],
        module: nn.Module,
        q: Tensor,
        key: Tensor,
        mask: Tensor | None,
        **about: Any,
    ) -> Tensor:
        """Attention of a later layer that reads this layer's keys and values, of which each cache has `given`."""
        rows = zip(self.caches, q.split(1), given, self._masks(mask), strict=True)
        return torch.cat([cache.layers[layer_idx].attend_beside(x, *kv, one, about) for cache, x, kv, one in rows])

    def end(self) -> None:
        """Finish a pass."""
        for number, layer in enumerate(self.layers):
            own = [cache.layers[number] for cache in self.caches]
            _hand_out(layer, own)  # some models replace their states
            if layer is not own[0]:  # a copy, with the states of all rows
                counts = {name: getattr(own[0], name) for name in ("seen", "cumulative_length") if hasattr(layer, name)}
                vars(layer).update(counts)
        for cache in self.caches:
            cache.finish()


def _with_states(layers: Sequence[CacheLayerMixin]) -> CacheLayerMixin:
    """The first of these layers, each of one row, with the states of all rows."""
    if not isinstance(first := layers[0], LinearAttentionCacheLayerMixin):
        return first
    made = copy.copy(first)
    for name in STATES:
        setattr(made, name, dict(getattr(first, name)))
    for name, key, _ in states_of(first):
        getattr(made, name)[key] = torch.cat([getattr(layer, name)[key] for layer in layers])
    _hand_out(made, layers)
    return made


def _hand_out(joined: CacheLayerMixin, layers: Sequence[CacheLayerMixin]) -> None:
    """Give each layer its row of the joined states."""
    for name, key, state in states_of(joined):
        for layer, row in zip(layers, state.split(1), strict=True):
            getattr(layer, name)[key] = row


class _Kept:
    """What the caches of a batch keep in one layer, by form; found once, and again when a cache has other slabs.

    Attributes:
        forms: heads whose tokens are appended and read by `kv_append_decode`, by form.
        others: other slabs, each with the numbers of its heads in the batch.
    """

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        self.slabs = [layer.slabs for layer in layers]
        self.others: list[tuple[Slab | DividedSlab, range]] = []
        forms: dict[tuple[int, Precision], _Heads] = {}
        start = 0
        for slab in chain(*self.slabs):
            numbers = range(start, start + slab.starts.shape[1])
            if isinstance(slab, Slab) and slab.read_by_steps:
                form = slab.precision.bits if slab.codes else 16, slab.precision
                forms.setdefault(form, _Heads(*form)).add(slab, numbers)
            else:
                self.others.append((slab, numbers))
            start = numbers.stop
        self.forms = list(forms.values())

    def changed(self, layers: Sequence[KVLayer]) -> bool:
        """Whether a cache has other slabs now, or a slab has its first codes."""
        same = all(layer.slabs is before for layer, before in zip(layers, self.slabs, strict=True))
        return not same or any(some.changed for some in self.forms)


class _Heads:
    """Heads of one form, as `kv_append_decode` takes them. What it takes of a slab is looked up again only if its tail
    is another tensor or is full.

    Attributes:
        bits, held: the form; 16 bits if the slabs have no codes.
        columns, counts: of the slabs that take part in this step.
        changed: a slab has codes, and had none.
    """

    def __init__(self, bits: int, held: Precision) -> None:
        self.bits, self.held, self.changed = bits, held, False
        self._slabs: list[tuple[Slab, range]] = []
        self._tails: list[tuple[Tensor | None, int]] = []  # the tensor to which keys are appended, and up to where
        self._columns: list[list[Tensor]] = [[] for _ in range(3 if bits == 16 else 7)]
        self._coded: list[int] = []
        self._behind: list[int] = []  # positions behind those that are codes, without the new one
        self._all: list[int] = []
        self._left: list[int] = []

    def add(self, slab: Slab, numbers: range) -> None:
        """Add a slab, and the numbers of its heads in the batch."""
        self._slabs.append((slab, numbers))
        self._tails.append((None, 0))
        self._coded.append(0)
        self._behind.append(0)
        for column in self._columns:
            column.append(slab.starts)  # until it is looked up
        self._all += numbers

    def take_one(self) -> list[tuple[Slab, range]]:
        """Count the new token in every slab, except in those that it gives back, which do more than append."""
        self._left = []
        for i, ((slab, _), (tail, end)) in enumerate(zip(self._slabs, self._tails, strict=True)):
            keys = slab.k
            if keys.buffer is tail and keys.length < end:
                self._behind[i] = keys.length
                keys.length += 1
                slab.v.length += 1
            elif not self._look_up(i, slab):
                self._left.append(i)
        return [self._slabs[i] for i in self._left]

    def _look_up(self, i: int, slab: Slab) -> bool:
        """Count the new token, and note the tensors of slab i; False if it does more than append."""
        self._tails[i] = None, 0
        self.changed = self.changed or bool(slab.codes) != (self.bits != 16)
        if self.changed or not slab.only_appends:
            for column in self._columns:  # nothing is held that the slab will replace
                column[i] = slab.starts
            return False
        self._coded[i], self._behind[i] = slab.take_one()
        k, v = slab.k.buffer, slab.v.buffer
        own = [k, v, slab.starts]
        if slab.codes:
            codes_k, codes_v, *params = (one.buffer for one in slab.codes)
            own = [codes_k, codes_v, slab.starts, *params, k, v]
        for column, tensor in zip(self._columns, own, strict=True):
            column[i] = tensor
        self._tails[i] = k, min(k.shape[2], v.shape[2], slab.k.length + slab.free)
        return True

    @property
    def columns(self) -> list[list[Tensor]]:
        return [self._without(column) for column in self._columns]

    @property
    def counts(self) -> list[int]:
        pairs = zip(self._without(self._coded), self._without(self._behind), strict=True)
        return list(chain.from_iterable(pairs))

    def places(self, heads: int) -> Tensor | slice:
        """The numbers of these heads among all heads of the batch."""
        if not self._left:
            return slice(None) if len(self._all) == heads else torch.tensor(self._all)
        return torch.tensor([number for _, numbers in self._without(self._slabs) for number in numbers])

    def _without(self, of: list) -> list:
        """Of a list by slab, the elements of those that take part in this step."""
        left = set(self._left)
        return [one for i, one in enumerate(of) if i not in left] if left else of
