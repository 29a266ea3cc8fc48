"""The operations between the products, in plain torch on any device: computed in float32; each resulting tensor is
rounded."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, added: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + added, its RMS norm times the gain [hidden]), both [batch, hidden] in x's dtype."""
    x = x if added is None else x + added
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.float()
    return x, normed.to(x.dtype)


def turn_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, length: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns rotated q [batch, heads, channels]; writes rotated k, and v, to position length - 1 of the cache.

    Args:
        qkv: [batch, (heads + 2 kv_heads) channels]. cos, sin: float32 [positions, channels / 2].
        length: int32 [batch, kv_heads], the new position included.
        keys, values: [batch, kv_heads, positions, channels]; changed in place.
    """
    batch, kv_heads, _, channels = keys.shape
    split = qkv.view(batch, -1, channels)
    heads = split.shape[1] - 2 * kv_heads
    at = length[:, 0].long() - 1
    c, s = cos[at][:, None], sin[at][:, None]  # [batch, 1, channels / 2]
    first, second = split[:, : heads + kv_heads].float().chunk(2, -1)
    turned = torch.cat([first * c - second * s, second * c + first * s], -1).to(qkv.dtype)
    which = torch.arange(batch, device=qkv.device)
    keys[which, :, at], values[which, :, at] = turned[:, heads:], split[:, heads + kv_heads :]
    return turned[:, :heads]


def gate(x: Tensor) -> Tensor:
    """silu(first half) * second half; x [batch, 2 inner]."""
    first, second = x.float().chunk(2, -1)
    return (F.silu(first) * second).to(x.dtype)
