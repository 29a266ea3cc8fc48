"""A notebook that takes no time and loads no model, and sweeps of it: for what happens around runs."""

import json
import os
import subprocess
import sys
import textwrap
from itertools import takewhile
from pathlib import Path

import nbformat
import pytest
import yaml

from eval.record.schema import read_record
from notebooks.batch.processes import marked, place_of
from notebooks.study.parameters import FOLDER, read_parameters

ROOT = Path(__file__).resolve().parents[2]

_PARAMETERS = """
number: int = 0  # by which runs are told apart
share: float = 0.5  # a number that may be whole
seconds: float = 0.0  # that it works
does: str = ""  # Python, executed in its last cell but one
device: str = "cpu"  # where
save_path: str = ""  # folder for the model
save_format: str = "workbench"  # how it is saved
run_path: str = ""  # folder for record and report
"""
_CHECK = """
if number < 0:
    raise ValueError(f"`number` (={number}) must not be negative")
"""
_WORK = """
import json, os, sys, time
from pathlib import Path
print("working on", number)
time.sleep(seconds)
"""
_RECORD = """
named = dict.fromkeys(["commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"])
run = {"key": os.environ["WORKBENCH_KEY"], "notebook": "trivial", "started": "2026-11-21T00:00:00+00:00", "duration_s": 0.1}
record = {"schema_version": 1, "run": run, "recipe": [], "model": None, "calibration": None, "layers": [], "scores": None,
          "kernels": {}, "provenance": named}
Path(run_path, "record.json").write_text(json.dumps(record))
Path(run_path, "report.html").write_text(f"<title>{number}</title>")
if save_path:
    Path(save_path).mkdir()
    Path(save_path, "model").write_text(str(number))
"""


@pytest.fixture
def trivial(tmp_path) -> Path:
    """The notebook's path; its last cell writes a record, its last but one does what `does` says."""
    v = nbformat.v4
    cells = [
        v.new_markdown_cell("# Trivial"),
        v.new_code_cell(_PARAMETERS.strip(), metadata={"tags": ["parameters"]}),
        v.new_code_cell(_CHECK.strip(), metadata={"tags": ["check"]}),
        v.new_markdown_cell("## Work"),
        v.new_code_cell(_WORK.strip()),
        v.new_code_cell("exec(does)"),
        v.new_code_cell(_RECORD.strip()),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(v.new_notebook(cells=cells, metadata=kernel), tmp_path / "trivial.ipynb")
    return tmp_path / "trivial.ipynb"


@pytest.fixture
def sweep(trivial):
    """Writes a sweep of the trivial notebook: `sweep(grid={...})`, or with `text=` as YAML."""

    def write(name: str = "s", text: str = "", **keys) -> Path:
        path = trivial.with_name(f"{name}.yml")
        path.write_text(textwrap.dedent(text) if text else yaml.safe_dump({"notebook": "trivial.ipynb", **keys}))
        return path

    return write


@pytest.fixture
def plain_processes():
    """Before `runs`: workers and kernels are processes of their own, as a user's are."""


@pytest.fixture
def forked_kernels(forked, monkeypatch) -> str:
    """Kernels that this process and its children start are forked (see `warm.py`). Gives the address of what forks."""
    (*_, address), variables = forked
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return address


@pytest.fixture
def runs(tmp_path, request, monkeypatch) -> Path:
    """The folder of the test's runs, of which nothing may be alive when it ends. Their workers and kernels are forked
    (see `warm.py`), unless the test asks for plain processes."""
    if "plain_processes" not in request.fixturenames:
        monkeypatch.setenv("FORKED_WORKERS", request.getfixturevalue("forked_kernels"))
    yield tmp_path / "runs"
    assert not marked(place_of(tmp_path / "runs")), "something of a run is still alive"


@pytest.fixture
def workbench(tmp_path):
    """`workbench ...` as a process of its own, with its runs in the test's folder."""

    def start(*arguments, wait: bool = True, **how):
        command = [sys.executable, "-m", "notebooks", *map(str, arguments), "--runs", str(tmp_path / "runs")]
        how = {
            "cwd": ROOT,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
            **how,
        }
        if wait:
            return subprocess.run(command, timeout=120, **how)
        return subprocess.Popen(command, **how)

    return start


@pytest.fixture
def run_cells():
    """`run_cells(name, given, until="")`: a notebook's cells, in this process."""

    def run_cells(name, given, until=""):
        """Execute a notebook's cells in this process with these parameters, up to the one that says `until`."""
        namespace = {}
        cells = [
            cell for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"
        ]
        for cell in takewhile(lambda cell: not until or until not in cell.source, cells):
            exec(cell.source, namespace)
            if "parameters" in cell.metadata.get("tags", []):
                namespace |= given
        return namespace

    return run_cells


@pytest.fixture
def papermill(tmp_path, request):
    """`papermill(name, given)` runs a notebook by papermill's own command: its output is `out.ipynb` of the test's
    folder, its run the folder `run`. Gives the record, if one was written. With `plain` papermill and its kernel are
    processes of their own, as a user's are; without it both are forked (see `warm.py`), and nothing is compiled."""

    def execute(name: str, given: dict, *, plain: bool = False, compiled: bool = False):
        if "run_path" in read_parameters(name):
            given = {**given, "run_path": tmp_path / "run"}
        arguments = [
            part
            for key, value in given.items()
            for part in (("-y", f"{key}: {json.dumps(value)}") if isinstance(value, list) else ("-p", key, str(value)))
        ]
        start, variables = [sys.executable, "-m"], {}
        if not plain and not compiled:
            start, variables = request.getfixturevalue("forked")
        command = [*start, "papermill", f"notebooks/{name}.ipynb", str(tmp_path / "out.ipynb"), *arguments]
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": str(int(not compiled)), **variables}
        try:
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600, env=environment)
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr.decode(errors="replace")[-3000:])  # else nobody knows why
            raise
        written = tmp_path / "run" / "record.json"
        return read_record(written) if written.exists() else None

    return execute
