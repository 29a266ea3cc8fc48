"""The processes of one compression: their communication, and how an error in one of them ends all of them."""

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from compress.walk.parallel.places import Place, rank_of

T = TypeVar("T")
AT_ONCE = 1 << 30  # bytes that are sent in one message
TIMEOUT = timedelta(hours=1)  # longest wait for another process, which may solve a large linear meanwhile


class ProcessLost(RuntimeError):
    """A process of this compression has ended, or does not answer."""


class Ranks:
    """The processes of one compression, seen from one of them; this one is `rank` of `count`.

    Every method that exchanges something must be called by all processes, in the same order. Each exchange begins with
    `check`, so that the failure of a process is reported at the next exchange.

    Args:
        device: where this process computes; tensors from the device of another process arrive there.
        group: a gloo group. Everything is sent through memory.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self.device, self.group = device, group
        self.over = False  # no more exchanges: one has failed, or has ended all processes

    def has(self, place: Place, slices: int) -> bool:
        """Whether a micro-batch belongs to this process; slices: their number in the calibration."""
        return rank_of(place, slices, self.count) == self.rank

    def share(self, items: Sequence[T], before: int = 0) -> list[T]:
        """The items of work for this process; `before` items were given out earlier."""
        return [item for i, item in enumerate(items, start=before) if i % self.count == self.rank]

    def check(self, error: Exception | None = None) -> None:
        """Wait for all processes, and raise here the error that any of them reports.

        Args:
            error: the error that has ended the work of this process; it is sent to the others, and not raised here.

        Raises:
            ProcessLost: a process has ended, or does not answer.
        """
        if self.count == 1:
            return
        errors: list[Exception | None] = [None] * self.count
        with self._talking():
            dist.all_gather_object(errors, _portable(error), group=self.group)
        failed = next((rank for rank, found in enumerate(errors) if found is not None), None)
        if failed is None:
            return
        self.over = True
        if error is None:
            errors[failed].add_note(f"This was raised in process {failed} of {self.count}.")
            raise errors[failed]

    def chained(self, parts: Sequence[T], combine: Callable[[T, T], T]) -> T | None:
        """The parts of all processes, combined from left to right in the order of processes; None if there are none.

        Args:
            combine: combines two parts into the one that it returns; it may change its first argument.
        """
        self.check()
        total = None
        if self.rank:
            total = self._received(lambda message: dist.recv(message, self.rank - 1, group=self.group))
        for part in parts:
            total = part if total is None else combine(total, part)
        if self.rank + 1 < self.count:
            self._send(total, lambda message: dist.send(message, self.rank + 1, group=self.group))
        return self._broadcast(total, self.count - 1)

    def from_first(self, value: T) -> T:
        """The value of the first process, in every process."""
        self.check()
        return self._broadcast(value, 0)

    def gathered(self, value: T) -> list[T]:
        """The values of all processes in their order, in every process."""
        self.check()
        return [self._broadcast(value, rank) for rank in range(self.count)]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes, with the same bits in all of them."""
        self.check()
        if self.count == 1:
            return
        for some in _messages(tensors):
            flat = torch.cat([tensor.flatten() for tensor in some]).cpu()
            with self._talking():
                dist.all_reduce(flat, group=self.group)
            for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def _broadcast(self, value: T, source: int) -> T:
        if self.count == 1:
            return value

        def share(message: torch.Tensor) -> None:
            dist.broadcast(message, source, group=self.group)

        if self.rank != source:
            return self._received(share)
        self._send(value, share)
        return value

    def _send(self, value: Any, send: Callable[[torch.Tensor], object]) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        with self._talking():
            send(torch.tensor([len(content)]))
            for part in content.split(AT_ONCE):
                send(part)

    def _received(self, receive: Callable[[torch.Tensor], object]) -> Any:
        size = torch.zeros(1, dtype=torch.long)
        with self._talking():
            receive(size)
            content = torch.empty(int(size), dtype=torch.uint8)
            for part in content.split(AT_ONCE):
                receive(part)
        return torch.load(io.BytesIO(memoryview(content.numpy())), map_location=self._placed, weights_only=False)

    def _placed(self, storage: torch.UntypedStorage, where: str) -> torch.UntypedStorage:
        return storage if where == "cpu" else storage.cuda(self.device)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.over = True
            raise ProcessLost(
                f"process {self.rank} of {self.count} has lost another one: {type(error).__name__}: {error}"
            ) from error


_current = Ranks()


def current() -> Ranks:
    """The processes of the compression that runs here; a single one outside of `joined`."""
    return _current


@contextmanager
def joined(device: torch.device, *, alone: bool = False) -> Iterator[Ranks]:
    """While the context lasts, all processes of torch's default process group, if there is one, work together.

    An error in one of them ends the context in all, with that error.

    Args:
        device: where this process computes.
        alone: do not use the process group: every process does its own work.
    """
    global _current
    before = _current
    if alone or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        _current = Ranks()
    else:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels use the current one
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        _current = Ranks(dist.get_rank(), dist.get_world_size(), device=device, group=group)
    ranks = _current
    try:
        yield ranks
        ranks.check()
    except Exception as error:
        if not ranks.over:
            with suppress(ProcessLost):
                ranks.check(error)
        raise
    finally:
        _current = before
        if ranks.group is not None and not ranks.over:
            dist.destroy_process_group(ranks.group)


def _messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype, up to AT_ONCE bytes of them together."""
    some: list[torch.Tensor] = []
    for tensor in tensors:
        if some and (tensor.dtype != some[0].dtype or sum(t.nbytes for t in some) + tensor.nbytes > AT_ONCE):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


def _portable(error: Exception | None) -> Exception | None:
    """The error, or one with the same text that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class Bar(tqdm):
    """A progress bar that writes at most one line every ten seconds to outputs that cannot be redrawn, as logs."""

    def __init__(self, *args: Any, **about: Any) -> None:
        self._in_log = not sys.stderr.isatty() and "ipykernel" not in sys.modules
        super().__init__(*args, **({"mininterval": 10.0} if self._in_log else {}) | about)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        super().set_postfix_str(s, refresh and not self._in_log)


def progress_bar(work: Iterable | None = None, **about: Any) -> Bar:
    """A progress bar, in terminals, notebooks and logs alike, on the first of the processes; silent on all others."""
    return Bar(work, **about, **({"disable": True} if current().rank > 0 else {}))
