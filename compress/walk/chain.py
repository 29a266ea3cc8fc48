"""The activations between two blocks, kept exactly on disk, so that a killed walk continues with the same bits.

A second pass over finished blocks would not always give the same bits: while a block is solved, its linears may be
multiplied in another way than afterwards.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from compress.walk.capture import Call
from compress.walk.parallel.ranks import current
from compress.walk.resume import BlockStore
from kernels.support.files import whole_file


class Chain:
    """The outputs of the newest finished block, kept beside the finished blocks: one file for each micro-batch.

    The outputs of a block are written before the block itself, and those of the block before it are removed
    afterwards. So the outputs of the newest finished block are there whenever a walk is killed, and the outputs of at
    most two blocks take room on the disk. Several processes of one compression write the files of their own
    micro-batches, and may share the folder.
    """

    def __init__(self, store: BlockStore, calls: Sequence[Call]) -> None:
        """
        Args:
            store: where the walk keeps its finished blocks.
            calls: the micro-batches; every block's outputs are as large as its inputs.
        """
        self.store, self.calls = store, calls

    def resume(self, blocks: int) -> int:
        """Give every micro-batch the outputs of the newest finished block, of `blocks` in all.

        Returns:
            How many blocks from the first one on need not run again. Later ones have to be solved, whether they are
            stored or not.

        Raises:
            ValueError: some blocks are not finished, and the disk has no room for the outputs of two.
        """
        ranks = current()
        finished = min(ranks.gathered(self.store.finished(blocks)))
        if finished == blocks:
            self._forget_before(blocks)
            return blocks
        self._check_room()
        for count in range(finished, 0, -1):
            if all(ranks.gathered(self._are_there(count - 1))):
                self._read(count - 1)
                return count
        return 0

    @contextmanager
    def keeping(self, index: int, *, last: bool) -> Iterator[None]:
        """Keep the outputs of block `index`, which the micro-batches hold now; the `with` block stores the block.

        Args:
            last: nothing follows this block, so that its outputs are not needed.
        """
        for call in () if last else self.calls:
            with whole_file(self._file(index, call)) as temporary:
                state = {"hidden": call.hidden, **call.passed_to(index + 1)}
                save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, temporary)
        current().check()  # every process has written its outputs before any block is stored
        yield
        current().check()
        self._forget_before(index + 1 if last else index)

    def _check_room(self) -> None:
        needed = 2 * sum(call.hidden.nbytes for call in self.calls)
        free = shutil.disk_usage(self.store.folder).free
        if needed > free:
            raise ValueError(
                f"`work_path` (={str(self.store.folder.parent)!r}): the activations between blocks take "
                f"{needed / 1e9:.1f} GB there, and {free / 1e9:.1f} GB are free; fewer or shorter calibration windows "
                "(`samples`, `seqlen`), another disk, or no `work_path` works"
            )

    def _are_there(self, index: int) -> bool:
        return all(_holds(self._file(index, call), call) for call in self.calls)

    def _read(self, index: int) -> None:
        for call in self.calls:
            with safe_open(self._file(index, call), "pt") as file:  # cloned: memory of its own, aligned as any other
                names = file.keys()
                state = {name: file.get_tensor(name).clone().to(call.hidden.device) for name in names}
                call.hidden = state.pop("hidden")
                call.take(index + 1, state)

    def _forget_before(self, index: int) -> None:
        for folder in self.store.folder.glob("after_*"):
            if int(folder.name.removeprefix("after_")) < index:
                shutil.rmtree(folder, ignore_errors=True)

    def _file(self, index: int, call: Call) -> Path:
        return self.store.folder / f"after_{index:04d}" / f"{call.place.number:05d}.safetensors"


def _holds(path: Path, call: Call) -> bool:
    """Can this file be read (a power loss may have cut it short), and does it fit the micro-batch?"""
    try:
        with safe_open(path, "pt") as file:
            return tuple(file.get_slice("hidden").get_shape()) == tuple(call.hidden.shape)
    except (OSError, SafetensorError):
        return False
