"""`compress/ARCHITECTURES.md`: every column of `tests.columns` for every row of `tests.architectures`.

`python -m tests.matrix` makes the page again. Every cell is kept in the folder `--results`, so that an interrupted run
continues; `--again` forgets the cells of the named rows. A row is made by a process of its own: one that crashes or
takes too long costs one cell.
"""

import argparse
import inspect
import json
import os
import re
import shutil
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

from compress.walk.identity import code_sha256
from tests.architectures import ARCHITECTURES, LEFT_OUT
from tests.columns import COLUMNS, Moot, Subject, Wrong

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "compress" / "ARCHITECTURES.md"
LONGEST = 300  # seconds for a cell
OURS = tuple(str(ROOT / package) for package in ("compress", "kernels"))

HEAD = """# Architectures

What the workbench does with every decoder of transformers {version}, tried on a tiny random model of each.
"yes": the result is right. "refused": the workbench says before it changes anything in the model that it cannot do
this, with the reason in the number. "–": transformers itself fails, so there is nothing to compare with.
`python -m tests.matrix` makes this page again; the slow tests compare it.
"""


@dataclass(frozen=True)
class Cell:
    """What a column gave: "yes", "refused" or "moot", or, which must not be, "wrong" or "error"; with the reason or a
    remark."""

    result: str
    reason: str = ""
    seconds: float = 0.0


def cell_of(subject: Subject, column: str) -> Cell:
    """One cell of the matrix."""
    start = time.perf_counter()

    def cell(result: str, reason: str = "") -> Cell:
        return Cell(result, reason, round(time.perf_counter() - start, 1))

    try:
        return cell("yes", COLUMNS[column](subject) or "")
    except Wrong as error:
        return cell("wrong", str(error))
    except Moot as error:
        return cell("moot", str(error))
    except Exception as error:
        if type(error) is ValueError and _raised_here(error):
            return cell("refused", str(error))
        last = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
        return cell("error", f"{type(error).__name__}: {str(error).strip()[:400]} ({where})")


def _raised_here(error: BaseException) -> bool:
    """Whether the workbench raised this error itself, in words: it is not one of Python's, torch's or transformers'."""
    frames = traceback.extract_tb(error.__traceback__)
    own = frames[-1].filename.startswith(OURS) or "not accelerated" in str(error)
    return own and ("`" in str(error) or "not accelerated" in str(error))


def cells_of(architecture: str) -> dict[str, Cell]:
    """All cells of a row, made in this process."""
    subject = Subject(architecture)
    try:
        return {column: cell_of(subject, column) for column in COLUMNS}
    finally:
        shutil.rmtree(subject.folder, ignore_errors=True)


def row_of(text: str) -> dict[str, dict[str, str]]:
    """The rows of a page: by architecture and column "yes", "refused" or "–"."""
    lines = [re.findall(r"\| ([^|]*?) (?=\|)", line) for line in text.splitlines() if line.startswith("| ")]
    head, *rows = lines
    return {
        name.strip("`"): {column: cell.partition(" ")[0] for column, cell in zip(head[1:], cells, strict=True)}
        for name, *cells in rows
    }


def row(architecture: str, file: Path, columns: list[str]) -> None:
    """The cells of a row, written to its file one by one; the cell under way is there as an error."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)  # progress bars
    cells = read(file)
    subject = Subject(architecture)
    try:
        for column in columns:
            if column not in cells:
                write(file, cells | {column: Cell("error", "the process ended, or took too long")})
                cells[column] = cell_of(subject, column)
                write(file, cells)
    finally:
        shutil.rmtree(subject.folder, ignore_errors=True)


def file_of(architecture: str, folder: Path) -> Path:
    return folder / f"{architecture.replace(':', '+')}.json"


def read(file: Path) -> dict[str, Cell]:
    return {name: Cell(**cell) for name, cell in json.loads(file.read_text()).items()} if file.is_file() else {}


def write(file: Path, cells: dict[str, Cell]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps({name: asdict(cell) for name, cell in cells.items()}, indent=1))
    os.replace(part, file)


def fill(names: list[str], folder: Path, columns: list[str], jobs: int) -> None:
    """Make the cells of these rows that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    context, running, waiting = get_context("fork"), {}, list(names)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            file = file_of(name, folder)
            if set(columns) <= set(read(file)):
                continue
            process = context.Process(target=row, args=(name, file, columns))
            process.start()
            running[name] = (process, file, len(read(file)))
        time.sleep(0.2)
        for name, (process, file, before) in list(running.items()):
            late = file.is_file() and time.time() - file.stat().st_mtime > LONGEST
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[name]
            cells, missing = read(file), [column for column in columns if column not in read(file)]
            if missing and len(cells) == before:  # not even the first cell was begun
                write(file, cells | {column: Cell("error", "the model cannot be built") for column in missing})
            elif missing:
                waiting.insert(0, name)
            print(name, {column: cell.result for column, cell in read(file).items()}, flush=True)


def page(rows: dict[str, dict[str, Cell]]) -> str:
    """The page of these rows. Reasons that differ in names and numbers only share a footnote; rows that lack a cell are
    named at the end."""
    notes: dict[str, tuple[int, str]] = {}  # by its pattern: the number and the first text

    def shown(cell: Cell) -> str:
        if not cell.reason:
            return cell.result
        reason = " ".join(cell.reason.split()).replace("|", "\\|")
        number, _ = notes.setdefault(_pattern(reason), (len(notes) + 1, reason))
        return f"{'–' if cell.result == 'moot' else cell.result} [{number}](#reasons)"

    lines = [
        f"| `{name}` | " + " | ".join(shown(cells[column]) for column in COLUMNS) + " |"
        for name, cells in rows.items()
        if set(COLUMNS) <= set(cells)
    ]
    waiting = [f"`{name}`" for name, cells in rows.items() if not set(COLUMNS) <= set(cells)]
    left_out = [f"- {reason}: " + ", ".join(f"`{name}`" for name in names) for reason, names in LEFT_OUT.items()]
    return "\n".join([
        HEAD.format(version=transformers.__version__),
        "| architecture | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *lines,
        "\n## Columns\n",
        *(f"- **{name}**: {inspect.getdoc(column)}" for name, column in COLUMNS.items()),
        "\n## Reasons\n",
        "Of reasons that differ in names and numbers only, the first is shown.\n",
        *(f"{number}. {text}" for number, text in notes.values()),
        "\n## Not in the table\n",
        "Names of `AutoModelForCausalLM` that have no row:\n",
        *left_out,
        *([f"\nNot tried yet: {', '.join(waiting)}."] if waiting else []),
        "",
    ])  # fmt: skip


def _pattern(reason: str) -> str:
    """A reason without the names of classes and modules, values, numbers and tokens in it."""
    reason = re.sub(r"; [^;]* works$|(?<=differs from a Llama's in ).*|\([^()]*\)|'[^']*'|`[^`]*`", "", reason)
    reason = re.sub(r"(?<=of the type )[\w-]+|(?<=not accelerated: )(the model|block \d+)", "", reason)
    return re.sub(r"\b\w*(For[A-Z]\w+|LMHeadModel|\d[\w.]*)\b|\b\w+(\.\w+)+\b", "", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="rows; none: all, and the page is written")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "architectures" / code_sha256()[:16])
    parser.add_argument("--again", action="store_true", help="forget the cells of these rows and columns")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    names, columns = given.names or list(ARCHITECTURES), given.columns.split(",")
    if given.again:
        for name in names:
            file = file_of(name, given.results)
            write(file, {c: cell for c, cell in read(file).items() if c not in columns})
    fill(names, given.results, columns, given.jobs)
    if not given.names:
        rows = {name: read(file_of(name, given.results)) for name in ARCHITECTURES}
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
