"""The folder of published results: an index by question, and the tables of each record in the note beside it."""

import re
from pathlib import Path

import yaml

from eval.record.metrics import fmt
from eval.record.rows import RunRecord, typed
from eval.record.schema import read_record
from reports.parts import table
from reports.parts.text import clean

README = "README.md"
QUESTIONS = "questions.yml"
PAPERS = "papers.html"
_BEGIN, _END = "<!-- workbench table --write -->", "<!-- end -->"
_HEAD = """# Measured results

`workbench table --write {folder}` makes this page from the records (`*.json`), the notes (`*.md`) and
`{questions}` of this folder, and writes the tables of a record and its command into its note. Change those
alone. Speeds are medians, and their ratios are those to the strongest 16-bit baseline of the same run. ± is one
standard error; that of a perplexity is mostly the text's, which is the same for all models, so that KL tells recipes
apart. A report opens in any browser.{papers}

| question | answer | page | record | date |
| --- | --- | --- | --- | --- |
"""


def published_files(folder: Path) -> dict[Path, str]:
    """What `workbench table --write` writes, {path: text}: each note that has a record beside it, and the index.

    Raises:
        ValueError: the folder holds no record, an unreadable one, or no questions; a note has no question, a question
            has no note, or a number of an answer does not occur in its note.
    """
    records = {path.stem: typed(read_record(path)) for path in sorted(folder.glob("*.json"))}
    if not records:
        raise ValueError(f"`--write` (={str(folder)!r}) holds no records; name a folder such as reports/published")
    notes = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md") if path.name != README}
    notes |= {name: _with_tables(name, run, notes.get(name, "")) for name, run in records.items()}
    written = {folder / f"{name}.md": notes[name] for name in records}
    return written | {folder / README: _index(folder, records, notes)}


def _index(folder: Path, records: dict[str, RunRecord], notes: dict[str, str]) -> str:
    file = folder / QUESTIONS
    questions = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if missing := notes.keys() ^ questions.keys():
        raise ValueError(f"`{QUESTIONS}` must name each note of {folder} once, without others: {sorted(missing)}")
    lines = [_line(name, entry, notes[name], records.get(name)) for name, entry in questions.items()]
    papers = f" [All papers, claimed and measured]({PAPERS})." if (folder / PAPERS).is_file() else ""
    head = _HEAD.format(folder=f"reports/{folder.resolve().name}", questions=QUESTIONS, papers=papers)
    return head + "\n".join(lines) + "\n"


def _line(name: str, entry: dict[str, str], note: str, run: RunRecord | None) -> str:
    answer, told = entry["answer"], set(_numbers(note))
    if unknown := [number for number in _numbers(answer) if number not in told]:
        raise ValueError(f"the answer of `{name}` in {QUESTIONS} has numbers that its note has not: {unknown}")
    dates = [run.run.started[:10]] if run else re.findall(r"20\d\d-\d\d-\d\d", note)
    if not (date := entry.get("date") or next(iter(dates), "")):
        raise ValueError(f"the note of `{name}` has no date; give one in {QUESTIONS}, such as `date: 2026-11-26`")
    page, record = f"[note]({name}.md)", entry.get("record", "–")
    if run:
        page, record = f"{page}, [report]({name}.html)", f"[record]({name}.json)"
    return f"| {entry['question']} | {answer} | {page} | {record} | {date} |"


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", text)


def _with_tables(name: str, run: RunRecord, note: str) -> str:
    """A note with its tables made anew; the text below them is its author's."""
    own = note.partition(_END)[2] if note.startswith(_BEGIN) else note
    return f"{_BEGIN}\n\n{_section(name, run)}\n\n{_END}\n" + (f"\n{own.strip()}\n" if own.strip() else "")


def _section(name: str, run: RunRecord) -> str:
    """One record: the measurement, the machine, the command and the tables."""
    at, texts = run.provenance, [f"{text}: {of.windows} windows of {of.window}" for text, of in run.texts.items()]
    machine = f"{at.processor} ({at.hardware.cpu_capability}), {at.threads} threads of {at.hardware.cores} cores"
    parts = [
        f"# {clean(run.recipe_of('compressed'))} on {clean(run.model.name)}",
        f"Measured on {run.run.started[:10]} on {machine}, in {fmt(run.run.duration_s, ',.0f')} s"
        + (f"; perplexity on {', '.join(texts)} tokens" if texts else "")
        + f". Scored in {at.dtype}, timed in {at.deploy_dtype or at.dtype}. "
        f"[Report]({name}.html), [record]({name}.json), [all results]({README}).",
        f"```\n{at.command}\n```",
        *_tables(run),
    ]
    return "\n\n".join(part.strip() for part in parts)


def _tables(run: RunRecord) -> list[str]:
    """The tables of the record's parts, each with a sentence before it, except the first."""
    if run.cache:
        parts = [table.cache_markdown([run])]
        if run.cache.speed:
            parts += [
                "Tokens per second of the whole model behind contexts of these lengths. In brackets: how much less "
                "time the attention takes than on a full 16-bit cache.",
                table.cache_speed_markdown([run]),
            ]
        return parts
    parts = [table.markdown([run])]
    if run.strengths.lines:
        parts += ["Perplexity of recipes with several values in place of `{}`:", table.strengths_markdown([run])]
    if run.tasks.rows:
        parts += ["Accuracy in per cent:", table.tasks_markdown([run])]
    return parts
