"""A step of decoding of a whole model, op by op, without a value that the host needs: what a graph can capture."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kernels.kv_decode import KV, kv_decode
from kernels.step.cache import static_cache
from kernels.step.codes import MOST_GATED, Codes, Coding
from kernels.step.gpu.between import add_norm, add_norm_codes, gated, gated_codes, turn_and_store
from kernels.step.gpu.products import Products
from kernels.step.program import Norm
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.parts import NotNative

PARTS = 128  # parts of the vocabulary whose largest logits are found at once


class OwnBody:
    """The model's own code on a static cache: for models that `FusedBody` does not know.

    Args:
        model: a causal model of transformers. batch, positions: the cache's size.
    """

    how = "the model's own code"

    def __init__(self, model: nn.Module, batch: int, positions: int) -> None:
        self.model, self.batch, self.positions = model, batch, positions
        self.cache, self.device = static_cache(model, positions), model.device
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.place = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        model(tokens, past_key_values=self.cache, position_ids=self.place, use_cache=True)  # makes the cache's tensors
        if odd := [type(layer).__name__ for layer in self.cache.layers if not hasattr(layer, "cumulative_length")]:
            raise NotNative(f"a cache of {odd[0]} cannot be captured")

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after the tokens [batch, 1], whose keys and values are added to the cache."""
        outputs = self.model(
            tokens, past_key_values=self.cache, position_ids=self.place, use_cache=True, logits_to_keep=1
        )
        self.place.add_(1)
        return outputs.logits[:, -1]

    def rooms(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [batch, kv heads, positions, channels]."""
        return [(layer.keys, layer.values) for layer in self.cache.layers]

    def at(self, held: int) -> None:
        """The next token is read behind the first `held` positions."""
        self.place.fill_(held)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(held)


@dataclass
class FusedBody:
    """A recognised decoder: products as the model stores their weights, one launch for each part between them.

    Weights that read the same input are joined where memory allows it. Where they read codes, the norm or the gate
    before them writes these.

    Args:
        decoder: recognised. batch, positions: the cache's size. products: shared between bodies of one decoder, by the
            id of the first linear.
    """

    decoder: Decoder
    batch: int
    positions: int
    products: dict[int, Products] = field(default_factory=dict)
    how = "fused"

    def __post_init__(self) -> None:
        decoder, (batch, positions) = self.decoder, (self.batch, self.positions)
        self.device = decoder.norm.weight.device
        if decoder.stream is not None:
            raise NotNative("its residual stream is rotated")
        if decoder.residual_scale != 1:
            raise NotNative("the model has `residual_multiplier`")
        # Graphs read these tables, which must therefore live as long as this object.
        self.tables = {kind: decoder.rotary.of_steps(kind, positions) for kind in {b.kind for b in decoder.blocks}}
        for block in decoder.blocks:
            cos, _ = self.tables[block.kind]
            if cos.shape[1] != block.channels or block.channels % 2:
                raise NotNative(f"{block.name} rotates {cos.shape[1]} of {block.channels} channels")
            if block.neighbours:
                raise NotNative(f"{block.name} rotates neighbouring channels")
            if block.before_attention is None or block.before_mlp is None:
                raise NotNative(f"{block.name} reads its input without a norm")
            if any(norm and norm.weight.numel() != block.channels for norm in (block.query_norm, block.key_norm)):
                raise NotNative(f"{block.name} has a norm of all heads together")
            if (block.query_norm is None) != (block.key_norm is None):
                raise NotNative(f"{block.name} has a norm of queries or of keys alone")
        kv_heads = {b.kv_heads for b in decoder.blocks}
        self.lengths = {n: torch.zeros(batch, n, dtype=torch.int32, device=self.device) for n in kv_heads}
        self.cache = self.made_cache()

    def made_cache(self) -> list[tuple[Tensor, Tensor]]:
        """For each block, the keys and values into which its new tokens are written."""
        return [(self.zeros(block, self.positions), self.zeros(block, self.positions)) for block in self.decoder.blocks]

    def zeros(self, block: DecoderBlock, positions: int) -> Tensor:
        """[batch, kv heads, positions, channels] for a block's keys or values."""
        shape = self.batch, block.kv_heads, positions, block.channels
        return torch.zeros(shape, dtype=self.decoder.dtype, device=self.device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after the tokens [batch, 1], whose keys and values are added to the cache."""
        decoder = self.decoder
        residual = decoder.embed(tokens).flatten(0, 1).contiguous()
        for length in self.lengths.values():
            length.add_(1)
        starts: dict[tuple[int, int], Tensor] = {}
        added = after = None
        for block, (keys, values) in zip(decoder.blocks, self.cache, strict=True):
            added, after = self.block(block, residual, added, after, keys, values, starts), block.after_mlp
        return self.logits(residual, added, after)

    def logits(self, residual: Tensor, added: Tensor, after: Norm | None) -> Tensor:
        """Logits [batch, vocabulary] of the residual stream [batch, hidden] with its last addend."""
        decoder, x = self.decoder, residual.new_empty(residual.shape, dtype=self.decoder.dtype)
        logits = decoder.head(add_norm(residual, added, after, decoder.norm, x))
        return decoder.logits(logits.float()) if decoder.changes_logits else logits

    def block(
        self,
        block: DecoderBlock,
        residual: Tensor,
        added: Tensor | None,
        after: Norm | None,
        keys: Tensor,
        values: Tensor,
        starts: dict[tuple[int, int], Tensor],
    ) -> Tensor:
        """The result of a block's MLP [batch, hidden]; the residual stream lacks only this one afterwards."""
        qkv, mlp = self._products(block.q, block.k, block.v), self._products(block.gate, block.up)
        x = self._normed(residual, added, after, block.before_attention, qkv.coding)
        y = self.attend(block, qkv(x), keys, values, starts)
        y = block.o(y.flatten(1))
        x = self._normed(residual, y, block.after_attention, block.before_mlp, mlp.coding)
        return self._down(block, *mlp(x))

    def _normed(
        self, residual: Tensor, added: Tensor | None, after: Norm | None, norm: Norm, coding: Coding | None
    ) -> Tensor | Codes:
        """The residual stream after the sum, normalised: what products read."""
        if coding is not None:
            return add_norm_codes(residual, added, after, norm, self.decoder.dtype, coding)
        return add_norm(residual, added, after, norm, residual.new_empty(residual.shape, dtype=self.decoder.dtype))

    def _down(self, block: DecoderBlock, gate: Tensor, up: Tensor) -> Tensor:
        """The result of the second product of a block's MLP."""
        down = self._products(block.down)
        if down.coding is None or gate.shape[1] > MOST_GATED:
            return block.down(gated(gate, up, block.activation))
        return down(gated_codes(gate, up, block.activation, down.coding))[0]

    def attend(
        self,
        block: DecoderBlock,
        qkv: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        starts: dict[tuple[int, int], Tensor],
    ) -> Tensor:
        """The attention of a block's new tokens, [batch, heads, 1, channels], which are written into its cache.

        starts: of windows that blocks before it had, by kv heads and window.
        """
        length, tables = self.lengths[block.kv_heads], self.tables[block.kind]
        q = turn_and_store(qkv, tables, length, (block.query_norm, block.key_norm), keys, values)
        used, start = length, None
        if block.window:
            key = block.kv_heads, block.window
            if key not in starts:
                starts[key] = (length - block.window).clamp_(min=0)
            start, used = starts[key], length - starts[key]
        return kv_decode(
            q[:, :, None], KV(keys, values), used, starts=start, scale=block.scale, softcap=block.softcap or None
        )

    def rooms(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [batch, kv heads, positions, channels], by the index of the layer."""
        order = sorted(range(len(self.cache)), key=lambda i: self.decoder.blocks[i].index)
        return [self.cache[i] for i in order]

    def at(self, held: int) -> None:
        """The next token is read behind the first `held` positions."""
        for length in self.lengths.values():
            length.fill_(held)

    def leave_out(self, padding: Tensor) -> None:
        """Each sequence has so many tokens less than `at` said, int32 [batch]: its cache begins with the first token
        that is no padding."""
        for length in self.lengths.values():
            length.sub_(padding[:, None])

    def _products(self, *linears: nn.Module) -> Products:
        """The products of several linears with one input."""
        key = id(linears[0])
        if key not in self.products:
            self.products[key] = Products.of(linears)
        return self.products[key]


def largest(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The tokens with the largest logits, int64 [batch, 1]: of equal ones the first. The vocabulary is searched in
    parts, because one program for each sequence would read all of it."""
    batch, vocabulary = logits.shape
    parts = next(n for n in (PARTS, 64, 32, 16, 8, 4, 2, 1) if vocabulary % n == 0)
    if parts == 1:
        return torch.argmax(logits, -1, keepdim=True, out=out)
    within = logits.view(batch, parts, -1)
    values, places = within.max(-1)
    part = values.argmax(-1, keepdim=True)
    return torch.add(places.gather(1, part), part, alpha=within.shape[2], out=out)
