"""Tasks of lm-eval on compressed models in memory: scores, and the answers that compression changed.

lm-eval's own `use_cache` can return the answers of another model; here answers are stored under hashes of the model,
the task and all settings. With a compressed KV cache, the context of a continuation is read as a prompt and compressed
before the continuation is scored (`harness.py`); for the likelihood of a whole text, the text is read in one pass,
without a cache.
"""

import hashlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from eval.machine.processor import cpu_name, instructions_sha256
from eval.record.files import write_whole
from eval.record.html import html_table
from eval.record.measured import Flip, Paired, TaskRow, Tasks, TaskSettings
from eval.tasks.fingerprint import model_sha256, tokenizer_sha256
from eval.tasks.paired import compare, finite, fits, stderr
from eval.tasks.task_files import check_names, find_tasks
from eval.text.through_cache import attachment

if TYPE_CHECKING:
    from eval.tasks.harness import Answered, Document

FLIPS = 12  # examples of a model and direction in the record; the files of samples have all
_TURNS = {(1, 0): "right to wrong", (0, 1): "wrong to right"}
_SHOWN = 400  # characters of a text in the record
_KEPT_AS = 4  # format number; changed whenever stored answers become unusable
_VERSIONS = ("lm-eval", "transformers", "tokenizers", "torch", "datasets", "numpy")


@dataclass(repr=False)
class TaskScores:
    """The answers of all models.

    Attributes:
        answers: {model: {task: Answered}}; the other models are compared with the first.
        groups: {requested group: its tasks}; its score is over all its questions.
        cached: {model: tasks whose answers were already stored}.
        notes: necessary information for readers.
        files: {model: {task: file of its samples}}, relative to the folder in which they were saved.
    """

    answers: "dict[str, dict[str, Answered]]" = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    settings: TaskSettings = field(default_factory=TaskSettings)
    cached: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, dict[str, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TaskScores({len(self.answers)} models, {len(self._first)} tasks)"

    def _repr_html_(self) -> str:
        models = list(self.answers)
        lines = (
            (name, of.metric, len(of.documents), *(self._cell(model, name) for model in models))
            for name, of in self._first.items()
        )
        return html_table(("task", "metric", "n", *models), lines)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {metric: value}} for the record: <metric>_<task> with lm-eval's names, with _stderr. A value that is
        not finite stays, and counts against its model; a standard error does not."""
        found: dict[str, dict[str, float]] = {}
        for model, tasks in self._scored.items():
            own = found.setdefault(model, {})
            for name, of in tasks.items():
                for metric, value in of.values.items():
                    plain = metric.removesuffix("_stderr")
                    if plain == metric or finite(value) is not None:
                        own[f"{plain}_{name}{metric[len(plain) :]}"] = value
        return found

    @cached_property
    def compared(self) -> dict[str, dict[str, Paired]]:
        """{model: {task: its comparison with the first model}}: `eval.tasks.paired.compare` of the primary metric, by
        question."""
        others = list(self._scored.items())[1:]
        return {
            model: {name: _compared(self._first[name], of) for name, of in tasks.items()} for model, tasks in others
        }

    def found(self) -> Tasks:
        """All results except the samples: the record's entry `tasks`."""
        rows = tuple(
            TaskRow(
                name,
                of.metric,
                len(of.documents),
                of.num_fewshot,
                of.version,
                of.higher_is_better.get(of.metric, True),
                {model: round(tasks[name].seconds, 1) for model, tasks in self._scored.items()},
            )
            for name, of in self._first.items()
        )
        return Tasks(
            self.settings,
            rows,
            self.compared,
            self._flips(),
            self.files,
            {group: tuple(of) for group, of in self.groups.items()},
            tuple(self.notes),
            {model: tuple(of) for model, of in self.cached.items()},
        )

    def save(self, folder: str | Path) -> dict[str, dict[str, str]]:
        """Write every model's answers to every task, one line per question: <folder>/samples/<model>.<task>.jsonl.

        A line has task, model, doc_id, doc_hash, question, gold, answer, right (the primary metric's value), metrics,
        loglikelihoods, and choices. Lines of two models belong to the same question if doc_hash and doc_id are the
        same.

        Returns:
            {model: {task: path relative to the folder}}, which `found` then also contains.
        """
        names, files = set(), {}
        for model, tasks in self.answers.items():
            for task, of in tasks.items():
                name = _safe(f"{_safe(model)}.{_safe(task)}", names, f"{model}\n{task}")
                lines = [
                    {
                        "task": task,
                        "model": model,
                        "doc_id": d.doc_id,
                        "doc_hash": d.doc_hash,
                        "question": d.question,
                        "gold": d.gold,
                        "answer": d.answer,
                        "right": d.metrics.get(of.metric),
                        "metrics": d.metrics,
                        "loglikelihoods": d.loglikelihoods,
                        "choices": d.choices,
                    }
                    for d in of.documents
                ]
                text = "".join(json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
                write_whole(text, Path(folder) / "samples" / f"{name}.jsonl")
                files.setdefault(model, {})[task] = f"samples/{name}.jsonl"
        self.files = files
        return files

    @cached_property
    def _scored(self) -> "dict[str, dict[str, Answered]]":
        """The answers, with each group as one more task."""
        found = {}
        for model, tasks in self.answers.items():
            wholes = {name: _pooled(name, [tasks[part] for part in parts]) for name, parts in self.groups.items()}
            found[model] = {**{name: whole for name, whole in wholes.items() if whole}, **tasks}
        return found

    @property
    def _first(self) -> "dict[str, Answered]":
        return next(iter(self._scored.values()), {})

    def _cell(self, model: str, name: str) -> str:
        of = self._scored[model][name]
        value, error = of.values.get(of.metric), of.values.get(f"{of.metric}_stderr")
        text = ("" if value is None else f"{value:.4g}") + ("" if error is None else f" ± {error:.2g}")
        if (beside := self.compared.get(model, {}).get(name)) is None:
            return text
        if beside.recovery is not None:
            between = [beside.recovery_low, beside.recovery_high]
            shown = "" if None in between else f" [{between[0] * 100:.1f}, {between[1] * 100:.1f}]"
            text += f"; {beside.recovery * 100:.1f} %{shown}"
        if beside.right_to_wrong is not None:
            text += f"; −{beside.right_to_wrong} +{beside.wrong_to_right}, p {beside.mcnemar_p:.2g}"
        return text

    def _flips(self) -> dict[str, tuple[Flip, ...]]:
        found: dict[str, tuple[Flip, ...]] = {}
        for model, tasks in list(self.answers.items())[1:]:
            found[model] = ()
            for turn, direction in _TURNS.items():
                of_tasks = [_turned(self._first[name], of, turn, direction) for name, of in tasks.items()]
                mixed = (flip for row in zip_longest(*of_tasks) for flip in row if flip)  # some of every task
                found[model] += tuple(islice(mixed, FLIPS))
        return found


def check_tasks(
    tasks: Sequence[str],
    *,
    task_path: str = "",
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
) -> None:
    """Raise ValueError, before a model is loaded or compressed, if these tasks cannot be answered.

    That is: an unknown task (the message has similar names), a task file whose data do not exist, a task whose data are
    on the hub while the hub cannot be reached, a task whose scoring runs code written by a model (unless lm-eval's own
    variable HF_ALLOW_CODE_EVAL=1 is in the environment), or a number out of range. Downloads by a task's own functions
    are not checked.
    """
    if isinstance(tasks, str) or not tasks or not all(isinstance(name, str) and name.strip() for name in tasks):
        raise ValueError(f"`tasks` (={tasks!r}) must be a list of names of tasks, like ['hellaswag', 'piqa']")
    if len(set(tasks)) < len(tasks):
        raise ValueError(
            f"`tasks` (={list(tasks)!r}) names {next(t for t in tasks if list(tasks).count(t) > 1)!r} twice"
        )
    for knob, value, least, none in (
        ("limit", limit, 1, True),
        ("num_fewshot", num_fewshot, 0, True),
        ("batch_size", batch_size, 1, False),
    ):
        if not (none and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(
                f"`{knob}` (={value!r}) must be a whole number of at least {least}{', or None' if none else ''}"
            )
    check_names(tasks, task_path, num_fewshot)


def answer_tasks(
    models: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    task_path: str = "",
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    cache_path: str | Path | None = None,
) -> TaskScores:
    """Answer lm-eval's tasks with every model.

    Args:
        models: transformers decoders in evaluation mode, on their devices; the others are compared with the first,
            "baseline".
        tasks: names of task files, or of lm-eval's own tasks, groups and tags.
        task_path: folder of task files (lm-eval's YAML), whose data may be beside them or in any folder above; "": the
            folder of the local data sets, if there is one.
        limit: number of first questions of each task; None: all.
        num_fewshot: number of examples before each question; None: the task's own number. A task that fixes it at 0
            keeps 0, as in lm-eval.
        batch_size: number of texts at a time. Longer batches are padded, which rounds differently.
        seed: of the examples drawn, and of all random numbers while a task runs (lm-eval draws examples with 1234).
        chat: put questions into the tokenizer's chat template.
        cache_path: folder in which the answers of each model and task are stored at once, so that a killed run can
            continue.

    Raises:
        ValueError: as in `check_tasks`; no models; or a tokenizer without a chat template or an end of text.
    """
    check_tasks(tasks, task_path=task_path, limit=limit, num_fewshot=num_fewshot, batch_size=batch_size)
    _check(models, tokenizer, seed, chat)
    from eval.tasks.harness import Answered, answer, undisturbed  # lm-eval takes seconds to import

    asked = {"limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size, "seed": seed, "chat": chat}
    about = {name: _about(model, tokenizer, asked) for name, model in models.items()} if cache_path else {}
    scores = TaskScores({name: {} for name in models}, cached={name: [] for name in models})
    with undisturbed(list(models.values())), tqdm(desc="tasks", unit="task") as progress:
        found, scores.groups = find_tasks(tasks, task_path, num_fewshot)
        progress.reset(len(found) * len(models))
        for task in found:
            built = None
            for name, model in models.items():
                progress.set_postfix_str(f"{task.name}, {name}")
                path = _kept_at(cache_path, about[name], task.name, task.identity) if cache_path else None
                answers = _read(path)
                if answers is None:
                    built = built or task.build()
                    answers = answer(model, tokenizer, built, **asked, tell=_counting(progress, f"{task.name}, {name}"))
                    if path:
                        write_whole(answers.to_json(), path)
                        answers = Answered.from_json(answers.to_json())  # new answers have the same form as stored ones
                else:
                    scores.cached[name].append(task.name)
                scores.answers[name][task.name] = answers
                progress.update()
    first = next(iter(models.values()))
    scores.settings = TaskSettings(
        **asked,
        task_path=str(task_path),
        lm_eval=importlib.metadata.version("lm-eval"),
        dtype=str(first.dtype).removeprefix("torch."),
        device=str(first.device),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    scores.notes = _notes(models, scores)
    return scores


def _check(models: Mapping[str, nn.Module], tokenizer: PreTrainedTokenizerBase, seed: int, chat: bool) -> None:
    if not models:
        raise ValueError("`models` (={}) must hold one at least: {'baseline': model}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` (={seed!r}) must be a whole number from 0 to {2**32 - 1}")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "`tokenizer` has no token for the end of a text, at which generations stop; `eos_token` sets one"
        )
    if chat and not tokenizer.chat_template:
        raise ValueError("`chat` (=True): this tokenizer has no chat template; chat=False asks as plain text")


def _about(model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: dict[str, Any]) -> list[Any]:
    """Everything on which the answers of a model depend, except the task."""
    versions = [importlib.metadata.version(package) for package in _VERSIONS]
    return [
        _KEPT_AS,
        model_sha256(model),
        tokenizer_sha256(tokenizer),
        asked,
        str(model.dtype),
        _device(model.device),
        versions,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]


def _device(device: torch.device) -> str:
    """The name of the GPU, or the processor with the instructions that are used of it: others round differently."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    return f"cpu {cpu_name()} {instructions_sha256()} {torch.backends.cpu.get_cpu_capability()}"


def _kept_at(folder: str | Path, about: list[Any], task: str, identity: str) -> Path:
    digest = hashlib.sha256(json.dumps([about, task, identity], sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{_safe(task)}.{digest[:32]}.json"


def _read(path: Path | None) -> "Answered | None":
    """The stored answers; None if there are none, or none that can be read."""
    from eval.tasks.harness import Answered

    if path is None or not path.is_file():
        return None
    try:
        return Answered.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError):
        return None


def _counting(progress: tqdm, about: str) -> Any:
    done, shown = 0, time.monotonic()

    def tell() -> None:
        nonlocal done, shown
        done += 1
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            progress.set_postfix_str(f"{about}: {done} answers")

    return tell


def _notes(models: Mapping[str, nn.Module], scores: TaskScores) -> list[str]:
    lost = [
        f"{metric} of {model} is not finite ({value}), which counts against it"
        for model, own in scores.metrics.items()
        for metric, value in own.items()
        if not math.isfinite(value)
    ]
    read = [name for name, of in next(iter(scores.answers.values())).items() if not of.generates]
    compressed = [name for name, model in models.items() if attachment(model) is not None]
    if not (read and compressed):
        return lost
    return [
        *lost,
        f"{', '.join(compressed)}: in tasks that are scored by likelihood ({', '.join(read)}), what comes before an "
        "answer is read as a prompt and compressed, and the answer is scored through the compressed KV cache",
    ]


def _joined(baseline: "Answered", other: "Answered") -> "list[tuple[Document, Document]]":
    """The same questions of both: by document hash, and by number if two documents are the same."""
    of = {(d.doc_hash, d.doc_id): d for d in other.documents}
    return [(d, of[d.doc_hash, d.doc_id]) for d in baseline.documents if (d.doc_hash, d.doc_id) in of]


def _compared(baseline: "Answered", other: "Answered") -> Paired:
    metric, pairs = baseline.metric, _joined(baseline, other)
    a, b = ([pair[i].metrics.get(metric) for pair in pairs] for i in (0, 1))
    aggregate, better = baseline.aggregates.get(metric, ""), baseline.higher_is_better.get(metric, True)
    if fits(aggregate, a) and fits(aggregate, b):
        return compare(a, b, metric, aggregate=aggregate, higher_is_better=better)
    before, after = finite(baseline.values.get(metric)), finite(other.values.get(metric))
    known = before is not None and after is not None
    over, under = (after, before) if better else (before, after)
    recovery, gap = over / under if known and under else None, after - before if known else None
    return Paired(metric, len(pairs), before, after, recovery, difference=gap)


def _turned(baseline: "Answered", other: "Answered", turn: tuple[int, int], direction: str) -> list[Flip]:
    return [
        Flip(
            baseline.task,
            a.doc_id,
            direction,
            _end(a.question),
            _start(a.gold),
            _start(a.answer),
            _start(b.answer),
            a.doc_hash,
        )
        for a, b in _joined(baseline, other)
        if (a.metrics.get(baseline.metric), b.metrics.get(baseline.metric)) == turn
    ]


def _pooled(name: str, parts: "Sequence[Answered]") -> "Answered | None":
    """A group as one task of all its questions; None if its tasks are not scored by the same mean."""
    metric = parts[0].metric
    if any(of.metric != metric or of.aggregates.get(metric) != "mean" for of in parts):
        return None
    documents = [replace(d, doc_hash=f"{of.task}:{d.doc_hash}") for of in parts for d in of.documents]
    metrics = [
        m
        for m, aggregate in parts[0].aggregates.items()
        if all(of.aggregates.get(m) == aggregate == "mean" for of in parts)
    ]
    values: dict[str, float] = {}
    for m in metrics:
        items = [document.metrics[m] for document in documents]
        values |= {m: sum(items) / len(items), f"{m}_stderr": stderr(items) or 0.0}
    return replace(
        parts[0],
        task=name,
        values=values,
        documents=documents,
        aggregates=dict.fromkeys(metrics, "mean"),
        seconds=sum(of.seconds for of in parts),
    )


def _start(text: str | None) -> str | None:
    return text if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _end(text: str) -> str:
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"


def _safe(name: str, taken: set[str] | None = None, whole: str = "") -> str:
    """A name for a file; of two names that would be the same, the later gets a hash."""
    short = re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII).strip("._")[:100] or "model"
    if taken is None:
        return short
    if short.lower() in taken:  # some file systems ignore case
        short = f"{short}.{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    taken.add(short.lower())
    return short
