"""Every question of a run's tasks with the answers of its models, from the files beside the record."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from eval.record.reading import row
from eval.record.rows import RunRecord
from reports.parts.plots import finite
from reports.parts.text import clean

MAX_QUESTIONS = 150  # of all tasks together; the files have the others
MAX_MODELS = 4
_READ = 5000  # lines of a file
_ORDER = ("right to wrong", "wrong to right", "other answer, as right", "same answer", "")


@dataclass(frozen=True)
class SampleLine:
    """A line of a file of answers (`eval.tasks.tasks.TaskScores.save`)."""

    doc_id: int | None
    doc_hash: str
    question: str
    gold: str
    answer: str
    right: float | None
    loglikelihoods: tuple[float, ...]
    choices: tuple[str, ...]

    def probability(self, choice: str) -> float | None:
        """The model's probability of a choice, if it had to name one of them; None if it had no choices."""
        logs = self.loglikelihoods[: len(self.choices)]
        if choice not in self.choices or len(logs) < len(self.choices) or not finite(*logs):
            return None
        weights = [math.exp(one - max(logs)) for one in logs]
        return weights[self.choices.index(choice)] / sum(weights)


class ModelAnswer(NamedTuple):
    """A model's answer, its probability, and that of the expected answer."""

    text: str
    right: bool | None
    p: float | None
    p_expected: float | None


class AskedQuestion(NamedTuple):
    """A question with the answers of the models. changed: how the compressed model's differs from the baseline's."""

    task: str
    number: int | None
    question: str
    expected: str
    answers: list[ModelAnswer]
    changed: str


class Answers(NamedTuple):
    """left: questions that are not shown."""

    models: list[str]
    questions: list[AskedQuestion]
    left: int


def context(run: RunRecord, folder: Path | None) -> Answers | None:
    """The data for templates/answers.html; None without files.

    Args:
        folder: of the record, in which its files lie.
    """
    files = run.tasks.files
    models = [name for name in run.models if name in files][:MAX_MODELS]
    if folder is None or len(models) < 2 or models[0] != "baseline":
        return None
    found: list[AskedQuestion] = []
    for task in files["baseline"]:
        found += _questions(task, [_lines(folder, files[model].get(task)) for model in models])
    found.sort(key=lambda one: _ORDER.index(one.changed))
    return Answers(models, found[:MAX_QUESTIONS], len(found[MAX_QUESTIONS:])) if found else None


def _lines(folder: Path, file: str | None) -> dict[tuple, SampleLine]:
    """The lines of a file in the folder, by question; {} if it is not there, lies elsewhere, or is damaged."""
    path = (folder / (file or "")).resolve()
    if not file or not path.is_relative_to(folder.resolve()):
        return {}
    try:
        with path.open(encoding="utf-8") as text:
            lines = [
                row(SampleLine, made) for made in map(json.loads, islice(text, _READ)) if isinstance(made, Mapping)
            ]
    except (OSError, ValueError, RecursionError):
        return {}
    return {(line.doc_id, line.doc_hash): line for line in lines}


def _questions(task: str, of: list[dict[tuple, SampleLine]]) -> Iterator[AskedQuestion]:
    for key, first in of[0].items():
        lines = [lines.get(key) for lines in of]
        answers = [_answer(line) for line in lines]
        shown = (clean(task, 60), first.doc_id, _end(first.question, 500), clean(first.gold, 200))
        yield AskedQuestion(*shown, answers, _changed(*lines[:2]))


def _answer(line: SampleLine | None) -> ModelAnswer:
    if line is None:
        return ModelAnswer("", None, None, None)
    right = None if line.right not in (0.0, 1.0) else bool(line.right)
    return ModelAnswer(clean(line.answer, 200), right, line.probability(line.answer), line.probability(line.gold))


def _changed(before: SampleLine, after: SampleLine | None) -> str:
    if after is None:
        return ""
    if before.right != after.right and {before.right, after.right} == {0.0, 1.0}:
        return "right to wrong" if before.right else "wrong to right"
    return "same answer" if before.answer == after.answer else "other answer, as right"


def _end(text: str, limit: int) -> str:
    """The end of a long text: there a prompt has its question."""
    text = clean(text, 4000).strip()
    return text if len(text) <= limit else f"[…] {text[-limit:].lstrip()}"
