"""Rows of the index of all runs, kept in a file to which rows of new runs are appended.

A row is drawn from a record of a hundred kilobytes. After a run has ended, only its own record is read; the rows of the
others are in runs/.index.jsonl, one line each: the name of the run's folder, the stamps of its files, and the row. A
line is valid while the files have these stamps. The first line names the code that draws rows; the file of other code
is discarded.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.record.files import write_whole
from eval.record.manifest import MANIFEST
from kernels.source import code_sha256
from notebooks.batch.job import is_stale
from notebooks.batch.run_folder import RunFolder
from notebooks.study.identity import ROOT
from reports.compare.index import IndexRow

KEPT = ".index.jsonl"
_SPARE = 500  # lines of earlier states of runs, after which the file is written anew
_DRAWING = ("eval/record", "reports/compare", "reports/page", "reports/parts", "notebooks/batch/pages.py")


def rows_of(folders: Sequence[Path], runs: Path, code: str, draw: Callable[[Path], IndexRow]) -> list[IndexRow]:
    """The rows of these runs.

    Args:
        code: hash of the present code (`packages_code`).
        draw: makes the row of a folder anew.
    """
    form = code_sha256(*(ROOT / place for place in _DRAWING))
    known, lines = _read(runs / KEPT, form)
    rows, new, present = [], {}, {}
    for folder in folders:
        manifest = RunFolder(folder).manifest()
        stamp, kept = _stamp(folder, manifest), known.get(folder.name)
        if stamp and kept and kept[0] == stamp:
            present[folder.name] = kept
            rows.append(_marked(kept[1], is_stale(manifest, code)))
            continue
        rows.append(draw(folder))
        if stamp and rows[-1].status.startswith("finished"):
            new[folder.name] = (stamp, rows[-1])
    if lines and lines <= len(present) + len(new) + _SPARE:
        _append(runs / KEPT, new)
    else:
        _write(runs / KEPT, form, present | new)
    return rows


Kept = dict[str, tuple[list[list[int]], IndexRow]]


def _stamp(folder: Path, manifest: dict[str, Any]) -> list[list[int]]:
    """Size, time of change and number of each file of a finished run; [] if one is missing."""
    if "code" not in manifest:
        return []
    try:
        stats = [os.stat(folder / name) for name in (MANIFEST, *manifest["files"])]
    except OSError:
        return []
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ino] for stat in stats]


def _marked(row: IndexRow, stale: bool) -> IndexRow:
    return row._replace(stale=stale, status="finished (stale)" if stale else "finished")


def _read(file: Path, form: str) -> tuple[Kept, int]:
    """The stored rows, and the number of lines; ({}, 0) if there are none, or other code has drawn them."""
    try:
        first, *lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}, 0
    if first != form:
        return {}, 0
    known: Kept = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # a line that was cut short by a kill or a full disk
            name, stamp, cells = json.loads(line)
            row = IndexRow(*cells)
            known[name] = (stamp, row._replace(accuracy=[tuple(pair) for pair in row.accuracy]))
    return known, 1 + len(lines)


def _line(name: str, kept: tuple[list[list[int]], IndexRow]) -> str:
    return json.dumps([name, kept[0], list(kept[1])]) + "\n"


def _append(file: Path, new: Kept) -> None:
    if new:
        with contextlib.suppress(OSError):  # the rows are drawn again next time
            there = os.open(file, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(there, "wb") as stream:
                stream.write("".join(_line(name, kept) for name, kept in new.items()).encode())


def _write(file: Path, form: str, rows: Kept) -> None:
    with contextlib.suppress(OSError):
        write_whole("".join([f"{form}\n", *(_line(name, kept) for name, kept in rows.items())]), file)
