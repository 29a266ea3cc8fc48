"""Execution of runs: local threads, a Ray cluster, or SLURM. An engine takes jobs and yields outcomes as they end.

Engines keep no state: the lease names the attempt that works on a run, and the folder shows whether it is finished.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from notebooks.batch.job import Job, Outcome

ENGINES = ("local", "ray", "slurm")


class Engine(Protocol):
    """Yields an outcome per job, in the order in which they end; interrupts running jobs after `stop` is set."""

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]: ...
