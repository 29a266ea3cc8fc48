"""Causal attention in plain torch, all scores at once, in float32: the reference for every other implementation."""

import torch
from torch import Tensor


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """y [batch, tokens, heads, value channels] of query [batch, heads, tokens, channels], in its dtype."""
    shared, tokens = query.shape[1] // key.shape[1], query.shape[2]
    k, v = (t.float().repeat_interleave(shared, 1) for t in (key, value))
    scores = scale * query.float() @ k.transpose(2, 3)  # [batch, heads, tokens, tokens]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).to(query.dtype).contiguous()
