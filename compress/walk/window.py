"""A model on disk that decodes: some of its blocks stay in memory, and the others are read in turn, ahead of their use.

A pass reads every block once, in the same order. What was used last is then needed last, so that nothing is gained by
keeping it: as many blocks as the memory holds stay in it for good, evenly spread, and while they and the block before
compute, a thread reads the next block that is away. Products are those of `fast_linear`, and outputs are those of the
model in memory with these products, bit by bit.

Sources: a sliding window of layers with prefetching, TPI-LLM (arXiv:2410.00531) and Superpipeline (arXiv:2410.08791);
the first keeps a window of consecutive layers on each of several devices, the second moves layers from the memory of
the host to that of one device.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from compress.walk.offload import Offloaded, offloaded_parts
from compress.walk.shards import OnDisk
from kernels.linear import fast_linear
from kernels.support.units import memory_limit


@dataclass
class Window:
    """What is in memory, what is read in every pass, and what reading took so far.

    Attributes:
        held: names of the parts that stay in memory. streamed: of those that are read in every pass, in its order.
        held_bytes, streamed_bytes: of their weights. peak_bytes: the most bytes of weights in memory at once.
        read_bytes: bytes that a thread has read ahead so far. waited_s: time in which the model waited for it.
    """

    held: tuple[str, ...]
    streamed: tuple[str, ...]
    held_bytes: int
    streamed_bytes: int
    peak_bytes: int
    read_bytes: int = 0
    waited_s: float = 0.0
    _next: dict[str, Future] = field(default_factory=dict, repr=False)

    def seconds(self, bandwidth: float, computing: float) -> float:
        """The predicted time of a pass.

        Args:
            bandwidth: bytes per second that the disk gives. computing: seconds of a pass whose weights are all in
                memory.
        """
        return max(self.streamed_bytes / bandwidth, computing)


@contextmanager
def in_window(
    model: nn.Module, max_memory: int | str, *, cached: bool = True, parameter: str = "max_memory"
) -> Iterator[Window]:
    """While the context lasts, a model with `weights="disk"` keeps as many weights in memory as `max_memory` allows,
    and reads the others ahead of their use.

    Args:
        model: of `load_model(..., weights="disk")`; its weights must not be changed meanwhile.
        max_memory: the most bytes of weights in memory at once, such as "6GB"; caches and activations come on top.
        cached: whether the system may keep what is read in memory that is free otherwise, which serves the next pass.
        parameter: that gives `max_memory`, for errors.

    Raises:
        ValueError: the model is in memory, `max_memory` is more than the memory of its device, or it does not hold two
            of the largest parts, one that computes and one that is read.
    """
    parts = {name: part for name, part in offloaded_parts(model).items() if not part.is_table}
    if not parts:
        raise ValueError("`model` is in memory; a window is for models of load_model(..., weights='disk')")
    home = next(iter(parts.values())).home
    if (most := memory_limit(max_memory, parameter, home)) is None:
        raise ValueError(f"`{parameter}` must be a number of bytes, such as '6GB'")
    cast = [t.stored_nbytes for part in parts.values() for t in part.where.values() if t.stored != t.dtype]
    casting = max(cast, default=0)  # a tensor in another dtype is in memory twice while it is read
    window = plan_window({name: part.nbytes for name, part in parts.items()}, most - casting, parameter)
    window.peak_bytes += casting
    with ExitStack() as stack, ThreadPoolExecutor(1, "read-ahead") as reader:
        for name in window.held:
            stack.enter_context(parts[name].loaded(parts[name].home))
        ring = {name: parts[name] for name in window.streamed}
        for name, part in ring.items():
            part.ahead = _Ahead(name, ring, window, reader, cached)
        try:
            if ring:
                next(iter(ring.values())).ahead.begin()
            with fast_linear():
                yield window
        finally:
            for part in ring.values():
                part.ahead = None
                part.let_go()
            for future in window._next.values():
                future.cancel()
            window._next.clear()


def plan_window(sizes: Mapping[str, int], most: int, parameter: str = "max_memory") -> Window:
    """Which parts stay in memory, so that these, one that computes and one that is read take at most so many bytes.

    Args:
        sizes: bytes of the parts, in the order of a pass. parameter: that gives `most`, for the error.

    Raises:
        ValueError: two parts at a time are more than that.
    """
    names, every = list(sizes), sum(sizes.values())
    if every <= most:
        return Window(tuple(names), (), every, 0, every)
    usual = sorted(sizes.values())[len(names) // 2]
    odd = {name for name in names if not usual / 10 < sizes[name] <= 2 * usual}  # norms and large heads stay
    rest = [name for name in names if name not in odd]
    for count in range(len(rest) - 1, -1, -1):
        held = odd | {name for i, name in enumerate(rest) if (i + 1) * count // len(rest) > i * count // len(rest)}
        away = [name for name in names if name not in held]
        kept = sum(sizes[name] for name in held)
        if (peak := kept + 2 * max(sizes[name] for name in away)) <= most:
            return Window(tuple(n for n in names if n in held), tuple(away), kept, every - kept, peak)
    raise ValueError(
        f"`{parameter}` (={most} bytes) does not hold two of the model's parts at a time, one that computes and one "
        f"that is read: {peak / 1e9:.2f} GB are needed"
    )


class _Ahead:
    """Gives the state of a part that was read ahead, and has the next part read."""

    def __init__(
        self, name: str, ring: dict[str, Offloaded], window: Window, reader: ThreadPoolExecutor, cached: bool
    ) -> None:
        self._name, self._ring, self._part = name, ring, ring[name]
        self._window, self._reader, self._cached = window, reader, cached
        names = list(ring)
        self._after = ring[names[(names.index(name) + 1) % len(names)]]

    def begin(self) -> None:
        """Have this part read."""
        pending = self._window._next
        if self._name not in pending:
            pending[self._name] = self._reader.submit(self._read, dict(self._part.where))

    def _read(self, where: Mapping[str, OnDisk]) -> dict[str, Tensor]:
        state = {name: tensor.read(self._cached) for name, tensor in where.items()}
        self._window.read_bytes += sum(tensor.nbytes for tensor in state.values())
        return state

    def __call__(self) -> Mapping[str, Tensor]:
        start = time.perf_counter()
        for name in [name for name in self._window._next if name != self._name]:
            self._window._next.pop(name).cancel()  # a pass was left in the middle: what it wanted next
        for other in self._ring.values():
            if other is not self._part:  # what such a pass did not give back
                other.let_go()
        self.begin()
        state = self._window._next.pop(self._name).result()
        self._window.waited_s += time.perf_counter() - start
        self._after.ahead.begin()
        return state
