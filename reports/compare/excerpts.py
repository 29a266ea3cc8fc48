"""Answers that changed and texts that differ: counts, a few examples of each, and links to all others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eval.record.measured import Flip, GenerationRow, Paired, Sample
from reports.compare.variants import Variant
from reports.parts.text import clean, link

MAX_EXAMPLES, MAX_PROMPTS, MAX_TEXTS, MAX_ROWS = 24, 6, 8, 60


class ChangedAnswers(NamedTuple):
    """The number of changed answers of a recipe for one task, with a link to all of them."""

    variant: Variant
    task: str
    href: str
    of: Paired


class Flips(NamedTuple):
    """hidden: rows that are not shown; examples: of changed answers; more: examples that are not shown."""

    rows: list[ChangedAnswers]
    hidden: int
    examples: list[tuple[Variant, Flip]]
    more: int


def flips(found: Sequence[Variant], scale: float = 1.0) -> Flips:
    """The numbers of changed answers by recipe and task, and examples, taken from the recipes in turns."""
    rows, queues = [], []
    for v in (v for v in found if not v.baseline):
        tasks = v.run.measured.tasks
        for task, own in tasks.compared.get(v.name, {}).items():
            if own.right_to_wrong is not None:
                file = tasks.files.get(v.name, {}).get(task, "")
                rows.append(ChangedAnswers(v, clean(task, 60), link(v.run.href, file) if file else "", own))
        queues.append([(v, flip) for flip in tasks.flips.get(v.name, ())])
    every = [pair for i in range(max(map(len, queues), default=0)) for queue in queues for pair in queue[i : i + 1]]
    examples, kept = every[: max(2, round(MAX_EXAMPLES * scale))], rows[: max(4, round(MAX_ROWS * scale))]
    return Flips(kept, len(rows) - len(kept), examples, len(every) - len(examples))


@dataclass
class Prompt:
    """A prompt with the baseline's text and the samples of the recipes. more: texts that are not shown."""

    prompt: str
    temperature: float
    baseline: str
    texts: list[tuple[Variant, Sample]] = field(default_factory=list)
    more: int = 0


class Excerpts(NamedTuple):
    """hidden: rows that are not shown; more: prompts that are not shown; files: {link: run}; longest: characters of a
    text."""

    rows: list[tuple[Variant, GenerationRow]]
    hidden: int
    prompts: list[Prompt]
    more: int
    files: dict[str, str]
    longest: int


def generations(found: Sequence[Variant], scale: float = 1.0) -> Excerpts:
    """The first differences of generations, by recipe and temperature; some texts, and files of all texts."""
    rows: list[tuple[Variant, GenerationRow]] = []
    files: dict[str, str] = {}
    prompts: dict[tuple[str, float, str], Prompt] = {}
    for v in found:
        record = v.run.measured
        made = record.generation
        if made.file and (href := link(v.run.href, made.file)):
            files.setdefault(href, clean(v.run.key, 100))
        if v.baseline:
            continue
        rows += [(v, row) for row in made.rows if row.model == v.name]
        for sample in (s for s in made.samples or record.samples if v.name in s.texts):
            key = (sample.prompt, sample.temperature or 0.0, sample.texts.get("baseline", ""))
            prompts.setdefault(key, Prompt(*key)).texts.append((v, sample))
    shown = sorted(prompts.values(), key=lambda one: -len(one.texts))[: max(1, round(MAX_PROMPTS * scale))]
    texts = max(2, round(MAX_TEXTS * scale))
    for one in shown:
        one.more = max(0, len(one.texts) - texts)
        one.texts = one.texts[:texts]
    kept, most = rows[: max(4, round(MAX_ROWS * scale))], max(4, round(20 * scale))
    longest = max(120, round(600 * min(1.0, scale)))
    return Excerpts(
        kept, len(rows) - len(kept), shown, len(prompts) - len(shown), dict(list(files.items())[:most]), longest
    )
