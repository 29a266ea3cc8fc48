"""Finished blocks on disk, so that a compression that was killed goes on where it was."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compress.linear import CompressedLinear
from compress.method import LayerRecord


class BlockStore:
    """A folder with one file per finished block of one method of a recipe.

    Each file holds the block's compressed linears and their records (or whatever tensors and JSON a method keeps), and is
    put in place by one rename, so that it is whole or not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, index: int, linears: dict[str, CompressedLinear], records: list[LayerRecord]) -> None:
        tensors = {f"{name}.{k}": t.contiguous() for name, m in linears.items() for k, t in m.state_dict().items()}
        about = {
            "linears": {name: {"spec": m.spec(), "dtype": str(m.dtype).removeprefix("torch.")} for name, m in linears.items()},
            "records": [asdict(record) for record in records],
        }
        self.put(index, tensors, about)

    def load(self, index: int) -> tuple[dict[str, CompressedLinear], list[LayerRecord]] | None:
        found = self.get(index)
        if found is None:
            return None
        tensors, about = found
        linears = {}
        for name, it in about["linears"].items():
            own = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
            linears[name] = CompressedLinear.from_tensors(it["spec"], own, getattr(torch, it["dtype"]))
        records = [LayerRecord(**{**r, "shape": tuple(r["shape"]), "notes": tuple(r["notes"])}) for r in about["records"]]
        return linears, records

    def put(self, index: int, tensors: dict[str, torch.Tensor], about: Any) -> None:
        """Keep a block's tensors and JSON."""
        tensors = tensors | {"_": torch.zeros(1)}  # a block may have nothing to store
        path = self._path(index)
        part = path.with_suffix(f".{os.getpid()}.part")
        save_file(tensors, part, metadata={"about": json.dumps(about)})
        os.replace(part, path)

    def get(self, index: int) -> tuple[dict[str, torch.Tensor], Any] | None:
        """What `put` kept, or None."""
        path = self._path(index)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
        tensors = load_file(path)
        del tensors["_"]
        return tensors, about

    def _path(self, index: int) -> Path:
        return self.folder / f"block_{index:04d}.safetensors"
