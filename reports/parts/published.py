"""The page of published results: every record of a folder with its tables and the notes beside it."""

from pathlib import Path

from eval.record.metrics import fmt
from eval.record.rows import RunRecord, typed
from eval.record.schema import read_record
from reports.parts import table
from reports.parts.text import clean

README = "README.md"
_HEAD = """# Measured results

`workbench table --write {folder}` makes this page from the records (`*.json`) of this folder and the notes beside
them (`*.md`); change those, and not this page. Speeds are medians, and their ratios are those to the strongest 16-bit
baseline of the same run. ± is one standard error. The windows of text are few, so the standard errors of perplexities
are those of the text, which is the same for all models; KL, which is measured position by position against the
baseline, tells the recipes apart.
"""


def published_readme(folder: Path) -> str:
    """The text of a folder's README.md: a section per record, the oldest first, then the notes without a record.

    Raises:
        ValueError: the folder holds no record, or an unreadable one.
    """
    records = {path: typed(read_record(path)) for path in folder.glob("*.json")}
    if not records:
        raise ValueError(f"`--write` (={str(folder)!r}) holds no records; name a folder such as reports/published")
    newest = sorted(records.items(), key=lambda pair: (pair[1].run.started, pair[0].name))
    notes = sorted(path for path in folder.glob("*.md") if path.name != README)
    alone = [path.read_text(encoding="utf-8") for path in notes if path.with_suffix(".json") not in records]
    parts = [
        _HEAD.format(folder=f"reports/{folder.resolve().name}"),
        *(_section(path, run) for path, run in newest),
        *alone,
    ]
    return "\n".join(part.strip() + "\n" for part in parts)


def _section(path: Path, run: RunRecord) -> str:
    """One record: the measurement, the machine, the command, the tables, and the note beside the record."""
    at, texts = run.provenance, [f"{name}: {text.windows} windows of {text.window}" for name, text in run.texts.items()]
    machine = f"{at.processor} ({at.hardware.cpu_capability}), {at.threads} threads of {at.hardware.cores} cores"
    parts = [
        f"## {clean(run.recipe_of('compressed'))} on {clean(run.model.name)}",
        f"Measured on {run.run.started[:10]} on {machine}, in {fmt(run.run.duration_s, ',.0f')} s"
        + (f"; perplexity on {', '.join(texts)} tokens" if texts else "")
        + f". Scored in {at.dtype}, timed in {at.deploy_dtype or at.dtype}. "
        f"[Page]({path.stem}.html), [record]({path.name}).",
        f"```\n{at.command}\n```",
        *_tables(run),
    ]
    note = path.with_suffix(".md")
    return "\n\n".join(
        part.strip() for part in [*parts, *([note.read_text(encoding="utf-8")] if note.exists() else [])]
    )


def _tables(run: RunRecord) -> list[str]:
    """The tables of the record's parts, each with a sentence before it, except the first."""
    if run.cache:
        parts = [table.cache_markdown([run])]
        if run.cache.speed:
            parts += [
                "Tokens per second of the whole model behind contexts of these lengths. In brackets: how much less "
                "time attention alone takes than on a full 16-bit cache.",
                table.cache_speed_markdown([run]),
            ]
        return parts
    parts = [table.markdown([run])]
    if run.strengths.lines:
        parts += ["Perplexity of recipes with several values in place of `{}`:", table.strengths_markdown([run])]
    if run.tasks.rows:
        parts += ["Accuracy in per cent:", table.tasks_markdown([run])]
    return parts
