"""Answers that changed and texts that differ: counts, a few examples of each, and links to all others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eval.record.measured import Flip, GenerationRow, Paired
from reports.compare.outcome import RunOutcome
from reports.compare.variants import Variant
from reports.parts.text import clean, link

MAX_EXAMPLES, MAX_PROMPTS, MAX_TEXTS, MAX_ROWS = 24, 6, 8, 60
PathOfSamples = Callable[[RunOutcome, str], str]


def samples_link(run: RunOutcome, file: str) -> str:
    """A link to a file of a run, relative to the page."""
    return link(run.href, file)


class ChangedAnswers(NamedTuple):
    """The number of changed answers of a recipe for one task, with a link to all of them."""

    number: int
    recipe: str
    task: str
    href: str
    of: Paired


class Example(NamedTuple):
    number: int
    recipe: str
    flip: Flip


class Flips(NamedTuple):
    """hidden: rows that are not shown; more: examples that are not shown."""

    rows: list[ChangedAnswers]
    hidden: int
    examples: list[Example]
    more: int


def flips(found: Sequence[Variant], path_of: PathOfSamples = samples_link, scale: float = 1.0) -> Flips:
    """The numbers of changed answers by recipe and task, and examples, taken from the recipes in turns."""
    rows, queues = [], []
    for v in (v for v in found if not v.baseline):
        tasks = v.run.measured.tasks
        for task, own in tasks.compared.get(v.name, {}).items():
            if own.right_to_wrong is not None:
                file = tasks.files.get(v.name, {}).get(task, "")
                href = path_of(v.run, file) if file else ""
                rows.append(ChangedAnswers(v.number, v.recipe, clean(task, 60), href, own))
        queues.append([(v, flip) for flip in tasks.flips.get(v.name, ())])
    every = [pair for i in range(max(map(len, queues), default=0)) for queue in queues for pair in queue[i : i + 1]]
    examples = [
        Example(v.number, v.recipe, Flip(*(clean(text, 300) for text in vars(flip).values())))
        for v, flip in every[: max(2, round(MAX_EXAMPLES * scale))]
    ]
    kept = rows[: max(4, round(MAX_ROWS * scale))]
    return Flips(kept, len(rows) - len(kept), examples, len(every) - len(examples))


class TextDivergence(NamedTuple):
    number: int
    recipe: str
    of: GenerationRow


class OtherText(NamedTuple):
    """A recipe's text. known: does the record have the place of the first difference (`at`; None: no difference)?"""

    number: int
    recipe: str
    known: bool
    at: int | None
    text: str


@dataclass
class Prompt:
    """A prompt with the baseline's text and those of the recipes. more: texts that are not shown."""

    prompt: str
    temperature: float
    baseline: str
    texts: list[OtherText] = field(default_factory=list)
    more: int = 0


class Excerpts(NamedTuple):
    """hidden: rows that are not shown; more: prompts that are not shown; files: {link: run}."""

    rows: list[TextDivergence]
    hidden: int
    prompts: list[Prompt]
    more: int
    files: dict[str, str]


def generations(found: Sequence[Variant], path_of: PathOfSamples = samples_link, scale: float = 1.0) -> Excerpts:
    """The first differences of generations, by recipe and temperature; some texts, and files of all texts."""
    rows: list[TextDivergence] = []
    files: dict[str, str] = {}
    prompts: dict[tuple[str, float, str], Prompt] = {}
    cut = max(120, round(600 * min(1.0, scale)))
    for v in found:
        record = v.run.measured
        made = record.generation
        if made.file and (href := path_of(v.run, made.file)):
            files.setdefault(href, clean(v.run.key, 100))
        if v.baseline:
            continue
        rows += [TextDivergence(v.number, v.recipe, row) for row in made.rows if row.model == v.name]
        for sample in (s for s in made.samples or record.samples if v.name in s.texts):
            key = (sample.prompt, sample.temperature or 0.0, sample.texts.get("baseline", ""))
            one = prompts.setdefault(key, Prompt(clean(key[0], 300), key[1], clean(key[2], cut)))
            at, known = sample.first_difference.get(v.name), v.name in sample.first_difference
            one.texts.append(OtherText(v.number, v.recipe, known, at, clean(sample.texts[v.name], cut)))
    shown = sorted(prompts.values(), key=lambda one: -len(one.texts))[: max(1, round(MAX_PROMPTS * scale))]
    texts = max(2, round(MAX_TEXTS * scale))
    for one in shown:
        one.more = max(0, len(one.texts) - texts)
        one.texts = one.texts[:texts]
    kept, most = rows[: max(4, round(MAX_ROWS * scale))], max(4, round(20 * scale))
    return Excerpts(kept, len(rows) - len(kept), shown, len(prompts) - len(shown), dict(list(files.items())[:most]))
