"""Folders that a run may write to; checked before anything is started."""

import os
import tempfile
from pathlib import Path

from notebooks.study.identity import ROOT


def check_run_path(run_path: str) -> None:
    """Raise ValueError if a run must not replace the folder `run_path`; "" stands for the run's own folder.

    A finished run replaces its folder by one rename. That cannot work for a mount point, and it must not
    happen to the project or to a folder with other things in it.
    """
    if not run_path:
        return
    folder = Path(run_path).expanduser().absolute()
    name = f"`run_path` (={str(folder)!r})"
    if folder.resolve() == ROOT or folder.resolve() in ROOT.parents:
        raise ValueError(f"{name} holds the workbench itself; give a new folder, such as {ROOT / 'runs' / 'mine'}")
    if os.path.ismount(folder):
        raise ValueError(f"{name} is a mount point, which cannot be renamed; give a new folder in it")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name} is a file; give a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "record.json").is_file():
        raise ValueError(f"{name} holds other things than a run, and a run would replace them; give a new folder")


def check_writable(name: str, path: Path) -> None:
    """Raise ValueError if no folder can be made at `path`, the value of the parameter `name`."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    try:
        if there.is_dir():  # permissions are not enough: root has all, and some file systems refuse files
            tempfile.TemporaryDirectory(dir=there, prefix=".workbench-").cleanup()
        elif there != path.absolute() or not os.access(there, os.W_OK):
            raise NotADirectoryError(20, "Not a directory")
    except OSError as error:
        raise ValueError(
            f"`{name}` (={str(path)!r}) cannot be written: {there}: {error.strerror}; name another folder"
        ) from error
