"""Worker processes of `kernels.harness.validate`: starts them, limits their time, and continues after crashes."""

import multiprocessing.process
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from kernels.harness.trial import Line, bare_row, sentence

RESTARTS = 3  # restarts of one job after crashes
LATE = 2.0  # seconds beyond the time of all jobs after which a process is ended
SILENT = 75.0  # seconds without a line after which a process is ended; one check or contest takes less
DEAD = 5.0  # seconds to wait for a process that was killed; one that waits for its driver may take forever
CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class TrialJob:
    """The work of one process: every `of`-th item of a phase ("ceilings", "checks", "warm", "contests"), from the item
    `start` on. pending: the ops that are not finished, separated by commas; "": all."""

    phase: str
    part: int = 0
    of: int = 1
    start: int = 0
    restarts: int = 0
    pending: str = ""


Work = Callable[[TrialJob, float, Callable[[Line], None]], None]  # does a job until a time, and sends lines


class Worker:
    """A process that does a job, and the lines that it sent."""

    def __init__(self, job: TrialJob, work: Work, until: float) -> None:
        self.job, self.until = job, until
        self.lines: list[Line] = []
        self.heard = time.monotonic()
        self.killed: float | None = None
        self.stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed when the process is over)
        self.pipe, there = CONTEXT.Pipe(duplex=False)
        seconds = until - time.monotonic()  # a process has a clock of its own
        self.process = CONTEXT.Process(
            target=_serve, args=(work, job, time.time() + seconds, there, self.stderr.name), daemon=True
        )
        self.process.start()
        there.close()

    def listen(self, note: Callable[[Line], None]) -> bool:
        """Take the lines that were sent; true if there will be no others."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                line = self.pipe.recv()
                self.heard = time.monotonic()
                self.lines.append(line)
                note(line)
            return False
        return True

    def late(self) -> str:
        """Why the process must be ended; "" if it need not."""
        now = time.monotonic()
        if self.job.phase in ("checks", "contests") and now - self.heard > SILENT:
            return f"silent for {SILENT:.0f} s"
        return "over its time" if now > self.until + LATE else ""

    def kill(self) -> None:
        """Kill the process and all its child processes, without waiting; nor does Python wait when it exits."""
        self.killed = self.killed or time.monotonic()
        if not self.process.is_alive():
            return
        with suppress(ProcessLookupError):  # it has no group yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        multiprocessing.process._children.discard(self.process)  # for which Python waits at exit, without a limit

    def end(self) -> str:
        """End the process and all its child processes; one that its driver holds is left behind. Returns how it ended,
        with the last line that it wrote to stderr."""
        if self.killed is None:
            self.process.join(0 if self.process.is_alive() and self.late() else DEAD)
        if self.process.is_alive():
            self.kill()
            self.process.join(max(0.0, self.killed + DEAD - time.monotonic()))
        code, said = self.process.exitcode, Path(self.stderr.name).read_text(errors="replace").strip()
        self.said = said
        self.stderr.close()
        status = "cannot be ended" if code is None else f"exit {code}"
        status = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else status
        return ", ".join(filter(None, (status, said.splitlines()[-1][:300] if said else "")))


class Workers:
    """Runs jobs, up to `count` at a time.

    Args:
        work: what a process does; it can be pickled.
        note: called with every line that a process sends.
        errors: the file to which all that processes write to stderr is appended.
        after: called whenever a job is over.
    """

    def __init__(
        self, work: Work, count: int, note: Callable[[Line], None], errors: Path, after: Callable[[], object]
    ) -> None:
        self.work, self.count, self.note, self.errors, self.after = work, count, note, errors, after

    def run(self, jobs: list[TrialJob], until: float, *, alone: bool = False) -> list[TrialJob]:
        """Run the jobs until `until` (of time.monotonic()). Returns the unfinished jobs, with their new starts."""
        waiting, left = list(jobs), []
        running: list[Worker] = []
        try:
            while waiting or running:
                while waiting and len(running) < (1 if alone else self.count) and until - time.monotonic() > 1:
                    running.append(Worker(waiting.pop(0), self.work, until))
                if not running:
                    break
                wait([worker.pipe for worker in running], 0.5)
                over = [worker for worker in running if worker.listen(self.note) or worker.late()]
                _kill([worker for worker in over if worker.late()])
                for worker in over:
                    running.remove(worker)
                    rest, again = self._finish(worker)
                    if rest and again and rest.restarts <= RESTARTS:
                        waiting.insert(0, rest)
                    elif rest:
                        left.append(rest)
                    self.after()
        finally:
            _kill(running)
            for worker in running:
                worker.end()
        return left + waiting

    def _finish(self, worker: Worker) -> tuple[TrialJob | None, bool]:
        """(the rest of the job, whether it goes on at once); the item at which it crashed is recorded."""
        why, status = worker.late(), worker.end()
        worker.listen(self.note)  # what it sent before it ended
        job, lines = worker.job, worker.lines
        if worker.said:
            with self.errors.open("a", encoding="utf-8") as file:
                file.write(f"--- {job}\n{worker.said}\n")
        if lines and lines[-1]["kind"] == "end":
            following = lines[-1]["next"]
            return None if following is None else replace(job, start=following, pending=lines[-1]["pending"]), False
        why = why or f"crashed: {status}"
        if job.phase in ("ceilings", "warm"):
            print(f"{job.phase} {why}", flush=True)
            return None, False
        last = next((x for x in reversed(lines) if x["kind"] == "begin"), {"index": job.start, "op": ""})
        if why == "over its time" and job.phase == "checks":
            return replace(job, start=last["index"]), False
        if not any(x["kind"] in ("check", "contest") and x["index"] == last["index"] for x in lines):
            self._record(job.phase, last, why)
        went_well = any(x["kind"] in ("check", "contest") and x["index"] != last["index"] for x in lines)
        restarts = 0 if went_well else job.restarts + 1  # it may crash again after a crash; a dead device always does
        return replace(job, start=last["index"] + 1, restarts=restarts), why != "over its time"

    def _record(self, phase: str, begun: Line, why: str) -> None:
        index, op = begun["index"], begun["op"]
        if phase == "checks":
            name, impl = begun.get("name", "(making the checks)"), begun.get("impl", "")
            known = {"op": op, "index": index, "name": name, "impl": impl, "error": None, "tolerance": None}
            self.note({"kind": "check", "phase": phase, **known, "green": False, "message": why})
            print(f"RED  {op}: {name} ({impl}): {why}", flush=True)
            return
        row = bare_row(op, why, "(making it)")
        row |= {name: value for name, value in begun.items() if name in row and name != "status"}
        self.note({"kind": "contest", "phase": phase, "index": index, **row})
        print(sentence(row), flush=True)


def _kill(workers: list[Worker]) -> None:
    """Kill all of them before one is waited for."""
    for worker in workers:
        worker.kill()


def _serve(work: Work, job: TrialJob, until: float, pipe: "multiprocessing.connection.Connection", stderr: str) -> None:
    """What a process does: a job, in a session of its own, with stderr in a file."""
    os.setsid()
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    work(job, until, pipe.send)
