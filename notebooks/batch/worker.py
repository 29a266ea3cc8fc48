"""The process in which papermill executes one run: values go in as Python, and the folder is promoted as the last act.

Whether a run is done is judged by what lies in its folder (`notebooks.batch.run_folder`): papermill marks cells as
    completed that never ran,
and ends with status 0 after `sys.exit(0)`.
"""

import errno
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from notebooks.batch.identity import ROOT
from notebooks.batch.leases import holder
from notebooks.batch.run_folder import FAILURE, RunFolder, read_json

LINES = 20  # of the end of what a failed cell said
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_DISK_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "Read-only file system")
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "Unable to allocate")


def main() -> int:
    """`python -m notebooks.batch.worker JOB.json`; 0 if the run stands in its place."""
    job = read_json(Path(sys.argv[1]))
    places = RunFolder(Path(job["folder"]), job["key"])
    _die_with(os.getppid())
    begin = time.monotonic()
    failure = _execute(job, places)
    if failure is None:
        try:
            _relink(places)
            places.seal(job, {"seconds": round(time.monotonic() - begin, 1), "attempt": job["token"]})
            if holder(places.lease).get("token") != job["token"]:
                raise ValueError("somebody else took the run over meanwhile")
            places.promote()
            return 0
        except ValueError as error:
            failure = {"kind": "incomplete", "error": str(error)}
        except OSError as error:
            failure = {"kind": _kind_of(error), "error": f"{type(error).__name__}: {error}"}
    try:
        (places.part / FAILURE).write_text(json.dumps(failure), encoding="utf-8")
    except OSError:
        print(json.dumps(failure))  # to the log; the guard's owner finds it there, if the disk took that much
    return 1


def _execute(job: dict[str, Any], places: RunFolder) -> dict[str, Any] | None:
    """Run the notebook; what went wrong, None if nothing seems to have."""
    sys.modules.setdefault("rfc3987_syntax", None)  # two seconds of grammar that no notebook's schema asks for
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    out = places.part / "notebook.ipynb"
    try:
        papermill.execute_notebook(
            job["path"], str(out), parameters=job["given"], cwd=str(ROOT), progress_bar=False, log_output=False
        )
        return None
    except PapermillExecutionError as error:
        kind, said = _kind_of_cell(error.ename, error.evalue), f"{error.ename}: {error.evalue}"
        return where(out, error.cell_index) | {"kind": kind, "error": said, "lines": last_lines(error.traceback)}
    except DeadKernelError as error:
        return where(out) | {"kind": "kernel death", "error": first_line(error)}
    except RuntimeError as error:  # a kernel that never came up
        return {"kind": "kernel death", "error": first_line(error), "transient": "before replying" in str(error)}
    except OSError as error:
        return {
            "kind": _kind_of(error),
            "error": f"{type(error).__name__}: {error}",
            "transient": error.errno in (errno.EADDRINUSE, errno.EAGAIN),
        }
    except Exception as error:  # a kernel that is not installed, a notebook that papermill cannot read
        return {"kind": "specification", "error": f"{type(error).__name__}: {first_line(error)}"}


def _kind_of_cell(name: str, value: str) -> str:
    if name == "KeyboardInterrupt":
        return "interrupt"
    if "OutOfMemory" in name or name == "MemoryError" or any(word in value for word in _MEMORY_WORDS):
        return "out of memory"
    if any(word in value for word in _DISK_WORDS):
        return "disk"
    if name == "ValueError" and re.match(r"`\w+`", value):  # the house's way of naming a parameter that will not do
        return "specification"
    return "cell"


def _kind_of(error: OSError) -> str:
    return "disk" if error.errno in _DISK else "cell"


def where(out: Path, index: int | None = None) -> dict[str, Any]:
    """The cell in which it ended: the one that papermill names, or the last that was begun; and the heading above
    it."""
    cells = read_json(out).get("cells", [])
    if index is None:
        begun = [i for i, cell in enumerate(cells) if (cell["metadata"].get("papermill") or {}).get("start_time")]
        index = begun[-1] if begun else None
    return {"cell": index, "cell_title": title_of(cells, index), "lines": _said(cells, index)}


def title_of(cells: list[dict[str, Any]], index: int | None) -> str:
    """The last heading above a cell."""
    above = "\n".join("".join(cell["source"]) for cell in cells[: (index or 0) + 1] if cell["cell_type"] == "markdown")
    return (re.findall(r"^#+ (.*)$", above, re.M) or [""])[-1]


def _said(cells: list[dict[str, Any]], index: int | None) -> list[str]:
    if index is None or index >= len(cells):
        return []
    return last_lines(["".join(output.get("text", "")) for output in cells[index].get("outputs", [])])


def last_lines(texts: list[str]) -> list[str]:
    """The end of what was said, without colours and overwritten progress."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(texts))
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]
    return [line[:400] for line in lines if line][-LINES:]


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _relink(places: RunFolder) -> None:
    """The notebook's links point at where it was written: make them point at where it will stand."""
    book = places.part / "notebook.ipynb"
    text = book.read_text(encoding="utf-8")
    moved = text.replace(json.dumps(str(places.part))[1:-1], json.dumps(str(places.folder))[1:-1])
    if moved != text:
        book.write_text(moved, encoding="utf-8")


def _die_with(parent: int) -> None:
    """End this process when its guard is no more, whatever papermill waits for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
