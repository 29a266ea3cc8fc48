"""Text that a model reads through its attached compressed KV cache.

In one pass over a text every token would read exact keys and values, and compression would not affect the accuracy.
Here the text is read in pieces: each piece reads its own exact keys and values, and the stored ones of earlier pieces.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 64  # tokens per piece


def attachment(model: nn.Module) -> Any | None:
    """The attached object that makes a model's caches, if there is one: the owner of a hook with a `cache()`."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if callable(getattr(owner, "cache", None))), None)


@torch.no_grad()
def logits_through_cache(model: nn.Module, ids: Tensor, *, prefix: int = 0, piece: int = PIECE) -> Tensor:
    """Logits [B, n - prefix, vocabulary] of ids [B, n] from position `prefix` on.

    Args:
        model: a transformers decoder with a compressed cache attached (`compress.kv.attach`).
        prefix: number of tokens that are read in one pass first, like a prompt, and then compressed.
        piece: number of tokens of each later pass.

    Raises:
        ValueError: no cache is attached.
    """
    maker = attachment(model)
    if maker is None:
        raise ValueError("`model` has no compressed cache attached; `compress.kv.attach(model, methods)` attaches one")
    cache = maker.cache(reads_pieces=True)
    if prefix:
        model(ids[:, :prefix], past_key_values=cache, use_cache=True, logits_to_keep=1)
    pieces = ids[:, prefix:].split(piece, 1)
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in pieces], 1)


def remark(models: Mapping[str, nn.Module]) -> list[str]:
    """A sentence about the reading of texts, if any of these models has a cache attached."""
    names = [name for name, model in models.items() if attachment(model) is not None]
    if not names:
        return []
    return [
        f"{', '.join(names)}: texts were read in pieces of {PIECE} tokens through the compressed KV cache. Each piece "
        "sees itself, and what the cache kept of the text before it."
    ]
