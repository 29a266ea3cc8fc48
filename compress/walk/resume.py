"""Finished blocks on disk, so that a compression that was killed continues after them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from compress.linear import CompressedLinear
from eval.record.compression import LayerRecord
from eval.record.reading import row
from kernels.support.files import whole_file


class BlockStore:
    """A folder with one file per finished block of one method of a recipe.

    Each file holds the block's compressed linears and their records (or other tensors and JSON that a method keeps),
    and is put in place by one rename, so that it is either complete or absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of: tuple[Path, list, list] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(
        cls, work_path: Path, steps: list[tuple[str, dict[str, Any]]], about: list[Any], what: str = ""
    ) -> "BlockStore":
        """The store of the last of these steps, each of which is (method, knobs).

        Args:
            about: the other data on which its blocks depend, as JSON.
            what: the kind of data that is kept; "": blocks.
        """
        key = hashlib.sha256(json.dumps([steps, *about], sort_keys=True).encode()).hexdigest()[:16]
        store = cls(work_path / "-".join(filter(None, (steps[-1][0], what, key))))
        store._of = work_path, steps, about
        return store

    def beside(self, what: str, *, without: Sequence[str]) -> "BlockStore":
        """A store for other data of the same step, which does not depend on the knobs `without`."""
        work_path, steps, about = self._of
        name, knobs = steps[-1]
        return BlockStore.of(
            work_path, [*steps[:-1], (name, {k: v for k, v in knobs.items() if k not in without})], about, what
        )

    def save(self, index: int, linears: dict[str, CompressedLinear], records: list[LayerRecord]) -> None:
        tensors = {f"{name}.{k}": t.contiguous() for name, m in linears.items() for k, t in m.state_dict().items()}
        about = {
            "linears": {
                name: {"spec": m.spec(), "dtype": str(m.dtype).removeprefix("torch.")} for name, m in linears.items()
            },
            "records": [asdict(record) for record in records],
        }
        self.put(index, tensors, about)

    def finished(self, blocks: int) -> int:
        """The number of blocks, counted from the first one on, that can be read, out of `blocks` in all."""
        return next((index for index in range(blocks) if self.about(index) is None), blocks)

    def load(self, index: int) -> tuple[dict[str, CompressedLinear], list[LayerRecord]] | None:
        found = self.get(index)
        if found is None:
            return None
        tensors, about = found
        linears = {}
        for name, it in about["linears"].items():
            own = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
            linears[name] = CompressedLinear.from_tensors(it["spec"], own, getattr(torch, it["dtype"]))
        return linears, list(row(tuple[LayerRecord, ...], about["records"]))

    def put(self, index: int, tensors: dict[str, torch.Tensor], about: Any) -> None:
        """Keep a block's tensors and JSON."""
        tensors = _apart(tensors) | {"_": torch.zeros(1)}  # a block may have nothing to store
        with whole_file(self.path(index)) as temporary:
            save_file(tensors, temporary, metadata={"about": json.dumps(about)})

    def get(self, index: int) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The data that `put` kept; None if there is no file, or an unreadable one (after a power loss, say)."""
        about = self.about(index)
        if about is None:
            return None
        tensors = load_file(self.path(index))
        del tensors["_"]
        return tensors, about

    def about(self, index: int) -> Any | None:
        """The JSON that `put` kept; None if there is no file, or one that cannot be read."""
        try:
            with safe_open(self.path(index), "pt") as file:
                return json.loads(file.metadata()["about"])
        except (OSError, ValueError, TypeError, KeyError, SafetensorError):
            return None

    def path(self, index: int) -> Path:
        """The file of a block."""
        return self.folder / f"block_{index:04d}.safetensors"


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with copies of those that share memory with an earlier one, which safetensors refuses: a table, say,
    that many weights have in common."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return apart
