"""The process in which papermill executes one run; its last step moves the run's folder to its place.

Whether a run is finished is decided by the content of its folder (`notebooks.batch.run_folder`), because papermill
marks cells as completed that never ran, and exits with status 0 after `sys.exit(0)`.
"""

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.record.reading import read_json
from kernels.support.errors import first_line
from notebooks.batch.run_folder import FAILURE, Executed, RunFolder, executed
from notebooks.batch.saved_model import saved_model
from notebooks.study.identity import ROOT
from notebooks.study.parameters import bounded

LINES = 20  # last lines of a failed cell's output
MOST_SAID = 4000  # characters of an error's message
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_DISK_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "Read-only file system")
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "Unable to allocate")


def main() -> int:
    """`python -m notebooks.batch.worker JOB.json`; returns 0 if the run is finished and in its place."""
    job = read_json(Path(sys.argv[1]))
    folder = RunFolder(Path(job["folder"]), job["key"], job["token"])
    _die_with(os.getppid())
    begin = time.monotonic()
    failure = _execute(job, folder)
    if failure is None:
        try:
            _promote(job, folder, round(time.monotonic() - begin, 1))
            return 0
        except ValueError as error:
            failure = {"kind": "incomplete", "error": str(error)}
        except OSError as error:
            failure = {"kind": _kind_of(error), "error": f"{type(error).__name__}: {error}"}
    failure["error"] = bounded(failure["error"], MOST_SAID)
    try:
        (folder.part / FAILURE).write_text(json.dumps(failure), encoding="utf-8")
    except OSError:
        print(json.dumps(failure))  # into the log, where the supervisor finds it unless the disk is full
    return 1


def _promote(job: dict[str, Any], folder: RunFolder, seconds: float) -> None:
    """Verify the files of the notebook, and move the run and its saved model to their places.

    A process that is killed between the two leaves a complete model that names its attempt: the next holder of the
    lease finishes the step.
    """
    model = saved_model(job["values"], job["key"], job["token"])
    _relink(folder, {folder.part: folder.folder} | ({model.part: model.place} if model else {}))
    about = {name: job[name] for name in ("key", "notebook", "values", "identity", "varied", "code")}
    only_saves = not job["force"] and folder.manifest().get("code") == job["code"] and folder.complete()
    earlier = folder.attempts() if only_saves else []  # nothing but the place of the model differs from theirs
    folder.seal(about | {"seconds": seconds, "attempt": job["token"], "earlier": earlier})
    if model:
        model.check_free()
        model.seal()
    folder.promote()
    if model:
        model.promote()


def _execute(job: dict[str, Any], folder: RunFolder) -> dict[str, Any] | None:
    """Run the notebook; returns its failure, or None if no failure was seen."""
    sys.modules.setdefault("rfc3987_syntax", None)  # saves two seconds for a grammar that no notebook's schema needs
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    out = folder.part / "notebook.ipynb"
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
    except RuntimeError as error:  # a kernel that did not start
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
    if name == "ValueError" and re.match(r"`\w+`", value):  # the form of our messages about an invalid parameter
        return "specification"
    return "cell"


def _kind_of(error: OSError) -> str:
    return "disk" if error.errno in _DISK else "cell"


def where(out: Path, index: int | None = None) -> dict[str, Any]:
    """The cell in which the run ended: the one that papermill names, or the last that was begun; and the heading
    above it."""
    cells = executed(out)
    if index is None:
        begun = [i for i, cell in enumerate(cells) if cell.begun]
        index = begun[-1] if begun else None
    lines = last_lines(cells[index].printed) if index is not None and index < len(cells) else []
    return {"cell": index, "cell_title": title_of(cells, index), "lines": lines}


def title_of(cells: Sequence[Executed], index: int | None) -> str:
    """The last heading above a cell."""
    above = "\n".join(cell.source for cell in cells[: (index or 0) + 1] if cell.kind == "markdown")
    return (re.findall(r"^#+ (.*)$", above, re.M) or [""])[-1]


def last_lines(texts: Sequence[str]) -> list[str]:
    """The last lines of an output, without colours and overwritten progress."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(texts))
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]
    return [line[:400] for line in lines if line][-LINES:]


def _relink(folder: RunFolder, places: dict[Path, Path]) -> None:
    """Make the notebook's links point to the final places of files, not to where they were written."""
    book = folder.part / "notebook.ipynb"
    before = text = book.read_text(encoding="utf-8")
    for written, final in places.items():
        text = text.replace(json.dumps(str(written))[1:-1], json.dumps(str(final))[1:-1])
    if text != before:
        book.write_text(text, encoding="utf-8")


def _die_with(parent: int) -> None:
    """End this process when its guard has ended, even if papermill waits for something."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
