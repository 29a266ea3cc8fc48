"""What a layer of a compressed cache lends to a step of decoding."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kernels.kv_decode.layout import KV


class ReadPositions(NamedTuple):
    """The positions of a lent layer that a token reads, beside its own: pages that are ranked by bounds of their keys,
    or the entries of a list; if neither is given, all positions.

    Attributes:
        bounds, pages, page, most: as in `kernels.kv_decode.pages.page_list`, for the positions before the token. A step
            updates the bounds with the new key; they have a page for it.
        indices, lengths: as in `kernels.kv_decode.Listed`, with the token itself.
    """

    bounds: Tensor | None = None
    pages: Tensor | None = None
    page: int = 1
    most: int = 0
    indices: Tensor | None = None
    lengths: Tensor | None = None


EVERY = ReadPositions()  # position is read


@dataclass(slots=True)
class CacheView:
    """The stored cache of a layer, for each part of its kv heads, in tensors with room for one more position, which a
    decoding step writes.

    Attributes:
        k, v: codes, with scales `params_k`, `params_v`, as in `kernels.kv_decode.KV`, and a tail of positions that are
            not quantised, [B, H, room, D] in 16 bits; if nothing is quantised, k and v are like the tail, and the
            others are empty.
        starts: [B, H] int32, the first position of each row.
        counts: for each part, the number of quantised positions and of those after them, without the new one.
        bits, group: of the codes; 16 bits if there are none.
        turned_keys, turned_values: are they stored after a Hadamard transform with the widest block of channels?
        sparse: which positions are read; if not all are read, all heads form one part.
    """

    k: list[Tensor]
    v: list[Tensor]
    starts: list[Tensor]
    counts: list[int]
    bits: int = 16
    group: int = 64
    turned_keys: bool = False
    turned_values: bool = False
    sparse: ReadPositions = EVERY
    params_k: list[Tensor] = field(default_factory=list)
    params_v: list[Tensor] = field(default_factory=list)
    tail_k: list[Tensor] = field(default_factory=list)
    tail_v: list[Tensor] = field(default_factory=list)


class StoredForm(NamedTuple):
    """How a layer stores its positions.

    Attributes:
        bits: of codes, 8 or 4; 16: nothing is quantised. float8: 8 bits are e4m3.
        group: number of positions that become codes together; 0 without codes.
        tail: largest number of positions in 16 bits behind the codes; 0 without codes, where all are in 16 bits.
        turned_keys, turned_values: are they stored after `kernels.hadamard.hadamard_blocks`, in codes or not?
    """

    bits: int = 16
    group: int = 0
    float8: bool = False
    tail: int = 0
    turned_keys: bool = False
    turned_values: bool = False

    def coded(self, positions: int) -> int:
        """How many of so many positions are codes, if none was evicted."""
        if self.bits == 16:
            return 0
        residual = self.tail - self.group  # positions that stay in 16 bits, at least
        return max(positions - residual, 0) // self.group * self.group


class StoredLayer(NamedTuple):
    """What a layer stores, for steps of decoding that copy it and keep the next tokens themselves for a while.

    Attributes:
        parts: for neighbouring kv heads, their positions (of 16 bits as long as there are no codes), whose rows end
            together, and starts [B, H] int32, the first position of each row.
        free: number of tokens that can be appended to every row in 16 bits before the layer must do more; 0: the layer
            itself must attend to the next token.
    """

    form: StoredForm
    parts: list[tuple[KV, Tensor]]
    free: int
