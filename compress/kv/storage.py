"""Where cached keys and values lie: rows of their own length, right-packed, in 16 bits or in codes, appended to in
place."""

import torch
from torch import Tensor

from compress.kv.growing import Growing
from compress.kv.precision import Held, Precision, outlier_factors
from kernels.kv_decode import KV, dequantize_kv, quantize_kv


class Slab(Held):
    """Keys and values of some kv heads, all rows of which end together: row (b, h) is positions starts[b, h] to
    `length`.

    With fewer than 16 bits the first positions are codes (`kernels.kv_decode.KV` has the layout) and the rest a dense
    tail. Where its precision projects or `rotates`, codes and tail hold keys like that, which the kernels multiply by
    queries like that; where it scales channels, so do they from the first codes on, which settle the factors. `dense`
    and `keys_from` give keys as they came.
    """

    def __init__(self, k: Tensor, v: Tensor, starts: Tensor, precision: Precision, heads: slice = slice(None)) -> None:
        """k, v: [B, H, n, D]. starts: [B, H] int32. heads: which of the layer's these are."""
        self.starts, self.precision = starts.to(torch.int32).contiguous(), precision
        self.codes: list[Growing] = []  # k, v, params_k, params_v
        self.notes: list[Growing] = []  # [B, H, pages, ...]: what a reading keeps of the first `noted` positions
        self.noted = 0
        self.projection = None if precision.projection is None else precision.projection.of(heads, k)
        self.k, self.v = Growing(self.inwards(k)), Growing(self.values_inwards(v))
        self._settle()

    @property
    def coded(self) -> int:
        """Positions that are codes."""
        return self.codes[0].length if self.codes else 0

    @property
    def length(self) -> int:
        """Positions, of the longest row."""
        return self.coded + self.k.length

    @property
    def lengths(self) -> Tensor:
        """[B, H] int32"""
        return self.length - self.starts

    @property
    def tensors(self) -> list[Growing]:
        return [*self.codes, *self.notes, self.k, self.v, *([] if self.factors is None else [self.factors])]

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, m, D], for every row."""
        self.k.append(self.inwards(k))
        self.v.append(self.values_inwards(v))
        self._settle()

    def drop_last(self, count: int) -> None:
        """Forget the last positions, which must not be codes yet."""
        if count > self.k.length:
            raise ValueError(
                f"the last {count} tokens cannot be taken back: all but {self.k.length} are stored in "
                f"{self.precision.bits} bits; "
                f"a `residual` of {count} tokens or more would do"
            )
        self.k.drop_last(count)
        self.v.drop_last(count)
        self.notes, self.noted = [], 0

    def kv(self) -> KV:
        """As the kernels take it, with what `queries` makes of queries; `lifted` takes what they give."""
        if not self.codes:
            return KV(self.k.view, self.v.view)
        tail = (self.k.view, self.v.view) if self.k.length else (None, None)
        return KV(*(one.view for one in self.codes), *tail, self.precision.bits, self.precision.group)

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; what lies before a row's start means nothing."""
        k, v = dequantize_kv(self.kv(), self.k.buffer.dtype)
        return self.outwards(k), self.lifted(v)

    def keys_from(self, position: int) -> Tensor:
        """The keys from this position on, [B, H, n, D]."""
        if position >= self.coded:
            return self.outwards(self.k.view[:, :, position - self.coded :])
        return self.dense()[0][:, :, position:]

    def _settle(self) -> None:
        """Turn whole groups into codes as soon as `residual` positions stay behind them."""
        bits, group, residual, _, by_token, symmetric, scaled, _ = self.precision
        full = (self.k.length - residual) // group * group
        if bits == 16 or full <= 0:
            return
        if scaled and self.factors is None:
            factors = outlier_factors(self.k.view, self.starts, scaled)
            self.k, self.factors = Growing(self.k.view * factors.to(self.k.buffer.dtype)), Growing(factors)
        k, v = (one.view[:, :, :full] for one in (self.k, self.v))
        coded = quantize_kv(k, v, bits, group, by_token=by_token, symmetric=symmetric)
        if self.codes:
            for one, more in zip(self.codes, coded[:4], strict=True):
                one.append(more)
        else:
            self.codes = [Growing(more, 1) for more in coded[:4]]  # keys, values, and their scales: some count groups
        self.k, self.v = Growing(self.k.view[:, :, full:].clone()), Growing(self.v.view[:, :, full:].clone())


def right_packed(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Where the kept positions of every row are, at the end of rows of one length, in their order.

    Args:
        keep: bool [B, H, n].

    Returns:
        index [B, H, m], m the largest count of a row (rows with fewer begin with their first position, repeated);
        starts [B, H].
    """
    counts = keep.sum(-1)  # [B, H]
    longest = max(int(counts.max()), 1)
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[
        ..., -longest:
    ]  # what goes first, then what stays, each in its order
    starts = longest - counts
    first = order.gather(-1, starts.clamp(max=longest - 1)[..., None])
    early = torch.arange(longest, device=keep.device) < starts[..., None]
    return torch.where(early, first, order), starts


def taken(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, n, ...] at index [B, H, m] -> [B, H, m, ...]"""
    index = index.view(*index.shape, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand(*index.shape[:3], *x.shape[3:]))


def from_start(x: Tensor, starts: Tensor) -> Tensor:
    """x [B, H, n, ...] with every row moved to the front, from starts [B, H] on, and its last position repeated behind
    it."""
    at = starts.long()[..., None] + torch.arange(x.shape[2], device=x.device)
    return taken(x, at.clamp(max=max(x.shape[2] - 1, 0)))


def slabs_of(k: Tensor, v: Tensor, keep: Tensor, precision: Precision) -> list[Slab]:
    """The kept positions: one slab, or one for every kv head where the heads keep such different numbers that it pays.

    Args:
        k, v: [B, H, n, D]. keep: bool [B, H, n].
    """
    longest = keep.sum(-1).amax(0)  # [H]: a slab is as long as its longest row
    H, top = keep.shape[1], int(longest.max())
    apart = H > 1 and int(longest.sum()) < 0.875 * H * top
    slabs = []
    for heads in [slice(h, h + 1) for h in range(H)] if apart else [slice(0, H)]:
        index, starts = right_packed(keep[:, heads])
        slabs.append(Slab(taken(k[:, heads], index), taken(v[:, heads], index), starts, precision, heads))
    return slabs


def joined(slabs: list[Slab]) -> tuple[Tensor, Tensor, Tensor]:
    """All slabs of a layer as one: k, v [B, H, n, D], starts [B, H], right-packed to the longest row."""
    dense = [slab.dense() for slab in slabs]
    longest = max(slab.length for slab in slabs)
    if len(slabs) == 1:
        return *dense[0], slabs[0].starts

    def padded(x: Tensor) -> Tensor:
        missing = longest - x.shape[2]
        return x if not missing else torch.cat([x[:, :, :1].expand(-1, -1, missing, -1), x], 2)

    k, v = (torch.cat([padded(pair[i]) for pair in dense], 1) for i in (0, 1))
    return k, v, torch.cat([slab.starts + (longest - slab.length) for slab in slabs], 1)
