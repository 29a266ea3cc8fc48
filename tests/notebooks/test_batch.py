"""Runs that finish, fail in every way, are killed, or are asked for twice: what is done stays done, what is not is
told."""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from eval.record.schema import read_record
from eval.speed.device_lock import undisturbed
from notebooks.batch import job as jobs
from notebooks.batch import leases, pages
from notebooks.batch.engines.local import Local
from notebooks.batch.job import execute, job_of, state
from notebooks.batch.leases import held, holder, take
from notebooks.batch.pages import outcomes, write_all, write_index
from notebooks.batch.plan import plan, run_sweep
from notebooks.batch.processes import MARK, end, end_orphans, lives, mark, marked, place_of, started
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.status import finished_runs, kept_sweep, status
from notebooks.batch.sweep import read_sweep
from notebooks.study.identity import packages_code
from reports.compare.index_rows import KEPT
from reports.parts.files import Report


@pytest.fixture
def one(sweep, runs):
    """A job of the trivial notebook with these parameters."""

    def make(values=None, **more):
        return job_of(read_sweep(sweep(base=values or {})).runs[0], runs, **more)

    return make


def attempts(runs: Path) -> dict[str, str]:
    return {made["key"]: made["attempt"] for made in finished_runs(runs)}


def test_a_sweep_runs_once_and_never_again(sweep, runs):
    path = sweep(grid={"number": [1, 2]})
    first = run_sweep(path, runs=runs)
    assert [outcome.status for outcome in first] == ["finished"] * 2
    before = attempts(runs)
    folder = RunFolder(Path(first[0].folder))
    assert {path.name for path in folder.folder.iterdir()} == {
        "notebook.ipynb",
        "record.json",
        "report.html",
        "manifest.json",
    }
    assert folder.manifest()["values"]["number"] == 1 and folder.complete()
    assert [p.name for p in runs.iterdir() if p.name.startswith(".")] == [], "nothing is left beside"
    assert [outcome.status for outcome in run_sweep(path, runs=runs)] == ["known"] * 2 and attempts(runs) == before
    wider = sweep(grid={"number": [1, 2, 3]})
    made = plan(wider, runs=runs)
    assert [row.does for row in made.rows] == ["skip", "skip", "run"] and made.rows[2].seconds > 0
    assert "2 done, 1 to run" in str(made)
    forced = run_sweep(sweep(grid={"number": [1]}), runs=runs, force=True)
    assert forced[0].status == "finished" and attempts(runs) != before and len(attempts(runs)) == 2
    assert "finished" in status("s", runs=runs) and kept_sweep("s", runs)["runs"][0]["key"] == first[0].key


@pytest.mark.parametrize(
    "does, kind, told",
    [
        ("raise RuntimeError('no luck')", "cell", "RuntimeError: no luck"),
        pytest.param(
            "raise ValueError('`bits` (=7) must be one of 2, 3')",
            "specification",
            "`bits` (=7)",
            marks=pytest.mark.slow,
        ),
        pytest.param("raise MemoryError", "out of memory", "MemoryError", marks=pytest.mark.slow),
        pytest.param("raise OSError(28, 'No space left on device')", "disk", "No space left", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", "interrupt", "KeyboardInterrupt"),
        ("os._exit(3)", "kernel death", "died"),
        ("import sys; sys.exit(0)", "incomplete", "cell 7 was never executed"),
        pytest.param(
            "Path.write_text = lambda *_: None", "incomplete", "record.json is missing", marks=pytest.mark.slow
        ),
        ("os.environ['WORKBENCH_KEY'] = 'another'", "incomplete", "its record belongs to the run another"),
    ],
)
def test_every_failure_has_its_kind(does, kind, told, one, runs):
    outcome = execute(one({"does": does}))
    assert outcome.status == "failed" and outcome.failure["kind"] == kind and told in outcome.failure["error"], outcome
    places = RunFolder(Path(outcome.folder))
    assert state(places.folder) == "failed" and places.failure()["kind"] == kind and not places.folder.exists()
    if kind not in ("incomplete",):
        assert outcome.failure["cell"] == 6 and outcome.failure["cell_title"] == "Work"
    if kind == "cell":
        assert outcome.failure["lines"][-1] == "RuntimeError: no luck" and outcome.failure["peak_memory_bytes"] > 1e7
    assert outcome.failure["attempts"] == 1 and (places.failed / "notebook.ipynb").is_file()


def test_a_run_that_failed_can_be_run_again(one, runs, monkeypatch):
    job = one({"does": "raise RuntimeError"})
    assert execute(job).status == "failed"
    assert execute(replace(job, values={**job.values, "does": ""})).status == "finished"
    assert not RunFolder(Path(job.folder)).failed.exists() and state(job.folder) == "finished"


@pytest.mark.parametrize("limits", [{"timeout_s": 5}, pytest.param({"cell_timeout_s": 4}, marks=pytest.mark.slow)])
def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(limits, plain_processes, one, runs, tmp_path):
    """Also a grandchild in a session of its own, which heeds no signal but one."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    does = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True); time.sleep(300)"
    begin = time.monotonic()
    outcome = execute(one({"does": does}, **limits))
    assert outcome.failure["kind"] == "timeout", outcome
    assert outcome.failure["cell"] == 6 and time.monotonic() - begin < 40
    assert outcome.failure["left"] == 0 and not marked(place_of(runs))


def test_transient_failures_are_retried_once(one, monkeypatch):
    failures = iter(
        [{"kind": "kernel death", "error": "never came up", "transient": True}, {"kind": "cell", "error": "no"}]
    )

    def attempt(job, places, *_):
        places.part.mkdir(parents=True, exist_ok=True)
        return next(failures), 0.0

    monkeypatch.setattr(jobs, "_attempt", attempt)
    outcome = execute(one())
    assert outcome.failure["attempts"] == 2 and outcome.failure["kind"] == "cell" and "transient" not in outcome.failure


@pytest.mark.slow
def test_a_full_disk_damages_no_finished_run(plain_processes, sweep, runs, workbench):
    """A limit on the size of files stands in for a full disk."""
    assert run_sweep(sweep(grid={"number": [1]}), runs=runs)[0].status == "finished"
    before = {p: p.read_bytes() for p in runs.rglob("*") if p.is_file() and "sweeps" not in p.parts}
    big = sweep(
        "big", include=[{"number": 1}, {"number": 2, "does": "Path(run_path, 'big').write_bytes(bytes(10_000_000))"}]
    )
    done = workbench("run", big, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000)))
    assert done.returncode == 1, done
    assert "disk" in done.stderr and {p: p.read_bytes() for p in before} == before
    assert "disk" in status("big", runs=runs)


def test_of_two_who_want_a_run_one_gets_it(one):
    job = one({"seconds": 2.0})
    found = []
    threads = [threading.Thread(target=lambda: found.append(execute(job).status)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["busy", "finished"] and execute(job).status == "known"


def test_leases_of_the_dead_are_taken_over_and_those_of_the_living_are_not(tmp_path, monkeypatch):
    path = tmp_path / ".k.lease"
    ours = mark(tmp_path, "k")
    lease = take(path, ours)
    assert lease and held(path) and take(path, mark(tmp_path, "k")) is None
    lease.release()
    assert not path.exists() and not held(path)
    dead = subprocess.Popen(["true"])
    told = {"host": leases._host(), "pid": dead.pid, "started": started(dead.pid) or "1", "token": "x"}
    dead.wait()
    path.write_text(json.dumps(told))
    assert not held(path)
    lease = take(path, ours)
    assert lease and holder(path)["token"] == ours.attempt
    lease.release()
    for age, other in ((1, True), (leases.STALE_S + 5, False)):  # of another machine: only its time tells
        path.write_text(json.dumps({"host": "another", "pid": 1, "started": "1", "token": "y"}))
        os.utime(path, (time.time() - age,) * 2)
        assert held(path) is other and (take(path, ours) is None) is other
    for lease in [thread for thread in threading.enumerate() if "_renew" in thread.name]:
        assert lease.daemon


def test_a_lease_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    path = tmp_path / ".k.lease"
    lease = take(path, mark(tmp_path, "k"))
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 5
    while path.stat().st_mtime < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.stat().st_mtime > 10
    lease.release()


def test_a_run_is_what_its_manifest_says(one):
    job = one()
    execute(job)
    places = RunFolder(Path(job.folder))
    text = (places.folder / "record.json").read_text()
    (places.folder / "record.json").write_text(text.replace("trivial", "Trivial"))
    assert places.problems() == ["record.json has another content"] and state(job.folder) == "damaged"
    (places.folder / "record.json").write_text(text)
    assert places.complete()
    (places.folder / "report.html").unlink()
    assert places.problems() == ["report.html is gone"]
    (places.folder / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in places.problems()[0] and state(job.folder) == "damaged"
    assert execute(job).status == "finished" and places.complete()
    assert places.folder.with_name(f"{places.folder.name}.before").is_dir(), (
        "what cannot be verified is put aside, not deleted"
    )


@pytest.mark.slow
def test_another_run_in_the_same_place_is_another_run(sweep, runs, tmp_path):
    """A folder that was asked for by name holds what it holds, and not what is asked for next."""
    place = tmp_path / "mine"
    first = job_of(read_sweep(sweep(base={"number": 1, "run_path": str(place)})).runs[0], runs)
    second = job_of(read_sweep(sweep(base={"number": 2, "run_path": str(place)})).runs[0], runs)
    assert execute(first).status == "finished" and state(place, second.key) == "waiting"
    assert execute(second).status == "finished" and RunFolder(place).manifest()["values"]["number"] == 2
    assert RunFolder(place.with_name("mine.before")).manifest()["values"]["number"] == 1, "put aside, not lost"


def test_a_notebook_that_changed_since_it_was_planned_is_not_run(one, trivial):
    job = one()
    trivial.write_text(trivial.read_text().replace("working on", "really working on"))
    failure = execute(job).failure
    assert failure["kind"] == "specification" and "has changed since this run was planned" in failure["error"]


def test_a_kernel_that_is_not_there(one, trivial):
    trivial.write_text(trivial.read_text().replace('"name": "python3"', '"name": "fortran"'))
    failure = execute(one()).failure
    assert failure["kind"] == "specification" and "fortran" in failure["error"]


def test_a_promotion_that_was_cut_short_is_finished(one):
    job = one()
    execute(job)
    places = RunFolder(Path(job.folder))
    os.rename(places.folder, places.old)  # as if killed between the two renames of --force
    assert execute(job).status == "known" and places.complete() and not places.old.exists()


def test_a_run_of_other_code_is_stale_and_stays_until_it_is_asked_for_again(sweep, runs, monkeypatch):
    path = sweep(grid={"number": [1]})
    (first,) = run_sweep(path, runs=runs)
    before, manifest = attempts(runs), Path(first.folder) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(packages_code(), "of before"))
    (row,) = plan(path, runs=runs).rows
    assert (row.state, row.does) == ("stale", "skip") and "1 stale" in str(plan(path, runs=runs))
    assert run_sweep(path, runs=runs)[0].status == "known" and attempts(runs) == before
    assert "1 stale" in status("s", runs=runs) and outcomes(["s"], runs)[0].shown_status == "finished (stale)"
    assert "finished (stale)" in write_index(runs).path.read_text()
    drawn = []
    monkeypatch.setattr(pages, "render", lambda record, path, *_: drawn.append(record["run"]) or Report(path))
    write_all(runs, [first.key])
    assert drawn[0]["stale"]
    assert run_sweep(path, runs=runs, stale=True)[0].status == "finished" and attempts(runs) != before
    assert plan(path, runs=runs, stale=True).rows[0].state == "finished"


@pytest.mark.slow
def test_a_sweep_under_way_runs_the_code_that_it_was_planned_with(plain_processes, sweep, runs, trivial):
    """The first run edits the notebook; the second one does not notice, and its packages are those of the snapshot."""
    edit = f"p = Path({str(trivial)!r}); p.write_text(p.read_text().replace('working on', 'edited'))"
    does = f"import kernels.support.source; print(kernels.support.source.__file__); {edit}"
    done = run_sweep(sweep(grid={"number": [1, 2]}, base={"does": does}), runs=runs)
    assert [outcome.status for outcome in done] == ["finished"] * 2, done
    for outcome in done:
        text = (Path(outcome.folder) / "notebook.ipynb").read_text()
        assert re.search(rf"{runs}/sweeps/s/code/[^/]+/kernels/support/source\.py", text)
        assert "edited" not in text.replace("'edited'", "")


@pytest.mark.slow
def test_a_saved_model_stays_until_its_successor_is_finished(one, tmp_path):
    place, flag = tmp_path / "model", tmp_path / "flag"
    job = one({"save_path": str(place), "does": f"assert not Path({str(flag)!r}).exists()"})
    assert execute(job).status == "finished" and execute(job).status == "known"
    first = (place / "manifest.json").read_text()
    assert json.loads(first)["key"] == job.key
    flag.touch()
    assert execute(replace(job, force=True)).status == "failed"
    assert (place / "manifest.json").read_text() == first and state(job.folder, job.key, job.values) == "finished"
    flag.unlink()
    assert execute(replace(job, force=True)).status == "finished"
    assert (place / "manifest.json").read_text() != first and not list(tmp_path.glob(".model*"))
    (place / "model").unlink()
    assert state(job.folder, job.key, job.values) == "waiting", "a folder of that name is not the model"
    (place / "manifest.json").write_text('{"key": "another"}')
    failure = execute(job).failure
    assert "`save_path`" in failure["error"] and "was not saved by this run" in failure["error"]


@pytest.mark.slow
def test_a_finished_run_asked_for_its_model_in_another_format_is_not_finished(one, tmp_path, sweep, runs):
    place = tmp_path / "model"
    job = one({"save_path": str(place)})
    assert execute(job).status == "finished"
    other = one({"save_path": str(tmp_path / "other"), "save_format": "gguf"})
    assert other.key == job.key, "how a model is saved changes no result"
    assert state(other.folder, other.key, other.values) == "waiting"
    row = plan(tmp_path / "s.yml", runs=runs).rows[0]
    assert row.does == "run" and row.why == "finished, but its model is not saved there"
    assert execute(other).status == "finished" and execute(other).status == execute(job).status == "known"
    assert json.loads((tmp_path / "other" / "manifest.json").read_text())["save_format"] == "gguf"
    with pytest.raises(ValueError, match="holds this run's model as workbench.*workbench export .*model --format gguf"):
        one({"save_path": str(place), "save_format": "gguf"})
    assert (place / "model").is_file()
    both = [{"save_path": str(tmp_path / one), "save_format": one} for one in ("workbench", "gguf")]
    with pytest.raises(ValueError, match="two runs differ only in `save_path` or `save_format`"):
        read_sweep(sweep(include=both))


def test_a_promotion_that_was_cut_short_before_its_model_is_finished(one, tmp_path):
    place = tmp_path / "model"
    job = one({"save_path": str(place)})
    execute(job)
    attempt = RunFolder(Path(job.folder)).manifest()["attempt"]
    os.rename(place, place.with_name(f".model.{attempt}.saving"))
    assert state(job.folder, job.key, job.values) == "waiting"
    assert execute(job).status == "known" and (place / "model").is_file() and not list(tmp_path.glob(".model*"))


def test_an_attempt_that_lost_its_lease_touches_nothing_of_its_successor(one, monkeypatch):
    job = one()
    successor = RunFolder(Path(job.folder), job.key, "successor")

    def attempt(job, folder, *_):
        folder.part.mkdir(parents=True)
        successor.part.mkdir()
        folder.lease.write_text(json.dumps({**holder(folder.lease), "token": "successor"}))
        with pytest.raises(ValueError, match="another attempt has taken this run over"):
            folder.promote()
        return {"kind": "interrupt", "error": "it woke up"}, 1.0

    monkeypatch.setattr(jobs, "_attempt", attempt)
    assert execute(job).status == "busy" and successor.part.is_dir() and not successor.failed.exists()
    assert holder(successor.lease)["token"] == "successor"
    successor.lease.unlink()


def test_data_that_changed_since_a_run_was_planned_is_noticed_at_its_start(one, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("words")
    job = one({"does": str(words)})
    words.write_text("other words")
    failure = execute(job).failure
    assert failure["kind"] == "specification" and "data has changed since this run was planned" in failure["error"]


def test_a_page_that_cannot_be_drawn_leaves_the_record(tmp_path, monkeypatch):
    from notebooks.study import run as study

    def draw(*_):
        raise ZeroDivisionError("no <page>")

    monkeypatch.setattr(study, "render", draw)
    record = dict.fromkeys(["model", "calibration", "scores"]) | dict.fromkeys(["recipe", "layers"], [])
    record |= {"schema_version": 1, "kernels": {}}
    record["run"] = {"key": "k", "notebook": "gptq", "started": None, "duration_s": None}
    named = ["commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"]
    record["provenance"] = dict.fromkeys(named) | {"threads": float("nan")}
    run = study.Run(study.RunInfo("k", "gptq", {}, datetime.now(UTC), ""), tmp_path)
    with pytest.warns(UserWarning, match="could not be drawn, but its record was written: ZeroDivisionError"):
        report = run.finish(record)
    assert "no &lt;page&gt;" in report.path.read_text()
    assert read_record(tmp_path / "record.json")["provenance"]["code_sha256"] == packages_code()


def test_interrupts_end_what_runs_and_keep_what_is_done(plain_processes, sweep, runs, workbench):
    path = sweep(include=[{"number": 1}, {"number": 2, "seconds": 60.0}, {"number": 3}])
    process = workbench("run", path, wait=False)
    _until(lambda: len(finished_runs(runs)) == 1 and len(_kernels(runs)) == 1)
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=30)
    assert "the same command continues" in told and "failed: interrupt" not in told
    assert re.search(r"1/3  interrupted in \d+ s", said) and "2/3" not in said, "only what is done counts"
    assert "runs done now: 1, done before: 0, failed: 0, interrupted: 1, left: 1" in said
    assert process.returncode == 130
    assert not marked(place_of(runs)) and len(finished_runs(runs)) == 1
    assert "interrupt" in status("s", runs=runs) and "1 waiting" in status("s", runs=runs)


def _until(true, within_s: float = 30.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < within_s, "it did not come to pass"
        time.sleep(0.05)


def _kernels(runs: Path) -> list[psutil.Process]:
    return [p for p in marked(place_of(runs)) if _role(p) == "kernel"]


def _there(role: str, supervisor: subprocess.Popen, runs: Path) -> list[psutil.Process]:
    if role == "supervisor":
        return [psutil.Process(supervisor.pid)] if supervisor.poll() is None else []
    return [p for p in marked(place_of(runs)) if _role(p) == role]


def _role(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    roles = {"notebooks.batch.guard": "guard", "notebooks.batch.worker": "worker", "ipykernel": "kernel"}
    return next((role for name, role in roles.items() if name in line), "")


@pytest.mark.long
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_lose_nothing_repeat_nothing_and_leave_nothing(kills, plain_processes, sweep, runs, workbench):
    """SIGKILL at random moments, of the supervisor, the guard, papermill or the kernel; what was finished stays as it
    is."""
    dice = random.Random(7)
    count, done, process = 4, {}, None
    victims = dict.fromkeys(("supervisor", "guard", "worker", "kernel"), 0)
    for kill in range(kills):
        if len(attempts(runs)) >= count - 1:
            count += 4
        if process is None or process.poll() is not None:
            process = workbench(
                "run",
                sweep(grid={"number": list(range(count))}),
                "--parallel",
                2,
                wait=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if kill % len(victims) == 0:
            order = dice.sample(list(victims), len(victims))
        victim, latest = order[kill % len(victims)], time.monotonic() + 60  # on a busy machine they start slowly
        time.sleep(dice.uniform(0, 1.5))
        while not (there := _there(victim, process, runs)) and process.poll() is None and time.monotonic() < latest:
            time.sleep(0.02)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            dice.choice(there).kill()
            victims[victim] += 1
        if victim == "supervisor" and process.poll() is None and there:
            process.wait(10)
        if process.poll() is not None:
            _until(lambda: not marked(place_of(runs)), within_s=15)
        now = attempts(runs)
        assert done.items() <= now.items(), "a finished run was lost or repeated"
        done = now
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    _until(lambda: not marked(place_of(runs)), within_s=15)
    assert min(victims.values()) > 0, victims
    final = workbench("resume", "s", "--parallel", 2)
    assert final.returncode == 0, final.stderr
    assert len(attempts(runs)) == count and done.items() <= attempts(runs).items()
    assert {path.name for path in runs.iterdir()} == {*attempts(runs), "sweeps", "index.html", KEPT}, (
        "nothing else is left"
    )


def test_orphans_of_a_dead_owner_are_found_by_their_mark(runs, tmp_path):
    runs.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    lost = replace(mark(runs, "k"), owner=dead.pid, owner_started="1")
    ours = mark(runs, "k")
    elsewhere = replace(lost, host="another", attempt="other")  # as a container's, where the owner's number is another
    sleepers = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(m)}, start_new_session=True)
        for m in (lost, ours, elsewhere)
    ]
    _until(lambda: len(marked(place_of(runs))) == 3, within_s=15)  # an environment can be read a moment after the start
    assert end_orphans(runs) == 1
    left = {sleeper.pid for sleeper in sleepers[1:]}
    assert {p.pid for p in marked(place_of(runs))} == left and lives(os.getpid(), ours.owner_started)
    assert end(str(ours)) == 0 and end(str(elsewhere)) == 0
    assert not any(psutil.pid_exists(sleeper.pid) for sleeper in sleepers)


@pytest.mark.slow
def test_engines_of_several_runs_at_once(sweep, runs):
    begin = time.monotonic()
    found = run_sweep(
        sweep(grid={"number": [1, 2, 3]}, base={"does": "print(os.environ['WORKBENCH_THREADS'])"}),
        runs=runs,
        engine=Local(3),
    )
    assert {outcome.status for outcome in found} == {"finished"}
    text = (Path(found[0].folder) / "notebook.ipynb").read_text()
    assert f'"{max(1, (os.cpu_count() or 1) // 3)}\\n"' in text and time.monotonic() - begin < 100
    with pytest.raises(ValueError, match="`parallel`"):
        Local(0)


def test_the_command_line(sweep, runs, workbench, trivial):
    path = sweep(grid={"number": [1]}, include=[{"number": 2, "does": "1 / 0"}])
    shown = workbench("plan", path)
    assert shown.returncode == 0 and "2 to run" in shown.stdout
    done = workbench("run", path)
    assert (
        done.returncode == 1
        and "runs done now: 1, done before: 0, failed: 1" in done.stdout
        and "ZeroDivisionError" in done.stderr
    )
    page = Path(done.stdout.partition("comparison: ")[2].splitlines()[0])
    assert page == runs / "sweeps" / "s" / "comparison.html" and "ZeroDivisionError" in page.read_text()
    assert "ZeroDivisionError" in workbench("status", "--lines").stdout
    again = workbench("resume")
    assert again.returncode == 1 and "runs done now: 0, done before: 1, failed: 1" in again.stdout
    alone = workbench("run", trivial, "-p", "number", "5")
    assert alone.returncode == 0 and "report: " in alone.stdout
    said = re.findall(r"\d\d:\d\d:\d\d  (.*)", alone.stdout)
    assert said[0].startswith("1 run to do: about ") and said[-1].startswith("1/1  finished in "), "in a log, too"
    assert "finished before" in workbench("run", trivial, "-p", "number", "5").stdout
    bad = workbench("run", trivial, "-p", "number", "-5")
    assert bad.returncode == 2 and "`number` (=-5) must not be negative" in bad.stderr and not marked(place_of(runs))
    assert workbench("run", sweep("t", grid={"numbr": [1]})).returncode == 2
    assert "was not started here" in workbench("status", "nothing").stderr
    index = (runs / "index.html").read_text()
    assert "ZeroDivisionError" in index or "cell" in index


def test_a_notebook_may_run_a_sweep(sweep, runs):
    """tqdm.auto, and no signals from a thread that is not the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(run_sweep(sweep(grid={"number": [4]}), runs=runs)))
    thread.start()
    thread.join()
    assert [outcome.status for outcome in found] == ["finished"]


def test_a_folder_of_locks_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_LOCKS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"`WORKBENCH_LOCKS` \(='.*none'\) must be a folder"), undisturbed("cpu"):
        pass


@pytest.mark.slow
def test_timing_waits_for_the_device_and_the_wait_is_not_counted(tmp_path):
    """Two processes that share a processor: one times something, and the other's clock stands still while it waits."""
    code = """
import sys, time, os
from pathlib import Path
from eval.speed import device_lock
device_lock.call_this(f"the run that {sys.argv[2]}")
device_lock.share("cpu", waits=sys.argv[2] != "does not wait")
print("shares", flush=True)
if sys.argv[2] == "does not wait":
    sys.exit()
if sys.argv[2] == "times":
    with device_lock.undisturbed("cpu"), device_lock.undisturbed("cpu"):
        Path(sys.argv[1], "timing").touch()
        assert not Path(sys.argv[1], "sharing").exists(), "somebody computes"
        while not Path(sys.argv[1], "timed").exists():
            time.sleep(0.05)
        Path(sys.argv[1], "timing").unlink()
else:
    Path(sys.argv[1], "sharing").touch()
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.05)
    assert not Path(sys.argv[1], "timing").exists()
    Path(sys.argv[1], "sharing").unlink()
    with device_lock.undisturbed("cpu"):
        assert not Path(sys.argv[1], "timing").exists()
"""

    def start(how, wait="", said="shares"):
        environment = os.environ | {"WORKBENCH_LOCKS": str(tmp_path)}
        environment |= {"WORKBENCH_WAITING": str(tmp_path / wait)} if wait else {}
        command = [sys.executable, "-c", code, str(tmp_path), how]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().startswith(said)
        return process

    shares = start("shares")
    _until(lambda: (tmp_path / "sharing").exists())
    times = start("times", "waiting")
    _until(lambda: (tmp_path / "waiting").exists() and "pid" in (tmp_path / "waiting").read_text())
    said = f"for the device cpu: the run that shares (pid {shares.pid}) computes there since "
    assert said in (tmp_path / "waiting").read_text(), "to `workbench status` and to the log"
    assert "speed_rounds=0" in (tmp_path / "waiting").read_text()
    (tmp_path / "go").touch()
    _until(lambda: (tmp_path / "timing").exists())
    beside = start(
        "does not wait", said=f"Beside this run, another one is being timed: the run that times (pid {times.pid})"
    )
    assert beside.wait(60) == 0
    (tmp_path / "timed").touch()
    assert times.wait(60) == 0 and shares.wait(60) == 0 and not (tmp_path / "waiting").exists()
    assert said in times.stdout.readline(), "in the notebook's cell"
