"""What a notebook does first and last: check its parameters and name its run; write record and report."""

import json
import os
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import torch
from IPython import get_ipython
from transformers import PreTrainedTokenizerBase

from compress import Result, save_compressed
from eval.record.schema import write_record
from eval.run_record import RunInfo
from eval.speed.deploy import cast
from eval.speed.device_lock import share
from notebooks.batch.identity import ROOT, packages_code, run_key
from notebooks.batch.job import CODE, KEY, THREADS
from notebooks.study.parameters import check_parameters, injected, read_parameters
from reports.page.render import Report, render


@dataclass(frozen=True)
class Run:
    """One execution of a notebook: its key, its parameters, the folder for record and report, and that for the
    model."""

    info: RunInfo
    folder: Path
    saved: Path | None = None

    def save(self, result: Result, tokenizer: PreTrainedTokenizerBase) -> str:
        """Save the compressed model in 16 bits where `save_path` says; do nothing where it is empty."""
        if self.saved is None:
            return "not saved: `save_path` is empty"
        cast(result.model, torch.bfloat16)
        return f"saved, reloaded and compared: {save_compressed(result, self.saved, tokenizer)}"

    def finish(self, record: dict[str, Any]) -> Report:
        """Write record.json and report.html into the run's folder, and the record beside a saved model."""
        for folder in filter(None, (self.folder, self.saved)):
            write_record(record, folder / "record.json")
        return render(record, self.folder / "report.html")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(k)}</td><td "
            f"style='text-align:left'><code>{escape(repr(v))}</code></td></tr>"
            for k, v in self.info.parameters.items()
        )
        return f"<p>Run <b>{escape(self.info.key)}</b>, written to <code>{escape(str(self.folder))}</code></p><table>{rows}</table>"


def start(notebook: str, namespace: dict[str, Any]) -> Run:
    """Check the parameters and name the run; nothing is written yet.

    Args:
        notebook: its name, such as "gptq".
        namespace: `globals()` of the notebook.

    Raises:
        ValueError: a parameter that the notebook does not have, or a value of the wrong type.
    """
    declared = read_parameters(notebook)
    shell = get_ipython()
    given = injected(shell.user_ns.get("In", [])) if shell and namespace is shell.user_ns else {}
    check_parameters(given, declared)
    values = check_parameters({name: namespace[name] for name in declared if name in namespace}, declared)
    saved = Path(values.get("save_path") or "nowhere, as asked").expanduser()
    for name in (name for name in values if name.endswith("_path") and values[name]):
        _check_writable(name, Path(values[name]).expanduser())
    if saved.exists() and (not saved.is_dir() or any(saved.iterdir())):
        raise ValueError(f"`save_path` (={str(saved)!r}) exists already; give a new folder, or remove it first")
    key = _planned_key() or run_key(notebook, values)
    changed = {k: v for k, v in values.items() if v != declared[k].default and not k.endswith("_path")}
    command = " ".join(
        [
            "papermill",
            f"notebooks/{notebook}.ipynb",
            "out.ipynb",
            *(part for name, value in changed.items() for part in _given(name, value)),
        ]
    )
    folder = Path(values.get("run_path") or ROOT / "runs" / key).expanduser().absolute()
    recorded = {k: v for k, v in values.items() if not k.endswith("_path")}
    if os.environ.get(KEY):  # beside other runs
        share(values.get("device", "cpu"), int(os.environ.get(THREADS, 0)) or None)
    return Run(
        RunInfo(key, notebook, recorded, datetime.now(UTC), command), folder, saved if values.get("save_path") else None
    )


def _check_writable(name: str, path: Path) -> None:
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not os.access(there, os.W_OK) or not (there.is_dir() or there == path.absolute()):
        raise ValueError(f"`{name}` (={str(path)!r}) cannot be written: {there} is not a folder to write in")


def _planned_key() -> str:
    """The key under which a batch run was planned; "" in a run by hand.

    Raises:
        RuntimeError: the code has changed since, so that this would be another run than its key says.
    """
    if os.environ.get(CODE, packages_code()) != packages_code():
        raise RuntimeError("the packages' code has changed since this run was planned; `workbench resume` plans anew")
    return os.environ.get(KEY, "")


def _given(name: str, value: Any) -> tuple[str, ...]:
    """A parameter as papermill reads it on its command line: lists as YAML."""
    if isinstance(value, list):
        return "-y", shlex.quote(f"{name}: {json.dumps(value)}")
    return "-p", name, shlex.quote(value if isinstance(value, str) else repr(value))
