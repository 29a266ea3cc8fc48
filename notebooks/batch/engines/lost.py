"""The outcome of a run whose process has vanished, read from the folders of the run."""

import os
import time
from pathlib import Path
from typing import Any

from eval.record.reading import read_json
from notebooks.batch.job import Job, Outcome, done
from notebooks.batch.run_folder import JOB, RunFolder
from notebooks.batch.worker import where

SEEN_S = 10.0  # longest delay until files of another machine are visible here, on a network filesystem


def attempts(job: Job) -> tuple[str, str]:
    """The attempt that finished a run, and the attempt that was started last; "" for none."""
    places = RunFolder(Path(job.folder))
    return places.manifest().get("attempt", ""), read_json(_last(places) / JOB).get("token", "")


def _last(places: RunFolder) -> Path:
    """The folder of the attempt that was started last, if it is not finished: it is running, or ended cleanly."""
    return places.part if (places.part / JOB).is_file() else places.failed


def failure(job: Job, kind: str, said: str) -> dict[str, Any]:
    return {"kind": kind, "error": said, "attempts": 1, "key": job.key, "notebook": job.notebook, "values": job.values}


def outcome_of_lost(job: Job, before: tuple[str, str], kind: str, said: str) -> Outcome:
    """The outcome of a run that its engine has lost.

    Args:
        before: `attempts` of the job when it was passed on.
        kind: of the failure, if it is one: a run may have been finished before it was lost, or may never have started.
        said: the reason of the failure.
    """
    finished, begun = attempts(job)
    if finished and finished != before[0] and done(RunFolder(Path(job.folder), job.key), job.values):
        return Outcome(job.key, "finished", job.folder)
    if kind == "interrupt" and begun == before[1]:
        return Outcome(job.key, "waiting", job.folder)
    at = where(_last(RunFolder(Path(job.folder))) / "notebook.ipynb") if begun != before[1] else {}
    return Outcome(job.key, "failed", job.folder, at | failure(job, kind, said))


def seen(outcome: Outcome, job: Job) -> Outcome:
    """The outcome, after a check that its folder can be read from here, too."""
    folder, begin = Path(job.folder), time.monotonic()
    while outcome.status in ("finished", "known") and not RunFolder(folder).manifest():
        if time.monotonic() - begin > SEEN_S:
            said = f"it was finished on its node, but its folder is not visible here: {folder.parent} must be shared"
            return Outcome(job.key, "failed", job.folder, failure(job, "disk", said), outcome.seconds)
        time.sleep(0.2)
        if folder.parent.is_dir():
            os.listdir(folder.parent)  # makes a network filesystem look again
    return outcome
