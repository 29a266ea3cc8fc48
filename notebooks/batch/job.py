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
from eval.record.files import write_whole
from eval.record.reading import read_json
from kernels.support.busy import environment_for_others
from notebooks.batch import snapshot
from notebooks.batch.leases import Lease, held, take
from notebooks.batch.processes import MARK, Mark, end, end_orphans, mark
from notebooks.batch.run_folder import FAILURE, JOB, LOG, RunFolder
from notebooks.batch.saved_model import check_save_path, saved_model
from notebooks.batch.snapshot import Code
from notebooks.batch.sweep import Planned
from notebooks.batch.worker import last_lines, where
from notebooks.study.identity import (
    CODE,
    COMMIT,
    CONTENT,
    KEY,
    PROCESSES,
    REVISIONS,
    ROOT,
    THREADS,
    WAITING,
    content_identity,
    device_class,
)
from notebooks.study.parameters import read_parameters
from notebooks.study.places import check_run_path

TRIES = 2  # attempts at a run if the first one fails for a temporary cause: a kernel that did not start, a taken port


@dataclass(frozen=True)
class Job:
    """A run in the form in which engines pass it on: plain values, so that it can be sent.

    Args:
        varied: the parameters by which it differs from the other runs of its sweep.
        force: run it even if it is finished. stale: run it if it was finished with other code of the workbench.
        threads: the number that the run may use beside others while nothing is timed; None: all.
        gpus: the number that it needs; each of several has its own process while a model is compressed.
        code: the code that it executes; None: that of the checkout where it is executed.
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
    stale: bool = False
    threads: int | None = None
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    code: Code | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    status: finished, known (it was finished before), failed, busy (another process works on it), waiting.
    """

    key: str
    status: str
    folder: str
    failure: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def job_of(planned: Planned, runs: Path, **more: Any) -> Job:
    """The job of a planned run in a folder of runs."""
    folder = planned.values.get("run_path") or runs / planned.key
    device = str(planned.values.get("device", "cpu"))
    gpus = planned.gpus or int(device.startswith("cuda") or (device == "auto" and device_class(device) != cpu_class()))
    place = str(Path(folder).expanduser().absolute())
    own = (planned.key, planned.notebook, planned.values, place, planned.identity, planned.varied)
    return Job(*own, gpus=gpus, **more)


def execute(job: Job, stop: Callable[[], bool] = lambda: False) -> Outcome:
    """Run a job, unless it is finished or another process works on it.

    Args:
        stop: called regularly; when it returns True, the run is ended as interrupted.
    """
    if _nothing_to_do(job):
        return Outcome(job.key, "known", job.folder)
    token = mark(Path(job.folder).parent, job.key)
    folder = RunFolder(Path(job.folder), job.key, token.attempt)
    lease = take(folder.lease, token)
    if lease is None:
        return Outcome(job.key, "busy", job.folder)
    try:
        end_orphans(folder.folder.parent, f"{job.key}/")  # they may still write what is removed next
        _repair(folder, job.values)
        if _nothing_to_do(job):
            folder.tidy(finished=True)
            return Outcome(job.key, "known", job.folder)
        return _tried(job, folder, token, lease, stop)
    finally:
        lease.release()


def tidy(folder: RunFolder, values: dict[str, Any]) -> None:
    """Repair a finished run, and remove what killed attempts have left of it, unless an attempt works on it."""
    token = mark(folder.folder.parent, folder.key)
    if lease := take(folder.lease, token):
        try:
            _repair(folder, values)
            folder.tidy(finished=done(folder, values))
        finally:
            lease.release()


def _repair(folder: RunFolder, values: dict[str, Any]) -> None:
    """Finish or undo the promotion of a killed attempt. Only for the holder of the lease.

    The rename of the run's folder decides which attempt has finished the run. The model of that attempt follows it; the
    models of all others, also those at another `save_path`, are removed before the folders that name them.
    """
    folder.restore()
    finished = folder.manifest().get("attempt", "")
    for given in (*(job.get("values") for job in folder.killed()), values):
        if model := saved_model(given or {}, folder.key):
            model.recover(finished)
    folder.tidy(finished=False)


def _nothing_to_do(job: Job) -> bool:
    folder = RunFolder(Path(job.folder), job.key)
    if job.force or not done(folder, job.values):
        return False
    return not job.stale or folder.manifest().get("code") == (job.code or snapshot.current()).sha256


def _tried(job: Job, folder: RunFolder, token: Mark, lease: Lease, stop: Callable[[], bool]) -> Outcome:
    """Up to `TRIES` attempts at a run, by the holder of its lease."""
    attempts, again = 0, True
    while again and attempts < TRIES:
        failure, seconds = _attempt(job, folder, token, lambda: stop() or lease.lost.is_set())
        if not failure:
            return Outcome(job.key, "finished", job.folder, seconds=seconds)
        attempts, again = attempts + 1, failure.pop("transient", False)
    if not lease.owned():  # another attempt works on the run, and this one must not touch its folders
        shutil.rmtree(folder.part, ignore_errors=True)
        if model := saved_model(job.values, job.key, token.attempt):
            shutil.rmtree(model.part, ignore_errors=True)
        return Outcome(job.key, "busy", job.folder, seconds=seconds)
    own = {"attempts": attempts, "key": job.key, "notebook": job.notebook, "values": job.values, "seconds": seconds}
    if model := saved_model(job.values, job.key):
        model.discard()
    folder.put_failed(failure | own)
    return Outcome(job.key, "failed", job.folder, failure | own, seconds)


def _attempt(job: Job, folder: RunFolder, token: Mark, stop: Callable[[], bool]) -> tuple[dict[str, Any], float]:
    """One attempt: {} if the run is finished, else how it failed; and its seconds."""
    begin = time.monotonic()
    ours, theirs = os.pipe()  # the guard ends all processes when this pipe is closed, by us or because we end
    try:
        guard = _start(job, folder, token, ours)
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
                output, _ = guard.communicate(timeout=0.2)
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
    if folder.manifest().get("attempt") == token.attempt:
        if folder.owned():  # the worker may have been killed between the renames of the run and of its model
            _repair(folder, job.values)
        if done(folder, job.values):
            return {}, seconds
    report = _json(output)
    failure = read_json(folder.part / FAILURE) or _json(_log(folder)[-1:] and _log(folder)[-1])
    more = {"peak_memory_bytes": report.get("peak_memory_bytes"), "left": report.get("left", left)}
    return _judged(failure, report, interrupted, guard.returncode, folder) | more, seconds


def _judged(
    failure: dict[str, Any], report: dict[str, Any], interrupted: bool, status: int, folder: RunFolder
) -> dict[str, Any]:
    """The failure with its kind; observations of the guard are preferred to reports of the worker."""
    if interrupted or report.get("why") == "interrupt":
        return failure | {"kind": "interrupt", "error": "the run was interrupted"}
    if report.get("why") in ("timeout", "cell timeout"):
        what = "a cell took longer than it may" if report["why"] == "cell timeout" else "it took longer than a run may"
        return failure | _at(folder) | {"kind": "timeout", "error": f"{what}: ended after {report['seconds']:.0f} s"}
    if report.get("oom_kills") and failure.get("kind", "kernel death") == "kernel death":
        error = "the operating system killed it because no memory was left"
        return _at(folder) | failure | {"kind": "out of memory", "error": error, "transient": False}
    if failure:
        return failure
    what, number = "its guard" if status else "papermill", status or report.get("status") or 0
    how = f"by signal {-number}" if number < 0 else "without a message"
    no_space = any("No space left" in line or "File too large" in line for line in _log(folder))
    kind = "disk" if no_space else "kernel death"
    return _at(folder) | {"kind": kind, "error": f"{what} ended {how}", "lines": _log(folder)}


def _start(job: Job, folder: RunFolder, token: Mark, stdin: int) -> subprocess.Popen:
    """Start the guard of an attempt.

    Raises:
        ValueError: files that the run reads have changed since it was planned, or it may not write to its folders.
    """
    code, model = job.code or snapshot.current(), saved_model(job.values, job.key, token.attempt)
    shutil.rmtree(folder.part, ignore_errors=True)
    folder.part.mkdir(parents=True)
    check_run_path(job.values.get("run_path", ""))
    check_save_path(job.values, job.key)
    path = code.notebook(job.notebook)
    _check_unchanged(job, path)
    declared = read_parameters(path)
    given = {name: value for name, value in job.values.items() if value != declared[name].default}
    own = {"run_path": str(folder.part), "work_path": job.values.get("work_path") or str(folder.work)}
    own |= {"save_path": str(model.part)} if model else {}
    given |= {name: place for name, place in own.items() if name in declared}
    waiting = folder.part / ".waiting"
    more = {"given": given, "path": str(path), "token": token.attempt, "waiting": str(waiting)}
    file = write_whole(json.dumps(asdict(job) | more | {"code": code.sha256}), folder.part / JOB)
    return subprocess.Popen(
        [sys.executable, "-m", "notebooks.batch.guard", str(file)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        env=_environment(job, code) | {MARK: str(token), WAITING: str(waiting)},
        cwd=code.root,
        text=True,
        start_new_session=True,
    )


def _check_unchanged(job: Job, path: Path) -> None:
    """Raise ValueError if the notebook, or a file that the run reads, has changed since the run was planned."""
    if not job.identity:
        return
    now = content_identity(path, job.values)
    changed = [part for part in CONTENT if now[part] != job.identity[part]]
    if changed:
        what = {"notebook": f"`notebook` (={job.notebook!r})", "model": "the model", "data": "the text or task data"}
        said = " and ".join(what[part] for part in changed)
        raise ValueError(f"{said} has changed since this run was planned; `workbench resume` plans the sweep anew")


def _environment(job: Job, code: Code) -> dict[str, str]:
    """The environment of the processes of an attempt."""
    paths = [code.root, *filter(None, [os.environ.get("PYTHONPATH")])]
    data = os.environ.get("WORKBENCH_DATA") or str(ROOT.parent / "shared" / "data")  # not beside a snapshot
    own = {"PYTHONPATH": os.pathsep.join(paths), "WORKBENCH_DATA": data}
    told = {KEY: job.key, CODE: code.sha256, COMMIT: code.commit, REVISIONS: job.identity.get("revisions", "{}")}
    told |= {THREADS: str(job.threads)} if job.threads else {}
    told |= {PROCESSES: str(job.gpus)} if job.gpus > 1 else {}
    waiting = {} if job.threads else environment_for_others()
    return waiting | os.environ | own | job.environment | told


def _at(folder: RunFolder) -> dict[str, Any]:
    return where(folder.part / "notebook.ipynb")


def _log(folder: RunFolder) -> list[str]:
    try:
        return last_lines([(folder.part / LOG).read_text(encoding="utf-8", errors="replace")])
    except OSError:
        return []


def _json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
        return content if isinstance(content, dict) else {}
    except ValueError:
        return {}


def done(folder: RunFolder, values: dict[str, Any]) -> bool:
    """Whether the run is finished, and the model that it had to save exists and belongs to it."""
    if not folder.complete():
        return False
    if not values.get("save_path"):  # read no manifest again, for pages about thousands of runs
        return True
    return saved_model(values, folder.key or folder.manifest().get("key", "")).complete(folder.attempts())


def state(folder: str | Path, key: str = "", values: dict[str, Any] | None = None) -> str:
    """finished, running, failed, damaged or waiting, by the content of the folders; for the run of this key, if given.

    A damaged run was finished, but its files cannot be read any more or have changed.
    """
    place = RunFolder(Path(folder), key)
    if done(place, values or {}):
        return "finished"
    if held(place.lease):
        return "running"
    return "failed" if place.failure() else "damaged" if place.damage() else "waiting"


def is_stale(manifest: dict[str, Any], code: str) -> bool:
    """Whether a finished run was executed with other code of the workbench than this (`packages_code`)."""
    return bool(manifest.get("code")) and manifest["code"] != code
