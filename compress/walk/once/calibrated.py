"""One calibration for many recipes: a pass that keeps the statistics of a model as it is, and methods solved from them.

Every block reads the outputs of the uncompressed blocks, so that one pass serves every recipe. The walk
(`compress.walk.walk`) uses the outputs of the compressed blocks instead, which is more accurate but must be repeated
for each recipe.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.embedding import find_ends
from compress.linear import CompressedLinear, replace, shape_of, weight_of
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import block_calls, on_device
from compress.walk.chain import Chain
from compress.walk.context import Context
from compress.walk.ends.inputs import head_statistics
from compress.walk.groups import collect, input_groups
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.resume import BlockStore
from compress.walk.shards import WorkFolder
from compress.walk.statistics.saved import SavedStatistics, check_room, keep_block, predicted_bytes
from compress.walk.walk import Solver, chosen_linears, solve_linear, with_errors
from eval.record.compression import LayerRecord
from kernels.linear import fast_linear

CALIBRATE = ("sequential", "once")


def check_calibrate(calibrate: str) -> None:
    """Raise ValueError unless `calibrate` is "sequential" or "once"."""
    if calibrate not in CALIBRATE:
        raise ValueError(f"`calibrate` (={calibrate!r}) must be one of {', '.join(CALIBRATE)}")


@dataclasses.dataclass(frozen=True)
class SharedStatistics:
    """The folder of the statistics of uncompressed models, and the statistics that the recipes of a run need."""

    folder: Path
    needs: tuple[str, ...]
    head: bool  # whether statistics of the head are needed, too
    held: WorkFolder | None  # the folder, if it is a temporary one

    def statistics(
        self, model: nn.Module, batches: Sequence[Tensor], about: Sequence[Any], *, device: torch.device
    ) -> SavedStatistics:
        """The statistics of a model; they are collected now unless they are in the folder.

        Args:
            about: the data on which they depend, as JSON: the model's weights, the calibration tokens, the code.

        Raises:
            ValueError: the statistics need more disk space than is free, or than is allowed.
        """
        key = hashlib.sha256(json.dumps([*about, device.type], sort_keys=True).encode()).hexdigest()[:16]
        blocks = len(find_blocks(model)[1])
        saved = SavedStatistics(self.folder / f"statistics-{key}", blocks)
        missing = tuple(sorted({need for found in current().gathered(saved.missing(self.needs)) for need in found}))
        if missing:
            store = saved.store_of(missing)
            collect_statistics(model, batches, missing, store, device=device, resumable=self.held is None)
        if self.head and find_ends(model).head and any(current().gathered(saved.head_lacks(self.needs))):
            statistics = head_statistics(model, batches, self.needs, device=device)
            columns = shape_of(model.get_output_embeddings())[1]
            saved.keep_head(columns, statistics)
        return SavedStatistics(saved.folder, blocks)


def shared_statistics(needs: Sequence[str], work_path: str | Path | None, *, head: bool = False) -> SharedStatistics:
    """A place for statistics in `work_path`, where they stay; without one, a folder that is removed with the result."""
    held = None if work_path else WorkFolder()
    return SharedStatistics(Path(work_path or held.path), tuple(sorted(set(needs))), head, held)


@torch.no_grad()
def collect_statistics(
    model: nn.Module,
    batches: Sequence[Tensor],
    needs: Sequence[str],
    store: BlockStore,
    *,
    device: torch.device,
    resumable: bool = True,
) -> None:
    """Run the model once, block by block, and keep statistics of the inputs of every linear of its blocks.

    Args:
        needs: names in compress.walk.statistics.STATISTICS.
        store: where they are kept, a file for each block.
        resumable: keep the activations of the newest block, too, so that a pass that was killed goes on there.

    Raises:
        ValueError: the statistics need more disk space than is free, or than is allowed.
    """
    prefix, blocks = find_blocks(model)
    shapes = targets(model)
    calls = block_calls(model, blocks, batches, divided=True)
    chain = Chain(store, calls) if resumable else None
    finished = chain.resume(len(blocks)) if chain else 0
    progress = progress_bar(range(finished, len(blocks)), desc="statistics", unit="block")
    for index in progress:
        own = [name for name in shapes if name.startswith(f"{prefix}.{index}.")]
        last = index + 1 == len(blocks)
        with on_device(blocks[index], device), fast_linear():
            linears = {name: model.get_submodule(name) for name in own}
            groups, once = input_groups(blocks[index], linears, calls, index, device)
            if index == finished:
                columns = _columns(prefix, shapes, groups, range(index, len(blocks)))
                size = predicted_bytes(columns, needs, sum(batch.numel() for batch in batches), len(batches))
                check_room(store.folder, size)
                progress.set_description(f"statistics ({', '.join(needs)}; {size / 1e9:.2f} GB on the disk)")
            collected = collect(
                blocks[index],
                linears,
                groups,
                calls,
                index,
                needs,
                device,
                stop_early=once and last,
                pass_on=not last,
            )
        with chain.keeping(index, last=last) if chain else nullcontext():
            keep_block(store, index, groups, collected)


def _columns(
    prefix: str, shapes: Mapping[str, tuple[int, int]], groups: Sequence[Sequence[str]], blocks: Sequence[int]
) -> list[int]:
    """Input channels of each group of linears of these blocks; `groups` are the groups of the first block.

    Blocks with the same linears have the same groups; in others every linear may have a group of its own.
    """

    def linears_of(index: int) -> dict[str, int]:
        own = f"{prefix}.{index}."
        return {name.removeprefix(own): shape[1] for name, shape in shapes.items() if name.startswith(own)}

    first = linears_of(blocks[0])
    alike = [shapes[group[0]][1] for group in groups]
    columns: list[int] = []
    for index in blocks:
        linears = linears_of(index)
        columns += alike if linears == first else linears.values()
    return columns


@torch.no_grad()
def solve_from(
    model: nn.Module,
    method: Solver,
    context: Context,
) -> list[LayerRecord]:
    """Let `method` solve every linear inside the blocks from saved statistics, and replace it by the stored parts.

    Blocks do not depend on one another, so that a killed run takes over every block that it has finished.
    """
    store = context.store
    prefix, blocks = find_blocks(model)
    chosen = chosen_linears(model, method)
    progress = progress_bar(range(len(blocks)), desc=method.name, unit="block")
    records: list[LayerRecord] = []
    for index in progress:
        own = [name for name in chosen if name.startswith(f"{prefix}.{index}.")]
        with on_device(blocks[index], context.device):
            found = store.load(index) if store else None
            if not all(current().gathered(found is not None)):
                found = _solve_block(model, method, context, index, own, progress)
                if store:
                    store.save(index, *found)
            for name, linear in found[0].items():
                replace(model, name, linear.to(context.device))
        records += found[1]
    return records


def _solve_block(
    model: nn.Module,
    method: Solver,
    context: Context,
    index: int,
    names: Sequence[str],
    progress: tqdm,
) -> tuple[dict[str, CompressedLinear], list[LayerRecord]]:
    """The stored replacement of each of these linears of a block, and their records."""
    needs = with_errors(method.statistics)
    made: dict[str, tuple[CompressedLinear, LayerRecord]] = {}
    groups = [[name for name in group if name in names] for group in context.saved.groups(index)]
    for members in current().share([group for group in groups if group]):
        statistics = context.saved.of(members[0], index, needs, context.device)
        for name in members:
            progress.set_postfix_str(name)
            original = context.originals.get(name)
            original = None if original is None else weight_of(original).to(context.device)
            linear = model.get_submodule(name)
            own = statistics.for_another()
            own.measured = context.of(name)
            made[name] = solve_linear(name, linear, original, own, method)
    every = {name: one for part in current().gathered(made) for name, one in part.items()}
    return {name: every[name][0] for name in names}, [every[name][1] for name in names]
