"""Statistics of one pass over a model as it is, on disk: read by every recipe that is calibrated once."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from compress.walk.resume import BlockStore
from compress.walk.statistics import PAIRED, Collector, LayerStatistics, Rows, divided

LIMIT = "WORKBENCH_STATISTICS_GB"  # how much disk the statistics of one model and one calibration may take
PANEL = 256  # rows of a symmetric matrix that are stored together, from the diagonal on


class SavedStatistics:
    """What the inputs of every linear of a model gave, when each block saw what the original blocks before it give.

    The folder holds one folder for each pass, named by the statistics that it collected (`absmax+gram`), with one file
    for each block. Statistics are read when they are asked for, those of one linear at a time. Methods that scale the
    inputs of linears say so by `scale`, and what is read afterwards is that of the scaled inputs.
    """

    def __init__(self, folder: Path, blocks: int) -> None:
        """
        Args:
            folder: of one model and one calibration.
            blocks: how many blocks the model has.
        """
        self.folder, self.blocks = folder, blocks
        self._stores = {need: store for store, needs in self._passes() for need in needs}
        self._scales: dict[str, Tensor] = {}

    def missing(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Those of these statistics that no finished pass has collected, in the order of their names."""
        return tuple(sorted(set(needs) - self._stores.keys()))

    def store_of(self, needs: Sequence[str]) -> BlockStore:
        """Where a pass that collects these statistics keeps its blocks."""
        return BlockStore(self.folder / "+".join(sorted(needs)))

    def groups(self, index: int) -> list[list[str]]:
        """Names of the linears of a block that read the same input."""
        return self._about(index)["groups"]

    def of(self, name: str, index: int, needs: Sequence[str], device: torch.device) -> LayerStatistics:
        """What the inputs of one linear of block `index` gave, and no more than is asked for."""
        about = self._about(index)
        leader = next(group[0] for group in about["groups"] if name in group)
        columns = about["columns"][leader]
        values = {need: self._read(need, leader, index, columns).to(device) for need in needs}
        if name in self._scales:
            s = self._scales[name].to(device)
            values = {need: divided(need, value, s) for need, value in values.items()}
        return LayerStatistics(about["tokens"][leader], values)

    def of_head(self, needs: Sequence[str], device: torch.device) -> LayerStatistics:
        """What the input of the model's head gave, and no more than is asked for."""
        tensors, about = self.head_store().get(0)
        values = {need: tensors[need] for need in needs}
        if "gram" in values:
            values["gram"] = _unpacked(values["gram"], about["columns"])
        return LayerStatistics(about["tokens"], {need: value.to(device) for need, value in values.items()})

    def keep_head(self, columns: int, statistics: LayerStatistics) -> None:
        """Write what the input of the head, of so many columns, gave."""
        tensors = {n: (_packed(v) if n == "gram" else v).cpu() for n, v in statistics.values.items()}
        self.head_store().put(0, tensors, {"columns": columns, "tokens": statistics.tokens, "needs": sorted(tensors)})

    def head_lacks(self, needs: Sequence[str]) -> bool:
        """Is one of these statistics of the head not there?"""
        about = self.head_store().about(0)
        return about is None or not set(needs) <= set(about["needs"])

    def head_store(self) -> BlockStore:
        """Where those of the head are kept: beside the folder, whose own folders are passes over the blocks."""
        return BlockStore(self.folder.with_name(f"{self.folder.name}-head"))

    def scale(self, names: Sequence[str], s: Tensor) -> None:
        """From now on the inputs of these linears are divided by s [in], which a method has folded into the weights."""
        for name in names:
            self._scales[name] = self._scales[name] * s.cpu() if name in self._scales else s.cpu()

    def _passes(self) -> Iterator[tuple[BlockStore, list[str]]]:
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if folder.is_dir() and (store := BlockStore(folder)).finished(self.blocks) == self.blocks:
                yield store, folder.name.split("+")

    def _about(self, index: int) -> dict:
        """{"groups": as `groups` gives them, and by leader of the group "tokens" and "columns", those of its input}."""
        return next(iter(self._stores.values())).about(index)

    def _read(self, need: str, leader: str, index: int, columns: int) -> Tensor:
        with safe_open(self._stores[need].path(index), "pt") as file:
            value = file.get_tensor(f"{need}:{leader}").clone()
        return _unpacked(value, columns) if need == "gram" else value


def keep_block(
    store: BlockStore, index: int, groups: Sequence[Sequence[str]], collected: Mapping[str, Collector]
) -> None:
    """Write what one pass collected of a block; {first linear of a group: the statistics of its input}."""
    tensors, about = {}, {"groups": groups, "tokens": {}, "columns": {}}
    for leader in list(collected):
        result, columns = collected[leader].result(), collected[leader].columns
        about["tokens"][leader], about["columns"][leader] = result.tokens, columns
        for need, value in result.values.items():
            tensors[f"{need}:{leader}"] = (_packed(value) if need == "gram" else value).cpu()
    store.put(index, tensors, about)


def predicted_bytes(columns: Sequence[int], needs: Sequence[str], tokens: int, windows: int) -> int:
    """What the statistics of groups with so many input channels each take on the disk.

    Args:
        columns: input channels of each group of linears that read the same input.
        tokens, windows: of the calibration.
    """
    numbers = 0
    for n in columns:
        upper = sum(min(PANEL, n - start) * (n - start) for start in range(0, n, PANEL))
        per = {"gram": upper, "starts": windows * n, "rows": min(Rows.most, tokens) * n}
        per |= dict.fromkeys(PAIRED, 0)  # nothing is compressed in this pass, so that the two streams are one
        numbers += sum(per.get(need, n) for need in needs)
    return 4 * numbers


def check_room(folder: Path, needed: int) -> None:
    """Raise ValueError if statistics of so many bytes are over the limit, or do not fit on the disk."""
    limit = float(os.environ.get(LIMIT, "100")) * 1e9
    free = shutil.disk_usage(folder).free
    if needed > min(limit, free):
        why = f"{free / 1e9:.1f} GB are free in {folder}" if free <= limit else f"{LIMIT} allows {limit / 1e9:g} GB"
        raise ValueError(
            f"`calibrate` (='once') would keep statistics of {needed / 1e9:.1f} GB, and {why}; `calibrate` "
            f"(='sequential') keeps none; a `work_path` on another disk, or a larger {LIMIT}, would do"
        )


def _packed(H: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix [n, n], with little of the lower one: flat."""
    return torch.cat([H[start : start + PANEL, start:].reshape(-1) for start in range(0, len(H), PANEL)])


def _unpacked(flat: Tensor, n: int) -> Tensor:
    """The symmetric matrix [n, n] that `_packed` was given, to the bit."""
    H, at = flat.new_empty(n, n), 0
    for start in range(0, n, PANEL):
        rows = min(PANEL, n - start)
        panel = flat[at : at + rows * (n - start)].view(rows, n - start)
        H[start : start + rows, start:] = panel
        H[start:, start : start + rows] = panel.t()
        at += panel.numel()
    return H
