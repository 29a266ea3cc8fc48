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
from eval.record.manifest import MANIFEST, read_json
from notebooks.batch.job import is_stale, state
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.sweep import Planned, Sweep
from notebooks.batch.worker import title_of
from notebooks.study.bars import BARS
from notebooks.study.identity import ROOT

RUNS = ROOT / "runs"
OTHER_CODE = "the workbench's code has changed since; `--stale` runs it again"
_WIDE = 80  # characters of the parameters in a table


def state_of(folder: str | Path, key: str, values: dict[str, Any]) -> str:
    """As `notebooks.batch.job.state`, and stale for a finished run of other code of the workbench."""
    now = state(folder, key, values)
    return "stale" if now == "finished" and is_stale(RunFolder(Path(folder)).manifest()) else now


def runs_folder(given: str | Path = "") -> Path:
    """The folder of runs: the given one, else $WORKBENCH_RUNS, else runs/ of the checkout."""
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
    before = read_json(folder / "plan.json").get("file", "")
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
        ValueError: the sweep was never started in this folder of runs.
    """
    made = read_json(sweep_folder(name, runs) / "plan.json")
    if not made:
        known = sorted(path.parent.name for path in runs.glob("sweeps/*/plan.json"))
        raise ValueError(
            f"`sweep` (={name!r}) was not started here; started sweeps in {runs}: {', '.join(known) or 'none'}"
        )
    return made


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
    said = []
    for i, one in enumerate(kept["runs"], start=1):
        places = RunFolder(Path(one["folder"]))
        now = state_of(places.folder, one["key"], one["values"])
        failure = places.failure() if now == "failed" else {}
        where = f" in “{failure['cell_title']}”" if failure.get("cell_title") else ""
        what = f"{failure['kind']}{where}: {failure['error'].splitlines()[0][:70]}" if failure else ""
        if now == "running":
            what = doing(places) + bar_of(places)
        took = places.manifest().get("seconds") if now in ("finished", "stale") else failure.get("seconds")
        rows.append(
            [
                str(i),
                Path(one["notebook"]).stem,
                varied_parameters(one),
                now,
                "" if took is None else duration(took),
                what,
                one["key"],
            ]
        )
        if failure and lines:
            peak = failure.get("peak_memory_bytes")
            said += [
                "",
                f"{one['key']}: {failure['error']}",
                f"  at most {peak / 1e6:,.0f} MB" if peak else "  memory not known",
            ]
            said += [f"  | {line}" for line in failure.get("lines", [])]
    counts = Counter(row[3] for row in rows[1:])
    total = ", ".join(f"{count} {word}" for word, count in counts.items())
    if counts["stale"]:
        total += f"\nstale: {OTHER_CODE}"
    return "\n".join([kept["title"], "", aligned(rows), "", total, *said])


def doing(places: RunFolder) -> str:
    """The present work of a run: the section of its notebook, or the run for which it waits."""
    with contextlib.suppress(OSError):
        return (places.part / ".waiting").read_text(encoding="utf-8")
    cells = read_json(places.part / "notebook.ipynb").get("cells", [])
    ended = [i for i, cell in enumerate(cells) if (cell["metadata"].get("papermill") or {}).get("end_time")]
    if not cells:
        return "starts"
    now = min(len(ended), len(cells) - 1)
    title = title_of(cells, now)
    return f"“{title}”, cell {now + 1} of {len(cells)}" if title else f"cell {now + 1} of {len(cells)}"


def bar_of(places: RunFolder) -> str:
    """The progress of a run within its cell, as words that follow those of `doing`; "" if it shows no bar."""
    bar = read_json(places.part / BARS)
    if not bar:
        return ""
    left = "" if bar["left_s"] is None else f", about {duration(bar['left_s'])} left"
    return f", {bar['what']}: {bar['done']} of {bar['total']} {bar['unit']}{'s' * (bar['total'] != 1)}{left}"


def left_in_cell(places: RunFolder) -> float:
    """The remaining seconds by the bar of a run's cell; 0 if there is no bar, or one that has just begun."""
    return read_json(places.part / BARS).get("left_s") or 0.0


def folder_of(planned: Planned, runs: Path = RUNS) -> Path:
    return Path(planned.values.get("run_path") or runs / planned.key).expanduser().absolute()


def finished_runs(runs: Path = RUNS) -> list[dict[str, Any]]:
    """The manifests of all finished runs in a folder."""
    found = [read_json(folder / MANIFEST) for folder in run_folders(runs)]
    return [made for made in found if {"key", "notebook", "values", "identity", "seconds", "finished"} <= made.keys()]


def run_folders(runs: Path = RUNS) -> list[Path]:
    """The runs in a folder of runs, without unfinished, failed or temporary folders."""
    aside = re.compile(r"\..*|.*\.(failed|before(-\d+)?)|sweeps")
    return [path for path in sorted(runs.glob("*")) if path.is_dir() and not aside.fullmatch(path.name)]


def varied_parameters(planned: Planned | dict[str, Any]) -> str:
    """The parameters by which a run differs from the others of its sweep."""
    values, varied = (
        (planned.values, planned.varied) if isinstance(planned, Planned) else (planned["values"], planned["varied"])
    )
    text = ", ".join(f"{name}={values[name]!r}" for name in varied)
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
