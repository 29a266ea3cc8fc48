"""What methods of the cache leave behind a context, without reading it: the bytes, from shapes alone, and a compressed
cache of random numbers, only for timing."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from compress.dropped import dropped_parts
from compress.kv.cache import CompressedCache
from compress.kv.layer import KVLayer
from compress.kv.policy import CacheMethod, Policy, Projecting, Storage, precisions_of
from compress.kv.precision import Precision
from compress.kv.reading.method import LayerQuery, Reading
from compress.kv.storage import Slab, filled
from compress.kv.support import key_shape, key_shapes, layer_kinds, storing_layers
from compress.method import Method

SMALL = 0.1  # size of made-up keys and values: with large ones, the logits depend on rounding


def check_timed(storage: Storage | None, projecting: Projecting | None = None, reading: Reading | None = None) -> None:
    """Raise ValueError if a cache that was not read from a prompt cannot hold what a method keeps."""
    for method, kind in ((projecting, "projection"), (reading, "reading")):
        if method is not None and method.joins:
            raise ValueError(
                f"`recipe`: {method} keeps a prompt in factors, which timed steps do not read; leave out the timing "
                f"(`speed_contexts`), or take another {kind}"
            )
    if storage is not None and storage.lesser is not None:
        raise ValueError(
            f"`recipe`: {storage} keeps positions in two precisions, which timed steps do not read; leave out the "
            "timing (`speed_contexts`), or take a storage of one"
        )


def check_timed_model(model: nn.Module) -> None:
    """Raise ValueError if caches of this model cannot be made up."""
    reason = None
    if storing_layers(model) or len(set(key_shapes(model).values())) > 1:
        reason = "layers that share keys, or that differ in their widths"
    elif unknown := sorted(set(layer_kinds(model)) - {"full_attention", "sliding_attention"}):
        reason = f"layers ({', '.join(unknown)}) with other data than keys and values"
    if reason:
        raise ValueError(
            f"`model` ({type(model).__name__}) has {reason}, which timed steps do not read; leave out the timing "
            "(`speed_contexts`)"
        )


class FilledCache(CompressedCache):
    """A compressed cache whose content is random. Every head keeps as many positions as the policy has room for, and
    nothing is evicted while tokens are timed. Layers with a window hold as many tokens as it sees.

    Args:
        model: attached (`compress.kv.attach`), in the dtype in which it is deployed.
        capacity: largest number of tokens.

    Raises:
        ValueError: a method keeps what cannot be made up (`check_timed`).
    """

    def __init__(
        self,
        model: nn.Module,
        capacity: int,
        policy: Policy | None = None,
        storage: Storage | None = None,
        reading: Reading | None = None,
        projecting: Projecting | None = None,
    ) -> None:
        check_timed(storage, projecting, reading)
        super().__init__(model, None, storage, reading, projecting)
        self.budget, self.capacity = policy, capacity
        self._dropped = {part.layer_idx for part in dropped_parts(model).values()}  # layers that keep nothing
        self._empty = copy.deepcopy(self.layers)
        self._prepared = 0, self._empty  # a number of tokens, and the layers behind them

    def kept(self, tokens: int) -> int:
        """The number of positions that every head keeps of this number of tokens."""
        return kept_of(self.budget, tokens)

    def at(self, tokens: int) -> "FilledCache":
        """Set the state after this number of tokens.

        Raises:
            ValueError: the cache is for fewer tokens.
        """
        if not 1 <= tokens <= self.capacity:
            raise ValueError(f"`tokens` (={tokens}) must lie between 1 and `capacity` (={self.capacity})")
        if self._prepared[0] != tokens:
            self.layers = copy.deepcopy(self._empty)
            for number, layer in enumerate(self.layers):
                self._fill(number, layer, tokens)
            self._prepared = tokens, self.layers
        self.layers = copy.deepcopy(self._prepared[1])
        return self

    def _fill(self, number: int, layer: KVLayer | DynamicSlidingWindowLayer, tokens: int) -> None:
        weight = next(self.model.parameters())
        if number in self._dropped:
            self.pass_over(number, torch.zeros(1, 1, tokens, 1, dtype=weight.dtype, device=weight.device))
            return
        heads, channels = key_shape(self.model, number)
        held = self.kept(tokens) if isinstance(layer, KVLayer) else min(tokens, layer.sliding_window)
        shape, about = (1, heads, held, channels), {"dtype": weight.dtype, "device": weight.device}
        k, v = (SMALL * torch.randn(shape, **about) for _ in range(2))
        layer.update(k, v)
        if not isinstance(layer, KVLayer):
            layer.cumulative_length = tokens
            return
        layer.incoming = None
        layer.keep(k, v, torch.ones(1, held, dtype=torch.bool, device=k.device), True)
        layer.seen, layer.tokens, layer.evicted = tokens, torch.tensor([tokens], device=k.device), held < tokens
        if self.reader is not None and self.reader.roles[number].chooses and not self.reader.roles[number].reads_all:
            for slab in layer.slabs:  # what it chooses by is known from the prompt on
                self.reader.reading.scores(LayerQuery(slab, k[:, :, :1], 1.0))

    def attend(self, q: Tensor) -> None:
        """The attention of one new token, q [1, H_q, 1, D], in every layer that keeps all positions."""
        real = torch.ones(1, 1, dtype=torch.bool, device=q.device)
        about = {"scaling": q.shape[-1] ** -0.5, "softcap": None, "sinks": None}
        for layer in self.filled:
            heads = sum(slab.starts.shape[1] for slab in layer.slabs)
            new = q.new_zeros(1, heads, 1, q.shape[-1])
            layer.about = {**about, "turn": None}
            if self.reader is None:
                layer.attend(q, new, new, None, real, about, whole=True, by_kernel=True, count=False)
            else:
                self.reader.attend(layer, q, new, new, None, real, about, by_kernel=True, count=False)

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, H_kv, n, D] of the layers that keep all positions, without copies if they are in 16
        bits."""
        return [slab.dense() for layer in self.filled for slab in layer.slabs]


def kept_of(policy: Policy | None, tokens: int) -> int:
    """The number of positions that a policy keeps of this number of tokens, in the mean over heads."""
    return tokens if policy is None else min(tokens, int(policy.target(torch.tensor([tokens]))))


@dataclass(frozen=True)
class LayerSize:
    """What one layer keeps of one sequence. bytes: with scales. positions: that each head keeps, in the mean."""

    bytes: int
    positions: int


def check_sized(methods: Sequence[Method]) -> None:
    """Raise ValueError if what these methods keep does not follow from shapes and knobs.

    Args:
        methods: settled, of one recipe.
    """
    for method in methods:
        if not isinstance(method, CacheMethod):
            raise ValueError(f"{method} is not a method of the cache")
        if method.slot == "reading":
            raise ValueError(f"{method} chooses what a token reads and not what is kept; leave it out")
        if method.joins or isinstance(method, Storage) and method.lesser is not None:
            raise ValueError(f"what {method} keeps depends on the text")


def sizes(methods: Sequence[Method], model: nn.Module, tokens: int) -> dict[int, LayerSize]:
    """What a cache of these methods keeps of a prompt of one sequence, by the numbers of the layers that keep all
    positions: the bytes that `CompressedCache` holds behind it, without its counters. A budget that layers or heads
    share by their scores counts as equal shares, without the padding of unequal heads (an eighth at most).

    Args:
        methods: settled and checked (`check_sized`). model: with shapes; its weights are not read.
        tokens: of the prompt.
    """
    policy, storage, projecting = (
        next((method for method in methods if isinstance(method, kind)), None) for kind in (Policy, Storage, Projecting)
    )
    kept = kept_of(policy, tokens)
    made, found = dict[tuple, int](), dict[int, LayerSize]()
    for number, (heads, channels) in key_shapes(model).items():
        precision = precisions_of(number, storage, projecting)["precision"]
        widths = (channels, channels)
        if precision.projection is not None:
            widths = precision.projection.keys.shape[-1], precision.projection.values.shape[-1]
        about = heads, widths
        if about not in made:
            plain = precision._replace(projection=None)
            length = kept if policy is None else filled(kept, plain)
            made[about] = _slab_bytes(heads, widths, length, plain)
            if policy is not None and policy.remembers:
                made[about] += heads * length * policy.memory_dtype.itemsize
        found[number] = LayerSize(made[about], kept)
    return found


def _slab_bytes(heads: int, widths: tuple[int, int], positions: int, precision: Precision) -> int:
    """Bytes of the keys and values of this many positions. Long slabs are larger by the same bytes for every further
    group of positions, so that two short ones tell their size."""
    further = max((positions - precision.residual) // precision.group - 2, 0)
    short = positions - further * precision.group
    least = _bytes_of_zeros(heads, widths, short, precision)
    if not further:
        return least
    return least + further * (_bytes_of_zeros(heads, widths, short + precision.group, precision) - least)


def _bytes_of_zeros(heads: int, widths: tuple[int, int], positions: int, precision: Precision) -> int:
    k, v = (torch.zeros(1, heads, positions, width, dtype=torch.bfloat16) for width in widths)
    slab = Slab(k, v, torch.zeros(1, heads, dtype=torch.int32), precision)
    return sum(tensor.nbytes for tensor in slab.held)
