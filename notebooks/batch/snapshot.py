"""The code of a sweep under way: a copy of the packages and notebooks in the sweep's folder, which its runs execute."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.machine.checkout import checkout
from eval.record.manifest import file_sha256
from notebooks.batch.sweep.files import LINK
from notebooks.study.identity import ROOT, packages_code
from notebooks.study.parameters import notebook_path

PACKAGES = ("compress", "eval", "kernels", "reports", "notebooks")
_OWN = ROOT / "notebooks"
_LEFT_OUT = ("published", "*.part", ".ipynb_checkpoints")


@dataclass(frozen=True)
class Code:
    """The code that runs execute.

    root: the folder that holds the packages. sha256: their normalised hash (`packages_code`). commit: "<commit> clean"
    or "<commit> dirty" of the checkout, "" if there is none.
    """

    root: str
    sha256: str
    commit: str

    def notebook(self, notebook: str | Path) -> Path:
        """The file of a notebook in this code, or the original if the code holds no copy of it."""
        original = notebook_path(notebook).resolve()
        if original.is_relative_to(_OWN):
            copy = Path(self.root) / original.relative_to(ROOT)
        else:
            copy = _foreign(Path(self.root), original)
        return copy if copy.is_file() else original


def current() -> Code:
    """The checkout's own code, which is used if no snapshot was taken."""
    return Code(str(ROOT), packages_code(), _commit())


def take(folder: Path, notebooks: Iterable[str | Path], runs: Path, *, keep_others: bool = False) -> Code:
    """Copy the packages, and notebooks that lie elsewhere, into a folder named by their content.

    Args:
        folder: for snapshots of this sweep; earlier ones in it are removed.
        runs: the folder of runs, which recipes reach as `runs` (`sweep.files.LINK`).
        keep_others: keep earlier snapshots, because another process may be running them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{os.urandom(6).hex()}"
    try:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, part / package, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for original in {notebook_path(notebook).resolve() for notebook in notebooks}:
            if not original.is_relative_to(_OWN):
                _foreign(part, original).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(original, _foreign(part, original))
        root = folder / _content(part)
        if not root.is_dir():
            (part / LINK).symlink_to(runs.absolute(), target_is_directory=True)
            os.rename(part, root)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if not keep_others:
        for other in folder.iterdir():
            if other != root:
                shutil.rmtree(other, ignore_errors=True)
    return Code(str(root), packages_code(), _commit())


def _foreign(root: Path, original: Path) -> Path:
    place = hashlib.sha256(str(original.parent).encode()).hexdigest()[:12]
    return root / "notebooks" / "elsewhere" / place / original.name


def _content(root: Path) -> str:
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    listed = "\n".join(f"{path.relative_to(root)} {file_sha256(path)}" for path in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:12]


def _commit() -> str:
    commit, dirty = checkout()
    return f"{commit} {'dirty' if dirty else 'clean'}" if commit else ""
