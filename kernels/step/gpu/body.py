"""A step of decoding of a whole model, op by op, without a value that the host needs: what a graph can capture."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.int_matmul import Packed, int_matmul
from kernels.kv_decode import KV, kv_decode
from kernels.step.cache import static_cache
from kernels.step.gpu.between import add_norm, gated, turn_and_store
from kernels.step.program import Norm
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.parts import NotNative, together
from kernels.w8a8_matmul import W8, w8a8_matmul

SPARE = 2.0  # free memory needed to join weights, as a multiple of their size
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

    Weights that read the same input are joined where memory allows it, since short products do not fill a GPU.

    Args:
        decoder: recognised. batch, positions: the cache's size. joined: shared between bodies of one decoder.
    """

    decoder: Decoder
    batch: int
    positions: int
    joined: dict[int, "Joined | None"] = field(default_factory=dict)
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
        x = residual.new_empty(residual.shape, dtype=self.decoder.dtype)
        add_norm(residual, added, after, block.before_attention, x)
        y = self.attend(block, self._products((block.q, block.k, block.v), x), keys, values, starts)
        y = block.o(y.flatten(1))
        add_norm(residual, y, block.after_attention, block.before_mlp, x)
        return block.down(gated(*self._products((block.gate, block.up), x), block.activation))

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

    def _products(self, linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
        """The products of several linears with one input: [batch, out_i], rows at any distance."""
        if (whole := together(linears)) is not None:
            return whole(x).split([linear.out_features for linear in linears], -1)
        key = id(linears[0])
        if key not in self.joined:
            self.joined[key] = Joined.of(linears)
        made = self.joined[key]
        return tuple(linear(x) for linear in linears) if made is None else made(x)


@dataclass(frozen=True)
class Joined:
    """The rows of several weights that are stored alike, in one weight: one product for one input.

    sizes: number of rows of each.
    """

    weight: Tensor | Packed | W8
    bias: Tensor | None
    sizes: tuple[int, ...]
    x_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias).split(self.sizes, -1)
        if isinstance(self.weight, Packed):
            y = int_matmul(x, self.weight)
        else:
            y = w8a8_matmul(x, self.weight, x_scale=self.x_scale)
        return (y if self.bias is None else y + self.bias).split(self.sizes, -1)

    @classmethod
    def of(cls, linears: Sequence[nn.Module]) -> "Joined | None":
        """None: they are stored in different ways or in a format that cannot be joined, or memory is short."""
        stored = [_rows(linear) for linear in linears]
        first = stored[0]
        if any(s is None or type(s) is not type(first) for s in stored):
            return None
        size = sum(t.numel() * t.element_size() for s in stored for t in _tensors(s))
        if size * SPARE > free_memory(_tensors(first)[0].device):
            return None
        biases = [linear.bias for linear in linears]
        if any((b is None) != (biases[0] is None) for b in biases):
            return None
        bias = None if biases[0] is None else torch.cat(biases)
        sizes = tuple(linear.out_features for linear in linears)
        if isinstance(first, Tensor):
            return cls(torch.cat(stored), bias, sizes) if len({s.dtype for s in stored}) == 1 else None
        columns = first.shape[1]
        if isinstance(first, Packed):
            alike = {(s.layout, s.bits, s.group_size, s.scale.dtype, s.zero is None) for s in stored}
            if len(alike) > 1 or first.layout != "rows":
                return None
            zero = None if first.zero is None else torch.cat([s.zero for s in stored])
            codes, scale = (torch.cat([getattr(s, name) for s in stored]) for name in ("codes", "scale"))
            return cls(first._replace(codes=codes, scale=scale, zero=zero, shape=(sum(sizes), columns)), bias, sizes)
        steps = [getattr(linear.parts[0], "x_scale", None) for linear in linears]
        same = all((s is None) == (steps[0] is None) and (s is None or torch.equal(s, steps[0])) for s in steps)
        if not same or any(s.layout != "rows" or s.scale.dim() != 1 or s.codes.dtype != first.codes.dtype
                           for s in stored):  # fmt: skip
            return None
        codes, scale = (torch.cat([getattr(s, name) for s in stored]) for name in ("codes", "scale"))
        return cls(first._replace(codes=codes, scale=scale, shape=(sum(sizes), columns)), bias, sizes, steps[0])


def _rows(linear: nn.Module) -> Tensor | Packed | W8 | None:
    """The stored weight of a linear whose product is that weight's alone, or None."""
    if type(linear) is nn.Linear:
        return linear.weight.detach()
    parts = getattr(linear, "parts", ())
    if len(parts) != 1 or getattr(linear, "transform", None) is not None:
        return None
    stored = getattr(parts[0], "packed", None)
    stored = getattr(parts[0], "w8", None) if stored is None else stored
    return stored if isinstance(stored, Packed | W8) else None


def _tensors(stored: Tensor | Packed | W8) -> list[Tensor]:
    if isinstance(stored, Tensor):
        return [stored]
    return [t for t in (stored.codes, stored.scale, getattr(stored, "zero", None)) if t is not None]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type != "cuda":
        return 1 << 62
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


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
