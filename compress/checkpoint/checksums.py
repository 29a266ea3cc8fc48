"""The files of a checkpoint with their sizes and hashes, written into it, and verified when it is loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kernels.files import sync

CHECKSUMS = "checksums.json"
# Files that a user may edit or that are written later: card, verification, record of the run, and its manifest.
NOT_COUNTED = ("README.md", "verification.json", "record.json", "manifest.json")


def write_checksums(folder: Path) -> None:
    """Wait until all files of a checkpoint are on the disk, then list them with their sizes and hashes."""
    listed: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in (*NOT_COUNTED, CHECKSUMS):
            sync(path)
            listed[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (folder / CHECKSUMS).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")
    sync(folder / CHECKSUMS)


def check_files(folder: Path, *, content: bool = True) -> None:
    """Raise ValueError, naming the file, unless every file of a checkpoint exists and is unchanged.

    Args:
        folder: a folder with a `checksums.json`.
        content: compare hashes too, which reads every byte; False: sizes only.
    """
    where = f"`path` (={str(folder)!r})"
    try:
        listed = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        entries = [(name, entry["bytes"], entry["sha256"]) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {CHECKSUMS} is missing or damaged; download or copy the folder again") from error
    for name, size, sha256 in entries:
        path, again = folder / name, "download or copy it again"
        if not path.is_file():
            raise ValueError(f"{where} lacks {name}, which {CHECKSUMS} lists; {again}")
        if (found := path.stat().st_size) != size:
            raise ValueError(f"{where}: {name} has {found} bytes, and was written with {size}; {again}")
        if content and _sha256(path) != sha256:
            raise ValueError(f"{where}: the content of {name} is not what was written (its sha256 differs); {again}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
