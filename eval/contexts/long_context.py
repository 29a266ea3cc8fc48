"""Questions about long contexts, answered from compressed caches: exact matches, likelihood and divergence.

A context is read once; its cache is then compressed by every variant, and each answers from its own. Five
visibilities; in three of them a compressed cache serves a second question, as in SCBench (arXiv:2412.10319):

    agnostic    the question comes after compression: the cache did not know what would be asked
    another     the same of a second question, from a fresh copy of the compressed cache, as of another request
    turns       the first question and its answer are read after compression, then the second one comes
    visible     the question, but for its last token, was read before compression
    follow-up   the first question and its answer were read before compression, then the second one comes

Answers are teacher-forced: every token of the true answer is the most likely one exactly if greedy decoding writes the
answer.
"""

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Cache

from eval.contexts.haystack import Question, Sample

VISIBILITIES = ("agnostic", "another", "turns", "visible", "follow-up")
_OF_SECOND = {"another", "turns", "follow-up"}  # those that ask the second question
FULL = "full"  # the variant that everything is held against
_RESAMPLES = 2000
_AT_ONCE = 16  # caches that are asked in one pass, where that is known how; all of them are held until then


class Answer(NamedTuple):
    """One answer: is it exact, its negative log-likelihood (nats per token), and the KL from the full cache's, token by
    token."""

    exact: bool
    nll: float
    kl: list[float]


@dataclass(repr=False)
class LongContextScores:
    """What was measured.

    Attributes:
        answers: {variant: {(task, length, visibility): [Answer of each sample]}}.
        depths: {(task, length): [depth of each sample's needle, or None]}.
        cache_bytes: {variant: {length: bytes of the cache in 16 bits, mean over samples}}, after compression, with all
            that the cache holds beside keys and values.
        elsewhere_bytes: those of them that lie outside of the memory that attention reads.
        survival: {variant: {(task, length): [layers][heads]}}: share of the needle's tokens that stay.
        kept: {variant: {length: [layers][heads]}}: positions that stay, mean over samples.
        errors: {variant: [layers]}: ||a - a'||² / ||a||² of the attention's outputs for question and answer.
        seconds: {variant: [compression of each sample]}. These four are of the first visibility that was asked for.
    """

    answers: dict[str, dict[tuple[str, int, str], list[Answer]]] = field(default_factory=dict)
    depths: dict[tuple[str, int], list[float | None]] = field(default_factory=dict)
    cache_bytes: dict[str, dict[int, float]] = field(default_factory=dict)
    elsewhere_bytes: dict[str, dict[int, float]] = field(default_factory=dict)
    survival: dict[str, dict[tuple[str, int], Any]] = field(default_factory=dict)
    kept: dict[str, dict[int, Any]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LongContextScores({len(self.answers)} variants, {sum(map(len, self.depths.values()))} contexts)"

    def _repr_html_(self) -> str:
        seen = list(dict.fromkeys(visibility for groups in self.answers.values() for _, _, visibility in groups))
        head = "".join(
            f"<th>{escape(name)}</th>"
            for name in ("cache", "kB", *(f"exact, {v}" for v in seen), *(f"KL, {v}" for v in seen))
        )
        rows = ""
        for name, groups in self.answers.items():
            by = [[a for (_, _, v), answers in groups.items() if v == one for a in answers] for one in seen]
            cells = [
                f"{max(self.cache_bytes[name].values()) / 1e3:,.0f}",
                *(f"{np.mean([a.exact for a in of]) * 100:.0f} %" for of in by),
                *(f"{np.mean([np.mean(a.kl) for a in of]):.3g}" for of in by),
            ]
            shown = "".join(f"<td>{cell}</td>" for cell in cells)
            rows += f"<tr><th style='text-align:left'>{escape(name)}</th>{shown}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def metrics(self) -> dict[str, dict[str, float]]:
        """{variant: {metric: value}} for the record: exact_<task>_<length>_<visibility>, nll_..., kl_..., with
        _stderr."""
        found: dict[str, dict[str, float]] = {}
        for name, groups in self.answers.items():
            mine = found.setdefault(name, {})
            for (task, length, visibility), answers in groups.items():
                about = f"{task}_{length}_{visibility.replace('-', '_')}"
                for metric, values in (
                    ("exact", [float(a.exact) for a in answers]),
                    ("nll", [a.nll for a in answers]),
                    ("kl", [sum(a.kl) / len(a.kl) for a in answers]),
                ):
                    mine[f"{metric}_{about}"] = float(np.mean(values))
                    if len(values) > 1:
                        mine[f"{metric}_{about}_stderr"] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
            for length, size in self.cache_bytes.get(name, {}).items():
                mine[f"cache_bytes_{length}"] = size
        return found

    def found(self) -> dict[str, Any]:
        """Everything as JSON, as the record keeps it under `cache`.

        answers: rows {variant, task, length, visibility, exact, nll, kl: one number a sample, kl_by_token: means};
            against: by
        variant and visibility the difference of exact answers from the full cache's, with its interval; the rest as
        attributes.
        """
        rows = [
            {
                "variant": name,
                "task": task,
                "length": length,
                "visibility": visibility,
                "exact": [int(a.exact) for a in answers],
                "nll": [round(a.nll, 5) for a in answers],
                "kl": [round(sum(a.kl) / len(a.kl), 5) for a in answers],
                "kl_by_token": _by_token([a.kl for a in answers]),
            }
            for name, groups in self.answers.items()
            for (task, length, visibility), answers in groups.items()
        ]
        visibilities = dict.fromkeys(row["visibility"] for row in rows)
        return {
            "answers": rows,
            "against": {
                name: {v: self.against(name, visibility=v) for v in visibilities}
                for name in self.answers
                if name != FULL
            },
            "depths": [{"task": t, "length": n, "depths": d} for (t, n), d in self.depths.items()],
            "cache_bytes": self.cache_bytes,
            "elsewhere_bytes": self.elsewhere_bytes,
            "kept": self.kept,
            "errors": self.errors,
            "survival": {
                name: [{"task": t, "length": n, "share": share} for (t, n), share in of.items()]
                for name, of in self.survival.items()
            },
            "seconds": {name: float(np.median(values)) for name, values in self.seconds.items()},
        }

    def against(self, name: str, other: str = FULL, *, visibility: str, seed: int = 0) -> tuple[float, float, float]:
        """Difference of the share of exact answers over all tasks and lengths, and its 95 % interval by paired
        bootstrap."""
        pairs = [
            float(a.exact) - float(b.exact)
            for key, answers in self.answers[name].items()
            if key[2] == visibility
            for a, b in zip(answers, self.answers[other][key], strict=True)
        ]
        return bootstrap(pairs, seed)


def _by_token(kls: Sequence[Sequence[float]]) -> list[float]:
    """Mean KL of the first token of the answers, the second, and so on as far as half of them go."""
    longest = sorted(map(len, kls))[len(kls) // 2]
    return [round(float(np.mean([kl[i] for kl in kls if i < len(kl)])), 5) for i in range(longest)]


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the values, and the 2.5th and 97.5th percentile of the means of 2,000 resamples."""
    x = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(x), (_RESAMPLES, len(x)))
    low, high = np.percentile(x[drawn].mean(1), (2.5, 97.5))
    return float(x.mean()), float(low), float(high)


@torch.no_grad()
def score_long_context(
    model: nn.Module,
    samples: Sequence[Sample],
    *,
    observer: Callable[[], Cache],
    variants: Mapping[str, Callable[[Cache], Cache]],
    visibilities: Sequence[str] = VISIBILITIES,
    finished: MutableMapping[tuple[int, str], dict[str, Any]] | None = None,
    abreast: Callable[[Sequence[Cache]], Cache] | None = None,
) -> LongContextScores:
    """Ask the samples' questions of every variant's cache.

    Args:
        model: a transformers decoder that takes the caches.
        observer: makes an empty cache that a context is read into.
        variants: {name: read cache -> a new, compressed one, the read one as it was}; "full" is always among what is
            scored. Caches have `nbytes_16`, and `own` layers with `lengths`, `kept_positions()`, and `slabs`, which may
            say what of them lies `elsewhere`, as tensors.
        visibilities: some of VISIBILITIES; another, turns and follow-up need samples with two questions.
        finished: what was found, JSON by a sample's number and a variant: what is there is not asked again. A context
            of which anything is missing is read again, and the full cache answers again.
        abreast: of several variants' caches makes one, as of a batch whose row i is cache i, so that the layers of a
            pass are computed once for all; without it every cache is asked alone.

    Raises:
        ValueError: visibilities that are not known, or samples that do not fit them or the model.
    """
    _check(model, samples, variants, visibilities)
    finished = {} if finished is None else finished
    ways = {FULL: variants.get(FULL, _untouched), **variants}
    progress = tqdm(total=len(samples) * len(visibilities) * len(ways), desc="long contexts", unit="answer")
    for i, sample in enumerate(samples):
        missing = {name: way for name, way in ways.items() if (i, name) not in finished}
        progress.update(len(visibilities) * (len(ways) - len(missing)))
        if missing:
            asked = {FULL: ways[FULL], **missing}
            with _flat_head(model):
                found = _ask_all(model, sample, observer(), asked, visibilities, missing, progress, abreast)
            for name in missing:
                finished[i, name] = found[name]
    progress.close()
    return _collected(samples, [{name: finished[i, name] for name in ways} for i in range(len(samples))])


def _ask_all(
    model: nn.Module,
    sample: Sample,
    read: Cache,
    ways: Mapping[str, Callable[[Cache], Cache]],
    visibilities: Sequence[str],
    counted: Container[str],
    progress: tqdm,
    abreast: Callable[[Sequence[Cache]], Cache] | None = None,
) -> dict[str, dict[str, Any]]:
    """What one sample gave, as JSON: {variant: {"answers": {visibility: Answer}, "cache": of the first visibility}}.
    The answers of the `counted` variants are progress."""
    found: dict[str, dict[str, Any]] = {name: {"answers": {}} for name in ways}
    first, device = sample.questions[0], next(model.parameters()).device
    _feed(model, sample.context, read, device)
    last = max(map(VISIBILITIES.index, visibilities))
    for visibility in VISIBILITIES[: last + 1]:
        question = sample.questions[-1] if visibility in _OF_SECOND else first
        said = torch.cat([first.ask, first.answer]) if visibility == "turns" else first.ask[:0]  # behind compression
        if visibility == "visible":
            _feed(model, first.ask[:-1], read, device)
            question = Question(first.ask[-1:], first.answer, first.needles)
        elif visibility == "follow-up":
            _feed(model, torch.cat([first.ask[-1:], first.answer]), read, device)
        if visibility not in visibilities or (visibility in _OF_SECOND and len(sample.questions) < 2):
            continue
        for names in _groups(list(ways), _AT_ONCE if abreast else 1):
            progress.set_postfix_str(f"{sample.task} {sample.length}, {visibility}, {names[-1]}")
            caches = []
            for name in names:
                start = time.perf_counter()
                caches.append(cache := ways[name](read))
                seconds = time.perf_counter() - start
                of = found[name].setdefault("cache", {})
                if not of:
                    of |= {"bytes": cache.nbytes_16, "elsewhere": _elsewhere(cache), "seconds": seconds}
                    of |= _kept(sample, cache)
                cache.paused = True  # what comes now is not a prompt to compress
            together = caches[0] if abreast is None else abreast(caches)
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


def _collected(samples: Sequence[Sample], found: Sequence[dict[str, dict[str, Any]]]) -> LongContextScores:
    scores = LongContextScores()
    for sample, variants in zip(samples, found, strict=True):
        scores.depths.setdefault((sample.task, sample.length), []).append(sample.depth)
        for name, of in variants.items():
            own = scores.answers.setdefault(name, {})
            for visibility, answer in of["answers"].items():
                own.setdefault((sample.task, sample.length, visibility), []).append(Answer(*answer))
    for name in scores.answers:
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
    """Give the head hidden states whose tokens lie one after another.

    Those of the last tokens of a pass do not, and on a CPU torch then multiplies them by a copy of the whole matrix,
    which in 16 bits takes longer than all layers.
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
    """The names in their order, so many at a time."""
    return [names[i : i + size] for i in range(0, len(names), size)]


def _feed(model: nn.Module, ids: Tensor, cache: Cache, device: torch.device, rows: int = 1) -> None:
    if len(ids):
        model(ids.to(device).expand(rows, -1), past_key_values=cache, use_cache=True, logits_to_keep=1)


def _ask(
    model: nn.Module, question: Question, cache: Cache, device: torch.device, rows: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For every row of the cache, attention outputs by layer for all tokens of question and answer, [q + a - 1, ...]
    each, and log-probabilities of the answer's tokens, [a, vocabulary]."""
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
    """Bytes, in 16 bits, of what a cache holds outside of the memory that attention reads."""
    held = [x for layer in cache.own for slab in layer.slabs for x in getattr(slab, "elsewhere", ())]
    return sum(x.nbytes * 2 // x.itemsize for x in held)


def _kept(sample: Sample, cache: Cache) -> dict[str, Any]:
    """Positions that each head of each layer keeps, and the share of the first question's needles that is among
    them."""
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
    model: nn.Module, samples: Sequence[Sample], variants: Mapping[str, Any], visibilities: Sequence[str]
) -> None:
    if not samples:
        raise ValueError("`samples` (=[]) must hold at least one; `eval.contexts.haystack.samples` makes some")
    if unknown := set(visibilities) - set(VISIBILITIES) or not visibilities:
        raise ValueError(
            f"`visibilities` (={list(visibilities)}) must be some of {', '.join(VISIBILITIES)}; {unknown} is not"
        )
    if set(visibilities) <= _OF_SECOND and (single := [s.task for s in samples if len(s.questions) < 2]):
        raise ValueError(
            f"`visibilities` (={list(visibilities)}): {single[0]} has no second question; agnostic or visible would do"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    for sample in samples:
        longest = len(sample.context) + sum(len(q.ask) + len(q.answer) for q in sample.questions[:2])
        if longest > positions:
            raise ValueError(
                f"a sample of {sample.task} has {longest} tokens; this model has {positions} positions: a smaller "
                "`length` would do"
            )
