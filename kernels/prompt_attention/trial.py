"""A trial of which prompt attention is faster on this machine, torch's fused one or the workbench's."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.prompt_attention.dispatch import prompt_attention
from kernels.prompt_attention.reference import hidden

TRIED = 5  # number of runs
_faster: dict[tuple, bool] = {}  # key: heads, channels, dtype, and the powers of two of lengths


def faster_than_torch(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0) -> bool:
    """Is `prompt_attention` faster than torch's fused attention for tensors of about these sizes?

    No trial is possible while a compiler traces: the answer is then that of an earlier trial, or False.
    """
    batch, heads, tokens, channels = query.shape
    places, window = key.shape[2], 0 if window >= key.shape[2] else window
    lengths = tokens.bit_length(), places.bit_length(), window.bit_length(), places == tokens
    asked = (batch, heads, key.shape[1], channels, *lengths, query.dtype)
    if asked not in _faster and not torch.compiler.is_compiling():
        plain = places == tokens and not window
        mask = None if plain else ~hidden(tokens, places, window, query.device)
        how = {"attn_mask": mask, "is_causal": plain, "scale": scale, "enable_gqa": True}
        ways = (
            lambda: scaled_dot_product_attention(query, key, value, **how),
            lambda: prompt_attention(query, key, value, scale=scale, window=window),
        )
        fused, own = ([_seconds(way) for _ in range(TRIED)] for way in ways)
        _faster[asked] = min(own) < min(fused)
    return _faster.get(asked, False)


def _seconds(way: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
