"""Several compressed caches in one batch: row i of the batch reads and extends cache i."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from compress.kv.attention import expect, expect_again
from compress.kv.cache import CompressedCache
from compress.kv.layer import KVLayer
from compress.kv.support import storing_layers


class CacheBatch(Cache):
    """A view of caches of one row each, all with the same number of tokens, as one batch for `past_key_values`.

    The layers of a pass are computed once for all rows, and attention by every cache itself, in the form in which it
    keeps its positions. Caches grow as if each had been used alone; they must be `paused`, because nothing is evicted
    here.

    Raises:
        ValueError: a cache is not paused, or their numbers of tokens differ.
    """

    def __init__(self, caches: Sequence[CompressedCache]) -> None:
        if not all(cache.paused for cache in caches):
            raise ValueError("`caches`: some may evict in this pass; set `paused` of all of them")
        if len(seen := {cache.get_seq_length() for cache in caches}) != 1:
            raise ValueError(f"`caches` have seen {sorted(seen)} tokens; they must have seen as many")
        super().__init__(layers=caches[0].layers)  # they give transformers the positions and the size of masks
        self.caches = list(caches)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values [rows, H_kv, n, D] of a layer, a row for each cache."""
        rows = zip(self.caches, key_states.split(1), value_states.split(1), strict=True)
        given = [cache.layers[layer_idx].update(k, v, *args, **kwargs) for cache, k, v in rows]
        if not isinstance(self.layers[layer_idx], KVLayer):  # transformers' own attention, of a window
            return tuple(torch.cat(of) for of in zip(*given, strict=True))
        expect(partial(self._attend, layer_idx, [k for k, _ in given], key_states))
        if layer_idx in storing_layers(self.caches[0].model):
            expect_again(key_states, partial(self._attend_again, layer_idx, given))
        return key_states, value_states

    def pass_over(self, layer_idx: int, least: Tensor) -> None:
        """Count the tokens of `least` [rows, 1, n, 1] in a layer whose attention was dropped."""
        for cache, row in zip(self.caches, least.split(1), strict=True):
            cache.pass_over(layer_idx, row)

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
