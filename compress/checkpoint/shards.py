"""Weights in safetensors files of at most 5 GB, with the index that transformers and vLLM read; room on the disk."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn

from compress.checkpoint.files import INDEX, ONE_FILE, opened, weight_files
from compress.walk.shards import OnDisk, write_tensors
from kernels.support.errors import first_line

SHARD_BYTES = 5_000_000_000  # the largest size of a file in hubs and transformers
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, a quota, a limit on the size of files


def write_shards(
    tensors: Iterable[tuple[str, Tensor | OnDisk]],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    finished: Mapping[Path, Iterable[str]] = MappingProxyType({}),
) -> None:
    """Write tensors into `model.safetensors`, or into several files and their index.

    Args:
        tensors: (name, tensor) one after the other; a generator holds one file's worth in memory at a time. A tensor
            larger than `shard_bytes` gets a file of its own.
        folder: the target; it must not hold such files yet.
        finished: safetensors files that become files of the target, with the names of their tensors; by hard links if
            the file system supports them.
    """
    files: list[tuple[Path, list[str]]] = []
    total, size, held = 0, 0, {}

    def part(names: Iterable[str]) -> Path:
        files.append((folder / f"shard-{len(files) + 1}.part", list(names)))
        return files[-1][0]

    for source, names in finished.items():
        _link(source, target := part(names))
        total += target.stat().st_size
    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            write_tensors(part(held), held)
            size, held = 0, {}
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if held or not files:
        write_tensors(part(held), held)
    if len(files) == 1:
        files[0][0].rename(folder / ONE_FILE)
        return
    where = {}
    for number, (path, names) in enumerate(files, 1):
        last = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / last)
        where |= dict.fromkeys(names, last)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


class Shards:
    """The tensors of a folder in safetensors, read one by one.

    Raises:
        ValueError: as in `weight_files`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._where = folder, weight_files(folder)

    def names(self) -> list[str]:
        return list(self._where)

    def all(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        found = {}
        for one in sorted(set(self._where.values())):
            with opened(self.folder / one) as file:
                found |= {name: file.get_tensor(name) for name, where in self._where.items() if where == one}
        return found

    def read(self, name: str) -> Tensor:
        with opened(self.folder / self._where[name]) as file:
            return file.get_tensor(name)

    def read_rows(self, rows: Mapping[str, slice]) -> dict[str, Tensor]:
        """Some rows of some tensors, by name; others are not read, and every file is opened once."""
        found = {}
        for one in sorted({self._where[name] for name in rows}):
            with opened(self.folder / one) as file:
                own = [name for name in rows if self._where[name] == one]
                found |= {name: file.get_slice(name)[rows[name]] for name in own}
        return found


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that a model stores, each shared tensor once."""
    state = model.state_dict().items()
    tensors = {name if t.is_meta or not t.numel() else (t.data_ptr(), t.shape): t for name, t in state}
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def room_for(needed: int, path: Path) -> Iterator[None]:
    """Run a block that writes `needed` bytes into the folder of `path`.

    Raises:
        OSError: there is not enough room, before the block is entered or while it writes; the message says how many
            bytes are needed and how many are free.
    """
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise _full(path, needed, free)
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _full(path, needed, shutil.disk_usage(path.parent).free, f" ({first_line(error)})") from error
        raise


def _full(path: Path, needed: int, free: int, why: str = "") -> OSError:
    return OSError(
        errno.ENOSPC,
        f"`path` (={str(path)!r}) needs {needed} bytes ({needed / 1e9:.2f} GB), and its disk has {free} free "
        f"({free / 1e9:.2f} GB){why}: make room, or name a folder on another disk",
    )
