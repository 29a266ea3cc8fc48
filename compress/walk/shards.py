"""Safetensors files of weights on disk: they are read tensor by tensor, and written without a second copy.

The safetensors library maps whole files into the address space, which a limit on that space (RLIMIT_AS) counts; here
each tensor is read into memory of its own.
"""

import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kernels.support.flock import AT_ONCE, EXCLUSIVE, LOCKS, flock

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PREFIX = "workbench-offload-"


@dataclass(frozen=True)
class OnDisk:
    """One tensor of a file: its bytes, in the dtype `stored`, begin at `start`; it is read in the dtype `dtype`."""

    source: "Source"
    stored: torch.dtype
    shape: tuple[int, ...]
    start: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.stored.itemsize

    @property
    def place(self) -> tuple[Path, int]:
        """The place of the tensor's bytes, which is the same for tensors that share them."""
        return self.source.path, self.start

    def read(self, cached: bool = True) -> Tensor:
        """The tensor, in memory of its own. cached: the system may keep the file's bytes in memory that is free."""
        tensor = torch.empty(self.shape, dtype=self.stored)
        with self.source.path.open("rb", buffering=0) as stream:
            self._fill(stream, tensor, self.start)
            if not cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), self.start, tensor.nbytes, os.POSIX_FADV_DONTNEED)
        return tensor.to(self.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """Only these rows [n, ...] of the tensor."""
        tensor = torch.empty((len(numbers), *self.shape[1:]), dtype=self.stored)
        size = math.prod(self.shape[1:]) * self.stored.itemsize
        with self.source.path.open("rb", buffering=0) as stream:
            for row, number in zip(tensor, numbers.tolist(), strict=True):
                self._fill(stream, row, self.start + number * size)
        return tensor.to(self.dtype)

    def _fill(self, stream: BinaryIO, tensor: Tensor, start: int) -> None:
        view = memoryview(_bytes(tensor))
        stream.seek(start)
        while view:  # one call reads 2 GB at most
            count = stream.readinto(view)
            if not count:
                raise ValueError(f"{self.source.path} ends early: it is damaged or not complete")
            view = view[count:]


@dataclass(frozen=True)
class StackedOnDisk(OnDisk):
    """One tensor [experts, rows, columns], or [experts, rows], of which files hold the part of every expert by itself.

    Attributes:
        experts: for each expert, its matrices or vectors, one above the other.
    """

    experts: tuple[tuple[OnDisk, ...], ...] = ()

    @classmethod
    def of(cls, experts: Sequence[Sequence[OnDisk]]) -> "StackedOnDisk":
        """The tensor of these matrices [rows, columns], or vectors [rows], which are alike in every expert."""
        first = experts[0][0]
        shape = len(experts), sum(one.shape[0] for one in experts[0]), *first.shape[1:]
        return cls(first.source, first.stored, shape, first.start, first.dtype, tuple(map(tuple, experts)))

    def read(self, cached: bool = True) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for expert, own in zip(tensor, self.experts, strict=True):
            parts = expert.split([one.shape[0] for one in own])
            for part, one in zip(parts, own, strict=True):
                part.copy_(one.read(cached))
        return tensor

    def rows(self, numbers: Tensor) -> Tensor:
        return self.read()[numbers]


class Source:
    """A file that tensors are read from. Copies of a model share it; one in a work folder is removed when no tensor
    refers to it any more."""

    def __init__(self, path: Path, folder: "WorkFolder | None") -> None:
        self.path = path
        if folder is not None:
            weakref.finalize(self, folder.remove, path)

    def __deepcopy__(self, memo: dict) -> "Source":
        return self


class TensorFile:
    """The tensors of one safetensors file, by name.

    Raises:
        ValueError: the file is damaged or not complete.
    """

    def __init__(self, path: Path, folder: "WorkFolder | None" = None) -> None:
        """folder: the folder of a temporary file."""
        source = Source(path, folder)
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= path.stat().st_size - 8:
                    raise ValueError("its header is cut off")
                header = json.loads(stream.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.tensors: dict[str, OnDisk] = {}
            end = 0
            for name, it in header.items():
                dtype, start = DTYPES[it["dtype"]], 8 + length + it["data_offsets"][0]
                self.tensors[name] = OnDisk(source, dtype, tuple(it["shape"]), start, dtype)
                end = max(end, start + self.tensors[name].nbytes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file that can be read: {error}") from error
        if end > path.stat().st_size:
            raise ValueError(f"{path} is damaged or not complete: it is shorter than its header says")


def write_tensors(path: Path, tensors: Mapping[str, Tensor | OnDisk]) -> None:
    """Write a safetensors file. Tensors that share memory are written once each; those on disk are read one by one.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    tensors = dict(sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize))  # so that all of them are aligned
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as stream:
        for part in (len(text).to_bytes(8, "little"), text):
            stream.write(part)
        for tensor in tensors.values():
            tensor = tensor.read() if isinstance(tensor, OnDisk) else tensor.detach()
            view = memoryview(_bytes(tensor.cpu().contiguous()))
            while view:
                view = view[stream.write(view) :]


class WorkFolder:
    """A folder for temporary files; removed with its last user, or, after a kill, when the next one is made."""

    def __init__(self, parent: str | Path = "") -> None:
        """parent: where the folder is made; by default in the system's folder for temporary files."""
        parent = Path(parent or tempfile.gettempdir()).expanduser()
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.bytes = self.peak = self._count = 0  # bytes in the folder now, and their largest number so far
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR)
        flock(lock, EXCLUSIVE)
        weakref.finalize(self, _close, lock, self.path)

    def keep(self, tensors: Mapping[str, Tensor]) -> TensorFile:
        """Write these tensors to a temporary file."""
        self._count += 1
        path = self.path / f"{self._count:06d}.safetensors"
        write_tensors(path, tensors)
        self.bytes += path.stat().st_size
        self.peak = max(self.peak, self.bytes)
        return TensorFile(path, self)

    def remove(self, path: Path) -> None:
        """Remove a file that is no longer referred to."""
        with suppress(FileNotFoundError):
            self.bytes -= path.stat().st_size
            path.unlink()

    def __deepcopy__(self, memo: dict) -> "WorkFolder":
        return self


def _close(lock: int, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders of processes that were killed, recognised by locks that no process holds."""
    for lock in parent.glob(f"{_PREFIX}*/lock") if LOCKS else ():
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:  # another user's, or removed
            continue
        try:
            flock(descriptor, EXCLUSIVE | AT_ONCE)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def _bytes(tensor: Tensor):
    """A contiguous tensor's memory as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
