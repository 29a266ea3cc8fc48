"""The pages about many runs: reads the folders and passes the data to `reports`."""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from eval.record.files import write_whole
from eval.record.manifest import MANIFEST
from eval.record.rows import RunRecord
from eval.record.schema import read_record
from eval.text.names import with_short_names
from kernels.support.source import code_sha256
from notebooks.batch.job import is_stale, state
from notebooks.batch.run_folder import FAILURE, RunFolder
from notebooks.batch.status import kept_sweep, run_folders, sweep_folder, sweep_name
from notebooks.batch.sweep.loader import FAST
from notebooks.study.identity import ROOT, packages_code
from notebooks.study.parameters import read_parameters
from reports.compare.compare import Leaderboard, Verdict, compare_two, leaderboard, render_comparison
from reports.compare.decision import ALLOWED_LOSS, decisions
from reports.compare.index import IndexRow, index_row, render_index
from reports.compare.index_rows import rows_of
from reports.compare.outcome import RunOutcome
from reports.compare.papers import papers_page, render_papers
from reports.compare.pareto import plane_models, planes
from reports.compare.variants import variants
from reports.page.render import Report, render
from reports.parts.figures import Figures
from reports.parts.files import links_of, with_links
from reports.parts.published import PAPERS
from reports.parts.text import public

PUBLISHED = ROOT / "reports" / "published"
_DRAWING = ("eval/record", "reports/compare", "reports/page", "reports/parts", "notebooks/batch/pages.py")  # of a row


@dataclass(frozen=True)
class Compared:
    """Runs for a comparison in a notebook: their number, and the data to show."""

    outcomes: tuple[RunOutcome, ...]
    page: Path
    title: str
    runs: Path
    allowed_loss: float = ALLOWED_LOSS

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
        asked = {"title": self.title, "allowed_loss": self.allowed_loss}
        return render_comparison(self.outcomes, self.page, **asked, links=_index_from(self.page, self.runs))

    def _repr_html_(self) -> str:
        counts = Counter(one.status for one in self.outcomes)
        said = f"{len(self.outcomes)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}"
        made = decisions(plane_models(variants(self.outcomes)), self.allowed_loss)
        return "".join(f"<p>{escape(str(text))}</p>" for text in (*made, said))


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


def compared(
    named: Sequence[str],
    runs: Path,
    *,
    page: str = "",
    title: str = "Comparison",
    allowed_loss: float = ALLOWED_LOSS,
) -> Compared:
    """Runs for a comparison in a notebook.

    Args:
        named: as in `outcomes`; none: every run that is in the folder, or failed there.
        page: the page that `write` writes; by default `comparison_path`.
        allowed_loss: the loss of accuracy, as a share, that the recipe may have which the page calls the smallest.

    Raises:
        ValueError: a name is that of no run, the folder is empty, or the loss is no share.
    """
    if not 0 < allowed_loss < 1:
        raise ValueError(
            f"`allowed_loss` (={allowed_loss}) must be a share of the accuracy between 0 and 1, such as 0.05"
        )
    place = Path(page).expanduser().absolute() if page else comparison_path(named, runs)
    code = packages_code()
    found = outcomes(named, runs, place) if named else [outcome(one, place, {}, code) for one in all_folders(runs)]
    if not found:
        raise ValueError(f"`runs` (=[]) of {runs}: nothing stands there yet; `workbench run quickstart` makes some")
    return Compared(tuple(found), place, title, runs, allowed_loss)


def outcomes(named: Sequence[str | Path], runs: Path, page: Path | None = None) -> list[RunOutcome]:
    """The outcomes of runs, in order, each once.

    Args:
        named: sweeps that were started here (by name or file), keys of runs, their folders, or records.
        page: the page that will show them, from which links start; by default the comparison of these.

    Raises:
        ValueError: a name is none of these, or there is no run at all.
    """
    page, code = page or comparison_path(named, runs), packages_code()
    found: dict[Path, RunOutcome] = {}
    for name in map(str, named):
        for folder, asked in _folders(name, runs):
            if folder not in found:
                found[folder] = outcome(folder, page, asked, code)
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
    page, title = sweep_folder(name, runs) / "comparison.html", kept_sweep(name, runs)["title"]
    made = render_comparison(outcomes([name], runs, page), page, title=title, links=_index_from(page, runs))
    for folder, _ in _folders(name, runs):
        _link(folder / "report.html", f"comparison: {title}", page)
    return made


def _index_from(page: Path, runs: Path) -> dict[str, str]:
    return {"all runs": os.path.relpath(runs / "index.html", page.parent)}


def _link(page: Path, label: str, to: Path) -> None:
    """Give a page that is there one more link."""
    try:
        html = page.read_text(encoding="utf-8")
    except OSError:  # the run has no page
        return
    linked = with_links(html, links_of(html) | {label: os.path.relpath(to, page.parent)})
    if linked != html:
        write_whole(linked, page)


def verdict_of(found: Sequence[RunOutcome], recovery_threshold: float) -> Verdict:
    """Whether the second run keeps enough of the first one's accuracy.

    Raises:
        ValueError: one of the runs is not finished, or they cannot be compared.
    """
    a, b = map(finished, found)
    return compare_two(a, b, recovery_threshold=recovery_threshold)


def finished(one: RunOutcome) -> RunRecord:
    """The record of a finished run.

    Raises:
        ValueError: the run is not finished.
    """
    if one.record is None:
        raise ValueError(f"`runs`: {one.key} is {one.status}, and has no record to compare")
    return one.measured


def write_index(runs: Path) -> Report:
    """runs/index.html: every run that is finished in the folder, failed, or is running."""
    page = runs / "index.html"
    comparisons = {
        _title(path.parent.name, runs): os.path.relpath(path, page.parent)
        for path in sorted(runs.glob("sweeps/*/comparison.html"))
    }
    return render_index(index_rows(runs), page, comparisons=comparisons)


def index_rows(runs: Path) -> list[IndexRow]:
    """Every run that is finished in the folder, failed, or is running, as a row."""
    page, code = runs / "index.html", packages_code()
    form = code_sha256(*(ROOT / place for place in _DRAWING))
    return rows_of(all_folders(runs), runs, form, code, lambda folder: index_row(outcome(folder, page, {}, code)))


def _title(sweep: str, runs: Path) -> str:
    try:
        return kept_sweep(sweep, runs)["title"]
    except ValueError:  # its stored plan is gone or damaged
        return sweep


def write_papers(runs: Path) -> Report:
    """runs/papers.html: the ledger of papers, with links to published records and to the finished runs of each
    command."""
    root = os.path.relpath(ROOT, runs)
    return render_papers(_ledger(), runs / PAPERS, records=_records_of_commands(runs), root=root)


def published_papers(folder: Path) -> dict[Path, str]:
    """The page of the ledger, {path: HTML}, for the folder of published results; {} for other folders."""
    if folder.resolve() != PUBLISHED:
        return {}
    return {folder / PAPERS: papers_page(_ledger(), root=os.path.relpath(ROOT, PUBLISHED))}


def _ledger() -> list[dict[str, Any]]:
    return yaml.load((ROOT / "seeds" / "papers.yml").read_text(encoding="utf-8"), FAST)


def write_all(runs: Path, named: Sequence[str]) -> list[Path]:
    """Write all pages again, or those of these runs."""
    written, code = [], packages_code()
    folders = (
        [folder for name in named for folder, _ in _folders(name, runs)]
        if named
        else [folder for folder in run_folders(runs) if (folder / "record.json").is_file()]
    )
    for folder in folders:
        written += _tried(folder.name, lambda folder=folder: _page(folder, code))
    if not named:
        for name in sorted(path.parent.name for path in runs.glob("sweeps/*/plan.json")):
            written += _tried(name, lambda name=name: write_comparison_of_sweep(name, runs).path)
        written.append(write_papers(runs).path)
    return [*written, write_index(runs).path]


def _tried(name: str, write: Callable[[], Path]) -> list[Path]:
    """The page that was written; [] and a line that says why, if its files do not allow it: the others are still
    written."""
    try:
        return [write()]
    except ValueError as error:  # a failed run, one of another version, a damaged file
        print(f"workbench: no page for {name}: {error}", file=sys.stderr)
        return []


def _page(folder: Path, code: str) -> Path:
    """The page of a run, drawn again; the page of a stale run says so."""
    record = read_record(folder / "record.json")
    if is_stale({"code": record["provenance"].get("code_sha256")} | RunFolder(folder).manifest(), code):
        record = record | {"run": record["run"] | {"stale": True}}
    links = {name: f"{name}.{end}" for name, end in (("record", "json"), ("notebook", "ipynb"))}
    links = {name: file for name, file in links.items() if (folder / file).exists()}
    return render(record, folder / "report.html", links | {"all runs": "../index.html"}).path


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


def outcome(folder: Path, page: Path, asked: dict[str, Any], code: str) -> RunOutcome:
    """The outcome of a run, or of a record by itself, such as a published one.

    Args:
        page: that will show it, from which links start.
        asked: its entry in the plan of its sweep; {} if it is in none.
        code: hash of the present code (`packages_code`); a run of other code is stale.
    """
    if folder.suffix == ".json":
        record = read_record(folder)
        told = {"parameters": record["run"].get("parameters"), "command": record["provenance"].get("command") or ""}
        return RunOutcome.of(record["run"]["key"], "finished", record, folder, **told)
    places = RunFolder(folder)
    manifest = places.manifest()
    by_hand = not (folder / MANIFEST).exists() and (folder / "record.json").exists()
    now = "finished" if by_hand else state(folder, asked.get("key", ""), asked.get("values"))
    failure = places.failure() if now == "failed" else None
    if now == "damaged":
        failure = {"kind": "damaged", "error": places.damage()}
    if now == "finished":
        try:
            record = read_record(folder / "record.json")
            stale = is_stale({"code": record["provenance"].get("code_sha256")} | manifest, code)
            told = asked or manifest
            command, href = record["provenance"].get("command") or "", os.path.relpath(folder, page.parent)
            shown = {"command": command, "stale": stale, "parameters": with_short_names(told.get("values") or {})}
            return RunOutcome.of(record["run"]["key"], now, record, folder / "record.json", href=href, **shown)
        except ValueError as error:  # for example of another version: reported, but no error
            now, failure = "damaged", {"kind": "damaged", "error": str(error)}
    told = asked or manifest or failure or {}
    stands = places.failed if now == "failed" else folder if now == "damaged" else None
    href = os.path.relpath(stands, page.parent) if stands else ""
    shown = {"parameters": with_short_names(told.get("values") or {}), "command": _command(told)}
    return RunOutcome(folder.name, Path(told.get("notebook", "")).stem, now, href, failure=failure, **shown)


def _command(told: dict[str, Any]) -> str:
    """The command that repeats a run without a record."""
    if "notebook" not in told:
        return ""
    try:
        defaults = {name: parameter.default for name, parameter in read_parameters(told["notebook"]).items()}
    except ValueError:  # the notebook does not exist any more
        defaults = {}
    changed = {
        name: value for name, value in told.get("values", {}).items() if name not in defaults or value != defaults[name]
    }
    given = (f"-p {name} {shlex.quote(v if isinstance(v, str) else json.dumps(v))}" for name, v in changed.items())
    return " ".join(["workbench run", shlex.quote(told["notebook"]), *given])


def all_folders(runs: Path) -> list[Path]:
    """The folders of all runs: finished, failed, damaged or running."""
    names = {
        folder.name for folder in run_folders(runs) if any((folder / one).exists() for one in ("record.json", MANIFEST))
    }
    names |= {path.name.removesuffix(".failed") for path in runs.glob("*.failed") if (path / FAILURE).is_file()}
    names |= {path.name[1:].removesuffix(".lease") for path in runs.glob(".*.lease")}
    return [runs / name for name in sorted(names)]


def _records_of_commands(runs: Path) -> dict[str, str]:
    """{command: href of the run's page} of published runs and of the runs in the folder."""
    found = {}
    for path in (*sorted(PUBLISHED.glob("*.json")), *(folder / "record.json" for folder in run_folders(runs))):
        try:
            record = read_record(path)
        except ValueError:  # no run, or one of another version
            continue
        html = path.with_suffix(".html") if path.parent == PUBLISHED else path.with_name("report.html")
        found[record["provenance"].get("command") or ""] = os.path.relpath(html, runs)
    return found
