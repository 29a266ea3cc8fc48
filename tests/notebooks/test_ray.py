"""Runs on a Ray cluster: two simulated nodes on this machine, of which one is killed while it works."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eval.record.manifest import seal
from notebooks.batch.engines import lost as lost_runs
from notebooks.batch.engines.ray import Ray
from notebooks.batch.job import Outcome, job_of
from notebooks.batch.plan import run_sweep
from notebooks.batch.processes import lives, marked, place_of, started
from notebooks.batch.run_folder import NEEDED, RunFolder
from notebooks.batch.status import finished_runs, status
from notebooks.batch.sweep import read_sweep
from notebooks.study.identity import packages_code

ROOT = Path(__file__).resolve().parents[2]
NODE_OPTIONS = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
# what every run of these tests tells of itself: `seconds` may pass before, `more` happens between
TELLS = """
begin = time.time()
told = {{name: os.environ.get(name) for name in ("WORKBENCH_NODE", "WORKBENCH_KEY", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
                                               "WORKBENCH_THREADS")}}
Path({place!r}, f"begun-{{number}}").write_text(os.environ["WORKBENCH_NODE"])
{more}
Path(run_path, "told.json").write_text(json.dumps(told | {{"begin": begin, "end": time.time()}}))
"""
# one that works until it is let go, and has started a stubborn process in a session of its own
WAITS = """
if number >= 10:
    import subprocess
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    while not Path({place!r}, "go").exists():
        time.sleep(0.1)
"""


@pytest.fixture
def tells(sweep, tmp_path):
    """A sweep whose runs say where they ran; those of a number from 10 on wait for a file `go`."""

    def write(name: str = "s", more: str = WAITS, **keys) -> Path:
        does = TELLS.format(place=str(tmp_path), more=more.format(place=str(tmp_path)))
        return sweep(name, base={"does": does} | keys.pop("base", {}), **keys)

    return write


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two CPUs and a GPU each; the second may be killed and is there again for the next test."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie there
    (place / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in (
            ("RAY_USAGE_STATS_ENABLED", "0"),
            ("RAY_TMPDIR", str(place)),
            ("RAY_raylet_start_wait_time_s", "120"),
            ("RAY_agent_register_timeout_ms", "120000"),
        ):
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args=NODE_OPTIONS)
        two = SimpleNamespace(cluster=made, second=None, address=made.address)
        try:
            yield two
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def nodes(cluster):
    if cluster.second is None:
        cluster.second = cluster.cluster.add_node(**NODE_OPTIONS)
        cluster.cluster.wait_for_nodes(60)
    return cluster


def attempts(runs: Path) -> dict[str, str]:
    return {made["key"]: made["attempt"] for made in finished_runs(runs)}


def told(outcome: Outcome) -> dict:
    return json.loads(Path(outcome.folder, "told.json").read_text())


def _until(true, within_s: float = 60.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < within_s, "it did not come to pass"
        time.sleep(0.05)


def _begun(place: Path) -> dict[int, str]:
    """The node of every run that has begun to work."""
    found = {int(path.name.partition("-")[2]): path.read_text() for path in place.glob("begun-*")}
    return {number: node for number, node in found.items() if node}


@pytest.fixture
def meanwhile(tmp_path):
    """Runs a sweep in a thread: `thread, outcomes = meanwhile(...)`; ended with the test."""
    threads, stop = [], threading.Event()

    def begin(*arguments, **options) -> tuple[threading.Thread, list[Outcome]]:
        found = []
        threads.append(threading.Thread(target=lambda: found.extend(run_sweep(*arguments, **{"stop": stop} | options))))
        threads[-1].start()
        return threads[-1], found

    yield begin
    stop.set()
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(60)


# Without a cluster


def test_without_ray_the_command_says_what_to_install(sweep, runs):
    code = "import sys; sys.modules['ray'] = None; from notebooks.batch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "run",
        str(sweep(grid={"number": [1]})),
        "--engine",
        "ray",
        "--runs",
        str(runs),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "pip install -e .[ray]" in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )
    assert not runs.exists(), "nothing was begun"


def test_no_cluster_is_said_so(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    for address, why in (
        ("", "any running Ray"),
        (nobody, "refused"),
        ("ray://127.0.0.1:10001", "host:port"),
        ("head:port", "host:port"),
    ):
        with pytest.raises(ValueError, match=f"`address` .*: no Ray cluster can be joined there: .*{why}"):
            Ray(address)


@pytest.fixture
def lost(sweep, runs):
    """What the engine makes of a task that ended with an error of Ray's; the folder looks as `left` made it."""
    errors = pytest.importorskip("ray").exceptions
    job = job_of(read_sweep(sweep()).runs[0], runs)
    places = RunFolder(Path(job.folder))

    def make(error_of, left=lambda places: None) -> Outcome:
        def get(ref):
            raise error_of(errors)

        engine = object.__new__(Ray)
        engine._ray = SimpleNamespace(get=get, exceptions=errors)
        before = lost_runs.attempts(job)
        left(places)
        return engine._outcome("ref", job, before)

    return make


def _begins(places: RunFolder) -> None:
    places = replace(places, attempt="a")
    places.part.mkdir(parents=True)
    (places.part / "job.json").write_text('{"token": "a"}')
    cells = [
        {"cell_type": "markdown", "source": ["## Work"], "metadata": {}},
        {"cell_type": "code", "source": ["x"], "metadata": {"papermill": {"start_time": "2026"}}, "outputs": []},
    ]
    (places.part / "notebook.ipynb").write_text(json.dumps({"cells": cells}))


def _finishes(places: RunFolder) -> None:
    places.folder.mkdir(parents=True)
    for name in NEEDED:
        (places.folder / name).write_text("{}")
    seal(places.folder, {"attempt": "a", "key": places.folder.name})


def _caused(errors, cause: Exception):
    return errors.RayTaskError("_on_node", "Traceback", cause)


@pytest.mark.parametrize(
    "error_of, kind, said",
    [
        (lambda e: e.WorkerCrashedError(), "kernel death", "its node or worker died: WorkerCrashedError"),
        (lambda e: e.NodeDiedError("node x is gone"), "kernel death", "node x is gone"),
        (lambda e: e.OutOfMemoryError("at 97 %"), "out of memory", "want of memory: at 97 %"),
        (lambda e: _caused(e, PermissionError(13, "Permission denied", "/runs")), "disk", "Permission denied"),
        (
            lambda e: _caused(e, ModuleNotFoundError("No module named 'notebooks'")),
            "kernel death",
            "No module named 'notebooks'",
        ),
        (lambda e: e.TaskCancelledError(), "interrupt", "interrupted"),
    ],
)
def test_runs_lost_by_ray_are_reported_by_kind_and_cell(error_of, kind, said, lost):
    outcome = lost(error_of, _begins)
    assert outcome.status == "failed" and outcome.failure["kind"] == kind and said in outcome.failure["error"], outcome
    assert (
        outcome.failure["cell"] == 1
        and outcome.failure["cell_title"] == "Work"
        and outcome.failure["key"] == outcome.key
    )


def test_finished_runs_and_runs_never_begun_are_no_failures(lost):
    assert lost(lambda e: e.TaskCancelledError()).status == "waiting"
    assert lost(lambda e: e.NodeDiedError("x"), _finishes).status == "finished", "promoted before its node died"
    assert lost(lambda e: e.NodeDiedError("x")).status == "failed", "forced: what stands is of before"


def test_a_run_that_only_its_node_can_see_is_a_failure(sweep, runs, monkeypatch):
    monkeypatch.setattr(lost_runs, "SEEN_S", 0.3)
    job = job_of(read_sweep(sweep()).runs[0], runs)
    outcome = lost_runs.seen(Outcome(job.key, "finished", job.folder), job)
    assert (
        outcome.status == "failed"
        and outcome.failure["kind"] == "disk"
        and "must be shared" in outcome.failure["error"]
    )
    later = threading.Timer(0.1, lambda: _finishes(RunFolder(Path(job.folder))))
    later.start()
    monkeypatch.setattr(lost_runs, "SEEN_S", 10.0)
    assert lost_runs.seen(Outcome(job.key, "finished", job.folder), job).status == "finished"


# On two nodes


@pytest.mark.slow
def test_a_sweep_spreads_over_the_nodes_and_keeps_its_keys(tells, runs, nodes):
    path = tells(grid={"number": [1, 2, 3, 4, 5]}, base={"seconds": 1.0})
    found = run_sweep(path, runs=runs, engine=Ray(nodes.address))
    assert [outcome.status for outcome in found] == ["finished"] * 5, found
    assert len({told(outcome)["WORKBENCH_NODE"] for outcome in found}) == 2
    for outcome in found:
        said = told(outcome)
        assert said["WORKBENCH_KEY"] == outcome.key and said["CUDA_VISIBLE_DEVICES"] == "", "it asked for no GPU"
        assert said["OMP_NUM_THREADS"] is None, "Ray would have things timed with one thread"
        assert said["WORKBENCH_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    before = attempts(runs)
    assert [outcome.status for outcome in run_sweep(path, runs=runs, engine=Ray(nodes.address))] == ["known"] * 5
    assert attempts(runs) == before and not [path for path in runs.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_run_keeps_the_key_of_its_plan_on_a_node_of_another_kind(tells, runs, nodes):
    """Planned where the device is of another class: the key is not computed anew."""
    job = job_of(read_sweep(tells()).runs[0], runs)
    other = replace(job, key="trivial-another", folder=f"{job.folder}-a", identity=job.identity | {"device": "another"})
    (outcome,) = Ray(nodes.address).run([other], threading.Event())
    assert outcome.status == "finished" and told(outcome)["WORKBENCH_KEY"] == "trivial-another", outcome
    manifest = RunFolder(Path(other.folder)).manifest()
    assert manifest["identity"]["device"] == "another" and manifest["code"] == packages_code()


@pytest.mark.slow
def test_runs_on_gpus_never_share_one(tells, runs, nodes):
    path = tells(more="time.sleep(1)", grid={"number": [1, 2, 3, 4]}, base={"device": "auto"}, gpus=1)
    said = [told(outcome) for outcome in run_sweep(path, runs=runs, engine=Ray(nodes.address))]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in said} == {"0"}, "each simulated node numbers its own"
    assert len({one["WORKBENCH_NODE"] for one in said}) == 2
    for i, one in enumerate(said):
        for other in said[:i]:
            apart = one["begin"] >= other["end"] or other["begin"] >= one["end"]
            assert apart or one["WORKBENCH_NODE"] != other["WORKBENCH_NODE"], "two runs at once on a GPU"
    too_many = [replace(job_of(read_sweep(tells("t")).runs[0], runs), gpus=3)]
    with pytest.raises(ValueError, match="asks for a CPU and 3 GPUs, which none of the cluster's 2 nodes has"):
        list(Ray(nodes.address).run(too_many, threading.Event()))


@pytest.mark.slow
def test_a_node_that_is_killed_takes_its_runs_along_and_nothing_else(tells, runs, nodes, meanwhile, tmp_path):
    path = tells(grid={"number": [1, 2, 10, 11, 12, 13, 14]})
    thread, found = meanwhile(path, runs=runs, engine=Ray(nodes.address))
    _until(lambda: len(attempts(runs)) == 2 and len(_begun(tmp_path)) == 6)
    before, victim, where = attempts(runs), nodes.second.node_id, _begun(tmp_path)
    lost = {number for number, node in where.items() if node == victim and number >= 10}
    assert len(lost) == 2
    keys = {run.values["number"]: run.key for run in read_sweep(path).runs}
    # guard, worker, kernel and what that started
    _until(lambda: all(len(marked(f"{place_of(runs)}/{keys[number]}/")) >= 4 for number in lost))
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    nodes.second = None
    _until(lambda: not any(marked(f"{place_of(runs)}/{keys[number]}/") for number in lost), within_s=15)
    assert len(marked(place_of(runs))) >= 8, "the other node works on"
    (tmp_path / "go").touch()
    thread.join(90)
    ends = {outcome.key: outcome for outcome in found}
    for number, key in keys.items():
        assert ends[key].status == ("failed" if number in lost else "finished"), ends[key]
    failure = ends[keys[min(lost)]].failure
    assert failure["kind"] == "kernel death" and "died" in failure["error"] and failure["cell_title"] == "Work", failure
    said = status("s", runs=runs)
    assert said.count("kernel death") == 2 and "5 finished" in said and "2 failed" in said
    kept = attempts(runs)
    assert before.items() <= kept.items() and len(kept) == 5
    again = run_sweep(path, runs=runs, engine=Ray(nodes.address))
    assert sorted(outcome.status for outcome in again) == ["finished"] * 2 + ["known"] * 5
    assert kept.items() <= attempts(runs).items() and len(attempts(runs)) == 7
    assert {path.name for path in runs.iterdir()} == {*attempts(runs), "sweeps"}, "nothing else is left"


@pytest.mark.slow
def test_a_sweep_that_is_stopped_leaves_nothing_alive(tells, runs, nodes, meanwhile, tmp_path):
    path, stop = tells(grid={"number": [1, *range(10, 16)]}), threading.Event()
    thread, found = meanwhile(path, runs=runs, engine=Ray(nodes.address), stop=stop)
    _until(lambda: len(attempts(runs)) == 1 and len(_begun(tmp_path)) == 5)
    stop.set()
    thread.join(40)
    assert not thread.is_alive() and not marked(place_of(runs))
    ends = [outcome.failure.get("kind", outcome.status) for outcome in found]
    assert sorted(ends) == ["finished"] + ["interrupt"] * 4 + ["waiting"] * 2
    assert not list(runs.glob(".*")) and len(list(runs.glob("*.failed"))) == 4, "ended in good order"
    (tmp_path / "go").touch()
    assert {one.status for one in run_sweep(path, runs=runs, engine=Ray(nodes.address))} == {"known", "finished"}


@pytest.mark.slow
@pytest.mark.parametrize("with_signal, ends_with", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_command_on_a_cluster_that_is_interrupted_or_killed(
    with_signal, ends_with, tells, runs, nodes, workbench, tmp_path
):
    path = tells(grid={"number": [1, 10, 11]})
    process = workbench("run", path, "--engine", "ray", "--address", nodes.address, wait=False)
    _until(lambda: len(attempts(runs)) == 1 and len(_begun(tmp_path)) == 3)
    _until(lambda: len(_owners(runs)) == 2)
    before, workers = attempts(runs), _owners(runs)
    process.send_signal(with_signal)
    assert process.wait(40) == ends_with, process.stderr.read()
    _until(lambda: not marked(place_of(runs)) and not any(lives(*worker) for worker in workers.items()), within_s=15)
    (tmp_path / "go").touch()
    done = workbench("resume", "s", "--engine", "ray", "--address", nodes.address)
    assert done.returncode == 0 and "runs done now: 2, done before: 1, failed: 0" in done.stdout, done.stderr
    assert before.items() <= attempts(runs).items()


def _owners(runs: Path) -> dict[int, str]:
    """The workers of Ray's that answer for runs here."""
    found = {}
    for process in marked(place_of(runs)):
        try:
            owner = int(process.environ()["WORKBENCH_RUN"].split("/")[2])
        except (psutil.Error, KeyError):
            continue
        found[owner] = started(owner)
    return {owner: when for owner, when in found.items() if lives(owner, when)}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_a_failure_of_its_run_alone(tells, runs, nodes, meanwhile, tmp_path):
    path = tells(grid={"number": [1, 10]})
    thread, found = meanwhile(path, runs=runs, engine=Ray(nodes.address))
    _until(lambda: len(attempts(runs)) == 1 and len(_begun(tmp_path)) == 2)
    _until(lambda: len(_owners(runs)) == 1)
    (worker,) = _owners(runs)
    os.kill(worker, signal.SIGKILL)
    thread.join(40)
    assert sorted(outcome.failure.get("kind", outcome.status) for outcome in found) == ["finished", "kernel death"]
    _until(lambda: not marked(place_of(runs)), within_s=15)
    assert len(_begun(tmp_path)) == 2
