"""The form in which keys and values are stored: their bits, rotation, scaling and projection."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kv.growing import Growing
from kernels.hadamard import hadamard_blocks
from kernels.kv_decode import KV, quantize_kv, quantize_kv_float8

MOST = 8  # a channel is scaled by a factor of at least 2 ** -MOST


@dataclass(frozen=True, eq=False)
class Projection:
    """Orthonormal columns for every kv head of a layer: keys k are held as k U, values v as v W.

    Attributes:
        keys: U, [H_kv, D, R]. values: W, [H_kv, D, R'].
    """

    keys: Tensor
    values: Tensor
    _like: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def of(self, heads: slice, like: Tensor) -> "Projection":
        """The projection of some heads, in the dtype and on the device of a tensor, made once for all caches."""
        key = (like.dtype, like.device)
        if key not in self._like:
            self._like[key] = self.keys.to(like), self.values.to(like)
        return Projection(*(x[heads] for x in self._like[key]))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Projection":
        return self  # caches share it


class Precision(NamedTuple):
    """The form in which keys and values are kept: codes of 8, 4 or 2 bits for groups of positions, of `value_bits` for
    values unless this is 0, and at least `residual` positions in their original dtype. `rotates`: keys, codes or not,
    are rotated by `turned`; `rotates_values`: values, too. `by_token`: keys have one scale a position, around 0 if
    `symmetric`. `scaled`: the number of channels of a head that are scaled before keys become codes. `projection`: of
    this layer, applied first. `float8`: the 8 bits are e4m3, times `scale` or, if that is None, times a scale for each
    group."""

    bits: int = 16
    group: int = 64
    residual: int = 0
    rotates: bool = False
    by_token: bool = False
    symmetric: bool = False
    scaled: int = 0
    projection: Projection | None = None
    float8: bool = False
    scale: float | None = None
    value_bits: int = 0
    rotates_values: bool = False

    def turned(self, x: Tensor) -> Tensor:
        """Keys or queries [..., D] in the form of kept keys, or back from that form: x, or with `rotates` x H.

        H is the normalised Hadamard rotation of D channels, or of the widest divisor of D that has a matrix, block by
        block. It is its own inverse, and q H · k H = q · k.
        """
        return hadamard_blocks(x) if self.rotates else x

    def values_turned(self, v: Tensor) -> Tensor:
        """Values [..., D] or their sums in the form of kept values, or back from it: Σ p (v H) = (Σ p v) H."""
        return hadamard_blocks(v) if self.rotates_values else v


class Held:
    """The form in which a cache holds keys and values: both projected; keys then turned by its precision, and some of
    their channels multiplied by factors by which queries are divided.

    Attributes:
        factors: [B, H, 1, D], powers of two, so that scaling rounds nothing; None: nothing is scaled.
        projection: of the heads that are held; None: all channels are held.
    """

    precision: Precision
    factors: Growing | None = None
    projection: Projection | None = None

    @property
    def as_they_came(self) -> bool:
        """Whether keys and values are held in their original form, so that queries need no change."""
        turned = self.precision.rotates or self.precision.rotates_values
        return self.projection is None and self.factors is None and not turned

    @property
    def read_by_steps(self) -> bool:
        """Whether steps of decoding support this form of keys and values."""
        held = self.precision
        return self.projection is None and self.factors is None and not (held.scaled or held.by_token or held.float8)

    def inwards(self, k: Tensor) -> Tensor:
        """Keys [B, H, n, D] in the held form."""
        k = self.precision.turned(k if self.projection is None else k @ self.projection.keys)
        return k if self.factors is None else k * self.factors.view.to(k.dtype)

    def outwards(self, k: Tensor) -> Tensor:
        """Held keys [B, H, n, R] in their original form, except for the loss of a projection."""
        k = self.precision.turned(k if self.factors is None else k / self.factors.view.to(k.dtype))
        return k if self.projection is None else k @ self.projection.keys.mT

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, H_q, n, D] in the form for held keys: q · (k U Uᵀ) = (q U) · (k U)."""
        if self.projection is not None:
            keys = self.projection.keys
            q = q @ keys.repeat_interleave(q.shape[1] // len(keys), 0)
        q = self.precision.turned(q)
        if self.factors is None:
            return q
        factors = self.factors.view.to(q.dtype)
        return q / factors.repeat_interleave(q.shape[1] // factors.shape[1], 1)

    def values_inwards(self, v: Tensor) -> Tensor:
        """Values [B, H, n, D] in the held form."""
        return self.precision.values_turned(v if self.projection is None else v @ self.projection.values)

    def lifted(self, y: Tensor) -> Tensor:
        """Held values [B, H, n, R], or sums of them for each query head, back in all channels."""
        y = self.precision.values_turned(y)
        if self.projection is None:
            return y
        values = self.projection.values
        return y @ values.repeat_interleave(y.shape[1] // len(values), 0).mT


def codes_of(k: Tensor, v: Tensor, held: Precision) -> KV:
    """Whole groups of positions, k, v [B, H, n, D], as codes."""
    if held.float8:
        return quantize_kv_float8(k, v, held.group, scale=held.scale)
    how = {"value_bits": held.value_bits, "by_token": held.by_token, "symmetric": held.symmetric}
    return quantize_kv(k, v, held.bits, held.group, **how)


def outlier_factors(k: Tensor, starts: Tensor, count: int) -> Tensor:
    """The factors by which channels of keys are multiplied so that no channel is much larger than the others.

    The `count` largest channels of a head get the power of two, at most 1, that brings their largest magnitude nearest
    to that of the largest other channel, and no further: scores depend most on these channels. The others get 1.

    Args:
        k: [B, H, n, D]; positions before a row's start [B, H] are ignored.

    Returns:
        [B, H, 1, D], float32.
    """
    before = torch.arange(k.shape[2], device=k.device) < starts[..., None]  # [B, H, n]
    largest = k.float().abs().masked_fill(before[..., None], 0).amax(2, keepdim=True)
    top, channels = largest.topk(min(count + 1, k.shape[-1]), -1)
    distance = (top[..., -1:] / top).log2().ceil().nan_to_num(0, 0, 0).clamp(-MOST, 0)
    return torch.ones_like(largest).scatter(-1, channels, distance.exp2())
