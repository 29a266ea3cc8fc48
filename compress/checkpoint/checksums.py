"""The files of a checkpoint with their sizes and hashes, written into it, and verified when it is loaded."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from kernels.support.files import sync

CHECKSUMS = "checksums.json"
# Files that a user may edit or that are written later: card, verification, record of the run, and its manifest.
NOT_COUNTED = ("README.md", "verification.json", "record.json", "manifest.json")
# Files from which a model is built. A folder with checksums holds no others of these kinds than those that it lists.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SETTINGS = ("config.json", "generation_config.json", "workbench.json", "quantize_config.json", "adapter_config.json")


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
    """Raise ValueError, naming the file, unless every file of a checkpoint exists and is unchanged, and no other file
    holds weights or settings of the model.

    Args:
        folder: a folder with a `checksums.json`.
        content: compare hashes too, which reads every byte; False: sizes only.
    """
    where, entries = f"`path` (={str(folder)!r})", _entries(folder)
    here = {path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS) or path.name in SETTINGS}
    if unlisted := sorted(here - entries.keys()):
        raise ValueError(
            f"{where} holds {unlisted[0]}, which {CHECKSUMS} does not list: it is not part of what was saved; remove it"
        )
    for name, (size, sha256) in entries.items():
        path, again = folder / name, "download or copy it again"
        if not path.is_file():
            raise ValueError(f"{where} lacks {name}, which {CHECKSUMS} lists; {again}")
        if (found := path.stat().st_size) != size:
            raise ValueError(f"{where}: {name} has {found} bytes, and was written with {size}; {again}")
        if content and _sha256(path) != sha256:
            raise ValueError(f"{where}: the content of {name} is not what was written (its sha256 differs); {again}")


def listed_files(folder: Path) -> set[str]:
    """The names of the files that the `checksums.json` of a folder lists.

    Raises:
        ValueError: it is damaged.
    """
    return set(_entries(folder))


def _entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 by name."""
    where = f"`path` (={str(folder)!r})"
    try:
        listed = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: {CHECKSUMS} is missing or damaged; download or copy the folder again") from error
    for name in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{where}: {CHECKSUMS} lists {name!r}, which is not in the folder")
    return entries


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
