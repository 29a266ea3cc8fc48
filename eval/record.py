"""The run record: one JSON with everything that a report may show. Reports read nothing else.

Its shape (more keys are welcome, these keep their names):

    schema_version
    run          key, notebook, started, duration_s
    recipe       [{method, knobs}]
    model        name, weights_sha256, parameters
    calibration  corpus, samples, seqlen, seed, sha256          (null where none was needed)
    layers       [{name, shape, format, bits_per_weight, error, rtn_error, seconds, notes}]
    kept         [{name, shape, bytes, reason}]
    scores       {baseline: {metric: value}, compressed: {...}, rtn: {...}, ...}   the standard error of m is m_stderr
    speed        {variant: {...}}
    samples      [{prompt, texts, first_difference}]
    notes        [what could not be measured, and why]
    kernels      {op: implementation that ran}
    bench        what `kernels.validate` found (its docstring has the shape), in the record of a kernel benchmark: there
                 recipe and layers are empty, model, calibration and scores null
    provenance   commit, dirty, versions, hardware, threads, device, dtype, flags, command
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eval.evaluate import Scores
from eval.hardware import hardware
from eval.kernel_bench import KernelBench

SCHEMA_VERSION = 1
PACKAGES = (
    "torch", "transformers", "datasets", "accelerate", "safetensors", "tokenizers", "lm-eval", "bitsandbytes", "triton", "numpy",
)  # fmt: skip
_ENVIRONMENT = ("OMP_", "MKL_", "KMP_", "TORCH", "CUDA_VISIBLE", "CUBLAS")  # variables that change numbers or timings
REQUIRED = {
    "schema_version": (), "run": ("key", "notebook", "started", "duration_s"), "recipe": (),
    "model": ("name", "weights_sha256", "parameters"), "calibration": (), "layers": (),
    "scores": ("baseline", "compressed"), "kernels": (),
    "provenance": ("commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"),
}  # fmt: skip


@dataclass(frozen=True)
class RunInfo:
    """Who asked for this run: its key, notebook, parameters, when it began, and the command that repeats it."""

    key: str
    notebook: str
    parameters: dict[str, Any]
    started: datetime
    command: str


def record(result: Any, scores: Scores, run: RunInfo) -> dict[str, Any]:
    """Put a compression's result and its scores together.

    Args:
        result: what `compress.apply` returned (read by its attributes: recipe, layers, kept, identity, calibration,
            seconds, kernels).
    """
    kernels = {op: sorted(set(used)) for op, used in _merged(result.kernels, scores.kernels).items()}
    made = {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "key": run.key, "notebook": run.notebook, "started": run.started.isoformat(timespec="seconds"),
            "duration_s": round((datetime.now(UTC) - run.started).total_seconds(), 1), "parameters": run.parameters,
            "compression_s": round(result.seconds, 1), "evaluation_s": round(scores.seconds, 1),
        },
        "recipe": [{"method": m.name, "knobs": m.values(), "source": m.source} for m in result.recipe],
        "model": result.identity,
        "calibration": result.calibration,
        "layers": [asdict(layer) for layer in result.layers],
        "kept": result.kept,
        "scores": scores.metrics,
        "difference": scores.difference,
        "texts": scores.texts,
        "speed": {name: asdict(speed) for name, speed in scores.speed.items()},
        "samples": [asdict(sample) for sample in scores.samples],
        "notes": scores.notes,
        "kernels": {op: ", ".join(used) for op, used in kernels.items()},
        "provenance": provenance(run.command, scores.device, scores.dtype, scores.deploy_dtype),
    }  # fmt: skip
    return json.loads(json.dumps(made))  # tuples become lists now, not only when it is read again


def kernel_record(bench: KernelBench, run: RunInfo) -> dict[str, Any]:
    """The record of a kernel benchmark: the same contract, with no model in it."""
    plan, used = bench.plan, {}
    for check in filter(lambda check: check["impl"], bench.found["checks"]):  # none: the op's checks could not be made
        used.setdefault(check["op"], set()).add(check["impl"])
    made = {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "key": run.key, "notebook": run.notebook, "started": run.started.isoformat(timespec="seconds"),
            "duration_s": round((datetime.now(UTC) - run.started).total_seconds(), 1), "parameters": run.parameters,
        },
        "recipe": [], "model": None, "calibration": None, "layers": [], "scores": None,
        "bench": bench.found,
        "kernels": {op: ", ".join(sorted(impls)) for op, impls in used.items()},
        "provenance": provenance(run.command, plan.device, plan.dtype, plan.dtype),
    }  # fmt: skip
    return json.loads(json.dumps(made))


def provenance(command: str, device: str, dtype: str, deploy_dtype: str) -> dict[str, Any]:
    """Where and with what this process runs."""
    commit, dirty = _git()
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
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


def write_record(made: dict[str, Any], path: str | Path) -> Path:
    """Write record.json, whole or not at all.

    Raises:
        ValueError: a key of the contract is missing.
    """
    problems = problems_of(made)
    if problems:
        raise ValueError(f"the record is not complete: {'; '.join(problems)}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(made, indent=1, allow_nan=False), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def read_record(path: str | Path) -> dict[str, Any]:
    """Read record.json.

    Raises:
        ValueError: no JSON, another schema, or a key of the contract is missing.
    """
    try:
        made = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"`path` (={str(path)!r}) holds no record: {error}") from error
    problems = problems_of(made)
    if problems:
        raise ValueError(f"`path` (={str(path)!r}): {'; '.join(problems)}")
    return made


def problems_of(made: dict[str, Any]) -> list[str]:
    """What keeps this from being a record of this schema; empty if nothing does."""
    if not isinstance(made, dict):
        return ["not a record"]
    problems = [f"`{key}` is missing" for key in REQUIRED if key not in made]
    if made.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        problems.append(f"schema_version {made['schema_version']} is not {SCHEMA_VERSION}")
    for key, parts in REQUIRED.items():
        if isinstance(made.get(key), dict):
            problems += [f"`{key}.{part}` is missing" for part in parts if part not in made[key]]
    return problems


def _merged(*many: dict[str, Any]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for one in many:
        for op, used in one.items():
            merged.setdefault(op, []).extend(used)
    return merged


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> tuple[str | None, bool | None]:
    here = Path(__file__).parent

    def ask(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None
