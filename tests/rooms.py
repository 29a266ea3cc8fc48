"""The tests of one room, for `make quick ROOM=compress/kv`.

A room is a folder of a package. Its tests are the files of tests/<package>/ whose names begin with the folder's
(`test_kv*.py`); where there are none, the files that import from the folder.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "eval", "kernels", "reports", "notebooks")


def rooms() -> dict[str, list[str]]:
    """Every room that has tests, with their paths below the root."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        tests = sorted((ROOT / "tests" / package).glob("test_*.py"))
        for folder in sorted(path.parent for path in (ROOT / package).glob("*/__init__.py")):
            imports = re.compile(rf"^\s*(from|import) {package}(\.| import ){folder.name}\b", re.M)
            own = [path for path in tests if path.name.startswith(f"test_{folder.name}")]
            own = own or [path for path in tests if imports.search(path.read_text(encoding="utf-8"))]
            if own:
                found[f"{package}/{folder.name}"] = [str(path.relative_to(ROOT)) for path in own]
    return found


def files_of(room: str) -> list[str]:
    """The test files of a room.

    Raises:
        ValueError: there is no such room; the message lists all.
    """
    every = rooms()
    if (name := room.strip("/")) not in every:
        raise ValueError(f"`ROOM` (={room}) must be one of {', '.join(every)}")
    return every[name]


if __name__ == "__main__":
    try:
        print(*files_of(sys.argv[1] if len(sys.argv) > 1 else ""))
    except ValueError as error:
        sys.exit(str(error))
