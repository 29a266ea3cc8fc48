"""Leases: a file per run names the attempt that works on it. It is created with O_EXCL, and its time is renewed.

A lease of this machine is abandoned when its holder's process has ended. A lease of another machine, on a shared
filesystem, is abandoned when it has not been renewed for `STALE_S` seconds.
"""

import contextlib
import glob
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from eval.record.reading import read_json
from notebooks.batch.processes import Mark, lives
from notebooks.batch.processes import host as _host

RENEW_S = 5.0
STALE_S = 60.0
_SHAPE = {"host": str, "pid": int, "started": str, "token": str}


class Lease:
    """A lease that this process holds until `release`, or until `lost` is set."""

    def __init__(self, path: Path, token: str):
        self.path, self.token = path, token
        self.lost = threading.Event()  # set when another attempt took over the lease while this machine was suspended
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                self.owned()
                os.utime(self.path)
            except FileNotFoundError:
                self.lost.set()
            except OSError:  # a network filesystem may answer at the next renewal
                continue

    def owned(self) -> bool:
        """Whether this attempt still owns the run; an attempt that has lost it never owns it again.

        Raises:
            OSError: the lease cannot be read at the moment.
        """
        try:
            if json.loads(self.path.read_text())["token"] != self.token:
                self.lost.set()
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            self.lost.set()
        return not self.lost.is_set()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self.owned():
                self.path.unlink()


def take(path: Path, mark: Mark) -> Lease | None:
    """The lease on a run, or None while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"host": _host(), "pid": mark.owner, "started": mark.owner_started, "token": mark.attempt}
    for _ in range(3):
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as file:
                file.write(json.dumps(told))
        except FileExistsError:
            if not _given_up(path, mark.attempt):
                return None
            continue
        if holder(path).get("token") == mark.attempt:  # another process may have removed it by mistake for an older one
            return Lease(path, mark.attempt)
    return None


def holder(path: Path) -> dict[str, Any]:
    """The content of a lease; {} if there is none, or it is damaged, as when its holder was killed while writing it."""
    told = read_json(path, _SHAPE)
    return told if _SHAPE.keys() <= told.keys() else {}


def held(path: Path) -> bool:
    """Whether an attempt works on this run."""
    return path.exists() and not _stale(path, holder(path))


def _given_up(path: Path, token: str) -> bool:
    """Remove an abandoned lease; False if it is held. Of several processes that try, one succeeds."""
    judged = holder(path)
    if not path.exists():
        return True
    if not _stale(path, judged):
        return False
    aside = path.with_name(f"{path.name}.{token}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    if holder(aside) != judged:  # another process took it over between the two reads: give it back
        with contextlib.suppress(OSError):
            os.link(aside, path)
        aside.unlink(missing_ok=True)
        return False
    if aside.is_dir():  # made by another program, and no lease
        shutil.rmtree(aside, ignore_errors=True)
    aside.unlink(missing_ok=True)
    return True


def remove_asides(path: Path) -> None:
    """Remove abandoned leases that processes had put aside, and were killed before they removed them."""
    for aside in path.parent.glob(f"{glob.escape(path.name)}.*"):
        if _stale(aside, holder(aside)):
            aside.unlink(missing_ok=True)


def _stale(path: Path, told: dict[str, Any]) -> bool:
    if told.get("host") == _host():
        return not lives(told["pid"], told["started"])
    return _age(path) > (STALE_S if told else 2.0)  # an empty lease is being written, or its writer was killed


def _age(path: Path) -> float:
    """Seconds since the last renewal of a file, by the clock of its filesystem."""
    now = path.with_name(f".now.{os.urandom(6).hex()}")
    try:
        now.touch()
        return now.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        now.unlink(missing_ok=True)
