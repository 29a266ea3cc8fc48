"""Shapes of decoders, and their weights: random ones, dense or rounded to integers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.int_matmul import Packed, pack


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of the Llama family; `channels`: channels per head; `inner`: hidden units of the MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    inner: int
    vocabulary: int
    eps: float = 1e-5
    theta: float = 500_000.0


LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
TOY = Shape(2, 64, 4, 2, 16, 128, 96)


@dataclass(frozen=True)
class Layer:
    """before, middle: gains of the norms before attention and before the MLP [hidden].

    qkv, gate_up: the rows of several products in one weight: q, k and v [(heads + 2 kv_heads) channels, hidden], gate
    and up [2 inner, hidden]. out [hidden, heads channels], down [hidden, inner].
    """

    before: Tensor
    qkv: Tensor | Packed
    out: Tensor | Packed
    middle: Tensor
    gate_up: Tensor | Packed
    down: Tensor | Packed


@dataclass(frozen=True)
class Weights:
    """embedding and head [vocabulary, hidden]; last: gain of the norm before the head [hidden]."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    last: Tensor
    head: Tensor | Packed

    @property
    def read(self) -> int:
        """Bytes of weights that a step reads; the one row of the embedding is neglected."""
        parts = [w for layer in self.layers for w in vars(layer).values()] + [self.last, self.head]
        tensors = [t for w in parts for t in ((w.codes, w.scale) if isinstance(w, Packed) else (w,))]
        return sum(t.numel() * t.element_size() for t in tensors)


def random_weights(shape: Shape, dtype: torch.dtype, device: torch.device) -> Weights:
    """Normal weights of variance 1 / in, so that activations neither grow nor vanish from layer to layer."""

    def normal(out: int, columns: int, spread: float | None = None) -> Tensor:
        W = torch.randn(out, columns, device=device, dtype=dtype)
        return W.mul_(columns**-0.5 if spread is None else spread)

    def gain() -> Tensor:
        return (1 + 0.1 * torch.randn(shape.hidden, device=device)).to(dtype)

    def layer() -> Layer:
        attention = shape.heads * shape.channels
        both = attention + 2 * shape.kv_heads * shape.channels
        qkv, out = normal(both, shape.hidden), normal(shape.hidden, attention)
        gate_up, down = normal(2 * shape.inner, shape.hidden), normal(shape.hidden, shape.inner)
        return Layer(gain(), qkv, out, gain(), gate_up, down)

    embedding, head = normal(shape.vocabulary, shape.hidden, 1.0), normal(shape.vocabulary, shape.hidden)
    return Weights(embedding, tuple(layer() for _ in range(shape.layers)), gain(), head)


def rounded_weights(weights: Weights, bits: int, group_size: int, head_bits: int = 8) -> Weights:
    """The same weights, with every product's weight rounded to nearest symmetric integers, in the layout `rows`."""

    def rounded(W: Tensor, bits: int) -> Packed:
        groups = W.float().view(len(W), -1, group_size)
        top = (1 << (bits - 1)) - 1
        scale = (groups.abs().amax(-1).clamp_min(1e-8) / top).to(torch.bfloat16)  # [out, groups]
        codes = (groups / scale.float()[..., None]).round_().clamp_(-top, top).add_(top + 1)
        return pack(codes.view(W.shape).to(torch.uint8), scale, None, bits=bits, group_size=group_size)

    def layer(one: Layer) -> Layer:
        products = {name: rounded(w, bits) for name, w in vars(one).items() if w.dim() == 2}
        return Layer(**{**vars(one), **products})

    layers = tuple(map(layer, weights.layers))
    return Weights(weights.embedding, layers, weights.last, rounded(weights.head, head_bits))
