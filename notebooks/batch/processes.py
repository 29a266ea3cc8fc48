"""Processes of a run, found by a mark in their environment: a kernel can outlive a papermill that was killed.

The mark names the folder of runs, the key, and the process that owns the run together with the time at which it was
started, because the number of a process that has ended may be given to another one; and the host of that process,
because a number means another process on another machine, or in another container.
"""

import hashlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "WORKBENCH_RUN"


@dataclass(frozen=True)
class Mark:
    """The mark that every process of one attempt at a run has in its environment."""

    place: str  # of the folder of runs
    key: str
    owner: int
    owner_started: str
    host: str  # a hash of `host()`
    attempt: str

    def __str__(self) -> str:
        return "/".join((self.place, self.key, str(self.owner), self.owner_started, self.host, self.attempt))


def mark(runs: Path, key: str) -> Mark:
    """A new mark; this process owns the run."""
    own = os.getpid()
    return Mark(place_of(runs), key, own, started(own), _short(host()), os.urandom(8).hex())


def place_of(runs: Path) -> str:
    return _short(str(runs.resolve()))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def host() -> str:
    """A name for this machine, its last start and this process's namespace of process numbers: only there does a number
    mean the same process, and no process of an earlier start is alive."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    return " ".join(
        (
            socket.gethostname(),
            boot.read_text().strip() if boot.is_file() else "",
            os.readlink(namespace) if os.path.islink(namespace) else "",
            started(1),
        )
    )


def started(pid: int) -> str:
    """The start time of a process, as text that does not change while it lives; "" if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, ticks = (stat.rpartition(")")[2].split()[i] for i in (0, 19))
        return "" if state == "Z" else ticks
    except OSError:
        pass
    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.Error:
        return ""


def lives(pid: int, when: str) -> bool:
    """Whether the process with this number is still the one that was started then."""
    return bool(when) and started(pid) == when


def marked(of: str) -> list[psutil.Process]:
    """All processes but this one whose mark begins with this text."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK, "").startswith(of) and started(process.pid):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def end(of: str, *, grace_s: float = 2.0, within_s: float = 12.0) -> int:
    """End all processes whose mark begins with this text: by SIGTERM, and by SIGKILL after `grace_s` seconds.

    Returns:
        the number of processes that are still alive after `within_s` seconds
    """
    begin = time.monotonic()
    left = marked(of)
    while left and time.monotonic() - begin < within_s:
        now = time.monotonic() - begin
        for process in left:
            with_signal = signal.SIGTERM if now < grace_s else signal.SIGKILL
            try:
                process.send_signal(with_signal)
            except (psutil.Error, OSError):
                continue
        psutil.wait_procs(left, timeout=min(grace_s, 0.3))
        left = marked(of)
    return len(left)


def end_orphans(runs: Path, key: str = "") -> int:
    """End the processes of runs in this folder whose owner has ended; returns their number.

    Whether an owner on another host has ended cannot be known here: its processes, which may be visible from here if it
    is a container, are left alone.
    """
    gone, here = 0, _short(host())
    for process in marked(f"{place_of(runs)}/{key}"):
        try:
            found = process.environ().get(MARK, "")
            _, _, owner, when, where, _ = found.split("/")
        except (psutil.Error, OSError, ValueError):
            continue
        if where == here and not lives(int(owner), when):
            gone += 1
            end(found)
    return gone
