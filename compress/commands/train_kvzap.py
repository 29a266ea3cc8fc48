"""Train the networks with which `kvzap` scores: they predict KVzip's scores of texts from hidden states.

$ python -m compress.commands.train_kvzap --model smollm2-135m --out kvzap.safetensors
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.commands.options import given
from compress.kv.attach import attached
from compress.kv.eviction.kvzip import KVzip
from compress.kv.learned.networks import Fitted, fit_all, summary

LEAST = 1e-6  # attention below this counts as this


@torch.no_grad()
def examples(model: nn.Module, batches: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, hidden states [n, hidden] in bfloat16 and the logarithms of KVzip's scores [n, H_kv] of all tokens.

    Args:
        batches: tokens, LongTensors [1, T].
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for ids in tqdm(batches, desc="kvzip's scores", unit="text"):
        with attached(model, [KVzip(budget=1.0)]) as attachment:
            cache = attachment.cache(observes=True)
            model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            scored = cache.compressed(KVzip(budget=1.0))
            for layer, other in zip(cache.own, scored.own, strict=True):
                if layer.slabs:
                    target = other.memory.view[0].T.clamp(min=LEAST).log()
                    found.setdefault(layer.number, []).append((layer.hidden[0].bfloat16().cpu(), target.cpu()))
    return {
        number: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])) for number, pairs in found.items()
    }


def train(model: nn.Module, batches: Sequence[Tensor], path: str | Path, **more: float) -> dict[int, Fitted]:
    """Write a file for `kvzap(path=...)`; `more`: arguments of `fit`; the width is an eighth of the hidden size.

    Returns:
        {layer: the accuracy of its network on tokens that were held out}
    """
    width = max(model.config.get_text_config(decoder=True).hidden_size // 8, 8)
    return fit_all(examples(model, batches), path, width=width, **more)


def main() -> None:
    start = time.perf_counter()
    model, batches, options = given(__doc__, samples=24)
    print(f"{options.out}: {summary(train(model, batches, options.out))}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
