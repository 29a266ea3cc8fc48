"""The pages about many runs: reads the folders and passes the data to `reports`."""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from eval.record.schema import read_record
from eval.text.names import with_short_names
from notebooks.batch.job import is_stale, state
from notebooks.batch.run_folder import FAILURE, RunFolder
from notebooks.batch.status import kept_sweep, run_folders, sweep_folder, sweep_name
from notebooks.study.identity import ROOT
from notebooks.study.parameters import read_parameters
from reports.compare.compare import Leaderboard, Verdict, compare_two, leaderboard, render_comparison
from reports.compare.index import render_index
from reports.compare.outcome import RunOutcome
from reports.compare.papers import render_papers
from reports.compare.pareto import plane_models, planes
from reports.compare.variants import variants
from reports.page.render import Report, render
from reports.parts.figures import Figures
from reports.parts.text import public


@dataclass(frozen=True)
class Compared:
    """Runs for a comparison in a notebook: their number, and the data to show."""

    outcomes: tuple[RunOutcome, ...]
    page: Path
    title: str

    @property
    def leaderboard(self) -> Leaderboard:
        return leaderboard(self.outcomes)

    @property
    def figures(self) -> Figures:
        """Accuracy against bytes, and against speed."""
        drawn = planes(plane_models(variants(self.outcomes)))
        return Figures("Error bars as on the page.", {escape(one.title): one.figure for one in drawn})

    @property
    def failures(self) -> "Failures":
        return Failures(tuple(one for one in self.outcomes if one.failure))

    def write(self) -> Report:
        """The comparison as a page."""
        return render_comparison(self.outcomes, self.page, title=self.title)

    def _repr_html_(self) -> str:
        counts = Counter(one.status for one in self.outcomes)
        return f"<p>{len(self.outcomes)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}</p>"


@dataclass(frozen=True)
class Failures:
    """Runs that failed: the reason, the place, and the last lines that they printed."""

    outcomes: tuple[RunOutcome, ...]

    def _repr_html_(self) -> str:
        if not self.outcomes:
            return "<p>No run failed.</p>"
        return "".join(
            f"<h4>{escape(one.key)}</h4><p>{escape(one.failure['kind'])}: {escape(public(one.failure['error']))}</p>"
            f"<pre>{escape(chr(10).join(public(line) for line in one.failure.get('lines', [])))}</pre>"
            for one in self.outcomes
        )


def compared(named: Sequence[str], runs: Path, *, page: str = "", title: str = "Comparison") -> Compared:
    """Runs for a comparison in a notebook.

    Args:
        named: as in `outcomes`; none: every run that is in the folder, or failed there.
        page: the page that `write` writes; by default `comparison_path`.

    Raises:
        ValueError: a name is that of no run, or the folder is empty.
    """
    place = Path(page).expanduser().absolute() if page else comparison_path(named, runs)
    found = outcomes(named, runs, place) if named else [_outcome(folder, place, {}) for folder in _all_folders(runs)]
    if not found:
        raise ValueError(f"`runs` (=[]) of {runs}: nothing stands there yet; `workbench run quickstart` makes some")
    return Compared(tuple(found), place, title)


def outcomes(named: Sequence[str | Path], runs: Path, page: Path | None = None) -> list[RunOutcome]:
    """The outcomes of runs, in order, each once.

    Args:
        named: sweeps that were started here (by name or file), keys of runs, their folders, or records.
        page: the page that will show them, from which links start; by default the comparison of these.

    Raises:
        ValueError: a name is none of these, or there is no run at all.
    """
    page = page or comparison_path(named, runs)
    found: dict[Path, RunOutcome] = {}
    for name in map(str, named):
        for folder, asked in _folders(name, runs):
            found.setdefault(folder, _outcome(folder, page, asked))
    if not found:
        raise ValueError(f"`runs` (={', '.join(map(str, named))}) are no runs")
    return list(found.values())


def comparison_path(named: Sequence[str | Path], runs: Path) -> Path:
    """The default path of a comparison: for a sweep beside its plan, for others beside the runs."""
    if len(named) == 1 and (folder := sweep_folder(sweep_name(named[0]), runs)).is_dir():
        return folder / "comparison.html"
    return runs / "comparison.html"


def write_comparison_of_sweep(name: str, runs: Path) -> Report:
    """The comparison of all runs of a sweep in its last started form."""
    page = sweep_folder(name, runs) / "comparison.html"
    return render_comparison(outcomes([name], runs, page), page, title=kept_sweep(name, runs)["title"])


def verdict_of(found: Sequence[RunOutcome], recovery_threshold: float) -> Verdict:
    """Whether the second run keeps enough of the first one's accuracy.

    Raises:
        ValueError: one of the runs is not finished, or they cannot be compared.
    """
    for one in found:
        if one.record is None:
            raise ValueError(f"`runs`: {one.key} is {one.status}, and has no record to compare")
    return compare_two(found[0].record, found[1].record, recovery_threshold=recovery_threshold)


def write_index(runs: Path) -> Report:
    """runs/index.html: every run that is finished in the folder, failed, or is running."""
    page = runs / "index.html"
    found = [_outcome(folder, page, {}) for folder in _all_folders(runs)]
    comparisons = {
        kept_sweep(path.parent.name, runs)["title"]: os.path.relpath(path, page.parent)
        for path in sorted(runs.glob("sweeps/*/comparison.html"))
    }
    return render_index(found, page, comparisons=comparisons)


def write_papers(runs: Path) -> Report:
    """runs/papers.html: the ledger of papers, with links to published records and to the finished runs of each
    command."""
    entries = yaml.safe_load((ROOT / "seeds" / "papers.yml").read_text(encoding="utf-8"))
    return render_papers(
        entries, runs / "papers.html", records=_records_of_commands(runs), root=os.path.relpath(ROOT, runs)
    )


def write_all(runs: Path, named: Sequence[str]) -> list[Path]:
    """Write all pages again, or those of these runs."""
    written = []
    folders = (
        [folder for name in named for folder, _ in _folders(name, runs)]
        if named
        else [folder for folder in run_folders(runs) if (folder / "record.json").is_file()]
    )
    for folder in folders:
        try:
            written.append(_page(folder))
        except ValueError as error:  # a failed run, or one of another version; the other pages are still made
            print(f"workbench: no page for {folder.name}: {error}", file=sys.stderr)
    if not named:
        written += [
            write_comparison_of_sweep(path.parent.name, runs).path for path in sorted(runs.glob("sweeps/*/plan.json"))
        ]
        written.append(write_papers(runs).path)
    return [*written, write_index(runs).path]


def _page(folder: Path) -> Path:
    """The page of a run, drawn again; the page of a stale run says so."""
    record = read_record(folder / "record.json")
    if is_stale({"code": record["provenance"].get("code_sha256")} | RunFolder(folder).manifest()):
        record = record | {"run": record["run"] | {"stale": True}}
    return render(record, folder / "report.html").path


def _folders(name: str, runs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of a name, with the plan of each run if that is known."""
    path = Path(name).expanduser()
    if sweep_folder(sweep_name(path), runs).is_dir() and (path.suffix in (".yml", ".yaml") or len(path.parts) == 1):
        return [(Path(one["folder"]), one) for one in kept_sweep(sweep_name(path), runs)["runs"]]
    for folder in (runs / name, path):
        if len(path.parts) == 1 or folder == path:
            if folder.suffix == ".json" and folder.is_file():
                return [(folder.absolute(), {})]
            if folder.is_dir() or RunFolder(folder).failed.is_dir():
                return [(folder.absolute(), {})]
    raise ValueError(f"`runs` (={name!r}) is not a sweep that was started in {runs}, a run there, a folder or a record")


def _outcome(folder: Path, page: Path, asked: dict[str, Any]) -> RunOutcome:
    if folder.suffix == ".json":  # a record by itself, such as a published one
        record = read_record(folder)
        return RunOutcome(
            record["run"]["key"],
            record["run"]["notebook"],
            "finished",
            "",
            record,
            None,
            record["run"].get("parameters"),
            record["provenance"]["command"],
        )
    places = RunFolder(folder)
    by_hand = not places.manifest() and (folder / "record.json").is_file()
    now = "finished" if by_hand else state(folder, asked.get("key", ""), asked.get("values"))
    try:
        record = read_record(folder / "record.json") if now == "finished" else None
    except ValueError as error:  # for example of another version: reported, but no error
        return RunOutcome(folder.name, "", "failed", "", failure={"kind": "incomplete", "error": str(error)})
    failure = places.failure() if now == "failed" else None
    told = asked or places.manifest() or failure or {}
    notebook = record["run"]["notebook"] if record else Path(told.get("notebook", "")).stem
    stands = folder if record else places.failed if failure else None
    command = record["provenance"]["command"] if record else _command(told)
    key, href = record["run"]["key"] if record else folder.name, os.path.relpath(stands, page.parent) if stands else ""
    stale = record is not None and is_stale({"code": record["provenance"].get("code_sha256")} | places.manifest())
    return RunOutcome(
        key, notebook, now, href, record, failure, with_short_names(told.get("values") or {}), command, stale
    )


def _command(told: dict[str, Any]) -> str:
    """The command that repeats a run without a record."""
    if "notebook" not in told:
        return ""
    try:
        defaults = {name: parameter.default for name, parameter in read_parameters(told["notebook"]).items()}
    except ValueError:  # the notebook does not exist any more
        defaults = {}
    changed = {name: value for name, value in told["values"].items() if name not in defaults or value != defaults[name]}
    given = (f"-p {name} {shlex.quote(v if isinstance(v, str) else json.dumps(v))}" for name, v in changed.items())
    return " ".join(["workbench run", shlex.quote(told["notebook"]), *given])


def _all_folders(runs: Path) -> list[Path]:
    names = {folder.name for folder in run_folders(runs) if (folder / "record.json").is_file()}
    names |= {path.name.removesuffix(".failed") for path in runs.glob("*.failed") if (path / FAILURE).is_file()}
    names |= {path.name[1:].removesuffix(".lease") for path in runs.glob(".*.lease")}
    return [runs / name for name in sorted(names)]


def _records_of_commands(runs: Path) -> dict[str, str]:
    """{command: href of the run's page} of published runs and of the runs in the folder."""
    published = ROOT / "reports" / "published"
    found = {}
    for path in (*sorted(published.glob("*.json")), *(folder / "record.json" for folder in run_folders(runs))):
        try:
            record = read_record(path)
        except ValueError:  # no run, or one of another version
            continue
        html = path.with_suffix(".html") if path.parent == published else path.with_name("report.html")
        found[record["provenance"]["command"]] = os.path.relpath(html, runs)
    return found
