"""A lock per device for all runs of this user, so that nothing else computes on a device during a timing.

Batch runs share a device while they compress and score (`share`); a run with timings waits until it has exclusive use
of the device (`undisturbed`). New runs let a waiting one go first. A run by itself that times nothing does not wait: if
another one is being timed, it computes all the same, and the record of the other one shows the load. The locks are made
with `flock`, so the lock of a killed process is released; on Windows, which has none, nothing waits.

Every process that holds a device writes its name and its start time to a small file beside the lock, and locks that
file until the process ends. A process that waits reports the process for which it waits: in the notebook's cell, and in
the file named by `$WORKBENCH_WAITING`, which exists as long as the process waits.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

import torch

from kernels.support.flock import AT_ONCE, EXCLUSIVE, RELEASE, SHARED, flock
from kernels.support.user_cache import cache_folder

WAITING = "WORKBENCH_WAITING"  # names a file that exists while this process waits, so that the wait is not counted
LOCKS = "WORKBENCH_LOCKS"  # names another folder for the locks, such as one that several users share
POLL_S = 0.2
SAY_AGAIN_S = 60.0  # seconds after which it is looked up again who has the device
_WITHOUT = "a run that times nothing (speed_rounds=0, of caches speed_contexts=[]) does not wait"
_shared: dict[str, IO] = {}  # devices that this process shares
_cards: dict[str, IO] = {}  # files in which this process describes itself
_depth: dict[str, int] = {}
_full: list[int] = []  # number of threads of this process before it was told to use fewer
_guard = threading.RLock()
_owner = [os.environ.get("WORKBENCH_KEY") or Path(sys.argv[0]).name or "python"]


def call_this(run: str) -> None:
    """Set the name of this process's run, shown to processes that wait for it."""
    _owner[0] = run


def share(device: str | torch.device, threads: int | None = None, *, waits: bool = True) -> None:
    """Compute on this device together with other processes, until this process ends; waits while a process runs timings
    there.

    Args:
        threads: number of processor threads that this process uses meanwhile; timings use all its threads.
        waits: False for a process that times nothing and starts at once: processes that begin to time wait for it, but
            not one that times already.
    """
    name = device_name(device)
    with _guard:
        if threads:
            _full.append(torch.get_num_threads())
            torch.set_num_threads(threads)
        if name in _shared:
            return
        if waits:
            with _gate(name):  # held by a process that waits for exclusive use
                _shared[name] = _take(_file(name), SHARED, name)
        else:
            _shared[name] = _file(name)
            try:
                flock(_shared[name], SHARED | AT_ONCE)
            except BlockingIOError:
                print(f"Beside this run, another one is being timed: {'; '.join(holders(name))}", flush=True)
        _sign(name, "computes")


@contextlib.contextmanager
def undisturbed(device: str | torch.device) -> Iterator[None]:
    """Use the device exclusively, with all threads; waits until no other process computes there. May be nested."""
    name = device_name(device)
    with _guard:
        if _depth.get(name):
            yield
            return
        threads, shared = torch.get_num_threads(), _shared.get(name)
        lock = shared or _file(name)
        try:
            if shared:  # before the gate: two processes that wait for each other's share would wait for ever
                flock(shared, RELEASE)
                _strike(name)
            with _gate(name):
                _take(lock, EXCLUSIVE, name)
            _sign(name, "measures speed")
            _depth[name] = 1
            torch.set_num_threads(timing_threads())
            yield
        finally:
            torch.set_num_threads(threads)
            _depth[name] = 0
            _strike(name)
            if shared:
                _take(shared, SHARED, name)
                _sign(name, "computes")
            else:
                lock.close()


def timing_threads() -> int:
    """Number of threads for timings in this process."""
    return _full[0] if _full else torch.get_num_threads()


def device_name(device: str | torch.device) -> str:
    """The lock's name: one for all cores, one for each GPU."""
    device = torch.device("cpu" if str(device) == "auto" else device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"


def holders(name: str) -> list[str]:
    """Descriptions of the processes that hold a device now: run, process, use of the device, and start time."""
    said = []
    for path in sorted(_folder().glob(f"workbench-{name}.held-*")):
        with contextlib.suppress(OSError, ValueError), open(path, "r+") as file:
            try:
                flock(file, EXCLUSIVE | AT_ONCE)
                path.unlink(missing_ok=True)  # its process is gone
            except BlockingIOError:
                card = json.loads(file.read())
                said.append(f"{card['run']} (pid {card['pid']}) {card['does']} there since {card['since']}")
    return said


@contextlib.contextmanager
def _gate(name: str) -> Iterator[None]:
    """A lock held by a process that waits for exclusive use, and taken briefly by all that begin, so that new processes
    do not keep it waiting for ever."""
    with _take(_file(f"{name}.gate"), EXCLUSIVE, name):
        yield


def _take(file: IO, how: int, name: str) -> IO:
    """Lock a file; while waiting, report the processes that hold it."""
    with contextlib.suppress(BlockingIOError):
        flock(file, how | AT_ONCE)
        return file
    note = Path(os.environ[WAITING]) if os.environ.get(WAITING) else None
    begin, looked, said = time.monotonic(), -SAY_AGAIN_S, ""
    since = datetime.now().strftime("%H:%M:%S")
    try:
        while True:
            passed = time.monotonic() - begin
            if passed - looked >= SAY_AGAIN_S:
                text = f"waits since {since} for the device {name}: {'; '.join(holders(name)) or 'another run has it'}"
                if text != said:  # another run has it now
                    print(f"This run {text}; {_WITHOUT}", flush=True)
                if note:
                    with contextlib.suppress(OSError):
                        note.write_text(f"{text}; {_WITHOUT}", encoding="utf-8")
                looked, said = passed, text
            time.sleep(POLL_S)
            with contextlib.suppress(BlockingIOError):
                flock(file, how | AT_ONCE)
                print(f"The device {name} is free after {time.monotonic() - begin:.0f} s.", flush=True)
                return file
    finally:
        if note:
            note.unlink(missing_ok=True)


def _sign(name: str, does: str) -> None:
    """Record that this process holds the device, in a file that is locked until the process ends or calls `_strike`."""
    path = _folder() / f"workbench-{name}.held-{socket.gethostname()}-{os.getpid()}"
    since = datetime.now().strftime("%H:%M:%S")
    with contextlib.suppress(OSError):  # the file only informs, the lock is essential
        card = open(path, "w", encoding="utf-8")  # noqa: SIM115
        flock(card, EXCLUSIVE | AT_ONCE)
        card.write(json.dumps({"run": _owner[0], "pid": os.getpid(), "does": does, "since": since}))
        card.flush()
        _cards[name] = card


def _strike(name: str) -> None:
    if card := _cards.pop(name, None):
        Path(card.name).unlink(missing_ok=True)
        card.close()


def _folder() -> Path:
    """The folder of the locks: in the user's own cache folder, unless $WORKBENCH_LOCKS names another.

    Raises:
        ValueError: that one is not there. It is not made, because others than its maker may have to write there.
    """
    if not (folder := os.environ.get(LOCKS)):
        return cache_folder("locks")
    if not Path(folder).is_dir():
        raise ValueError(f"`{LOCKS}` (={folder!r}) must be a folder in which every user of this machine may write")
    return Path(folder)


def _file(name: str) -> IO:
    path = _folder() / f"workbench-{name}.lock"
    try:  # not O_CREAT at once: systems may forbid it to others in a folder for all
        return open(path, "r+")
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if os.environ.get(LOCKS):  # several users may share it
            with contextlib.suppress(PermissionError):
                os.chmod(path, 0o666)
        return os.fdopen(descriptor, "r+")
