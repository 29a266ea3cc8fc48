"""Attach a compressed cache to a model: `generate` then uses it, and `undo` leaves the model as it was."""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from compress.kv.attention import NAME, expect, note_hidden, register
from compress.kv.batched import CacheBatch
from compress.kv.cache import CompressedCache
from compress.kv.identity import check_identity
from compress.kv.policy import CacheMethod, Policy, Projecting, Storage
from compress.kv.reading.method import Reading
from compress.kv.rotation import check_rotations
from compress.kv.support import PlainCache, check_model
from compress.method import Method
from compress.recipe import Recipe, methods_of

SLOTS = ("policy", "storage", "reading", "projecting")


def slots_of(
    methods: Sequence[Method],
) -> tuple[Policy | None, Storage | None, Reading | None, Projecting | None]:
    """The policy, the storage, the reading and the projection of a recipe, in the order of `SLOTS`."""
    policy, storage, reading, projecting = (
        next((m for m in methods if isinstance(m, kind)), None) for kind in (Policy, Storage, Reading, Projecting)
    )
    return policy, storage, reading, projecting


class Attachment:
    """The methods that `attach` has attached to a model.

    Attributes:
        policy, storage, reading, projecting: the methods of new caches for eviction, storage, reading and kept
            channels; None: nothing is evicted, nothing is compressed, all positions are read, all channels are kept.
        attention_name: the name under which transformers knows the attention for such caches; `kernels.step` looks for
            it.
    """

    attention_name = NAME

    def __init__(self, model: nn.Module) -> None:
        register()
        self.model, self.policy, self.storage, self.reading, self.projecting = model, None, None, None, None
        self._stands_for: weakref.WeakKeyDictionary[Cache, CompressedCache] = weakref.WeakKeyDictionary()
        self._before = model.config._attn_implementation
        enter = model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._hooks = [enter, model.register_forward_hook(self._leave, with_kwargs=True)]
        self._hooks.append(model.base_model.register_forward_pre_hook(self._warn, with_kwargs=True))
        self._warned = False
        for module in model.modules():
            if hasattr(module, "layer_idx"):  # attention; in some models also its block, which comes first
                self._hooks.append(module.register_forward_pre_hook(self._note, with_kwargs=True))
        model.set_attn_implementation(NAME)

    def cache(self, **more: bool) -> CompressedCache:
        """A new, empty cache for `generate(past_key_values=...)` or `model(past_key_values=...)`, to be kept
        between turns.

        Args:
            more: `observes`, `traces`, `reads_pieces` of `CompressedCache`.
        """
        return CompressedCache(self.model, *(getattr(self, slot) for slot in SLOTS), **more)

    def undo(self) -> None:
        """Restore the model. Caches that were made for it can no longer be used."""
        for hook in self._hooks:
            hook.remove()
        if self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(self._before)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = kwargs.get("past_key_values")
        expect(None)
        if given is None and kwargs.get("use_cache"):
            kwargs["past_key_values"] = given = self.cache()
        elif (
            type(given) is DynamicCache
            and given.get_seq_length() == 0
            and not getattr(given, "_is_user_defined", False)
        ):
            if given not in self._stands_for:
                self._stands_for[given] = self.cache()
                if any(getattr(layer, "record_past", False) for layer in given.layers):  # guesses will be removed again
                    self._stands_for[given].activate_past_recording()
            kwargs["past_key_values"] = given = self._stands_for[given]
        if not isinstance(given, CompressedCache):
            return args, kwargs
        if given.listener is None:
            given.begin(model)
        if given.listener is None and (given.observes or given.policy is not None and given.policy.runs_model):
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                raise ValueError("`inputs_embeds`: a policy that reads the prompt again needs `input_ids`")
            mask = kwargs.get("attention_mask")
            given.mask = None if mask is None else mask.bool().clone()
            given.ids.append(ids.clone())
            given.masks.append(torch.ones_like(ids).bool() if mask is None else given.mask[:, -ids.shape[1] :].clone())
            if given.policy is not None and given.policy.replaces and not given.observes and len(args) < 2:
                return (), given.policy.shortened(model, given, {**kwargs, "input_ids": ids})
        return args, kwargs

    def _warn(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Warn once if a pass does not compress its cache although methods are attached."""
        if self._warned or not attached_methods(self.model) or self.model.config._attn_implementation != NAME:
            return
        given = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache")
        if given is None:
            config = self.model.config.get_text_config(decoder=True)
            silent = not (getattr(config, "use_cache", True) if use_cache is None else use_cache)
            how = "it was called without `use_cache=True` and without a cache"
            if body is not self.model and use_cache:
                how = f"{type(body).__name__} was called by itself, and not {type(self.model).__name__}"
        else:  # further passes of a cache say nothing new
            silent = isinstance(given, CompressedCache | CacheBatch | PlainCache) or bool(given.get_seq_length() > 0)
            silent = silent or getattr(given, "is_trial", False)
            how = f"it got a {type(given).__name__} (by `cache_implementation` or `past_key_values`)"
        if silent:
            return
        self._warned = True
        methods = ", ".join(str(method) for method in attached_methods(self.model))
        warnings.warn(
            f"the cache of this pass is not compressed, although {methods} is attached: {how}. `generate` without a "
            "`cache_implementation`, and calls with `use_cache=True`, compress it; `use_cache=False` keeps none",
            stacklevel=2,
        )

    def _note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        note_hidden(kwargs.get("hidden_states", args[0] if args else None))

    def _leave(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        note_hidden(None)
        expect(None)
        if isinstance(cache := kwargs.get("past_key_values"), CompressedCache | CacheBatch):
            cache.end()


def attach(model: nn.Module, methods: Recipe = ()) -> Attachment:
    """Make a model keep its cache by these methods whenever it generates, until `undo`.

    An empty `DynamicCache` in a call of the model, as `generate` makes one, is replaced by a compressed one. Caches
    that a user gives to `generate`, of other kinds, or with tokens in them, are not touched; passes without a cache do
    not change.

    Args:
        model: a transformers decoder; batches, left padding, beams, chunked prefill and further turns are supported.
        methods: at most one `Policy`, `Storage`, `Reading` and `Projecting`, including those of an earlier `attach`: a
            list, one method, or a text such as "snapkv(budget=0.25), kv_int".

    Raises:
        ValueError: a method is not one of the cache; the model's attention or cache is of a kind that is not
            supported, by its configuration or by its logits with a cache that keeps everything (`check_identity`); or
            there are two methods of one kind. The model stays as it was.
    """
    check_model(model)
    methods = methods_of(methods, "methods")
    if foreign := [method for method in methods if not isinstance(method, CacheMethod)]:
        raise ValueError(
            f"`methods`: {foreign[0]} is not a method of the cache; `apply` takes it, and methods of the cache with it"
        )
    attachment = attachment_of(model)
    check_slots(model, methods)
    for method in methods:
        method.check(model)
    if any(method.turns for method in methods):
        check_rotations(model)
    if attachment is None:
        check_identity(model, _alone)
        attachment = Attachment(model)
    vars(attachment).update({method.slot: method for method in methods})
    return attachment


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a model; None if nothing is attached."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Attachment)), None)


def attached_methods(model: nn.Module) -> list[CacheMethod]:
    """The methods that are attached to a model: policy, storage and reading."""
    attachment = attachment_of(model)
    return [method for slot in SLOTS if (method := getattr(attachment, slot, None))]


def check_slots(model: nn.Module, methods: Sequence[CacheMethod]) -> None:
    """Raise ValueError if one of these methods cannot be attached beside those that are attached to the model."""
    taken = {method.slot: method for method in attached_methods(model)}
    for method in methods:
        if (other := taken.get(method.slot)) is not None:
            raise ValueError(
                f"`methods`: {method} cannot be attached beside {other}: one {method.slot} at a time; "
                "`compress.kv.detach(model)` takes off what is attached"
            )
        taken[method.slot] = method
    for method in taken.values():
        method.within([], [other for other in taken.values() if other is not method])


def check_attach(model: nn.Module, methods: Sequence[CacheMethod]) -> None:
    """Raise ValueError, before any work on a model, if these methods cannot be attached to it; its weights are not
    read."""
    check_slots(model, methods)
    if methods:
        check_identity(model, _alone, turns=any(method.turns for method in methods), planned=True)


def detach(model: nn.Module) -> None:
    """Undo the attachment of a model, if there is one."""
    attachment = attachment_of(model)
    if attachment is not None:
        attachment.undo()


@contextmanager
def attached(model: nn.Module, methods: Recipe = ()) -> Iterator[Attachment]:
    """`attach` for the length of a `with` block; methods attached before it stay attached."""
    before = attachment_of(model)
    slots = {slot: getattr(before, slot, None) for slot in SLOTS}
    attachment = attach(model, methods)
    try:
        yield attachment
    finally:
        if before is None:
            attachment.undo()
        else:
            vars(attachment).update(slots)


@contextmanager
def _alone(model: nn.Module) -> Iterator[Attachment]:
    """A model with a cache that keeps everything, which is not checked; the model must not be attached."""
    attachment = Attachment(model)
    try:
        yield attachment
    finally:
        attachment.undo()
