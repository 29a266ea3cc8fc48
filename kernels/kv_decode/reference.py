"""The reference that other implementations are compared with: float32 in plain torch, on any device."""

import torch
from torch import Tensor

from kernels.kv_decode.layout import KV, dequantize_kv


def kv_decode(
    q: Tensor, cache: KV, lengths: Tensor, starts: Tensor | None, scale: float, softcap: float, return_mass: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y [B, H_q, T_q, D_v] in q's dtype, mass [B, H_kv, S + R] in float32 or None, lse [B, H_q, T_q] in float32."""
    B, H_q, T_q, D = q.shape
    k, v = dequantize_kv(cache)
    H_kv, positions = k.shape[1:3]
    start = torch.zeros_like(lengths) if starts is None else starts
    end = (start + lengths).clamp(max=positions)[..., None, None]
    at = torch.arange(positions, device=q.device)
    own = torch.arange(T_q, device=q.device)[:, None]
    visible = (at >= start[..., None, None]) & (at < end - (T_q - 1 - own))  # [B, H_kv, T_q, positions]
    v = v.masked_fill(~visible[:, :, -1, :, None], 0)  # values outside the range may be NaN
    scores = torch.einsum("bhgtd,bhsd->bhgts", q.float().reshape(B, H_kv, H_q // H_kv, T_q, D), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    p = scores.softmax(-1).masked_fill(~visible[:, :, None], 0)  # rows without a position: zeros instead of NaN
    y = torch.einsum("bhgts,bhsd->bhgtd", p, v)
    lse = scores.logsumexp(-1) if positions else scores.new_full(scores.shape[:-1], -torch.inf)
    return y.flatten(1, 2).to(q.dtype), p.sum((2, 3)) if return_mass else None, lse.reshape(B, H_q, T_q)
