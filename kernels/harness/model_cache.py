"""The caches of the steps that `kernels.harness.model` times: their forms, and random content."""

from typing import Any

import torch
from torch import Tensor

from kernels.kv_decode import dequantize_kv, quantize_kv, quantize_kv_float8
from kernels.step.cache_view import StoredForm
from kernels.step.gpu.stored import StoredBody

FORMS = {
    "16": StoredForm(), "int8": StoredForm(8, 64, False, 96), "int4": StoredForm(4, 64, False, 96),
    "fp8": StoredForm(8, 64, True, 96),
}  # fmt: skip
DRAWN = 1024  # positions of random keys and values, which repeat themselves


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
    if not isinstance(body, StoredBody):
        keys, values = body.rooms()[number]
        return keys[:, :, :context], values[:, :, :context]
    first = body.room.codes - body.room.form.coded(context)
    keys, values = dequantize_kv(body.stores[number].kv, body.decoder.dtype)
    return keys[:, :, first : first + context], values[:, :, first : first + context]
