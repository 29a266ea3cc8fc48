"""A run in the form for the pages about many runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.record.compression import LayerRecord
from eval.record.reading import row
from eval.record.rows import RunRecord, typed
from eval.record.schema import read_record

# Parts of a record that only the page of its own run shows: most of a record's bytes. The layers are read again for
# the few runs whose errors are drawn, so that thousands of runs fit into memory.
OWN_PAGE = ("layers", "kept", "inputs", "folds", "drops", "allocation", "strengths", "bench", "cost", "efficiency",
            "speed_grid", "lossless", "search", "serving")  # fmt: skip


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
    """One run. status: finished, failed, damaged, running, waiting; href: of its folder, relative to the page; record:
    as read from the file, or typed; stale: finished, but the workbench's code has changed since then; provenance: as
    read from the file; source: the file, if the record has been read without its layers."""

    key: str
    notebook: str
    status: str
    href: str = ""
    record: Mapping[str, Any] | RunRecord | None = None
    failure: Mapping[str, object] | None = None
    parameters: Mapping[str, object] | None = None
    command: str = ""
    stale: bool = False
    provenance: Mapping[str, Any] | None = None
    source: Path | None = None

    @classmethod
    def of(cls, key: str, status: str, record: dict[str, Any], source: Path, **more: Any) -> "RunOutcome":
        """The outcome of a record, without what only its own page shows."""
        light = {name: value for name, value in record.items() if name not in OWN_PAGE}
        own = {"provenance": record["provenance"], "source": source if record["layers"] else None}
        return cls(key, record["run"]["notebook"], status, record=typed(light), **own, **more)

    @property
    def layers(self) -> tuple[LayerRecord, ...]:
        """The layers of the record; () if its file cannot be read any more."""
        if self.source is None:
            return self.measured.layers
        try:
            return row(tuple[LayerRecord, ...], read_record(self.source)["layers"])
        except ValueError:
            return ()

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
