"""The first and last steps of a notebook: check its parameters and name its run; write record, page and model."""

import json
import logging
import os
import shlex
import time
import warnings
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import torch
from IPython import get_ipython
from transformers import PreTrainedTokenizerBase

from compress import Result, save_compressed
from compress.checkpoint.card import add_scores
from compress.checkpoint.fits import check_save_format
from compress.checkpoint.save import format_named
from compress.inputs.skeleton import skeleton
from compress.recipe import Recipe
from eval.record.files import write_whole
from eval.record.html import html_table
from eval.record.manifest import seal
from eval.record.schema import write_record
from eval.run_record import RunInfo
from eval.speed.device_lock import call_this, share
from kernels.support.deploy import cast
from kernels.support.user_cache import compile_in_cache
from notebooks.study.bars import Bars
from notebooks.study.identity import CODE, COMMIT, KEY, RUNS, THREADS, packages_code, run_key
from notebooks.study.parameters import (
    OWN_FORMAT,
    SAVE_FORMAT,
    decides_result,
    read_parameters,
    values_in,
)
from notebooks.study.places import check_run_path, check_writable
from notebooks.study.saved import Saved
from notebooks.study.settings import check_settings, is_timed
from reports.page.render import Report, render

_WRITTEN = ("run_path", "save_path", "work_path")  # parameters that name folders to write in; `task_path` is read


@dataclass(frozen=True)
class Run:
    """One execution of a notebook: its key, its parameters, the folder for record and report, the folder for the model.

    Attributes:
        saved: the folder for the model; None if it is not saved. save_format: the format of the saved model.
    """

    info: RunInfo
    folder: Path
    saved: Path | None = None
    save_format: str = OWN_FORMAT
    _record: dict[str, Any] = field(default_factory=dict, repr=False)  # set by `finish`
    _models: list[Path] = field(default_factory=list, repr=False)  # folders that `save` has written
    _bars: Bars | None = field(default=None, repr=False)  # only if another process reads them

    def finish(self, record: dict[str, Any]) -> Report:
        """Write record.json, then report.html, into the run's folder.

        The record is written to the disk first. A page that cannot be drawn is replaced by one that gives the reason,
        with a warning; `workbench report` draws it again from the record.
        """
        if self._bars is not None:
            self._bars.end()
        code = os.environ.get(CODE) or packages_code()
        commit, _, dirty = os.environ.get(COMMIT, "").partition(" ")
        planned = {"commit": commit, "dirty": dirty == "dirty"} if commit else {}
        self._record.update(record, provenance={**record["provenance"], **planned, "code_sha256": code})
        write_record(self._record, self.folder / "record.json")
        try:
            report = render(self._record, self.folder / "report.html", self._links())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"the page of this run could not be drawn, but its record was written: {why}", stacklevel=2)
            report = Report(write_whole(_page_without_content(self.info.key, why), self.folder / "report.html"))
        self._seal()
        return replace(report, beside=bool(os.environ.get(KEY)))  # a batch run moves both into the run's folder

    def _links(self) -> dict[str, str]:
        """The files that lie beside the page, or will: a batch run moves its notebook there, and writes the index."""
        links = {"record": "record.json"}
        if batch := bool(os.environ.get(KEY)):
            links["notebook"] = "notebook.ipynb"
        if batch or (self.folder.parent / "index.html").exists():
            links["all runs"] = "../index.html"
        return links

    def check_saving(self, recipe: Recipe, *, always: bool = False, sized: bool = False) -> None:
        """Check, before any work, that the recipe's model can be saved with these parameters.

        Args:
            always: the model will be saved even if `save_path` is empty.
            sized: the model has a limit of bytes, which its files must keep, too.

        Raises:
            ValueError: `save_format` is not known, cannot hold the recipe's model (the message names the formats that
                can) or not in as few bytes, or is given although `save_path` is empty.
        """
        format_named(self.save_format)
        saving = always or self.saved is not None
        if not saving and self.save_format != OWN_FORMAT:
            raise ValueError(
                f"`save_format` (={self.save_format!r}) is given, but `save_path` is empty, so that no model would be "
                "saved; name a folder there"
            )
        if saving:
            model = skeleton(self.info.parameters["model_name"])
            check_save_format(self.save_format, recipe, model, sized=sized)

    def save(
        self, result: Result, tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None
    ) -> Saved | None:
        """Save the compressed model in 16 bits in the folder `save_path`.

        Args:
            folder: the folder to use if `save_path` is empty; None: the model is not saved in this case.

        Raises:
            ValueError, OSError, RuntimeError: as in `compress.save_compressed`.
        """
        if (place := self.saved or folder) is None:
            print("not saved: `save_path` is empty")
            return None
        begin = time.monotonic()
        cast(result.model, torch.bfloat16)
        path = save_compressed(result, place, tokenizer, save_format=self.save_format)
        saved = Saved.of(path, self.save_format, time.monotonic() - begin)
        self._models.append(path)
        self._seal()
        return saved

    def _seal(self) -> None:
        """Put record and scores beside a saved model and write the manifest, after model and record were written."""
        for folder in self._models if self._record else ():
            write_record(self._record, folder / "record.json")
            add_scores(folder, self._record)
            if not os.environ.get(KEY):  # in a batch run the worker does it
                seal(folder, {"key": self.info.key, SAVE_FORMAT: self.save_format})

    def _repr_html_(self) -> str:
        rows = html_table((), ((name, repr(value)) for name, value in self.info.parameters.items()))
        place = escape(str(self.folder))
        return f"<p>Run <b>{escape(self.info.key)}</b>, written to <code>{place}</code></p>{rows}"


def start(notebook: str, namespace: dict[str, Any]) -> Run:
    """Check the parameters and name the run; nothing is written yet.

    Args:
        notebook: its name, such as "gptq".
        namespace: `globals()` of the notebook.

    Raises:
        ValueError: the notebook does not have a parameter, a value is of the wrong type or out of range, or the run
            must not or cannot write a folder.
    """
    declared = read_parameters(notebook)
    values = values_in(namespace, declared)
    check_settings(values, {name: parameter.default for name, parameter in declared.items()})
    key = os.environ.get(KEY, "") or run_key(notebook, values)
    info = RunInfo(key, notebook, _recorded(values), datetime.now(UTC), _command(notebook, values))
    folder = Path(values.get("run_path") or RUNS / key).expanduser().absolute()
    saved = Path(values["save_path"]).expanduser() if values.get("save_path") else None
    _check_places(values, saved)
    compile_in_cache()
    _without_last_interrupt()
    call_this(key)
    bars = None
    if os.environ.get(KEY):  # a batch run: others may compute at the same time, and its log shows its progress
        beside = int(os.environ.get(THREADS, 0)) or None  # of a sweep that executes several runs at once
        share(values.get("device", "cpu"), beside, waits=bool(beside) or is_timed(values))
        bars = Bars(folder)
        bars.start()
    return Run(info, folder, saved, values.get(SAVE_FORMAT, OWN_FORMAT), _bars=bars)


def _without_last_interrupt() -> None:
    """Keep the kernel from reporting the interrupt with which it is asked to end as an error of a finished notebook.

    An interrupt of a cell is shown in that cell, and does not need the line either.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None:
        kernel.log.addFilter(_is_no_interrupt)


def _is_no_interrupt(line: logging.LogRecord) -> bool:
    return not str(line.msg).startswith("KeyboardInterrupt caught in kernel")


def _check_places(values: dict[str, Any], saved: Path | None) -> None:
    for name in (name for name in _WRITTEN if values.get(name)):
        check_writable(name, Path(values[name]).expanduser())
    if not os.environ.get(KEY):  # in a batch run this is the folder of an attempt
        check_run_path(values.get("run_path", ""))
    if saved is not None and saved.exists() and (not saved.is_dir() or any(saved.iterdir())):
        raise ValueError(f"`save_path` (={str(saved)!r}) exists already; give a new folder, or remove it first")


def _recorded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if decides_result(name)}


def _command(notebook: str, values: dict[str, Any]) -> str:
    """The papermill command that repeats this run."""
    declared = read_parameters(notebook)
    changed = {name: value for name, value in _recorded(values).items() if value != declared[name].default}
    given = [part for name, value in changed.items() for part in _argument(name, value)]
    return " ".join(["papermill", f"notebooks/{notebook}.ipynb", "out.ipynb", *given])


def _argument(name: str, value: Any) -> tuple[str, ...]:
    """A parameter in the form of papermill's command line: lists as YAML."""
    if isinstance(value, list):
        return "-y", shlex.quote(f"{name}: {json.dumps(value)}")
    return "-p", name, shlex.quote(value if isinstance(value, str) else repr(value))


def _page_without_content(key: str, why: str) -> str:
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(key)}</title><h1>{escape(key)}</h1>"
        f"<p>This page could not be drawn: {escape(why)}</p>"
        "<p>The run is finished, and <a href='record.json'>its record</a> holds every number. "
        "<code>workbench report</code> draws the page again.</p></html>"
    )
