"""Files and folders that appear whole or not at all, and survive a power loss once they are there."""

import os
from pathlib import Path


def write_whole(text: str, path: Path) -> Path:
    """Write a text file: a reader sees the former content or the new one, never a part of it.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the former content is still there then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # random: containers share process numbers
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
