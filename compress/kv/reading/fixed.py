"""Sparse reading of caches of fixed tensors, as a compiled step needs it: lists of one size, of which a part counts."""

from typing import Protocol

from torch import Tensor

from compress.kv.growing import Growing
from compress.kv.reading.method import Glance, Reading, Role
from compress.kv.storage import from_start
from kernels.kv_decode import KV, Listed, kv_decode


class FixedSlab(Protocol):
    """Keys and values with room behind them; row (b, h) is positions starts[b, h] to starts[b, h] + lengths[b, h].

    Attributes:
        length: positions, the room among them.
        notes, noted: as of `compress.kv.storage.Slab`.
    """

    kv: KV
    starts: Tensor
    lengths: Tensor
    length: int
    notes: list[Growing]
    noted: int

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, H_q, n, D] as held keys meet them."""

    def lifted(self, y: Tensor) -> Tensor:
        """Sums of held values [B, H_q, n, R] in all channels."""


class FixedReading:
    """How one layer of fixed tensors reads. The bounds of pages are not brought up to date: this is for timing.

    Args:
        shared: what a layer that chooses leaves for those behind it, of `room_for` entries; of all layers.
    """

    def __init__(self, reading: Reading, role: Role, shared: Listed) -> None:
        self.reading, self.role, self.shared = reading, role, shared

    def attend(self, slab: FixedSlab, q: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """q [B, H_q, 1, D] -> the same shape."""
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        turned, more = slab.queries(q), {"scale": scaling, "softcap": softcap}
        if self.role.reads_all:
            if not self.role.chooses:
                return slab.lifted(kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, **more))
            y, mass = kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, return_mass=True, **more)
            self._leave(self._list(slab, Glance(slab, q, scaling, from_start(mass, slab.starts)[:, :, None])))
            return slab.lifted(y)
        chosen = self.shared
        if self.role.chooses:
            chosen = self._list(slab, Glance(slab, q, scaling))
        return slab.lifted(kv_decode(turned, slab.kv, chosen.lengths, indices=chosen.indices, **more))

    def _leave(self, chosen: Listed) -> None:
        for held, new in zip(self.shared, chosen, strict=True):
            held.copy_(new)

    def _list(self, slab: FixedSlab, glance: Glance) -> Listed:
        """The last page, and others that have as many positions as are wanted, rounded down to pages."""
        pages = self.reading.wanted(slab.lengths.long()) // self.reading.page + 1
        most = _most_pages(self.reading, slab.length)
        return self.reading.listed(glance, slab.starts, slab.lengths, pages=pages, most=most)


def _most_pages(reading: Reading, length: int) -> int:
    return min(max(min(reading.most(length), length) // reading.page, 1) + 1, -(-length // reading.page))


def room_for(reading: Reading, length: int) -> int:
    """Entries of a list of positions out of so many."""
    return _most_pages(reading, length) * reading.page
