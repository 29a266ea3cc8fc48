"""The models of a run side by side: as rows, and as Markdown tables that a command updates from the records."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.record.metrics import change, described, fmt, percent
from eval.record.rows import RunRecord, typed
from reports.parts.caches import OWN_TEXT, CacheCell, cache_rows, own_text_rows, speed_rows
from reports.parts.plots import finite
from reports.parts.strengths import strength_tables

START, END = "<!-- workbench ", "<!-- end -->"
_KINDS = "table|strengths|cache|cache-speed|tasks"
_SECTION = re.compile(
    rf"({START}(?P<kind>{_KINDS}) (?P<paths>[^>]*?) -->\n)(?P<body>.*?)(?P<end>{END}|(?={START})|\Z)", re.S
)
Record = RunRecord | Mapping[str, Any]  # typed, or as `eval.record.schema.read_record` gives it


class TextScores(NamedTuple):
    """A model on one text. change: of the perplexity relative to the baseline's."""

    perplexity: float | None
    perplexity_stderr: float | None
    change: float | None
    kl: float | None
    kl_stderr: float | None


@dataclass(frozen=True)
class ModelRow:
    """A model of a record; values that were not measured are None. Speeds are tokens per second, ratios are relative to
    the record's own 16-bit baseline."""

    name: str
    recipe: str | None
    texts: dict[str, TextScores]
    stored_bytes: float | None
    bits_per_weight: float | None
    decode: float | None
    decode_ratio: float | None
    prefill: float | None
    prefill_ratio: float | None
    decode_counts: bool = False  # is the ratio more than noise?
    prefill_counts: bool = False
    same_tokens: float | None = None  # of the model's own text: tokens before the first difference, share of repetition
    repetition: float | None = None

    @property
    def label(self) -> str:
        return "16-bit baseline" if self.name == "baseline" else self.recipe or self.name

    @property
    def main(self) -> bool:
        return self.name == "compressed"


def rows(record: RunRecord) -> list[ModelRow]:
    """One row per model of the record's scores: the baseline, "compressed", and the rest in their order."""
    found = []
    for name in record.models:
        own = record.scores[name]
        texts = {}
        for corpus in record.corpora:
            metric = f"perplexity_{corpus}"
            changed = None if name == "baseline" else change(own.get(metric), record.score("baseline", metric))
            kl = (own.get(f"kl_{corpus}"), own.get(f"kl_{corpus}_stderr"))
            texts[corpus] = TextScores(own.get(metric), own.get(f"{metric}_stderr"), changed, *kl)
        timed = ("decode_tokens_per_s", "prefill_tokens_per_s")
        speeds = [speed for metric in timed for speed in (own.get(metric), record.ratio(metric, name))]
        size = (own.get("stored_bytes"), own.get("bits_per_weight"))
        counts = (record.counts(metric, name) for metric in timed)
        free = (own.get("free_running_same_tokens"), own.get("free_running_repetition"))
        found.append(ModelRow(name, record.recipe_of(name), texts, *size, *speeds, *counts, *free))
    return found


def mean_recovery(run: RunRecord, model: str = "compressed") -> tuple[float, int] | None:
    """The share of the baseline's score that a model keeps, as the mean over tasks, and the number of tasks; None for
    no tasks.

    Shares of right answers are averaged only with each other; other metrics count if there are no such shares. A group
    of tasks counts as one, its parts do not count. A score that is not finite keeps nothing of the baseline's.
    """
    metrics = {row.task: row.metric for row in run.tasks.rows}
    parts = run.tasks.parts
    recoveries = [
        (described(metrics.get(task, ""))[1] == "%", recovery)
        for task, one in run.tasks.compared.get(model, {}).items()
        if task not in parts and finite(recovery := 0.0 if one.value is None and finite(one.baseline) else one.recovery)
    ]
    shares = [recovery for share, recovery in recoveries if share] or [recovery for _, recovery in recoveries]
    return (sum(shares) / len(shares), len(shares)) if shares else None


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table whose first columns are text and the others numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    shown = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in (head, rule, *lines))
    return "".join(f"| {line} |\n" for line in shown)


def markdown(records: Sequence[Record]) -> str:
    """A table of all models of these records; speeds as ratios too, each to the baseline of its own record.

    Raises:
        ValueError: a record without scores, such as that of a kernel benchmark.
    """
    runs = [_with(record, "scores", "of models to put into a table") for record in records]
    corpora = list(dict.fromkeys(corpus for run in runs for corpus in run.corpora))
    several = len({run.model.name for run in runs}) > 1
    made = [(run, row) for run in runs for row in rows(run)]
    wrote = any(row.repetition is not None for _, row in made)
    head = [*(["model"] if several else []), "recipe"]
    head += [column for corpus in corpora for column in (f"perplexity, {corpus}", f"KL, {corpus}")]
    head += ["own text: tokens before a difference", "own text repeated"] if wrote else []
    decode = "decode, tokens/s" if all(run.by_generate for run in runs) else "decoding step, tokens/s"
    head += ["stored MB", decode, "prefill, tokens/s"]
    lines = [([run.model.name] if several else []) + _cells(row, corpora, wrote) for run, row in made]
    return markdown_table(head, lines, 1 + several)


def _with(record: Record, part: str, words: str = "") -> RunRecord:
    """A record that has this part."""
    run = typed(record)
    if not getattr(run, part):
        raise ValueError(f"the record of {run.run.key} has no {part} {words}".rstrip())
    return run


def _cells(row: ModelRow, corpora: Sequence[str], wrote: bool) -> list[str]:
    shown = row.label if row.name == "baseline" or not row.recipe else f"`{row.recipe}`"
    cells = [f"**{shown}**" if row.main else shown]
    for corpus in corpora:
        text = row.texts.get(corpus) or TextScores(None, None, None, None, None)
        changed = "" if text.change is None else f" ({percent(text.change)})"
        cells.append(_with_error(text.perplexity, text.perplexity_stderr, 2) + changed)
        cells.append(_with_error(text.kl, text.kl_stderr, 4 if (text.kl or 0) >= 0.01 else 5))
    cells += [fmt(row.same_tokens, ".1f"), fmt(row.repetition, ".0f", 100, " %")] if wrote else []
    cells.append(fmt(row.stored_bytes, ",.1f", 1e-6))
    for speed, ratio, counts in (
        (row.decode, row.decode_ratio, row.decode_counts),
        (row.prefill, row.prefill_ratio, row.prefill_counts),
    ):
        against = "" if ratio is None or row.name == "baseline" else f" ({'' if counts else '≈ '}{fmt(ratio)}×)"
        cells.append(fmt(speed, ",.1f" if (speed or 0) < 100 else ",.0f") + against)
    return cells


def _with_error(value: float | None, stderr: float | None, digits: int) -> str:
    spec = f",.{digits}f"
    return fmt(value, spec) + (f" ± {fmt(stderr, spec)}" if value is not None and stderr is not None else "")


def strengths_markdown(records: Sequence[Record]) -> str:
    """Tables of perplexities: a row per recipe that was scored at several strengths, a column per strength; one per
    text and set of strengths.

    Raises:
        ValueError: a record without such scores.
    """
    made = []
    for run in map(typed, records):
        tables = strength_tables(run.strengths)
        if not tables:
            raise ValueError(f"the record of {run.run.key} has no scores at several strengths")
        for table in tables:
            base = fmt(run.score("baseline", f"perplexity_{table.corpus}"), ",.2f")
            head = [f"perplexity, {table.corpus}; baseline {base}", *(value.strip("'") for value in table.values)]
            lines = [
                [f"`{recipe}`", *(fmt(c, ",.2f" if c and c < 1000 else ",.0f") for c in cells)]
                for recipe, cells in table.rows
            ]
            made.append(markdown_table(head, lines))
    return "\n".join(made)


def cache_markdown(records: Sequence[Record]) -> str:
    """A table per record of a run on KV caches: bytes of each cache, and exact answers, NLL and KL by visibility.

    Raises:
        ValueError: a record of another kind of run.
    """
    made = []
    for record in records:
        run = _of_caches(record)
        table = cache_rows(run.cache)
        visibilities = list(table[0].by)
        own = {row.name: row.cells for row in own_text_rows(run)}
        head = [
            "cache",
            "bytes, % of full",
            *(f"exact (95 %), {v}" for v in visibilities),
            *(f"NLL, {v}" for v in visibilities),
            *(f"KL, {v}" for v in visibilities),
            *(f"own text: {head}" for _, head, _ in OWN_TEXT[: 4 if own else 0]),
        ]
        lines = [
            [
                _cache_name(run, row.name),
                fmt(row.share, ".1f", 100),
                *(_exact(row.by[v]) for v in visibilities),
                *(fmt(row.by[v].nll, ".3f") for v in visibilities),
                *("–" if row.name == "full" else fmt(row.by[v].kl, ".3f") for v in visibilities),
                *(" ".join(cell).strip() for cell in own.get(row.name, ())[:4]),
            ]
            for row in table
        ]
        made.append(markdown_table(head, lines))
    return "\n".join(made)


def _exact(cell: CacheCell) -> str:
    """Per cent of exact answers with its 95 % interval."""
    return f"{fmt(cell.exact, '.0f', 100)} % ({'–'.join(fmt(end, '.0f', 100) for end in cell.interval)})"


def cache_speed_markdown(records: Sequence[Record]) -> str:
    """A table per such record: tokens per second of the whole model after every context, and the speed-up of
    attention.

    Raises:
        ValueError: a record of another kind of run, or one that was not timed.
    """
    made = []
    for record in records:
        run = _of_caches(record)
        if not run.cache.speed:
            raise ValueError(f"the record of {run.run.key} was not timed")
        contexts = sorted(run.cache.speed.tokens_per_s.get("full", {}))
        lines = [
            [
                _cache_name(run, row.name),
                *(("" if c.tokens is None else f"{fmt(c.tokens, '.1f')} ") + f"({fmt(c.ratio)}×)" for c in row.cells),
            ]
            for row in speed_rows(run.cache.speed)
        ]
        head = ["tokens/s of the model (attention)", *(f"{c:,} tokens" for c in contexts)]
        made.append(markdown_table(head, lines))
    return "\n".join(made)


def tasks_markdown(records: Sequence[Record]) -> str:
    """A table per record: the score of every model on every task, its share of the baseline's score, and the number of
    changed answers.

    Raises:
        ValueError: a record in which no task was answered.
    """
    made = []
    for run in map(typed, records):
        tasks = run.tasks
        if not tasks.rows:
            raise ValueError(f"the record of {run.run.key} has no tasks")
        columns = [f"{row.task.removesuffix('_local')}, {row.metric}, n {fmt(row.n, '')}" for row in tasks.rows]
        head = ["recipe", *columns, "kept of the baseline's", "right to wrong, wrong to right"]
        lines = []
        for model in ("baseline", *tasks.compared):
            metrics = [f"{row.metric}_{row.task}" for row in tasks.rows]
            scores = [(run.score(model, m), run.score(model, f"{m}_stderr")) for m in metrics]
            cells = [_with_error(*(None if v is None else 100 * v for v in both), 1) for both in scores]
            compared = tasks.compared.get(model, {}).values()
            shares = ", ".join(fmt(one.recovery, ".0f", 100) for one in compared if one.recovery is not None)
            flips = [sum(getattr(one, way) or 0 for one in compared) for way in ("right_to_wrong", "wrong_to_right")]
            kept = [f"{shares} %", f"{flips[0]}, {flips[1]}"] if compared else ["", ""]
            name = "16-bit baseline" if model == "baseline" else f"`{run.recipe_of(model) or model}`"
            lines.append([name, *cells, *kept])
        made.append(markdown_table(head, lines))
    return "\n".join(made)


def _of_caches(record: Record) -> RunRecord:
    run = typed(record)
    if not run.cache:
        raise ValueError(f"the record of {run.run.key} is not of a run on KV caches")
    return run


def _cache_name(run: RunRecord, name: str) -> str:
    """A variant's name in a table: its recipe, or its own name for a full cache."""
    if name.startswith("full"):
        return name.replace("full", "full 16-bit cache", 1)
    text = f"`{run.recipe_of(name) or run.recipe_of('compressed')}`"
    return f"**{text}**" if name == "compressed" else text


_TABLES = {
    "table": markdown, "strengths": strengths_markdown, "cache": cache_markdown, "cache-speed": cache_speed_markdown,
    "tasks": tasks_markdown,
}  # fmt: skip


def updated(text: str, read: Callable[[str], Record]) -> str:
    """The text with every table between `<!-- workbench table PATHS -->` and `<!-- end -->` made again from these
    records.

    `table` gives the models of the records side by side (`markdown`); `strengths`, `cache`, `cache-speed` and `tasks`
    give the results of the functions of these names.

    Args:
        read: gives a record by its path in the text; several paths are separated by spaces.

    Raises:
        ValueError: a table that names no record, or has no end.
    """

    def renewed(section: re.Match) -> str:
        paths = section["paths"].split()
        if not paths or not section["end"]:
            lacks = "must name records" if not paths else f"has no {END} after it"
            raise ValueError(f"{START}{section['kind']} {section['paths']} --> {lacks}")
        return f"{section[1]}\n{_TABLES[section['kind']]([read(path) for path in paths])}\n{END}"

    return _SECTION.sub(renewed, text)
