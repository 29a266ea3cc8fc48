"""Launch configurations of Triton kernels, and the resulting compilations.

A configuration is measured on GPUs on which `python -m kernels.harness.validate` has run: with --tune, and where a
contest has shown a faster one. On others it comes from a heuristic.

From "Understanding GEMM Performance and Energy on NVIDIA Ada Lovelace" (arXiv:2411.16954): the sizes of tiles change
the time of a product several times over, with an optimum that depends on its shape. The paper predicts times by
random forests; here a few candidates are measured for each shape.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels import capability
from kernels.support.files import write_whole

EARLIEST = (9, 0)  # the compute capability from which a kernel can be launched while another one ends
TUNED = Path(__file__).parent / "tuned"
_trying: dict[tuple[str, str], dict | None] = {}
_early = False  # are kernels launched while the ones before them end?


@dataclass(frozen=True)
class Compilation:
    """One configuration of one kernel that a user's call can reach.

    kernel:         the `@triton.jit` function.
    arguments:      run-time argument -> Triton type: {"x": "*bf16", "M": "i32", "stride": "i64"}.
    constants:      constexpr argument -> value.
    multiple_of_16: run-time integers known to be multiples of 16 (pointers always are).
    expects:        mnemonics that the machine code must contain, such as "HGMMA".
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiple_of_16: tuple[str, ...] = ()
    expects: tuple[str, ...] = ()


def configuration(op: str, key: str, heuristic: dict) -> dict:
    """The configuration for one call.

    Args:
        op: name of the op.
        key: identifies the case, coarsely enough for tuning ("w4 m16 n14336 k4096").
        heuristic: the configuration for a GPU or a key without tuning results.
    """
    if (op, key) in _trying:
        tried = _trying[op, key] or heuristic
        assert tried.keys() == heuristic.keys(), f"{op} reads the fields {sorted(heuristic)}, not {sorted(tried)}"
        return tried
    measured = _measured(gpu()).get(op, {}).get(key)
    # A file older than the kernel may lack a field or have one too many.
    return measured if measured is not None and measured.keys() == heuristic.keys() else heuristic


@contextmanager
def trying(op: str, key: str, configuration: dict | None) -> Iterator[None]:
    """While the block runs, `configuration(op, key, ...)` returns this one, or for None the heuristic's; nests."""
    absent = object()
    before = _trying.get((op, key), absent)
    _trying[op, key] = configuration
    try:
        yield
    finally:
        if before is absent:
            del _trying[op, key]
        else:
            _trying[op, key] = before


def under(op: str, key: str, configuration: dict | None, call: Callable) -> Callable:
    """The call, which looks up this configuration, or for None the heuristic's."""

    def run(*arguments: Any) -> Any:
        with trying(op, key, configuration):
            return call(*arguments)

    return run


@contextmanager
def early_launches(on: bool) -> Iterator[None]:
    """While the block runs (on), kernels that call `kernels.launch_order.await_inputs` are launched while the kernels
    before them end, on GPUs that can do this."""
    global _early
    before, _early = _early, on
    try:
        yield
    finally:
        _early = before


def launch_options(device: torch.device) -> dict[str, bool]:
    """The options of a launch of such a kernel on this device: its constant EARLY, and the launch's own option."""
    if not _early or device.type == "cuda" and capability.gpu(device.index or 0).capability < EARLIEST:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True} if device.type == "cuda" else {"EARLY": True}


def gpu() -> str:
    """Name of the GPU as a file name: "nvidia-h200"; "none" without one."""
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return "none"
    return _file_name(torch.cuda.current_device())


def save(op: str, key: str, configuration: dict | None, folder: Path | None = None) -> Path:
    """Write the measured configuration for this GPU; `configuration` uses it at once.

    Args:
        configuration: the fastest one, or None if the heuristic's is the fastest; then the key is removed.
        folder: the folder of the file, if it is not the one that is read.

    Returns:
        the file, "<gpu>.json": {op: {key: configuration}}, one line each
    """
    path = (folder or TUNED) / f"{gpu()}.json"
    tuned = _read(path)
    keys = tuned.setdefault(op, {})
    if configuration is None:
        keys.pop(key, None)
    else:
        keys[key] = configuration
    write_whole(_lines(tuned), path)
    _measured.cache_clear()
    return path


@cache
def _file_name(device: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


@cache
def _measured(name: str) -> dict[str, dict[str, dict]]:
    return _read(TUNED / f"{name}.json")


def _read(path: Path) -> dict[str, dict[str, dict]]:
    return json.loads(path.read_text()) if path.exists() else {}


def _lines(tuned: dict[str, dict[str, dict]]) -> str:
    """JSON with one key per line, in order, so that a commit shows each change."""
    ops = []
    for op, keys in sorted(tuned.items()):
        if keys:
            entries = ",\n".join(
                f"  {json.dumps(key)}: {json.dumps(keys[key], sort_keys=True)}" for key in sorted(keys)
            )
            ops.append(f" {json.dumps(op)}: {{\n{entries}\n }}")
    return "{\n" + ",\n".join(ops) + "\n}\n" if ops else "{}\n"
