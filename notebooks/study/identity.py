"""The key of a run, made from everything that could change its result.

Two runs of one key are the same run: same code cells, typed parameters, library versions, model, texts, tasks, device,
thread count and compiler of the native kernels. The folders of a run (`*_path`) and the format of its saved model
(`save_format`) do not count, and neither do comments, markdown and the order of YAML. The workbench's own code does not
count either: its hash (`packages_code`) is recorded beside the key, and if only that has changed a finished run is
stale.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from eval.machine.versions import versions
from eval.record.manifest import file_sha256
from kernels.compiler import built_library, compiler
from kernels.support.source import code_sha256 as source_sha256
from kernels.support.source import normal
from notebooks.study.parameters import decides_result, notebook_path, read_cells

ROOT = Path(__file__).resolve().parents[2]
# The folder of runs: in the checkout, or, if the workbench is installed as a package, in the current folder.
RUNS = (ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()) / "runs"
# Environment variables of a batch run: its key, the hash and the commit of the code with which it was planned, the
# threads that it may use while nothing is timed, the revisions of its models and data from the hub, and the file that
# exists while it waits for the device. The last one, on which no result depends, is the number of processes that
# compress a model together (a copy of `compress.walk.parallel.spawn.PROCESSES`, whose import would import torch).
KEY, CODE, COMMIT = "WORKBENCH_KEY", "WORKBENCH_CODE", "WORKBENCH_COMMIT"
THREADS, REVISIONS, WAITING = "WORKBENCH_THREADS", "WORKBENCH_REVISIONS", "WORKBENCH_WAITING"
PROCESSES = "WORKBENCH_PROCESSES"
PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "numpy", "accelerate", "safetensors", "gguf", "lm-eval",
    "bitsandbytes", "triton",
)  # fmt: skip
MODEL, TEXTS = "model_name", ("corpus", "eval_corpus", "haystack")  # parameters that name a model, or a text
CONTENT = ("notebook", "model", "data")  # parts that are checked again when a run starts


def run_key(notebook: str | Path, values: dict[str, Any]) -> str:
    """Name of a run: notebook, model, and a hash of its identity.

    Args:
        notebook: name or path.
        values: all its parameters, checked (`notebooks.study.parameters.check_parameters`).
    """
    return key_of(notebook, values, identity(notebook, values))


def key_of(notebook: str | Path, values: dict[str, Any], parts: dict[str, str]) -> str:
    """The key of a run with a known identity."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(str(values.get(MODEL, ""))).name).strip("-.")
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", notebook_path(notebook).stem)
    return "-".join(filter(None, (stem, model[:40], _sha(parts)[:12])))


def identity(notebook: str | Path, values: dict[str, Any]) -> dict[str, str]:
    """All data that decides the result, part by part, so that messages can name the part that has changed."""
    counted = {name: value for name, value in values.items() if decides_result(name)}
    return {
        **content_identity(notebook, values),
        "parameters": _sha(counted),
        "versions": _sha(versions(PACKAGES)),
        "revisions": json.dumps(hub_revisions(values), sort_keys=True),
        "device": device_class(str(values.get("device", "cpu"))),
        "threads": str(thread_count()),
        "native": native_compiler(),
    }


def content_identity(notebook: str | Path, values: dict[str, Any]) -> dict[str, str]:
    """The parts of the identity that are files: the notebook's code, a local model, local texts, tasks."""
    data = {name: data_identity(name, values[name]) for name in sorted(values)}
    return {
        "notebook": code_sha256(notebook_path(notebook)),
        "model": model_identity(values[MODEL]) if values.get(MODEL) else "",
        "data": _sha(data | {"tasks": _tasks(values)}),
    }


def code_sha256(path: Path) -> str:
    """Hash of a notebook's code."""
    return _sha(notebook_code(path))


def notebook_code(path: Path) -> list[str]:
    """The code cells without comments and layout, and without the parameters cell, whose values count separately."""
    cells = [cell for cell in read_cells(path) if cell.kind == "code" and cell.source.strip()]
    return [normal(cell.source) for cell in cells if "parameters" not in cell.tags]


def packages_code() -> str:
    """Hash of the workbench's own code that a run calls, without its comments, docstrings and layout."""
    return source_sha256(*(ROOT / package for package in ("compress", "eval", "kernels", "notebooks/study")))


def model_identity(model_name: str) -> str:
    """A folder or file by its content, an embedded model by its package's version, a hub model by its name."""
    path = Path(model_name).expanduser()
    if path.is_dir():
        return _sha(
            [(str(file.relative_to(path)), file_sha256(file)) for file in sorted(path.rglob("*")) if file.is_file()]
        )
    if path.is_file():
        return file_sha256(path)
    from compress.inputs.model import PACKAGES as EMBEDDED

    if package := EMBEDDED.get(model_name):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return model_name
    return model_name


def data_identity(name: str, value: Any) -> str | list[str]:
    """The content of the local files that a parameter names, if it names any."""
    if name.endswith("_path") or not isinstance(value, str) or name == MODEL:
        return ""
    if len(value) < 4096 and os.path.isfile(os.path.expanduser(value)):
        return file_sha256(Path(value).expanduser())
    if name not in TEXTS:
        return ""
    from compress.inputs.corpus import sources  # imports torch, and is therefore imported only if a text is named

    return [file_sha256(file) for file in sources(value).files]


def hub_revisions(values: dict[str, Any]) -> dict[str, str]:
    """{"models/owner/name" or "datasets/owner/name": revision} for all that a run loads from the hub.

    The revision is the one in this machine's cache if there is one, else the hub's newest, else "" (no network).
    """
    repositories = []
    if values.get(MODEL):
        from compress.inputs.model import is_on_hub

        repositories += [("models", values[MODEL])] if is_on_hub(values[MODEL]) else []
    for name in TEXTS:
        if isinstance(values.get(name), str) and not os.path.isfile(os.path.expanduser(values[name])):
            from compress.inputs.corpus import sources

            repositories += [("datasets", repository) for repository in sources(values[name]).repositories]
    if not repositories:
        return {}
    from compress.inputs.hub import revision

    return {f"{kind}/{repository}": revision(kind, repository) or "" for kind, repository in repositories}


def device_class(device: str) -> str:
    """The kind of device for numbers and times: the name of a GPU, or of the processor with its cores."""
    if device.startswith("cuda") or device == "auto":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name(device if ":" in device else 0)
    from eval.machine.processor import cpu_class

    return cpu_class()


def thread_count() -> int:
    """Threads that torch may use for one product: OMP_NUM_THREADS, else one per core of this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal():
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def native_compiler() -> str:
    """The version of the compiler that builds the native kernels, or the reason why it does not build them."""
    if os.environ.get("WORKBENCH_NATIVE", "1") == "0":
        return "switched off by WORKBENCH_NATIVE=0"
    try:
        told = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, timeout=10)
        return (told.stdout.splitlines() or ["an unknown compiler"])[0]
    except (OSError, ValueError, subprocess.SubprocessError):
        with suppress(OSError, ValueError):
            if built_library(ROOT / "kernels" / "native"):
                return "no C++ compiler, but a library that was built earlier"
        return "no C++ compiler"


def _tasks(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Tasks of lm-eval by their settings and the content of their data."""
    if not values.get("tasks") or "task_path" not in values:
        return []
    return _tasks_of(tuple(values["tasks"]), values["task_path"], max(values.get("few_shot", -1), 0))


@cache
def _tasks_of(names: tuple[str, ...], task_path: str, examples: int) -> list[tuple[str, str]]:
    from eval.tasks.task_files import check_names, find_tasks

    check_names(names, task_path, examples)  # says which data are missing, where the catalogue would say less
    return [(task.name, task.identity) for task in find_tasks(names, task_path, examples)[0]]


def _sha(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
