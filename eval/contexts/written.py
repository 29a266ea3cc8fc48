"""What a model writes behind compressed caches: its own answers to the questions, token by token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from eval.text.divergence import Divergence, distance
from eval.text.windows import mean_and_stderr
from eval.writing.free_running import along, of_texts
from eval.writing.generation import Written, until_end

Make = Callable[[Sequence[str]], Cache]  # names of variants -> their caches as one, in which row i is variant i


class OwnText(NamedTuple):
    """A text behind a cache, without its end token, and the predictions behind it along the full cache's text.

    kl, guessed, count: summed KL from the full cache's predictions in nats, the number of tokens that are the most
    likely ones of both, and the number of all.
    """

    tokens: list[int]
    ended: bool
    kl: float
    guessed: float
    count: int


def write_behind(
    model: nn.Module, ask: Tensor, groups: Sequence[Sequence[str]], make: Make, *, new_tokens: int, ends: Sequence[int]
) -> dict[str, OwnText]:
    """The greedy text of every variant after the question `ask` [n]; the first of the first group is the full cache.

    Caches are made twice: one is extended by the variant's own text, the other by the full cache's.
    """
    written: dict[str, Written] = {}
    for names in groups:
        rows = _greedy(model, ask, make(names), len(names), new_tokens).tolist()
        written |= {name: until_end(row, ends) for name, row in zip(names, rows, strict=True)}
    text = written[groups[0][0]].tokens
    if not text:
        return {name: OwnText(*own, 0.0, 0, 0) for name, own in written.items()}
    found: dict[str, OwnText] = {}
    line = torch.cat([ask, ask.new_tensor(text[:-1])]).to(model.device)
    reference = None
    for names in groups:
        together = make(names)
        ids = line.expand(len(names), -1)
        logits = model(ids, past_key_values=together, use_cache=True, logits_to_keep=len(text)).logits
        reference = logits[0] if reference is None else reference
        for name, own in zip(names, logits, strict=True):
            found[name] = OwnText(*written[name], *distance(reference, own), len(text))
    return found


def own_text_metrics(texts: Sequence[OwnText], reference: Sequence[OwnText] | None) -> dict[str, float]:
    """The metrics of `eval.writing.free_running` over contexts; without a reference those of the full cache itself."""
    written = [Written(one.tokens, one.ended) for one in texts]
    if reference is None:
        return of_texts(written)
    known = [one for one in texts if one.count]
    found = of_texts(written, [Written(one.tokens, one.ended) for one in reference])
    if not known:
        return found
    kls, guessed, counts = ([getattr(one, name) for one in known] for name in ("kl", "guessed", "count"))
    means = (mean_and_stderr(sums, counts) for sums in (kls, guessed))
    return found | along(Divergence(*next(means), *next(means), sum(counts)))


def _greedy(model: nn.Module, ask: Tensor, cache: Cache, rows: int, new_tokens: int) -> Tensor:
    """The most likely tokens [rows, new_tokens] after a question."""
    ids, written = ask.to(model.device).expand(rows, -1), []
    for _ in range(new_tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].float().argmax(-1, keepdim=True)
        written.append(ids)
    return torch.cat(written, 1)
