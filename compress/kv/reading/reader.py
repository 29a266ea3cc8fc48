"""How the layers of one cache read sparsely: by lists of positions where a kernel decodes, and by masks elsewhere."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.kv.attention import attend
from compress.kv.layer import KVLayer, visible_positions
from compress.kv.reading.method import Glance, Reading
from compress.kv.storage import Slab, from_start, joined


class Listed(NamedTuple):
    """Positions that one token reads, as `kernels.kv_decode` takes them: indices [B, H_kv, m], starts and lengths [B,
    H_kv]."""

    indices: Tensor
    starts: Tensor
    lengths: Tensor


def choose(scores: Tensor, tokens: Tensor, page: int, wanted: Tensor, most: int) -> Tensor:
    """The pages with the highest scores, and the last one. Pages are counted from the first position of each row.

    Args:
        scores: [B, H, n, P].
        tokens: [B, H]: positions of each row.
        wanted: [B, H] positions, `most` at most, rounded up to pages.

    Returns:
        [B, H, n, K], ascending; -1 in front where a row has fewer.
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


def listed(pages: Tensor, starts: Tensor, length: int, page: int) -> Listed:
    """The positions of pages [B, H, K], as `choose` gives them for one query, and the token itself at `length`."""
    at = places(pages, starts, page)
    begins, ends = (at < starts[..., None]).sum(-1), (at < length).sum(-1)
    indices = pad(at.clamp(0, length), (0, 1)).scatter(2, ends[..., None], length)
    return Listed(indices, begins, ends + 1 - begins)


def masked(pages: Tensor, starts: Tensor, length: int, page: int) -> Tensor:
    """bool [B, H, n, length]: is a position in one of the pages [B, H, n, K]?"""
    at = places(pages, starts, page)
    at = at.masked_fill((at < starts[..., None, None]) | (at >= length), length)  # one more column, for all else
    chosen = torch.zeros(*pages.shape[:3], length + 1, dtype=torch.bool, device=pages.device)
    return chosen.scatter_(3, at, True)[..., :length]


class Reader:
    """Reads for the layers of one cache, as a `Reading` says.

    Args:
        layers: numbers of the layers that keep all positions.
    """

    def __init__(self, reading: Reading, layers: Sequence[int]) -> None:
        self.reading = reading
        self.roles = dict(zip(layers, reading.roles(len(layers)), strict=True))
        self.last: list[Tensor] = []  # pages by slab, as the last layer that chose has chosen them

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
        """`KVLayer.attend` of tokens without padding, of a layer that keeps something."""
        role = self.roles[layer.number]
        if role.reads_all:
            alone = role.chooses and q.shape[2] == 1  # kernels sum over the tokens of a pass
            y, mass = layer.attend(q, k, v, mask, real, about, by_kernel=by_kernel, count=count or alone)
            if role.chooses:
                self.last = self._chosen_by(layer, q, real, mass if alone else None)
            return y, mass if count else None
        if role.chooses:
            parts = zip(layer.slabs, layer.split(q), strict=True)
            self.last = [self._choose(slab, Glance(slab, of, about["scaling"]), slab.length) for slab, of in parts]
        if by_kernel and q.shape[2] == 1 and layer.kernel_takes(q, about):
            page = self.reading.page
            lists = [
                listed(pages[:, :, 0], slab.starts, slab.length, page)
                for slab, pages in zip(layer.slabs, self.last, strict=True)
            ]
            layer.keep(k, v, real, True)
            return layer.decode(q, about["scaling"], about["softcap"], count, lists)
        y = self._by_mask(layer, q, k, v, mask, about)
        layer.keep(k, v, real, True)
        return y, None

    def _chosen_by(self, layer: KVLayer, q: Tensor, real: Tensor, mass: Tensor | None) -> list[Tensor]:
        """By the attention of a layer that has read everything and keeps the new tokens already."""
        n = q.shape[2]
        if mass is None:
            mass = layer.seen_by(q, real).attention(n).sum(2)  # [B, H, n, length]
        else:
            mass = mass[:, :, None]
        found, at = [], 0
        for slab, queries in zip(layer.slabs, layer.split(q), strict=True):
            heads, length = slab.starts.shape[1], slab.length - n
            own = mass[:, at : at + heads, :, mass.shape[-1] - slab.length : mass.shape[-1] - n]
            own = from_start(own.transpose(2, 3), slab.starts).transpose(2, 3)
            found.append(self._choose(slab, Glance(slab, queries, layer.about["scaling"], own), length))
            at += heads
        return found

    def _choose(self, slab: Slab, glance: Glance, length: int) -> Tensor:
        reading = self.reading
        tokens = (length - slab.starts).long()
        return choose(reading.scores(glance), tokens, reading.page, reading.wanted(tokens), reading.most(length))

    def _by_mask(self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, about: dict) -> Tensor:
        """Attention of any number of tokens, each with the positions that it chose and its own pass."""
        old_k, old_v, starts = joined(layer.slabs)
        kept = old_k.shape[2]
        chosen = torch.cat(
            [
                pad(masked(pages, slab.starts, slab.length, self.reading.page), (kept - slab.length, 0))
                for slab, pages in zip(layer.slabs, self.last, strict=True)
            ],
            1,
        )
        visible = visible_positions(starts, kept, mask, q.shape[2])
        visible = torch.cat([visible[..., :kept] & chosen, visible[..., kept:]], -1)
        return attend(q, torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), visible, **about)
