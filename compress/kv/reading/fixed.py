"""Sparse reading of caches of fixed tensors, for compiled steps: lists of fixed size, of which the first part is
used."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compress.kv.growing import Growing
from compress.kv.reading.method import LayerQuery, Reading, Role
from compress.kv.storage import from_start
from kernels.kv_decode import KV, Listed, kv_decode
from kernels.kv_decode.ranked import Ranked, kv_decode_ranked
from kernels.step.cache_view import ReadPositions


class FixedSlab(Protocol):
    """Keys and values with room behind them; row (b, h) is positions starts[b, h] to starts[b, h] + lengths[b, h].

    Attributes:
        length: number of positions, including the room.
        notes, noted: as in `compress.kv.storage.Slab`.
    """

    kv: KV
    starts: Tensor
    lengths: Tensor
    length: int
    notes: list[Growing]
    noted: int

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, H_q, n, D] in the form for held keys."""

    def lifted(self, y: Tensor) -> Tensor:
        """Sums of held values [B, H_q, n, R], lifted back to all channels."""


class SharedChoice(NamedTuple):
    """Choices that layers pass on to later layers; all layers hold the same number of positions.

    Attributes:
        chosen: the last choice of a layer that chooses for others; as long as the longest list.
        pages: [B, H_kv] int64, the number of pages that a token reads.
    """

    chosen: Listed
    pages: Tensor


class FixedReading:
    """The reading of one layer of fixed tensors. The bounds of pages are not updated: this is for timing.

    Args:
        first: whether this layer is the first that chooses; it sets the number of pages that a token reads for all.
        most: the largest number of pages that a token may read.
    """

    def __init__(self, reading: Reading, role: Role, shared: SharedChoice, first: bool, most: int) -> None:
        self.reading, self.role, self.shared, self.first, self.most = reading, role, shared, first, most

    def attend(self, slab: FixedSlab, q: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """q [B, H_q, 1, D] -> the same shape."""
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        turned, more = slab.queries(q), {"scale": scaling, "softcap": softcap}
        if self.role.reads_all:
            if not self.role.chooses:
                return slab.lifted(kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, **more))
            y, mass = kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, return_mass=True, **more)
            query = LayerQuery(slab, q, scaling, from_start(mass, slab.starts)[:, :, None])
            found = self._list(slab, query)
            self._leave(self.shared.chosen, found.listed() if isinstance(found, Ranked) else found)
            return slab.lifted(y)
        chosen: Listed | Ranked = self.shared.chosen
        if self.role.chooses:
            chosen = self._list(slab, LayerQuery(slab, q, scaling))
        if isinstance(chosen, Ranked):
            return slab.lifted(kv_decode_ranked(turned, slab.kv, chosen, **more))
        return slab.lifted(kv_decode(turned, slab.kv, chosen.lengths, indices=chosen.indices, **more))

    def lend(self, slab: FixedSlab) -> ReadPositions | None:
        """The positions that a step reads; None: the layer chooses by its attention, or by other data than bounds."""
        if self.role.reads_all:
            return None if self.role.chooses else ReadPositions()
        if not self.role.chooses:
            return ReadPositions(indices=self.shared.chosen.indices, lengths=self.shared.chosen.lengths)
        if (bounds := self.reading.page_bounds(slab)) is None:
            return None
        self._count_pages(slab)
        return ReadPositions(bounds.view, self.shared.pages, self.reading.page, min(self.most, bounds.length))

    def _count_pages(self, slab: FixedSlab) -> None:
        if self.first:
            self._leave([self.shared.pages], [self.reading.wanted(slab.lengths.long()) // self.reading.page + 1])

    def _leave(self, room: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for held, new in zip(room, found, strict=True):
            held.copy_(new)

    def _list(self, slab: FixedSlab, query: LayerQuery) -> Listed | Ranked:
        """The last page, and other pages for the wanted number of positions, rounded down to pages."""
        self._count_pages(slab)
        return self.reading.listed(query, slab.starts, slab.lengths, pages=self.shared.pages, most=self.most)


def readings(reading: Reading, slabs: Sequence[FixedSlab]) -> list[FixedReading]:
    """The readings of the layers that keep all positions; each has one slab, all of the same size."""
    roles, like = reading.roles(len(slabs)), torch.zeros_like(slabs[0].lengths, dtype=torch.long)
    most = _most_pages(reading, slabs[0].length)
    chosen = Listed(like.new_zeros(*like.shape, most * reading.page), like)
    shared, first = SharedChoice(chosen, like.clone()), next((i for i, role in enumerate(roles) if role.chooses), None)
    return [FixedReading(reading, role, shared, i == first, most) for i, role in enumerate(roles)]


def _most_pages(reading: Reading, length: int) -> int:
    return min(max(min(reading.most(length), length) // reading.page, 1) + 1, -(-length // reading.page))
