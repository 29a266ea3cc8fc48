"""The fastest attention possible with torch: for a prompt read into an empty cache, then for one token at a time."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels import native
from kernels.kv_decode import KV, kv_decode
from kernels.prompt_attention import faster_than_torch, prompt_attention


def fast_attention(model: nn.Module) -> nn.Module:
    """Give a model the fastest attention for prompts that begin at position 0 and for single queries, compiled or not.

    The prompts of a batch must be equally long.

    transformers repeats the key and value heads for a single query, which makes 16-bit attention several times slower:
    if the mask of each sequence is one range of positions, our `kv_decode` runs instead and reads each head of the
    cache once. In a compiled pass, transformers cannot know that a prompt begins with an empty cache, and so multiplies
    by keys that do not exist yet. torch's fused attention is slow in 16 bits on some CPUs: the faster attention for
    prompts is found by a trial when a prompt is first read eagerly.
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
        if faster_than_torch(query, *prompt):
            return prompt_attention(query, *prompt[:2], scale=prompt[2]), None
    if tokens == 1 and plain and _is_range(attention_mask) and query.device.type == "cpu" and native.why_not() is None:
        y = _of_range(query, key, value, attention_mask[:, 0, 0], scaling)
        return y.reshape(batch, 1, heads, channels), None
    if tokens > 1 or not plain or heads == kv_heads or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch, kv_heads, heads // kv_heads, channels)
    y = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return y.reshape(batch, 1, heads, channels), None


def _is_range(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)


def _of_range(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float | None) -> Tensor:
    """Attention by `kv_decode`; seen: [batch, positions], True from the first visible position to the last."""
    first, count = seen.to(torch.uint8).argmax(-1, keepdim=True), seen.sum(-1, keepdim=True)
    starts, lengths = (t.expand(key.shape[:2]) for t in (first, count))
    return kv_decode(query, KV(key, value), lengths, starts=starts, scale=scaling)
