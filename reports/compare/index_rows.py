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
from eval.record.manifest import MANIFEST, read_manifest
from eval.record.reading import DamagedError
from reports.compare.index import IndexRow

KEPT = ".index.jsonl"
_SPARE = 500  # lines of earlier states of runs, after which the file is written anew


def rows_of(
    folders: Sequence[Path], kept_in: Path, form: str, code: str, draw: Callable[[Path], IndexRow]
) -> list[IndexRow]:
    """The rows of these runs.

    Args:
        kept_in: the folder of the file of rows.
        form: hash of the code that draws rows.
        code: hash of the code that runs execute at present; a run of other code is stale.
        draw: makes the row of a folder anew.
    """
    known, lines = _read(kept_in / KEPT, form)
    rows, new, present = [], {}, {}
    for folder in folders:
        manifest = _manifest(folder)
        stamp, kept = _stamp(folder, manifest), known.get(folder.name)
        if stamp and kept and kept[0] == stamp:
            present[folder.name] = kept
            rows.append(_marked(kept[1], manifest["code"] not in ("", code)))
            continue
        rows.append(draw(folder))
        if stamp and rows[-1].status.startswith("finished"):
            new[folder.name] = (stamp, rows[-1])
    if lines and lines <= len(present) + len(new) + _SPARE:
        _append(kept_in / KEPT, new)
    else:
        _write(kept_in / KEPT, form, present | new)
    return rows


Kept = dict[str, tuple[list[list[int]], IndexRow]]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return read_manifest(folder)
    except DamagedError:
        return {}


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
