"""The caches of the steps that `kernels.harness.model` times: their forms, and random content."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.harness.model_weights import RoundedLinear
from kernels.kv_decode import dequantize_kv, quantize_kv, quantize_kv_float8
from kernels.step.cache_view import StoredForm
from kernels.step.gpu import sizes
from kernels.step.gpu.body import FusedBody, OwnBody
from kernels.step.gpu.stored import Room, StoredBody

FORMS = {
    "16": StoredForm(), "int8": StoredForm(8, 64, False, 96), "int4": StoredForm(4, 64, False, 96),
    "fp8": StoredForm(8, 64, True, 96),
}  # fmt: skip
DRAWN = 1024  # positions of random keys and values, which repeat themselves


class TimedCache(NamedTuple):
    """The form of a cache, and the share of the positions that an eviction has left in it."""

    form: StoredForm
    share: float = 1.0

    @classmethod
    def named(cls, name: str) -> "TimedCache":
        """By a name such as "int4" or "int4:0.25".

        Raises:
            ValueError: there is no such form, or the share is not above 0 and at most 1.
        """
        form, has_share, share = name.partition(":")
        try:
            found = cls(FORMS[form], float(share) if has_share else 1.0)
        except (KeyError, ValueError):
            found = None
        if found is None or not 0 < found.share <= 1:
            raise ValueError(
                f"`--cache` (={name}) must be among {', '.join(FORMS)}, or one of them with the share of the positions "
                f"that are kept, above 0 and at most 1, as in int4:0.25"
            )
        return found

    def kept(self, context: int) -> int:
        """The number of positions that the cache holds of so many tokens."""
        return max(1, round(self.share * context))

    def room(self, context: int, steps: int) -> Room | None:
        """Room for what is kept of so many tokens, and for so many steps; None: for whole keys and values."""
        if self.form.bits == 16 and self.share == 1:
            return None
        positions = sizes.closer_places(self.kept(context) + steps + 1)
        if self.form.bits == 16:
            return Room(self.form, 0, positions)
        return Room(self.form, positions, self.form.tail + steps)


def place(body: FusedBody | OwnBody, context: int, kept: int) -> None:
    """The next token is read behind `context` tokens, of which the cache holds so many positions."""
    body.at(kept)
    if isinstance(body, StoredBody):
        body.seen(context)
    elif isinstance(body, OwnBody):
        body.place.fill_(context)


def read_bytes(model: PreTrainedModel, batch: int, context: int, cache: TimedCache) -> int:
    """Bytes of weights, without the embedding's, and of stored keys and values that a step reads."""
    weights = sum(m.nbytes for m in model.modules() if isinstance(m, RoundedLinear))
    weights += sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    config = model.config
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = batch * config.num_hidden_layers * config.num_key_value_heads
    return weights + heads * cache_bytes(cache.form, cache.kept(context), channels)


def cache_bytes(form: StoredForm, context: int, channels: int) -> int:
    """Bytes of the keys and values of one kv head of one layer and sequence, with their scales."""
    coded = form.coded(context)
    scales = 0 if not coded else 8 / form.group if form.float8 else 4 * channels / form.group + 4
    return round(coded * (channels * form.bits / 4 + scales) + 4 * channels * (context - coded))


def fill_random(body: Any) -> None:
    """Random keys and values: zeros would be faster."""
    for keys, values in body.rooms():
        keys.normal_(), values.normal_()
    if not isinstance(body, StoredBody) or body.room.form.bits == 16:
        return
    form = body.room.form
    for store in body.stores.values():
        (batch, heads, S), D = store.kv.k.shape[:3], store.tail[0].shape[3]
        k, v = (torch.randn(batch, heads, DRAWN, D, device=body.device) for _ in "kv")
        made = quantize_kv_float8(k, v, form.group) if form.float8 else quantize_kv(k, v, form.bits, form.group)
        for there, codes in zip(store.kv[:4], made[:4], strict=True):
            for part in there.chunk(S // DRAWN, 2):
                part.copy_(codes)


def held_positions(body: Any, number: int, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first `context` positions of a layer, [batch, kv heads, context, channels]."""
    if not isinstance(body, StoredBody) or body.room.form.bits == 16:
        keys, values = body.rooms()[number]
        return keys[:, :, :context], values[:, :, :context]
    first = body.room.codes - body.room.form.coded(context)
    keys, values = dequantize_kv(body.stores[number].kv, body.decoder.dtype)
    return keys[:, :, first : first + context], values[:, :, first : first + context]
