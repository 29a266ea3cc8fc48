"""Layers with a window, which lend their tensors to steps of decoding: see `kernels.step.cache.AttendingCache`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kernels.step.cache_view import CacheView

SPARE = 8  # room for an eighth more, at least 16 positions, before a window moves to the front of its tensors


@dataclass
class WindowRoom:
    """Tensors [B, H, room, D] that contain a layer's keys and values, up to position `end`."""

    keys: Tensor
    values: Tensor
    starts: Tensor  # [B, H] int32, zeros
    end: int
    shown: Tensor | None = None  # the layer's keys, while they are a view of `keys`


def lend_window(layer: DynamicSlidingWindowLayer) -> CacheView | None:
    """`compress.kv.layer.KVLayer.lend` for a layer that keeps the last `sliding_window - 1` positions."""
    if not layer.is_initialized or layer.record_past:
        return None
    kept, room = layer.keys.shape[2], getattr(layer, "room", None)
    if room is None or room.shown is not layer.keys or room.end == room.keys.shape[2]:
        room = layer.room = _room(layer.keys, layer.values)
    first, room.end = room.end - kept, room.end + 1
    lent = [[x[:, :, first:]] for x in (room.keys, room.values)]
    visible = slice(max(first, room.end - layer.sliding_window + 1), room.end)
    layer.keys, layer.values = room.keys[:, :, visible], room.values[:, :, visible]
    room.shown = layer.keys
    layer.cumulative_length += 1
    return CacheView(*lent, [room.starts], [0, kept])


def _room(keys: Tensor, values: Tensor) -> WindowRoom:
    """New room, with these keys and values at its front."""
    made = []
    for x in (keys, values):
        B, H, kept, D = x.shape
        made.append(x.new_zeros(B, H, kept + max(kept // SPARE, 16), D))
        made[-1][:, :, :kept] = x
    return WindowRoom(*made, torch.zeros(B, H, dtype=torch.int32), kept)
