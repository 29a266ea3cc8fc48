"""Sparse reading for the layers of one cache: by lists of positions if a kernel decodes, and else by masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.kv.attention import attend
from compress.kv.layer import KVLayer, visible_positions
from compress.kv.reading.method import LayerQuery, Reading
from compress.kv.storage import Slab, from_start, joined
from kernels.kv_decode import Listed
from kernels.kv_decode.ranked import Ranked
from kernels.step.cache_view import CacheView, ReadPositions


def choose(scores: Tensor, tokens: Tensor, page: int, wanted: Tensor, most: int) -> Tensor:
    """The pages with the highest scores, and the last one. Pages are counted from the first position of each row.

    Args:
        scores: [B, H, n, P].
        tokens: [B, H], the number of positions of each row.
        wanted: [B, H], the number of positions to read, at most `most`; it is rounded up to pages.

    Returns:
        [B, H, n, K], ascending; -1 in front if a row has fewer pages.
    """
    number, tokens = torch.arange(scores.shape[-1], device=scores.device), tokens[..., None, None]
    scores = scores.masked_fill(number == (tokens - 1) // page, torch.inf)
    scores = scores.masked_fill(number * page >= tokens, -torch.inf)
    top = scores.topk(min(scores.shape[-1], -(-most // page)), -1)
    rank = torch.arange(top.indices.shape[-1], device=scores.device)
    unwanted = (rank * page >= wanted[..., None, None]) | (top.values == -torch.inf)
    return top.indices.masked_fill(unwanted, -1).sort(-1).values


def places(pages: Tensor, starts: Tensor, page: int) -> Tensor:
    """Positions of pages [B, H, ..., K] of rows that begin at starts [B, H]: [B, H, ..., K page], ascending; before the
    start for pages that are -1."""
    at = (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(-2)
    return at + starts.view(*starts.shape, *[1] * (at.dim() - 2))


def masked(pages: Tensor, starts: Tensor, length: int, page: int) -> Tensor:
    """bool [B, H, n, length]: whether a position is in one of the pages [B, H, n, K]."""
    at = places(pages, starts, page)
    at = at.masked_fill((at < starts[..., None, None]) | (at >= length), length)  # one more column, for all others
    chosen = torch.zeros(*pages.shape[:3], length + 1, dtype=torch.bool, device=pages.device)
    return chosen.scatter_(3, at, True)[..., :length]


class Reader:
    """Attends for the layers of one cache by the rules of a `Reading`.

    Args:
        layers: numbers of the layers that keep all positions.
    """

    def __init__(self, reading: Reading, layers: Sequence[int]) -> None:
        self.reading = reading
        self.roles = dict(zip(layers, reading.roles(len(layers)), strict=True))
        # The choice of the last layer that chose, by slab: pages of every token, or a list for the kernel.
        self.last: list[Tensor] = []
        self.lists: list[Listed | Ranked] = []
        self._pages: tuple[int, Tensor, Tensor, int] | None = None  # arguments and result of `_pages_of`

    def attend(
        self,
        layer: KVLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        real: Tensor,
        about: dict[str, Any],
        *,
        by_kernel: bool,
        count: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`KVLayer.attend` for tokens without padding, in a layer that keeps positions."""
        role = self.roles[layer.number]
        by_kernel = by_kernel and layer.kernel_takes(q, about)
        single = by_kernel and q.shape[2] == 1
        if role.reads_all:
            alone = role.chooses and q.shape[2] == 1  # kernels sum over the tokens of a pass
            y, mass = layer.attend(q, k, v, mask, real, about, whole=True, by_kernel=by_kernel, count=count or alone)
            if role.chooses:
                self._note(self._attended(layer, q, real, mass if alone else None), q.shape[2], single)
            return y, mass if count else None
        if role.chooses:
            parts = zip(layer.slabs, layer.split(q), strict=True)
            self._note([LayerQuery(slab, of, about["scaling"]) for slab, of in parts], 0, single)
        if single:
            layer.keep(k, v, real, True)
            return layer.decode(q, about["scaling"], about["softcap"], count, self.lists)
        y = self._by_mask(layer, q, k, v, mask, about)
        layer.keep(k, v, real, True)
        return y, None

    def lend(self, layer: KVLayer) -> CacheView | None:
        """As `KVLayer.lend`; None also if a layer chooses by its attention for later layers."""
        role = self.roles[layer.number]
        if role.reads_all:
            return None if role.chooses else layer.lend()
        if len(layer.slabs) != 1:
            return None
        slab, page, listed = layer.slabs[0], self.reading.page, self.lists[0] if self.lists else None
        if not role.chooses:
            if not isinstance(listed, Listed) or (lent := layer.lend()) is None:
                return None
            lent.sparse = ReadPositions(indices=listed.indices, lengths=listed.lengths)
            return lent
        if not isinstance(slab, Slab) or (edges := self.reading.page_bounds(slab)) is None:
            return None
        before = slab.length
        pages, most = self._pages_of(slab)
        if (lent := layer.lend()) is None:
            return None
        if edges.length * page <= before:
            edges.reserve(1)
            edges.length += 1
        slab.noted += 1
        lent.sparse = ReadPositions(edges.buffer, pages, page, min(most, edges.length))
        return lent

    def _pages_of(self, slab: Slab) -> tuple[Tensor, int]:
        """The number of pages that a query reads of each row of a slab, [B, H] int64, and the largest number for any
        row. Of readings with page bounds: there it depends on the rows' lengths alone, and layers with the same rows
        share the result."""
        if self._pages is None or self._pages[0] != slab.length or not torch.equal(self._pages[1], slab.starts):
            wanted, most = self.reading.share(slab, slab.length)
            page = self.reading.page
            self._pages = slab.length, slab.starts, (wanted + page - 1) // page, -(-most // page)
        return self._pages[2:]

    def _attended(self, layer: KVLayer, q: Tensor, real: Tensor, mass: Tensor | None) -> list[LayerQuery]:
        """The attention of a layer that has read all positions and has already stored the new tokens."""
        n = q.shape[2]
        if mass is None:
            mass = layer.seen_by(q, real).attention(n).sum(2)  # [B, H, n, length]
        else:
            mass = mass[:, :, None]
        found, at = [], 0
        for slab, queries in zip(layer.slabs, layer.split(q), strict=True):
            heads = slab.starts.shape[1]
            own = mass[:, at : at + heads, :, mass.shape[-1] - slab.length : mass.shape[-1] - n]
            own = from_start(own.transpose(2, 3), slab.starts).transpose(2, 3)
            found.append(LayerQuery(slab, queries, layer.about["scaling"], own))
            at += heads
        return found

    def _note(self, queries: Sequence[LayerQuery], new: int, single: bool) -> None:
        """Choose, slab by slab, among the positions before the `new` tokens, which the slabs already hold."""
        reading, page = self.reading, self.reading.page
        self.last, self.lists = [], []
        for query in queries:
            length = query.slab.length - new
            tokens = (length - query.slab.starts).long()
            wanted, most = reading.share(query.slab, length)
            if single:
                pages, most = (wanted + page - 1) // page, -(-most // page)
                more = {"pages": pages, "most": most, "behind": 1}  # behind: the token itself
                self.lists.append(reading.listed(query, query.slab.starts, tokens, **more))
            else:
                self.last.append(choose(reading.scores(query), tokens, page, wanted, most))

    def _by_mask(self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, about: dict) -> Tensor:
        """Attention of any number of tokens, each to the positions that it chose and to the tokens of its pass."""
        old_k, old_v, starts = joined(layer.slabs)
        kept = old_k.shape[2]
        chosen = torch.cat(
            [
                pad(masked(pages, slab.starts, slab.length, self.reading.page), (kept - slab.length, 0))
                for slab, pages in zip(layer.slabs, self.last, strict=True)
            ],
            1,
        )
        visible = visible_positions(starts, kept, mask, q.shape[2]).expand(-1, starts.shape[1], -1, -1)
        visible = torch.cat([visible[..., :kept] & chosen, visible[..., kept:]], -1)
        return attend(q, torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), visible, **about)
