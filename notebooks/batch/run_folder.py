"""A run's folder, which is the truth about it: it stands, whole and verified, or the run is not done.

runs/<key>/            notebook.ipynb, record.json, report.html, manifest.json; put here by one rename
runs/.<key>.running/   what is being made
runs/.<key>.work/      what is kept of a killed attempt, so that the next goes on from there
runs/.<key>.lease      who works on it
runs/<key>.failed/     the last attempt that failed: failure.json, and the notebook as far as it came
"""

import json
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval.record.schema import problems_of, write_whole
from notebooks.batch.identity import file_sha256

MANIFEST, FAILURE, JOB, LOG = "manifest.json", "failure.json", "job.json", "worker.log"
NEEDED = ("notebook.ipynb", "record.json", "report.html")
DERIVED = ("report.html",)  # from the record, and made anew when the page changes


@dataclass(frozen=True)
class RunFolder:
    """The places of one run; where its key is given, another run that stands there is none."""

    folder: Path
    key: str = ""

    @property
    def part(self) -> Path:
        return self._beside(".{}.running")

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

    def complete(self) -> bool:
        """Is the run done, as its manifest and its notebook say?"""
        return not self.problems()

    def problems(self) -> list[str]:
        """What keeps this folder from being a finished run; [] if nothing does."""
        made = read_json(self.folder / MANIFEST)
        if not made:
            return ["it has no manifest"]
        wrong = []
        if self.key and made.get("key") != self.key:
            wrong.append(f"it is the run {made.get('key')}")
        for name, told in made.get("files", {}).items():
            file = self.folder / name
            if not file.is_file():
                wrong.append(f"{name} is gone")
            elif name in DERIVED:
                continue
            elif file.stat().st_size != told["bytes"]:
                wrong.append(f"{name} is not as it was")
            elif file_sha256(file) != told["sha256"]:
                wrong.append(f"{name} has another content")
        return wrong + [f"{name} is missing" for name in NEEDED if name not in made.get("files", {})]

    def manifest(self) -> dict[str, Any]:
        """What the manifest says; {} without one."""
        return read_json(self.folder / MANIFEST)

    def failure(self) -> dict[str, Any]:
        """What was found of the last attempt that failed; {} if none did since the run was finished."""
        return read_json(self.failed / FAILURE)

    def seal(self, job: dict[str, Any], more: dict[str, Any]) -> None:
        """Write the manifest over all files of the part folder.

        Raises:
            ValueError: the part is no finished run; says what is wrong with it.
        """
        if wrong := unfinished(self.part, job["key"]):
            raise ValueError(f"the run ended unfinished: {'; '.join(wrong)}")
        for gone in (JOB, LOG):  # of interest only where it failed
            (self.part / gone).unlink(missing_ok=True)
        files = sorted(path for path in self.part.rglob("*") if path.is_file() and path.name != MANIFEST)
        listed = {
            str(path.relative_to(self.part)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in files
        }
        told = {name: job[name] for name in ("key", "notebook", "values", "identity", "varied")}
        made = {**told, **more, "finished": datetime.now(UTC).isoformat(timespec="seconds"), "files": listed}
        for path in files:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        write_whole(json.dumps(made, indent=1), self.part / MANIFEST)

    def promote(self) -> None:
        """Put the part in the folder's place by one rename; what stood there is kept aside until then."""
        if self.folder.exists():
            if self.complete():
                shutil.rmtree(self.old, ignore_errors=True)
                os.rename(self.folder, self.old)
            else:  # made by hand in Jupyter, say: not ours to delete
                os.rename(self.folder, _free(self._beside("{}.before")))
        os.rename(self.part, self.folder)
        for gone in (self.old, self.failed, self.work):
            shutil.rmtree(gone, ignore_errors=True)

    def tidy(self) -> None:
        """Take away what a promotion left that was killed right after it; only of a run that stands and nobody
        holds."""
        self.lease.unlink(missing_ok=True)
        for gone in (self.old, self.failed, self.work):
            shutil.rmtree(gone, ignore_errors=True)

    def recover(self) -> None:
        """Finish what a killed promotion left: the old run stands again if the new one does not."""
        if self.old.is_dir():
            if not self.folder.exists():
                os.rename(self.old, self.folder)
            else:
                shutil.rmtree(self.old, ignore_errors=True)

    def put_failed(self, failure: dict[str, Any]) -> None:
        """Keep a failed attempt for who wants to look; an earlier one goes. Works, as far as it can, on a full disk."""
        try:
            write_whole(json.dumps(failure, indent=1), self.part / FAILURE)
        except OSError:
            shutil.rmtree(self.part, ignore_errors=True)  # room for the few lines that matter most
            write_whole(json.dumps(failure, indent=1), self.part / FAILURE)
        shutil.rmtree(self.failed, ignore_errors=True)
        os.rename(self.part, self.failed)


def unfinished(part: Path, key: str) -> list[str]:
    """What is missing for a finished run; papermill's own marks and exit status are not asked, as they lie."""
    wrong = [f"{name} is missing" for name in NEEDED if not (part / name).is_file()]
    for i, cell in enumerate(read_json(part / "notebook.ipynb").get("cells", [])):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell.get("execution_count") is None:
            wrong.append(f"cell {i} was never executed")
        if any(output.get("output_type") == "error" for output in cell.get("outputs", [])):
            wrong.append(f"cell {i} failed")
    if wrong:
        return wrong[::-1]
    record = read_json(part / "record.json")
    wrong += [f"record.json: {problem}" for problem in problems_of(record)]
    if not wrong and record["run"]["key"] != key:
        wrong.append(f"its record is of {record['run']['key']}")
    return wrong


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none, or half of one."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        return made if isinstance(made, dict) else {}
    except (OSError, ValueError):
        return {}


def _free(path: Path) -> Path:
    tried = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(one for one in tried if not one.exists())
