"""Long text cut into windows, for all metrics on text, and the model's logits on them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from eval.text.through_cache import attachment, logits_through_cache
from kernels.linear import fast_linear
from kernels.support.modes import evaluating

BOS = ("once", "each")  # place of the special tokens of the beginning: before the text, or before every window
CHUNK = 256  # number of positions whose distributions over the vocabulary are in memory at once


class Window(NamedTuple):
    """tokens [1, w] to feed; the last `scored` of them are predicted and counted."""

    tokens: Tensor
    scored: int


def windows(
    ids: Tensor,
    *,
    window: int,
    limit: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
) -> list[Window]:
    """Cut ids [1, n] into disjoint windows; each is scored except its first token.

    Args:
        window: number of tokens fed at once, the beginning included.
        limit: largest number of windows.
        beginning: special tokens that the tokenizer puts before a text.
        bos: place of `beginning`. "once": before the whole text, which is then cut, as in the literature (the code of
            GPTQ, arXiv:2210.17323). "each": before every window, whose other tokens are then all scored, for models
            that predict badly without it.

    Raises:
        ValueError: an invalid window, another `bos`, or too little text for a single window.
    """
    if bos not in BOS:
        raise ValueError(f"`bos` (={bos!r}) must be one of {', '.join(BOS)}")
    if bos == "once":
        ids, beginning = torch.cat([ids.new_tensor([list(beginning)]), ids], 1), ()
    room = window - len(beginning)
    if window < 2 or room < 1 or (limit is not None and limit < 1):
        raise ValueError(f"`window` (={window}), `limit` (={limit}): need window >= 2, limit >= 1")
    n = ids.shape[1]
    if n < room:
        raise ValueError(f"`window` (={window}) needs as many tokens; the text has {n}")
    head = torch.tensor([list(beginning)], dtype=torch.long)
    first = room - (0 if len(beginning) else 1)  # nothing predicts the very first token
    starts = range(0, n - room + 1, room)[:limit]
    return [Window(torch.cat([head, ids[:, start : start + room]], 1), first) for start in starts]


class LogitSource(Protocol):
    """A model that gives its logits window by window but computes them in another order, because its weights are not
    all in memory at once.

    device, dtype: of the computation; the dtype as text, "bfloat16".
    """

    device: torch.device
    dtype: str

    def logits(self, batches: Sequence[Tensor], last: Sequence[int]) -> Iterator[Tensor]:
        """For each batch [1, T], in order, the logits [n, vocabulary] of its last n positions; `last` gives the n."""


def all_predictions(model: "nn.Module | LogitSource", cut: Sequence[Window]) -> Iterator[tuple[Tensor, Tensor]]:
    """`predictions` of each window in order. A model in memory computes a window only when it is requested."""
    if isinstance(model, nn.Module):
        for window in cut:
            yield predictions(model, window)
        return
    logits = model.logits([window.tokens for window in cut], [window.scored + 1 for window in cut])
    for window in cut:
        yield next(logits)[-window.scored - 1 : -1], window.tokens[0, -window.scored :]


@torch.no_grad()
def predictions(model: nn.Module, window: Window) -> tuple[Tensor, Tensor]:
    """Logits [scored, vocabulary] that predict a window's scored tokens, and these tokens [scored]. A model with a
    compressed cache attached reads the window through it, piece by piece."""
    device = next(model.parameters()).device
    with fast_linear(), evaluating(model):
        if attachment(model) is None:
            logits = model(window.tokens.to(device), use_cache=False, logits_to_keep=window.scored + 1).logits
        else:
            logits = logits_through_cache(model, window.tokens.to(device))
    return logits[0, -window.scored - 1 : -1], window.tokens[0, -window.scored :].to(device)


def chunks(n: int) -> Iterator[slice]:
    """Slices of at most CHUNK positions."""
    for start in range(0, n, CHUNK):
        yield slice(start, min(start + CHUNK, n))


def mean_and_stderr(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Mean per token, and its standard error with windows as clusters (None for a single window)."""
    total, n = sum(counts), len(counts)
    mean = sum(sums) / total
    if n < 2:
        return mean, None
    variance = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True)) * n / (n - 1)
    return mean, variance**0.5 / total
