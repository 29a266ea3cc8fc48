"""The storage of cached keys and values: rows of different lengths, right-packed, in 16 bits or in codes, appended to
in place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compress.kv.growing import Growing
from compress.kv.precision import Held, Precision, codes_of, outlier_factors
from kernels.kv_decode import KV, Listed, dequantize_kv, kv_decode, merge_parts
from kernels.kv_decode.ranked import Ranked, kv_decode_ranked
from kernels.step.cache_view import EVERY, CacheView, ReadPositions

UNLIMITED = 1 << 30  # tokens


class Slab(Held):
    """Keys and values of some kv heads, all rows of which end together: row (b, h) is positions starts[b, h] to
    `length`.

    With fewer than 16 bits the first positions are codes (`kernels.kv_decode.KV` has the layout) and the rest is a
    dense tail. If its precision projects or `rotates`, codes and tail hold projected or rotated keys, and the kernels
    multiply them by queries in the same form. If it scales channels, keys are scaled from the first codes on, which
    determine the factors. `dense` and `keys_from` give keys in their original form.
    """

    def __init__(self, k: Tensor, v: Tensor, starts: Tensor, precision: Precision, heads: slice = slice(None)) -> None:
        """k, v: [B, H, n, D]. starts: [B, H] int32. heads: the numbers of these heads in the layer."""
        self.starts, self.precision = starts.to(torch.int32).contiguous(), precision
        self.codes: list[Growing] = []  # k, v, params_k, params_v
        self.notes: list[Growing] = []  # [B, H, pages, ...]: data of a reading for the first `noted` positions
        self.noted = 0
        self.projection = None if precision.projection is None else precision.projection.of(heads, k)
        self.k, self.v = Growing(self.inwards(k)), Growing(self.values_inwards(v))
        self._settle()

    @property
    def coded(self) -> int:
        """Number of positions that are codes."""
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

    @property
    def held(self) -> list[Tensor]:
        """Every tensor that it holds."""
        return [*(one.buffer for one in self.tensors), self.starts]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose or reorder batch rows."""
        self.starts = change(self.starts).contiguous()
        for one in self.tensors:
            one.rows(change)

    def append(self, k: Tensor, v: Tensor, settle: bool = True) -> None:
        """k, v: [B, H, m, D], for every row; settle: turn complete groups into codes."""
        self.k.append(self.inwards(k))
        self.v.append(self.values_inwards(v))
        if settle:
            self._settle()

    @property
    def free(self) -> int:
        """Number of tokens that can be appended before a group becomes codes."""
        held = self.precision
        return UNLIMITED if held.bits == 16 else max(held.residual + held.group - 1 - self.k.length, 0)

    @property
    def only_appends(self) -> bool:
        """Whether a token is appended unchanged, in a form that steps of decoding read, and fills no group of codes."""
        return self.read_by_steps and self.free > 0

    def take_one(self) -> tuple[int, int]:
        """Count one more token, for which a step writes key and value behind the others; the numbers of coded positions
        and of those after them, without it."""
        self.k.reserve(1)
        self.v.reserve(1)
        before = self.coded, self.k.length
        self.k.length += 1
        self.v.length += 1
        return before

    def drop_last(self, count: int) -> None:
        """Forget the last positions, which must not be codes yet."""
        if count > self.k.length:
            raise ValueError(
                f"the last {count} tokens cannot be taken back: all but {self.k.length} are stored in "
                f"{self.precision.bits} bits; "
                f"a `residual` of {count} tokens or more works"
            )
        self.k.drop_last(count)
        self.v.drop_last(count)
        self.notes, self.noted = [], 0

    def kv(self) -> KV:
        """The input of the kernels, for queries as `queries` gives them; `lifted` converts their output."""
        if not self.codes:
            return KV(self.k.view, self.v.view)
        tail = (self.k.view, self.v.view) if self.k.length else (None, None)
        return KV(*(one.view for one in self.codes), *tail, self.precision.bits, self.precision.group)

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; what lies before a row's start means nothing."""
        k, v = dequantize_kv(self.kv(), self.k.buffer.dtype)
        return self.outwards(k), self.lifted(v)

    def attend(
        self,
        q: Tensor,
        *,
        scale: float,
        softcap: float | None,
        count: bool = False,
        listed: Listed | Ranked | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decode kernel for the last tokens, over the listed positions or all: y [B, H_q, n, D] from q
        [B, H_q, n, D], and with `count` the attention that each position got, [B, H, length]."""
        if isinstance(listed, Ranked):
            if not count:
                y = kv_decode_ranked(self.queries(q), self.kv(), listed, scale=scale, softcap=softcap)
                return self.lifted(y), None
            listed = listed.listed()
        indices, lengths = (None, self.lengths) if listed is None else listed
        starts = self.starts if listed is None else None
        more = {"scale": scale, "softcap": softcap, "return_mass": count}
        out = kv_decode(self.queries(q), self.kv(), lengths, starts=starts, indices=indices, **more)
        if not count:
            return self.lifted(out), None
        y, mass = out
        if indices is not None:  # entries outside the range get no attention, whatever their index
            mass = mass.new_zeros(*mass.shape[:2], self.length).scatter_add_(2, indices, mass)
        return self.lifted(y), mass

    def keys_from(self, position: int) -> Tensor:
        """The keys from this position on, [B, H, n, D]."""
        if position >= self.coded:
            return self.outwards(self.k.view[:, :, position - self.coded :])
        return self.dense()[0][:, :, position:]

    def full(self, coming: int = 0) -> int:
        """Number of positions in whole groups with at least `residual` positions behind them, after `coming` further
        tokens."""
        held = self.precision
        return 0 if held.bits == 16 else max(self.k.length + coming - held.residual, 0) // held.group * held.group

    def _settle(self) -> None:
        """Turn whole groups into codes as soon as `residual` positions lie behind them."""
        if not (full := self.full()):
            return
        if self.precision.scaled and self.factors is None:
            factors = outlier_factors(self.k.view, self.starts, self.precision.scaled)
            self.k, self.factors = Growing(self.k.view * factors.to(self.k.buffer.dtype)), Growing(factors)
        self.take_codes(codes_of(self.k.view[:, :, :full], self.v.view[:, :, :full], self.precision)[:4], full)

    def take_codes(self, coded: Sequence[Tensor], full: int) -> None:
        """Put codes (keys, values and the scales of both) in the place of the first `full` positions that are none."""
        if self.codes:
            for one, more in zip(self.codes, coded, strict=True):
                one.append(more)
        else:
            self.codes = [Growing(more, 1) for more in coded]  # some count positions, others groups
        self.k, self.v = Growing(self.k.view[:, :, full:].clone()), Growing(self.v.view[:, :, full:].clone())


def lend_slabs(slabs: Sequence[Slab]) -> CacheView | None:
    """Slabs that take one more token, which is counted in them; None if they cannot be read as one cache, or if
    more has to be done than to append."""
    coded = bool(slabs[0].codes)
    if not all(slab.only_appends and bool(slab.codes) == coded for slab in slabs):
        return None
    counts = [count for slab in slabs for count in slab.take_one()]
    tails = [slab.k.buffer for slab in slabs], [slab.v.buffer for slab in slabs]
    starts, held = [slab.starts for slab in slabs], slabs[0].precision
    codes = [[slab.codes[i].buffer for slab in slabs] for i in range(4)] if coded else None
    return view_of(held, codes, tails, starts, counts)


def view_of(
    held: Precision,
    codes: Sequence[list[Tensor]] | None,
    tails: Sequence[list[Tensor]],
    starts: list[Tensor],
    counts: list[int],
    sparse: ReadPositions = EVERY,
) -> CacheView:
    """The view of slabs of this precision; codes: their keys, values and scales, None if nothing is quantised."""
    how = held.group, held.rotates, held.rotates_values, sparse
    if codes is None:
        return CacheView(*tails, starts, counts, 16, *how)
    k, v, params_k, params_v = codes
    return CacheView(k, v, starts, counts, held.bits, *how, params_k, params_v, *tails)


class DividedSlab:
    """A slab in two parts of different precision: the lesser positions, and behind them the others; new positions are
    appended to the second part.

    Positions are numbered over the lesser ones of a row, and then over its others. Attention reads the parts one after
    the other, and adds them up exactly (`kernels.kv_decode.merge_parts`).
    """

    def __init__(self, k: Tensor, v: Tensor, part: Tensor, lesser: Precision, precision: Precision) -> None:
        """k, v: [B, H, n, D]. part: uint8 [B, H, n], 1 for lesser positions, 2 for the others, 0 to evict."""
        self.lesser, self.others = (
            Slab(*(taken(x, index) for x in (k, v)), starts, one)
            for one, (index, starts) in ((lesser, right_packed(part == 1)), (precision, right_packed(part == 2)))
        )
        self._measure()

    def _measure(self) -> None:
        """Read how long the longest row is now: the host waits for the device, and later only counts what is added."""
        self._shorter = self.others.length - int(self.lengths.max())

    @property
    def parts(self) -> tuple[Slab, Slab]:
        return self.lesser, self.others

    @property
    def precision(self) -> Precision:
        """The precision of the positions that are not lesser ones."""
        return self.others.precision

    @property
    def lengths(self) -> Tensor:
        """[B, H] int32"""
        return self.lesser.lengths + self.others.lengths

    @property
    def length(self) -> int:
        """Positions, of the longest row."""
        return max(self.others.length - self._shorter, 1)

    @property
    def starts(self) -> Tensor:
        """[B, H] int32, as for rows of one length."""
        return self.length - self.lengths

    @property
    def part(self) -> Tensor:
        """uint8 [B, H, length]: the part of each kept position, as it was given."""
        at, starts = torch.arange(self.length, device=self.starts.device), self.starts[..., None]
        lesser = (at >= starts) & (at < starts + self.lesser.lengths[..., None])
        return torch.where(lesser, 1, torch.where(at >= starts, 2, 0)).to(torch.uint8)

    @property
    def held(self) -> list[Tensor]:
        return [*self.lesser.held, *self.others.held]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for one in self.parts:
            one.rows(change)
        self._measure()

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, m, D], for every row; several at once may still be divided, and do not become codes yet."""
        self.others.append(k, v, settle=k.shape[2] == 1)

    def drop_last(self, count: int) -> None:
        """Forget the last positions, which must not be codes yet."""
        self.others.drop_last(count)

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; what lies before a row's start means nothing."""
        k, v = (torch.cat(pair, 2) for pair in zip(*(one.dense() for one in self.parts), strict=True))
        at = [torch.arange(one.length, device=k.device) >= one.starts[..., None] for one in self.parts]
        index, _ = right_packed(torch.cat(at, 2))
        return taken(k, index), taken(v, index)

    def attend(
        self,
        q: Tensor,
        *,
        scale: float,
        softcap: float | None,
        count: bool = False,
        listed: Listed | None = None,
    ) -> tuple[Tensor, None]:
        """As `Slab.attend`, over all positions, without counting attention."""
        assert not count and listed is None, "methods that need these refuse a storage that divides"
        parts, (B, H_q, n, D) = [], q.shape
        for one in self.parts:
            new = one is self.others
            # All tokens of the pass see all lesser positions: they are rows, like heads that share keys.
            rows = q if new else q.reshape(B, H_q * n, 1, D)
            more = {"starts": one.starts, "scale": scale, "softcap": softcap, "return_lse": True}
            y, lse = kv_decode(one.queries(rows), one.kv(), one.lengths, **more)
            parts.append((one.lifted(y).reshape(B, H_q, n, -1), lse.reshape(B, H_q, n)))
        return merge_parts(parts)[0], None


def right_packed(keep: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
    """An index that packs the kept positions of every row, in their order, at the end of rows of one length.

    Args:
        keep: bool [B, H, n]; or uint8, the parts by which positions are ordered, 0 to evict.
        length: of the rows, if it is more than the largest count of a row; it may be more than n.

    Returns:
        index [B, H, m], with m this length or count (rows with fewer begin with their first position, repeated);
        starts [B, H].
    """
    counts = (keep > 0).sum(-1)  # [B, H]
    longest = max(int(counts.max()), length, 1)
    if keep.dtype == torch.bool:
        return _packed(keep, counts, longest), longest - counts
    # Evicted positions come first, then kept ones, both in their order.
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[..., -longest:]
    order = nn.functional.pad(order, (longest - order.shape[-1], 0))
    starts = longest - counts
    first = order.gather(-1, starts.clamp(max=longest - 1)[..., None])
    early = torch.arange(longest, device=keep.device) < starts[..., None]
    return torch.where(early, first, order), starts


def _packed(keep: Tensor, counts: Tensor, longest: int) -> Tensor:
    """The index of `right_packed` for keep, bool [B, H, n], without sorting: every position knows its place."""
    place = (keep.cumsum(-1) + (longest - counts - 1)[..., None]).masked_fill(~keep, longest)  # [B, H, n]
    first = keep.to(torch.uint8).argmax(-1, keepdim=True)  # where none stays, any position will do
    index = first.repeat(1, 1, longest + 1)  # one more, for evicted positions
    at = torch.arange(keep.shape[-1], device=keep.device).expand_as(place)
    return index.scatter_(-1, place, at)[..., :longest]


def taken(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, n, ...] at index [B, H, m] -> [B, H, m, ...]"""
    if x.dim() == 3:
        return x.gather(2, index)
    # Whole rows are copied: 14 times as fast on a CPU as a gather, which looks up each number.
    B, H, n = x.shape[:3]
    row = index + torch.arange(B * H, device=index.device).view(B, H, 1) * n
    return x.reshape(B * H * n, *x.shape[3:]).index_select(0, row.flatten()).view(*index.shape, *x.shape[3:])


def from_start(x: Tensor, starts: Tensor) -> Tensor:
    """x [B, H, n, ...] with every row moved to the front, from starts [B, H] on, and its last position repeated behind
    it."""
    if x.device.type == "cpu" and x.shape[2] and not torch.compiler.is_compiling():
        first = int(starts.min())
        if first == int(starts.max()):  # one slice, not positions one by one
            rows = x[:, :, first:]
            behind = [-1, -1, x.shape[2] - rows.shape[2], *[-1] * (x.dim() - 3)]
            return torch.cat([rows, x[:, :, -1:].expand(behind)], 2)
    at = starts.long()[..., None] + torch.arange(x.shape[2], device=x.device)
    return taken(x, at.clamp(max=max(x.shape[2] - 1, 0)))


def slabs_of(k: Tensor, v: Tensor, keep: Tensor, precision: Precision, fill: bool = False) -> list[Slab]:
    """The kept positions: one slab, or one for every kv head if their numbers differ so much that this saves memory.

    Args:
        k, v: [B, H, n, D]. keep: bool [B, H, n].
        fill: positions that would fill no group of codes, and so would stay in 16 bits, may become codes of a group
            that is padded in front, if that takes fewer bytes.
    """
    n = keep.shape[2]
    if keep.device.type == "cpu" and bool(keep.all()) and not (fill and filled(n, precision) > n):
        starts = torch.zeros(keep.shape[:2], dtype=torch.int32)  # all stay in place
        return [Slab(*(x.clone(memory_format=torch.contiguous_format) for x in (k, v)), starts, precision)]
    longest = keep.sum(-1).amax(0)  # [H]: a slab is as long as its longest row
    H, top = keep.shape[1], int(longest.max())
    apart = H > 1 and int(longest.sum()) < 0.875 * H * top
    slabs = []
    for heads in [slice(h, h + 1) for h in range(H)] if apart else [slice(0, H)]:
        index, starts = right_packed(keep[:, heads], filled(int(longest[heads].max()), precision) if fill else 0)
        slabs.append(Slab(taken(k[:, heads], index), taken(v[:, heads], index), starts, precision, heads))
    return slabs


def filled(count: int, precision: Precision) -> int:
    """The length of a slab of `count` positions. The incomplete group is padded if its positions would take more bytes
    uncompressed than the whole group as codes; scales take about a bit a code."""
    rest = max(count - precision.residual, 0) % precision.group
    bits = (precision.bits + (precision.value_bits or precision.bits)) / 2
    return count + precision.group - rest if rest * 16 > precision.group * (bits + 1) else count


def joined(slabs: Sequence[Slab | DividedSlab]) -> tuple[Tensor, Tensor, Tensor]:
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
