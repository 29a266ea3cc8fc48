"""Worker processes of `kernels.harness.validate`: starts them, limits their time, and continues after crashes."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO

from kernels.harness.trial import Log, bare_row, read, sentence

RESTARTS = 3  # restarts of one job after crashes
GRACE = 10.0  # seconds beyond its share after which a process is ended
LATE = 2.0  # the same, beyond the time of all jobs
SILENT = 75.0  # seconds without a line after which the process of several ops is ended; a case of them takes less
DEAD = 5.0  # seconds to wait for a process that was killed; one that waits for its driver may take forever
_PAUSE = 0.05


@dataclass(frozen=True)
class TrialJob:
    """The work of one process: a phase ("ceilings", "checks", "warm", "contests") of an op, from item `start` on.

    op: also several ops, joined by "+"; `pending` are those of them that are not finished.
    """

    phase: str
    op: str
    shard: str = "0/1"
    start: int = 0
    restarts: int = 0
    pending: str = ""

    @property
    def ops(self) -> list[str]:
        """The ops that are not finished."""
        return (self.pending or self.op).split("+")


@dataclass
class _Running:
    job: TrialJob
    process: subprocess.Popen
    stderr: IO[bytes]
    mark: int  # number of lines already in the file at the start
    limit: float
    started: float  # of time.time()
    looked: float  # of time.monotonic(): when its lines were last read


class Workers:
    """Runs jobs, up to `count` at a time.

    Args:
        command: starts a process; a job's own flags are appended.
        lines: the file to which processes append their results.
        after: called whenever a job is over.
    """

    def __init__(self, command: list[str], lines: Path, count: int, after: Callable[[], object]) -> None:
        self.command, self.lines, self.count, self.after = command, lines, count, after

    def run(self, jobs: list[TrialJob], until: float, *, alone: bool = False) -> list[TrialJob]:
        """Run the jobs until `until` (of time.monotonic); each gets an even share of the time left when it starts.

        Returns:
            the unfinished jobs, with their new starts
        """
        waiting, running, left = list(jobs), [], []
        count = 1 if alone else self.count
        try:
            while waiting or running:
                while waiting and len(running) < count and until - time.monotonic() > 1:
                    share = (until - time.monotonic()) * min(1.0, count / (len(waiting) + len(running)))
                    running.append(self._start(waiting.pop(0), share, until))
                if not running:
                    break
                time.sleep(_PAUSE)
                for one in list(running):
                    silent = one.process.poll() is None and self._silent(one)
                    if one.process.poll() is None and time.monotonic() < one.limit and not silent:
                        continue
                    running.remove(one)
                    rest, crashed = self._finish(one, silent)
                    if rest and crashed and rest.restarts <= RESTARTS:
                        waiting.insert(0, rest)
                    elif rest:
                        left.append(rest)
                    self.after()
        finally:
            for one in running:
                _end(one)
        return left + waiting

    def _start(self, job: TrialJob, share: float, until: float) -> _Running:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the process is over)
        flags = ["--phase", job.phase, "--only-op", job.op, "--shard", job.shard, "--start", str(job.start)]
        flags += ["--until", f"{time.time() + share:.3f}"]
        mark = len(read(self.lines))
        environment = dict(os.environ)
        if self.count > 1 and job.phase in (
            "checks",
            "warm",
        ):  # in parallel processes, threads that wait for each other would occupy cores
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.count)))
        process = subprocess.Popen(
            [*self.command, *flags], stdin=subprocess.DEVNULL, stderr=stderr, env=environment, start_new_session=True
        )
        now = time.monotonic()
        limit = min(now + share + max(GRACE, share / 4), max(until, now) + LATE)
        return _Running(job, process, stderr, mark, limit, time.time(), now)

    def _silent(self, one: _Running) -> bool:
        """Does a process of several ops, which has the time of all of them, hang in one case?"""
        if "+" not in one.job.op or time.monotonic() - one.looked < 1:
            return False
        one.looked = time.monotonic()
        last = [x["at"] for x in self._lines(one) if "at" in x]
        return time.time() - max([one.started, *last[-1:]]) > SILENT

    def _lines(self, one: _Running) -> list[dict]:
        """What the process wrote so far."""
        of = (one.job.phase, one.job.op, one.job.shard)
        return [x for x in read(self.lines)[one.mark :] if (x["phase"], x.get("job", x["op"]), x["shard"]) == of]

    def _finish(self, one: _Running, silent: bool = False) -> tuple[TrialJob | None, bool]:
        """(the rest of the job, whether it crashed); the item at which it crashed is recorded."""
        killed = one.process.poll() is None
        _end(one)
        job = one.job
        said = self._said(one)
        lines = self._lines(one)
        if lines and lines[-1]["kind"] == "end":
            rest, pending = lines[-1]["next"], lines[-1].get("pending", "")
            return (None if rest is None else replace(job, start=rest, pending=pending)), False
        begun = [x for x in lines if x["kind"] == "begin"]
        last = begun[-1] if begun else {"index": job.start}
        done = {x["index"] for x in lines if x["kind"] in ("check", "contest")}
        timed = any(x["kind"] in ("check", "contest") and x["index"] != last["index"] for x in lines)
        restarts = 0 if timed else job.restarts + 1  # may crash again after a crash; a dead device always does
        rest = replace(job, start=last["index"] + 1, restarts=restarts)
        why = (
            f"silent for {SILENT:.0f} s"
            if silent
            else "over its time"
            if killed
            else f"crashed: {_status(one.process.returncode)}{', ' + said if said else ''}"
        )
        if job.phase in ("ceilings", "warm"):
            print(f"{job.phase} {job.op} {why}", flush=True)
            return None, False
        if killed and not silent and job.phase == "checks" and job.restarts == 0:
            return replace(
                rest, start=last["index"]
            ), False  # its share may have been too small: try again if there is time
        if last["index"] not in done:
            self._note(job, last, why)
        return rest, silent or not killed

    def _note(self, job: TrialJob, begun: dict, why: str) -> None:
        log, op = Log(self.lines, job.phase, job.op, job.shard, 0), begun.get("op", job.op)
        if job.phase == "checks":
            name, impl = begun.get("name", "(making the checks)"), begun.get("impl", "")
            log.write(
                "check",
                op=op,
                index=begun["index"],
                name=name,
                impl=impl,
                error=None,
                tolerance=None,
                green=False,
                message=why,
            )
            print(f"RED  {op}: {name} ({impl}): {why}", flush=True)
            return
        row = bare_row(op, why, "(making it)")
        row |= {name: value for name, value in begun.items() if name in row and name != "status"}
        print(sentence(log.write("contest", index=begun["index"], **row)), flush=True)

    def _said(self, one: _Running) -> str:
        """The last line of what the process wrote to stderr, all of which goes to log.txt."""
        one.stderr.seek(0)
        text = one.stderr.read().decode(errors="replace").strip()
        one.stderr.close()
        if text:
            with open(self.lines.with_name("log.txt"), "a", encoding="utf-8") as file:
                file.write(f"--- {one.job}\n{text}\n")
        return text.splitlines()[-1][:300] if text else ""


def _status(code: int | None) -> str:
    if code is None:
        return "cannot be ended"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _end(one: _Running) -> None:
    """End the process and all its child processes; a process that its driver holds is left behind."""
    if one.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        with suppress(TimeoutExpired):
            one.process.wait(timeout=DEAD)
