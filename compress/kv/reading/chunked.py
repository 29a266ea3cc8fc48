"""A prompt in chunks: keys in factors, values in other memory; some chunks and all later positions are not
compressed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kv.precision import Precision
from compress.kv.projecting.shared import Basis, Factored, Turn, factors
from compress.kv.reading.offload import OffloadedRows
from compress.kv.storage import Slab, from_start, taken
from kernels.kv_decode import KV, Listed, kv_decode
from kernels.kv_decode import MAX_TOKENS as KERNEL_TOKENS


class PromptPlan(NamedTuple):
    """The division of a prompt; chunks are counted from each row's first position.

    Attributes:
        chunk: the number of positions of a chunk.
        counts: [B, H] int64, chunks at the beginning of each row; positions behind them are not compressed.
        exact: bool [B, H, C]: the chunks that are not compressed either.
        landmarks: [B, H, C, D], by which queries choose among the other chunks.
        chosen: [B, H] int64, the number of other chunks that a query reads.
        rank: the rank of all heads' keys together.
    """

    chunk: int
    counts: Tensor
    exact: Tensor
    landmarks: Tensor
    chosen: Tensor
    rank: int


class ChunkedSlab:
    """A prompt in chunks, and the positions behind it, with the interface of `compress.kv.storage.Slab`.

    The keys of the chunks are held before RoPE as a product of two factors and rotated when they are read; their
    values are `OffloadedRows`; exact chunks are held beside them. Row (b, h) is positions starts[b, h] to `length`; all
    heads of a row hold the same positions.

    Attributes:
        due: whether there is a prompt behind the chunks that is not divided into chunks yet.
        reads: [B, H] int64, the number of chunks that a query reads, with exact ones; `most`: its largest value.
    """

    def __init__(
        self, k: Tensor, v: Tensor, starts: Tensor, plan: PromptPlan, turn: Turn, place: str, fetched: int
    ) -> None:
        """k, v: [B, H, T, D], rotated, right-packed from starts [B, H] on. turn: the model's rotation.
        place, fetched: for `OffloadedRows`.
        """
        B, H, T, D = k.shape
        self.starts, self.precision, self.turn, self.due = starts.to(torch.int32), Precision(), turn, False
        self.chunk, self.counts = plan.chunk, plan.counts
        self.landmarks = plan.landmarks.contiguous()
        self.reads = plan.chosen + plan.exact.sum(-1)
        self.most = int(self.reads.max())
        early, M = from_start(k, starts), plan.exact.shape[2] * plan.chunk
        self.number = torch.arange(B, device=k.device)[:, None]  # number of each row in `values`
        front = [x[:, :, :M] for x in (early, from_start(v, starts))]
        self.values = OffloadedRows(front[1].flatten(0, 2), place, fetched)
        self.keys = self._factors(front[0], plan.rank)
        self.slots, index = _slots(plan.exact, plan.chunk)
        self.exact_k, self.exact_v = (taken(x, index) for x in front)
        behind = T - starts.long() - plan.counts * plan.chunk  # [B, H]
        rest = int(behind.max())
        self.before = T - rest  # number of positions before the tail
        self.tail = Slab(k[:, :, T - rest :].clone(), v[:, :, T - rest :].clone(), rest - behind, self.precision)

    def _factors(self, k: Tensor, rank: int) -> Factored:
        """Rotated keys [B, H, M, D] as the product of a row for each token and a matrix for each head."""
        B, H, M, D = k.shape
        if not M:
            return Factored(Basis(k.new_zeros(B, 1, 0, 1)), k.new_zeros(B, H, 1, D), owns=True)
        places = torch.arange(M, device=k.device).expand(B, M)
        inside = places < self.counts[:, :1] * self.chunk  # [B, M]
        flat = self.turn(k.float(), places, True).transpose(1, 2).flatten(2).masked_fill(~inside[..., None], 0)
        left, right = factors(flat, inside.sum(1).clamp(min=1, max=rank))
        lift = right.unflatten(2, (H, D)).transpose(1, 2)  # [B, H, R, D]
        return Factored(Basis(left.to(k.dtype)[:, None].contiguous()), lift.to(k.dtype).contiguous(), owns=True)

    @property
    def length(self) -> int:
        """Number of positions of the longest row."""
        return self.before + self.tail.length

    @property
    def lengths(self) -> Tensor:
        """[B, H] int32"""
        return self.length - self.starts

    @property
    def held(self) -> list[Tensor]:
        """Every tensor that it holds, including values in other memory."""
        own = [self.starts, self.counts, self.reads, self.number, self.slots, self.landmarks]
        rows = self.values.rows[None, :, None]  # with as many dimensions as the others
        return [*own, self.exact_k, self.exact_v, rows, *self.keys.held, *self.tail.held]

    @property
    def elsewhere(self) -> list[Tensor]:
        """The held tensors outside of the memory that attention reads."""
        return [self.values.rows]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose or reorder batch rows; offloaded values do not move."""
        for name in ("starts", "counts", "reads", "number", "slots", "landmarks", "exact_k", "exact_v"):
            setattr(self, name, change(getattr(self, name)).contiguous())
        for one in (self.keys, self.tail):
            one.rows(change)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, m, D], for every row."""
        self.tail.append(k, v)
        self.due = self.due or k.shape[2] > KERNEL_TOKENS

    def drop_last(self, count: int) -> None:
        """Remove the last positions, which must not be in chunks yet."""
        least = int(self.tail.lengths.min())
        if count > least:
            raise ValueError(f"the last {count} tokens cannot be taken back: all but {least} are stored in factors")
        self.tail.drop_last(count)

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; values before a row's start are undefined. All offloaded values are fetched."""
        at = torch.arange(self.length, device=self.starts.device).expand(*self.starts.shape, -1)
        return self.read(at, at >= self.starts[..., None], self.length)

    def attend(
        self, q: Tensor, *, scale: float, softcap: float | None, count: bool = False, listed: Listed | None = None
    ) -> tuple[Tensor, None]:
        """As `Slab.attend`, without counting attention; only listed keys are computed and listed values fetched."""
        assert not count, "methods that need this are refused beside it"
        if listed is None:
            k, v = self.dense()
            y = kv_decode(q, KV(k, v), self.lengths, starts=self.starts, scale=scale, softcap=softcap)
            return y, None
        used = torch.arange(listed.indices.shape[2], device=q.device) < listed.lengths[..., None]
        k, v = self.read(listed.indices, used, self.most * self.chunk)
        return kv_decode(q, KV(k, v), listed.lengths, scale=scale, softcap=softcap), None

    def read(self, at: Tensor, used: Tensor, front: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, n, D] at these positions.

        Args:
            at: [B, H, n] int64, ascending where used [B, H, n], bool, is True; the other entries are ignored.
            front: positions in chunks are among this number of first positions.
        """
        number = (at - self.starts[..., None]).long()  # place in the row
        near = (at - self.before).clamp(0, max(self.tail.length - 1, 0))
        k, v = (taken(one.view, near) for one in (self.tail.k, self.tail.v))
        if not self.slots.shape[2]:
            return k, v
        early = number[..., :front]
        inside = used[..., :front] & (early < (self.counts * self.chunk)[..., None])
        early = early.clamp(0, self.slots.shape[2] * self.chunk - 1)
        slot = self.slots.gather(2, early // self.chunk).long()
        far = inside & (slot < 0)
        k[:, :, :front] = torch.where(far[..., None], self._keys_at(early), k[:, :, :front])
        v[:, :, :front][far] = self._values_at(early, far)
        if self.exact_k.shape[2]:
            exact, at = (inside & (slot >= 0))[..., None], slot.clamp(min=0) * self.chunk + early % self.chunk
            k[:, :, :front] = torch.where(exact, taken(self.exact_k, at), k[:, :, :front])
            v[:, :, :front] = torch.where(exact, taken(self.exact_v, at), v[:, :, :front])
        return k, v

    def _keys_at(self, number: Tensor) -> Tensor:
        """Keys [B, H, n, D] of places [B, H, n] in each row, computed from their factors."""
        B, H, n = number.shape
        k = taken(self.keys.basis.tokens.expand(-1, H, -1, -1), number) @ self.keys.lift
        turned = self.turn(k.view(B * H, 1, n, -1).float(), number.view(B * H, n), False)  # a row has one set of places
        return turned.view(k.shape).to(k.dtype)

    def _values_at(self, number: Tensor, wanted: Tensor) -> Tensor:
        """Values [N, D] of the N wanted places; number: [B, H, n], places in each row; wanted: bool [B, H, n]."""
        H, M = self.slots.shape[1], self.slots.shape[2] * self.chunk
        head = self.number * H + torch.arange(H, device=number.device)  # [B, H]
        return self.values.fetch((head[..., None] * M + number)[wanted])


def _slots(exact: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The places in which exact chunks, bool [B, H, C], are held.

    Returns:
        slots: int32 [B, H, C], the number of each exact chunk among those of its row, -1 for other chunks; and
        positions [B, H, E chunk] of the exact chunks in their order, arbitrary ones if a row has fewer than E.
    """
    slots = (exact.cumsum(-1) - 1).masked_fill(~exact, -1).to(torch.int32)
    most = int(exact.sum(-1).max()) if exact.numel() else 0
    order = exact.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :most]  # [B, H, E]
    at = order[..., None] * chunk + torch.arange(chunk, device=exact.device)
    return slots, at.flatten(2)
