"""The choice of the next tokens from their logits, as `generate` configures it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.step.writing.sampling_on_gpu import WARPERS, drawn_unread

NOT_FINITE = "the next token cannot be drawn: the model's scores are not finite, or no token is left"
PURE = (  # processors that keep nothing from one token to the next
    *WARPERS, RepetitionPenaltyLogitsProcessor, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
)  # fmt: skip
TIES = 32  # tokens that are read behind the k-th, since top-k keeps all that equal it; logits in 16 bits often do
NUCLEUS = 512  # tokens among which the nucleus of top-p is looked for first


@dataclass
class SamplingChoice:
    """Chooses the next tokens: greedily, or at random after the warpers of transformers.

    The usual warpers are applied to the few tokens that top-k or top-p leave, in place of the whole vocabulary; the
    distribution is that of transformers, ties included, and the random numbers are others. On a GPU the host reads
    nothing (`sampling_on_gpu`). All other processors are called as transformers calls them.

    Attributes:
        processors: those that get the whole vocabulary, in their order. warpers: those that follow them.
        samples: draw from the distribution; else take the largest. keeps_scores, keeps_logits: keep those of every
            token, in `scores` and `logits`, each float32 [batch, vocabulary].
        finite: bool [], on a GPU: could the last tokens be drawn? None: they were not drawn on a GPU.
    """

    processors: LogitsProcessorList
    warpers: LogitsProcessorList
    samples: bool
    keeps_scores: bool = False
    keeps_logits: bool = False
    scores: tuple[Tensor, ...] = field(default=())
    logits: tuple[Tensor, ...] = field(default=())
    finite: Tensor | None = None

    @property
    def pure(self) -> bool:
        """Does a choice leave nothing behind, so that tokens may be chosen that are dropped later?"""
        kept = self.keeps_scores or self.keeps_logits
        return not kept and all(type(processor) in PURE for processor in self.processors)

    @property
    def largest(self) -> bool:
        """Is the token with the largest logit always chosen?"""
        return not (self.samples or self.processors or self.keeps_scores or self.keeps_logits)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The next tokens, int64 [batch].

        Args:
            ids: int64 [batch, tokens], the text so far. logits: float32 [batch, vocabulary]; they are not changed.
        """
        scores = self.processors(ids, logits.clone()) if self.processors else logits
        if self.keeps_logits:
            self.logits += (logits.clone(),)
        if self.keeps_scores:
            self.scores += (scores.clone(),)
        return self.drawn_from(scores) if self.samples else scores.argmax(-1)

    def loss(self, ids: Tensor, logits: Tensor, token: int) -> float:
        """The loss of a token of one sequence in nats, infinite for one that the processors do not allow; arguments as
        of a call."""
        scores = self.processors(ids, logits.clone()) if self.processors else logits
        return float(scores[0].logsumexp(0) - scores[0, token])

    def drawn_from(self, scores: Tensor) -> Tensor:
        """Tokens drawn from scores [batch, vocabulary] after the warpers, int64 [batch]."""
        if scores.is_cuda:
            tokens, self.finite = drawn_unread(scores, self.warpers)
            return tokens
        left, indices = warped(scores, self.warpers)
        place = drawn(left.softmax(-1))
        return (place if indices is None else indices.gather(1, place))[:, 0]


def choice_of(processors: LogitsProcessorList, samples: bool, keeps_scores: bool, keeps_logits: bool) -> SamplingChoice:
    """The choice that transformers' list of processors describes."""
    first = len(processors)
    if samples and not keeps_scores:
        while first and _leaves_out(processors[first - 1]):
            first -= 1
    before, after = processors[:first], processors[first:]
    return SamplingChoice(LogitsProcessorList(before), LogitsProcessorList(after), samples, keeps_scores, keeps_logits)


def _leaves_out(processor: LogitsProcessor) -> bool:
    """Is this a usual warper, which gives tokens that it removes the score -inf?"""
    return type(processor) in WARPERS and getattr(processor, "filter_value", -torch.inf) == -torch.inf


def warped(scores: Tensor, warpers: Sequence[LogitsProcessor]) -> tuple[Tensor, Tensor | None]:
    """What warpers leave of scores [batch, vocabulary]: scores [batch, n], -inf where a token is removed, and the
    tokens that they belong to, int64 [batch, n]; None: all tokens, in order.

    After the first warper that leaves few tokens, the others see these alone, from the largest score down: a token that
    is removed and one that is not there have the same effect on them.
    """
    tokens = None
    kinds = [type(warper) for warper in warpers]
    if kinds[:2] == [TemperatureLogitsWarper, TopKLogitsWarper]:  # the k largest are the same before and after
        warpers = [warpers[1], warpers[0], *warpers[2:]]
    for warper in warpers:
        few = None
        if tokens is None and type(warper) is TopKLogitsWarper:
            few = _largest(scores, warper.top_k)
        elif tokens is None and type(warper) is TopPLogitsWarper:
            few = _nucleus(scores, warper.top_p, warper.min_tokens_to_keep)
        elif type(warper) is TopPLogitsWarper:
            few = _until(scores, scores.softmax(-1), warper.top_p, warper.min_tokens_to_keep), tokens
        if few is None:
            scores = warper(tokens, scores)
        else:
            scores, tokens = few
    return scores, tokens


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The k largest scores of each row and those that equal the k-th, with their tokens; None: too many are equal."""
    read = min(k + TIES, scores.shape[1])
    values, tokens = scores.topk(read)
    least = values[:, min(k, read) - 1 : min(k, read)]
    if read < scores.shape[1] and bool((values[:, -1:] >= least).any()):
        return None
    return values.masked_fill(values < least, -torch.inf), tokens


def _nucleus(scores: Tensor, p: float, least: int) -> tuple[Tensor, Tensor] | None:
    """The largest scores of each row, until their probabilities sum to p, at least `least` of them, with their tokens;
    None: `NUCLEUS` tokens do not suffice."""
    values, tokens = scores.topk(min(NUCLEUS, scores.shape[1]))
    mass = (values - scores.logsumexp(-1, keepdim=True)).exp()
    if values.shape[1] < scores.shape[1] and not bool((mass[:, :-1].sum(-1) >= p).all()):
        return None
    return _until(values, mass, p, least), tokens


def _until(values: Tensor, mass: Tensor, p: float, least: int) -> Tensor:
    """Falling scores [batch, n] with the probabilities `mass`, -inf where those before them sum to p or more."""
    removed = mass.cumsum(-1) - mass >= p
    removed[:, :least] = False
    return values.masked_fill(removed, -torch.inf)


def drawn(probabilities: Tensor) -> Tensor:
    """A column of each row of probabilities [batch, n], drawn at random with torch's generator: int64 [batch, 1].

    Raises:
        ValueError: the probabilities are not finite.
    """
    up_to = probabilities.double().cumsum(-1)
    total = up_to[:, -1:]
    if not math.isfinite(total.sum()):
        raise ValueError(NOT_FINITE)
    at = torch.rand(len(total), 1, dtype=torch.float64, device=total.device) * total
    return torch.searchsorted(up_to, at, right=True).clamp_max(probabilities.shape[1] - 1)
