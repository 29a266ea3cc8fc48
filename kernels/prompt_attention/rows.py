"""Causal attention by torch's products, for some queries at a time and only the keys that they see."""

import torch
from torch import Tensor

from kernels.linear.onednn import emulates

ROWS = 128  # queries at a time: their scores stay in a core's cache


def in_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """y [batch, tokens, heads, value channels]; arguments as in `prompt_attention`.

    Scores are rounded to the dtype between the products, as in transformers' eager attention; where a processor only
    emulates products in this dtype, all is computed in float32 and rounded once.
    """
    if query.device.type == "cpu" and emulates(query.dtype):
        return in_rows(query.float(), key.float(), value.float(), scale).to(query.dtype)
    batch, heads, tokens, channels = query.shape
    groups, of_values = batch * key.shape[1], value.shape[-1]
    shared = heads // key.shape[1]
    q = (query * scale).reshape(groups, shared, tokens, channels)  # [kv heads, heads that share one, tokens, channels]
    k, v = key.reshape(groups, tokens, channels).transpose(1, 2), value.reshape(groups, tokens, of_values)
    y = query.new_empty(*q.shape[:3], of_values)
    later = torch.ones(ROWS, ROWS, dtype=torch.bool, device=query.device).triu(1)
    for start in range(0, tokens, ROWS):
        end = min(start + ROWS, tokens)
        rows = q[:, :, start:end].flatten(1, 2)
        scores = torch.bmm(rows, k[..., :end]).view(groups, shared, end - start, end)
        scores[..., start:].masked_fill_(later[: end - start, : end - start], -torch.inf)
        y[:, :, start:end] = torch.bmm(scores.softmax(-1).flatten(1, 2), v[:, :end]).view(
            groups, shared, end - start, of_values
        )
    return y.view(batch, heads, tokens, of_values).transpose(1, 2).contiguous()
