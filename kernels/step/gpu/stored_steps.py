"""Steps of decoding as a CUDA graph behind a compressed cache, which works between them."""

import warnings
from typing import Any

from torch import Tensor

from kernels.step.cache import StoringCache
from kernels.step.cache_view import StoredLayer
from kernels.step.gpu import sizes
from kernels.step.gpu.graphs import Graphs, GraphStep, check_padding, copy_in, copy_out, padding_of
from kernels.step.gpu.stored import Room
from kernels.step.recognition.parts import NotNative
from kernels.step.writing.generate import Calls


class StoredSteps:
    """Steps behind a prompt in a `StoringCache`: the interface of `kernels.step.writing.generate`.

    What the layers store is copied into the tensors of a graph, whose steps append to these. Before a layer has more to
    do (a group of positions becomes codes), it gets the new keys and values back and is copied again. Where it must
    attend itself (a policy evicts), the model's own code reads the token. `finish` gives everything back.
    """

    def __init__(
        self,
        graphs: Graphs,
        cache: StoringCache,
        batch: int,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """mask, positions: those of the prompt, [batch, tokens], if its sequences begin at different positions.

        Raises:
            NotNative: there is no graph of this size, or the cache does not allow copies.
        """
        if why := cache.why_not_copied():
            raise NotNative(why)
        if graphs.why_not_fused:
            raise NotNative(f"only fused steps read a compressed cache: {graphs.why_not_fused}")
        self._graphs, self._cache, self._batch, self._slot = graphs, cache, batch, cache.get_seq_length()
        self._windows = [number for number, window in graphs.layers if window]
        self._stored = [number for number, window in graphs.layers if not window]
        if not self._stored:
            raise NotNative("all layers have windows, which the cache does not compress")
        odd = [n for n, window in graphs.layers if bool(window) != getattr(cache.layers[n], "is_sliding", False)]
        if odd:
            raise NotNative(f"layer {odd[0]} and its cache do not agree on whether there is a window")
        self._padding = None if positions is None else padding_of(positions, self._slot)
        if self._padding is not None and self._windows:  # these layers hold padding
            check_padding(self._padding, mask, self._slot)
        self._step: GraphStep | None = None
        self._taken = 0  # steps so far, by graphs
        self._since = dict.fromkeys(self._stored, 0)  # the steps before a layer was copied
        self._until = dict.fromkeys(self._stored, 0)  # and before it must be copied again
        self._calls = Calls(graphs.model, cache, mask, positions)
        self._uncalled = 0  # steps since the last of these calls
        self._called = False  # did the model's own code read the last token?
        self._stopped = False  # is there no graph any more?
        self._renew(self._now(self._stored))
        graphs.in_use = True

    @staticmethod
    def take(cache: Any) -> bool:
        """Is this a cache of this kind?"""
        return hasattr(cache, "why_not_copied")

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """Read tokens [batch, 1]; returns those with the largest logits [batch, 1], or None where the model's own code
        has read them."""
        self._called = self._taken == min(self._until.values()) and not self._prepare()
        if self._called:
            self._calls.advance(self._uncalled)
            self._calls(tokens)
            self._slot, self._uncalled = self._slot + 1, 0
            return None
        self._step.tokens.copy_(tokens)
        self._step()
        self._cache.note_read(tokens)
        self._taken, self._slot, self._uncalled = self._taken + 1, self._slot + 1, self._uncalled + 1
        return self._step.tokens.clone()

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 [batch, vocabulary]; valid until the next step."""
        return self._calls.logits if self._called else self._step.logits.float()

    def finish(self) -> None:
        """Give the cache the keys and values of the steps."""
        try:
            self._give_back()
        finally:
            self._graphs.in_use = False

    def _prepare(self) -> bool:
        """Let the layers that are due do their work. False: they must attend to the next token themselves; all layers
        are then as if the steps had been their own."""
        if self._stopped:
            return False
        due = [number for number, until in self._until.items() if until == self._taken]
        for number in due:
            self._return(number)
        layers = self._now(due)
        if not all(layer.free for layer in layers.values()):
            self._give_back()
            return False
        try:
            self._renew(layers)
        except NotNative as error:
            warnings.warn(f"the rest is written by the model's own code, without a graph: {error}", stacklevel=3)
            self._stopped = True
        return not self._stopped

    def _now(self, numbers: list[int]) -> dict[int, StoredLayer]:
        """What these layers store now."""
        return dict(zip(numbers, self._cache.stored(numbers), strict=True))

    def _renew(self, layers: dict[int, StoredLayer]) -> None:
        """Copy these layers, and the others too if a larger graph is needed; without one, all are given back."""
        step = self._step
        if step is None or self._slot >= step.body.positions or not all(map(step.body.room.holds, layers.values())):
            self._give_back()
            layers, step = self._now(self._stored), None  # the smaller graph may be freed
            step = self._graphs.step(self._batch, self._slot + sizes.SPARE, Room.of(list(layers.values())))
        if self._step is None:
            for number in self._windows:
                copy_in(self._cache.layers[number], self._room(step, number), self._slot, self._padding)
        self._step = step
        step.body.seen(self._slot, self._padding)
        for number, layer in layers.items():
            store = step.body.stores[number]
            store.fill(layer)
            room = min(layer.free, store.free, step.body.positions - self._slot)
            self._since[number], self._until[number] = self._taken, self._taken + room

    def _return(self, number: int) -> None:
        """Give a layer the keys and values of the steps since it was copied."""
        if count := self._taken - self._since[number]:
            self._cache.append_new(number, *self._step.body.stores[number].new(count))
            self._since[number] = self._taken

    def _give_back(self) -> None:
        """Give everything back; the graph's tensors are free."""
        if self._step is None:
            return
        try:
            for number in self._stored:
                self._return(number)
                self._until[number] = self._taken
            for number in self._windows:
                copy_out(self._cache.layers[number], self._room(self._step, number), self._slot, self._padding)
        except BaseException:  # an interruption, too
            self._cache.refuse_further()
            raise
        self._step = None

    def _room(self, step: GraphStep, number: int) -> tuple[Tensor, Tensor]:
        return step.body.rooms()[number]
