"""Runs as SLURM jobs: by submitit's local executor, and by programs that answer as SLURM's own would."""

import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import yaml

from compress.walk.parallel.spawn import PROCESSES
from notebooks.batch import job as jobs
from notebooks.batch import snapshot
from notebooks.batch.engines import local, lost, slurm
from notebooks.batch.engines.local import Local
from notebooks.batch.engines.slurm import Slurm
from notebooks.batch.job import Outcome, job_of
from notebooks.batch.plan import run_sweep
from notebooks.batch.processes import marked, place_of
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.status import status
from notebooks.batch.sweep import read_sweep, with_gpus
from notebooks.batch.sweep.resources import SlurmOptions

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
if number == 3 and not Path({place!r}, "go").exists():
    Path({place!r}, "begun").touch()
    time.sleep(300)
if number == 2:
    raise RuntimeError("no luck")
"""
# `sbatch` that takes one partition; it writes down what it was asked for, and starts nothing
SBATCH = """#!/bin/sh
echo "$@" >> {place}/asked
case "$*" in *--test-only*nowhere*) echo "sbatch: error: invalid partition specified: nowhere" >&2; exit 1;; esac
case "$*" in *--test-only*) exit 0;; esac
cat "$1" >> {place}/asked
echo "Submitted batch job 7"
"""
SACCT = """#!/bin/sh
printf "JobID|State|NodeList\\n7_0|$(cat {state})|n\\n7_1|$(cat {state})|n\\n"
"""


@pytest.fixture
def submitit():
    return pytest.importorskip("submitit")


@pytest.fixture
def here(submitit, runs):
    """The engine, with processes of this machine in the place of the cluster."""
    return Slurm(runs, SlurmOptions(time_min=5, cpus=1), cluster="local")


@pytest.fixture
def cluster(submitit, tmp_path, monkeypatch):
    """A machine with the commands of SLURM; returns what they were asked for."""
    for name in ("sbatch", "srun", "scancel"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(SBATCH.format(place=tmp_path) if name == "sbatch" else "#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "sacct").write_text(SACCT.format(state=tmp_path / "state"))
    (tmp_path / "bin" / "sacct").chmod(0o755)
    (tmp_path / "state").write_text("OUT_OF_MEMORY")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return lambda: (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""


def _workers(runs: Path, key: str) -> set[int]:
    """The processes of submitit's that answer for a run."""
    return {int(process.environ()["WORKBENCH_RUN"].split("/")[2]) for process in marked(f"{place_of(runs)}/{key}/")}


@pytest.mark.slow
@pytest.mark.long
def test_a_job_that_is_killed_or_fails_is_told_and_run_again(sweep, runs, here, tmp_path, monkeypatch):
    monkeypatch.setattr(lost, "SEEN_S", 0.0)
    path = sweep(grid={"number": [1, 2, 3]}, base={"does": WAITS.format(place=str(tmp_path))})
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.extend(run_sweep(path, runs=runs, engine=here)))
    thread.start()
    keys = {run.values["number"]: run.key for run in read_sweep(path).runs}
    begin = time.monotonic()
    while not ((tmp_path / "begun").exists() and len(found) == 0 and len(list(runs.glob("*.failed"))) == 1):
        assert time.monotonic() - begin < 60
        time.sleep(0.05)
    (worker,) = _workers(runs, keys[3])
    psutil.Process(worker).send_signal(signal.SIGKILL)
    thread.join(60)
    ends = {one.key: one for one in found}
    assert ends[keys[1]].status == "finished" and ends[keys[2]].failure["kind"] == "cell", ends
    assert ends[keys[3]].failure["kind"] == "kernel death" and ends[keys[3]].failure["cell_title"] == "Work"
    assert "no luck" in status("s", runs=runs) and "kernel death" in status("s", runs=runs)
    (logs,) = (runs / ".slurm").iterdir()
    assert str(logs) in ends[keys[3]].failure["error"], "where its log lies"
    assert len([folder for folder in logs.iterdir() if (folder / f"{folder.name}_0_log.err").is_file()]) == 2
    (tmp_path / "go").touch()
    again = run_sweep(path, runs=runs, engine=here)
    assert {one.key: one.status for one in again} == dict(
        zip(keys.values(), ("known", "failed", "finished"), strict=True)
    )


def test_jobs_that_are_stopped_are_interrupted_and_leave_no_process(sweep, runs, here, tmp_path):
    stop = threading.Event()
    path = sweep(grid={"number": [3]}, base={"does": WAITS.format(place=str(tmp_path))})
    watcher = threading.Thread(target=lambda: (_until((tmp_path / "begun").exists), stop.set()))
    watcher.start()
    (one,) = run_sweep(path, runs=runs, engine=here, stop=stop)
    assert one.failure.get("kind") == "interrupt", one
    _until(lambda: not marked(place_of(runs)))


def _until(true, within_s: float = 60.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < within_s
        time.sleep(0.05)


def test_requests_to_slurm_are_those_of_the_sweep(sweep, runs, cluster, monkeypatch):
    monkeypatch.setattr(lost, "SEEN_S", 0.0)
    monkeypatch.setattr(slurm, "EVERY_S", 0.01)
    asked = {"partition": "big", "time_min": 90, "cpus": 4, "memory_gb": 1.5, "exclusive": True}
    path = sweep(grid={"number": [1, 2]}, base={"device": "auto"}, gpus=2, slurm=asked)
    engine = Slurm(runs, read_sweep(path).slurm, parallel=1)
    found = run_sweep(path, runs=runs, engine=engine)
    for flag in (
        "--partition=big", "--time=90", "--cpus-per-task=4", "--mem=1536MB", "--gpus-per-node=2", "--exclusive",
        "--requeue", "--array=0-1%1",
    ):  # fmt: skip
        assert flag in cluster().replace("'", ""), (flag, cluster())
    assert [one.failure["kind"] for one in found] == ["out of memory"] * 2, "as sacct says"
    assert not slurm.queued(runs), "their end was seen"
    assert "memory_gb" in found[0].failure["error"]


@pytest.mark.parametrize("result", [True, False])
def test_a_resumed_sweep_keeps_the_code_of_jobs_that_are_queued(result, sweep, runs, monkeypatch):
    """A driver that was killed has left a job, which holds no lease before it starts."""
    path, job = sweep(grid={"number": [1]}), runs / ".slurm" / "20261126-1" / "7_0"
    before = snapshot.take(runs / "sweeps" / "s" / "code", ["gptq"], runs)
    job.mkdir(parents=True)
    (job / "7_0_submitted.pkl").touch()
    if result:
        (job / "7_0_0_result.pkl").touch()
    monkeypatch.setattr(snapshot, "_content", lambda root: "later")
    engine = types.SimpleNamespace(run=lambda jobs, stop: iter(()))
    run_sweep(path, runs=runs, engine=engine)
    left = {folder.name for folder in (runs / "sweeps" / "s" / "code").iterdir()}
    assert left == ({"later"} if result else {"later", Path(before.root).name})


def test_slurm_refuses_before_anything_is_submitted(sweep, runs, cluster):
    path = sweep(grid={"number": [1]}, slurm={"partition": "nowhere"})
    engine = Slurm(runs, read_sweep(path).slurm)
    with pytest.raises(ValueError, match="would refuse such a job: .*invalid partition specified: nowhere"):
        run_sweep(path, runs=runs, engine=engine)
    assert "--test-only" in cluster() and "#SBATCH" not in cluster() and not slurm.queued(runs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"partitio": "x"}, "`slurm` has no option `partitio`; it has partition"),
        ({"time_min": "4h"}, "`time_min` .*'4h'.* must be a positive whole number"),
        ({"memory_gb": -1}, "`memory_gb` .*=-1"),
        ({"exclusive": "yes"}, "`exclusive` .*'yes'"),
        ({"partition": 3}, "`partition` .*=3"),
    ],
)
def test_options_are_checked_when_the_sweep_is_read(options, message, sweep):
    with pytest.raises(ValueError, match=message):
        read_sweep(sweep(grid={"number": [1]}, slurm=options))


def test_options_of_the_command_line_go_before_those_of_the_sweep():
    made = SlurmOptions(partition="a", cpus=4).changed_by(["cpus=2", "exclusive=true", "memory_gb=8", "account=12"])
    assert made == SlurmOptions(partition="a", cpus=2, exclusive=True, memory_gb=8, account="12")
    with pytest.raises(ValueError, match="NAME=VALUE"):
        made.changed_by(["cpus"])


def test_a_run_has_as_many_gpus_as_it_asks_for(sweep, runs, monkeypatch):
    groups = [{"notebook": "trivial.ipynb", "base": {"number": number}} for number in (1, 2)]
    groups[1]["gpus"] = 3
    path = sweep(text=yaml.safe_dump({"gpus": 2, "base": {"device": "auto"}, "runs": groups}))
    assert [job_of(run, runs).gpus for run in read_sweep(path).runs] == [2, 3]
    assert [job_of(run, runs).gpus for run in with_gpus(read_sweep(path), 4).runs] == [4, 4]
    with pytest.raises(ValueError, match="`gpus` .*=2.* of trivial-.*: 1 can be used here"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        run_sweep(path, runs=runs)
    said = set()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    monkeypatch.setattr(local, "execute", lambda job, _: said.add((job.gpus, job.environment["CUDA_VISIBLE_DEVICES"])))
    assert jobs._environment(job_of(read_sweep(path).runs[1], runs), snapshot.current())[PROCESSES] == "3"
    list(Local().run([job_of(run, runs) for run in read_sweep(path).runs], threading.Event()))
    assert said == {(2, "5,6"), (3, "7,5,6")}, "they take turns"
    for keys, message in (
        ({"base": {"device": "cpu"}, "gpus": 2}, "`gpus` .*=2.* `device` .*'cpu'"),
        ({"base": {"device": "auto"}, "gpus": 0}, "`gpus` .*=0"),
    ):
        with pytest.raises(ValueError, match=message):
            read_sweep(sweep("bad", grid={"number": [1]}, **keys))


@pytest.mark.slow
@pytest.mark.long
def test_a_preempted_job_ends_without_a_result_and_goes_on_when_it_is_queued_again(
    plain_processes, sweep, runs, tmp_path
):
    """As SLURM does it: SIGTERM, and then the same job once more, at first beside the lease of the attempt before."""
    path = sweep(grid={"number": [3]}, base={"does": WAITS.format(place=str(tmp_path))})
    (run,) = read_sweep(path).runs
    code = f"""
from notebooks.batch.engines import slurm
from notebooks.batch.job import job_of
from notebooks.batch.sweep.resources import SlurmOptions
from notebooks.batch.sweep import read_sweep
from pathlib import Path
slurm.RENEW_S = 0.2
(run,) = read_sweep({str(path)!r}).runs
print(slurm._on_node(job_of(run, Path({str(runs)!r})), SlurmOptions()).status)
"""
    how = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    pytest.importorskip("submitit")
    first = subprocess.Popen([sys.executable, "-c", code], **how)
    _until((tmp_path / "begun").exists)
    second = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"SLURM_RESTART_COUNT": "1"}, **how)
    time.sleep(2)
    assert second.poll() is None, "it waits for the lease"
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 128 + signal.SIGTERM and first.stdout.read() == ""
    (tmp_path / "go").touch()
    assert second.communicate(timeout=60)[0].strip() == "finished"
    assert RunFolder(runs / run.key).complete()
