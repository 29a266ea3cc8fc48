"""Attention of many queries under a mask, and the function by which transformers calls compressed caches."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kernels.prompt_attention import faster_than_torch, prompt_attention

NAME = "workbench_kv"
ROWS = 256  # queries at a time if all scores are computed
FOLDED = 64  # up to this number of queries, heads that share keys are rows of one product
# `attend`: the function that computes attention for the layer of the last update; `again`: keys that later layers read
# too, with the functions that compute their attention.
_expecting = threading.local()


def expect(attend: Callable[..., Tensor] | None) -> None:
    """Set the function that computes the next attention, with the arguments of `attention`; None: forget it, and those
    of `expect_again`."""
    _expecting.attend = attend
    if attend is None:
        _expecting.again = []


def expect_again(key: Tensor, attend: Callable[..., Tensor]) -> None:
    """Set the function for attention that reads this very tensor of keys again, in later layers of the same pass."""
    _expecting.again.append((key, attend))


def note_hidden(hidden: Tensor | None) -> None:
    """Note the input of the attention module that runs next, [B, n, hidden], for policies that score by it."""
    _expecting.hidden = hidden


def noted_hidden() -> Tensor | None:
    """The input that was noted last."""
    return getattr(_expecting, "hidden", None)


def register() -> None:
    """Register the attention in transformers, with its mask: without the mask, results would be silently wrong."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Called by transformers for attention: query [B, H_q, n, D], key, value [B, H_kv, T, D] -> [B, n, H_q, D].

    A layer of a `CompressedCache` attends itself; without such a cache, or with a window, attention is the usual one.

    Raises:
        ValueError: a kind of attention that is not known here.
    """
    if unknown := [name for name in ("position_bias", "cu_seq_lens_q") if kwargs.get(name) is not None]:
        raise ValueError(
            f"this model's attention takes {', '.join(unknown)}, which a compressed cache does not support"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    by_cache = None
    if not torch.compiler.is_compiling():  # compiled passes have caches of fixed tensors
        by_cache, _expecting.attend = getattr(_expecting, "attend", None), None
        again = getattr(_expecting, "again", ())
        by_cache = by_cache or next((attend for shared, attend in again if shared is key), None)
    if by_cache is not None:
        return by_cache(module, query, key, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux), None
    shared = getattr(module, "is_kv_shared_layer", False)  # the queries may be those of the last tokens alone
    if attention_mask is None and query.shape[2] > 1 and not shared:  # a prompt in a static cache with room for more
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux), None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scaling q Kᵀ) V.

    Args:
        q: [B, H_q, n, D]. k, v: [B, H_kv, T, D].
        mask: bool [B, 1 or H_kv, n, T]; None: the n queries are the last of the T positions and see the positions up to
            their own.
        softcap: scores become softcap * tanh(score / softcap). sinks: [H_q] scores of an extra position without a value
            (gpt-oss).

    Returns:
        [B, n, H_q, D]
    """
    B, H, n, _ = q.shape
    kv_heads, T = k.shape[1:3]
    shared = H // kv_heads
    plain = softcap is None and sinks is None
    usual = plain and mask is None and n > 1 and q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if usual and not traced and faster_than_torch(q, k, v, scaling):
        return prompt_attention(q, k, v, scale=scaling)
    if mask is None and n != T:
        mask = torch.ones(n, T, dtype=torch.bool, device=q.device).tril(T - n)[None, None]
    if plain:
        if n == 1 or (n <= FOLDED and mask is not None):  # keys and values are not repeated for each head
            rows = q.reshape(B, kv_heads, shared * n, -1)
            if mask is not None:
                mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
            y = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling)
            return y.reshape(B, H, n, -1).transpose(1, 2).contiguous()
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(shared, 1)
        k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (k, v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, is_causal=mask is None and n > 1)
        return y.transpose(1, 2).contiguous()
    if mask is None:
        mask = torch.ones(n, T, dtype=torch.bool, device=q.device).tril()[None, None]
    pieces = [
        _in_full(q[:, :, i : i + ROWS], k, v, mask[:, :, i : i + ROWS], scaling, softcap, sinks)
        for i in range(0, n, ROWS)
    ]
    return torch.cat(pieces, 2).transpose(1, 2).contiguous()


def _in_full(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    B, H, n, D = q.shape
    kv_heads = k.shape[1]
    scores = torch.einsum("bhgnd,bhtd->bhgnt", q.unflatten(1, (kv_heads, -1)).float(), k.float()) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        extra = sinks.float().view(1, kv_heads, -1, 1, 1).expand(B, -1, -1, n, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhgnt,bhtd->bhgnd", weights, v.float()).flatten(1, 2).to(q.dtype)
