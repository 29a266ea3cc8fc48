"""Layers whose content steps of decoding copy, so that they keep new tokens themselves for a while: see
`kernels.step.cache.StoringCache`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from compress.kv.layer import KVLayer
from compress.kv.policy import Policy
from compress.kv.precision import codes_of
from compress.kv.storage import UNLIMITED, Slab
from kernels.step.cache_view import StoredForm, StoredLayer

BITS = (16, 8, 4)  # that kernels for GPUs read


def why_policy_reads(policy: Policy | None) -> str:
    """Why a policy must see every token when it is read; "" if it need not."""
    if policy is None:
        return ""
    queries = policy.window and (policy.decoding or policy.runs_model)
    if policy.at_every_pass or queries or policy.decoding and policy.remembers:
        return f"{policy.name} reads the attention, the queries or the input of every token"
    return ""


def why_layers_differ(layers: Sequence[CacheLayerMixin]) -> str:
    """Why the content of these layers cannot be copied for steps; "" if it can."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, KVLayer):
            if type(layer) is not DynamicSlidingWindowLayer or getattr(layer, "record_past", False):
                return f"layer {number} of the cache ({type(layer).__name__}) holds more than keys and values"
            continue
        if not layer.slabs:
            return f"layer {number} of the cache keeps no keys"
        if why := next((why for slab in layer.slabs if (why := _why_not_read(slab))), ""):
            return f"layer {number} of the cache holds {why}"
    return ""


def _why_not_read(slab: object) -> str:
    """What a slab holds that steps on a GPU do not read."""
    if not isinstance(slab, Slab):
        return "positions in two precisions"
    held = slab.precision
    if slab.projection is not None:
        return "keys and values that are projected"
    if held.by_token or held.scaled:
        return "keys with a scale per position"
    if held.bits not in BITS:
        return f"codes of {held.bits} bits"
    return f"values of {held.value_bits} bits" if held.value_bits not in (0, held.bits) else ""


def settle_ahead(slabs: Sequence[Slab]) -> None:
    """Quantise every group of positions that would be complete after one more token, unless that token is part of it.
    Slabs of the same shape and precision are quantised in one call, which takes a GPU about as long as one of them."""
    alike: dict[tuple[Any, ...], list[Slab]] = {}
    for slab in slabs:
        if 0 < (full := slab.full(coming=1)) <= slab.k.length:
            k, v = slab.k.buffer, slab.v.buffer
            shapes = *k.shape[:2], k.shape[3], v.shape[3], k.dtype, k.device
            alike.setdefault((slab.precision, full, *shapes), []).append(slab)
    for (held, full, batch, *_), those in alike.items():
        assert not held.scaled, "the channels of such slabs are scaled when their own codes are made"
        k = torch.cat([slab.k.view[:, :, :full] for slab in those])
        v = torch.cat([slab.v.view[:, :, :full] for slab in those])
        coded = zip(*(x.split(batch) for x in codes_of(k, v, held)[:4]), strict=True)
        for slab, own in zip(those, coded, strict=True):
            slab.take_codes(own if slab.codes else [x.clone() for x in own], full)


def stored_layers(layers: Sequence[KVLayer], policy: Policy | None) -> list[StoredLayer]:
    """What layers store; codes that the next token would make are made now, those of all layers together."""
    due = policy is not None and policy.decoding
    until_due = [max(layer.idle_until - 1 - layer.seen, 0) if due else UNLIMITED for layer in layers]
    slabs = [[slab for slab in layer.slabs if isinstance(slab, Slab)] for layer in layers]  # all are, as asked before
    settle_ahead([slab for those, until in zip(slabs, until_due, strict=True) if until for slab in those])
    found = []
    for those, until in zip(slabs, until_due, strict=True):
        held, free = those[0].precision, min(slab.free for slab in those)
        turned = held.rotates, held.rotates_values
        form = StoredForm(16, 0, False, 0, *turned)
        if held.bits < 16:
            form = StoredForm(held.bits, held.group, held.float8, held.residual + held.group, *turned)
        found.append(StoredLayer(form, [(slab.kv(), slab.starts) for slab in those], min(free, until)))
    return found


def append_read(layer: KVLayer, k: Tensor, v: Tensor) -> None:
    """Append tokens that steps have read, k, v [B, H_kv, n, D], as passes of one token do where nothing else is due."""
    layer.keep(k, v, torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device), True)
