"""A forced rerun that is killed at any of its file operations leaves one pair of record and model, and no copies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.record.manifest import seal
from notebooks.batch.job import tidy
from notebooks.batch.leases import take
from notebooks.batch.processes import mark
from notebooks.batch.run_folder import RunFolder, leftovers
from notebooks.batch.saved_model import SavedModel, saved_model
from notebooks.batch.worker import _promote

OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")
PROMOTION = 36  # file operations of a promotion, at least; the test finds its end
# Python code for a `sitecustomize`: the process of this module that takes part in a run ends all of it by SIGKILL.
_KILL = """
import os, signal, sys

def _command(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return ""

if os.environ.get("KILL_IN", "-") in _command("self"):
    left = [int(os.environ["KILL_AT"])]

    def kill():
        pids, pid = [], os.getpid()
        while pid > 1 and "notebooks" in _command(pid) and "pytest" not in _command(pid):
            pids.append(pid)
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        for pid in reversed(pids if os.environ["KILL_ALL"] == "1" else pids[:1]):
            os.kill(pid, signal.SIGKILL)

    def counted(name):
        plain = getattr(os, name)

        def call(*given, **how):
            where = os.readlink(f"/proc/self/fd/{given[0]}") if name == "fsync" else " ".join(map(str, given))
            if os.environ["KILL_BELOW"] in where:
                left[0] -= 1
                if left[0] == 0:
                    kill()
            return plain(*given, **how)

        setattr(os, name, call)

    for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
        counted(name)
"""


def attempt(path: Path) -> str:
    return json.loads((path / "manifest.json").read_text())["attempt"]


def check(folder: RunFolder, model: SavedModel) -> str:
    """The pair is one of one attempt, and nothing else of the run or its model is left; returns the attempt."""
    assert folder.complete() and model.complete([attempt(folder.folder)]), (folder.problems(), attempt(model.place))
    number = json.loads((folder.folder / "record.json").read_text())["number"]
    assert (model.place / "model").read_text() == number == attempt(folder.folder), "the model is that of the record"
    assert [path.name for path in model.place.parent.iterdir()] == [model.place.name], "no copy of a model"
    assert not leftovers(folder.folder.parent) and not list(folder.folder.parent.glob(".*"))
    return number


def forked(does: Callable[[], object]) -> bool:
    """Do it in a process of its own; whether that was killed."""
    if (pid := os.fork()) == 0:
        try:
            does()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def kill_before(operation: int) -> None:
    """Kill this process before this one of its next file operations."""
    left = operation

    def counted(plain: Callable) -> Callable:
        def call(*given, **how):
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given, **how)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


class Promotion:
    """A finished run with its model, both of the attempt `before`; and its successor, whose worker is about to move
    both to their places."""

    def __init__(self, top: Path):
        self.key, self.values = "k", {"save_path": str(top / "models" / "m")}
        self.folder = RunFolder(top / "runs" / self.key, self.key)
        self.model = saved_model(self.values, self.key)
        self.write(self.folder.folder, self.model.place, "before")
        for place in (self.folder.folder, self.model.place):
            seal(place, {"key": self.key, "attempt": "before", "code": ""})

    def write(self, folder: Path, model: Path, attempt: str) -> None:
        for place in (folder, model):
            place.mkdir(parents=True)
        named = dict.fromkeys(["commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"])
        run = {"key": self.key, "notebook": "n", "started": "2026", "duration_s": 1.0}
        parts = dict.fromkeys(["model", "calibration", "scores"]) | {"recipe": [], "layers": [], "kernels": {}}
        record = {"schema_version": 1, "run": run, **parts, "provenance": named, "number": attempt}
        (folder / "record.json").write_text(json.dumps(record))
        (folder / "notebook.ipynb").write_text(json.dumps({"cells": []}))
        (model / "model").write_text(attempt)

    def killed_at(self, operation: int) -> bool:
        """Promote a forced rerun in a process that is killed before this operation; whether there was one."""
        return forked(lambda: self._promote(operation))

    def repair_killed_at(self, operation: int) -> bool:
        """The same of the repair of what such a process has left."""
        return forked(lambda: (kill_before(operation), tidy(self.folder, self.values)))

    def _promote(self, operation: int) -> None:
        token = mark(self.folder.folder.parent, self.key)
        take(self.folder.lease, token)
        folder = RunFolder(self.folder.folder, self.key, token.attempt)
        self.write(folder.part, saved_model(self.values, self.key, token.attempt).part, token.attempt)
        own = {"key": self.key, "values": self.values, "token": token.attempt, "force": True}
        job = own | {"notebook": "n", "identity": {}, "varied": [], "code": "", "folder": str(folder.folder)}
        (folder.part / "job.json").write_text(json.dumps(job))
        kill_before(operation)
        _promote(job, folder, 1.0)


def test_a_promotion_that_is_killed_anywhere_leaves_one_pair(tmp_path):
    """The worker is killed before each of its file operations, one after the other."""
    found = []
    for operation in range(1, 1000):
        top = tmp_path / str(operation)
        case = Promotion(top)
        if not case.killed_at(operation):
            break
        tidy(case.folder, case.values)
        found.append(check(case.folder, case.model))
        shutil.rmtree(top)
    assert len(found) >= PROMOTION // 2 and found[0] == "before" and found[-1] != "before"
    renamed = [one != "before" for one in found]
    assert renamed == sorted(renamed), "one rename decides"


@pytest.mark.parametrize(
    "operation", [19, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 30, 2) if i != 19)]
)
def test_a_repair_that_is_killed_anywhere_is_repaired(operation, tmp_path):
    """The promotion is killed, then its repair before each of its file operations, and then repaired once more."""
    for at in range(1, 1000):
        case = Promotion(tmp_path / str(at))
        case.killed_at(operation)
        killed = case.repair_killed_at(at)
        tidy(case.folder, case.values)
        check(case.folder, case.model)
        if not killed:
            break
    assert at > 3, "a repair makes several file operations; few are left behind the last ones of a promotion"


def test_models_that_killed_attempts_saved_elsewhere_are_removed(tmp_path):
    """A killed attempt wrote its model for another `save_path` than the run is asked for next."""
    case = Promotion(tmp_path)
    token = mark(case.folder.folder.parent, case.key).attempt
    other = {"save_path": str(tmp_path / "elsewhere" / "m")}
    part = saved_model(other, case.key, token).part
    case.write(RunFolder(case.folder.folder, case.key, token).part, part, token)
    (case.folder.folder.parent / f".k.{token}.running" / "job.json").write_text(json.dumps({"values": other}))
    tidy(case.folder, case.values)
    assert check(case.folder, case.model) == "before" and not part.exists()


def test_a_model_of_the_user_is_not_replaced_by_a_repair(tmp_path):
    """What lies at `save_path` since the run was killed, and is not the run's, stays."""
    case = Promotion(tmp_path)
    token = mark(case.folder.folder.parent, case.key).attempt
    part = saved_model(case.values, case.key, token).part
    shutil.rmtree(case.folder.folder)
    case.write(case.folder.folder, part, token)
    for place in (case.folder.folder, part):
        seal(place, {"key": case.key, "attempt": token, "code": ""})
    shutil.rmtree(case.model.place)
    case.model.place.mkdir()
    (case.model.place / "mine").write_text("mine")
    tidy(case.folder, case.values)
    assert (case.model.place / "mine").read_text() == "mine" and not case.model.complete([token])


def test_files_of_the_user_beside_a_model_survive_a_forced_rerun(tmp_path):
    """Files that the run did not write stay, and a card that was edited is kept under another name."""
    case = Promotion(tmp_path)
    (case.model.place / "README.md").write_text("card")
    seal(case.model.place, {"key": case.key, "attempt": "before", "code": ""})
    assert case.model.complete(["before"])
    (case.model.place / "README.md").write_text("card, edited")
    (case.model.place / "more").mkdir()
    (case.model.place / "more" / "notes.txt").write_text("mine")
    assert case.model.complete(["before"]), "an edited card is no damage"
    case.killed_at(1000)
    tidy(case.folder, case.values)
    assert check(case.folder, case.model) != "before"
    assert (case.model.place / "more" / "notes.txt").read_text() == "mine"
    assert (case.model.place / "README.before.md").read_text() == "card, edited"


@pytest.mark.slow
@pytest.mark.parametrize("everything", [True, False])
def test_forced_reruns_that_are_killed_at_sixty_points(everything, trivial, tmp_path):
    """Whole processes: the worker, or all processes of a forced rerun, are killed at each of 30 file operations; then
    the same command without `--force` ends with one pair and no copies."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(_KILL))
    model = tmp_path / "models" / "m"
    model.parent.mkdir()
    own = [
        "-p",
        "number",
        "1",
        "-p",
        "save_path",
        str(model),
        "--trust",
        str(tmp_path),
        "--runs",
        str(tmp_path / "runs"),
    ]
    plain = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}

    def workbench(*more: str, **variables: str) -> int:
        command = [sys.executable, "-m", "notebooks", "run", str(trivial), *own, *more]
        return subprocess.run(command, env=plain | variables, capture_output=True, timeout=300).returncode

    assert workbench() == 0
    run = next(path.parent for path in (tmp_path / "runs").glob("*/manifest.json"))
    folder = RunFolder(run, run.name)
    paths = os.pathsep.join(filter(None, [str(tmp_path / "site"), plain.get("PYTHONPATH")]))
    for at in range(1, 31):
        killing = {"KILL_AT": str(at), "KILL_IN": "notebooks.batch.worker", "KILL_ALL": str(int(everything))}
        workbench("--force", PYTHONPATH=paths, KILL_BELOW=str(tmp_path), **killing)
        assert workbench() == 0, at
        assert folder.complete() and attempt(run) == attempt(model), at
        assert [path.name for path in model.parent.iterdir()] == ["m"] and not leftovers(tmp_path / "runs"), at
