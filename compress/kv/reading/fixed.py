"""Sparse reading of caches of fixed tensors, as a compiled step needs it: lists of one size, of which a part counts."""

from typing import Protocol

import torch
from torch import Tensor

from compress.kv.reading.method import Glance, Reading, Role
from compress.kv.reading.reader import places
from compress.kv.storage import Growing, Precision, from_start
from kernels.kv_decode import KV, kv_decode


class FixedSlab(Protocol):
    """Keys and values with room behind them; row (b, h) is positions starts[b, h] to starts[b, h] + lengths[b, h].

    Attributes:
        length: positions, the room among them.
        precision, notes, noted: as of `compress.kv.storage.Slab`.
    """

    kv: KV
    starts: Tensor
    lengths: Tensor
    length: int
    precision: Precision
    notes: list[Growing]
    noted: int


def fixed_list(scores: Tensor, starts: Tensor, lengths: Tensor, page: int, wanted: Tensor, count: int) -> Tensor:
    """The pages with the highest scores, the best ones last, and behind them the page with a row's last position.

    Args:
        scores: [B, H, P], of pages counted from each row's first position. starts, lengths: [B, H].
        wanted: [B, H] positions, `count` pages at most, rounded down to pages.

    Returns:
        [2 + (count + 1) page, B, H]: starts, lengths, and the list, as one tensor.
    """
    current = (lengths - 1) // page
    number = torch.arange(scores.shape[-1], device=scores.device)
    chosen = scores.masked_fill(number >= current[..., None], -torch.inf).topk(count, -1).indices.flip(-1)
    used = torch.minimum(wanted // page, current).clamp(max=count)
    at = places(torch.cat([chosen, current[..., None]], -1), starts, page)
    return torch.cat([((count - used) * page)[None], ((used - current) * page + lengths)[None], at.movedim(-1, 0)])


class FixedReading:
    """How one layer of fixed tensors reads. The bounds of pages are not brought up to date: this is for timing.

    Args:
        shared: what a layer that chooses leaves for those behind it, as `fixed_list` gives it; of all layers.
    """

    def __init__(self, reading: Reading, role: Role, shared: Tensor) -> None:
        self.reading, self.role, self.shared = reading, role, shared

    def attend(self, slab: FixedSlab, q: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """q [B, H_q, 1, D] -> the same shape."""
        turned, more = slab.precision.turned(q), {"scale": scale, "softcap": softcap}
        if self.role.reads_all:
            if not self.role.chooses:
                return kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, **more)
            y, mass = kv_decode(turned, slab.kv, slab.lengths, starts=slab.starts, return_mass=True, **more)
            self.shared.copy_(self._list(slab, from_start(mass, slab.starts)))
            return y
        chosen = self.shared
        if self.role.chooses:
            scaling = q.shape[-1] ** -0.5 if scale is None else scale
            chosen = self._list(slab, self.reading.scores(Glance(slab, q, scaling))[:, :, 0])
        indices = chosen[2:].movedim(0, -1).contiguous()
        starts, lengths = chosen[:2].contiguous()
        return kv_decode(turned, slab.kv, lengths, starts=starts, indices=indices, **more)

    def _list(self, slab: FixedSlab, scores: Tensor) -> Tensor:
        page, count = self.reading.page, pages_of(self.reading, slab.length)
        wanted = self.reading.wanted(slab.lengths.long())
        return fixed_list(scores, slab.starts.long(), slab.lengths.long(), page, wanted, count)


def pages_of(reading: Reading, length: int) -> int:
    """How many pages of so many positions are in a list, without the last one."""
    return max(min(reading.most(length), length) // reading.page, 1)
