"""Perplexity on long text, by disjoint windows."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from eval.text.windows import LogitSource, all_predictions, chunks, mean_and_stderr, windows

LARGEST = math.log(sys.float_info.max)  # the largest loss with a finite exp, 709.78 nats


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood per token.

    value: inf if the mean is above 709 nats, where exp overflows float64; NaN if a loss is. stderr: by the delta
    method, windows as clusters; None for a single window, or for a value that is not finite. sums, counts: per window,
    the summed negative log-likelihood (nats) and the tokens counted.
    """

    value: float
    stderr: float | None
    tokens: int
    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sums: Sequence[float], counts: Sequence[int]) -> "Perplexity":
        nll, stderr = mean_and_stderr(sums, counts)
        value = bounded_exp(nll)
        spread = value * stderr if stderr is not None and math.isfinite(value) else None
        return cls(value, spread, sum(counts), tuple(sums), tuple(counts))


def bounded_exp(x: float) -> float:
    """exp(x), or inf where it is larger than any float."""
    return math.inf if x > LARGEST else math.exp(x)


def perplexity(
    model: nn.Module | LogitSource,
    ids: Tensor,
    *,
    window: int = 2048,
    limit: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
) -> Perplexity:
    """Perplexity of a model on ids [1, n]; see `eval.text.windows.windows` for the arguments.

    On raw wikitext-2 (documents joined by blank lines), window 2048 and bos "once" are the protocol of the
    GPTQ paper.
    """
    cut = windows(ids, window=window, limit=limit, beginning=beginning, bos=bos)
    found = tqdm(all_predictions(model, cut), desc="perplexity", unit="window", total=len(cut))
    sums = [float(token_losses(logits, tokens.to(logits.device)).sum()) for logits, tokens in found]
    return Perplexity.of(sums, [w.scored for w in cut])


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood [n] in nats, in float64, of tokens [n] under logits [n, vocabulary]."""
    parts = [
        torch.nn.functional.cross_entropy(logits[at].float(), tokens[at], reduction="none").double()
        for at in chunks(len(tokens))
    ]
    return torch.cat(parts)
