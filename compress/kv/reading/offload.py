"""The part of a cache outside the memory that attention reads; it is written once, and fetched row by row."""

import copy
import mmap
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class OffloadedRows:
    """Rows [N, C] in main memory, or in a file that is mapped into it; copies of a cache share them.

    Attributes:
        fetched: bytes that were fetched so far.
    """

    def __init__(self, x: Tensor, folder: str = "", fetched: int = 0) -> None:
        """x: the rows. folder: of the file, which has no name and is freed with the last copy; empty: main memory.

        Raises:
            OSError: the folder has no room.
        """
        self.device, self.fetched = x.device, fetched
        x = x.detach().contiguous()
        if folder and x.numel():
            self.rows = _mapped(x.cpu(), folder)
        else:
            self.rows = x.clone() if x.device.type == "cpu" else x.cpu().pin_memory()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes

    def fetch(self, numbers: Tensor) -> Tensor:
        """Rows [n, C] with these numbers [n], on the original device of the rows."""
        found = self.rows.index_select(0, numbers.to("cpu"))
        self.fetched += found.nbytes
        return found.to(self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedRows":
        """The same rows, which never change, with a separate count of fetched bytes."""
        return copy.copy(self)


def _mapped(x: Tensor, folder: str) -> Tensor:
    """A copy of x [N, C] in a file of a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(memoryview(x.view(torch.uint8).numpy()))  # not through the map: a full disk would end the process
        file.flush()
        room = mmap.mmap(file.fileno(), x.nbytes)
    return torch.frombuffer(room, dtype=x.dtype).view(x.shape)


def check_folder(name: str, folder: str) -> None:
    """Raise ValueError if files cannot be made in the folder that the knob `path` of a method of this name gives."""
    if not folder:
        return
    if not Path(folder).is_dir():
        raise ValueError(f"`path` (={folder!r}) of {name} must be a folder that exists, or empty for main memory")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"`path` (={folder!r}) of {name} must be a folder that can be written to: {error}") from error
