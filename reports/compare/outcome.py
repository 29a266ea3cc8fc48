"""What pages about many runs know of one."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunOutcome:
    """One run as pages see it. status: finished, failed, running, waiting; href: of its folder, relative to the page;
    failure: {kind, cell, cell_title, error, lines, peak_memory_bytes, seconds, attempts}; stale: finished with other
    code of the workbench than the present one."""

    key: str
    notebook: str
    status: str
    href: str = ""
    record: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    command: str = ""
    stale: bool = False

    @property
    def shown_status(self) -> str:
        """The status as pages show it."""
        return f"{self.status} (stale)" if self.stale else self.status
