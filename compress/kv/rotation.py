"""Rotary position embeddings of any architecture, applied and undone with the model's own functions.

Which module and function a layer rotates with, and whether it rotates at all (some layers of SmolLM3, Cohere 2 and
EXAONE 4 do not), is found by a trial: the model reads a few tokens at two places, and the keys of one must turn into
those of the other.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.kv.support import attentions_of, keeping_layers, plain_cache
from compress.walk.capture import device_of
from kernels.support.modes import evaluating

TOKENS, MOVED = 6, 50  # read at the first places, and this much later
# Relative difference of keys that rounding may cause: 4 times that of the layer's values, which no layer rotates, and
# in any case the rounding of the keys themselves.
TIMES_NOISE, LEAST, LEAST_16 = 4.0, 1e-3, 0.02


def rotaries_of(model: nn.Module) -> list[nn.Module]:
    """The modules that compute rotary embeddings; some may be those of an image encoder."""
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]


class LayerRotation:
    """The rotation of queries and keys in one layer, looked up when it is first needed."""

    def __init__(self, model: nn.Module, number: int, attention: nn.Module | None) -> None:
        self.model, self.number, self.attention = model, number, attention

    def __call__(self, x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """x [B, H, n, D], positions [B, n] -> x rotated to these positions, or back from them; x itself if the layer
        does not rotate.

        Raises:
            ValueError: it is not known how the layer rotates.
        """
        rotations = learned_rotations(self.model)
        rotation = rotations[self.number if self.number in rotations else self.attention.layer_idx]
        if isinstance(rotation, str):
            raise ValueError(rotation)
        return x if rotation is None else rotation(x, positions, back)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerRotation":
        return self


def turn_of(model: nn.Module, number: int, attention: nn.Module | None = None) -> LayerRotation:
    """The function by which a layer rotates queries and keys. Its number is the cache's: a module that several layers
    share, as in Zamba2, does not know it.

    Args:
        attention: the module that attends, for models that have more layers in the cache than modules.
    """
    return LayerRotation(model, number, attention)


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """A way to rotate: the module that gives angles, the kind of layer that it asks for, the function that rotates, and
    how that function is called (one of `CALLS`)."""

    rotary: nn.Module
    kind: dict[str, str]
    rotate: Callable[..., Any]
    call: Callable[..., Tensor]

    def __call__(self, x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        before = dict(vars(self.rotary)), dict(self.rotary._buffers)
        angles = self.rotary(x, positions, **self.kind)
        vars(self.rotary).update(before[0])  # some modules change their frequencies with the largest position
        self.rotary._buffers.update(before[1])
        if isinstance(angles, Tensor):  # complex numbers
            return self.call(self.rotate, x, angles.conj() / angles.abs().square() if back else angles)
        cos, sin = angles
        if back:  # the inverse: the opposite rotation, and without the scale
            scale = cos.square() + sin.square()
            cos, sin = cos / scale, -sin / scale
        return self.call(self.rotate, x, cos, sin)


def _of_pairs(rotate: Callable, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, x, cos, sin)[0]


def _of_first_channels(rotate: Callable, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """For modules that select the channels that are rotated themselves."""
    width = cos.shape[-1]
    return torch.cat([rotate(x[..., :width], x[..., :width], cos, sin)[0], x[..., width:]], -1)


def _of_one(rotate: Callable, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin)


def _of_complex(rotate: Callable, x: Tensor, angles: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return rotate(x, x, angles)[0].transpose(1, 2)


CALLS = (_of_pairs, _of_first_channels, _of_one, _of_complex)


def likely_rotations(model: nn.Module, attention: nn.Module, x: Tensor) -> Iterator[KeyRotation]:
    """The ways in which an attention module may rotate x [1, H, n, D], by what its file defines; they run."""
    functions = vars(sys.modules[type(attention).__module__])
    rotates = [function for name, function in functions.items() if name.startswith("apply_rotary")]
    positions = torch.arange(x.shape[2], device=x.device)[None]
    for rotary in rotaries_of(model):
        kind = {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kind["layer_type"] = attention.config.layer_types[attention.layer_idx]
        for rotate in rotates:
            for call in CALLS:
                rotation = KeyRotation(rotary, kind, rotate, call)
                try:
                    turned = rotation(x, positions)
                except Exception:  # another signature, or another module's widths
                    continue
                if isinstance(turned, Tensor) and turned.shape == x.shape:
                    yield rotation


# By attention module: its rotation, None if it does not rotate, or the reason why its rotation is not known.
_known: weakref.WeakKeyDictionary[nn.Module, KeyRotation | str | None] = weakref.WeakKeyDictionary()


@torch.no_grad()
def learned_rotations(model: nn.Module) -> dict[int, KeyRotation | str | None]:
    """How each layer of a model rotates: None if it does not, or the reason why that is not known. Two short passes
    find it once; caches that will need it call this before a pass."""
    attentions = attentions_of(model)
    if not all(attention in _known for attention in attentions.values()):
        rotates = bool(rotaries_of(model))
        with evaluating(model):
            first, moved = (_held(model, start) for start in (0, MOVED)) if rotates else ({}, {})
        for number, attention in attentions.items():
            kept = number in first  # layers of other kinds keep no keys
            _known[attention] = _rotation_of(model, attention, first[number], moved[number]) if kept else None
    return {number: _known[attention] for number, attention in attentions.items()}


def check_rotations(model: nn.Module) -> None:
    """Raise ValueError if it is not known how a layer that keeps all positions rotates its keys."""
    rotations = learned_rotations(model)
    for number in keeping_layers(model):
        if isinstance(reason := rotations.get(number), str):
            raise ValueError(reason)


Held = tuple[Tensor, Tensor]  # keys and values, [1, H, n, D] float32


def _held(model: nn.Module, start: int) -> dict[int, Held]:
    """What each layer keeps of a few tokens from this position on."""
    device = device_of(model)
    ids = (torch.arange(TOKENS, device=device) * 7919 % model.get_input_embeddings().num_embeddings)[None]
    cache = plain_cache(model)
    at = torch.arange(start, start + TOKENS, device=device)[None]
    model(ids, position_ids=at, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    keeping = {number: layer for number, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    return {number: (layer.keys.float(), layer.values.float()) for number, layer in keeping.items()}


def _rotation_of(model: nn.Module, attention: nn.Module, first: Held, moved: Held) -> KeyRotation | str | None:
    """The rotation that turns the keys of the first positions into those of later positions, None if they are the same;
    else the reason."""
    (k, v), (wanted, later) = first, moved
    at = torch.arange(TOKENS, device=k.device)[None, -k.shape[2] :]  # layers with a window keep the last ones
    ways: list[tuple[float, KeyRotation | None]] = [(_difference(k, wanted), None)]
    for rotation in likely_rotations(model, attention, k):
        ways.append((_difference(rotation(rotation(k, at, True), at + MOVED), wanted), rotation))
    difference, best = min(ways, key=lambda way: way[0])
    least = LEAST if model.dtype.itemsize > 2 else LEAST_16
    if difference < max(least, TIMES_NOISE * _difference(v, later)):
        return best
    return (
        f"`model` ({type(model).__name__}): layer {attention.layer_idx} rotates its keys in a way that is not known, "
        "so that they cannot be turned back or to other positions"
    )


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-20))
