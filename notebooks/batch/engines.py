"""Where runs are executed: threads here, or a Ray cluster. An engine takes jobs and gives outcomes as they come.

That is the whole interface:

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]

so that a third engine, such as submitit for SLURM, is little more than this:

    executor = submitit.AutoExecutor(folder)  # update_parameters(gpus_per_node=...) per kind of job; no requeueing
    sent = {executor.submit(execute, job): job for job in jobs}
    while sent:
        for one in [one for one in sent if one.done()]:
            yield _told(sent.pop(one), one)  # one.result(); a job that SLURM lost as a failure, by its exception
        if stop.is_set():
            for one in sent: one.cancel()  # scancel: the guard sees its owner go and ends the run
        time.sleep(1)

Engines keep no state: the lease says which attempt works on a run, and the folder whether it is finished.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import psutil

from eval.record.manifest import read_json
from kernels.errors import first_line
from notebooks.batch.job import Job, Outcome, execute
from notebooks.batch.run_folder import JOB, RunFolder
from notebooks.batch.worker import where

ENGINES = ("local", "ray")
NODE = "WORKBENCH_NODE"  # names the node of the cluster to a run that is executed there
GRACE_S = 20.0  # for runs that were asked to stop, before their workers are killed
SEEN_S = 10.0  # until what another machine has finished is to be seen here: a network filesystem may lag behind


class Engine(Protocol):
    """Yields an outcome per job, in the order in which they end; interrupts what runs once `stop` is set."""

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]: ...


class Local:
    """On this machine, `parallel` runs at once; runs that need a GPU have one each."""

    def __init__(self, parallel: int = 1):
        if type(parallel) is not int or parallel < 1:
            raise ValueError(f"`parallel` (={parallel!r}) must be a positive number of runs at once")
        self.parallel = parallel

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]:
        gpus: SimpleQueue[str] = SimpleQueue()
        for gpu in _gpus() if self.parallel > 1 else ():
            gpus.put(gpu)
        several = not gpus.empty()
        threads = max(1, (os.cpu_count() or 1) // self.parallel) if self.parallel > 1 else None

        def one(job: Job) -> Outcome:
            if stop.is_set():
                return Outcome(job.key, "waiting", job.folder)
            own = several and job.gpus and ":" not in str(job.values.get("device"))  # cuda:1 says itself which
            gpu = gpus.get() if own else None
            try:
                more = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
                return execute(replace(job, threads=threads, environment=job.environment | more), stop.is_set)
            except Exception as error:  # the other runs go on
                kind = "disk" if isinstance(error, OSError) else "incomplete"
                return Outcome(
                    job.key, "failed", job.folder, {"kind": kind, "error": f"{type(error).__name__}: {error}"}
                )
            finally:
                if gpu:
                    gpus.put(gpu)

        with ThreadPoolExecutor(self.parallel, "run") as pool:
            futures = [pool.submit(one, job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()


class Ray:
    """On an existing Ray cluster whose nodes have this workbench (`pip install -e .[ray]`) and share the folder of
    runs.

    A run takes one CPU of Ray's, and one GPU if its `device` is one: `ray start --num-cpus=2` allows two runs at once
    on a node, which then share its cores while nothing is timed. Ray says which GPU; a run that wants none sees none.
    Runs are spread over the nodes, and use each node's own environment (`HF_HOME`, `WORKBENCH_DATA`). They keep the key
    under which they were planned, whatever a node's device is, and execute the sweep's snapshot of the code. A run
    whose texts or model differ on its node is refused there. `WORKBENCH_NODE` names the node to a run.

    Nothing is repeated by itself: when a node or a worker dies, its runs end with it and are failures of the kind
    `kernel death`, which `workbench resume` runs again. `stop` asks the runs to end, as Ctrl-C does, and kills their
    workers after `GRACE_S` seconds. A driver that is killed takes its runs with it. Without the cluster's head Ray ends
    the driver after a minute; `resume` on a new cluster goes on from there.

    Args:
        address: of the cluster's head, as host:port; that of the cluster to which this machine belongs by default.

    Raises:
        ValueError: Ray is not installed, or no cluster can be joined there; from `run`, no node could ever take one of
            the jobs.
    """

    def __init__(self, address: str = ""):
        try:
            import ray
        except ImportError as error:
            raise ValueError("`engine` (='ray') needs the extra `ray`: pip install -e .[ray]") from error
        self._ray = ray
        if ray.is_initialized():
            there = ray.get_runtime_context().gcs_address
            if address not in ("", "auto", there):
                raise ValueError(
                    f"`address` (={address!r}): this process is in the Ray cluster at {there} already; "
                    "`ray.shutdown()` first"
                )
            return
        try:
            _reach(address)
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.WARNING)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"`address` (={address!r}): no Ray cluster can be joined there: {first_line(error)}; "
                "`ray start --head` starts one and says its address"
            ) from error

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]:
        ray = self._ray
        self._check(jobs)
        # a worker of Ray's that ends kills its children: the guard, which is to end what the run has started
        spared = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
        task = ray.remote(max_retries=0, scheduling_strategy="SPREAD", runtime_env=spared)(_on_node)
        before = {job.key: _attempts(job) for job in jobs}
        waiting = {task.options(name=job.key, num_cpus=1, num_gpus=job.gpus).remote(job): job for job in jobs}
        asked = 0.0
        try:
            while waiting:
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.5)
                for ref in done:
                    job = waiting.pop(ref)
                    yield self._outcome(ref, job, before[job.key])
                if stop.is_set() and (not asked or time.monotonic() - asked > GRACE_S):
                    for ref in waiting:
                        ray.cancel(ref, force=bool(asked))
                    asked = time.monotonic()
        finally:  # left before its end: nobody would hear of what still runs
            for ref in waiting:
                ray.cancel(ref, force=True)

    def _check(self, jobs: Sequence[Job]) -> None:
        """Ray lets a task that no node can take wait for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for job in jobs:
            if not any(node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= job.gpus for node in nodes):
                raise ValueError(
                    f"`engine` (='ray'): {job.key} asks for a CPU and {job.gpus} GPUs, which none of the cluster's "
                    f"{len(nodes)} nodes has; `ray status` shows what there is"
                )

    def _outcome(self, ref: Any, job: Job, before: tuple[str, str]) -> Outcome:
        """What became of a task; where Ray only knows that it is lost, the folder is asked."""
        errors = self._ray.exceptions
        try:
            return _seen(self._ray.get(ref), job)
        except errors.TaskCancelledError:
            kind, said = "interrupt", "the run was interrupted"
        except errors.OutOfMemoryError as error:
            kind, said = "out of memory", f"Ray killed its worker for want of memory: {first_line(error)}"
        except errors.RayTaskError as error:  # ours went on, but could not begin, or end: no workbench, no folder there
            kind = "disk" if isinstance(error.cause, OSError) else "kernel death"
            said = f"its node could not run it: {type(error.cause).__name__}: {error.cause}"
        except errors.RayError as error:
            kind, said = "kernel death", f"its node or worker died: {type(error).__name__}: {first_line(error)}"
        done, begun = _attempts(job)
        if done and done != before[0]:
            return Outcome(job.key, "finished", job.folder)
        if kind == "interrupt" and begun == before[1]:
            return Outcome(job.key, "waiting", job.folder)
        at = where(RunFolder(Path(job.folder)).part / "notebook.ipynb") if begun != before[1] else {}
        return Outcome(job.key, "failed", job.folder, at | _failure(job, kind, said))


def _reach(address: str) -> None:
    """Ray asks for minutes where nobody answers; raises OSError or ValueError at once."""
    host, _, port = address.rpartition(":")
    if "://" in address or (host and not port.isdecimal()):
        raise ValueError("give it as host:port, from a machine that is a node of the cluster")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _failure(job: Job, kind: str, said: str) -> dict[str, Any]:
    return {"kind": kind, "error": said, "attempts": 1, "key": job.key, "notebook": job.notebook, "values": job.values}


def _on_node(job: Job) -> Outcome:
    """A job in a worker of Ray's; cancelling its task is as Ctrl-C, which ends the run in good order."""
    import ray

    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    # Ray limits a task to as many threads as it has CPUs: things would be timed with one
    limit = None if "OMP_NUM_THREADS" in psutil.Process().environ() else os.environ.pop("OMP_NUM_THREADS", None)
    try:
        node = ray.get_runtime_context().get_node_id()
        has = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node)
        at_once = int(has["GPU"] // job.gpus) if job.gpus else int(has["CPU"])
        threads = max(1, (os.cpu_count() or 1) // at_once) if at_once > 1 else None
        more = {NODE: node} | ({} if job.gpus else {"CUDA_VISIBLE_DEVICES": ""})
        return execute(replace(job, threads=threads, environment=job.environment | more), stopped.is_set)
    finally:
        if limit is not None:
            os.environ["OMP_NUM_THREADS"] = limit
        signal.signal(signal.SIGINT, before)


def _attempts(job: Job) -> tuple[str, str]:
    """The attempts at a run that stands finished, and that was begun last; "" for none."""
    places = RunFolder(Path(job.folder))
    return places.manifest().get("attempt", ""), read_json(places.part / JOB).get("token", "")


def _seen(outcome: Outcome, job: Job) -> Outcome:
    """The outcome, if what it tells of is to be seen from here, too."""
    folder, begin = Path(job.folder), time.monotonic()
    while outcome.status in ("finished", "known") and not RunFolder(folder).manifest():
        if time.monotonic() - begin > SEEN_S:
            said = f"it was finished on its node, but is not to be seen here: {folder.parent} must be shared"
            return Outcome(job.key, "failed", job.folder, _failure(job, "disk", said), outcome.seconds)
        time.sleep(0.2)
        if folder.parent.is_dir():
            os.listdir(folder.parent)  # a network filesystem looks again
    return outcome


def _gpus() -> list[str]:
    """Numbers of the GPUs of this machine, or of those that this process may see; asked without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.split() if asked.returncode == 0 else []
