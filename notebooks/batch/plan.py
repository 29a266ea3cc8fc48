"""Plans and runs sweeps. A run is finished when its folder holds a valid manifest; nothing else is checked.

>>> from notebooks.batch.plan import plan, run_sweep
>>> plan("quickstart")          # a table: every run, its key, what will be done, how long it took before
>>> run_sweep("quickstart")     # with progress, also in a notebook; a second call continues after an interruption
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

from eval.record.files import write_whole
from eval.record.html import html_table
from notebooks.batch import snapshot
from notebooks.batch.engines.engine import Engine
from notebooks.batch.engines.local import Local
from notebooks.batch.engines.slurm import queued
from notebooks.batch.job import Outcome, job_of, tidy
from notebooks.batch.leases import held
from notebooks.batch.preflight import check_folder
from notebooks.batch.processes import end_orphans
from notebooks.batch.progress import Progress
from notebooks.batch.run_folder import RunFolder, leftovers
from notebooks.batch.status import (
    OTHER_CODE,
    RUNS,
    aligned,
    check_name,
    duration,
    finished_runs,
    folder_of,
    keep_sweep,
    state_of,
    sweep_folder,
    varied_parameters,
)
from notebooks.batch.sweep import Planned, Sweep, read_sweep
from notebooks.batch.sweep.estimate import estimated_seconds, usual_values, work_of
from notebooks.batch.sweep.files import MadeFile, make_files, missing
from notebooks.batch.track import check_tracker, track
from notebooks.study.identity import packages_code

_WHY = {"notebook": "the notebook", "versions": "a library's version", "model": "the model", "data": "the data",
        "revisions": "a revision on the hub", "device": "the device", "threads": "the number of threads",
        "native": "the C++ compiler"}  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """A run of a plan.

    state: finished, stale (finished with other code of the workbench), running, failed, waiting. does: skip or run,
        and the reason. seconds: the expected time, if it is known; measured: on finished runs with its parameters.
    """

    planned: Planned
    state: str
    does: str
    why: str
    seconds: float | None
    measured: bool = False

    def time(self) -> str:
        """The expected time in words, with a sign where it is only an estimate."""
        if self.does == "skip":
            return ""
        return f"{'' if self.measured or self.seconds is None else '~'}{duration(self.seconds)}"


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep; shown as a table, as text and in Jupyter."""

    sweep: Sweep
    rows: tuple[PlanRow, ...]
    files: tuple[MadeFile, ...] = ()  # that are not there yet

    @property
    def seconds(self) -> float | None:
        """The remaining time, one run after the other; None if the time of no run is known."""
        left = [row.seconds for row in self.rows if row.does == "run"]
        known = [seconds for seconds in left if seconds is not None]
        if left and not known:
            return None
        return sum(known) + (len(left) - len(known)) * (statistics.fmean(known) if known else 0)

    def cells(self) -> list[list[str]]:
        """The table: a head, and a row per run."""
        head = ["#", "notebook", "parameters", "state", "plan", "time", "key"]
        return [head] + [
            [
                str(i),
                Path(row.planned.notebook).stem,
                varied_parameters(row.planned),
                row.state,
                row.does + (f": {row.why}" if row.why else ""),
                row.time(),
                row.planned.key,
            ]
            for i, row in enumerate(self.rows, start=1)
        ]

    def __str__(self) -> str:
        counts = Counter(row.does for row in self.rows)
        stale = sum(row.state == "stale" and row.does == "skip" for row in self.rows)
        kept = f" ({stale} stale: `--stale` runs them again)" if stale else ""
        guessed = any(row.does == "run" and not row.measured for row in self.rows)
        left = f"{counts['run']} to run, {'about ' * guessed}{duration(self.seconds)} one after another"
        total = f"{len(self.rows)} run{'s' * (len(self.rows) != 1)}: {counts['skip']} done{kept}, {left}"
        first = "".join(f"made first: {file}\n" for file in self.files if counts["run"])
        return f"{self.sweep.title}\n\n{aligned(self.cells())}\n\n{first}{total}"

    def _repr_html_(self) -> str:
        head, *rows = self.cells()
        said = f"<p><b>{escape(self.sweep.title)}</b> {escape(self.sweep.description)}</p>"
        return f"{said}{html_table(head, rows)}"


def plan(sweep: str | Path | Sweep, *, runs: Path = RUNS, force: bool = False, stale: bool = False) -> SweepPlan:
    """Every run of a sweep, with the planned action and the expected time. Nothing is started.

    Args:
        force: plan as if no run were finished.
        stale: plan as if runs that were executed with other code of the workbench were not finished.

    Raises:
        ValueError: the sweep is not valid (`notebooks.batch.sweep.read_sweep`), another sweep of its name was started
            here, or nothing can be written into the folder of runs.
    """
    sweep = sweep if isinstance(sweep, Sweep) else read_sweep(sweep)
    check_folder(runs)
    check_name(sweep, runs)
    before, code, rows = _Before(runs), packages_code(), []
    for planned in sweep.runs:
        folder = folder_of(planned, runs)
        now = state_of(folder, planned.key, planned.values, code)
        again = force or (stale and now == "stale")
        done = now in ("finished", "stale") and not again
        why = OTHER_CODE if now == "stale" else "forced" if again and now == "finished" else ""
        if now == "damaged":
            why = RunFolder(folder, planned.key).damage()[:100]
        why = why or ("" if done else before.changed(planned))
        seconds, measured = (None, False) if done else before.likely(planned)
        rows.append(PlanRow(planned, now, "skip" if done else "run", why, seconds, measured))
    return SweepPlan(sweep, tuple(rows), tuple(missing(sweep.files, runs)))


def run_sweep(
    sweep: str | Path | Sweep,
    *,
    runs: Path = RUNS,
    engine: Engine | None = None,
    force: bool = False,
    stale: bool = False,
    stop: threading.Event | None = None,
    tracker: str = "",
) -> list[Outcome]:
    """Execute the runs that are not done yet; after any interruption, a second call continues.

    Args:
        engine: `Local()` unless given.
        force: run finished runs again, too; each stays until its successor is finished.
        stale: also run again the runs that were finished with other code of the workbench.
        stop: ends all running runs when it is set.
        tracker: where the record of each run that finishes is sent (`notebooks.batch.track`); "": nowhere.

    Raises:
        ValueError: the sweep is not valid, or this is Windows; nothing has been started in this case.
    """
    if os.name == "nt":  # process groups, signals and locks that end with a process
        raise ValueError("`workbench run` needs Linux or macOS; on Windows use WSL 2, or open the notebook in Jupyter")
    check_tracker(tracker)
    sweep = sweep if isinstance(sweep, Sweep) else read_sweep(sweep)
    engine, stop = engine or Local(), stop or threading.Event()
    rows = plan(sweep, runs=runs, force=force, stale=stale).rows
    end_orphans(runs)
    if sweep.source:
        keep_sweep(sweep, runs)
    known = [Outcome(row.planned.key, "known", str(folder_of(row.planned, runs))) for row in rows if row.does == "skip"]
    _tidy_known([row.planned for row in rows if row.does == "skip"], runs)
    left = [row for row in rows if row.does == "run"]
    limits = {"timeout_s": sweep.timeout_s, "cell_timeout_s": sweep.cell_timeout_s}
    code = _snapshot(sweep, runs) if sweep.source and left else snapshot.current()
    jobs = [job_of(row.planned, runs, force=force, stale=row.state == "stale", code=code, **limits) for row in left]
    likely = {row.planned.key: row.seconds for row in left}
    found = list(known)
    with _ended_by_signals(stop):
        for file in make_files(sweep.files if left else (), runs, code.root, stop):
            print(f"making {file.path}: {file}", flush=True)
    with _ended_by_signals(stop), Progress(jobs, likely, getattr(engine, "parallel", 1), len(known)) as progress:
        for outcome in engine.run(jobs, stop):
            _remember(outcome)
            found.append(outcome)
            progress.done(outcome)
            if tracker and outcome.status == "finished":
                track(Path(outcome.folder), tracker)
    return found


def _tidy_known(known: list[Planned], runs: Path) -> None:
    """Remove what killed attempts have left of finished runs."""
    places = [(RunFolder(folder_of(planned, runs), planned.key), planned.values) for planned in known]
    left = {parent: leftovers(parent) for parent in {place.folder.parent for place, _ in places}}
    for place, values in places:
        if place.folder.name in left[place.folder.parent]:
            tidy(place, values)


def _snapshot(sweep: Sweep, runs: Path) -> snapshot.Code:
    """The code that the runs of this sweep execute; later edits do not change it."""
    in_use = queued(runs) or any(held(RunFolder(folder_of(one, runs)).lease) for one in sweep.runs)
    notebooks = [one.notebook for one in sweep.runs]
    return snapshot.take(sweep_folder(sweep.name, runs) / "code", notebooks, runs, keep_others=in_use)


@contextlib.contextmanager
def _ended_by_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C or SIGTERM ends running runs as interrupted, and lets others wait; a second one acts as usual."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remember(outcome: Outcome) -> None:
    """Note a failure that the folders do not show, such as a node that died, so that `status` and pages report it."""
    places = RunFolder(Path(outcome.folder))
    if (
        outcome.status == "failed"
        and places.failure().get("error") != outcome.failure.get("error")
        and not places.complete()
    ):
        with contextlib.suppress(OSError):  # on a full disk no note can be written
            shutil.rmtree(places.failed, ignore_errors=True)
            write_whole(json.dumps(outcome.failure), places.failed / "failure.json")


class _Before:
    """The finished runs of a folder, by their notebook and parameters, and by their notebook and model."""

    def __init__(self, runs: Path):
        self._same: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._alike: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._works: dict[tuple[str, str], tuple[dict[str, Any], list[tuple[float, float | None]]]] = {}
        for made in finished_runs(runs):
            notebook = Path(made["notebook"]).stem
            self._same[notebook, str(made["identity"].get("parameters"))].append(made)
            self._alike[notebook, str(made["values"].get("model_name"))].append(made)

    def changed(self, planned: Planned) -> str:
        """Why a run of these parameters is executed again although one was finished; "" if none was finished."""
        if not (same := self._same[Path(planned.notebook).stem, planned.identity["parameters"]]):
            return ""
        last = max(same, key=lambda made: made["finished"])
        parts = [name for part, name in _WHY.items() if last["identity"].get(part) != planned.identity[part]]
        if parts:
            return f"{' and '.join(parts)} changed since {last['finished'][:16].replace('T', ' ')}"
        return "finished, but its model is not saved there" if planned.values.get("save_path") else ""

    def likely(self, planned: Planned) -> tuple[float | None, bool]:
        """Seconds of runs with its parameters; else of runs of its notebook and model, in proportion to their texts and
        recipes; else the value in its sweep, else an estimate. And whether they were measured."""
        notebook, model = Path(planned.notebook).stem, str(planned.values.get("model_name"))
        if same := self._same[notebook, planned.identity["parameters"]]:
            return statistics.median(made["seconds"] for made in same), True
        if self._alike[notebook, model]:
            usual, done = self._done(str(planned.notebook), model)
            asked = work_of(planned.values, usual)
            return statistics.median(took * asked / work if asked and work else took for took, work in done), False
        if planned.expected_s is not None:
            return planned.expected_s, False
        return estimated_seconds(planned.notebook, planned.values), False

    def _done(self, notebook: str, model: str) -> tuple[dict[str, Any], list[tuple[float, float | None]]]:
        """The defaults of a notebook, and the seconds and the work of every finished run of it and this model; found
        once, because a plan asks for each of its runs."""
        if (notebook, model) not in self._works:
            usual, alike = usual_values(notebook), self._alike[Path(notebook).stem, model]
            self._works[notebook, model] = usual, [(made["seconds"], work_of(made["values"], usual)) for made in alike]
        return self._works[notebook, model]
