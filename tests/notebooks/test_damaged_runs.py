"""A damaged file costs its own run a line, and no other run anything; pages about many runs read each record once."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.record.manifest import seal
from eval.record.schema import read_record
from notebooks.batch import pages
from notebooks.batch.leases import take
from notebooks.batch.plan import plan
from notebooks.batch.processes import mark
from notebooks.batch.status import keep_sweep, status
from notebooks.batch.sweep import read_sweep
from notebooks.study.bars import BARS
from reports.compare.index_rows import KEPT

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "reports" / "published" / "gptq-smollm2-135m-amd-epyc-zen4-2-cores-2026-11-26.json"


@pytest.fixture
def three(sweep, runs) -> tuple[Path, list[Path]]:
    """A sweep of three finished runs with records of a real run, and their folders."""
    path = sweep(grid={"number": [1, 2, 3]})
    record, folders = read_record(PUBLISHED), []
    record["layers"] = record["layers"][:7]  # of one block
    for run in read_sweep(path).runs:
        folder = runs / run.key
        write_run(folder, record | {"run": record["run"] | {"key": run.key}}, run.values, run.identity)
        folders.append(folder)
    keep_sweep(read_sweep(path), runs)
    return path, folders


def write_run(folder: Path, record: dict, values: dict, identity: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "notebook.ipynb").write_text('{"cells": []}')
    (folder / "report.html").write_text("<p>")
    about = {"key": folder.name, "notebook": "trivial", "values": values, "identity": identity, "varied": ["number"]}
    seal(folder, about | {"code": "of then", "seconds": 1.0, "attempt": "a"})


def changed(name: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Writes a file of a run anew, after this change of its content."""

    def damage(folder: Path) -> None:
        made = json.loads((folder / name).read_text())
        change(made)
        (folder / name).write_text(json.dumps(made))

    return damage


def record(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A record without a manifest, as of a run in Jupyter, after this change."""
    return lambda folder: (changed("record.json", change)(folder), (folder / "manifest.json").unlink())


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def alone(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (text("record.json", content)(folder), (folder / "manifest.json").unlink())


def failed(content: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        folder.rename(folder.with_name(f"{folder.name}.failed"))
        folder.with_name(f"{folder.name}.failed").joinpath("failure.json").write_text(content)

    return damage


def lease(content: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        folder.rename(folder.with_name(f".{folder.name}.gone"))
        folder.with_name(f".{folder.name}.lease").write_text(content)

    return damage


def running(name: str, content: str) -> Callable[[Path], object]:
    """An attempt of this process works on the run, and a file of it is damaged."""

    def damage(folder: Path) -> None:
        folder.rename(folder.with_name(f".{folder.name}.gone"))
        token = mark(folder.parent, folder.name)
        take(folder.with_name(f".{folder.name}.lease"), token)
        part = folder.with_name(f".{folder.name}.{token.attempt}.running")
        part.mkdir()
        (part / name).write_text(content)

    return damage


DAMAGED = {  # what the table of `status` says of the run: its state and, where it is fixed, the reason
    "record cut": (text("record.json", b'{"run": '), "damaged", "record.json has another size"),
    "manifest cut": (text("manifest.json", b'{"key"'), "damaged", "manifest.json is damaged"),
    "manifest without files": (changed("manifest.json", lambda m: m.pop("files")), "damaged", "it lists no files"),
    "files null": (changed("manifest.json", lambda m: m.update(files=None)), "damaged", "it lists no files"),
    "files a list": (changed("manifest.json", lambda m: m.update(files=["a"])), "damaged", "`files` is of the type"),
    "files without size": (changed("manifest.json", lambda m: m["files"].update(a={})), "damaged", "no size and hash"),
    "values a list": (changed("manifest.json", lambda m: m.update(values=[])), "damaged", "`values` is of the type"),
    "identity text": (changed("manifest.json", lambda m: m.update(identity="x")), "damaged", "`identity`"),
    "seconds text": (changed("manifest.json", lambda m: m.update(seconds="fast")), "damaged", "`seconds`"),
    "notebook number": (changed("manifest.json", lambda m: m.update(notebook=5)), "damaged", "`notebook`"),
    "failure without kind": (failed('{"a": 1}'), "failed", "unknown: no reason was noted"),
    "failure cut": (failed('{"kind": '), "failed", "damaged: failure.json is damaged"),
    "failure of other types": (failed('{"kind": "cell", "error": 5}'), "failed", "`error` is of the type int"),
    "failure with null": (failed('{"kind": "cell", "error": "", "lines": null}'), "failed", "no reason was noted"),
    "lease of no process": (lease('{"host": "here"}'), "", ""),
    "lease of nobody": (lease("garbage"), "", ""),
    "bar of other types": (running(BARS, '{"what": 1}'), "running", "starts"),
    "notebook without cells": (running("notebook.ipynb", '{"cells": [5]}'), "running", "starts"),
    "record alone, null parts": (record(lambda r: r.update(provenance=None, run=None)), "", ""),
    "record alone, other types": (record(lambda r: r.update(run="x", layers={"a": 1})), "", ""),
    "record alone, key a number": (record(lambda r: r["run"].update(key=5)), "", ""),
    "record alone, no command": (record(lambda r: r["provenance"].update(command=None)), "", ""),
    "record alone, deep": (alone(b"[" * 100_000), "", ""),
    "record alone, no text": (alone(b"\xff\xfe{"), "", ""),
    "record alone, huge number": (record(lambda r: r["scores"]["compressed"].update(stored_bytes=10**400)), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 2)) for i, n in enumerate(DAMAGED)])
def test_a_damaged_file_costs_one_line(name, three, runs):
    """`status`, `plan`, the index, the comparison and `report` show the two other runs as before."""
    path, folders = three
    damage, state, reason = DAMAGED[name]
    damage(folders[1])
    lines = status("s", runs=runs, lines=True).splitlines()
    rows = [next(line for line in lines if line.endswith(folder.name)) for folder in folders]
    assert "stale" in rows[0] and "stale" in rows[2] and "stale" not in rows[1]
    assert state in rows[1] and reason in rows[1]
    assert [row.does for row in plan(path, runs=runs).rows] == ["skip", "run", "skip"]
    made = pages.outcomes(["s"], runs)
    assert [one.status for one in (made[0], made[2])] == ["finished"] * 2
    html = pages.write_index(runs).path.read_text()
    assert all(folder.name in html for folder in (folders[0], folders[2]))
    written = {page.name for page in pages.write_all(runs, [])}
    assert {"index.html", "comparison.html", "papers.html"} <= written
    if state == "damaged":
        assert made[1].status == "damaged" and made[1].failure["kind"] == "damaged" and "damaged" in html


def test_a_damaged_plan_is_named_and_stops_no_page_of_others(three, runs):
    """The sweep itself cannot be shown, and the message says what writes its plan again."""
    for content in ('{"title": "s", "ru', '{"runs": [{"key": 1}]}', '{"runs": {}}'):
        (runs / "sweeps" / "s" / "plan.json").write_text(content)
        for ask in (lambda: status("s", runs=runs), lambda: pages.outcomes(["s"], runs)):
            with pytest.raises(ValueError, match="plan.json is damaged: .*`workbench run` of its file writes"):
                ask()
        assert pages.write_all(runs, [])[-1].name == "index.html"


def test_the_index_reads_only_records_that_are_new(three, runs, monkeypatch):
    """Rows of other runs are kept, appended to their file, and read anew where a run or the code of pages changes."""
    drawn, plain = [], pages.outcome
    monkeypatch.setattr(pages, "outcome", lambda folder, *how: drawn.append(folder.name) or plain(folder, *how))
    names = sorted(folder.name for folder in three[1])

    def index() -> list[str]:
        drawn.clear()
        pages.write_index(runs)
        return sorted(drawn)

    assert index() == names and index() == []
    first = (runs / "index.html").read_text()
    kept = (runs / KEPT).read_text()
    made = json.loads((three[1][0] / "record.json").read_text())
    write_run(runs / "new", made | {"run": made["run"] | {"key": "new"}}, {}, {})
    assert index() == ["new"] and (runs / KEPT).read_text().startswith(kept), "appended"
    (runs / "new" / "record.json").write_text("{}")
    assert index() == ["new"] and "damaged" in (runs / "index.html").read_text()
    assert index() == ["new"], "a damaged run is looked at each time"
    for path in (runs / "new").iterdir():
        path.unlink()
    (runs / "new").rmdir()
    with open(runs / KEPT, "a") as file:
        file.write('["cut')
    assert index() == [] and (runs / "index.html").read_text() == first
    monkeypatch.setattr(pages, "code_sha256", lambda *_: "other code")
    assert index() == names and (runs / "index.html").read_text() == first


@pytest.mark.slow
def test_two_thousand_runs_are_shown_in_seconds(tmp_path):
    """CPU seconds and memory of whole commands; three times what they take on an idle machine."""
    published, runs = read_record(PUBLISHED), tmp_path / "runs"
    keys = [f"gptq-{i}" for i in range(2000)]
    for i, key in enumerate(keys):
        made = published | {"run": published["run"] | {"key": key}}
        made["scores"] = {model: {m: v * (1 + i / 1e5) for m, v in of.items()} for model, of in made["scores"].items()}
        write_run(runs / key, made, {"bits": i}, {"parameters": str(i)})
    plan = [{"key": key, "notebook": "gptq", "values": {}, "folder": str(runs / key)} for key in keys]
    (runs / "sweeps" / "big").mkdir(parents=True)
    (runs / "sweeps" / "big" / "plan.json").write_text(json.dumps({"title": "big", "runs": plan}))
    for command, seconds in (
        ("status.status('big', runs=runs)", 6),
        ("pages.write_index(runs)", 24),
        ("pages.write_index(runs)", 9),
        ("pages.write_comparison_of_sweep('big', runs)", 30),
    ):
        code = f"from pathlib import Path; from notebooks.batch import pages, status; runs = Path({str(runs)!r})"
        code += (
            f"; {command}; print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
        )
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{command}: {spent:.1f} CPU s, {time.monotonic() - begin:.1f} s, {int(said.stdout) / 1024:.0f} MB")
        assert spent < seconds and int(said.stdout) < 300 * 1024, command
    assert os.path.getsize(runs / "index.html") < 1_000_000
