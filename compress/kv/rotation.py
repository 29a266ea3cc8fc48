"""Rotary position embeddings of any architecture, applied and undone with the model's own functions."""

import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn


def rotary_of(model: nn.Module) -> nn.Module | None:
    """The module that computes a model's rotary embeddings; None if it has none."""
    return next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)


def turn_of(model: nn.Module, attention: nn.Module) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """The function by which an attention module rotates queries and keys.

    Returns:
        (x [B, H, n, D], positions [B, n], back) -> x rotated to these positions, or back from them; x itself if the
        model has no rotary embeddings.
    """

    def turn(x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        rotary = rotary_of(model)
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if rotary is None or rotate is None:
            return x
        kind = {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kind["layer_type"] = attention.config.layer_types[attention.layer_idx]
        before = dict(vars(rotary)), dict(rotary._buffers)
        cos, sin = rotary(x, positions, **kind)
        vars(rotary).update(before[0])  # some modules change their frequencies with the largest position
        rotary._buffers.update(before[1])
        if back:  # the inverse: the opposite rotation, and without the scale
            scale = cos.square() + sin.square()
            cos, sin = cos / scale, -sin / scale
        try:
            return rotate(x, x, cos, sin)[0]
        except RuntimeError:  # only the first channels are rotated, and the module selects them itself
            width = cos.shape[-1]
            return torch.cat([rotate(x[..., :width], x[..., :width], cos, sin)[0], x[..., width:]], -1)

    return turn
