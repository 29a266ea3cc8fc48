"""Train the networks with which `locret` scores: they predict attention logits of answers from queries, keys, values.

$ python -m compress.commands.train_locret --model smollm2-135m --out locret.safetensors
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from tqdm.auto import tqdm

from compress.commands.options import train_networks
from compress.kv.attach import attached
from compress.kv.learned.locret import features, largest_logits
from compress.kv.learned.networks import Example, Fitted, fit_all

ANSWER = 0.25  # share of a text, at its end, whose attention is predicted
SPAN = 8  # consecutive tokens that are drawn together
SMOOTH = 0.0025  # weight of the squared differences between scores of neighbours


@torch.no_grad()
def examples(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Example]:
    """Queries, keys and values [n, channels] and the largest logits [n, H_kv] of the tokens of prompts. A prompt is a
    text without its last quarter, cut to whole spans.

    Args:
        batches: tokens, LongTensors [1, T].
    """
    for ids in tqdm(batches, desc="attention of answers", unit="text"):
        prompt = ids.shape[1] - max(int(ids.shape[1] * ANSWER), 1)
        with attached(model) as attachment:
            cache = attachment.cache(observes=True)
            model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for layer in cache.filled:
            seen = layer.seen_by(layer.queries, layer.asked)
            inputs, target = features(seen)[0, :prompt], largest_logits(seen, prompt)[0].T
            whole = prompt // SPAN * SPAN
            yield layer.number, inputs[:whole], target[:whole]


def smooth_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Smooth L1 loss of scores and logits, plus squared differences of neighbouring scores; [spans, span, H_kv]."""
    return smooth_l1_loss(predicted, target) + SMOOTH * predicted.diff(dim=1).square().mean()


def train(model: nn.Module, batches: Sequence[Tensor], path: str | Path, **more: float) -> dict[int, Fitted]:
    """Write a file for `locret(path=...)`; `more`: arguments of `fit`; the width is a quarter of the hidden size."""
    width = max(model.config.get_text_config(decoder=True).hidden_size // 4, 8)
    return fit_all(examples(model, batches), path, width=width, span=SPAN, loss=smooth_loss, **more)


if __name__ == "__main__":
    train_networks(train, __doc__, samples=24)
