"""What the checks of a run of `kernels.harness.validate` allow to be timed.

The kernel `overlapped` (`kernels.packed_matmul.hopper`), which can hang, is judged by its own checks alone; the other
kernels are judged op by op.
"""

import json
from pathlib import Path
from typing import Any

KERNEL = "overlapped"  # its checks, among those of int_matmul, have names that begin with it


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of `rows.jsonl` in the folder of a run; none if there is no such file."""
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def red_ops(lines: list[dict[str, Any]]) -> set[str]:
    """The ops that have a red check."""
    return {line["op"] for line in _checks(lines) if not line["green"] and not _own(line)}


def overlapped_is_green(lines: list[dict[str, Any]]) -> bool:
    """Whether every check of `overlapped` was run and is green. Checks are numbered; the one behind its last must have
    been run too, since only then its last is known."""
    green = {line["index"]: line["green"] for line in _checks(lines)}
    own = [line["index"] for line in lines if line.get("phase") == "checks" and _own(line)]
    run = bool(own) and all(number in green for number in range(min(own), max(own) + 2))
    return run and all(green[number] for number in own)


def _checks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "check"]


def _own(line: dict[str, Any]) -> bool:
    return line.get("name", "").startswith(KERNEL)
