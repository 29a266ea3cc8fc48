"""Caches whose tensors are written by a decoder's pass (`DecodeStep`, `DecoderForward`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kernels.step.between import turn_and_store
from kernels.step.cache_view import CacheView, StoredLayer
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.parts import NotNative

SPARE = 256  # free positions that a cache is given after those in use
LARGER = 1.5  # factor by which a full cache grows


@dataclass(frozen=True)
class LayerRoom:
    """The storage of a layer's cache: keys and values [batch, kv heads, positions, channels], and the number of
    positions in use, an int64 tensor with one element."""

    keys: Tensor
    values: Tensor
    length: Tensor


class NewTokens(NamedTuple):
    """The inputs of a layer's attention for the tokens of a pass, none of which is padding.

    Attributes:
        q, k, v: [batch, heads or kv heads, tokens, channels], after the rotary embedding.
        hidden: [batch, tokens, hidden], the input from which q, k and v were computed.
        scaling: factor of the scores. softcap: scores become softcap tanh(score / softcap), or None.
        window: number of positions that a token sees, itself included, or 0 for all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    scaling: float
    softcap: float | None
    window: int


class AttendingCache(Protocol):
    """A cache that stores keys and values in its own format and computes the attention, such as a compressed cache.

    Attributes:
        knows_padding: does the cache know which places before a token are padding, so that steps need no mask?
    """

    knows_padding: bool

    def get_seq_length(self) -> int:
        """The number of tokens seen, which is the next token's position."""

    def pass_over(self, number: int, least: Tensor) -> None:
        """Count the new tokens of `least` [batch, 1, tokens, 1] in a layer whose attention was dropped."""

    def lend(self, number: int) -> CacheView | None:
        """The stored cache of a layer, if a step with one token per sequence only has to write it there and to attend;
        the cache already counts the token. None: call `attend_new` instead."""

    def attend_new(self, number: int, module: nn.Module, new: NewTokens) -> Tensor:
        """Store a layer's new tokens and attend: [batch, tokens, heads, channels]; number: the layer's index, module:
        its attention."""


class StoringCache(Protocol):
    """A cache whose layers let steps of decoding work on copies of what they store, such as a compressed cache."""

    def get_seq_length(self) -> int:
        """The number of tokens seen, which is the next token's position."""

    def why_not_copied(self) -> str:
        """Why steps cannot work on copies of these layers; "" if they can."""

    def stored(self, numbers: Sequence[int]) -> list[StoredLayer]:
        """What these layers store, ready for the next token: groups that become codes before it is read are codes."""

    def note_read(self, ids: Tensor) -> None:
        """A step reads these tokens, int64 [batch, 1], whose keys `append_new` will get."""

    def append_new(self, number: int, k: Tensor, v: Tensor) -> None:
        """Append tokens that steps have read, up to `StoredLayer.free` of them, to every row of a layer: k, v
        [batch, kv heads, tokens, channels]."""

    def refuse_further(self) -> None:
        """An error came while layers got tokens, so that they hold different ones: later passes are refused."""


def attend_by_cache(
    cache: AttendingCache,
    block: DecoderBlock,
    qkv: Sequence[Tensor],
    hidden: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
) -> Tensor:
    """Rotate the new queries and keys of a block; its cache computes attention [batch, tokens, heads, channels].

    Args:
        qkv: queries, keys and values, [batch, tokens, heads or kv heads * channels] in 16 bits; queries are changed.
        hidden: [batch, tokens, hidden], the input from which q, k and v were computed.
        tables: cosines and sines of all positions. positions: int64 [batch, tokens].
    """
    q, k, v = qkv
    # New memory for every block and pass, because the cache may keep these tensors.
    keys, values = q.new_empty(2, len(q), block.kv_heads, q.shape[1], block.channels)
    turn_and_store(
        q, k, v, tables, positions, (block.query_norm, block.key_norm), keys, values, 0, neighbours=block.neighbours
    )
    q = q.unflatten(-1, (-1, block.channels)).transpose(1, 2)
    new = NewTokens(q, keys, values, hidden, block.scale, block.softcap or None, block.window)
    return cache.attend_new(block.index, block.attention, new)


def rooms_of(decoder: Decoder, cache: Cache) -> list[LayerRoom]:
    """The rooms of all blocks in a static cache.

    Raises:
        NotNative: a layer is of another kind or shape.
    """
    rooms = []
    for block in decoder.blocks:
        layer = cache.layers[block.index]
        if getattr(layer, "is_sliding", False) or not getattr(layer, "is_initialized", False):
            raise NotNative(f"{block.name}'s cache ({type(layer).__name__}) is not of fixed tensors")
        expected = (block.kv_heads, layer.max_cache_len, block.channels)
        if layer.keys.shape[1:] != expected or layer.values.shape != layer.keys.shape:
            shape = tuple(layer.keys.shape)
            raise NotNative(
                f"{block.name}'s cache {shape} is not of {block.kv_heads} heads of {block.channels} channels"
            )
        rooms.append(LayerRoom(layer.keys, layer.values, layer.cumulative_length))
    return rooms


def static_cache(model: nn.Module, length: int) -> StaticCache:
    """A static cache of `length` positions. Sliding layers also keep all of them, as masks hide those outside their
    window.

    transformers' own sliding layer counts positions in Python, so that every decoded token would be compiled anew.
    """
    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.layers = [StaticLayer(length) if type(layer) is StaticSlidingWindowLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """A layer of a dynamic cache whose keys and values are the first positions of larger tensors, so that a pass writes
    into them in place. A layer with a window also keeps all positions: masks and kernels hide those outside it."""

    def __init__(self, keys: Tensor, values: Tensor, held: int) -> None:
        """keys, values: [batch, kv heads, positions, channels], of which `held` are in use."""
        self.room, self.held = LayerRoom(keys, values, torch.zeros(1, dtype=torch.int64)), held
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    @property
    def whole(self) -> bool:
        """Are the keys and values those in the room, not tensors with which transformers has replaced them?"""
        return self._keys is None and self._values is None

    @property
    def keys(self) -> Tensor:
        """[batch, kv heads, held, channels]"""
        return self.room.keys[:, :, : self.held] if self._keys is None else self._keys

    @keys.setter
    def keys(self, others: Tensor | None) -> None:
        self._keys = others

    @property
    def values(self) -> Tensor:
        """[batch, kv heads, held, channels]"""
        return self.room.values[:, :, : self.held] if self._values is None else self._values

    @values.setter
    def values(self, others: Tensor | None) -> None:
        self._values = others

    def get_seq_length(self) -> int:
        """The number of positions in use."""
        return self.held if self._keys is None else self._keys.shape[2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values."""
        end = self.held + key_states.shape[2]
        if not self.whole or end > self.room.keys.shape[2] or len(key_states) != len(self.room.keys):
            return super().update(key_states, value_states)
        self.room.keys[:, :, self.held : end], self.room.values[:, :, self.held : end] = key_states, value_states
        self.held = end
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence by another one, as beam search does."""
        if not self.whole:
            super().reorder_cache(beam_idx)
            return
        self.keys.copy_(self.keys[beam_idx])
        self.values.copy_(self.values[beam_idx])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last positions; `tokens_to_remove` is negative."""
        if self.whole and tokens_to_remove <= 0:
            self.held = max(0, self.held + tokens_to_remove)
        else:
            super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Remove all positions."""
        self._keys = self._values = None
        self.held = 0


class LentRooms:
    """The rooms of a cache with possible padding on the left, as an `AttendingCache` for one more token."""

    knows_padding = True

    def __init__(self, decoder: Decoder, rooms: Sequence[LayerRoom], slot: int, first: Tensor | None) -> None:
        """slot: number of places in use. first: int64 [batch], each sequence's first visible place; None: all 0."""
        self.slot, batch, starts = slot, len(rooms[0].keys), {}
        for window in {block.window for block in decoder.blocks}:
            seen = torch.zeros(batch, dtype=torch.int64) if first is None else first
            starts[window] = seen.clamp(min=slot + 1 - window if window else 0).to(torch.int32)
        self._lent = {}
        for block, room in zip(decoder.blocks, rooms, strict=True):
            rows = starts[block.window][:, None].expand(-1, block.kv_heads).contiguous()
            self._lent[block.index] = CacheView([room.keys], [room.values], [rows], [0, slot])

    def get_seq_length(self) -> int:
        """The number of places in use."""
        return self.slot

    def pass_over(self, number: int, least: Tensor) -> None:
        """A layer without attention needs nothing: the rooms' owner counts their positions."""

    def lend(self, number: int) -> CacheView:
        """A layer's room."""
        return self._lent[number]

    def attend_new(self, number: int, module: nn.Module, new: NewTokens) -> Tensor:
        """Never called: every layer is lent."""
        raise AssertionError(f"layer {number} is lent")


def roomy(decoder: Decoder, cache: DynamicCache, batch: int, tokens: int) -> list[LayerRoom] | None:
    """Each block's room for `tokens` more tokens in a cache that `generate` made; None: its layers are of other kinds.

    Layers become `RoomyLayer`s with the same content. A layer with a window must be empty, since it drops positions.
    """
    layers = cache.layers
    last = max(block.index for block in decoder.blocks)
    while len(layers) <= last and cache.layer_class_to_replicate is DynamicLayer:
        layers.append(DynamicLayer())
    if len(layers) != len(decoder.blocks) or getattr(cache, "offloading", False):
        return None
    held = cache.get_seq_length()
    for block in decoder.blocks:
        layer = layers[block.index]
        kind, empty = type(layer), not layer.get_seq_length()
        if kind not in (RoomyLayer, DynamicLayer) and not (kind is DynamicSlidingWindowLayer and empty):
            return None
        if layer.get_seq_length() != held or (not empty and layer.keys.shape[0] != batch):
            return None
    for block in decoder.blocks:
        layer = layers[block.index]
        fits = isinstance(layer, RoomyLayer) and layer.whole and held + tokens <= layer.room.keys.shape[2]
        if fits and len(layer.room.keys) == batch:
            continue
        positions = held + tokens + SPARE if not held else int(LARGER * (held + tokens)) + SPARE
        shape = (batch, block.kv_heads, positions, block.channels)
        keys, values = (torch.zeros(shape, dtype=decoder.dtype) for _ in range(2))
        if held:
            keys[:, :, :held], values[:, :, :held] = layer.keys, layer.values
        layers[block.index] = RoomyLayer(keys, values, held)
    return [layers[block.index].room for block in decoder.blocks]
