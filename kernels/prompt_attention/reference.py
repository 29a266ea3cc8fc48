"""Causal attention in plain torch, all scores at once, in float32: the reference for every other implementation."""

import torch
from torch import Tensor


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """y [batch, tokens, heads, value channels] of query [batch, heads, tokens, channels], in its dtype."""
    shared, tokens, places = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    k, v = (t.float().repeat_interleave(shared, 1) for t in (key, value))
    scores = scale * query.float() @ k.transpose(2, 3)  # [batch, heads, tokens, places]
    y = scores.masked_fill(hidden(tokens, places, window, query.device), -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).to(query.dtype).contiguous()


def hidden(tokens: int, places: int, window: int, device: torch.device) -> Tensor:
    """bool [tokens, places]: is this place behind the token, or before its window?"""
    every = torch.ones(tokens, places, dtype=torch.bool, device=device)
    later = every.triu(places - tokens + 1)
    return later | every.tril(places - tokens - window) if window else later
