"""Sends the record of a finished run to an experiment tracker: `workbench run gptq --track mlflow`.

MLflow's own settings say where it goes (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). It is no dependency of the
workbench: `pip install mlflow`, or mlflow-skinny for a server elsewhere.
"""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.record.schema import read_record

TRACKERS = ("mlflow",)
_LONGEST = 500  # characters of a parameter or a tag: what every version of MLflow takes
_AT_ONCE = 100  # parameters or metrics in one request


def check_tracker(name: str) -> None:
    """Raise ValueError if a tracker is not known or not installed; "" is none."""
    if name and name not in TRACKERS:
        raise ValueError(f"`--track` (={name!r}) must be one of {', '.join(TRACKERS)}")
    try:
        importlib.import_module(name or "json")
    except ImportError as error:
        said = f"it cannot be imported ({error}); `pip install {name}` brings it"
        raise ValueError(f"`--track` (={name!r}): {said}") from error


def track(folder: Path, name: str) -> None:
    """Send a finished run: its parameters, its metrics by model, its provenance as tags, and its page and record.

    A tracker that cannot be reached leaves a line on the error stream; the run is finished all the same.
    """
    try:
        _send(importlib.import_module(name), folder, read_record(folder / "record.json"))
    except Exception as error:  # of the tracker's client, of a server, of the network
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"workbench: {folder.name} was not sent to {name}: {said}"[:400], file=sys.stderr)


def _send(mlflow: Any, folder: Path, record: Mapping[str, Any]) -> None:
    with mlflow.start_run(run_name=folder.name, tags=_tags(record)):
        parameters = {key: _short(value) for key, value in (record["run"].get("parameters") or {}).items()}
        for some in _parts(parameters):
            mlflow.log_params(some)
        for some in _parts(metrics_of(record)):
            mlflow.log_metrics(some)
        for file in ("report.html", "record.json"):
            if (folder / file).is_file():
                mlflow.log_artifact(str(folder / file))


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """{"model/metric": value} of all scores that are finite numbers, in the characters that MLflow allows."""
    return {
        f"{_plain(model)}/{_plain(metric)}": float(value)
        for model, scores in (record.get("scores") or {}).items()
        for metric, value in scores.items()
        if _is_finite(value)
    }


def _lost(record: Mapping[str, Any]) -> str:
    """The scores that are no finite numbers, which a tracker would show as if they had never been measured."""
    scores = ((model, *one) for model, found in (record.get("scores") or {}).items() for one in found.items())
    return ", ".join(f"{model}/{name}" for model, name, value in scores if not _is_finite(value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _tags(record: Mapping[str, Any]) -> dict[str, str]:
    told, model = record["provenance"], record.get("model") or {}
    recipe = ", ".join(f"{one['method']}({_knobs(one['knobs'])})" for one in record.get("recipe") or [])
    tags = {"key": record["run"]["key"], "notebook": record["run"]["notebook"], "recipe": recipe}
    tags |= {"model": model.get("name"), "weights_sha256": model.get("weights_sha256")}
    tags |= {
        "not_finite": _lost(record),
        "commit": told.get("commit"),
        "command": told.get("command"),
        "hardware": told.get("hardware"),
    }
    return {f"workbench.{name}": _short(value) for name, value in tags.items() if value}


def _knobs(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in knobs.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _plain(name: str) -> str:
    return re.sub(r"[^\w\-. ]", "_", name, flags=re.ASCII)


def _parts(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    items = list(values.items())
    for start in range(0, len(items), _AT_ONCE):
        yield dict(items[start : start + _AT_ONCE])
