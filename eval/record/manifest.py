"""Manifests: a folder lists its own files with their sizes and hashes, so that it can be verified later.

A folder of a finished run and a folder of a saved model each hold a `manifest.json`. It is written last and atomically,
so that a folder without one was not finished.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from eval.record.files import sync, write_whole
from eval.record.reading import DamagedError, read_object

MANIFEST = "manifest.json"
_SHAPE = {
    "key": str, "notebook": str, "values": dict, "identity": dict, "varied": list, "code": str, "seconds": int | float,
    "attempt": str, "earlier": list, "finished": str, "files": dict, "save_format": str,
}  # fmt: skip
_WHOLE = 1 << 30  # bytes; a larger file is identified by its size, its time of change and its first MiB
_QUICK = 64 << 20  # bytes; of a larger file, `problems` compares the size only


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Wait until all files of a folder are on the disk, then write their manifest.

    Args:
        about: further entries of the manifest, such as the key of the run.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    listed = {}
    for path in files:
        sync(path)
        listed[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    write_whole(json.dumps({**about, "finished": finished, "files": listed}, indent=1), folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; {} if it has none.

    Raises:
        DamagedError: it cannot be read, or is none.
    """
    made = read_object(folder / MANIFEST, _SHAPE)
    for name, entry in made.get("files", {}).items():
        told = entry if isinstance(entry, dict) else {}
        if type(told.get("bytes")) is not int or not isinstance(told.get("sha256"), str):
            raise DamagedError(f"{MANIFEST} is damaged: it tells no size and hash of {name}")
    if made and "files" not in made:
        raise DamagedError(f"{MANIFEST} is damaged: it lists no files")
    return made


def problems(folder: Path, key: str = "", derived: Collection[str] = ()) -> list[str]:
    """The reasons why a folder is not the finished one that its manifest describes; [] if it is.

    Args:
        key: key of the run to which the folder should belong; "" for any.
        derived: names of files whose content may differ from the manifest.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    return problems_of(manifest, folder, key, derived) if manifest else ["it has no manifest"]


def problems_of(manifest: dict[str, Any], folder: Path, key: str, derived: Collection[str]) -> list[str]:
    """As `problems`, for a manifest that was read."""
    wrong = []
    if key and manifest.get("key") != key:
        wrong.append(f"it belongs to the run {manifest.get('key')}")
    for name, entry in manifest["files"].items():
        file = folder / name
        try:
            if not file.is_file():
                wrong.append(f"{name} is gone")
            elif name in derived:
                continue
            elif file.stat().st_size != entry["bytes"]:
                wrong.append(f"{name} has another size")
            elif entry["bytes"] <= _QUICK and file_sha256(file) != entry["sha256"]:
                wrong.append(f"{name} has another content")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    return wrong


def file_sha256(path: Path) -> str:
    """Hash of a file's content, computed once for as long as the file does not change."""
    stat = path.stat()
    return _file_sha256(str(path.absolute()), stat.st_size, stat.st_mtime_ns)


@cache
def _file_sha256(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        if size <= _WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256(file.read(1 << 20) + f"{size} {changed_ns}".encode()).hexdigest()
