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
from typing import IO

from kernels.harness.trial import Log, bare_row, read, sentence

RESTARTS = 3  # restarts of one job after crashes
GRACE = 10.0  # seconds beyond its share after which a process is ended
LATE = 2.0  # the same, beyond the time of all jobs
_PAUSE = 0.05


@dataclass(frozen=True)
class Job:
    """The work of one process: a phase ("ceilings", "checks", "warm", "contests") of an op, from item `start` on."""

    phase: str
    op: str
    shard: str = "0/1"
    start: int = 0
    restarts: int = 0


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen
    stderr: IO[bytes]
    mark: int  # number of lines already in the file at the start
    limit: float


class Workers:
    """Runs jobs, up to `count` at a time.

    Args:
        command: starts a process; a job's own flags are appended.
        lines: the file to which processes append their results.
        after: called whenever a job is over.
    """

    def __init__(self, command: list[str], lines: Path, count: int, after: Callable[[], object]) -> None:
        self.command, self.lines, self.count, self.after = command, lines, count, after

    def run(self, jobs: list[Job], until: float, *, alone: bool = False) -> list[Job]:
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
                    if one.process.poll() is None and time.monotonic() < one.limit:
                        continue
                    running.remove(one)
                    rest, crashed = self._finish(one)
                    if rest and crashed and rest.restarts <= RESTARTS:
                        waiting.insert(0, rest)
                    elif rest:
                        left.append(rest)
                    self.after()
        finally:
            for one in running:
                _end(one)
        return left + waiting

    def _start(self, job: Job, share: float, until: float) -> _Running:
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
        return _Running(job, process, stderr, mark, min(now + share + max(GRACE, share / 4), max(until, now) + LATE))

    def _finish(self, one: _Running) -> tuple[Job | None, bool]:
        """(the rest of the job, whether it crashed); the item at which it crashed is recorded."""
        killed = one.process.poll() is None
        _end(one)
        job = one.job
        said = self._said(one)
        lines = [
            x
            for x in read(self.lines)[one.mark :]
            if (x["phase"], x["op"], x["shard"]) == (job.phase, job.op, job.shard)
        ]
        if lines and lines[-1]["kind"] == "end":
            rest = lines[-1]["next"]
            return (None if rest is None else replace(job, start=rest)), False
        begun = [x for x in lines if x["kind"] == "begin"]
        last = begun[-1] if begun else {"index": job.start}
        done = {x["index"] for x in lines if x["kind"] in ("check", "contest")}
        timed = any(x["kind"] in ("check", "contest") and x["index"] != last["index"] for x in lines)
        restarts = 0 if timed else job.restarts + 1  # may crash again after a crash; a dead device always does
        rest = replace(job, start=last["index"] + 1, restarts=restarts)
        why = "over its time" if killed else f"crashed: {_status(one.process.returncode)}{', ' + said if said else ''}"
        if job.phase in ("ceilings", "warm"):
            print(f"{job.phase} {job.op} {why}", flush=True)
            return None, False
        if killed and job.phase == "checks" and job.restarts == 0:
            return replace(
                rest, start=last["index"]
            ), False  # its share may have been too small: try again if there is time
        if last["index"] not in done:
            self._note(job, last, why)
        return rest, not killed

    def _note(self, job: Job, begun: dict, why: str) -> None:
        log = Log(self.lines, job.phase, job.op, job.shard, 0)
        if job.phase == "checks":
            name, impl = begun.get("name", "(making the checks)"), begun.get("impl", "")
            log.write(
                "check",
                index=begun["index"],
                name=name,
                impl=impl,
                error=None,
                tolerance=None,
                green=False,
                message=why,
            )
            print(f"RED  {job.op}: {name} ({impl}): {why}", flush=True)
            return
        row = bare_row(job.op, why, "(making it)")
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


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _end(one: _Running) -> None:
    """End the process and all its child processes."""
    if one.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
