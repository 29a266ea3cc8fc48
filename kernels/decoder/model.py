"""A decoding step, product by product, which a CUDA graph can capture."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decoder import reference
from kernels.decoder.weights import Shape, Weights
from kernels.int_matmul import Packed, int_matmul
from kernels.interpreter import triton_takes
from kernels.kv_decode import KV, kv_decode

IMPLS = ("auto", "reference", "triton")


class Decoder:
    """Weights, a static cache and the state of one batch of sequences of equal length.

    Between the products there are three kernels: sum and norm; rotary embedding and store into the cache; gate. No part
    of a step waits for the device or needs a value of the device on the host, so that it can be captured.

    token:  int64 [batch]: the input of the next step, which overwrites it with the most probable next token.
    length: int32 [batch, kv_heads]: number of positions in the cache.
    keys, values: [layers, batch, kv_heads, positions, channels] in the weights' dtype.
    """

    def __init__(self, shape: Shape, weights: Weights, *, batch: int, positions: int, impl: str = "auto") -> None:
        """impl: "reference" (plain torch, any device), "triton" or "auto".

        Raises:
            ValueError: an implementation that does not exist, or does not run on the weights' device.
        """
        device, dtype = weights.embedding.device, weights.embedding.dtype
        if impl not in IMPLS:
            raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
        if impl == "triton" and not triton_takes(device):
            raise ValueError(f"`impl` (='triton') needs triton on CUDA (on a CPU: TRITON_INTERPRET=1), not {device}")
        self.shape, self.weights = shape, weights
        self.impl = impl if impl != "auto" else "triton" if device.type == "cuda" else "reference"
        self.between = self._kernels()
        size = (shape.layers, batch, shape.kv_heads, positions, shape.channels)
        self.keys, self.values = (torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.length = torch.zeros(batch, shape.kv_heads, dtype=torch.int32, device=device)
        turn = shape.theta ** -(torch.arange(0, shape.channels, 2, device=device) / shape.channels)
        angle = torch.arange(positions, device=device)[:, None] * turn  # [positions, channels / 2]
        self.cos, self.sin = angle.cos(), angle.sin()

    def step(self) -> Tensor:
        """Logits [batch, vocabulary] after `token`, which becomes the most probable one; adds a position to the cache.

        The caller must ensure that there is room: `length`, which only the device knows, is not checked.
        """
        shape, weights, between = self.shape, self.weights, self.between
        x, added = weights.embedding[self.token], None
        self.length.add_(1)
        for layer, keys, values in zip(weights.layers, self.keys, self.values, strict=True):
            x, h = between.add_norm(x, added, layer.before, shape.eps)
            q = between.turn_and_store(self._product(h, layer.qkv), self.cos, self.sin, self.length, keys, values)
            y = kv_decode(q[:, :, None], KV(keys, values), self.length, impl=self.impl)  # [batch, heads, 1, channels]
            added = self._product(y.flatten(1), layer.out)
            x, h = between.add_norm(x, added, layer.middle, shape.eps)
            added = self._product(between.gate(self._product(h, layer.gate_up)), layer.down)
        x, h = between.add_norm(x, added, weights.last, shape.eps)
        logits = self._product(h, weights.head)
        torch.argmax(logits, -1, out=self.token)
        return logits

    def _product(self, x: Tensor, w: Tensor | Packed) -> Tensor:
        return int_matmul(x, w, impl=self.impl) if isinstance(w, Packed) else F.linear(x, w)

    def _kernels(self):
        if self.impl == "reference":
            return reference
        from kernels.decoder import triton

        return triton
