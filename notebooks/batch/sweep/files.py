"""Files that the recipes of a sweep read, such as trained networks, and the commands that make them before its runs.

    files:
      - path: runs/costs-smollm2.safetensors
        command: compress.commands.train_costs --corpus c4      # run as `python -m ... --out <path>`

A path begins with `runs/`, which stands for the folder of runs, in recipes too. A file that is there is not made again.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

LINK = "runs"  # in the folder in which commands and notebooks of a sweep are executed: a link to the folder of runs
_ROOM = "compress."  # of the modules that a sweep may run


@dataclass(frozen=True)
class MadeFile:
    """A file that a command makes. path: relative, below `runs`. command: a module of ours, and its options."""

    path: str
    command: str

    def place(self, runs: Path) -> Path:
        return runs / PurePosixPath(self.path).relative_to(LINK)

    def __str__(self) -> str:
        return f"python -m {self.command} --out {self.path}"


def files_of(listed: Any, where: str) -> tuple[MadeFile, ...]:
    """The files that a sweep lists.

    Raises:
        ValueError: an entry is no path below `runs` with a command of the package `compress`.
    """
    found = []
    for one in listed or []:
        if not isinstance(one, dict) or set(one) != {"path", "command"} or not all(map(_is_text, one.values())):
            raise ValueError(f"`files` of {where} must be a list of mappings of `path` and `command`, not {one!r}")
        path = PurePosixPath(one["path"])
        if path.parts[:1] != (LINK,) or ".." in path.parts or len(path.parts) < 2:
            raise ValueError(
                f"`path` (={one['path']!r}) of `files` in {where} must begin with {LINK}/, the folder of runs"
            )
        if not one["command"].startswith(_ROOM):
            raise ValueError(
                f"`command` (={one['command']!r}) of `files` in {where} must be a module of the package compress with "
                "its options, such as compress.commands.train_costs --corpus c4"
            )
        found.append(MadeFile(one["path"], one["command"]))
    return tuple(found)


def missing(files: Iterable[MadeFile], runs: Path) -> list[MadeFile]:
    return [file for file in files if not file.place(runs).is_file()]


def make_files(files: Iterable[MadeFile], runs: Path, root: str, stop: threading.Event) -> Iterator[MadeFile]:
    """Make the missing files, one after another; each is there completely or not at all.

    Args:
        root: the folder of the code, with a link to the folder of runs, in which the commands are executed.
        stop: ends the command that runs; nothing further is made.

    Raises:
        ValueError: a command failed, after it has said why.
    """
    for file in missing(files, runs):
        place = file.place(runs)
        part = place.with_name(f".{place.stem}.part{place.suffix}")
        place.parent.mkdir(parents=True, exist_ok=True)
        yield file
        try:
            status = _status([sys.executable, "-m", *shlex.split(file.command), "--out", str(part)], root, stop)
            if stop.is_set():
                return
            if status or not part.is_file():
                raise ValueError(f"`files`: {file} ended with exit status {status}, and {file.path} is not made")
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)


def _status(command: list[str], root: str, stop: threading.Event) -> int:
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": paths})
    try:
        while process.poll() is None:
            if stop.wait(0.2):
                process.terminate()
    finally:
        process.kill()
    return process.wait()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
