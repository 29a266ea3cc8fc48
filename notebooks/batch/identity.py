"""What a run is: its key, from everything that could change what it finds.

Two runs of one key are the same run: same code cells, typed parameters, packages' code and versions, model, texts,
    tasks, and
class of device. Where they are written (`*_path`) does not count, and neither do comments, markdown and the order of
YAML.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from eval.machine.versions import versions
from notebooks.study.parameters import notebook_path, read_cells

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "lm-eval", "bitsandbytes", "triton")
MODEL, TEXTS = "model_name", ("corpus", "eval_corpus", "haystack")  # parameters that name what lies elsewhere
_CODE = (".py", ".cpp", ".inc", ".json")
_WHOLE = 1 << 30  # larger files count by their size, time and first MiB


def run_key(notebook: str | Path, values: dict[str, Any]) -> str:
    """Name of a run: notebook, model, and a hash of its identity.

    Args:
        notebook: name or path.
        values: all its parameters, checked (`notebooks.study.parameters.check_parameters`).
    """
    return key_of(notebook, values, identity(notebook, values))


def key_of(notebook: str | Path, values: dict[str, Any], parts: dict[str, str]) -> str:
    """The key of a run whose identity is known already."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(str(values.get(MODEL, ""))).name).strip("-.")
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", notebook_path(notebook).stem)
    return "-".join(filter(None, (stem, model[:40], _sha(parts)[:12])))


def identity(notebook: str | Path, values: dict[str, Any]) -> dict[str, str]:
    """What counts, part by part, so that it can be said which part changed."""
    path = notebook_path(notebook)
    counted = {name: value for name, value in values.items() if not name.endswith("_path")}
    return {
        "notebook": code_sha256(path),
        "parameters": _sha(counted),
        "code": packages_code(),
        "versions": _sha(versions(PACKAGES)),
        "model": model_identity(values[MODEL]) if values.get(MODEL) else "",
        "data": _sha({name: data_identity(name, values[name]) for name in sorted(values)} | {"tasks": _tasks(values)}),
        "device": device_class(str(values.get("device", "cpu"))),
    }


def code_sha256(path: Path) -> str:
    """Hash of a notebook's code."""
    return _sha(notebook_code(path))


def notebook_code(path: Path) -> list[str]:
    """The code cells without comments and layout; a parameters cell without its values, which count by themselves."""
    cells = [cell for cell in read_cells(path) if cell.kind == "code" and cell.source.strip()]
    return [_normal(cell.source) for cell in cells if "parameters" not in cell.tags]


def _normal(source: str) -> str:
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # magics: as they are
        return source.strip()


@cache
def packages_code() -> str:
    """Hash of all code that a run calls: the packages that compress and score, and what notebooks import of this
    one."""
    files = [
        file
        for package in ("compress", "eval", "kernels", "notebooks/study")
        for file in (ROOT / package).rglob("*")
        if file.suffix in _CODE
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def model_identity(model_name: str) -> str:
    """A folder or file by its content; an embedded model by its package; a hub id by the revision at hand, if one
    is."""
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
    return f"{model_name} {_revision('models', model_name)}"


def data_identity(name: str, value: Any) -> str:
    """What a parameter that names data stands for: content of files, the local copy of a corpus; else nothing."""
    if name.endswith("_path") or not isinstance(value, str) or name == MODEL:
        return ""
    if os.path.isfile(os.path.expanduser(value)) and len(value) < 4096:
        return file_sha256(Path(value).expanduser())
    if name not in TEXTS:
        return ""
    from compress.inputs.corpus import local_file  # torch comes with it: only where a text is named

    local = local_file(value)
    return file_sha256(local) if local else f"{value} {_revision('datasets', value.partition(':')[0])}"


def device_class(device: str) -> str:
    """The kind of device that numbers and times belong to: a GPU's name, or the processor's with its cores."""
    if device.startswith("cuda") or device == "auto":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name(device if ":" in device else 0)
    from eval.machine.processor import cpu_class

    return cpu_class()


def file_sha256(path: Path) -> str:
    """Hash of a file's content, computed once as long as it stays as it is."""
    stat = path.stat()
    return _file_sha256(str(path.absolute()), stat.st_size, stat.st_mtime_ns)


@cache
def _file_sha256(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        if size <= _WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256(file.read(1 << 20) + f"{size} {changed_ns}".encode()).hexdigest()


@cache
def _revision(kind: str, name: str) -> str:
    """The revision of a hub repository: that in this machine's cache, else the hub's own; "" where neither can be
    told."""
    hub = Path(
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    )
    head = hub / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
    if head.is_file():
        return head.read_text().strip()
    if name.count("/") != 1 or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return ""
    from huggingface_hub import HfApi

    try:  # what the first run will download: the key is to be the same before and after
        return HfApi().repo_info(name, repo_type=kind.removesuffix("s"), timeout=5).sha or ""
    except Exception:  # no network, no such repository: loading it will say so
        return ""


def _tasks(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Tasks of lm-eval by what they ask: their settings and the content of their data."""
    if not values.get("tasks") or "task_path" not in values:
        return []
    return _tasks_of(tuple(values["tasks"]), values["task_path"])


@cache
def _tasks_of(names: tuple[str, ...], task_path: str) -> list[tuple[str, str]]:
    from eval.tasks.task_files import find_tasks

    return [(task.name, task.identity) for task in find_tasks(names, task_path)[0]]


def _sha(made: Any) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
