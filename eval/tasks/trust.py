"""Folders whose files may be executed: a notebook's cells and lm-eval's task files are code with the user's rights."""

import os
from collections.abc import Iterable
from pathlib import Path

TRUST = "WORKBENCH_TRUST"  # folders, separated by colons; `workbench --trust FOLDER` adds to them


def trust(folders: Iterable[str | Path]) -> None:
    """Trust further folders, in this process and in its child processes.

    Raises:
        ValueError: one of them is not a folder.
    """
    for folder in folders:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ValueError(f"`--trust` (={str(folder)!r}) must be a folder; there is none")
        known = [os.environ[TRUST]] if os.environ.get(TRUST) else []
        os.environ[TRUST] = os.pathsep.join([*known, str(path.resolve())])


def is_trusted(path: str | Path, always: Iterable[Path] = ()) -> bool:
    """Is this file or folder in a folder that the user trusts, or in one of `always`?"""
    place = Path(path).expanduser().resolve()
    named = [Path(folder).expanduser() for folder in os.environ.get(TRUST, "").split(os.pathsep) if folder]
    return any(place.is_relative_to(folder.resolve()) for folder in (*named, *always))
