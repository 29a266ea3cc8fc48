"""Runs on this machine, in threads that each wait for one process."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace

from notebooks.batch.job import Job, Outcome, execute


class Local:
    """Executes runs on this machine, `parallel` at once; each run alone uses the number of GPUs that it needs.

    Raises:
        ValueError: `parallel` is no positive number; from `run`, a job needs more GPUs than there are.
    """

    def __init__(self, parallel: int = 1):
        if type(parallel) is not int or parallel < 1:
            raise ValueError(f"`parallel` (={parallel!r}) must be a positive number of runs at once")
        self.parallel = parallel

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]:
        gpus = visible_gpus() if any(job.gpus for job in jobs) else []
        for job in jobs:
            if job.gpus > max(1, len(gpus)):
                raise ValueError(
                    f"`gpus` (={job.gpus}) of {job.key}: {len(gpus)} can be used here; that number, or fewer, works"
                )
        pool_of_gpus = _Gpus(gpus)
        threads = max(1, (os.cpu_count() or 1) // self.parallel) if self.parallel > 1 else None

        def one(job: Job) -> Outcome:
            if stop.is_set():
                return Outcome(job.key, "waiting", job.folder)
            # cuda:1 names its GPU itself
            own = gpus and job.gpus and (self.parallel > 1 or job.gpus > 1) and ":" not in str(job.values.get("device"))
            try:
                with pool_of_gpus.taken(job.gpus if own else 0) as taken:
                    more = {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
                    return execute(replace(job, threads=threads, environment=job.environment | more), stop.is_set)
            except Exception as error:  # the other runs continue
                kind = "disk" if isinstance(error, OSError) else "incomplete"
                return Outcome(
                    job.key, "failed", job.folder, {"kind": kind, "error": f"{type(error).__name__}: {error}"}
                )

        with ThreadPoolExecutor(self.parallel, "run") as pool:
            futures = [pool.submit(one, job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()


class _Gpus:
    """The GPUs that no run uses at the moment."""

    def __init__(self, free: Sequence[str]):
        self.free, self.changed = list(free), threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """This number of GPUs, as soon as they are free: all at once, so that no two runs wait for each other."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            own, self.free[:count] = self.free[:count], []
        try:
            yield own
        finally:
            with self.changed:
                self.free += own
                self.changed.notify_all()


def visible_gpus() -> list[str]:
    """Numbers of the GPUs of this machine, or of those visible to this process; found without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.split() if asked.returncode == 0 else []
