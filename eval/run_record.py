"""Builds the run record from a result and its scores; `eval.record.schema` describes its shape."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from eval.evaluate import Scores
from eval.machine.checkout import checkout
from eval.machine.hardware import hardware
from eval.machine.versions import versions
from eval.record.measured import CacheMeasurements
from eval.record.reading import plain
from eval.record.schema import SCHEMA_VERSION
from eval.speed.device_lock import timing_threads
from eval.speed.kernel_bench import KernelBench
from eval.text.names import TEXTS, short_path, with_short_names

PACKAGES = (
    "torch", "transformers", "datasets", "accelerate", "safetensors", "tokenizers", "lm-eval", "bitsandbytes", "triton",
    "numpy",
)  # fmt: skip
_ENVIRONMENT = (  # variables that change numbers or timings
    "OMP_", "GOMP_", "MKL_", "KMP_", "TORCH", "CUDA_VISIBLE", "CUBLAS",
    "ATEN_CPU", "ONEDNN_MAX", "DNNL_MAX", "WORKBENCH_ISA", "WORKBENCH_NATIVE",
)  # fmt: skip


@dataclass(frozen=True)
class RunInfo:
    """The identity of this run: its key, notebook, parameters, start time, and the command that repeats it."""

    key: str
    notebook: str
    parameters: dict[str, Any]
    started: datetime
    command: str


def record(
    result: Any,
    scores: Scores,
    run: RunInfo,
    others: Mapping[str, Any] | None = None,
    strengths: dict[str, Any] | None = None,
    cache: CacheMeasurements | None = None,
    **measured: Any,
) -> dict[str, Any]:
    """Build the record from a compression's result and its scores.

    Args:
        result: the result of `compress.apply` (read by its attributes: recipe, asked, layers, folds, drops,
            recoveries, kept, identity, calibration, seconds, kernels, notes, usage).
        strengths: recipes scored at several strengths, in the shape of the record.
        cache: results for compressed caches.
        others: the results of the other scored models, by their names in the scores.
        measured: other measurements by their keys in the record: `tasks`, `generation`, `speed_grid`, `efficiency`,
            `cost`, `lossless`; each has `metrics`, which become scores, and `found()`; None if there is no measurement.
    """
    results = {"compressed": result, **(others or {})}
    used = _merged(*(one.kernels for one in results.values()), scores.kernels)
    kernels = {op: sorted(set(impls)) for op, impls in used.items()}
    recipes = {
        name: [_step(*both) for both in zip(one.recipe, one.asked, strict=True)] for name, one in results.items()
    }
    made = {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "key": run.key,
            "notebook": run.notebook,
            "started": run.started.isoformat(timespec="seconds"),
            "duration_s": round((datetime.now(UTC) - run.started).total_seconds(), 1),
            "parameters": with_short_names(run.parameters),
            "compression_s": round(result.seconds, 1),
            "evaluation_s": round(scores.seconds, 1),
            "usage": {name: one.usage for name, one in results.items() if getattr(one, "usage", None)},
            "compressions_s": {name: round(one.seconds, 1) for name, one in results.items()},
        },
        "recipe": recipes["compressed"],
        "recipes": recipes,
        "model": result.identity,
        "calibration": result.calibration and with_short_names(result.calibration),
        "layers": result.layers,
        "folds": result.folds,
        "drops": result.drops,
        "recoveries": {name: own for name, one in results.items() if (own := getattr(one, "recoveries", None))},
        "allocation": result.allocation,
        "strengths": strengths or {"lines": []},
        "cache": cache,
        "kept": result.kept,
        "scores": _with(scores.metrics, measured.values()),
        "difference": scores.difference,
        "texts": scores.texts,
        "speed": scores.speed,
        "samples": scores.samples,
        "notes": _notes(results) + scores.notes,
        "kernels": {op: ", ".join(used) for op, used in kernels.items()},
        "provenance": provenance(_shortened(run), scores.device, scores.dtype, scores.deploy_dtype),
        **{key: told for key, one in measured.items() if (told := one.found()) is not None},
    }
    return plain(made)


def _shortened(run: RunInfo) -> str:
    """The command of a run, with the paths of its files shortened."""
    command = run.command
    for path in (run.parameters[name] for name in TEXTS if run.parameters.get(name)):
        command = command.replace(path, short_path(path))
    return command


def _with(metrics: dict[str, dict[str, float]], measured: Iterable[Any]) -> dict[str, dict[str, float]]:
    """The scores, together with the metrics of the other measurements of the same models."""
    merged = {name: dict(found) for name, found in metrics.items()}
    for one in measured:
        for name, found in one.metrics.items():
            merged.setdefault(name, {}).update(found)
    return merged


def _step(method: Any, asked: Any) -> dict[str, Any]:
    return {"method": method.name, "knobs": method.values(), "source": method.source, "text": str(asked)}


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Every note once: those of "compressed" unchanged, the others with the names of the models to which they
    refer."""
    about: dict[str, list[str]] = {}
    for name, one in results.items():
        for note in dict.fromkeys(one.notes):
            about.setdefault(note, []).append(name)
    said = {
        note: "compressed" in names or any(note.startswith(name) for name in names) for note, names in about.items()
    }
    return [note if said[note] else f"{', '.join(names)}: {note}" for note, names in about.items()]


def kernel_record(bench: KernelBench, run: RunInfo) -> dict[str, Any]:
    """The record of a kernel benchmark: the same contract, without a model."""
    plan, used = bench.plan, {}
    for check in filter(lambda check: check["impl"], bench.found["checks"]):  # none: the op's checks could not be made
        used.setdefault(check["op"], set()).add(check["impl"])
    made = {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "key": run.key,
            "notebook": run.notebook,
            "started": run.started.isoformat(timespec="seconds"),
            "duration_s": round((datetime.now(UTC) - run.started).total_seconds(), 1),
            "parameters": run.parameters,
        },
        "recipe": [],
        "model": None,
        "calibration": None,
        "layers": [],
        "scores": None,
        "bench": bench.found,
        "kernels": {op: ", ".join(sorted(impls)) for op, impls in used.items()},
        "provenance": provenance(run.command, plan.device, plan.dtype, plan.dtype),
    }
    return plain(made)


def provenance(command: str, device: str, dtype: str, deploy_dtype: str) -> dict[str, Any]:
    """The environment of this process: code, versions, hardware, devices and dtypes."""
    commit, dirty = checkout()
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": versions(PACKAGES),
        "hardware": hardware(),
        "threads": timing_threads(),
        "device": device,
        "dtype": dtype,
        "deploy_dtype": deploy_dtype,
        "flags": {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT) and "/" not in v},
        },
        "command": command,
    }


def _merged(*many: dict[str, Any]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for one in many:
        for op, used in one.items():
            merged.setdefault(op, []).extend(used)
    return merged
