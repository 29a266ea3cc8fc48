"""Runs as jobs of a SLURM cluster, through submitit."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.record.files import write_whole
from kernels.support.errors import first_line
from notebooks.batch.engines import lost
from notebooks.batch.engines.lost import attempts, failure, outcome_of_lost, seen
from notebooks.batch.job import Job, Outcome, execute
from notebooks.batch.leases import RENEW_S, STALE_S
from notebooks.batch.run_folder import FAILURE, RunFolder
from notebooks.batch.sweep.resources import SlurmOptions

EVERY_S = 1.0  # between two checks of the jobs
ASKED_S = 30.0  # between two queries to SLURM about jobs without a result
PREEMPTED_S = 300.0  # after which a preempted job that was not queued again is given up
SIGNAL_S = 90  # time before its limit at which a job is told to end
ARRAY = 1000  # jobs that are submitted at once, as one array: SLURM's usual limit


class Slurm:
    """Executes runs on a SLURM cluster whose nodes have this workbench (`pip install -e .[slurm]`) and the runs folder.

    Every run is a job with the resources of `options`, and the GPUs that it needs, on one node. Runs keep the key
    under which they were planned and execute the sweep's snapshot of the code, as on a Ray cluster. The files of
    submitit are in `.slurm` in the folder of runs, and stay there for the runs that failed.

    SLURM queues a job again that it preempted, or whose node failed; the run then takes over the lease of the previous
    attempt, and continues from its finished blocks. A job near its time limit is ended as a failure of the kind
    `timeout`; `workbench resume`, with more time or without, continues from its finished blocks, too. `stop` cancels
    the jobs. Jobs continue if the driver is killed.

    Args:
        runs: the folder of runs.
        parallel: the largest number of jobs at once; None: as many as SLURM allows.
        cluster: "slurm"; "local" executes the jobs as processes of this machine, for tests.

    Raises:
        ValueError: submitit is not installed, or this machine cannot submit jobs; from `run`, before anything is
            submitted, SLURM refuses the options.
    """

    def __init__(
        self, runs: Path, options: SlurmOptions | None = None, *, parallel: int | None = None, cluster: str = "slurm"
    ):
        try:
            import submitit
        except ImportError as error:
            raise ValueError("`engine` (='slurm') needs the extra `slurm`: pip install -e .[slurm]") from error
        if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            raise ValueError(
                "`engine` (='slurm'): there is no `sbatch` on this machine; run the command on a login node"
            )
        if parallel is not None and (type(parallel) is not int or parallel < 1):
            raise ValueError(f"`parallel` (={parallel!r}) must be a positive number of jobs at once")
        self._submitit, self._cluster = submitit, cluster
        self.runs, self.options, self.parallel = Path(runs), options or SlurmOptions(), parallel or ARRAY

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]:
        if self._cluster == "slurm":
            for gpus in sorted({job.gpus for job in jobs}):
                self._check(gpus)
        folder = self.runs / ".slurm" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        before = {job.key: attempts(job) for job in jobs}
        waiting: dict[Any, Job] = {}
        outcomes: list[Outcome] = []
        asked, cancelled = time.monotonic(), False
        watch = _Watch()
        try:
            self._submit(jobs, folder, waiting)
            while waiting:
                if self._cluster == "slurm" and time.monotonic() - asked > ASKED_S:
                    next(iter(waiting)).watcher.update()  # for all of them in one query
                    asked = time.monotonic()
                for sent in [sent for sent in waiting if watch.over(sent, cancelled)]:
                    job = waiting.pop(sent)
                    outcomes.append(self._outcome(sent, job, before[job.key], cancelled))
                    _forget(sent)
                    if outcomes[-1].status in ("finished", "known"):
                        shutil.rmtree(sent.paths.folder, ignore_errors=True)
                    yield outcomes[-1]
                if stop.is_set() and not cancelled:
                    cancelled = True
                    for sent in waiting:
                        sent.cancel(check=False)
                time.sleep(EVERY_S if waiting else 0)
        finally:  # if iteration stops early, the other jobs are not observed any more
            for sent in waiting:
                sent.cancel(check=False)
                _forget(sent)
        if all(one.status in ("finished", "known") for one in outcomes):
            shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, jobs: Sequence[Job], folder: Path, waiting: dict[Any, Job]) -> None:
        """Submit all jobs, and put them into `waiting`: as one array for all jobs with the same resources.

        Raises:
            ValueError: a submission was refused; the earlier ones are in `waiting`.
        """
        for gpus in sorted({job.gpus for job in jobs}):
            alike = [job for job in jobs if job.gpus == gpus]
            for start in range(0, len(alike), ARRAY):
                executor = self._submitit.AutoExecutor(folder=folder / "%j", cluster=self._cluster)
                executor.update_parameters(**self._parameters(gpus))
                part = alike[start : start + ARRAY]
                try:
                    with executor.batch():
                        sent = [executor.submit(_on_node, job, self.options) for job in part]
                except (self._submitit.core.utils.FailedJobError, OSError, RuntimeError) as error:
                    raise ValueError(f"`engine` (='slurm'): SLURM took no job: {_last_line(str(error))}") from error
                waiting.update(zip(sent, part, strict=True))

    def _parameters(self, gpus: int) -> dict[str, Any]:
        """The parameters for submitit; names that begin with `slurm_` are those of `sbatch`."""
        asked = self.options
        own = {name: getattr(asked, name) for name in ("partition", "account", "qos", "constraint", "exclusive")}
        return {
            "name": "workbench",
            "timeout_min": asked.time_min,
            "cpus_per_task": asked.cpus,
            "mem_gb": asked.memory_gb,
            "gpus_per_node": gpus or None,
            "slurm_signal_delay_s": SIGNAL_S,
            "slurm_array_parallelism": self.parallel,
            "slurm_additional_parameters": {"requeue": True},
        } | {f"slurm_{name}": value for name, value in own.items() if value}

    def _check(self, gpus: int) -> None:
        """Ask SLURM whether it would accept such a job; nothing is submitted."""
        asked = self.options
        flags = [f"--{name}={getattr(asked, name)}" for name in ("partition", "account", "qos", "constraint")]
        flags = [flag for flag in flags if not flag.endswith("=")]
        flags += [f"--time={asked.time_min}", f"--cpus-per-task={asked.cpus}"]
        flags += [f"--mem={int(asked.memory_gb * 1024)}MB"] if asked.memory_gb else []
        flags += [f"--gpus-per-node={gpus}"] if gpus else []
        flags += ["--exclusive"] if asked.exclusive else []
        try:
            said = subprocess.run(
                ["sbatch", "--test-only", *flags, "--wrap=true"], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"`engine` (='slurm'): SLURM does not respond: {first_line(error)}") from error
        if said.returncode:
            raise ValueError(
                f"`slurm` ({' '.join(flags)}): SLURM would refuse such a job: {_last_line(said.stderr)}; `sinfo` shows "
                "what there is"
            )

    def _outcome(self, sent: Any, job: Job, before: tuple[str, str], cancelled: bool) -> Outcome:
        """The outcome of a job; if SLURM only reports that it is gone, the outcome is read from the folder."""
        log = f"see {sent.paths.stderr}"
        if sent.paths.result_pickle.exists():
            try:
                return seen(sent.result(), job)
            except self._submitit.core.utils.FailedJobError as error:
                said = _last_line(str(error).rpartition("\n----")[0])
                kind = "disk" if "OSError" in said or "PermissionError" in said else "kernel death"
                return outcome_of_lost(job, before, kind, f"its node could not run it: {said}; {log}")
        state = sent.state.upper().partition(" ")[0]
        if cancelled or state in ("CANCELLED", "PREEMPTED"):
            kind, said = "interrupt", "the run was interrupted" if cancelled else f"SLURM says {state}"
        elif state in ("TIMEOUT", "DEADLINE"):
            kind, said = "timeout", f"SLURM ended it at its limit of {self.options.time_min} minutes (`time_min`)"
        elif state == "OUT_OF_MEMORY":
            kind, said = "out of memory", f"it needed more memory than allowed (`memory_gb`={self.options.memory_gb})"
        else:
            kind, said = "kernel death", f"its job ended without a result (SLURM reports {state}); {log}"
        return outcome_of_lost(job, before, kind, said)


def _forget(sent: Any) -> None:
    """Remove what a job was to read when it starts: it is over."""
    with contextlib.suppress(OSError):
        sent.paths.submitted_pickle.unlink(missing_ok=True)


def queued(runs: Path) -> bool:
    """Whether jobs may still be queued or running that a driver submitted which did not live to see their end.

    They execute the code with which they were planned. A job without a result counts until its folder is removed.
    """
    submitted = (runs / ".slurm").glob("*/*/*_submitted.pkl")
    return any(not list(path.parent.glob("*_result.pkl")) for path in submitted)


class _Watch:
    """Finds ended jobs: their result exists, or SLURM has reported for a while that they do not run any more."""

    def __init__(self) -> None:
        self._gone: dict[Any, float] = {}

    def over(self, sent: Any, cancelled: bool) -> bool:
        if sent.paths.result_pickle.exists():
            return True
        now = time.monotonic()
        preempted = sent.state.upper() == "PREEMPTED"  # submitit lets such a job wait, for ever if it is not requeued
        if not preempted and not sent.done():
            self._gone.pop(sent, None)
            return False
        for_s = 0.0 if cancelled else PREEMPTED_S if preempted else lost.SEEN_S
        return now - self._gone.setdefault(sent, now) >= for_s


def _on_node(job: Job, options: SlurmOptions) -> Outcome:
    """A job on a node of the cluster.

    SLURM sends a signal before it ends a job; the run is then ended cleanly. Near the time limit that is its failure.
    Else SLURM decides: a preempted job is queued again, and executed here again. A written result would end the job for
    its driver, so that this process ends without one.
    """
    from submitit import JobEnvironment

    near_limit = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
    begin, got = time.monotonic(), []
    for number in (near_limit, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: got.append(number))
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    more = {} if job.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    job = replace(job, threads=options.cpus if options.cpus < own else None, environment=job.environment | more)
    outcome = execute(job, lambda: bool(got))
    while outcome.status == "busy" and _is_restart() and time.monotonic() - begin < STALE_S + 4 * RENEW_S and not got:
        time.sleep(RENEW_S)  # until the lease of the preempted attempt runs out
        outcome = execute(job, lambda: bool(got))
    if not got or outcome.status in ("finished", "known"):
        return outcome
    if near_limit in got and time.monotonic() - begin > 60 * options.time_min - SIGNAL_S - 60:
        said = f"it came close to its limit of {options.time_min} minutes (`time_min` of `slurm`) and was stopped"
        told = outcome.failure | failure(job, "timeout", said)
        write_whole(json.dumps(told, indent=1), RunFolder(Path(job.folder)).failed / FAILURE)
        return replace(outcome, failure=told)
    raise SystemExit(128 + got[0])


def _is_restart() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" -")), "no reason was given")
