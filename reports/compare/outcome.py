"""What pages about many runs know of one."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunOutcome:
    """One run as pages see it. status: finished, failed, running, waiting; href: of its folder, relative to the page;
    failure: {kind, cell, cell_title, error, lines, peak_memory_bytes, seconds, attempts}."""

    key: str
    notebook: str
    status: str
    href: str = ""
    record: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    command: str = ""
