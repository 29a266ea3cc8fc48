"""Nothing else computes on a device while something is timed on it: a lock per device, over all runs of this machine.

Batch runs hold a device together while they compress and score (`share`); one that times something waits until it has
the device to itself (`undisturbed`). Runs that are about to begin let one that waits go first. flock: a process that is
killed holds nothing.
"""

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

WAITING = "WORKBENCH_WAITING"  # names the file that is there while this process waits, so that its time is not counted
_held: dict[str, IO] = {}  # devices that this process shares
_depth: dict[str, int] = {}
_full: list[int] = []  # threads that this process had before it was told to use fewer
_guard = threading.RLock()


def share(device: str | torch.device, threads: int | None = None) -> None:
    """Compute on this device beside others, until this process ends; waits while somebody times something there.

    Args:
        threads: of a processor, that this process uses meanwhile; all that it had where something is timed.
    """
    name = device_name(device)
    with _guard:
        if threads:
            _full.append(torch.get_num_threads())
            torch.set_num_threads(threads)
        if name not in _held:
            with _gate(name):  # whoever waits for the device alone has it
                _held[name] = _take(_file(name), fcntl.LOCK_SH)


@contextlib.contextmanager
def undisturbed(device: str | torch.device) -> Iterator[None]:
    """Have the device to oneself, with all threads; waits until nobody else computes there. May be nested."""
    name = device_name(device)
    with _guard:
        if _depth.get(name):
            yield
            return
        threads, shared = torch.get_num_threads(), _held.get(name)
        lock = shared or _file(name)
        try:
            if shared:  # before the gate: two that wait there for one another's share would wait for ever
                fcntl.flock(shared, fcntl.LOCK_UN)
            with _gate(name):
                _take(lock, fcntl.LOCK_EX)
            _depth[name] = 1
            torch.set_num_threads(timing_threads())
            yield
        finally:
            torch.set_num_threads(threads)
            _depth[name] = 0
            if shared:
                _take(shared, fcntl.LOCK_SH)
            else:
                lock.close()


def timing_threads() -> int:
    """Threads with which things are timed in this process."""
    return _full[0] if _full else torch.get_num_threads()


def device_name(device: str | torch.device) -> str:
    """The lock's name: one for all cores, one for each GPU."""
    device = torch.device("cpu" if str(device) == "auto" else device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"


@contextlib.contextmanager
def _gate(name: str) -> Iterator[None]:
    """Held by one that waits for the device alone, and passed by all that begin: new ones do not keep it waiting for
    ever."""
    with _take(_file(f"{name}.gate"), fcntl.LOCK_EX):
        yield


def _take(file: IO, how: int) -> IO:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        pass
    waiting = Path(os.environ[WAITING]) if os.environ.get(WAITING) else None
    if waiting:
        with contextlib.suppress(OSError):
            waiting.touch()
    try:
        fcntl.flock(file, how)
    finally:
        if waiting:
            waiting.unlink(missing_ok=True)
    return file


def _file(name: str) -> IO:
    """The lock's file, for all users of the machine; $WORKBENCH_LOCKS names another folder for it."""
    path = Path(os.environ.get("WORKBENCH_LOCKS") or tempfile.gettempdir()) / f"workbench-{name}.lock"
    try:  # not O_CREAT at once: systems may forbid it to others in a folder for all
        return open(path, "r+")
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):
            os.chmod(path, 0o666)
        return os.fdopen(descriptor, "r+")
