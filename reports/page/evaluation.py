"""The tasks and generations of a run, as its page shows them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from eval.record.measured import Flip, GenerationRow, Paired, Sample, TaskRow, TaskSettings
from eval.record.metrics import described, fmt, with_error
from eval.record.noise import counts
from eval.record.rows import RunRecord
from reports.parts.intervals import Interval, Panel, forest, spread
from reports.parts.table import mean_recovery
from reports.parts.text import clean, link, listed, plural

MAX_MODELS = 6  # models with flips or texts on the page; the files have all
MAX_FOREST = 48  # rows of the figure
MAX_TEXT, MAX_PROMPT, MAX_ANSWER = 1000, 500, 250  # characters
_OPEN = 2  # samples that are open at first


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/evaluation.html from a record's `tasks` and `generation`; {} if it has neither."""
    tasks, generation = _tasks(run), _generation(run)
    return {"tasks": tasks, "generation": generation} if tasks or generation else {}


def recovery_card(run: RunRecord) -> tuple[str, str] | None:
    """The kept share of the baseline's score as a main number of the page, with its meaning; None for no tasks."""
    mean = mean_recovery(run)
    if not mean:
        return None
    return f"{mean[0] * 100:.1f} %", f"of the baseline’s score on {plural(mean[1], 'task')}{', mean' * (mean[1] > 1)}"


class ModelScore(NamedTuple):
    """A model on one task, as text. recovery and difference: value and interval; kind: bad or good if the interval does
    not contain 0."""

    model: str
    value: str
    stderr: str
    recovery: tuple[str, str]
    difference: tuple[str, str]
    kind: str
    p: str
    paired: Paired | None

    @property
    def main(self) -> bool:
        return self.model == "compressed"


class TaskGroup(NamedTuple):
    """One task with a row per model."""

    of: TaskRow
    label: str
    unit: str
    higher: bool
    rows: list[ModelScore]


class ModelFlips(NamedTuple):
    """Answers of a model that changed: counts over all tasks, and some to read."""

    model: str
    right_to_wrong: int
    wrong_to_right: int
    rows: list[Flip]


def _tasks(run: RunRecord) -> dict[str, Any]:
    tasks = run.tasks
    if not tasks.rows:
        return {}
    names = dict.fromkeys(("baseline", *(name for name in run.scores if name in tasks.compared), *tasks.compared))
    every, parts = [_group(run, row, names) for row in tasks.rows], tasks.parts
    groups = [one for one in every if one.of.task not in parts]
    flips = [_flips(run, name, of) for name, of in tasks.flips.items() if of]
    settings = _settings(tasks.settings)
    return {
        "groups": groups,
        "parts": [one for one in every if one.of.task in parts],
        "notes": tasks.notes,
        "said": _said(groups),
        "forest": _forest(groups),
        "forest_rows": MAX_FOREST if sum(len(one.rows) - 1 for one in groups) > MAX_FOREST else None,
        "flips": flips[:MAX_MODELS],
        "flips_left": len(flips[MAX_MODELS:]),
        "settings": settings[:1].upper() + settings[1:],
        "files": {
            model: {task: link(path.lstrip("/")) for task, path in of.items()} for model, of in tasks.files.items()
        },
    }


def _group(run: RunRecord, row: TaskRow, models: Iterable[str]) -> TaskGroup:
    label, unit, scale = described(row.metric)
    higher = row.higher_is_better is not False
    compared = {model: run.tasks.compared.get(model, {}).get(row.task) for model in models}
    before = next((of.baseline for of in compared.values() if of), None)
    rows = []
    for model, of in compared.items():
        paired = before if model == "baseline" else of.value if of else None
        value = run.scores.get(model, {}).get(f"{row.metric}_{row.task}", paired)
        shown = with_error(value, run.score(model, f"{row.metric}_{row.task}_stderr"), scale)
        rows.append(ModelScore(model, *shown, *_against(of, scale, higher), of))
    return TaskGroup(row, label, unit, higher, rows)


def _against(of: Paired | None, scale: float, higher: bool) -> tuple[tuple[str, str], tuple[str, str], str, str]:
    """A model compared with the baseline on one task: recovery, difference, whether it is good or bad, and p."""
    if not of:
        return ("", ""), ("", ""), "", ""
    low, high, kind, p = of.difference_low, of.difference_high, "", of.mcnemar_p
    if low is not None and high is not None and counts(low, high):
        kind = "good" if (low > 0) == higher else "bad"
    recovery = _between(of.recovery, of.recovery_low, of.recovery_high, lambda v: fmt(v, ".1f", 100), " %")
    digits = 1 if scale == 100 else 3
    difference = _between(of.difference, low, high, lambda v: signed(v * scale, digits), "")
    return recovery, difference, kind, "" if p is None else "< 0.001" if p < 0.001 else fmt(p, ".3f")


def _between(
    value: float | None, low: float | None, high: float | None, text: Callable[[float], str], unit: str
) -> tuple[str, str]:
    """A value and its interval, as text."""
    interval = "" if low is None or high is None else f"{text(low)} to {text(high)}"
    return ("–" if value is None else text(value) + unit, interval)


def signed(value: float, digits: int) -> str:
    """A difference with its sign: +1.2, −0.3, 0.0."""
    text = fmt(value, f"+.{digits}f")
    return text[1:] if text[1:] == f"{0:.{digits}f}" else text.replace("-", "−")


def _said(groups: Sequence[TaskGroup]) -> list[str]:
    """The tasks on which the page's main model differs from the baseline by more than noise."""
    rows = [(group.of.task, row.kind) for group in groups for row in group.rows if row.main and row.paired]
    if not rows:
        return []
    said, within = [], sum(not kind for _, kind in rows)
    for words, which in (("worse", "bad"), ("better", "good")):
        if tasks := [clean(task, 60) for task, kind in rows if kind == which]:
            said.append(f"Beyond noise, the compressed model is {words} than the baseline on {listed(tasks)}.")
    if within:
        some = f"all {len(rows)}" if within == len(rows) else f"{within} of {len(rows)}"
        where = "the one task" if len(rows) == 1 else f"{some} tasks"
        said.append(f"On {where} the difference to the baseline is within the noise at this number of questions.")
    return said


def _forest(groups: Sequence[TaskGroup]) -> str:
    """Differences of shares in percentage points; for other metrics, the change as per cent of the baseline."""
    panels: dict[str, dict[str, list[Interval]]] = {}
    count = 0
    for group in groups:
        share = group.unit == "%"
        label = "difference to the baseline, percentage points" if share else "score kept of the baseline’s, less 100 %"
        name, shift = ("difference", 0) if share else ("recovery", 1)
        rows = []
        for row in group.rows:
            ends = [getattr(row.paired, f"{name}{end}", None) for end in ("", "_low", "_high")]
            if ends[0] is None or count == MAX_FOREST:
                continue
            rows.append(Interval(row.model, *(None if v is None else 100 * (v - shift) for v in ends), row.main))
            count += 1
        if rows:
            panels.setdefault(label, {})[f"{group.of.task}, {group.of.n or '?'} questions"] = rows
    summary = "Difference of every model to the baseline on every task, with 95 % intervals; right of 0 is better."
    return forest(panels, key="tasks", summary=summary) if panels else ""


def _flips(run: RunRecord, model: str, flips: Sequence[Flip]) -> ModelFlips:
    parts = run.tasks.parts
    whole = [one for task, one in run.tasks.compared.get(model, {}).items() if task not in parts]
    counts = (sum(getattr(one, way) or 0 for one in whole) for way in ("right_to_wrong", "wrong_to_right"))
    rows = [
        Flip(
            *(_short(text, 80) for text in (flip.task, flip.doc_id, flip.direction)),
            _short(flip.question, MAX_PROMPT),
            *(_short(text, MAX_ANSWER) for text in (flip.gold, flip.baseline_answer, flip.answer)),
        )
        for flip in flips
    ]
    return ModelFlips(model, *counts, rows)


def _short(text: str, limit: int) -> str:
    """Text of at most this many characters; for a long text its end, where a prompt has its question, and some of its
    beginning."""
    text = clean(text, 10 * limit).strip()
    return text if len(text) <= limit else f"{text[: limit // 4].rstrip()} […] {text[-(limit * 3 // 4) :].lstrip()}"


def _settings(settings: TaskSettings) -> str:
    words = (
        (settings.limit, "at most {} questions"), (settings.num_fewshot, "{} examples"),
        (settings.batch_size, "batches of {}"), (settings.seed, "seed {}"), (settings.dtype or None, "{}"),
        (settings.device or None, "on {}"), (settings.lm_eval or None, "lm-eval {}"),
        (settings.deterministic or None, "deterministic algorithms"),
    )  # fmt: skip
    return ", ".join(text.format(value) for value, text in words if value is not None)


def _generation(run: RunRecord) -> dict[str, Any]:
    made = run.generation
    if not made.rows:
        return {}
    by: dict[float, list[GenerationRow]] = {}
    for row in made.rows:
        by.setdefault(row.temperature or 0.0, []).append(row)
    dtype = made.settings.dtype
    dtypes = dict.fromkeys(map(str, dtype.values() if isinstance(dtype, dict) else [dtype] if dtype else []))
    samples = [_sample(sample) for sample in made.samples]
    return {
        "groups": [(_temperature(t), by[t]) for t in sorted(by)],
        "figure": _against_temperature(by),
        "samples": samples[:_OPEN],
        "more": samples[_OPEN:],
        "file": link(made.file.lstrip("/")),
        "tokens": made.settings.new_tokens,
        "prompts": _count(made.settings.prompts),
        "seeds": _count(made.settings.seeds),
        "dtype": listed(list(dtypes)),
    }


def _count(value: object) -> object:
    return len(value) if isinstance(value, list) else value


def _temperature(value: float) -> str:
    return "Greedy" if not value else f"Temperature {value:g}"


def _against_temperature(by: dict[float, list[GenerationRow]]) -> str:
    """Divergence, repetition and length of every model against temperature; "" for one temperature."""
    if len(by) < 2:
        return ""
    measures = (
        ("first difference", "first_difference", 1, "tokens"),
        ("repeated 4-grams", "repetition", 100, "%"),
        ("length", "length", 1, "tokens"),
    )
    panels = []
    for title, key, scale, unit in measures:
        lines: dict[str, list] = {}
        for temperature, rows in sorted(by.items()):
            for row in rows:
                value, stderr = getattr(row, key), getattr(row, f"{key}_stderr") or 0.0
                if value is not None and not (key == "first_difference" and row.model == "baseline"):
                    ends = (max(0.0, value - stderr) * scale, (value + stderr) * scale)
                    lines.setdefault(row.model, []).append((temperature, value * scale, *ends))
        panels.append(Panel(title, unit, lines))
    summary = (
        "First difference from the baseline, repetition and length of the texts of every model against temperature."
    )
    return spread(panels, columns=3, key="temperatures", x_label="temperature (0 is greedy)", summary=summary)


class WrittenText(NamedTuple):
    """A model's text: the part that it shares with the baseline's, and the rest."""

    model: str
    how: str
    shared: str
    rest: str


class ShownSample(NamedTuple):
    """A prompt and each model's text. left: models that are not shown."""

    prompt: str
    how: str
    texts: list[WrittenText]
    left: int


def _sample(sample: Sample) -> ShownSample:
    texts = {name: clean(text, MAX_TEXT) for name, text in list(sample.texts.items())[:MAX_MODELS]}
    base = texts.get("baseline")
    shown = []
    for name, text in texts.items():
        shared = 0
        if name != "baseline" and base is not None:
            pairs = enumerate(zip(text, base, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(base)))
        how = ""
        if name in sample.first_difference:
            at = sample.first_difference[name]
            how = "the same, token for token" if at is None else f"differs from token {at + 1} on"
        shown.append(WrittenText(name, how, text[:shared], text[shared:]))
    how = _temperature(sample.temperature or 0) + ("" if sample.seed is None else f", seed {sample.seed}")
    return ShownSample(_short(sample.prompt, MAX_PROMPT), how, shown, len(sample.texts) - len(shown))
