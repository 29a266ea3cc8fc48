"""A decoder's pass over any number of tokens on a CPU, op by op: no compiler, so that it takes prompts of every length.

The linears are the model's own modules, in whatever format they are stored; dense ones may be laid out once for oneDNN.
Between them are three ops (`kernels.step.between`) and attention (`prompt_attention`, `kv_decode`). The residual stream
is in float32, and every result is rounded to the model's 16 bits once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from kernels import native
from kernels.kv_decode import KV, kv_decode
from kernels.linear import better_in_float32, fast_linear, tiles
from kernels.linear.onednn import in_float32, lay_out, lays_out, product
from kernels.linear.rows import faster_than_onednn, products, rows_fit
from kernels.prompt_attention import faster_than_torch, prompt_attention
from kernels.registry import ran, recording
from kernels.step.between import add_norm, gated, turn_and_store
from kernels.step.cache import AttendingCache, LayerRoom, attend_by_cache, rooms_of
from kernels.step.joined import Joined, joined
from kernels.step.program import Norm
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.likeness import check_likeness, check_logits, difference, shaken
from kernels.step.recognition.parts import NotNative, together
from kernels.step.recognition.recognise import recognise

REST = "the rest"  # sums, norms, gates and the embedding
QUERIES = 128  # number of queries whose scores are computed at once if there is a soft cap
CHECKED = 4  # number of last tokens of a prompt whose logits are compared


class Laps:
    """The time of the parts of passes. seconds: by the name of a part, summed up over all passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = 0.0

    def start(self) -> None:
        """Begin a pass."""
        self._since = time.perf_counter()

    def __call__(self, part: str) -> None:
        """Count the time since the last call for this part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


class DecoderForward:
    """A decoder that reads tokens into its cache and gives logits.

    Args:
        decoder: recognised.
        laid_out: number of tokens for which the dense weights are laid out once, which takes their memory a second
            time; 0: they are used as they are.

    Raises:
        NotNative: there are no C++ kernels, or the dtype is not bfloat16 or float16.

    Attributes:
        laps: counts the time of the parts of passes, if set.
    """

    def __init__(self, decoder: Decoder, laid_out: int = 0) -> None:
        if decoder.dtype not in (torch.bfloat16, torch.float16):
            raise NotNative(f"activations in {str(decoder.dtype).removeprefix('torch.')}, not in 16 bits")
        if reason := native.why_not():
            raise NotNative(reason)
        self.decoder, self._laid_out = decoder, laid_out if lays_out(decoder.dtype) else 0
        # Products of AMX's tiles are faster than oneDNN's; others are within 5 % of these (Zen 4, Zen 5).
        self._tiles = bool(self._laid_out) and decoder.dtype == torch.bfloat16 and native.tiles() == "amx"
        self.laps: Laps | None = None
        self._dense: dict[int, Tensor] = {}  # laid out for oneDNN; key: the weight's address
        self._tiled: dict[int, Tensor] = {}  # in tiles
        self._joined: dict[int, Joined | None] = {}  # key: the first linear's id
        self._apart = max(native.FEW_ROUNDED, native.most_in_loops())  # tokens up to which linears are not joined

    @property
    def tensors(self) -> list[Tensor]:
        """The dense weights that are laid out, each once."""
        return [*self._dense.values(), *self._tiled.values()]

    def __call__(
        self,
        ids: Tensor,
        rooms: Sequence[LayerRoom] | AttendingCache,
        slot: int,
        *,
        keep: int = 1,
        positions: Tensor | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Read tokens after the first `slot` places of the cache, which are in use.

        Args:
            ids: int64 [batch, tokens].
            rooms: one per block, with `slot` + tokens places in use afterwards; or a cache that computes the attention.
            keep: number of tokens at the end whose logits are returned.
            positions: int64 [batch, tokens], for the rotary embedding of keys and queries; None: their places.
            first: int64 [batch], the first place of each sequence that is not padding; None: all 0.

        Returns:
            logits [batch, keep, vocabulary] in the model's dtype.
        """
        decoder, lap, tokens = self.decoder, self.laps or _no_lap, ids.shape[1]
        if self.laps:
            self.laps.start()
        if positions is None:
            positions = torch.arange(slot, slot + tokens).expand(len(ids), -1)
        places = _Places(positions.contiguous(), int(positions.max()) + 1, _Seen(slot, tokens, first), lap)
        stream = _Stream.of(decoder.embed(ids), decoder)
        final = next((place for place in reversed(range(len(decoder.blocks))) if decoder.blocks[place].attends), None)
        for place, block in enumerate(decoder.blocks):
            if block.attends:
                attended = self._attend(block, stream.read(block.before_attention), rooms, place, places)
                if place == final and keep < tokens:
                    attended = stream.keep(attended, keep)
                stream.add(self._product(block.o, attended), block.after_attention)
                lap("o")
            elif isinstance(rooms, Sequence):
                rooms[place].length.fill_(slot + tokens)
            else:
                rooms.pass_over(block.index, stream.residual.new_zeros(len(ids), 1, tokens, 1, dtype=decoder.dtype))
            if block.mixture is not None:
                x = stream.read(block.before_mlp)
                lap(REST)
                stream.add(block.mixture(x).contiguous(), block.after_mlp)
                lap("experts")
            elif block.has_mlp:
                x = stream.read(block.before_mlp)
                lap(REST)
                both = self._products((block.gate, block.up), x)
                lap("gate, up")
                inner = gated(*both, block.activation)
                lap(REST)
                stream.add(self._product(block.down, inner), block.after_mlp)
                lap("down")
        last = stream.at_end(decoder)
        lap(REST)
        logits = self._product(decoder.head, last)
        lap("head")
        return decoder.logits(logits)

    def _attend(
        self, block: DecoderBlock, x: Tensor, rooms: Sequence[LayerRoom] | AttendingCache, place: int, places: "_Places"
    ) -> Tensor:
        """The attention of a block with the input x, [batch, tokens, heads * channels], contiguous."""
        places.lap(REST)
        qkv, tables = self._products((block.q, block.k, block.v), x), self.decoder.rotary.of(block.kind, places.length)
        places.lap("q, k, v")
        if isinstance(rooms, Sequence):
            attended = self._attention(block, rooms[place], qkv, tables, places.positions, places.seen)
        else:
            attended = attend_by_cache(rooms, block, qkv, x, tables, places.positions).flatten(-2)
        places.lap("attention")
        return attended

    def _product(self, linear: nn.Module, x: Tensor) -> Tensor:
        """The product of a linear with x: [..., out], contiguous."""
        if not _is_dense(linear, x):
            return linear(x).contiguous()
        weight, tokens = linear.weight, x.numel() // x.shape[-1]
        if rows_fit(weight, tokens) and faster_than_onednn(*weight.shape, tokens, weight.dtype):
            ran("linear", f"cpu {native.rows_isa(x.dtype, weight.shape[1])}")
            return products(x, [weight], [linear.bias])[0]
        if self._takes_tiles([linear], x):
            return self._in_tiles([linear], x)[0]
        if better_in_float32(x, weight, linear.bias):
            ran("linear", "cpu float32")
            return in_float32(x, weight, linear.bias)
        if not self._laid_out:
            return linear(x)
        if weight.data_ptr() not in self._dense:
            self._dense[weight.data_ptr()] = lay_out(weight, self._laid_out)
        ran("linear", "cpu prepacked")
        return product(x, self._dense[weight.data_ptr()], linear.bias)

    def _products(self, linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        """The products of several linears with one input: [..., out_i], contiguous."""
        if (whole := together(linears)) is not None:
            sizes = [linear.out_features for linear in linears]
            return [part.contiguous() for part in self._product(whole, x).split(sizes, -1)]
        if x.dtype == torch.bfloat16 and x.numel() > self._apart * x.shape[-1]:
            if self._takes_tiles(linears, x):
                return self._in_tiles(linears, x)
            key = id(linears[0])
            if key not in self._joined:
                self._joined[key] = joined(linears)
            if (made := self._joined[key]) is not None:
                return made(x)
        return [self._product(linear, x) for linear in linears]

    def _in_tiles(self, linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        """The products of several dense linears with one input, of weights that are laid out in tiles."""
        weights = [linear.weight for linear in linears]
        for weight in weights:
            if weight.data_ptr() not in self._tiled:
                self._tiled[weight.data_ptr()] = tiles.in_tiles(weight)
        ran("linear", f"cpu {native.tiles()}")
        return tiles.products(x, [self._tiled[weight.data_ptr()] for weight in weights], list(map(len, weights)))

    def _takes_tiles(self, linears: Sequence[nn.Module], x: Tensor) -> bool:
        """Are these dense linears without biases, which would be added to a rounded result?"""
        return self._tiles and all(_is_dense(linear, x) and linear.bias is None for linear in linears)

    def _attention(
        self,
        block: DecoderBlock,
        room: LayerRoom,
        qkv: Sequence[Tensor],
        tables: tuple[Tensor, Tensor],
        positions: Tensor,
        seen: "_Seen",
    ) -> Tensor:
        """The attention's result, [batch, tokens, heads * channels], contiguous."""
        q, k, v = qkv
        norms = block.query_norm, block.key_norm
        turn_and_store(
            q, k, v, tables, positions, norms, room.keys, room.values, seen.slot, neighbours=block.neighbours
        )
        room.length.fill_(seen.slot + seen.tokens)
        q = q.unflatten(-1, (-1, block.channels)).transpose(1, 2)  # [batch, heads, tokens, channels]
        return seen.attend(block, q, room).flatten(-2)


def _is_dense(linear: nn.Module, x: Tensor) -> bool:
    """Is it a plain linear with a weight in x's dtype?"""
    return type(linear) is nn.Linear and linear.weight.dtype == x.dtype


def _no_lap(part: str) -> None:
    """Nothing is timed."""


@dataclass
class _Stream:
    """The residual stream [batch, tokens, hidden] in float32, to which `added` is still to be added, after its norm.

    x: memory for the stream after a norm, in the model's dtype.
    """

    residual: Tensor
    x: Tensor
    added: Tensor | None = None
    after: Norm | None = None

    @classmethod
    def of(cls, embedded: Tensor, decoder: Decoder) -> "_Stream":
        """The stream of embedded tokens, float32."""
        turned = embedded if decoder.stream is None else decoder.stream.rotation(embedded)
        residual = turned.contiguous()
        return cls(residual, residual.new_empty(residual.shape, dtype=decoder.dtype))

    def add(self, added: Tensor, after: Norm | None) -> None:
        """Add the result of a part, once the stream is read."""
        self.added, self.after = added, after

    def normalised(self, norm: Norm | None) -> Tensor:
        """The stream after a norm."""
        added, after = self.added, self.after
        self.added = self.after = None
        return add_norm(self.residual, added, after, norm, self.x)

    def read(self, norm: Norm | None) -> Tensor:
        """The stream after a norm, or as it is, for a part."""
        x = self.normalised(norm)
        return x.copy_(self.residual) if norm is None else x

    def keep(self, attended: Tensor, count: int) -> Tensor:
        """Keep the last `count` tokens of the stream, and of the result of the attention, which is returned."""
        self.residual = self.residual[:, -count:].contiguous()
        self.x = self.x.new_empty(self.residual.shape)
        return attended[:, -count:].contiguous()

    def at_end(self, decoder: Decoder) -> Tensor:
        """The stream after the last norm, rotated back."""
        if decoder.stream is not None:
            self.normalised(None)
            self.residual = decoder.stream.rotation.back(self.residual).contiguous()
        return self.normalised(decoder.norm)


@dataclass
class _Places:
    """Where the tokens of a pass are. positions: int64 [batch, tokens]. length: of the rotary tables. lap: counts the
    time of the parts."""

    positions: Tensor
    length: int
    seen: "_Seen"
    lap: Callable[[str], None]


@dataclass
class _Seen:
    """The places of the cache that each token of a pass sees: its own and earlier ones, from `first` on."""

    slot: int
    tokens: int
    first: Tensor | None
    masks: dict[int, Tensor] = field(default_factory=dict)  # key: window

    def attend(self, block: DecoderBlock, q: Tensor, room: LayerRoom) -> Tensor:
        """Attention [batch, tokens, heads, channels] of q [batch, heads, tokens, channels]."""
        total = self.slot + self.tokens
        keys, values = room.keys[:, :, :total], room.values[:, :, :total]
        if block.softcap:
            return self._capped(block, q, keys, values)
        if self.tokens == 1:
            start = torch.zeros(len(q), dtype=torch.int64) if self.first is None else self.first
            start = start.clamp(min=total - block.window) if block.window else start
            starts = start[:, None].expand(-1, block.kv_heads)
            y = kv_decode(q, KV(keys, values), total - starts, starts=starts, scale=block.scale)
            return y.transpose(1, 2)
        window = block.window if block.window < total else 0
        if faster_than_torch(q, keys, values, block.scale, window):
            return self._of_prompts(q, keys, values, block.scale, window)
        all_before = not self.slot and not window
        how = {"is_causal": True} if all_before and self.first is None else {"attn_mask": self._mask(block.window)}
        y = scaled_dot_product_attention(q, keys, values, scale=block.scale, enable_gqa=True, **how)
        return y.transpose(1, 2).contiguous()

    def _of_prompts(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
        """The attention of each prompt without its padding; padded places get zeros."""
        if self.first is None:
            return prompt_attention(q, keys, values, scale=scale, window=window)
        y = q.new_zeros(q.transpose(1, 2).shape)
        for i, first in enumerate(self.first.tolist()):
            here = max(first - self.slot, 0)
            own = (t[i : i + 1, :, at:] for t, at in ((q, here), (keys, first), (values, first)))
            y[i : i + 1, here:] = prompt_attention(*own, scale=scale, window=window)
        return y

    def _mask(self, window: int) -> Tensor:
        """bool [batch or 1, 1, tokens, places]"""
        if window not in self.masks:
            place, query = torch.arange(self.slot + self.tokens), torch.arange(self.slot, self.slot + self.tokens)
            mask = place <= query[:, None]
            if window:
                mask &= place > query[:, None] - window
            mask = mask[None]
            if self.first is not None:  # a padded token sees itself, so that no row is empty
                mask = mask & ((place >= self.first[:, None, None]) | (place == query[:, None]))
            self.masks[window] = mask[:, None]
        return self.masks[window]

    def _capped(self, block: DecoderBlock, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared, mask = block.heads // block.kv_heads, self._mask(block.window)
        k, v = (t.float().repeat_interleave(shared, 1) for t in (keys, values))
        parts = []
        for at in range(0, self.tokens, QUERIES):
            scores = block.scale * q[:, :, at : at + QUERIES].float() @ k.transpose(2, 3)
            scores = block.softcap * (scores / block.softcap).tanh()
            hidden = ~mask[:, :, at : at + QUERIES]
            parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).to(q.dtype))
        return torch.cat(parts, 2).transpose(1, 2).contiguous()


@dataclass
class NativePrompt:
    """A pass over a prompt into an empty static cache: (tokens [batch, n], positions [1, n]) -> next tokens [batch, 1].

    Attributes:
        kernels: {op: implementations that ran}.
    """

    forward: DecoderForward
    rooms: list[LayerRoom]
    kernels: dict[str, set[str]] = field(default_factory=dict)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.forward(tokens, self.rooms, int(positions[0, 0]))[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def native_prompt(
    model: nn.Module, cache: Cache, tokens: Tensor, laid_out: bool = True, decoder: Decoder | None = None
) -> NativePrompt:
    """A decoder's pass over a prompt, checked against the model's.

    Args:
        model: a causal decoder. cache: static, with allocated tensors; it is empty afterwards.
        tokens: int64 [batch, n], the prompt that both read.
        laid_out: lay out dense weights for prompts of this length, which takes their memory a second time.
        decoder: the model, if it is recognised already.

    Raises:
        NotNative: an unknown model or cache, or logits that differ from the model's.
    """
    decoder = decoder or recognise(model)
    rooms = rooms_of(decoder, cache)
    prompt = NativePrompt(DecoderForward(decoder, tokens.numel() if laid_out else 0), rooms)
    check_likeness(model, decoder)
    cache.reset()
    count = min(CHECKED, tokens.shape[1])
    at = torch.arange(tokens.shape[1])[None]

    def of_model() -> Tensor:
        with fast_linear():
            return model(tokens, past_key_values=cache, position_ids=at, use_cache=True, logits_to_keep=count).logits

    expected = of_model()
    cache.reset()
    with recording() as prompt.kernels:
        found = prompt.forward(tokens, rooms, 0, keep=count)
    cache.reset()

    def own() -> list[float]:
        with shaken(model):
            again = of_model()
        cache.reset()
        return _differences(again, expected)

    check_logits(_differences(found, expected), own)
    return prompt


def _differences(found: Tensor, expected: Tensor) -> list[float]:
    """Relative differences of logits [batch, tokens, vocabulary], token by token."""
    return [difference(ours, own) for ours, own in zip(found.unbind(1), expected.unbind(1), strict=True)]
