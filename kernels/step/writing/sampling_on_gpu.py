"""Sampling on a GPU without a value that the host reads, so that it can already launch the next step of decoding.

On a CPU, `sampling.warped` goes on with the few tokens that top-k or top-p leave, whose number depends on the logits.
Here every token of the vocabulary gets a weight, by operations that are the same for all logits. The distribution is
that of the warpers of transformers, with one difference: of tokens with equal scores at the border of top-p,
transformers keeps those that its sort puts first, and here all of them share the probability of these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # in the order of `generate`


def drawn_unread(scores: Tensor, warpers: Sequence[LogitsProcessor]) -> tuple[Tensor, Tensor]:
    """Tokens drawn from scores [batch, vocabulary] after the warpers, int64 [batch], and whether all of them could be
    drawn, bool []: not if scores are not finite, or no token is left. The tokens are then any of the vocabulary."""
    weights = weights_of(scores, warpers)
    waits = torch.empty_like(weights).exponential_()  # the first of independent arrivals, whose rates are the weights
    return (weights / waits).argmax(-1), weights.sum().isfinite()


def weights_of(scores: Tensor, warpers: Sequence[LogitsProcessor]) -> Tensor:
    """Weights [batch, vocabulary] in proportion to the probabilities that the warpers leave."""
    kinds = [type(warper) for warper in warpers]
    several = any(getattr(warper, "min_tokens_to_keep", 1) > 1 for warper in warpers)
    if several or kinds != [kind for kind in WARPERS if kind in kinds]:
        for warper in warpers:
            scores = warper(None, scores)
        return _relative(scores)
    of = dict(zip(kinds, warpers, strict=True))
    if TemperatureLogitsWarper in of:
        scores = of[TemperatureLogitsWarper](None, scores)
    weights = _relative(scores)
    if MinPLogitsWarper in of:
        weights = weights.masked_fill(weights < of[MinPLogitsWarper].min_p, 0)
    if TopKLogitsWarper not in of and TopPLogitsWarper not in of:
        return weights
    k, p = getattr(of.get(TopKLogitsWarper), "top_k", None), getattr(of.get(TopPLogitsWarper), "top_p", None)
    least, share = _border(scores, k, p)
    return torch.where(scores > least, weights, weights * share * (scores == least))


def _relative(scores: Tensor) -> Tensor:
    """Probabilities in proportion to the largest of their row; a row with NaN, or without a finite score, is NaN."""
    return (scores - scores.amax(-1, keepdim=True)).exp()


def _border(scores: Tensor, k: int | None, p: float | None) -> tuple[Tensor, Tensor]:
    """The least score that top-k and top-p keep, and the share of the tokens with this score that they keep; each
    [batch, 1]. One of the two may be None."""
    top_k = scores.topk(min(k, scores.shape[1])) if k is not None else scores.sort(-1, descending=True)
    falling = top_k.values  # [batch, n]
    least = falling[:, -1:]
    if p is None:
        return least, torch.ones_like(least)
    mass = _relative(falling)
    tied = _count(scores == least) - _count(falling == least)  # top-k keeps them behind its k-th, too
    enough = p * (mass.sum(-1, keepdim=True) + tied * mass[:, -1:])
    kept = _count(mass.cumsum(-1) - mass < enough).clamp_min(1)
    missing = (enough - mass.sum(-1, keepdim=True)) / mass[:, -1:].clamp_min(torch.finfo(mass.dtype).tiny)
    least = falling.gather(1, kept - 1)
    at_border = kept - _count(falling > least) + missing.ceil().clamp_min(0).minimum(tied)
    return least, at_border / _count(scores == least)


def _count(mask: Tensor) -> Tensor:
    """The number of true elements of each row, [batch, 1]."""
    return mask.sum(-1, keepdim=True)
