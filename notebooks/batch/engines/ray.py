"""Runs on a Ray cluster."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil

from kernels.support.errors import first_line
from notebooks.batch.engines.lost import attempts, outcome_of_lost, seen
from notebooks.batch.job import Job, Outcome, execute

NODE = "WORKBENCH_NODE"  # names the node of the cluster to a run that is executed there
GRACE_S = 20.0  # for runs to stop, before their workers are killed


class Ray:
    """Executes runs on an existing Ray cluster whose nodes have this workbench (`pip install -e .[ray]`) and share the
    folder of runs.

    A run takes one CPU of Ray, and one GPU if its `device` is one, or the number that its sweep sets (`gpus: 2`), all
    on one node: `ray start --num-cpus=2` allows two runs at once on a node, which then share its cores while nothing is
    timed. Ray chooses the GPU; a run without a GPU sees none. Runs are spread over the nodes, and use each node's own
    environment (`HF_HOME`, `WORKBENCH_DATA`). They keep the key under which they were planned, for any device of a
    node, and execute the sweep's snapshot of the code. A run whose texts or model differ on its node is refused there.
    `WORKBENCH_NODE` tells a run the name of the node.

    Nothing is repeated automatically: when a node or a worker dies, its runs end and are failures of the kind `kernel
    death`, which `workbench resume` runs again. `stop` interrupts the runs, as Ctrl-C does, and kills their workers
    after `GRACE_S` seconds. If the driver is killed, its runs end, too. Without the cluster's head Ray ends the driver
    after a minute; `resume` on a new cluster continues from there.

    Args:
        address: of the cluster's head, as host:port; by default of the cluster to which this machine belongs.

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
                f"`address` (={address!r}): no Ray cluster can be joined there: {first_line(error)}; `ray start "
                "--head` starts one and prints its address"
            ) from error

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]:
        ray = self._ray
        self._check(jobs)
        # a Ray worker that ends kills its children, and so the guard, which has to end the processes of the run
        spared = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
        task = ray.remote(max_retries=0, scheduling_strategy="SPREAD", runtime_env=spared)(_on_node)
        before = {job.key: attempts(job) for job in jobs}
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
        finally:  # if iteration stops early, the other runs are not observed any more
            for ref in waiting:
                ray.cancel(ref, force=True)

    def _check(self, jobs: Sequence[Job]) -> None:
        """Raise ValueError for jobs that no node can take; Ray would let them wait for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for job in jobs:
            if not any(node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= job.gpus for node in nodes):
                raise ValueError(
                    f"`engine` (='ray'): {job.key} asks for a CPU and {job.gpus} GPUs, which none of the cluster's "
                    f"{len(nodes)} nodes has; `ray status` shows what there is"
                )

    def _outcome(self, ref: Any, job: Job, before: tuple[str, str]) -> Outcome:
        """The outcome of a task; if Ray only reports that it is lost, the outcome is read from the folder."""
        errors = self._ray.exceptions
        try:
            return seen(self._ray.get(ref), job)
        except errors.TaskCancelledError:
            kind, said = "interrupt", "the run was interrupted"
        except errors.OutOfMemoryError as error:
            kind, said = "out of memory", f"Ray killed its worker for want of memory: {first_line(error)}"
        except errors.RayTaskError as error:  # our code failed at its start or end: no workbench, no folder there
            kind = "disk" if isinstance(error.cause, OSError) else "kernel death"
            said = f"its node could not run it: {type(error.cause).__name__}: {error.cause}"
        except errors.RayError as error:
            kind, said = "kernel death", f"its node or worker died: {type(error).__name__}: {first_line(error)}"
        return outcome_of_lost(job, before, kind, said)


def _reach(address: str) -> None:
    """Raise OSError or ValueError at once if the address does not answer; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or (host and not port.isdecimal()):
        raise ValueError("give it as host:port, from a machine that is a node of the cluster")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _on_node(job: Job) -> Outcome:
    """Execute a job in a Ray worker; cancelling its task acts as Ctrl-C, which ends the run cleanly."""
    import ray

    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    # Ray limits a task to one thread for each of its CPUs: timings would use one thread
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
