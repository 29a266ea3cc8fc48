"""A transformers cache that evicts positions per layer, head and sequence, through transformers' own cache and
attention interfaces.

Every layer that sees all positions is a `KVLayer`. transformers passes new keys and values to the cache and calls
attention, which is `attention.attention` here and calls the cache: the layer attends with the kept and the new
positions, and then keeps the new ones; the cache asks its policy, and the layer evicts. Positions count all tokens that
were seen, kept or not. Layers with a sliding window are transformers' own and are left alone.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as LAYER_TYPES
from transformers.cache_utils import DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from compress.kv.allocation import OF_ALL_LAYERS, of_layer
from compress.kv.attention import attention, expect, expect_again, note_hidden, noted_hidden
from compress.kv.growing import Growing
from compress.kv.layer import EXACT, KERNEL_TOKENS, HybridLayer, KVLayer, packed, states_of
from compress.kv.policy import Policy, Projecting, Storage, precisions_of
from compress.kv.reading.method import Reading
from compress.kv.reading.reader import Reader
from compress.kv.rotation import learned_rotations, turn_of
from compress.kv.steps.copied import append_read, stored_layers, why_layers_differ, why_policy_reads
from compress.kv.steps.windows import lend_window
from compress.kv.storage import joined, slabs_of
from compress.kv.support import KEEPING, keeping_layers, storing_layers
from kernels.step.cache import NewTokens
from kernels.step.cache_view import CacheView, StoredLayer

INTERVAL = 8  # while text is generated, evict after this number of tokens, or an eighth of the budget
# Attributes that a copy of an observing cache's layer does not share with it.
OWN = ("slabs", "queries", "asked", "hidden", "positions", "precision", "lesser", "evicts", "remembers", "traces")


class Whole(NamedTuple):
    """A prompt of which a policy has read only some tokens.

    Attributes:
        seen: tokens with padding. tokens: [B], without padding.
        places: [B, kept], the original positions of the tokens that were read, for a cache with `traces`.
    """

    seen: int
    tokens: Tensor
    places: Tensor | None


class CompressedCache(Cache):
    """The cache of one conversation, batch or beam. It evicts by `policy`, stores by `storage`, reads by `reading`, and
    keeps the channels that `projecting` chooses.

    Give it to `generate(past_key_values=...)` of an attached model to go on with it in a later turn.

    Args:
        model: a transformers decoder, attached (`compress.kv.attach`).
        policy, storage, reading, projecting: methods of the cache; None: all positions are kept without compression,
            and read.
        observes: keep the queries and evict nothing, so that `compressed` can try many policies on the same prompt.
        traces: remember where each kept position was.
        reads_pieces: several tokens at once behind a prompt also read sparsely, as single tokens do.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        storage: Storage | None = None,
        reading: Reading | None = None,
        projecting: Projecting | None = None,
        *,
        observes: bool = False,
        traces: bool = False,
        reads_pieces: bool = False,
    ) -> None:
        self.policy, self.storage, self.projecting = policy, storage, projecting
        self.observes, self.traces = observes, traces
        self._needs_places = policy is not None and policy.decoding and policy.window > 1
        self.model, self.paused, self.reads_pieces, self.by_kernel = model, False, reads_pieces, True
        self._joining = [method for method in (projecting, reading) if method is not None and method.joins]
        self.listener: Callable[[KVLayer, Tensor, Tensor, Tensor], None] | None = None
        self.ids: list[Tensor] = []  # tokens of the prompt, [B, n] each, for policies that read it again
        self.masks: list[Tensor] = []
        self.whole: Whole | None = None  # of a prompt that is read in a shorter form
        self.mask: Tensor | None = None  # [B, seen], the last mask, for layers with a window that read again
        self._scores: dict[int, tuple[Tensor, Tensor]] = {}
        self._recalled: dict[tuple[Policy, int], list[Tensor | None]] = {}
        self._known: dict[tuple[int, int], dict[str, Tensor]] = {}  # `Seen.known`, by layer and tokens
        self._ranked: dict[tuple[Policy, int, int], Tensor] = {}  # scores that do not depend on the budget
        kinds, settings = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
        if isinstance(settings, dict):  # older versions of transformers: the same for all layers
            settings = [settings] * len(kinds)
        layers = [
            self._layer(number, kind, more) if kind in KEEPING else LAYER_TYPES[kind](**more)
            for number, (kind, more) in enumerate(zip(kinds, settings, strict=True))
        ]
        super().__init__(layers=layers)
        self._keeping, self._storing = keeping_layers(model), storing_layers(model)
        methods = [method for method in (policy, storage, reading, projecting) if method is not None]
        if observes or any(method.turns for method in methods):
            learned_rotations(model)
        self._begun = False  # whether a pass has begun that has not ended
        self._padding: tuple[Tensor, Tensor, bool] | None = None  # a pass's mask, its real tokens, and whether all are
        self._updated: KVLayer | None = None  # the layer that got new keys last
        self._unkept: list[Callable[[], None]] = []  # keep the tokens of layers whose keys later layers read, too
        self.reader = None if reading is None else Reader(reading, self._keeping)

    def _layer(self, number: int, kind: str, settings: dict[str, Any]) -> KVLayer:
        policy = self.policy
        how = {
            **precisions_of(number, self.storage, self.projecting),
            "evicts": policy is not None,
            "remembers": policy.memory_dtype if policy is not None and policy.remembers else None,
            "traces": self.traces or self._needs_places,
        }
        if kind == "hybrid":
            return HybridLayer(number, states=settings.get("number_of_states", 1), **how)
        return KVLayer(number, **how)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H_kv, n, D] of a layer; the attention that follows keeps them."""
        if self._updated is not None and self._updated.incoming is not None and self._updated.number != layer_idx:
            raise ValueError(
                "`past_key_values` is a compressed cache, which this model's attention does not use: the model must be "
                "attached (`compress.kv.attach`), with its attention as `attach` sets it"
            )
        given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if isinstance(layer := self.layers[layer_idx], KVLayer):
            self._updated = layer
            expect(partial(self._attend, layer))
        return given

    def pass_over(self, layer_idx: int, least: Tensor) -> None:
        """Count the tokens of `least` [B, 1, n, 1] in a layer that keeps none, because its attention was dropped; a
        layer that is not compressed keeps these numbers."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, KVLayer):
            layer.update(least, least)
        elif self.listener is None:
            layer.seen += least.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is given as a negative number."""
        super().crop(tokens_to_remove)
        self._forget_scores()
        if self.mask is not None and tokens_to_remove:
            self.mask = self.mask[:, :tokens_to_remove]
        if self.ids and tokens_to_remove:
            ids, masks = torch.cat(self.ids, 1), torch.cat(self.masks, 1)
            self.ids, self.masks = [ids[:, :tokens_to_remove]], [masks[:, :tokens_to_remove]]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row beam_idx[i]."""
        super().reorder_cache(beam_idx)
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        super().batch_select_indices(indices)
        self._rows(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, 0))

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.ids, self.masks = [change(x) for x in self.ids], [change(x) for x in self.masks]
        self._forget_scores()
        self.mask = None if self.mask is None else change(self.mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        """An independent copy for the same model, so that one prompt can be continued in several ways."""
        memo[id(self.model)] = self.model
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    @property
    def knows_padding(self) -> bool:
        """Whether every layer leaves padding out; transformers' own layers with a window keep it, and states may."""
        return all(type(layer) is KVLayer for layer in self.layers)

    @property
    def own(self) -> list[KVLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def filled(self) -> list[KVLayer]:
        """The compressed layers that keep positions."""
        return [layer for layer in self.own if layer.slabs]

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor in the cache: codes, scales, slack, the memories of policies, other layers."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors()) + sum(t.nbytes for t in self._states())

    @property
    def nbytes_16(self) -> int:
        """The same, with float32 keys, values and queries counted as the 16 bits in which a model is deployed, and
        without the places that are kept for `traces` alone."""
        wide = [t for t in self._tensors() if t.dtype == torch.float32 and t.dim() == 4]
        traced = [] if self._needs_places else [x.positions.buffer for x in self.own if x.positions is not None]
        less = sum(t.untyped_storage().nbytes() for t in traced)
        less += sum(t.nbytes // 2 for t in self._states() if t.dtype == torch.float32 and t.dim() == 4)
        return self.nbytes - sum(t.untyped_storage().nbytes() // 2 for t in wide) - less

    def _tensors(self) -> list[Tensor]:
        found = [t for layer in self.own for t in layer.held]
        for layer in self.layers:
            if not isinstance(layer, KVLayer):
                kept = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
                found += [t for t in kept if t is not None]
        return [*found, *self.ids, *self.masks, *([] if self.mask is None else [self.mask])]

    def _states(self) -> list[Tensor]:
        """States of linear attention, which may be rows of those of a batch."""
        return [state for layer in self.layers for _, _, state in states_of(layer)]

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can always be removed."""
        return self.policy is None and self.storage is None and not self._joining and super().is_croppable

    def reset(self) -> None:
        """Forget everything but the policy."""
        super().reset()
        self.ids, self.masks, self.mask, self.whole, self._scores = [], [], None, None, {}
        self._forget_scores()

    def _forget_scores(self) -> None:
        self._recalled, self._known, self._ranked = {}, {}, {}

    @contextmanager
    def looking(self, listener: Callable[[KVLayer, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
        """Passes in the context do not change the cache; `listener` gets each layer, its queries, its new keys, and
        a mask of real tokens."""
        others = [
            (layer, layer.copy_states() if isinstance(layer, HybridLayer) else copy.deepcopy(vars(layer)))
            for layer in self.layers
            if type(layer) is not KVLayer
        ]
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None
            for layer, before in others:
                vars(layer).update(before)

    def compressed(
        self,
        policy: Policy | None,
        storage: Storage | None = None,
        reading: Reading | None = None,
        projecting: Projecting | None = None,
    ) -> "CompressedCache":
        """A copy of a cache that `observes`, compressed as if the policy had been there when the prompt was read."""
        if not self.observes:
            raise ValueError(
                "`observes` (=False): only a cache that observes keeps the queries that policies need for their scores"
            )
        made = CompressedCache(self.model, policy, storage, reading, projecting, traces=self.traces)
        for layer, other in zip(made.layers, self.layers, strict=True):
            if not isinstance(layer, KVLayer):  # transformers' own, some of which keep their states in dicts
                vars(layer).update(copy.deepcopy(vars(other)))
                continue
            vars(layer).update({k: v for k, v in vars(other).items() if k not in OWN})
            if isinstance(layer, HybridLayer):
                vars(layer).update(other.copy_states())
            layer.positions = copy.deepcopy(other.positions)
            if other.slabs:
                k, v, _ = joined(other.slabs)
                layer.slabs = slabs_of(k, v, other.valid, EXACT if policy or layer.lesser else layer.precision)
                if layer.lesser is not None:
                    layer.divide(storage.important(layer.seen_by(other.queries, other.asked)))
                if policy is not None and policy.remembers:
                    layer.memory = Growing(torch.zeros(k.shape[:3], device=k.device))
        made.ids, made.masks, made.mask = list(self.ids), list(self.masks), self.mask
        if policy is None:
            made.finish()
            return made
        if policy.replaces:
            for layer, other in zip(made.own, self.own, strict=True):
                if layer.slabs:
                    window = slice(-policy.window, None)
                    layer.queries, layer.asked = other.queries[:, :, window], other.asked[:, window]
            made._read_again()
            return made
        if policy.remembers:
            self._recall(made)
        for layer, other in zip(made.own, self.own, strict=True):
            if layer.slabs:
                self._score_copy(made, layer, other)
        made.finish()
        return made

    def _score_copy(self, made: "CompressedCache", layer: KVLayer, other: KVLayer) -> None:
        """Score and evict a layer of a copy by this cache's queries; scores that fit all budgets are computed once."""
        about = (_of_any_budget(made.policy), layer.number, self.get_seq_length())
        if about not in self._ranked:
            seen = layer.seen_by(other.queries, other.asked, known=self._known_of(layer))
            self._ranked[about] = made.policy.scores(seen)
        scores = self._ranked[about] if made.policy.budget_free else self._ranked.pop(about)
        layer.since = torch.zeros_like(layer.tokens)
        made._evict(layer, scores, torch.ones_like(layer.tokens, dtype=torch.bool))

    def _known_of(self, layer: KVLayer) -> dict[str, Tensor]:
        return self._known.setdefault((layer.number, self.get_seq_length()), {})

    def _recall(self, made: "CompressedCache") -> None:
        """Fill the memories of a copy, from an earlier copy if that had this policy with any budget."""
        about = (_of_any_budget(made.policy), self.get_seq_length())
        if about not in self._recalled:
            if made.policy.runs_model:
                made.policy.read_again(self.model, made)
            else:
                for layer, other in zip(made.own, self.own, strict=True):
                    if layer.slabs:
                        known = self._known_of(layer)
                        seen = layer.seen_by(other.queries, other.asked, hidden=other.hidden, known=known)
                        layer.memory.view.copy_(made.policy.remember(seen))
            self._recalled[about] = [None if layer.memory is None else layer.memory.view for layer in made.own]
        for layer, memory in zip(made.own, self._recalled[about], strict=True):
            layer.memory = None if memory is None else Growing(memory.clone())
        made.ids, made.masks, made.mask = [], [], None

    # A pass.

    def begin(self, model: nn.Module) -> None:
        """Note that a pass of this model begins.

        Raises:
            ValueError: the cache is another model's, or an earlier pass was interrupted.
        """
        if model is not self.model:
            raise ValueError(
                f"`past_key_values` was made for another {type(self.model).__name__}: make one for this model"
            )
        if self._begun:
            raise ValueError(
                "`past_key_values`: an earlier pass over this cache was interrupted, so that its layers hold different "
                "tokens: start again with a new cache"
            )
        self._begun = True

    def end(self) -> None:
        """Finish a pass that has begun."""
        if self.listener is None:
            self.finish()
            self._begun, self._padding = False, None

    def attend_new(self, number: int, module: nn.Module, new: NewTokens) -> Tensor:
        """Take a layer's new tokens and attend, for passes without transformers' modules: see
        `kernels.step.cache.AttendingCache`."""
        return attend_new(self, number, module, new)

    def lend(self, number: int) -> CacheView | None:
        """The kept positions of a layer, for a step of decoding that appends one token to every row and attends: see
        `kernels.step.cache.AttendingCache`. None if a policy, a reading or an observer needs the token in a way that
        such steps do not support."""
        layer = self.layers[number]
        if self._is_watched:
            return None
        if not isinstance(layer, KVLayer):
            return lend_window(layer) if type(layer) is DynamicSlidingWindowLayer else None
        if not self.only_keeps:
            return None
        return layer.lend() if self.reader is None else self.reader.lend(layer)

    @property
    def _is_watched(self) -> bool:
        """Whether someone wants the keys and queries of passes, or attention without the kernel."""
        return self.observes or self.listener is not None or not self.by_kernel

    @property
    def only_keeps(self) -> bool:
        """Whether a single token behind a prompt is only kept and attends: no policy scores or evicts by it."""
        policy = self.policy
        busy = policy is not None and (policy.decoding or policy.at_every_pass or policy.runs_model and policy.window)
        return not (self._joining or self._is_watched or busy)

    def why_not_copied(self) -> str:
        """Why steps of decoding cannot work on copies of the layers, as `kernels.step.cache.StoringCache`."""
        if self.observes or self.paused or self.listener is not None or not self.by_kernel:
            return "the cache is observed"
        if self.reader is not None:
            return f"{self.reader.reading.name} reads a part of the positions"
        if self._joining or self._storing:
            return "layers of the cache share what they store"
        return why_policy_reads(self.policy) or why_layers_differ(self.layers)

    def stored(self, numbers: Sequence[int]) -> list[StoredLayer]:
        """What these layers store, for such steps."""
        return stored_layers([self.layers[number] for number in numbers], self.policy)

    def note_read(self, ids: Tensor) -> None:
        """Remember tokens [B, 1] that such steps read, for a policy that reads the text again."""
        if self.policy is not None and self.policy.runs_model:
            self.ids.append(ids.clone())
            self.masks.append(torch.ones_like(ids).bool())
            self.mask = None if self.mask is None else torch.cat([self.mask, self.masks[-1]], 1)

    def append_new(self, number: int, k: Tensor, v: Tensor) -> None:
        """Append the tokens that such steps have read, k, v [B, H_kv, n, D], to a layer."""
        append_read(self.layers[number], k, v)

    def refuse_further(self) -> None:
        """Layers hold different tokens, because an error came while they got some: later passes are refused."""
        self._begun = True

    def _attend(
        self,
        layer: KVLayer,
        module: nn.Module,
        q: Tensor,
        key: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention [B, n, H_q, D] of a layer's new tokens to kept and new positions; then keep them, and evict.

        Args:
            q: [B, H_q, n, D]. key: the keys that `update` returned.
            mask: bool [B, 1, n, n] among the new tokens; None: each new token sees the new tokens up to itself.
        """
        k, v = layer.take_incoming(module, key)
        B, _, n, _ = k.shape
        if mask is not None and (mask.dtype != torch.bool or mask.shape[-1] != n):
            raise ValueError(
                f"`attention_mask`: {mask.dtype} {tuple(mask.shape)} is not supported by a compressed cache: give a "
                "mask of tokens and padding, [batch, tokens]"
            )
        if mask is None:
            real, whole = torch.ones(B, n, dtype=torch.bool, device=k.device), True
        else:
            real, whole = self._real_tokens(mask)
        about = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
        layer.about = {**about, "turn": turn_of(self.model, layer.number, module)}
        if stores := layer.number in self._storing:
            expect_again(key, partial(self._attend_again, layer, k, v))
        if self.listener is not None:  # a pass that only observes: nothing is kept
            self.listener(layer, q, k, real)
            return layer.attend_beside(q, k, v, mask, about)
        if stores:  # later layers read what was kept before this pass, so that the new tokens are kept after it
            self._unkept.append(partial(self._keep_late, layer, q, k, v, real, whole, noted_hidden()))
            return layer.attend_beside(q, k, v, mask, about)
        count = self.policy is not None and self.policy.remembers and self.policy.mass and self.policy.decoding
        # After a prompt, tokens may read sparsely: one at a time, or if an evaluation has paused the cache.
        behind = n == 1 or self.paused or self.reads_pieces
        sparse = self.reader is not None and layer.slabs and behind and whole
        attend = partial(self.reader.attend, layer) if sparse else partial(layer.attend, whole=whole)
        y, mass = attend(q, k, v, mask, real, about, by_kernel=self.by_kernel, count=count)
        self._after_attention(layer, q, real, whole, mass)
        return y

    def _real_tokens(self, mask: Tensor) -> tuple[Tensor, bool]:
        """bool [B, n], False for padding, and whether there is none; the layers of a pass share a mask, so that the
        host waits for the device once."""
        if self._padding is None or self._padding[0] is not mask:
            real = mask[:, 0].diagonal(0, 1, 2)
            self._padding = mask, real, bool(real.all())
        return self._padding[1:]

    def _attend_again(
        self, layer: KVLayer, k: Tensor, v: Tensor, module: nn.Module, q: Tensor, key: Tensor, mask: Tensor | None,
        **about: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of a later layer that reads the keys and values of this layer, k and v of the new tokens too."""
        return layer.attend_beside(q, k, v, mask, about)

    def _keep_late(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, real: Tensor, whole: bool, hidden: Tensor
    ) -> None:
        """Keep the new tokens of a layer that later layers have read by now, and let its policy act."""
        layer.keep(k, v, real, whole)
        note_hidden(hidden)
        self._after_attention(layer, q, real, whole, None)
        note_hidden(None)

    def _after_attention(self, layer: KVLayer, q: Tensor, real: Tensor, whole: bool, mass: Tensor | None) -> None:
        """Keep the queries that a policy scores with; let the policy remember, and evict if that is due.

        Args:
            q: [B, H_q, n, D]. real: [B, n]. whole: all are real. mass: [B, H_kv, length], attention that the kernel
                summed up, or None.
        """
        policy, n = self.policy, q.shape[2]
        layer.unpadded = layer.unpadded and whole
        if layer.lesser is not None and not self.paused and (n > KERNEL_TOKENS or layer.seen == n):
            layer.divide(self.storage.important(layer.seen_by(*packed(q, real, whole))))
        if policy is None and not self.observes:
            return
        window = policy.window if policy is not None and (policy.decoding or policy.runs_model) else 0
        decoding = n == 1 and layer.seen > 1
        idle = policy is not None and decoding and not policy.decoding  # nothing is evicted
        if idle and not (window or policy.at_every_pass or self.observes):
            layer.queries, layer.asked = None, None
            return
        before = (layer.queries, layer.asked) if layer.queries is not None else (q[:, :, :0], real[:, :0])
        queries, asked = packed(torch.cat([before[0], q], 2), torch.cat([before[1], real], 1), layer.unpadded)
        hidden = noted_hidden()
        if self.observes:
            seen = (hidden[:, :0], real[:, :0]) if layer.hidden is None else (layer.hidden, layer.asked)
            joined_hidden = torch.cat([seen[0], hidden], 1)[:, None]
            joined_hidden, _ = packed(joined_hidden, torch.cat([seen[1], real], 1), layer.unpadded)
            layer.queries, layer.asked, layer.hidden = queries, asked, joined_hidden[:, 0]
            return
        cut = max(0, queries.shape[2] - window)
        layer.queries, layer.asked = (queries[:, :, cut:].clone(), asked[:, cut:].clone()) if window else (None, None)
        if self.paused or policy.runs_model or (idle and not policy.at_every_pass):
            return
        if policy.remembers:
            hidden = packed(hidden[:, None], real, whole)[0][:, 0] if policy.reads_hidden else None
            layer.memory.view.copy_(policy.remember(layer.seen_by(*packed(q, real, whole), mass, hidden)))
        if idle:
            return
        due = torch.ones_like(layer.tokens, dtype=torch.bool)
        if decoding:
            if layer.seen < layer.idle_until:
                return
            wait = self._until_due(layer)
            if (least := int(wait.min())) > 0:  # targets never fall, so that no row is due earlier
                layer.idle_until = layer.seen + least
                return
            due = wait <= 0
        layer.since = layer.since.masked_fill(due, 0)
        layer.idle_until = layer.seen + (int(self._until_due(layer).min()) if decoding else INTERVAL)
        self._evict(layer, policy.scores(layer.seen_by(queries, asked)), due)

    # Evicting.

    def _until_due(self, layer: KVLayer) -> Tensor:
        """[B]: further tokens after which each row of a layer is due for an eviction, if its budget stays as it is."""
        return (self.policy.target(layer.tokens) // INTERVAL).clamp(min=INTERVAL) - layer.since

    def _score(self, layer: KVLayer, queries: Tensor | None = None, asked: Tensor | None = None) -> None:
        """Score and evict after a prompt, by these queries; None: only by the policy's memory of the prompt."""
        layer.since = torch.zeros_like(layer.tokens)
        if queries is None:
            kv_heads = sum(slab.starts.shape[1] for slab in layer.slabs)
            keys = layer.slabs[0].k.buffer
            queries = keys.new_empty(len(layer.tokens), kv_heads, 0, keys.shape[-1])
            asked = torch.empty(len(layer.tokens), 0, dtype=torch.bool, device=layer.device)
        due = torch.ones_like(layer.tokens, dtype=torch.bool)
        self._evict(layer, self.policy.scores(layer.seen_by(queries, asked)), due)

    def _evict(self, layer: KVLayer, scores: Tensor, due: Tensor) -> None:
        """Evict from the rows of a layer that are `due` [B]: now, or in `finish` if scores of all layers are needed."""
        policy = self.policy
        if policy.allocation in OF_ALL_LAYERS:
            self._scores[layer.number] = scores, due
            return
        target, place = policy.target(layer.tokens), (self._keeping.index(layer.number), len(self._keeping))
        counts = of_layer(policy.allocation, scores, layer.valid, target, layer.tokens, *place)
        counts = torch.where(due[:, None], counts, layer.lengths)
        layer.evict(scores, counts, policy.merge if policy.merges else None)

    def _read_again(self) -> None:
        """Let the policy read the prompt again, then evict."""
        self.policy.read_again(self.model, self)
        if not self.policy.replaces:
            self.ids, self.masks = [], []
        for layer in self.filled:
            self._score(layer)

    def replace_by(self, other: "CompressedCache", places: Tensor | None) -> None:
        """Take over the positions of another cache of this model, and keep this cache's count of seen tokens.

        Args:
            other: a cache without eviction and compression; it must not be used afterwards.
            places: [B, kept], the original positions of its tokens, for a cache with `traces`.
        """
        for layer, new in zip(self.own, other.own, strict=True):
            layer.slabs = new.slabs
            _stands_for_more(layer, places)

    def count_whole(self) -> None:
        """Count all tokens of a prompt of which some were read (`whole`)."""
        whole, self.whole = self.whole, None
        for layer in self.own:
            layer.seen, layer.tokens = whole.seen, whole.tokens.clone()
            _stands_for_more(layer, whole.places)

    def finish(self) -> None:
        """The work after a pass that needs all layers: keeping the tokens of layers that others read, joining, reading
        the prompt again, and shared evictions."""
        for keep in self._unkept:
            keep()
        self._unkept = []
        if self.observes:
            return
        policy = self.policy
        for method in () if self.paused else self._joining:
            method.join(self.filled)
        if policy is None:
            return
        prompt = self.whole is not None or bool(self.ids) and self.ids[-1].shape[1] > 1
        if policy.runs_model and prompt and not self.paused:
            self._read_again()
        if self._scores:
            layers = [self.layers[number] for number in self._scores]
            scores, due = zip(*self._scores.values(), strict=True)
            share = OF_ALL_LAYERS[policy.allocation]
            counts = share(list(scores), [layer.valid for layer in layers], policy.target(layers[0].tokens))
            merge = policy.merge if policy.merges else None
            for layer, one, count, rows in zip(layers, scores, counts, due, strict=True):
                layer.evict(one, torch.where(rows[:, None], count, layer.lengths), merge)
            self._scores = {}


def _stands_for_more(layer: KVLayer, places: Tensor | None) -> None:
    """Note that a layer's positions, originally at `places` [B, kept], are those of a shorter prompt."""
    layer.queries, layer.asked, layer.evicted = None, None, True
    if layer.positions is not None:
        layer.positions = Growing(places[:, None].expand(-1, layer.positions.view.shape[1], -1))


def attend_new(cache: Cache, number: int, module: nn.Module, new: NewTokens) -> Tensor:
    """`AttendingCache.attend_new` of a cache whose layers are `KVLayer`s, or transformers' own with a window."""
    note_hidden(new.hidden)
    keys, values = cache.update(new.k, new.v, number)
    n, total, device = new.q.shape[2], keys.shape[2], keys.device
    mask = None
    if new.window and not isinstance(cache.layers[number], KVLayer) and n > 1 and total > new.window:
        at, place = torch.arange(total - n, total, device=device)[:, None], torch.arange(total, device=device)
        mask = ((place <= at) & (place > at - new.window))[None, None]
    return attention(module, new.q, keys, values, mask, scaling=new.scaling, softcap=new.softcap)[0]


def _of_any_budget(policy: Policy) -> Policy:
    """The policy with a fixed budget and allocation, as a key for results that depend on neither."""
    return replace(policy, budget=1.0, allocation="uniform")
