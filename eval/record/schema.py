"""The run record: one JSON with everything that a report may show. Reports read nothing else.

Its shape (more keys are welcome, these keep their names):

    schema_version
    run          key, notebook, started, duration_s
    recipe       [{method, knobs, source, text}]      of "compressed"; text: the step as written in a recipe
    recipes      {model: [as in recipe]}              of "compressed" and of the other models that were scored with it
    model        name, weights_sha256, parameters
    calibration  corpus, samples, seqlen, seed, sha256, overlap          (null where none was needed)
    layers       [{name, shape, format, bits_per_weight, error, rtn_error, seconds, notes, sparsity, distortion,
                   choice, choices}]                  the method chosen for it, {method: predicted loss}
    inputs       {model: {linear: {max, p99, median, kurtosis}}}   of the linear's input before rounding
    folds        [{name, kind, consumers, alpha, x_before, ...}]        scales moved from norms and linears into the
                 linears that read them (`eval.record.compression.FoldRecord` has the shape)
    drops        [{name, kind, block, importance, order, parameters, left, of}]   parts of blocks that were, or might
                 be, dropped, or that were made narrower (`eval.record.compression.DropRecord`)
    recoveries   {model: [{method, windows, held_out, learned, teacher_seconds, curve, kept, ended, moved,
                 fixed}]}   training after the compression (`eval.record.compression.RecoveryRecord`)
    allocation   {loss, budget_bytes, beside_bytes, chosen, curve, layers, seconds, max_loss}   the allocation of bytes
                 to layers (`eval.record.compression.AllocationRecord`); null if there was none
    search       what was asked, predicted and measured by a search for the best choice of every layer
                 (`eval.record.search.SearchRecord`); null in other runs
    serving      what was asked, predicted and measured of weights and caches within a memory
                 (`eval.record.serving.ServingRecord`); null in other runs
    cache        measurements of compressed KV caches (`eval.record.measured.CacheMeasurements`); null in other runs
    depth        [{block, attention, mlp, turned, later, output, lens, ...}]   the work of every block of the original
                 model (`eval.record.compression.DepthRow`); null if it was not measured
    strengths    {lines: [{recipe, points: [{value, removed_parameters, dropped, seconds, scores}]}]}   recipes that
                 were scored, but not timed, with {} replaced by each of these values
    kept         [{name, shape, bytes, reason}]
    scores       {baseline: {metric: value}, compressed: {...}, rtn: {...}, ...}   the standard error of m is m_stderr
    speed        {variant: {...}}                       spread: {decode, step, prefill}, the relative difference that
                 chance makes, from one model timed twice; load: what else used the processor (`eval.record.noise`)
    samples      [{prompt, texts, first_difference}]
    notes        [necessary information for readers: emulated parts, measurements that were not possible, and reasons]
    kernels      {op: implementation that ran}
    tasks, generation, speed_grid, efficiency, cost, lossless    only if requested (`eval.record.measured`)
    bench        in the record of a kernel benchmark: the results of `kernels.harness.validate` (its docstring has the
                 shape); recipe and layers are then empty, and model, calibration and scores are null
    provenance   commit, dirty, versions, hardware, threads, device, dtype, flags, command

`eval.record.rows` has the types. A number that is not finite is written as "NaN", "Infinity" or "-Infinity".
"""

import json
from pathlib import Path
from typing import Any

from eval.record.files import write_whole
from eval.record.reading import DamagedError, plain

SCHEMA_VERSION = 1
REQUIRED = {
    "schema_version": (), "run": ("key", "notebook", "started", "duration_s"), "recipe": (),
    "model": ("name", "weights_sha256", "parameters"), "calibration": (), "layers": (),
    "scores": ("baseline", "compressed"), "kernels": (),
    "provenance": ("commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"),
}  # fmt: skip
_TYPES = {
    "run": dict, "recipe": list, "model": dict | None, "layers": list, "scores": dict | None, "kernels": dict,
    "provenance": dict,
}  # fmt: skip


def write_record(made: dict[str, Any], path: str | Path) -> Path:
    """Write record.json, whole or not at all.

    Raises:
        ValueError: a key of the contract is missing.
    """
    problems = problems_of(made)
    if problems:
        raise ValueError(f"the record is not complete: {'; '.join(problems)}")
    return write_whole(json.dumps(plain(made), indent=1, allow_nan=False), Path(path))


def read_record(path: str | Path) -> dict[str, Any]:
    """Read record.json.

    Raises:
        DamagedError: not JSON, another schema, a key of the contract is missing, or has another type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        problems = problems_of(made := json.loads(text))
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedError(f"`path` (={str(path)!r}) holds no record: {why}") from error
    if problems:
        raise DamagedError(f"`path` (={str(path)!r}): {'; '.join(problems)}")
    return made


def problems_of(made: dict[str, Any]) -> list[str]:
    """The reasons why this is not a record of this schema; empty if it is one."""
    if not isinstance(made, dict):
        return ["not a record"]
    problems = [f"`{key}` is missing" for key in REQUIRED if key not in made]
    if made.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        problems.append(f"schema_version {made['schema_version']} is not {SCHEMA_VERSION}")
    for key, parts in REQUIRED.items():
        if isinstance(made.get(key), dict):
            problems += [f"`{key}.{part}` is missing" for part in parts if part not in made[key]]
    for key, kind in _TYPES.items():
        if key in made and not isinstance(made[key], kind):
            problems.append(f"`{key}` is of the type {type(made[key]).__name__}")
    if not problems and not all(isinstance(made["run"][name], str) for name in ("key", "notebook")):
        problems.append("`run.key` and `run.notebook` must be text")
    return problems
