"""A step of decoding behind a cache in another form than whole keys and values: codes, or the positions that an
eviction has left. Everything has a fixed address, so that one graph serves all lengths up to its room."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.capability import too_old
from kernels.hadamard import hadamard_blocks
from kernels.kv_decode import KV, kv_decode
from kernels.step.cache_view import StoredForm, StoredLayer
from kernels.step.gpu import sizes
from kernels.step.gpu.between import turn_and_store
from kernels.step.gpu.body import FusedBody
from kernels.step.recognition.decoder import DecoderBlock
from kernels.step.recognition.parts import NotNative

ALIGNED = 4  # numbers of 16 bytes, to which Triton fits its loads


class Room(NamedTuple):
    """The form of a cache, and the number of positions for which there is room, in codes and in 16 bits."""

    form: StoredForm = StoredForm()
    codes: int = 0
    tail: int = 0

    @classmethod
    def of(cls, layers: list[StoredLayer]) -> "Room":
        """Room for the largest of these layers, and for further tokens.

        Raises:
            NotNative: their forms differ.
        """
        forms = {layer.form for layer in layers}
        if len(forms) != 1:
            raise NotNative("the layers of the cache store their positions in different forms")
        (form,) = forms
        most = sizes.closer_places(max(kv.positions for layer in layers for kv, _ in layer.parts) + sizes.SPARE)
        return cls(form, 0, most) if form.bits == 16 else cls(form, most, form.tail)

    def holds(self, layer: StoredLayer) -> bool:
        """Whether there is room for a layer, and for one more token."""
        coded = max(_coded(kv) for kv, _ in layer.parts)
        tail = max(kv.positions - _coded(kv) for kv, _ in layer.parts)
        return layer.form == self.form and coded <= self.codes and tail < self.tail


def _coded(kv: KV) -> int:
    return 0 if kv.bits == 16 else kv.k.shape[2]


class LayerStore:
    """The tensors of a layer: codes, of which the last ones are in use, and behind them the positions in 16 bits, of
    which the first ones are in use.

    Attributes:
        kv: all of it, as `kv_decode` reads it.
        starts: int32 [batch, kv heads], the first position of each row in `kv`; used: the number of its positions.
        ends: the same, number of positions in 16 bits in use.
        written: where steps write new keys and values; the tail of `kv` has them, too, in the form of what is stored.
    """

    def __init__(self, room: Room, keys: Tensor, values: Tensor, ends: Tensor, used: Tensor) -> None:
        """keys, values: [batch, kv heads, room.tail, channels], for positions in 16 bits."""
        self.room, self.written, self.ends, self.used = room, (keys, values), ends, used
        form = room.form
        keys = torch.zeros_like(keys) if form.turned_keys else keys
        self.tail = keys, torch.zeros_like(values) if form.turned_values else values
        self.starts = torch.zeros_like(ends)
        self.parts: list[tuple[slice, int]] = []  # heads whose rows end together, and their number of 16-bit positions
        S, (batch, heads, _, D) = room.codes, keys.shape
        if form.bits == 16:
            self.kv = KV(*self.tail)
            return

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=keys.device)

        groups = S // form.group
        codes = (S, D * form.bits // 8), (groups, D, form.group * form.bits // 8)
        scales = ((groups,), (groups,)) if form.float8 else ((groups, D, 2), (S, 2))
        kinds = torch.float32 if form.float8 else torch.bfloat16
        k, v = (zeros(*shape, dtype=torch.uint8) for shape in codes)
        params = (zeros(*shape, dtype=kinds) for shape in scales)
        self.kv = KV(k, v, *params, *self.tail, form.bits, form.group)

    def fill(self, stored: StoredLayer) -> None:
        """Copy what a layer stores, for which there must be room."""
        self.parts, first, S = [], 0, self.room.codes
        for kv, starts in stored.parts:
            heads, coded = slice(first, first + starts.shape[1]), _coded(kv)
            for there, codes in zip(self.kv[:4], kv[:4], strict=True) if coded else ():
                there[:, heads, there.shape[2] - codes.shape[2] :] = codes  # some count positions, others groups
            for there, last in zip(self.tail, (kv.tail_k, kv.tail_v) if coded else (kv.k, kv.v), strict=True):
                if last is not None:
                    there[:, heads, : last.shape[2]] = last
            self.starts[:, heads] = starts + (S - coded)
            self.ends[:, heads].fill_(kv.positions - coded)
            self.used[:, heads] = kv.positions - starts
            self.parts.append((heads, kv.positions - coded))
            first = heads.stop

    def new(self, count: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values that the steps since `fill` have written, `count` of them."""
        of = [[x[:, heads, tail : tail + count] for heads, tail in self.parts] for x in self.written]
        return torch.cat(of[0], 1), torch.cat(of[1], 1)

    def turn(self) -> None:
        """Bring the newest position into the form of what is stored."""
        for written, tail in zip(self.written, self.tail, strict=True):
            if tail is not written:
                at = (self.ends.long() - 1)[..., None, None].expand(-1, -1, 1, tail.shape[3])
                tail.scatter_(2, at, hadamard_blocks(written.gather(2, at)))

    @property
    def free(self) -> int:
        """Tokens for which there is room behind what was filled in."""
        return self.room.tail - max(tail for _, tail in self.parts)


@dataclass
class StoredBody(FusedBody):
    """`FusedBody` behind a cache in another form; layers with a window hold all positions, as there.

    Args:
        positions: of the text, which may be more than the cache holds. room: of the layers without a window.
    """

    room: Room = Room()

    def made_cache(self) -> list[tuple[Tensor, Tensor]]:
        room, blocks, made = self.room, self.decoder.blocks, []
        if room.form.float8 and (why := too_old(self.device, float8=True)):
            raise NotNative(f"the cache is in float8, and this is {why}")
        # `ends` and `used` of all layers lie side by side, so that one operation counts a token in all of them.
        size = {n: -(-self.batch * n // ALIGNED) * ALIGNED for n in self.lengths}
        self.counts = {n: self.lengths[n].new_zeros(2, len(blocks), size[n]) for n in self.lengths}
        self.stores: dict[int, LayerStore] = {}
        for i, block in enumerate(blocks):
            tensors = tuple(self.zeros(block, self.positions if block.window else room.tail) for _ in "kv")
            made.append(tensors)
            if not block.window:
                n = block.kv_heads
                ends, used = (x[: self.batch * n].view(self.batch, n) for x in self.counts[n][:, i])
                self.stores[block.index] = LayerStore(room, *tensors, ends, used)
        return made

    def __call__(self, tokens: Tensor) -> Tensor:
        for counts in self.counts.values():
            counts.add_(1)
        return super().__call__(tokens)

    def attend(
        self,
        block: DecoderBlock,
        qkv: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        starts: dict[tuple[int, int], Tensor],
    ) -> Tensor:
        if (store := self.stores.get(block.index)) is None:
            return super().attend(block, qkv, keys, values, starts)
        length, tables = self.lengths[block.kv_heads], self.tables[block.kind]
        norms = block.query_norm, block.key_norm
        q = turn_and_store(qkv, tables, length, norms, keys, values, ends=store.ends)[:, :, None]
        store.turn()
        form, about = self.room.form, {"scale": block.scale, "softcap": block.softcap or None}
        y = kv_decode(hadamard_blocks(q) if form.turned_keys else q, store.kv, store.used, starts=store.starts, **about)
        return hadamard_blocks(y) if form.turned_values else y

    def seen(self, tokens: int, padding: Tensor | None = None) -> None:
        """The next token is read behind this number of tokens, of which some may be padding, int32 [batch]; what the
        layers hold does not change."""
        super().at(tokens)
        if padding is not None:
            self.leave_out(padding)

    def at(self, held: int) -> None:
        """The next token is read behind the first `held` positions, all of which the layers hold, if there is room."""
        self.seen(held)
        form, S, R = self.room
        coded = min(form.coded(held), S)
        tail = min(held - coded, R - 1)
        for store in self.stores.values():
            store.starts.fill_(S - coded)
            store.ends.fill_(tail)
            store.used.fill_(coded + tail)
            store.parts = [(slice(0, store.ends.shape[1]), tail)]
