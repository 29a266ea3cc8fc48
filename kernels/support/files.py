"""Files that appear whole or not at all, and survive a power loss once they exist.

This module is in `kernels` because every other package may import it; `reports` uses it through `eval.record.files`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write a file to, which replaces `path` when the block ends without an error.

    A reader of `path` sees the former content or the new one, never a part of it.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the former content is then kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # random: containers share process numbers
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(text: str, path: Path) -> Path:
    """Write a text file by `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
