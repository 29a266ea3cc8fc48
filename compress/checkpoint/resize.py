"""resize: a model that is stored in blocks, with as many of them as fit into a number of megabytes."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.allocation.budget import bytes_beside, megabytes
from compress.allocation.prefix import Stack, within
from compress.checkpoint.load import LAYOUT, read_layout
from compress.checkpoint.shards import Shards
from compress.formats.sizes.sign_stack import BLOCKWISE, SignStack
from compress.linear import compressed_linears


class Place(NamedTuple):
    """Where a stack stands: which part of which linear."""

    linear: str
    part: int


def resize(model: nn.Module, size_mb: float, *, path: str | Path | None = None) -> nn.Module:
    """Keep, in place, as many blocks of the weights that are stored in blocks as `size_mb` has room for.

    Blocks are taken in one order for all sizes: a larger model holds what a smaller one holds, and more, and its size
    falls short of `size_mb` by less than a block. Blocks that are left out leave memory; they come back from the files
    of the checkpoint, of which only those blocks are read.

    Args:
        model: as `load_compressed` gives it, or as `apply` left it.
        size_mb: megabytes of the whole model as it is stored, what is not in blocks counted; floats that are cast with
            the model count as 16 bits, as in the record's `stored_bytes`. Room for more than all blocks takes them all.
        path: folder of a checkpoint of this model that holds the blocks; None: the one that the model was loaded from.

    Returns:
        the model

    Raises:
        ValueError: nothing of the model is stored in blocks; `size_mb` has no room for the first block of every weight;
            or blocks are missing, and the checkpoint is not at hand or is one of another model.
    """
    stacks = _stacks(model)
    if not stacks:
        raise ValueError("`model` holds no weight that is stored in blocks, so that its size is what it is")
    beside = bytes_beside(model, {}) - sum(stack.nbytes for stack in stacks.values())
    checkpoint = _checkpoint_of(model, stacks, path)
    names = {f"{place.linear} {place.part}": place for place in stacks}
    gains = {name: checkpoint.gains(place) if checkpoint else _gains(stacks[place]) for name, place in names.items()}
    known = {name: Stack(gains[name].tolist(), stacks[place].block_bytes) for name, place in names.items()}
    budget, least = round(size_mb * 1e6), beside + sum(stack.cost for stack in known.values())
    if least > budget:
        raise ValueError(
            f"`size_mb` (={size_mb:g}) is too small: with one block of every weight this model takes {megabytes(least)}"
        )
    counts = within(known, budget - beside)
    lacking = next((place for name, place in names.items() if counts[name] > stacks[place].blocks), None)
    if lacking and checkpoint is None:
        raise ValueError(
            f"`path` (=None): blocks of {lacking.linear} that an earlier resize left out are needed, and this model "
            "was not loaded from a checkpoint that holds them: save it before it is resized, and give that folder"
        )
    for name, place in names.items():
        _put(model, place, counts[name], stacks[place], checkpoint)
    return model


def _stacks(model: nn.Module) -> dict[Place, SignStack]:
    return {
        Place(name, number): part
        for name, linear in compressed_linears(model).items()
        for number, part in enumerate(linear.parts)
        if isinstance(part, SignStack)
    }


def _put(model: nn.Module, place: Place, count: int, stack: SignStack, checkpoint: "_Checkpoint | None") -> None:
    """Let a stack have so many blocks."""
    if count == stack.blocks:
        return
    linear = model.get_submodule(place.linear)
    if count < stack.blocks:
        changed = stack.first(count)
    else:
        changed = stack.followed_by(checkpoint.blocks(place, stack.blocks, count))
    linear.parts[place.part] = changed
    changed.for_compute(linear.dtype, changed.signs.device)


def _gains(stack: SignStack) -> Tensor:
    """Of the blocks in memory and of those that were left out."""
    return torch.cat([stack.gains.cpu(), stack.left_out])


class _Checkpoint:
    """The stacks of a checkpoint of this workbench."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: the folder is not such a checkpoint.
        """
        self._linears, self._shards = read_layout(folder)["linears"], Shards(folder)

    def holds(self, place: Place, stack: SignStack) -> bool:
        """Are the blocks of this stack, by their gains, the first ones of the stack that is saved there?"""
        parts = self._linears.get(place.linear, {}).get("parts", [])
        saved = parts[place.part] if place.part < len(parts) else {}
        if saved | {"blocks": stack.blocks} != stack.spec() or saved["blocks"] < stack.blocks:
            return False
        return self.gains(place)[: stack.blocks].equal(stack.gains.cpu())

    def gains(self, place: Place) -> Tensor:
        return self._shards.read(_key(place, "gains"))

    def blocks(self, place: Place, first: int, last: int) -> dict[str, Tensor]:
        """Blocks from number `first` to the one before `last`."""
        return {name: self._shards.read_rows(_key(place, name), first, last) for name in BLOCKWISE}


def _key(place: Place, name: str) -> str:
    return f"{place.linear}.parts.{place.part}.{name}"


def _checkpoint_of(model: nn.Module, stacks: dict[Place, SignStack], path: str | Path | None) -> _Checkpoint | None:
    """The checkpoint that holds the model's blocks; None if none was named and the model was not loaded from one."""
    folder = Path(getattr(model, "name_or_path", "") if path is None else path)
    if path is None and not (folder / LAYOUT).is_file():
        return None
    checkpoint = _Checkpoint(folder)
    other = next((place for place, stack in stacks.items() if not checkpoint.holds(place, stack)), None)
    if other is None:
        return checkpoint
    if path is None:
        return None
    raise ValueError(f"`path` (={str(path)!r}) does not hold the blocks of {other.linear}: it is another model's")
