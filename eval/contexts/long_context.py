"""Questions about long contexts, answered from compressed caches: exact matches, likelihood and divergence.

A context is read once; its cache is then compressed by every variant, and each variant answers from its own cache.
There are five visibilities; in three of them a compressed cache serves a second question, as in SCBench
(arXiv:2412.10319):

    agnostic    the question comes after compression, so compression cannot use it
    another     the same for a second question, from a fresh copy of the compressed cache, like another request
    turns       the first question and its answer are read after compression, then the second question comes
    visible     the question, except its last token, was read before compression
    follow-up   the first question and its answer were read before compression, then the second question comes

Answers are teacher-forced: every token of the true answer is the most likely one exactly if greedy decoding writes the
answer.
"""

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Cache

from eval.contexts.answers import FULL, Answer, LongContextScores
from eval.contexts.haystack import ContextSample, Question
from eval.contexts.written import OwnText, write_behind
from eval.writing.generation import end_tokens
from kernels.clock import clock
from kernels.linear import fast_linear
from kernels.support.modes import evaluating
from kernels.support.positions import positions

VISIBILITIES = ("agnostic", "another", "turns", "visible", "follow-up")
_OF_SECOND = {"another", "turns", "follow-up"}  # visibilities with the second question
_AT_ONCE = 16  # number of caches for one pass, if `batched` is given; all of them are held in memory until then


@torch.no_grad()
def score_long_context(
    model: nn.Module,
    samples: Sequence[ContextSample],
    *,
    observer: Callable[[], Cache],
    variants: Mapping[str, Callable[[Cache], Cache]],
    visibilities: Sequence[str] = VISIBILITIES,
    finished: MutableMapping[tuple[int, str], dict[str, Any]] | None = None,
    batched: Callable[[Sequence[Cache]], Cache] | None = None,
    write_tokens: int = 0,
) -> LongContextScores:
    """Ask the samples' questions of every variant's cache.

    Args:
        model: a transformers decoder that takes the caches.
        observer: makes an empty cache into which a context is read.
        variants: {name: read cache -> a new, compressed one; the read one is unchanged}; "full" is always scored, too.
            Caches have `nbytes_16`, and `own` layers with `lengths`, `kept_positions()`, and `slabs`, which may list
            their tensors that are stored `elsewhere`.
        visibilities: some of VISIBILITIES; another, turns and follow-up need samples with two questions.
        finished: earlier results, JSON by a sample's number and a variant, which are not computed again. If any result
            of a context is missing, the context is read again, and the full cache answers again.
        batched: makes one cache from the caches of several variants, like a batch whose row i is cache i, so that each
            layer of a pass is computed once for all; without it every cache has its own pass.
        write_tokens: most tokens that every variant writes on its own after the first question, before any question
            was read; 0: none.

    Raises:
        ValueError: unknown visibilities, or samples that do not match them or the model.
    """
    _check(model, samples, variants, visibilities, write_tokens)
    finished = {} if finished is None else finished
    ways = {FULL: variants.get(FULL, _untouched), **variants}
    progress = tqdm(total=len(samples) * len(visibilities) * len(ways), desc="long contexts", unit="answer")
    for i, sample in enumerate(samples):
        missing = {name: way for name, way in ways.items() if (i, name) not in finished}
        progress.update(len(visibilities) * (len(ways) - len(missing)))
        if missing:
            asked = {FULL: ways[FULL], **missing}
            with _flat_head(model), evaluating(model), fast_linear():
                read = observer()
                _feed(model, sample.context, read, next(model.parameters()).device)
                progress.set_postfix_str(f"{sample.task} {sample.length}, writing")
                texts = _write_all(model, sample, read, asked, write_tokens, batched) if write_tokens else {}
                found = _ask_all(model, sample, read, asked, visibilities, missing, progress, batched)
            for name in missing:
                finished[i, name] = found[name] | ({"written": texts[name]} if texts else {})
    progress.close()
    return _collected(samples, [{name: finished[i, name] for name in ways} for i in range(len(samples))])


def _ask_all(
    model: nn.Module,
    sample: ContextSample,
    read: Cache,
    ways: Mapping[str, Callable[[Cache], Cache]],
    visibilities: Sequence[str],
    counted: Container[str],
    progress: tqdm,
    batched: Callable[[Sequence[Cache]], Cache] | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of one sample, whose context `read` holds, as JSON: {variant: {"answers": {visibility: Answer},
    "cache": for the first visibility}}. The answers of the `counted` variants count as progress."""
    found: dict[str, dict[str, Any]] = {name: {"answers": {}} for name in ways}
    first, device = sample.questions[0], next(model.parameters()).device
    last = max(map(VISIBILITIES.index, visibilities))
    for visibility in VISIBILITIES[: last + 1]:
        question = sample.questions[-1] if visibility in _OF_SECOND else first
        said = torch.cat([first.ask, first.answer]) if visibility == "turns" else first.ask[:0]  # after compression
        if visibility == "visible":
            _feed(model, first.ask[:-1], read, device)
            question = Question(first.ask[-1:], first.answer, first.needles)
        elif visibility == "follow-up":
            _feed(model, torch.cat([first.ask[-1:], first.answer]), read, device)
        if visibility not in visibilities or (visibility in _OF_SECOND and len(sample.questions) < 2):
            continue
        for names in _groups(list(ways), _AT_ONCE if batched else 1):
            progress.set_postfix_str(f"{sample.task} {sample.length}, {visibility}, {names[-1]}")
            caches = []
            for name in names:
                start = clock(device)
                caches.append(cache := ways[name](read))
                seconds = clock(device) - start
                of = found[name].setdefault("cache", {})
                if not of:
                    of |= {"bytes": cache.nbytes_16, "elsewhere": _elsewhere(cache), "seconds": seconds}
                    of |= _kept(sample, cache)
                cache.paused = True  # the following tokens are not a prompt to compress
            together = caches[0] if batched is None else batched(caches)
            _feed(model, said, together, device, len(caches))
            asked = _ask(model, question, together, device, len(caches))
            for name, outputs, logits in zip(names, *asked, strict=True):
                if name == FULL:
                    reference = logits, outputs
                of = found[name]["cache"]
                found[name]["answers"][visibility] = _answer(question.answer.to(device), logits, reference[0])
                of.setdefault("errors", [_relative(a, b) for a, b in zip(outputs, reference[1], strict=True)])
                progress.update(name in counted)
    return found


def _write_all(
    model: nn.Module,
    sample: ContextSample,
    read: Cache,
    ways: Mapping[str, Callable[[Cache], Cache]],
    new_tokens: int,
    batched: Callable[[Sequence[Cache]], Cache] | None,
) -> dict[str, OwnText]:
    """What every variant writes after the first question."""

    def make(names: Sequence[str]) -> Cache:
        caches = [ways[name](read) for name in names]
        for cache in caches:
            cache.paused = True
        return caches[0] if batched is None else batched(caches)

    groups = _groups(list(ways), _AT_ONCE if batched else 1)
    ends = end_tokens(model)
    return write_behind(model, sample.questions[0].ask, groups, make, new_tokens=new_tokens, ends=ends)


def _collected(samples: Sequence[ContextSample], found: Sequence[dict[str, dict[str, Any]]]) -> LongContextScores:
    scores = LongContextScores()
    for sample, variants in zip(samples, found, strict=True):
        scores.depths.setdefault((sample.task, sample.length), []).append(sample.depth)
        for name, of in variants.items():
            own = scores.answers.setdefault(name, {})
            for visibility, answer in of["answers"].items():
                own.setdefault((sample.task, sample.length, visibility), []).append(Answer(*answer))
    for name in scores.answers:
        if texts := [of[name]["written"] for of in found if "written" in of[name]]:
            scores.written[name] = [OwnText(*one) for one in texts]
        caches = [(sample, of[name]["cache"]) for sample, of in zip(samples, found, strict=True)]
        by_length = {sample.length: [c for s, c in caches if s.length == sample.length] for sample, _ in caches}
        by_task = {
            (s.task, s.length): [c["survival"] for o, c in caches if (o.task, o.length) == (s.task, s.length)]
            for s, one in caches
            if one["survival"]
        }
        for sizes, key in ((scores.cache_bytes, "bytes"), (scores.elsewhere_bytes, "elsewhere")):
            sizes[name] = {length: float(np.mean([c[key] for c in own])) for length, own in by_length.items()}
        scores.kept[name] = {length: np.mean([c["kept"] for c in own], 0).tolist() for length, own in by_length.items()}
        scores.survival[name] = {key: np.mean(shares, 0).tolist() for key, shares in by_task.items()}
        scores.errors[name] = np.mean([c["errors"] for _, c in caches], 0).tolist()
        scores.seconds[name] = [c["seconds"] for _, c in caches]
    return scores


def _untouched(cache: Cache) -> Cache:
    return cache.compressed(None)


@contextmanager
def _flat_head(model: nn.Module) -> Iterator[None]:
    """Make the hidden states contiguous before the head.

    The states of the last tokens of a pass are not contiguous, and on a CPU torch then multiplies them by a copy of the
    whole matrix, which in 16 bits takes longer than all layers.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _m, args: (args[0].clone(memory_format=torch.contiguous_format),))
    try:
        yield
    finally:
        hook.remove()


def _groups(names: list[str], size: int) -> list[list[str]]:
    """The names in their order, in groups of `size`."""
    return [names[i : i + size] for i in range(0, len(names), size)]


def _feed(model: nn.Module, ids: Tensor, cache: Cache, device: torch.device, rows: int = 1) -> None:
    if len(ids):
        model(ids.to(device).expand(rows, -1), past_key_values=cache, use_cache=True, logits_to_keep=1)


def _ask(
    model: nn.Module, question: Question, cache: Cache, device: torch.device, rows: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For every row of the cache: the attention outputs by layer for all tokens of question and answer, [q + a - 1,
    ...] each, and the log-probabilities of the answer's tokens, [a, vocabulary]."""
    ids = torch.cat([question.ask, question.answer[:-1]]).to(device).expand(rows, -1)
    outputs: list[Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _m, _i, out: outputs.append((out[0] if isinstance(out, tuple) else out).float()))
        for m in model.modules()
        if hasattr(m, "layer_idx") and any(True for _ in m.parameters(recurse=True))
    ]
    try:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=len(question.answer)).logits
    finally:
        for hook in hooks:
            hook.remove()
    return [[of[i] for of in outputs] for i in range(rows)], list(logits.float().log_softmax(-1))


def _answer(answer: Tensor, logits: Tensor, reference: Tensor) -> Answer:
    kl = (reference.exp() * (reference - logits)).sum(-1).clamp(min=0)
    nll = -logits.gather(-1, answer[:, None]).mean()
    return Answer(bool((logits.argmax(-1) == answer).all()), nll.item(), kl.tolist())


def _relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).square().sum() / b.square().sum().clamp(min=1e-30)).item()


def _elsewhere(cache: Cache) -> int:
    """Bytes, in 16 bits, of a cache's tensors outside the memory that attention reads."""
    held = [x for layer in cache.own for slab in layer.slabs for x in getattr(slab, "elsewhere", ())]
    return sum(x.nbytes * 2 // x.itemsize for x in held)


def _kept(sample: ContextSample, cache: Cache) -> dict[str, Any]:
    """The positions that each head of each layer keeps, and the share of the first question's needles that they
    include."""
    layers = [layer for layer in cache.own if layer.slabs]
    wanted = torch.cat(
        [torch.arange(*span) for span in sample.questions[0].needles] or [torch.empty(0, dtype=torch.long)]
    )
    survival = None
    if len(wanted):
        survival = [
            [torch.isin(wanted, kept.cpu().long()).float().mean().item() for kept in layer.kept_positions()[0]]
            for layer in layers
        ]
    return {"kept": [layer.lengths[0].tolist() for layer in layers], "survival": survival}


def _check(
    model: nn.Module,
    samples: Sequence[ContextSample],
    variants: Mapping[str, Any],
    visibilities: Sequence[str],
    write_tokens: int,
) -> None:
    if not samples:
        raise ValueError("`samples` (=[]) must hold at least one; `eval.contexts.haystack.samples` makes some")
    if unknown := set(visibilities) - set(VISIBILITIES) or not visibilities:
        raise ValueError(
            f"`visibilities` (={list(visibilities)}) must be some of {', '.join(VISIBILITIES)}; {unknown} is not"
        )
    if set(visibilities) <= _OF_SECOND and (single := [s.task for s in samples if len(s.questions) < 2]):
        raise ValueError(
            f"`visibilities` (={list(visibilities)}): {single[0]} has no second question; agnostic or visible works"
        )
    most = positions(model)
    for sample in samples:
        longest = len(sample.context) + sum(len(q.ask) + len(q.answer) for q in sample.questions[:2])
        longest = max(longest, len(sample.context) + len(sample.questions[0].ask) + write_tokens)
        if longest > most:
            raise ValueError(
                f"a sample of {sample.task} has {longest} tokens; this model has {most} positions: a smaller "
                "`length` works"
            )
