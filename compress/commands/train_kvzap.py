"""Train the networks with which `kvzap` scores: they predict KVzip's scores of texts from hidden states.

$ python -m compress.commands.train_kvzap --model smollm2-135m --out kvzap.safetensors
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.commands.options import train_networks
from compress.kv.attach import attached
from compress.kv.eviction.kvzip import KVzip
from compress.kv.learned.networks import Example, Fitted, fit_all

LEAST = 1e-6  # attention below this counts as this


@torch.no_grad()
def examples(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Example]:
    """The hidden states [n, hidden] of all tokens, and the logarithms of KVzip's scores [n, H_kv].

    Args:
        batches: tokens, LongTensors [1, T].
    """
    for ids in tqdm(batches, desc="kvzip's scores", unit="text"):
        with attached(model, [KVzip(budget=1.0)]) as attachment:
            cache = attachment.cache(observes=True)
            model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            scored = cache.compressed(KVzip(budget=1.0))
        for layer, other in zip(cache.own, scored.own, strict=True):
            if layer.slabs:
                yield layer.number, layer.hidden[0], other.memory.view[0].T.clamp(min=LEAST).log()


def train(model: nn.Module, batches: Sequence[Tensor], path: str | Path, **more: float) -> dict[int, Fitted]:
    """Write a file for `kvzap(path=...)`; `more`: arguments of `fit`; the width is an eighth of the hidden size."""
    width = max(model.config.get_text_config(decoder=True).hidden_size // 8, 8)
    return fit_all(examples(model, batches), path, width=width, **more)


if __name__ == "__main__":
    train_networks(train, __doc__, samples=24)
