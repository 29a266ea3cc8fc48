"""Where cached keys and values lie: rows of their own length, right-packed, in 16 bits or in codes, appended to in
place."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.transforms.rotation import widest_block
from kernels.hadamard import hadamard, widest_block
from kernels.kv_decode import KV, dequantize_kv, quantize_kv

MOST = 8  # a channel is scaled to 2 ** -MOST at most


class Precision(NamedTuple):
    """How keys and values are kept: codes of 8, 4 or 2 bits for groups of positions, `residual` positions at least in
    the dtype in which they came; with `rotates`, keys as `turned` gives them, codes or not; `by_token`: keys with one
    scale a position, around 0 if `symmetric`; `scaled`: how many channels of a head are scaled before keys become
    codes."""

    bits: int = 16
    group: int = 64
    residual: int = 0
    rotates: bool = False
    by_token: bool = False
    symmetric: bool = False
    scaled: int = 0

    def turned(self, x: Tensor) -> Tensor:
        """Keys or queries [..., D], as keys are kept, or back from that: x, or with `rotates` x H.

        H is the normalised Hadamard rotation of D channels, or of the widest divisor of D that has a matrix, block by
        block. It is its own inverse, and q H · k H = q · k.
        """
        if not self.rotates:
            return x
        return hadamard(x.unflatten(-1, (-1, widest_block(x.shape[-1])))).view(x.shape)


class Growing:
    """A tensor [B, H, n, ...] that is appended to along n in place; when it is full it grows by an eighth, or `least`
    at least."""

    def __init__(self, x: Tensor, least: int = 16) -> None:
        self.buffer, self.length, self.least = x.contiguous(), x.shape[2], least

    @property
    def view(self) -> Tensor:
        """[B, H, n, ...], what was appended so far."""
        return self.buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes held, with what is not used yet."""
        return self.buffer.numel() * self.buffer.element_size()

    def append(self, x: Tensor) -> None:
        """x [B, H, m, ...]"""
        end = self.length + x.shape[2]
        if end > self.buffer.shape[2]:
            B, H, _, *rest = self.buffer.shape
            larger = self.buffer.new_empty(B, H, end + max(self.least, end // 8), *rest)
            larger[:, :, : self.length] = self.view
            self.buffer = larger
        self.buffer[:, :, self.length : end] = x
        self.length = end

    def drop_last(self, count: int) -> None:
        """Forget the last `count` of them."""
        self.length -= count

    def rows(self, change) -> None:
        """Put change(buffer) in the buffer's place: another choice or order of batch rows."""
        self.buffer = change(self.buffer).contiguous()


class ScaledKeys:
    """Keys as a cache holds them: turned by its precision, and some channels times factors that queries are divided by.

    Attributes:
        factors: [B, H, 1, D], powers of two, so that nothing but codes is rounded; None: nothing is scaled.
    """

    precision: Precision
    factors: Growing | None = None

    def inwards(self, k: Tensor) -> Tensor:
        """Keys [B, H, n, D] as they are held."""
        k = self.precision.turned(k)
        return k if self.factors is None else k * self.factors.view.to(k.dtype)

    def outwards(self, k: Tensor) -> Tensor:
        """Held keys [B, H, n, D] as they came."""
        return self.precision.turned(k if self.factors is None else k / self.factors.view.to(k.dtype))

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, H_q, n, D] as held keys meet them."""
        q = self.precision.turned(q)
        if self.factors is None:
            return q
        factors = self.factors.view.to(q.dtype)
        return q / factors.repeat_interleave(q.shape[1] // factors.shape[1], 1)


def outlier_factors(k: Tensor, starts: Tensor, count: int) -> Tensor:
    """By what channels of keys are multiplied so that none is much larger than the others.

    The `count` largest channels of a head get the power of two, at most 1, that brings their largest magnitude nearest
    to that of the largest channel behind them, and no further: they are the channels that scores depend on most. The
    others get 1.

    Args:
        k: [B, H, n, D]; what lies before a row's start [B, H] is not looked at.

    Returns:
        [B, H, 1, D], float32.
    """
    before = torch.arange(k.shape[2], device=k.device) < starts[..., None]  # [B, H, n]
    largest = k.float().abs().masked_fill(before[..., None], 0).amax(2, keepdim=True)
    top, channels = largest.topk(min(count + 1, k.shape[-1]), -1)
    distance = (top[..., -1:] / top).log2().ceil().nan_to_num(0, 0, 0).clamp(-MOST, 0)
    return torch.ones_like(largest).scatter(-1, channels, distance.exp2())


class Slab(ScaledKeys):
    """Keys and values of some kv heads, all rows of which end together: row (b, h) is positions starts[b, h] to
    `length`.

    With fewer than 16 bits the first positions are codes (`kernels.kv_decode.KV` has the layout) and the rest a dense
    tail. Where its precision `rotates`, codes and tail hold rotated keys, which the kernels multiply by rotated
    queries; where it scales channels, so do they from the first codes on, which settle the factors. `dense` and
    `keys_from` give keys as they came.
    """

    def __init__(self, k: Tensor, v: Tensor, starts: Tensor, precision: Precision) -> None:
        """k, v: [B, H, n, D]. starts: [B, H] int32."""
        self.starts, self.precision = starts.to(torch.int32).contiguous(), precision
        self.codes: list[Growing] = []  # k, v, params_k, params_v
        self.notes: list[Growing] = []  # [B, H, pages, ...]: what a reading keeps of the first `noted` positions
        self.noted = 0
        self.k, self.v = Growing(precision.turned(k)), Growing(v)
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
        self.v.append(v)
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
        """As the kernels take it, with what `queries` makes of queries."""
        if not self.codes:
            return KV(self.k.view, self.v.view)
        tail = (self.k.view, self.v.view) if self.k.length else (None, None)
        return KV(*(one.view for one in self.codes), *tail, self.precision.bits, self.precision.group)

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; what lies before a row's start means nothing."""
        k, v = dequantize_kv(self.kv(), self.k.buffer.dtype)
        return self.outwards(k), v

    def keys_from(self, position: int) -> Tensor:
        """The keys from this position on, [B, H, n, D]."""
        if position >= self.coded:
            return self.outwards(self.k.view[:, :, position - self.coded :])
        return self.dense()[0][:, :, position:]

    def _settle(self) -> None:
        """Turn whole groups into codes as soon as `residual` positions stay behind them."""
        bits, group, residual, _, by_token, symmetric, scaled = self.precision
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
        slabs.append(Slab(taken(k[:, heads], index), taken(v[:, heads], index), starts, precision))
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
