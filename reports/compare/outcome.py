"""A run in the form for the pages about many runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eval.record.reading import row
from eval.record.rows import RunRecord, typed


@dataclass(frozen=True)
class Failure:
    """The reason why a run failed. kind: of the failure, such as "out of memory"; lines: the last printed lines."""

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
    """One run. status: finished, failed, running, waiting; href: of its folder, relative to the page; record: as read
    from the file; stale: finished, but the workbench's code has changed since then."""

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
        """The record as typed rows, which are empty if there is no record."""
        return typed(self.record)

    @cached_property
    def failed(self) -> Failure | None:
        return row(Failure | None, self.failure)

    @property
    def shown_status(self) -> str:
        """The status as text for the pages."""
        return f"{self.status} (stale)" if self.stale else self.status
