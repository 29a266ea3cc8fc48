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

LIMIT = "WORKBENCH_STATISTICS_GB"  # limit of the disk space for the statistics of one model and one calibration
PANEL = 256  # rows of a symmetric matrix that are stored together, from the diagonal on


class SavedStatistics:
    """Statistics of the inputs of every linear of a model, where each block read the outputs of the original blocks.

    The folder holds one folder for each pass, named by the statistics that it collected (`absmax+gram`), with one file
    for each block. Statistics are read on request, for one linear at a time. Methods that scale the inputs of linears
    announce this by `scale`; later reads then give the statistics of the scaled inputs.
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
        """The requested statistics that no finished pass has collected, in the order of their names."""
        return tuple(sorted(set(needs) - self._stores.keys()))

    def store_of(self, needs: Sequence[str]) -> BlockStore:
        """The store in which a pass that collects these statistics keeps its blocks."""
        return BlockStore(self.folder / "+".join(sorted(needs)))

    def groups(self, index: int) -> list[list[str]]:
        """Names of the linears of a block that read the same input."""
        return self._about(index)["groups"]

    def of(self, name: str, index: int, needs: Sequence[str], device: torch.device) -> LayerStatistics:
        """The requested statistics of the inputs of one linear of block `index`."""
        about = self._about(index)
        leader = next(group[0] for group in about["groups"] if name in group)
        columns = about["columns"][leader]
        values = {need: self._read(need, leader, index, columns).to(device) for need in needs}
        if name in self._scales:
            s = self._scales[name].to(device)
            values = {need: divided(need, value, s) for need, value in values.items()}
        return LayerStatistics(about["tokens"][leader], values)

    def of_head(self, needs: Sequence[str], device: torch.device) -> LayerStatistics:
        """The requested statistics of the input of the model's head."""
        tensors, about = self.head_store().get(0)
        values = {need: tensors[need] for need in needs}
        if "gram" in values:
            values["gram"] = _unpacked(values["gram"], about["columns"])
        return LayerStatistics(about["tokens"], {need: value.to(device) for need, value in values.items()})

    def keep_head(self, columns: int, statistics: LayerStatistics) -> None:
        """Write the statistics of the head's input, which has this number of columns."""
        tensors = {n: (_packed(v) if n == "gram" else v).cpu() for n, v in statistics.values.items()}
        self.head_store().put(0, tensors, {"columns": columns, "tokens": statistics.tokens, "needs": sorted(tensors)})

    def head_lacks(self, needs: Sequence[str]) -> bool:
        """Whether any of these statistics of the head is missing."""
        about = self.head_store().about(0)
        return about is None or not set(needs) <= set(about["needs"])

    def head_store(self) -> BlockStore:
        """The store of the head's statistics: beside the folder, whose own folders are passes over the blocks."""
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
        """{"groups": as `groups` gives them; "tokens" and "columns" of the inputs, by each group's first linear}."""
        return next(iter(self._stores.values())).about(index)

    def _read(self, need: str, leader: str, index: int, columns: int) -> Tensor:
        with safe_open(self._stores[need].path(index), "pt") as file:
            value = file.get_tensor(f"{need}:{leader}").clone()
        return _unpacked(value, columns) if need == "gram" else value


def keep_block(
    store: BlockStore, index: int, groups: Sequence[Sequence[str]], collected: Mapping[str, Collector]
) -> None:
    """Write the statistics of a block from one pass; collected: {first linear of a group: collector of its input}."""
    tensors, about = {}, {"groups": groups, "tokens": {}, "columns": {}}
    for leader in list(collected):
        result, columns = collected[leader].result(), collected[leader].columns
        about["tokens"][leader], about["columns"][leader] = result.tokens, columns
        for need, value in result.values.items():
            tensors[f"{need}:{leader}"] = (_packed(value) if need == "gram" else value).cpu()
    store.put(index, tensors, about)


def predicted_bytes(columns: Sequence[int], needs: Sequence[str], tokens: int, windows: int) -> int:
    """The disk space that the statistics of these groups need.

    Args:
        columns: input channels of each group of linears that read the same input.
        tokens, windows: the numbers in the calibration.
    """
    numbers = 0
    for n in columns:
        upper = sum(min(PANEL, n - start) * (n - start) for start in range(0, n, PANEL))
        per = {"gram": upper, "starts": windows * n, "rows": min(Rows.most, tokens) * n}
        per |= dict.fromkeys(PAIRED, 0)  # nothing is compressed in this pass, so both streams are equal
        numbers += sum(per.get(need, n) for need in needs)
    return 4 * numbers


def check_room(folder: Path, needed: int) -> None:
    """Raise ValueError if statistics of this size in bytes exceed the limit, or do not fit on the disk."""
    limit = float(os.environ.get(LIMIT, "100")) * 1e9
    free = shutil.disk_usage(folder).free
    if needed > min(limit, free):
        why = f"{free / 1e9:.1f} GB are free in {folder}" if free <= limit else f"{LIMIT} allows {limit / 1e9:g} GB"
        raise ValueError(
            f"`calibrate` (='once') would keep statistics of {needed / 1e9:.1f} GB, and {why}; `calibrate` "
            f"(='sequential') keeps none; a `work_path` on another disk, or a larger {LIMIT}, works"
        )


def _packed(H: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix [n, n], with a few values of the lower one, as a flat tensor."""
    return torch.cat([H[start : start + PANEL, start:].reshape(-1) for start in range(0, len(H), PANEL)])


def _unpacked(flat: Tensor, n: int) -> Tensor:
    """The symmetric matrix [n, n] that `_packed` was given, equal to the last bit."""
    H, at = flat.new_empty(n, n), 0
    for start in range(0, n, PANEL):
        rows = min(PANEL, n - start)
        panel = flat[at : at + rows * (n - start)].view(rows, n - start)
        H[start : start + rows, start:] = panel
        H[start:, start : start + rows] = panel.t()
        at += panel.numel()
    return H
