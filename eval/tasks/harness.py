"""One model's answers to one task of lm-eval. It changes neither the model in memory nor the process.

Imported only where it is needed, because importing lm-eval is slow.
"""

import copy
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.tasks.paired import calibration_error, fits, stderr
from eval.tasks.task_files import CONSENT
from eval.text.perplexity import bounded_exp
from eval.text.through_cache import attachment, logits_through_cache
from kernels.linear import fast_linear
from kernels.support.modes import evaluating

PRIMARY = (
    "acc_norm",
    "acc",
    "exact_match",
    "bits_per_byte",
)  # the first of them that a task has; else its own first metric
_QUESTION = 2000  # number of last characters that are kept: the question comes after its examples


@dataclass(frozen=True)
class Document:
    """One question and its answer.

    Attributes:
        doc_hash: lm-eval's, of the whole document; `doc_id` tells duplicates apart.
        question: the prompt, its last 2,000 characters.
        gold, answer: text of a choice, or generated text; an answer of None: none was requested, or it is another
            text.
        metrics: a number, or (log-likelihood, length) if the aggregate needs these.
        loglikelihoods: of the choices, or of the text; nats.
        choices: the texts between which the model chose; None for other questions, and in answers from before 26
            November 2026.
    """

    doc_id: int
    doc_hash: str
    question: str
    gold: str | None
    answer: str | None
    metrics: dict[str, Any]
    loglikelihoods: list[float] | None
    choices: list[str] | None = None


@dataclass(frozen=True)
class Answered:
    """One model's answers to one task.

    Attributes:
        metric: the primary one. If lm-eval's task has several filters, it is for the first; `values` and the documents'
            metrics have those for the others as <metric>_<filter>.
        values: {metric: value, metric_stderr: ...}; the values are lm-eval's.
        aggregates: {metric: name in `eval.tasks.paired.AGGREGATES`}, for metrics that can be resampled.
        seconds: time taken by answering.
    """

    task: str
    metric: str
    num_fewshot: int
    version: str
    higher_is_better: dict[str, bool]
    values: dict[str, float]
    aggregates: dict[str, str]
    documents: list[Document]
    generates: bool
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Answered":
        """Read the result of `to_json`; ValueError, KeyError or TypeError for any other text."""
        told = json.loads(text)
        return cls(**{**told, "documents": [Document(**document) for document in told["documents"]]})


class _InMemory(HFLM):
    """lm-eval's model without its progress bars and without its questions to the hub about the model.

    Likelihoods are computed in float32, whatever the model's dtype. A prompt without words is a beginning of text; the
    likelihood of an empty continuation is 1.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        super().__init__(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=torch.float32)

    def get_model_info(self) -> dict:
        return {}

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._encode_pair(*pair)) for pair in pairs])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context.strip():
            return super()._encode_pair(context, continuation)
        ids = self.tok_encode(context + continuation, add_special_tokens=False)
        start = self.prefix_token_id  # BOS, or EOS, which the tokenizer has (`check_tasks`)
        return ([start], ids) if ids[:1] != [start] else (ids[:1], ids[1:])

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = True, override_bs: int | None = None) -> list:
        asked = [request for request in requests if request[2]]
        with fast_linear():
            if not asked:
                found = iter(())
            elif attachment(self.model) is None:
                found = iter(super()._loglikelihood_tokens(asked, disable_tqdm=True, override_bs=override_bs))
            else:
                found = (self._told(text, self._through_cache(*ids)) for text, *ids in asked)
            return [next(found) if request[2] else self._told(request[0], (0.0, True)) for request in requests]

    def _told(self, text: Any, answer: tuple[float, bool]) -> tuple[float, bool]:
        """The answer, after its progress was reported as lm-eval does."""
        if text is not None:
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return answer

    def _through_cache(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation in nats, and whether it is the most likely one, token by token. The context
        without its last token is read as a prompt, and compressed."""
        ids = torch.tensor([(context + continuation)[-self.max_length - 1 : -1]], device=self.device)
        expected = torch.tensor(continuation, device=self.device)
        logits = logits_through_cache(self.model, ids, prefix=ids.shape[1] - len(continuation))[0]
        found = torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, expected[:, None])
        return float(found.double().sum()), bool((logits.argmax(-1) == expected).all())

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list:
        empty = [not request.args[0].strip() for request in requests]
        start = self.tokenizer.decode([self.prefix_token_id]) if any(empty) else ""
        started = [
            replace(request, arguments=(start + request.args[0], *request.args[1:])) if starts else request
            for request, starts in zip(requests, empty, strict=True)
        ]
        return super().generate_until(started, disable_tqdm=True)


class _Told:
    """Replaces lm-eval's store of answers, to report progress."""

    def __init__(self, tell: Callable[[], Any]) -> None:
        self.tell = tell

    def add_partial(self, *_: Any) -> None:
        self.tell()


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    limit: int | None,
    num_fewshot: int | None,
    batch_size: int,
    seed: int,
    chat: bool,
    tell: Callable[[], Any],
) -> Answered:
    """Ask one model one task's questions, in a block of `undisturbed`.

    Args:
        task: an lm-eval task; several models may answer it one after the other, with the same examples for each.
        tell: called at every answer.
    """
    started = time.perf_counter()
    if not len(task.eval_docs):
        raise ValueError(f"`tasks`: {task.task_name} has no questions")
    lm = _InMemory(model, _padding(tokenizer), batch_size)
    lm.set_cache_hook(_Told(tell))
    found = simple_evaluate(
        lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        apply_chat_template=chat,
        confirm_run_unsafe_code=os.environ.get(CONSENT) == "1",
    )
    return _answered(task, found, time.perf_counter() - started)


@contextmanager
def undisturbed(models: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, lm-eval may change modes, generation settings and random numbers; afterwards they are
    restored.

    lm-eval is prevented from tying weights again, which would overwrite an output layer that was compressed, or folded
    into, separately; and its perplexities of models that have diverged are infinite, where `math.exp` would raise.
    """
    generation = [
        (model, copy.deepcopy(model.generation_config)) for model in models if hasattr(model, "generation_config")
    ]
    states, log = (random.getstate(), np.random.get_state()), logging.getLogger("lm_eval")
    level, bars = log.level, datasets.are_progress_bars_disabled()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # a seed is set on all of them
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for model in {id(model): model for model in models}.values():
            stack.enter_context(patch.object(model, "tie_weights", lambda *_, **__: None))
            stack.enter_context(evaluating(model))
        bounded = SimpleNamespace(**vars(math) | {"exp": bounded_exp})
        stack.enter_context(patch("lm_eval.api.metrics.math", bounded))
        stack.enter_context(patch("lm_eval.evaluator.add_env_info"))  # asks pip and the processor at every call
        stack.enter_context(patch("lm_eval.api.task.tqdm", lambda rows, **_: rows))
        log.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            log.setLevel(level)
            if not bars:
                datasets.enable_progress_bars()
            random.setstate(states[0])
            np.random.set_state(states[1])
            for model, before in generation:
                model.generation_config = before


def _padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that lm-eval may change, with a padding token for which the model has an embedding; padding is masked."""
    own = copy.deepcopy(tokenizer)
    if own.pad_token_id is None:
        own.pad_token = own.eos_token or own.unk_token or own.convert_ids_to_tokens(0)
    return own


def _answered(task: Task, found: dict[str, Any], seconds: float) -> Answered:
    (name,) = found["samples"]
    samples, filters = (
        found["samples"][name],
        list(dict.fromkeys(sample["filter"] for sample in found["samples"][name])),
    )
    names = {
        (metric, f): metric if f == filters[0] else f"{metric}_{f}"
        for f in filters
        for sample in samples[:1]
        for metric in sample["metrics"]
    }
    metric = next((m for m in PRIMARY if (m, filters[0]) in names), samples[0]["metrics"][0])
    documents: dict[int, Document] = {}
    for sample in samples:
        of = {names[m, sample["filter"]]: value for m in sample["metrics"] if (value := _number(sample[m])) is not None}
        if sample["doc_id"] in documents:
            documents[sample["doc_id"]].metrics.update(of)
        else:
            documents[sample["doc_id"]] = _document(task, sample, metric, of)
    values, aggregates, better = {}, {}, {}
    for (m, f), own in names.items():
        value = found["results"][name].get(f"{m},{f}")
        if not isinstance(value, int | float):
            continue
        values[own], better[own] = float(value), bool(task.higher_is_better().get(m, True))
        items = [document.metrics.get(own) for document in documents.values()]
        aggregate = getattr(task.aggregation().get(m), "__name__", "")
        if fits(aggregate, items):
            aggregates[own] = aggregate
            if (error := stderr(items, aggregate)) is not None:
                values[f"{own}_stderr"] = error
    if all("acc" in d.metrics and d.choices and d.loglikelihoods for d in documents.values()):
        _add_calibration(documents.values(), values, aggregates, better)
    return Answered(
        name,
        metric,
        int(found["n-shot"].get(name) or 0),
        str(found["versions"].get(name)),
        better,
        values,
        aggregates,
        list(documents.values()),
        task.OUTPUT_TYPE == "generate_until",
        round(seconds, 3),
    )


def _add_calibration(
    documents: Iterable[Document], values: dict[str, float], aggregates: dict[str, str], better: dict[str, bool]
) -> None:
    """Add how far the model's certainty of its likeliest choice is from the share of right ones, as the metric ece."""
    for document in documents:
        own = np.asarray(document.loglikelihoods[: len(document.choices)])
        document.metrics["ece"] = [float(1 / np.exp(own - own.max()).sum()), document.metrics["acc"]]
    items = [document.metrics["ece"] for document in documents]
    values["ece"] = float(calibration_error(np.asarray(items, dtype=float)))
    aggregates["ece"], better["ece"] = "calibration_error", False
    if (error := stderr(items, aggregates["ece"])) is not None:
        values["ece_stderr"] = error


def _document(task: Task, sample: dict[str, Any], metric: str, metrics: dict[str, Any]) -> Document:
    contexts = [str(arguments[0]) for arguments in sample["arguments"]]
    question, gold, answered, likelihoods, choices = contexts[0], sample["target"], None, None, None
    if task.OUTPUT_TYPE == "generate_until":
        answered = str(sample["resps"][0][0])
    elif task.OUTPUT_TYPE == "loglikelihood_rolling":
        gold, likelihoods = None, [float(sample["filtered_resps"][0])]
    else:
        likelihoods = [float(one[0]) for one in sample["filtered_resps"]]
        if task.OUTPUT_TYPE == "multiple_choice":
            choices, question, gold = _choices(task, sample, contexts)
            answered = choices[_chosen(likelihoods[: len(choices)], choices, metric)]
        elif sample["filtered_resps"][0][1]:
            answered = str(gold)
    if isinstance(gold, list):
        gold = " | ".join(map(str, gold))
    return Document(
        int(sample["doc_id"]),
        str(sample["doc_hash"]),
        question[-_QUESTION:],
        None if gold is None else str(gold),
        answered,
        metrics,
        likelihoods,
        choices,
    )


def _choices(task: Task, sample: dict[str, Any], contexts: Sequence[str]) -> tuple[list[str], str, Any]:
    """The choices, the question that they answer and the right ones; if the choices are beginnings of a text, the
    question is its end."""
    doc = sample["doc"]
    choices = (
        [str(c) for c in task.doc_to_choice(doc)]
        if hasattr(task, "doc_to_choice")
        else [a[1] for a in sample["arguments"]]
    )
    beginnings = bool(getattr(task, "multiple_input", 0))
    gold = task.doc_to_text(doc) if beginnings else sample["target"]
    told = [
        choices[g] if isinstance(g, int) and -len(choices) <= g < len(choices) else g
        for g in (gold if isinstance(gold, list) else [gold])
    ]
    return choices, str(sample["arguments"][0][1]).strip() if beginnings else contexts[0], told


def _chosen(likelihoods: Sequence[float], choices: Sequence[str], metric: str) -> int:
    """Index of the answer according to the primary metric: by likelihood, per character (acc_norm) or per byte
    (acc_bytes)."""
    lengths = {"acc_norm": [len(c) for c in choices], "acc_bytes": [len(c.encode()) for c in choices]}.get(
        metric, [1] * len(choices)
    )
    return int(np.argmax([one / max(length, 1) for one, length in zip(likelihoods, lengths, strict=True)]))


def _number(value: Any) -> Any:
    """A number, or a pair of numbers, in the form of JSON; None for anything else."""
    if isinstance(value, tuple | list):
        pair = [_number(one) for one in value]
        return pair if len(pair) == 2 and all(isinstance(one, int | float) for one in pair) else None
    if isinstance(value, bool | int | np.integer | np.bool_):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    return None
