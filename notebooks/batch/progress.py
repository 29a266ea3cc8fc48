"""Progress of a sweep: bars in a terminal or a notebook; lines in a log, which always show the state of each run.

All data is read from the folders of the runs, so that any process or machine may execute them.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tqdm.auto import tqdm

from notebooks.batch.job import Job, Outcome
from notebooks.batch.leases import holder
from notebooks.batch.run_folder import RunFolder, executed
from notebooks.batch.status import bar_of, doing, duration, left_in_cell

EVERY_S = 1.0
AGAIN_S = 30.0  # after this time without news, a log lists the running runs again


class Progress:
    """Shows the states of the runs of a sweep.

    Args:
        likely: the expected seconds of each run, by key; None if not known.
        known: the number of runs of the sweep that were done before.
    """

    def __init__(self, jobs: Sequence[Job], likely: Mapping[str, float | None], parallel: int, known: int):
        self._left = {job.key: job for job in jobs}
        self._likely, self._parallel = likely, max(1, min(parallel, len(jobs)))
        self._begun: dict[str, float] = {}
        self._count = known
        self._bars: dict[str, tqdm] = {}
        self._said: dict[str, tuple[str, float]] = {}  # the last log line of a run, and its time
        notebook = "ipykernel" in sys.modules
        self._in_log = not notebook and not sys.stdout.isatty()
        self._bar = {} if notebook or sys.stderr.isatty() else {"disable": True}
        self._runs = len(jobs) + known
        self._total = tqdm(total=self._runs, initial=known, desc="sweep", unit="run", **self._bar)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Progress":
        if self._left:
            count = f"{len(self._left)} run{'s' * (len(self._left) > 1)} to do"
            self._say(f"{count}: {self._estimate() or 'how long it takes is not known yet'}")
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        for bar in (*self._bars.values(), self._total):
            bar.close()

    def done(self, outcome: Outcome) -> None:
        """A run has ended."""
        with self._lock:
            self._left.pop(outcome.key, None)
            if bar := self._bars.pop(outcome.key, None):
                bar.close()
            interrupted = outcome.failure.get("kind") == "interrupt"
            if outcome.status == "waiting":  # it was never started, because the sweep was interrupted
                return
            if not interrupted:
                self._total.update()
                self._count += 1
            status = "interrupted" if interrupted else outcome.status
            took = f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
            why = outcome.failure and not interrupted
            said = f": {outcome.failure['kind']}: {outcome.failure['error']}"[:200] if why else ""
            left = f"; {estimate}" if (estimate := self._estimate()) and not interrupted else ""
            self._say(f"{self._count}/{self._runs}  {status}{took}  {outcome.key}{said}{left}")

    def _say(self, line: str) -> None:
        """Write a line in the log, or above the bars."""
        if self._in_log:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
        else:
            tqdm.write(line, file=sys.stderr)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            with self._lock:
                for key, job in list(self._left.items()):
                    self._look(key, RunFolder(Path(job.folder)))
                self._total.set_postfix_str(self._estimate())

    def _look(self, key: str, places: RunFolder) -> None:
        if not holder(places.lease):
            return
        now = time.monotonic()
        begun = self._begun.setdefault(key, now)
        cells = executed(places.part / "notebook.ipynb")
        text, more = doing(places), bar_of(places)
        before, when = self._said.get(key, ("", now))
        ended = before and not cells  # its folder was moved to its final place
        if self._in_log and not ended and (text != before or now - when > AGAIN_S):
            self._said[key] = (text, now)
            left = f"; {estimate}" if (estimate := self._estimate()) else ""
            self._say(f"{key}: {text}{more}, after {duration(now - begun)}{left}")
        if not cells:
            return
        if key not in self._bars:
            self._bars[key] = tqdm(total=len(cells), desc=key, unit="cell", leave=False, **self._bar)
        bar = self._bars[key]
        bar.n = sum(cell.ended for cell in cells)
        bar.set_postfix_str(text + more)

    def _estimate(self) -> str:
        """The remaining time, from the times of similar earlier runs, or from the bar of a slower run."""
        known = [seconds for seconds in self._likely.values() if seconds is not None]
        if not self._left or not known:
            return ""
        usual, now = sum(known) / len(known), time.monotonic()
        left = 0.0
        for key, job in self._left.items():
            seconds = self._likely.get(key)
            spent = now - self._begun[key] if key in self._begun else 0.0
            in_cell = left_in_cell(RunFolder(Path(job.folder))) if key in self._begun else 0.0
            left += max(in_cell, (usual if seconds is None else seconds) - spent)
        return f"about {duration(left / self._parallel)} left" if left else "longer than expected"
