"""One run, from its lease to its folder or its failure; called by a thread of the local engine, or by a task on another
machine."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.machine.processor import cpu_class
from notebooks.batch.identity import ROOT, code_sha256, device_class, packages_code
from notebooks.batch.leases import held, take
from notebooks.batch.processes import MARK, Mark, end, end_orphans, mark
from notebooks.batch.run_folder import FAILURE, JOB, LOG, RunFolder, read_json
from notebooks.batch.sweep import Planned
from notebooks.batch.worker import last_lines, where
from notebooks.study.parameters import notebook_path, read_parameters

TRIES = 2  # of a run whose first attempt failed for a passing cause: a kernel that never came up, a port that was taken
CODE, KEY, THREADS, WAITING = "WORKBENCH_CODE", "WORKBENCH_KEY", "WORKBENCH_THREADS", "WORKBENCH_WAITING"


@dataclass(frozen=True)
class Job:
    """A run as an engine hands it on: plain values, so that it can travel.

    threads: that the run may use beside others while nothing is timed; None for all. gpus: that it needs.
    """

    key: str
    notebook: str
    values: dict[str, Any]
    folder: str
    identity: dict[str, str] = field(default_factory=dict, repr=False)
    varied: tuple[str, ...] = ()
    timeout_s: float | None = None
    cell_timeout_s: int | None = None
    force: bool = False
    threads: int | None = None
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a job. status: finished, known (it was finished before), failed, busy (somebody else works on
    it)."""

    key: str
    status: str
    folder: str
    failure: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def job_of(planned: Planned, runs: Path, **more: Any) -> Job:
    """The job of a planned run in a folder of runs."""
    folder = planned.values.get("run_path") or runs / planned.key
    device = str(planned.values.get("device", "cpu"))
    gpus = int(device.startswith("cuda") or (device == "auto" and device_class(device) != cpu_class()))
    return Job(
        planned.key,
        planned.notebook,
        planned.values,
        str(Path(folder).expanduser().absolute()),
        planned.identity,
        planned.varied,
        gpus=gpus,
        **more,
    )


def execute(job: Job, stop: Callable[[], bool] = lambda: False) -> Outcome:
    """Run a job, unless it is done or somebody does it.

    Args:
        stop: asked now and then; when it says True the run is ended, as interrupted.
    """
    places = RunFolder(Path(job.folder), job.key)
    if not job.force and done(places, job.values):
        return Outcome(job.key, "known", job.folder)
    token = mark(places.folder.parent, job.key)
    lease = take(places.lease, token)
    if lease is None:
        return Outcome(job.key, "busy", job.folder)
    try:
        places.recover()
        if not job.force and done(places, job.values):
            return Outcome(job.key, "known", job.folder)
        end_orphans(places.folder.parent, f"{job.key}/")
        attempts, again = 0, True
        while again and attempts < TRIES:
            failure, seconds = _attempt(job, places, token, lambda: stop() or lease.lost.is_set())
            if not failure:
                return Outcome(job.key, "finished", job.folder, seconds=seconds)
            attempts, again = attempts + 1, failure.pop("transient", False)
        failure |= {
            "attempts": attempts,
            "key": job.key,
            "notebook": job.notebook,
            "values": job.values,
            "seconds": seconds,
        }
        places.put_failed(failure)
        return Outcome(job.key, "failed", job.folder, failure, seconds)
    finally:
        lease.release()


def _attempt(job: Job, places: RunFolder, token: Mark, stop: Callable[[], bool]) -> tuple[dict[str, Any], float]:
    """One attempt: {} if the run stands, else what went wrong; and its seconds."""
    begin = time.monotonic()
    ours, theirs = os.pipe()  # the guard watches its end: closed by us, or with us
    try:
        guard = _start(job, places, token, ours)
    except (OSError, ValueError) as error:
        os.close(theirs)
        kind = "disk" if isinstance(error, OSError) else "specification"
        return {"kind": kind, "error": f"{type(error).__name__}: {error}"}, 0.0
    finally:
        os.close(ours)
    interrupted = False
    try:
        while True:
            try:
                said, _ = guard.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if stop() and not interrupted:
                    interrupted = True
                    os.close(theirs)
    finally:
        if not interrupted:
            os.close(theirs)
    left = end(str(token)) if guard.returncode else 0
    seconds = round(time.monotonic() - begin, 1)
    if places.complete() and places.manifest().get("attempt") == token.attempt:
        return {}, seconds
    told = _json(said)
    failure = read_json(places.part / FAILURE) or _json(_log(places)[-1:] and _log(places)[-1])
    more = {"peak_memory_bytes": told.get("peak_memory_bytes"), "left": told.get("left", left)}
    return _judged(failure, told, interrupted, guard.returncode, places) | more, seconds


def _judged(
    failure: dict[str, Any], told: dict[str, Any], interrupted: bool, status: int, places: RunFolder
) -> dict[str, Any]:
    """The failure by its kind: what the guard saw goes before what the worker says."""
    if interrupted or told.get("why") == "interrupt":
        return failure | {"kind": "interrupt", "error": "the run was interrupted"}
    if told.get("why") in ("timeout", "cell timeout"):
        what = "a cell took more than it may" if told["why"] == "cell timeout" else "it took more than a run may"
        return failure | _at(places) | {"kind": "timeout", "error": f"{what}: ended after {told['seconds']:.0f} s"}
    if told.get("oom_kills") and failure.get("kind", "kernel death") == "kernel death":
        return (
            _at(places)
            | failure
            | {"kind": "out of memory", "error": "the system killed it for want of memory", "transient": False}
        )
    if failure:
        return failure
    what = "its guard" if status else "papermill"
    how = (
        f"by signal {-(status or told.get('status') or 0)}"
        if (status or told.get("status") or 0) < 0
        else "without a word"
    )
    kind = (
        "disk" if any("No space left" in line or "File too large" in line for line in _log(places)) else "kernel death"
    )
    return _at(places) | {"kind": kind, "error": f"{what} ended {how}", "lines": _log(places)}


def _start(job: Job, places: RunFolder, token: Mark, stdin: int) -> subprocess.Popen:
    shutil.rmtree(places.part, ignore_errors=True)
    places.part.mkdir(parents=True)
    if job.identity and code_sha256(notebook_path(job.notebook)) != job.identity["notebook"]:
        raise ValueError(
            f"`notebook` (={job.notebook!r}) has changed since this run was planned; `workbench resume` plans anew"
        )
    saved = job.values.get("save_path")
    if saved and read_json(Path(saved).expanduser() / "record.json").get("run", {}).get("key") == job.key:
        shutil.rmtree(Path(saved).expanduser())  # of an attempt at this run that was killed after it
    declared = read_parameters(job.notebook)
    given = {name: value for name, value in job.values.items() if value != declared[name].default}
    own = {"run_path": str(places.part), "work_path": job.values.get("work_path") or str(places.work)}
    given |= {name: place for name, place in own.items() if name in declared}
    waiting = places.part / ".waiting"
    told = asdict(job) | {
        "given": given,
        "path": str(notebook_path(job.notebook)),
        "token": token.attempt,
        "waiting": str(waiting),
    }
    file = places.part / JOB
    file.write_text(json.dumps(told), encoding="utf-8")
    environment = (
        os.environ
        | job.environment
        | {MARK: str(token), KEY: job.key, CODE: job.identity.get("code", packages_code()), WAITING: str(waiting)}
    )
    if job.threads:
        environment[THREADS] = str(job.threads)
    return subprocess.Popen(
        [sys.executable, "-m", "notebooks.batch.guard", str(file)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        text=True,
        start_new_session=True,
    )


def _at(places: RunFolder) -> dict[str, Any]:
    return where(places.part / "notebook.ipynb")


def _log(places: RunFolder) -> list[str]:
    try:
        return last_lines([(places.part / LOG).read_text(encoding="utf-8", errors="replace")])
    except OSError:
        return []


def _json(text: str) -> dict[str, Any]:
    try:
        made = json.loads(text or "{}")
        return made if isinstance(made, dict) else {}
    except ValueError:
        return {}


def done(places: RunFolder, values: dict[str, Any]) -> bool:
    """Does the run stand, with the model that it was to save?"""
    saved = values.get("save_path")
    return places.complete() and (not saved or Path(saved).expanduser().is_dir())


def state(folder: str | Path, key: str = "", values: dict[str, Any] | None = None) -> str:
    """finished, running, failed or waiting, as the folders say; of the run of this key, if one is given."""
    places = RunFolder(Path(folder), key)
    if done(places, values or {}):
        return "finished"
    if held(places.lease):
        return "running"
    return "failed" if places.failure() else "waiting"
