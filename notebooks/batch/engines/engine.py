"""Where runs are executed: threads here, a Ray cluster, or SLURM. An engine takes jobs and gives outcomes as they come.

Engines keep no state: the lease says which attempt works on a run, and the folder whether it is finished.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from notebooks.batch.job import Job, Outcome

ENGINES = ("local", "ray", "slurm")


class Engine(Protocol):
    """Yields an outcome per job, in the order in which they end; interrupts what runs once `stop` is set."""

    def run(self, jobs: Sequence[Job], stop: threading.Event) -> Iterator[Outcome]: ...
