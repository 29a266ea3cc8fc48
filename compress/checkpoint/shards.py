"""Weights in safetensors files of at most 5 GB, with the index that transformers and vLLM read."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 5_000_000_000  # what hubs and transformers take for the size of a file
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors into `model.safetensors`, or into several files and their index.

    Args:
        tensors: (name, tensor) one after the other; a generator holds one file's worth in memory at a time. A tensor
            larger than `shard_bytes` gets a file of its own.
        folder: where to; it must not hold such files yet.
    """
    files: list[tuple[Path, list[str]]] = []
    total, size, held = 0, 0, {}

    def flush() -> None:
        path = folder / f"shard-{len(files) + 1}.part"
        save_file(held, path, metadata={"format": "pt"})
        files.append((path, list(held)))

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size, held = 0, {}
        held[name] = _own_copy(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
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


class Shards:
    """The tensors of a folder in safetensors, read one by one.

    Raises:
        ValueError: the folder has no safetensors, or its index names a file that is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).is_file():
            self._where: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / ONE_FILE).is_file():
            with safe_open(folder / ONE_FILE, framework="pt") as file:
                self._where = dict.fromkeys(file.keys(), ONE_FILE)
        else:
            raise ValueError(f"`path` (={str(folder)!r}) holds neither {ONE_FILE} nor {INDEX}")
        if missing := sorted({one for one in self._where.values() if not (folder / one).is_file()}):
            raise ValueError(f"`path` (={str(folder)!r}) lacks {', '.join(missing)}, which {INDEX} names")

    def names(self) -> list[str]:
        return list(self._where)

    def all(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {
            name: tensor
            for one in sorted(set(self._where.values()))
            for name, tensor in load_file(self.folder / one).items()
        }

    def read(self, name: str) -> Tensor:
        with safe_open(self.folder / self._where[name], framework="pt") as file:
            return file.get_tensor(name)


def _own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous; safetensors refuses views that share memory."""
    tensor = tensor.detach().to("cpu")
    return tensor.contiguous().clone() if tensor._is_view() else tensor.contiguous()


def total_bytes(folder: Path) -> int:
    """Bytes of all weight files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
