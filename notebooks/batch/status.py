"""Sweeps that were started: their folders, and the state of each of their runs.

A run is finished when its folder holds a valid manifest; everything else is read from the folders beside it.
"""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.record.files import write_whole
from eval.record.reading import DamagedError, read_json, read_object
from notebooks.batch.job import is_stale, state
from notebooks.batch.run_folder import RunFolder, executed
from notebooks.batch.sweep import Planned, Sweep
from notebooks.batch.worker import title_of
from notebooks.study.bars import BARS
from notebooks.study.identity import RUNS, packages_code
from notebooks.study.parameters import short_repr

OTHER_CODE = "the workbench's code has changed since; `--stale` runs it again"
_WIDE = 80  # characters of the parameters in a table
_PLAN = {
    "title": str, "description": str, "file": str, "runs": list, "timeout_s": int | float, "cell_timeout_s": int,
}  # fmt: skip
_BAR = {"what": str, "done": int | float, "total": int | float, "unit": str, "left_s": int | float}


def state_of(folder: str | Path, key: str, values: dict[str, Any], code: str) -> str:
    """As `notebooks.batch.job.state`, and stale for a finished run of other code than this (`packages_code`)."""
    now = state(folder, key, values)
    return "stale" if now == "finished" and is_stale(RunFolder(Path(folder)).manifest(), code) else now


def runs_folder(given: str | Path = "") -> Path:
    """The folder of runs: the given one, else $WORKBENCH_RUNS, else runs/ of the checkout or of the current folder."""
    return Path(given or os.environ.get("WORKBENCH_RUNS") or RUNS).expanduser().absolute()


def sweep_name(what: str | Path) -> str:
    """The name of a sweep that is given by its name or by its file."""
    path = Path(what)
    return path.stem if path.suffix in (".yml", ".yaml") else path.name


def sweep_folder(name: str, runs: Path = RUNS) -> Path:
    """The folder of a sweep that was started, with its YAML, its plan and its comparison."""
    return runs / "sweeps" / name


def keep_sweep(sweep: Sweep, runs: Path) -> None:
    """Store the sweep and its plan, so that its runs are found again after changes of code or YAML."""
    folder = sweep_folder(sweep.name, runs)
    asked = [
        {
            "key": one.key,
            "notebook": one.notebook,
            "values": one.values,
            "varied": one.varied,
            "folder": str(folder_of(one, runs)),
        }
        for one in sweep.runs
    ]
    made = {
        "title": sweep.title,
        "description": sweep.description,
        "file": sweep.file,
        "runs": asked,
        "timeout_s": sweep.timeout_s,
        "cell_timeout_s": sweep.cell_timeout_s,
    }
    write_whole(json.dumps(made, indent=1), folder / "plan.json")
    write_whole(sweep.source, folder / "sweep.yml")


def check_name(sweep: Sweep, runs: Path) -> None:
    """Raise ValueError if a sweep of this name, but of another file, was started in this folder of runs.

    Both would be kept in one folder, and `resume`, `status` and `compare` could not tell them apart.
    """
    folder = sweep_folder(sweep.name, runs)
    before = read_json(folder / "plan.json", _PLAN).get("file", "")
    if not sweep.source or not before or before == sweep.file or not Path(before).is_file():
        return
    if Path(before).is_relative_to(folder) or Path(sweep.file).is_relative_to(folder):  # the copy that is kept here
        return
    raise ValueError(
        f"`sweep` (={sweep.name!r}): {before} was started in {runs} under the same name; rename {sweep.file}, or name "
        "another folder with --runs"
    )


def kept_sweep(name: str, runs: Path = RUNS) -> dict[str, Any]:
    """The plan of a sweep at its last start.

    Raises:
        ValueError: the sweep was never started in this folder of runs, or its stored plan is damaged.
    """
    try:
        made = read_object(sweep_folder(name, runs) / "plan.json", _PLAN)
        if wrong := [one for one in made.get("runs", []) if not _is_planned(one)]:
            raise DamagedError(f"plan.json is damaged: {short_repr(wrong[0])} is no run")
    except DamagedError as error:
        raise ValueError(f"`sweep` (={name!r}): {error}; `workbench run` of its file writes the plan again") from error
    if not made:
        known = sorted(path.parent.name for path in runs.glob("sweeps/*/plan.json"))
        raise ValueError(
            f"`sweep` (={name!r}) was not started here; started sweeps in {runs}: {', '.join(known) or 'none'}"
        )
    return {"title": name, "file": "", "runs": [], "timeout_s": None, "cell_timeout_s": None} | made


def _is_planned(one: Any) -> bool:
    """Whether this is a run of a stored plan."""
    kinds = {"key": str, "notebook": str, "values": dict, "folder": str}
    return isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in kinds.items())


def last_sweep(runs: Path = RUNS) -> str:
    """The sweep that was started last.

    Raises:
        ValueError: no sweep was started.
    """
    kept = sorted(runs.glob("sweeps/*/plan.json"), key=lambda path: path.stat().st_mtime)
    if not kept:
        raise ValueError(f"`sweep` is needed: none was started in {runs} yet")
    return kept[-1].parent.name


def status(sweep: str | None = None, *, runs: Path = RUNS, lines: bool = False) -> str:
    """The state of the runs of a sweep at its last start, or of the last sweep, as a table.

    Args:
        lines: with the last lines of failed runs.

    Raises:
        ValueError: no such sweep was started here.
    """
    kept = kept_sweep(sweep_name(sweep) if sweep else last_sweep(runs), runs)
    rows = [["#", "notebook", "parameters", "state", "time", "what", "key"]]
    said, code = [], packages_code()
    for i, one in enumerate(kept["runs"], start=1):
        places = RunFolder(Path(one["folder"]), one["key"])
        now = state_of(places.folder, one["key"], one["values"], code)
        failure = places.failure() if now == "failed" else {}
        took = places.manifest().get("seconds") if now in ("finished", "stale") else failure.get("seconds")
        shown = [varied_parameters(one), now, "" if took is None else duration(took), _what(places, now, failure)]
        rows.append([str(i), Path(one["notebook"]).stem, *shown, one["key"]])
        if failure and lines:
            peak = failure.get("peak_memory_bytes")
            memory = f"  at most {peak / 1e6:,.0f} MB" if peak else "  memory not known"
            printed = [f"  | {line}" for line in failure.get("lines", [])]
            said += ["", f"{one['key']}: {failure['error']}", memory, *printed]
    counts = Counter(row[3] for row in rows[1:])
    total = ", ".join(f"{count} {word}" for word, count in counts.items())
    if counts["stale"]:
        total += f"\nstale: {OTHER_CODE}"
    if counts["damaged"]:
        total += "\ndamaged: what was finished is not whole any more; `run` executes it again and keeps the old folder"
    return "\n".join([kept["title"], "", aligned(rows), "", total, *said])


def _what(places: RunFolder, state: str, failure: dict[str, Any]) -> str:
    """What a run does, or the reason of its state."""
    if state == "running":
        return doing(places) + bar_of(places)
    if state == "damaged":
        return places.damage()[:100]
    if not failure:
        return ""
    where = f" in “{failure['cell_title']}”" if failure.get("cell_title") else ""
    return f"{failure['kind']}{where}: {(failure['error'].splitlines() or [''])[0][:70]}"


def doing(places: RunFolder) -> str:
    """The present work of a run: the section of its notebook, or the run for which it waits."""
    with contextlib.suppress(OSError):
        return (places.part / ".waiting").read_text(encoding="utf-8")
    cells = executed(places.part / "notebook.ipynb")
    if not cells:
        return "starts"
    now = min(sum(cell.ended for cell in cells), len(cells) - 1)
    title = title_of(cells, now)
    return f"“{title}”, cell {now + 1} of {len(cells)}" if title else f"cell {now + 1} of {len(cells)}"


def bar_of(places: RunFolder) -> str:
    """The progress of a run within its cell, as words that follow those of `doing`; "" if it shows no bar."""
    bar = read_json(places.part / BARS, _BAR)
    if not {"what", "done", "total", "unit"} <= bar.keys():
        return ""
    left = f", about {duration(bar['left_s'])} left" if "left_s" in bar else ""
    return f", {bar['what']}: {bar['done']} of {bar['total']} {bar['unit']}{'s' * (bar['total'] != 1)}{left}"


def left_in_cell(places: RunFolder) -> float:
    """The remaining seconds by the bar of a run's cell; 0 if there is no bar, or one that has just begun."""
    return read_json(places.part / BARS, _BAR).get("left_s", 0.0)


def folder_of(planned: Planned, runs: Path = RUNS) -> Path:
    return Path(planned.values.get("run_path") or runs / planned.key).expanduser().absolute()


def finished_runs(runs: Path = RUNS) -> list[dict[str, Any]]:
    """The manifests of all finished runs in a folder."""
    found = [RunFolder(folder).manifest() for folder in run_folders(runs)]
    return [made for made in found if {"key", "notebook", "values", "identity", "seconds", "finished"} <= made.keys()]


def run_folders(runs: Path = RUNS) -> list[Path]:
    """The runs in a folder of runs, without unfinished, failed or temporary folders."""
    aside = re.compile(r"\..*|.*\.(failed|before(-\d+)?)|sweeps")
    return [path for path in sorted(runs.glob("*")) if path.is_dir() and not aside.fullmatch(path.name)]


def varied_parameters(planned: Planned | dict[str, Any]) -> str:
    """The parameters by which a run differs from the others of its sweep."""
    values, varied = (
        (planned.values, planned.varied)
        if isinstance(planned, Planned)
        else (planned["values"], planned.get("varied") or ())
    )
    text = ", ".join(f"{name}={short_repr(values[name])}" for name in varied if name in values)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}…"


def duration(seconds: float | None) -> str:
    """A time in the usual words; ? if it is not known."""
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells as text in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
