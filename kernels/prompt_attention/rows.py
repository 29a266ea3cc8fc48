"""Causal attention by torch's products, for some queries at a time and only the keys that they see."""

import torch
from torch import Tensor

from kernels.linear.onednn import emulates
from kernels.prompt_attention.reference import hidden

ROWS = 128  # queries at a time: their scores stay in a core's cache


def in_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """y [batch, tokens, heads, value channels]; arguments as in `prompt_attention`.

    Scores are rounded to the dtype between the products, as in transformers' eager attention; where a processor only
    emulates products in this dtype, all is computed in float32 and rounded once.
    """
    if query.device.type == "cpu" and emulates(query.dtype):
        return in_rows(query.float(), key.float(), value.float(), scale, window).to(query.dtype)
    batch, heads, tokens, channels = query.shape
    groups, places, of_values = batch * key.shape[1], key.shape[2], value.shape[-1]
    past = places - tokens
    shared = heads // key.shape[1]
    q = (query * scale).reshape(groups, shared, tokens, channels)  # [kv heads, heads that share one, tokens, channels]
    k, v = key.reshape(groups, places, channels).transpose(1, 2), value.reshape(groups, places, of_values)
    y = query.new_empty(*q.shape[:3], of_values)
    for start in range(0, tokens, ROWS):
        end = min(start + ROWS, tokens)
        rows, seen = q[:, :, start:end].flatten(1, 2), past + end
        first = max(past + start + 1 - window, 0) if window else 0
        scores = torch.bmm(rows, k[..., first:seen]).view(groups, shared, end - start, seen - first)
        masked = scores if window else scores[..., past + start :]
        masked.masked_fill_(hidden(end - start, masked.shape[-1], window, query.device), -torch.inf)
        y[:, :, start:end] = torch.bmm(scores.softmax(-1).flatten(1, 2), v[:, first:seen]).view(
            groups, shared, end - start, of_values
        )
    return y.view(batch, heads, tokens, of_values).transpose(1, 2).contiguous()
