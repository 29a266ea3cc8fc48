"""Progress of a sweep: a bar for the whole, and one for each run that is being executed, by its cells; in a log, a line
per run."""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tqdm.auto import tqdm

from eval.record.manifest import read_json
from notebooks.batch.job import Job, Outcome
from notebooks.batch.leases import holder
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.worker import title_of

EVERY_S = 1.0


class Progress:
    """Bars of tqdm, in a terminal or a notebook, fed by what lies in the folders of the runs.

    Args:
        likely: seconds that each run is likely to take, by key; None where nothing is known.
        known: how many runs of the sweep were done before.
    """

    def __init__(self, jobs: Sequence[Job], likely: Mapping[str, float | None], parallel: int, known: int):
        self._left = {job.key: job for job in jobs}
        self._likely, self._parallel = likely, parallel
        self._begun: dict[str, float] = {}
        self._count = known
        self._bars: dict[str, tqdm] = {}
        # In a log a bar would be a line a second: there a line per run is enough.
        self._how = {} if sys.stderr.isatty() or "ipykernel" in sys.modules else {"disable": True}
        self._runs = len(jobs) + known
        self._total = tqdm(total=self._runs, initial=known, desc="sweep", unit="run", **self._how)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Progress":
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
            self._total.update()
            self._count += 1
            took = f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
            said = f": {outcome.failure['kind']}: {outcome.failure['error']}"[:200] if outcome.failure else ""
            left = f"; {estimate}" if (estimate := self._estimate()) else ""
            tqdm.write(
                f"{self._count}/{self._runs}  {outcome.status}{took}  {outcome.key}{said}{left}", file=sys.stderr
            )

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            with self._lock:
                for key, job in list(self._left.items()):
                    self._look(key, RunFolder(Path(job.folder)))
                self._total.set_postfix_str(self._estimate())

    def _look(self, key: str, places: RunFolder) -> None:
        if not holder(places.lease):
            return
        self._begun.setdefault(key, time.monotonic())
        cells = read_json(places.part / "notebook.ipynb").get("cells", [])
        if not cells:
            return
        ended = [i for i, cell in enumerate(cells) if (cell["metadata"].get("papermill") or {}).get("end_time")]
        if key not in self._bars:
            self._bars[key] = tqdm(total=len(cells), desc=key, unit="cell", leave=False, **self._how)
        bar = self._bars[key]
        bar.n = len(ended)
        bar.set_postfix_str(title_of(cells, min(len(ended), len(cells) - 1)))

    def _estimate(self) -> str:
        """What is left of it, by what runs like these took before."""
        known = [seconds for seconds in self._likely.values() if seconds is not None]
        if not self._left or not known:
            return ""
        usual, now = sum(known) / len(known), time.monotonic()
        left = 0.0
        for key in self._left:
            seconds = self._likely.get(key)
            spent = now - self._begun[key] if key in self._begun else 0.0
            left += max(0.0, (usual if seconds is None else seconds) - spent)
        return f"about {left / self._parallel / 60:.0f} min left"
