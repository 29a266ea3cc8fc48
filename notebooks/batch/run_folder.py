"""The folders of a run. A run is finished when its folder holds a valid manifest.

runs/<key>/                     notebook.ipynb, record.json, report.html, manifest.json; appears by one rename
runs/.<key>.<attempt>.running/  files that an attempt is writing; <attempt> is the random token of its lease
runs/.<key>.work/               finished blocks of attempts that were killed; the next attempt continues from them
runs/.<key>.lease               the attempt that works on the run
runs/<key>.failed/              the last attempt that failed: failure.json, and the notebook as far as it was executed

Only the attempt that holds the lease may put its folder in the place of the run, or of the failed one.
"""

import glob
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.record.files import sync, write_whole
from eval.record.manifest import MANIFEST, problems_of, read_manifest, seal
from eval.record.reading import DamagedError, read_json, read_object
from eval.record.schema import read_record
from notebooks.batch.leases import holder, remove_asides

FAILURE, JOB, LOG = "failure.json", "job.json", "worker.log"
NEEDED = ("notebook.ipynb", "record.json")
DERIVED = ("report.html",)  # drawn from the record, and drawn again when the page changes
_FAILURE_SHAPE = {
    "kind": str, "error": str, "lines": list, "key": str, "notebook": str, "values": dict, "cell": int,
    "cell_title": str, "seconds": int | float, "peak_memory_bytes": int | float, "attempts": int,
}  # fmt: skip
_LEFT = re.compile(
    r"\.(?P<hidden>.+?)(\.[0-9a-f]{16}\.running|\.old|\.work|\.lease(\.[0-9a-f]{16})?)|(?P<failed>.+)\.failed"
)


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run.

    Args:
        folder: the folder of the finished run, also before it exists.
        key: of the run; a finished run of another key in this folder does not count. "" for any key.
        attempt: the token of the attempt that writes; "" for a reader.
    """

    folder: Path
    key: str = ""
    attempt: str = ""

    @property
    def part(self) -> Path:
        """The folder that this attempt writes to; for a reader, that of the attempt that was started last."""
        if self.attempt:
            return self._beside(f".{{}}.{self.attempt}.running")
        return max(self._running(), key=_changed_ns, default=self._beside(".{}.running"))

    @property
    def work(self) -> Path:
        return self._beside(".{}.work")

    @property
    def lease(self) -> Path:
        return self._beside(".{}.lease")

    @property
    def failed(self) -> Path:
        return self._beside("{}.failed")

    @property
    def old(self) -> Path:
        return self._beside(".{}.old")

    def _beside(self, pattern: str) -> Path:
        return self.folder.with_name(pattern.format(self.folder.name))

    def _running(self) -> list[Path]:
        return list(self.folder.parent.glob(f".{glob.escape(self.folder.name)}.*.running"))

    def complete(self) -> bool:
        """Whether the run is finished, by its manifest and the content of its files."""
        return not self.problems()

    def problems(self) -> list[str]:
        """The reasons why this folder is not a finished run; [] if it is one."""
        try:
            manifest = read_manifest(self.folder)
        except DamagedError as error:
            return [str(error)]
        if not manifest:
            return ["it has no manifest"]
        wrong = problems_of(manifest, self.folder, self.key, DERIVED)
        return wrong + [f"{name} is missing" for name in NEEDED if name not in manifest["files"]]

    def holds_run(self) -> bool:
        """Whether this is, or was, the folder of a run, and not that of a saved model, or of another program."""
        book = NEEDED[0]
        return not self.folder.exists() or (self.folder / book).is_file() or book in self.manifest().get("files", {})

    def damage(self) -> str:
        """What has been damaged in a run of this key that was finished; "" for nothing."""
        try:
            own = self.key in ("", read_manifest(self.folder).get("key", self.key))
        except DamagedError as error:
            return str(error)
        return "; ".join(self.problems()) if own and (self.folder / MANIFEST).is_file() else ""

    def manifest(self) -> dict[str, Any]:
        """The manifest of the finished run; {} if there is none that can be read."""
        try:
            return read_manifest(self.folder)
        except DamagedError:
            return {}

    def attempts(self) -> list[str]:
        """The attempt that finished the run, and earlier ones whose models, saved elsewhere, are models of it, too."""
        manifest = self.manifest()
        return [manifest.get("attempt", ""), *manifest.get("earlier", [])]

    def failure(self) -> dict[str, Any]:
        """The failure of the last attempt; {} if none has failed since the run was finished."""
        try:
            made = read_object(self.failed / FAILURE, _FAILURE_SHAPE)
        except DamagedError as error:
            return {"kind": "damaged", "error": str(error)}
        if not made:
            return {}
        lines = [str(line) for line in made.get("lines", [])]
        return {"kind": "unknown"} | made | {"error": made.get("error") or "no reason was noted", "lines": lines}

    def owned(self) -> bool:
        """Whether this attempt still holds the lease on the run."""
        return bool(self.attempt) and holder(self.lease).get("token") == self.attempt

    def seal(self, about: dict[str, Any]) -> None:
        """Write the manifest of this attempt's folder.

        Raises:
            ValueError: the attempt did not finish the run; the message names the missing files.
        """
        if wrong := unfinished(self.part, about["key"]):
            raise ValueError(f"the run ended unfinished: {'; '.join(wrong)}")
        for name in (JOB, LOG):  # needed only to explain a failure
            (self.part / name).unlink(missing_ok=True)
        seal(self.part, about)

    def promote(self) -> None:
        """Move this attempt's folder to the place of the run; a finished run there is kept until then.

        Raises:
            ValueError: another attempt has taken the run over.
        """
        if not self.owned():
            raise ValueError("another attempt has taken this run over, because this one made no progress for too long")
        if self.folder.exists():
            if self.complete():
                shutil.rmtree(self.old, ignore_errors=True)
                os.rename(self.folder, self.old)
            else:  # for example written in Jupyter: it is kept
                os.rename(self.folder, _free(self._beside("{}.before")))
        os.rename(self.part, self.folder)
        sync(self.folder.parent)
        self._discard(self.old, self.failed, self.work)

    def restore(self) -> None:
        """Put the former run back that a killed attempt had moved aside. Only for the holder of the lease."""
        if self.old.is_dir() and not self.folder.exists():
            os.rename(self.old, self.folder)

    def killed(self) -> list[dict[str, Any]]:
        """The jobs of attempts whose folders are left: their parameters are in the job, or in the sealed manifest."""
        return [read_json(part / JOB) or read_json(part / MANIFEST) for part in self._running()]

    def tidy(self, *, finished: bool) -> None:
        """Remove the folders of killed attempts; of a finished run also its last failure and blocks of later attempts.

        Only for the holder of the lease.
        """
        self._discard(self.old, *self._running(), *((self.failed, self.work) if finished else ()))
        remove_asides(self.lease)

    def everything(self) -> list[Path]:
        """What is there of the run: its folder, those of failed, killed and earlier attempts, and finished blocks."""
        earlier = self.folder.parent.glob(f"{glob.escape(self.folder.name)}.before*")
        return [
            path
            for path in (self.folder, self.failed, self.work, self.old, *earlier, *self._running())
            if path.exists()
        ]

    def _discard(self, *folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def put_failed(self, failure: dict[str, Any]) -> None:
        """Keep this attempt's folder as the failed one, instead of an earlier one; on a full disk, if possible."""
        try:
            write_whole(json.dumps(failure, indent=1), self.part / FAILURE)
        except OSError:
            shutil.rmtree(self.part, ignore_errors=True)  # makes room for the most important lines
            write_whole(json.dumps(failure, indent=1), self.part / FAILURE)
        self._discard(self.failed)
        os.rename(self.part, self.failed)


def unfinished(part: Path, key: str) -> list[str]:
    """The missing parts of a finished run. papermill's marks and exit status are ignored: they can be wrong."""
    wrong = [f"{name} is missing" for name in NEEDED if not (part / name).is_file()]
    for i, cell in enumerate(executed(part / "notebook.ipynb")):
        if cell.kind != "code" or not cell.source.strip():
            continue
        if not cell.counted:
            wrong.append(f"cell {i} was never executed")
        if cell.failed:
            wrong.append(f"cell {i} failed")
    if wrong:
        return wrong[::-1]
    try:
        record = read_record(part / "record.json")
    except DamagedError as error:
        return [str(error)]
    return [] if record["run"]["key"] == key else [f"its record belongs to the run {record['run']['key']}"]


@dataclass(frozen=True)
class Executed:
    """A cell of a notebook that papermill executes. begun and ended: as papermill notes; counted: the kernel has
    executed it; failed: it ended with an error; printed: its outputs."""

    kind: str
    source: str
    begun: bool
    ended: bool
    counted: bool
    failed: bool
    printed: tuple[str, ...]


def executed(book: Path) -> list[Executed]:
    """The cells of a notebook that papermill writes at the moment; [] if it cannot be read now."""
    try:
        return [_executed(cell) for cell in read_json(book).get("cells", [])]
    except (AttributeError, KeyError, TypeError):  # it is no notebook
        return []


def _executed(cell: dict[str, Any]) -> Executed:
    times, outputs = cell["metadata"].get("papermill") or {}, cell.get("outputs", [])
    return Executed(
        cell["cell_type"],
        "".join(cell["source"]),
        bool(times.get("start_time")),
        bool(times.get("end_time")),
        cell.get("execution_count") is not None,
        any(output.get("output_type") == "error" for output in outputs),
        tuple("".join(output.get("text", "")) for output in outputs),
    )


def leftovers(runs: Path) -> set[str]:
    """The names of runs in a folder of which something else than the finished run is left, by one listing."""
    found = (_LEFT.fullmatch(name) for name in (os.listdir(runs) if runs.is_dir() else ()))
    return {match["hidden"] or match["failed"] for match in found if match}


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed a moment ago
        return 0


def _free(path: Path) -> Path:
    """This path, or the first one with a number behind it that does not exist."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())
