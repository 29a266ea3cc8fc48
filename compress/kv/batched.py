"""Several compressed caches in one batch: row i of the batch reads and extends cache i."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from compress.kv.attention import expect, expect_again
from compress.kv.cache import CompressedCache, attend_new
from compress.kv.layer import KERNEL_DTYPES, KVLayer
from compress.kv.storage import Slab
from compress.kv.support import storing_layers
from kernels.kv_decode import in_cpp
from kernels.kv_decode.apart import kv_append_decode
from kernels.step.cache import NewTokens


class CacheBatch(Cache):
    """A view of caches of one row each, all with the same number of tokens, as one batch for `past_key_values`.

    The layers of a pass are computed once for all rows, and attention to every cache in the form in which it keeps its
    positions: of single tokens on a CPU, where all rows only keep them, in one call of the kernel, else row by row.
    Caches grow as if each had been used alone; they must be `paused`, because nothing is evicted here.

    Raises:
        ValueError: a cache is not paused, or their numbers of tokens differ.
    """

    def __init__(self, caches: Sequence[CompressedCache]) -> None:
        if not all(cache.paused for cache in caches):
            raise ValueError("`caches`: some may evict in this pass; set `paused` of all of them")
        if len(seen := {cache.get_seq_length() for cache in caches}) != 1:
            raise ValueError(f"`caches` have seen {sorted(seen)} tokens; they must have seen as many")
        super().__init__(layers=caches[0].layers)  # they give transformers the positions and the size of masks
        self.caches, self.model = list(caches), caches[0].model
        self._storing = storing_layers(self.model)

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
        how, forms = {"scale": about["scaling"], "softcap": about["softcap"]}, dict[tuple, _Heads]()
        kv_heads, shared = k.shape[1], q.shape[1] // k.shape[1]
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row, cache in enumerate(self.caches):
            layer, head = cache.layers[layer_idx], 0
            for slab in layer.slabs:
                end = head + slab.starts.shape[1]
                if isinstance(slab, Slab) and slab.only_appends:
                    form = slab.precision.bits if slab.codes else 16, slab.precision
                    forms.setdefault(form, _Heads()).add(slab, range(row * kv_heads + head, row * kv_heads + end))
                else:  # a group of positions becomes codes, or steps do not read this form
                    of = slice(row, row + 1), slice(head * shared, end * shared)
                    slab.append(k[row : row + 1, head:end], v[row : row + 1, head:end])
                    y[of] = slab.attend(q[of], **how)[0]
                head = end
            layer.count_one()
        heads = len(q) * kv_heads
        by_head = [x.reshape(heads, -1, x.shape[-1]) for x in (q, k, v)]
        for (bits, held), some in forms.items():
            at = slice(None) if len(some.numbers) == heads else torch.tensor(some.numbers)
            queries, keys, values = (x[at] for x in by_head)
            queries, keys, values = held.turned(queries), held.turned(keys), held.values_turned(values)
            more = {**how, "bits": bits, "group": held.group}
            found = kv_append_decode(queries, keys, values, some.columns, some.counts, **more)
            y.view(heads, shared, -1)[at] = held.values_turned(found)
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
        for cache in self.caches:
            cache.finish()


class _Heads:
    """Some heads of the rows of a layer, of one form, as `kv_append_decode` takes them. numbers: in the batch."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.counts: list[int] = []
        self.columns: list[list[Tensor]] = []

    def add(self, slab: Slab, numbers: Iterable[int]) -> None:
        """Add the heads of a slab, which counts the new token."""
        self.counts += slab.take_one()
        own = [slab.k.buffer, slab.v.buffer]
        if slab.codes:
            own = [*(one.buffer for one in slab.codes), *own]
        self.columns = self.columns or [[] for _ in range(len(own) + 1)]
        for column, tensor in zip(self.columns, (own[0], own[1], slab.starts, *own[2:]), strict=True):
            column.append(tensor)
        self.numbers += numbers
