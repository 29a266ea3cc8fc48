"""Attention as fast as torch's products allow: for a prompt read into an empty cache, then for one token at a time."""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.registry import ran

ROWS = 128  # queries of a prompt at a time: their scores stay in a core's cache
_in_rows: dict[tuple, bool] = {}  # by shapes and dtype: is `attend_in_rows` the faster one here?


def fast_attention(model: nn.Module) -> nn.Module:
    """Make a model's attention the fastest for prompts that begin at position 0 and for single queries, compiled too.

    Batches must be of equally long prompts.

    transformers repeats the key and value heads for a single query, which makes 16-bit attention several times slower,
    and in a compiled pass it cannot know that a prompt begins with an empty cache, so that it multiplies by keys that
    are not there yet. torch's fused attention is slow in 16 bits on some CPUs: what is faster for a prompt is tried
    when one is first read eagerly.
    """
    AttentionInterface.register("sdpa_fast", _attention)
    AttentionMaskInterface.register("sdpa_fast", _mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("sdpa_fast")
    return model


def _mask(*args, q_length: int, q_offset: int | Tensor = 0, **kwargs) -> Tensor | None:
    return sdpa_mask(*args, q_length=q_length, q_offset=0 if q_length > 1 else q_offset, **kwargs)


def _attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    batch, heads, tokens, channels = query.shape
    kv_heads = key.shape[1]
    plain = all(kwargs.get(name) is None for name in ("is_causal", "position_bias", "softcap", "s_aux"))
    if tokens > 1 and plain and attention_mask is None and query.device.type == "cpu":
        prompt = key[:, :, :tokens], value[:, :, :tokens], channels**-0.5 if scaling is None else scaling
        if _rows_win(query, *prompt):
            ran("attention", "cpu in rows")
            return attend_in_rows(query, *prompt).transpose(1, 2).contiguous(), None
    if tokens > 1 or not plain or heads == kv_heads or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch, kv_heads, heads // kv_heads, channels)
    y = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return y.reshape(batch, 1, heads, channels), None


@torch.library.custom_op("workbench::attend_in_rows", mutates_args=())
def attend_in_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, 128 queries after another, each only with the keys that it sees.

    Scores are rounded to the dtype between the products, as in transformers' eager attention.

    Args:
        query: [batch, heads, tokens, channels]. key, value: [batch, kv heads, tokens, channels], same dtype.
        scale: of the scores.

    Returns:
        [batch, heads, tokens, channels]
    """
    batch, heads, tokens, channels = query.shape
    groups, of_values = batch * key.shape[1], value.shape[-1]
    q = (query * scale).reshape(groups, -1, tokens, channels)  # [kv heads, heads that share one, tokens, channels]
    k, v = key.reshape(groups, tokens, channels).transpose(1, 2), value.reshape(groups, tokens, of_values)
    y = query.new_empty(*q.shape[:3], of_values)
    later = torch.ones(ROWS, ROWS, dtype=torch.bool, device=query.device).triu(1)
    for start in range(0, tokens, ROWS):
        end = min(start + ROWS, tokens)
        rows = q[:, :, start:end].flatten(1, 2)
        scores = torch.bmm(rows, k[..., :end]).view(groups, -1, end - start, end)
        scores[..., start:].masked_fill_(later[: end - start, : end - start], -torch.inf)
        y[:, :, start:end] = torch.bmm(scores.softmax(-1).flatten(1, 2), v[:, :end]).view(
            groups, -1, end - start, of_values
        )
    return y.view(batch, heads, tokens, of_values)


@attend_in_rows.register_fake
def _(query, key, value, scale):
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _rows_win(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    asked = (tuple(query.shape), tuple(key.shape), query.dtype)
    if asked not in _in_rows and not torch.compiler.is_compiling():
        ways = (
            lambda: scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True),
            lambda: attend_in_rows(query, key, value, scale),
        )
        fused, rows = ([_seconds(way) for _ in range(5)] for way in ways)
        _in_rows[asked] = min(rows) < min(fused)
    return _in_rows.get(asked, False)


def _seconds(way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
