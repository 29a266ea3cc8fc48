"""resize: keeps as many blocks of a model that is stored in blocks as fit into a number of megabytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.allocation.budget import bytes_beside, megabytes
from compress.allocation.prefix import Stack, within
from compress.checkpoint.files import reading
from compress.checkpoint.load import LAYOUT, read_layout
from compress.checkpoint.shards import Shards
from compress.formats.sizes.sign_stack import BLOCKWISE, SignStack
from compress.linear import compressed_linears


class StackPlace(NamedTuple):
    """The place of a stack: the linear, and the number of the part."""

    linear: str
    part: int


def resize(model: nn.Module, size_mb: float, *, path: str | Path | None = None) -> nn.Module:
    """Keep, in place, as many blocks of the weights that are stored in blocks as `size_mb` has room for.

    Blocks are taken in one order for all sizes: a larger model holds all blocks of a smaller one, and its size is below
    `size_mb` by less than a block. Blocks that are left out are removed from memory; they are read again from the files
    of the checkpoint, of which only those blocks are read.

    Args:
        model: the result of `load_compressed`, or a model after `apply`.
        size_mb: megabytes of the whole stored model, including the weights that are not in blocks; floats that are cast
            with the model count as 16 bits, as in the record's `stored_bytes`. If all blocks fit, all are kept.
        path: folder of a checkpoint of this model that holds the blocks; None: the one that the model was loaded from.

    Returns:
        the model

    Raises:
        ValueError: nothing of the model is stored in blocks; `size_mb` has no room for the first block of every weight;
            or blocks are missing, and the checkpoint is missing or belongs to another model.
    """
    stacks = _stacks(model)
    if not stacks:
        raise ValueError("`model` holds no weight that is stored in blocks, so its size cannot change")
    beside = bytes_beside(model, {}) - sum(stack.nbytes for stack in stacks.values())
    checkpoint = _checkpoint_of(model, stacks, path)
    gains = checkpoint.gains if checkpoint else {place: _gains(stack) for place, stack in stacks.items()}
    known = {place: Stack(gains[place].tolist(), stack.block_bytes) for place, stack in stacks.items()}
    budget, least = round(size_mb * 1e6), beside + sum(stack.cost for stack in known.values())
    if least > budget:
        raise ValueError(
            f"`size_mb` (={size_mb:g}) is too small: with one block of every weight this model takes {megabytes(least)}"
        )
    counts = within(known, budget - beside)
    missing = {place: slice(stacks[place].blocks, count) for place, count in counts.items()}
    missing = {place: part for place, part in missing.items() if part.start < part.stop}
    if missing and checkpoint is None:
        raise ValueError(
            f"`path` (=None): blocks of {next(iter(missing)).linear} that an earlier resize left out are needed, and "
            "this model was not loaded from a checkpoint that holds them: save it before it is resized, and give that "
            "folder"
        )
    read = checkpoint.blocks(missing) if checkpoint else {}
    for place, count in counts.items():
        _put(model, place, count, stacks[place], read.get(place))
    return model


def _stacks(model: nn.Module) -> dict[StackPlace, SignStack]:
    return {
        StackPlace(name, number): part
        for name, linear in compressed_linears(model).items()
        for number, part in enumerate(linear.parts)
        if isinstance(part, SignStack)
    }


def _put(model: nn.Module, place: StackPlace, count: int, stack: SignStack, more: dict[str, Tensor] | None) -> None:
    """Give a stack this number of blocks; `more`: blocks that follow its own."""
    if count == stack.blocks:
        return
    linear = model.get_submodule(place.linear)
    changed = stack.first(count) if more is None else stack.followed_by(more)
    linear.parts[place.part] = changed
    changed.for_compute(linear.dtype, changed.signs.device)


def _gains(stack: SignStack) -> Tensor:
    """The gains of the blocks in memory and of those that were left out."""
    return torch.cat([stack.gains.cpu(), stack.left_out])


class _Checkpoint:
    """The stacks of a checkpoint of this workbench; `gains` holds the gains of all saved blocks."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: the folder is not such a checkpoint.
        """
        with reading(folder):
            linears, self._shards = read_layout(folder)["linears"], Shards(folder)
            self._specs = {
                StackPlace(name, number): part
                for name, linear in linears.items()
                for number, part in enumerate(linear["parts"])
                if part["format"] == SignStack.name
            }
            rows = self._shards.read_rows({_key(place, "gains"): slice(None) for place in self._specs})
            self.gains = {place: rows[_key(place, "gains")] for place in self._specs}

    def holds(self, place: StackPlace, stack: SignStack) -> bool:
        """Whether the blocks of this stack, by their gains, are the first blocks of the saved stack of this place."""
        saved = self._specs.get(place)
        if saved is None or saved | {"blocks": stack.blocks} != stack.spec() or saved["blocks"] < stack.blocks:
            return False
        return self.gains[place][: stack.blocks].equal(stack.gains.cpu())

    def blocks(self, wanted: Mapping[StackPlace, slice]) -> dict[StackPlace, dict[str, Tensor]]:
        """The buffers of some blocks of some stacks."""
        rows = {_key(place, name): part for place, part in wanted.items() for name in BLOCKWISE}
        read = self._shards.read_rows(rows)
        return {place: {name: read[_key(place, name)] for name in BLOCKWISE} for place in wanted}


def _key(place: StackPlace, name: str) -> str:
    return f"{place.linear}.parts.{place.part}.{name}"


def _checkpoint_of(
    model: nn.Module, stacks: dict[StackPlace, SignStack], path: str | Path | None
) -> _Checkpoint | None:
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
