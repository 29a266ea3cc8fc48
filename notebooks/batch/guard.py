"""The guard of one attempt at a run: it starts the worker, watches time and memory, and finally ends all processes.

Its standard input is a pipe from the process that owns the run. When that pipe is closed, because its owner
stopped the run or was killed, the guard ends every process with the run's mark. It reports in one line of JSON.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil

from notebooks.batch.processes import MARK, end
from notebooks.batch.run_folder import LOG, executed

EVERY_S = 0.25


def main() -> int:
    """`python -m notebooks.batch.guard JOB.json`"""
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    waiting = Path(job["waiting"])
    before, begin = _oom_kills(), time.monotonic()
    with open(job_file.with_name(LOG), "wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "notebooks.batch.worker", str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    spent, peak, why, cell = 0.0, 0, "", _Cell(job_file.with_name("notebook.ipynb"))
    while worker.poll() is None and not why:
        ready, _, _ = select.select([sys.stdin], [], [], EVERY_S)
        if ready and not os.read(sys.stdin.fileno(), 64):
            why = "interrupt"
        now = time.monotonic()
        passed, begin = 0.0 if waiting.exists() else now - begin, now  # waiting for the device does not count
        spent += passed
        peak = max(peak, _memory(worker.pid))
        if job["timeout_s"] and spent > job["timeout_s"]:
            why = "timeout"
        if job["cell_timeout_s"] and cell.spent_after(passed) > job["cell_timeout_s"]:
            why = "cell timeout"
    left = end(os.environ[MARK])
    status = worker.poll()
    report = {
        "status": status,
        "why": why,
        "seconds": round(spent, 1),
        "peak_memory_bytes": peak,
        "left": left,
        "oom_kills": _oom_kills() - before,
    }
    try:
        print(json.dumps(report), flush=True)
    except BrokenPipeError:  # the owner has ended
        os._exit(1)
    return 0


class _Cell:
    """The cell that is being executed, as papermill notes it in the notebook, and its time so far."""

    def __init__(self, book: Path):
        self.book, self.index, self.spent = book, None, 0.0

    def spent_after(self, seconds: float) -> float:
        running = [i for i, cell in enumerate(executed(self.book)) if cell.begun and not cell.ended]
        if running and running[-1] == self.index:
            self.spent += seconds
        elif running:
            self.index, self.spent = running[-1], 0.0
        return self.spent if running else 0.0


def _memory(pid: int) -> int:
    """Resident bytes of a process and its children; shared pages count in each."""
    total = 0
    try:
        worker = psutil.Process(pid)
        for process in (worker, *worker.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.Error:
        pass
    return total


def _oom_kills() -> int:
    """The number of processes that the kernel has killed for memory in this control group, or on this machine."""
    for path, name in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = dict(line.split() for line in Path(path).read_text().splitlines())
            return int(lines[name])
        except (OSError, KeyError, ValueError):
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
