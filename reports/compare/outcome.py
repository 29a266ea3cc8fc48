"""A run as the pages about many runs see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eval.record.reading import row
from eval.record.rows import RunRecord, typed


@dataclass(frozen=True)
class Failure:
    """Why a run failed. kind: of the failure, such as "out of memory"; lines: the last ones that it printed."""

    kind: str
    cell: int | None
    cell_title: str
    error: str
    lines: tuple[str, ...]
    peak_memory_bytes: float | None
    seconds: float | None
    attempts: int | None


@dataclass(frozen=True)
class RunOutcome:
    """One run. status: finished, failed, running, waiting; href: of its folder, relative to the page; record: as it is
    read; stale: finished, but with code of the workbench that has changed since."""

    key: str
    notebook: str
    status: str
    href: str = ""
    record: Mapping[str, Any] | None = None
    failure: Mapping[str, object] | None = None
    parameters: Mapping[str, object] | None = None
    command: str = ""
    stale: bool = False

    @cached_property
    def measured(self) -> RunRecord:
        """The record as typed rows, empty ones where there is no record."""
        return typed(self.record)

    @cached_property
    def failed(self) -> Failure | None:
        return row(Failure | None, self.failure)

    @property
    def shown_status(self) -> str:
        """The status as pages show it."""
        return f"{self.status} (stale)" if self.stale else self.status
