"""A compressed cache of fixed tensors, so that a whole step of decoding compiles: it appends in place and does not
evict."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import sdpa_mask

from compress.kv.attention import attend
from compress.kv.cache import CompressedCache
from compress.kv.growing import Growing
from compress.kv.layer import KVLayer
from compress.kv.policy import Policy, Projecting, Storage, precisions_of
from compress.kv.precision import Held, Precision
from compress.kv.reading.fixed import FixedReading, readings
from compress.kv.reading.method import LayerQuery, Reading
from compress.kv.storage import Slab, view_of
from compress.kv.support import check_model, key_shape, key_shapes, left_alone, storing_layers
from kernels.kv_decode import KV, dequantize_kv, kv_decode
from kernels.step.cache import NewTokens
from kernels.step.cache_view import EVERY, CacheView

NAME = "workbench_kv_static"
SMALL = 0.1  # size of made-up keys and values: with large ones, the logits depend on rounding


def check_timed(storage: Storage | None, projecting: Projecting | None = None, reading: Reading | None = None) -> None:
    """Raise ValueError if fixed tensors cannot hold what a storage, a projection or a reading keeps."""
    for method, kind in ((projecting, "projection"), (reading, "reading")):
        if method is not None and method.joins:
            raise ValueError(
                f"`recipe`: {method} keeps a prompt in factors, which compiled steps do not read; leave out the timing "
                f"(`speed_contexts`), or take another {kind}"
            )
    if storage is not None and storage.lesser is not None:
        raise ValueError(
            f"`recipe`: {storage} keeps positions in two precisions, which compiled steps do not read; leave out the "
            "timing (`speed_contexts`), or take a storage of one"
        )


def check_timed_model(model: nn.Module) -> None:
    """Raise ValueError if compiled steps cannot read the cache of a model."""
    reason = None
    if storing_layers(model) or len(set(key_shapes(model).values())) > 1:
        reason = "layers that share keys, or that differ in their widths"
    elif unknown := sorted(set(left_alone(model)) - {"sliding_attention"}):
        reason = f"layers ({', '.join(unknown)}) with other data than keys and values"
    if reason:
        raise ValueError(
            f"`model` ({type(model).__name__}) has {reason}, which compiled steps do not read; leave out the timing "
            "(`speed_contexts`)"
        )


class StaticSlab(Held):
    """A `Slab` with room: unchanged codes, and a dense tail that is written to at `at`."""

    def __init__(self, kv: KV, slab: Slab) -> None:
        """kv: the content of the slab, with room behind its last position."""
        self.kv, self.starts, self.used = kv, slab.starts.clone(), slab.length
        self.precision, self.factors, self.projection = slab.precision, slab.factors, slab.projection
        self.tail = (kv.k, kv.v) if kv.bits == 16 else (kv.tail_k, kv.tail_v)
        coded = 0 if kv.bits == 16 else kv.k.shape[2]
        self.coded, self.length = coded, coded + self.tail[0].shape[2]
        self.begin = torch.tensor([self.used - coded], device=self.starts.device)
        self.at, self.lengths = self.begin.clone(), (self.used - self.starts).to(torch.int32)
        self.place = int(self.begin)  # as `at`, for steps of decoding
        self.heads = self.starts.shape[1]
        self.notes: list[Growing] = []  # data that a reading keeps for every page
        self.noted, self.sparse = self.length, None

    def read_by(self, sparse: FixedReading) -> None:
        """Read sparsely from now on."""
        self.sparse = sparse
        if sparse.role.chooses and not sparse.role.reads_all:
            k, _ = dequantize_kv(self.kv, self.tail[0].dtype)
            k = self.outwards(k)
            whole = Slab(k, k, torch.zeros_like(self.starts), Precision())
            sparse.reading.scores(LayerQuery(whole, k[:, :, :1], 1.0))
            self.notes = whole.notes

    def attend(self, q: Tensor, scale: float | None = None, softcap: float | None = None) -> Tensor:
        """q [B, H_q, 1, D] -> the same shape."""
        if self.sparse is not None:
            return self.sparse.attend(self, q, scale, softcap)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = kv_decode(self.queries(q), self.kv, self.lengths, starts=self.starts, scale=scale, softcap=softcap)
        return self.lifted(y)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, 1, D]"""
        for buffer, new in zip(self.tail, (self.inwards(k), self.values_inwards(v)), strict=True):
            buffer.index_copy_(2, self.at, new)
        self.at.add_(1)
        self.lengths.add_(1)

    def lend(self) -> CacheView | None:
        """The held positions, for a step of decoding that appends a token itself, which `at` and `lengths` do not
        count; None if such steps do not support the form of the positions, or the choice of them."""
        sparse = EVERY if self.sparse is None else self.sparse.lend(self)
        if sparse is None or not self.read_by_steps:
            return None
        self.place += 1
        codes = [[x] for x in self.kv[:4]] if self.coded else None
        counts = [self.coded, self.place - 1]
        return view_of(self.precision, codes, [[x] for x in self.tail], [self.starts], counts, sparse)

    def reset(self) -> None:
        """Return to the state at creation."""
        self.place = int(self.begin)
        self.lengths.sub_((self.at - self.begin).to(torch.int32))
        self.at.copy_(self.begin)


class StaticKVLayer(StaticLayer):
    """One layer: slabs of fixed tensors, and the number of seen tokens."""

    def __init__(self, slabs: list[StaticSlab], seen: int) -> None:
        super().__init__(max_cache_len=seen)
        self.slabs, self.seen = slabs, torch.tensor([seen], device=slabs[0].starts.device)
        self.first = seen
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        at = 0
        for slab in self.slabs:
            slab.append(key_states[:, at : at + slab.heads], value_states[:, at : at + slab.heads])
            at += slab.heads
        self.seen.add_(1)
        return key_states, value_states

    def lend(self) -> CacheView | None:
        """As `lend` of its slabs; None if one of them cannot be lent, or if their forms differ."""
        given = [slab.lend() for slab in self.slabs]
        forms = {(one.bits, one.group, one.turned_keys, one.turned_values, one.sparse) for one in given if one}
        if not all(given) or len(forms) > 1:
            return None
        lists = ("k", "v", "starts", "counts", "params_k", "params_v", "tail_k", "tail_v")
        return replace(given[0], **{name: sum((getattr(one, name) for one in given), []) for name in lists})

    def get_seq_length(self) -> Tensor:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # the kernel knows the ranges; the mask is not looked at

    def reset(self) -> None:
        for slab in self.slabs:
            slab.reset()
        self.seen.fill_(self.first)

    def attend(self, q: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """q [B, H_q, 1, D] -> [B, 1, H_q, D]"""
        shared = q.shape[1] // sum(slab.heads for slab in self.slabs)
        ys, at = [], 0
        for slab in self.slabs:
            rows = q[:, at * shared : (at + slab.heads) * shared]
            ys.append(slab.attend(rows, scaling, softcap))
            at += slab.heads
        return (torch.cat(ys, 1) if len(ys) > 1 else ys[0]).transpose(1, 2)


class StaticWindow:
    """A layer with a sliding window that keeps all positions, in the form in which it is lent to steps of decoding.

    Attributes:
        place: the place of the next token.
    """

    def __init__(self, layer: StaticLayer, size: int) -> None:
        self.layer, self.size, self.place, self.starts = layer, size, 0, None

    def lend(self) -> CacheView:
        """The held positions, for a token that sees the last `size` positions, including itself."""
        keys, values = self.layer.keys, self.layer.values
        if self.starts is None:
            self.starts = torch.zeros(keys.shape[:2], dtype=torch.int32)
        self.place += 1
        self.starts.fill_(max(0, self.place - self.size))
        return CacheView([keys], [values], [self.starts], [0, self.place - 1])


def decoder(model: nn.Module) -> nn.Module:
    """Make a model take static compressed caches: `model(token, past_key_values=cache, compressed=cache,
    position_ids=...)`."""
    check_model(model)
    check_timed_model(model)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return model


def static(cache: CompressedCache, room: int) -> Cache:
    """The content of a cache of full-attention layers in fixed tensors, with room for `room` more tokens.

    Raises:
        ValueError: the cache reads sparsely, which fixed tensors support only for timing (`MadeUpCache`), or it keeps
            positions in two precisions.
    """
    if cache.reader is not None:
        raise ValueError(f"`cache` reads sparsely ({cache.reader.reading}); one without a reading works")
    check_timed(cache.storage, cache.projecting)
    return Cache(
        layers=[StaticKVLayer([_fixed(slab, room) for slab in layer.slabs], layer.seen) for layer in cache.layers]
    )


class MadeUpCache(Cache):
    """A cache of random numbers, of the length that a policy and a storage would leave: only for timing.

    Its tensors have the length for `capacity` tokens, so that one compiled step serves all contexts up to that; reads
    have the length of the context. Every head has the same budget. Sliding layers keep all positions.

    Args:
        capacity: largest number of tokens. room: number of tokens that are appended after `at`.
    """

    def __init__(
        self,
        model: nn.Module,
        capacity: int,
        policy: Policy | None = None,
        storage: Storage | None = None,
        reading: Reading | None = None,
        projecting: Projecting | None = None,
        *,
        room: int = 64,
    ) -> None:
        check_timed(storage, projecting, reading)
        self.policy, self.capacity = policy, capacity
        parameter = next(model.parameters())
        heads, channels = next(iter(key_shapes(model).values()))
        most = self.kept(capacity)
        layers, plain, self.windows = [], CompressedCache(model), {}
        for number, layer in enumerate(plain.layers):
            if not isinstance(layer, KVLayer):
                layers.append(StaticLayer(capacity + room))
                self.windows[number] = StaticWindow(layers[-1], layer.sliding_window)
                continue
            k, v = (
                SMALL * torch.randn(1, heads, most, channels, dtype=parameter.dtype, device=parameter.device)
                for _ in range(2)
            )
            starts = torch.zeros(1, heads, dtype=torch.int32, device=parameter.device)
            held = precisions_of(len(layers), storage, projecting)["precision"]
            layers.append(StaticKVLayer([_fixed(Slab(k, v, starts, held), room)], capacity))
        if reading is not None:
            _read_sparsely([layer for layer in layers if isinstance(layer, StaticKVLayer)], reading)
        super().__init__(layers=layers)
        # Layers with a window may have other widths than those that keep all positions.
        shapes = [key_shape(model, number) for number in range(len(layers))]
        self.early_initialization(1, *map(list, zip(*shapes, strict=True)), parameter.dtype, parameter.device)

    def kept(self, tokens: int) -> int:
        """The number of positions that every head keeps of this number of tokens."""
        return tokens if self.policy is None else min(tokens, int(self.policy.target(torch.tensor([tokens]))))

    def at(self, tokens: int) -> "MadeUpCache":
        """Set the state after this number of tokens.

        Raises:
            ValueError: there is no room for so many.
        """
        if not 1 <= tokens <= self.capacity:
            raise ValueError(f"`tokens` (={tokens}) must lie between 1 and `capacity` (={self.capacity})")
        for layer in self.layers:
            if isinstance(layer, StaticKVLayer):
                layer.reset()
                layer.seen.fill_(tokens)
                for slab in layer.slabs:
                    slab.lengths.fill_(self.kept(tokens))
                    slab.starts.copy_(slab.used - slab.lengths)
            else:
                layer.cumulative_length.fill_(tokens)
        for window in self.windows.values():
            window.place = tokens
        return self

    def lend(self, number: int) -> CacheView | None:
        """The kept positions of a layer, for `kernels.step.cache.AttendingCache`; only `place` counts new tokens."""
        return self.windows.get(number, self.layers[number]).lend()

    def attend_new(self, number: int, module: nn.Module, new: NewTokens) -> Tensor:
        """Attend with a token in a layer that is not lent, as in `kernels.step.cache.AttendingCache`."""
        layer = self.layers[number]
        layer.update(new.k, new.v)
        return layer.attend(new.q, new.scaling, new.softcap)

    def layer_slabs(self) -> list["StaticSlab"]:
        """Every slab of every layer."""
        return [slab for layer in self.layers if isinstance(layer, StaticKVLayer) for slab in layer.slabs]


def _read_sparsely(layers: list[StaticKVLayer], reading: Reading) -> None:
    slabs = [layer.slabs[0] for layer in layers]
    for slab, fixed in zip(slabs, readings(reading, slabs), strict=True):
        slab.read_by(fixed)


def _fixed(slab: Slab, room: int) -> StaticSlab:
    def roomy(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(*x.shape[:2], room, x.shape[3])], 2)

    tail = roomy(slab.k.view), roomy(slab.v.view)
    codes = [one.view.contiguous() for one in slab.codes]
    kv = KV(*codes, *tail, slab.precision.bits, slab.precision.group) if codes else KV(*tail)
    return StaticSlab(kv, slab)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    compressed: Cache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(compressed, "layer", None)  # for a cache of one layer: no block is compiled for each layer number
    if layer is None and compressed is not None:
        layer = compressed.layers[module.layer_idx]
    if isinstance(layer, StaticKVLayer):
        if s_aux is not None:
            raise ValueError("the decode kernel knows no attention sinks")
        return layer.attend(query, scaling, softcap), None
    return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux), None
