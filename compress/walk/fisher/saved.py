"""Squared gradients on disk, read one weight at a time."""

from collections.abc import Iterator, Mapping

from safetensors import safe_open
from torch import Tensor

from compress.walk.resume import BlockStore


class SavedFisher(Mapping[str, Tensor]):
    """{name of a linear or an embedding: its F, in the weight's shape, float32}; read from disk at each look-up.

    The F of a weight that the head shares with the embedding can be read under both names.
    """

    def __init__(
        self, store: BlockStore, steps: int, same: Mapping[str, str] | None = None, held: object = None
    ) -> None:
        """
        Args:
            store: the store of a finished pre-pass of `steps` steps.
            same: names that stand for another one.
            held: an object that must live as long as the folder is needed (a temporary folder).
        """
        self.store, self._held = store, held
        self._step = {name: step for step in range(steps) for name in store.about(step)["names"]}
        self._same = {name: other for name, other in (same or {}).items() if name not in self._step}

    def __getitem__(self, name: str) -> Tensor:
        name = self._same.get(name, name)
        with safe_open(self.store.path(self._step[name]), "pt") as file:
            return file.get_tensor(name).clone()

    def __iter__(self) -> Iterator[str]:
        yield from self._step
        yield from self._same

    def __len__(self) -> int:
        return len(self._step) + len(self._same)
