"""Finds tasks: task files that refer to data on this machine, and lm-eval's catalogue, whose data are on the hub.

Of some of lm-eval's tasks the folder of local data sets may hold the rows (`COPIES`): the task is the same, by
lm-eval's own definition, and needs no network. Paths in a task file are searched next to the file and then in the
folders above, so that it works from any folder.
Reading lm-eval's catalogue takes 10 s, so it is read once per process, and never if all tasks are files.
"""

import difflib
import functools
import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from eval.tasks.trust import TRUST, is_trusted
from kernels.support.errors import first_line, kind_and_first_line
from kernels.support.hub import hub_reachable

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

# {task of lm-eval: the splits of which the folder of local data sets may hold all rows, as <task>/<split>.parquet}
COPIES = {
    "boolq": ("validation",), "gsm8k": ("train", "test"), "hellaswag": ("validation",), "lambada_openai": ("test",),
    "piqa": ("validation",), "winogrande": ("validation",),
}  # fmt: skip
CONSENT = "HF_ALLOW_CODE_EVAL"  # variable of lm-eval and of the metrics that it loads from the hub


@dataclass(frozen=True)
class FoundTask:
    """A task: its name, a hash of everything that determines its questions and their scoring, and a function that
    builds it for lm-eval."""

    name: str
    identity: str
    build: "Callable[[], Task]"


def local_data() -> Path:
    """Folder of local data sets: $WORKBENCH_DATA, or `shared/data` beside the checkout; it need not exist."""
    return Path(os.environ.get("WORKBENCH_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def folder_of(task_path: str = "") -> Path | None:
    """Folder of task files: `task_path`, or else `lm_eval_tasks` in the folder of local data sets.

    Raises:
        ValueError: the named folder does not exist, or the user has not permitted the execution of its files.
    """
    own = local_data() / "lm_eval_tasks"
    if not task_path:
        return own.resolve() if own.is_dir() else None
    folder = Path(task_path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`task_path` (={str(task_path)!r}) must be a folder of task files (.yaml); there is none")
    if not is_trusted(folder, (own,)):
        raise ValueError(
            f"`task_path` (={str(task_path)!r}): task files of lm-eval are code (`!function`, templates, metrics) that "
            f"runs with your rights; read them, then say `--trust {shlex.quote(str(task_path))}` or name the folder "
            f"in {TRUST}"
        )
    return folder.resolve()


def local_place(name: str) -> Path | None:
    """The folder on this machine that holds a task's rows, or its file; None: its rows come from the hub."""
    if _copies([name], None):
        return local_data() / name
    return _files(folder_of()).get(name)


def check_names(names: Sequence[str], task_path: str = "", num_fewshot: int | None = None) -> None:
    """Raise ValueError if a task is unknown, its data are not available, or its scoring would run code written by a
    model."""
    folder = folder_of(task_path)
    files = _copies(names, num_fewshot) | _files(folder)
    for name in names:
        for leaf in _leaves(name, files):
            if leaf in files:
                _check(leaf, _local(leaf, files[leaf], functions=False), files)
            else:
                _check_catalogued(leaf, files, folder)


def find_tasks(
    names: Sequence[str], task_path: str = "", num_fewshot: int | None = None
) -> tuple[list[FoundTask], dict[str, list[str]]]:
    """The tasks of these names, and {group: its tasks}; local data are read when a task is built, the hub's now."""
    files, found, groups = _copies(names, num_fewshot) | _files(folder_of(task_path)), {}, {}
    for name in names:
        for leaf in _leaves(name, files):
            if leaf in files:
                build = functools.partial(_build, leaf, files[leaf])
                found.setdefault(leaf, FoundTask(leaf, _identity(leaf, files[leaf]), build))
                groups.setdefault(name, []).append(leaf)
            else:
                for own, task in _catalogued(leaf).items():
                    data = getattr(task.eval_docs, "_fingerprint", None)
                    identity = _sha(json.dumps([task.dump_config(), data], sort_keys=True, default=str))
                    found.setdefault(own, FoundTask(own, identity, functools.partial(_itself, task)))
                    groups.setdefault(name, []).append(own)
    return list(found.values()), {name: parts for name, parts in groups.items() if parts != [name]}


@functools.cache
def catalogue() -> "TaskManager":
    """All tasks that lm-eval knows."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _hub_reachable() -> bool:
    return hub_reachable("HF_DATASETS_OFFLINE")


def _files(folder: Path | None) -> dict[str, Path]:
    """{task or group: its file}; of two with one name the first counts, as in lm-eval."""
    from lm_eval.tasks._yaml_loader import load_yaml

    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.yaml")) if folder else []:
        try:
            config = load_yaml(path, resolve_func=False)
        except Exception:  # a file that is not YAML is not a task; if it was requested, its name is missing
            continue
        name = config.get("group", config.get("task"))
        if isinstance(name, str):
            found.setdefault(name, path)
    return found


def _copies(names: Iterable[str], num_fewshot: int | None) -> dict[str, Path]:
    """{task: lm-eval's file} of those tasks whose rows lie in the folder of local data sets.

    Args:
        num_fewshot: number of examples, which lm-eval draws from the training split; the rows of that one are then
            needed, too.
    """
    there = [name for name in names if name in COPIES and all(file.is_file() for file in _copy(name).values())]
    there = [name for name in there if not num_fewshot or "train" in COPIES[name]]
    return {name: _written()[name] for name in there}


def _copy(name: str) -> dict[str, Path]:
    return {split: local_data() / name / f"{split}.parquet" for split in COPIES[name]}


def _from_copy(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one of lm-eval's tasks, with its rows from the folder of local data sets."""
    files = {split: str(file.resolve()) for split, file in _copy(name).items()}
    splits = {key: value for key, value in config.items() if key.endswith("_split") and value in files}
    rest = {key: value for key, value in config.items() if key != "dataset_name" and not key.endswith("_split")}
    return {**rest, **splits, "dataset_path": "parquet", "dataset_kwargs": {"data_files": files}}


def _leaves(name: str, files: dict[str, Path], within: tuple[str, ...] = ()) -> list[str]:
    """The task, or the tasks of a group among the files; lm-eval resolves its own groups."""
    if name not in files:
        return [name]
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(files[name], resolve_func=False)
    if "group" not in config:
        return [name]
    members = config.get("task", [])
    if name in within or not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise ValueError(f"`tasks`: the group {name!r} ({files[name]}) must list names of tasks, and not itself")
    return [leaf for member in members for leaf in _leaves(member, files, (*within, name))]


def _local(name: str, path: Path, *, functions: bool) -> dict[str, Any]:
    """A task file's configuration for lm-eval, with absolute paths of its data."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(path, resolve_func=functions)
    if name in COPIES and path == _written().get(name):
        return _from_copy(name, config)
    data = dict(config.get("dataset_kwargs") or {})
    for key in ("data_dir",) if data.get("data_dir") else ("data_files",):
        if data.get(key):
            data[key] = _absolute(data[key], name, path)
    if str(config.get("dataset_path", "")).startswith((".", "/", "~")):
        config["dataset_path"] = _absolute(config["dataset_path"], name, path)
    return {**config, "dataset_kwargs": data} if data else config


def _absolute(value: Any, name: str, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(inner, name, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_absolute(inner, name, path) for inner in value]
    if "://" in value:
        return value
    for folder in path.parents:
        here = str(folder / Path(value).expanduser())
        if glob.glob(here, recursive=True):
            return here
    raise ValueError(
        f"`tasks`: {name!r} reads {value}, which is neither beside its file ({path}) nor in a folder above; "
        "put the data there, or write an absolute path in the file"
    )


def _build(name: str, path: Path) -> "Task":
    from lm_eval.tasks import TaskManager

    config = _local(name, path, functions=True)
    try:
        return TaskManager(include_defaults=False).load([config])["tasks"][name]
    except Exception as error:  # of its template or its data, such as a first document that is empty
        raise ValueError(f"`tasks`: {name!r} cannot be built: {kind_and_first_line(error)}") from error


def _catalogued(name: str) -> "dict[str, Task]":
    offline = not _hub_reachable()  # the clients would try for half a minute
    with ExitStack() as stack:
        for client in ("huggingface_hub.constants", "datasets.config") if offline else ():
            stack.enter_context(patch(f"{client}.HF_HUB_OFFLINE", True))
        try:
            return catalogue().load([name])["tasks"]
        except Exception as error:  # a dozen types of error with the same meaning for the user
            raise ValueError(f"`tasks`: {name!r} cannot be loaded: {first_line(error)}") from error


def _itself(task: "Task") -> "Task":
    return task


def _check(name: str, config: dict[str, Any], files: Iterable[str]) -> None:
    """Check one task by its configuration: may it be scored here, and are its data available?"""
    metrics = [str(metric.get("metric")) for metric in config.get("metric_list") or []]
    if (config.get("unsafe_code") or "code_eval" in metrics) and os.environ.get(CONSENT) != "1":
        raise ValueError(
            f"`tasks`: scoring {name!r} runs code that a model wrote; to allow it, set {CONSENT}=1 in the environment"
        )
    where = _on_hub(config)
    if where and not (_in_cache(where, config.get("dataset_name")) or _hub_reachable()):
        raise ValueError(
            f"`tasks`: {name!r} needs {where} from the hub, which cannot be reached, and no copy is cached here; "
            f"connect to a network, {_else(name)}{_near(name, files)}"
        )


def _else(name: str) -> str:
    """What a user without a network may do for the rows of a task."""
    if name not in COPIES:
        return "or take a task file with data on this machine"
    files = " and ".join(f"{name}/{split}.parquet" for split in COPIES[name])
    return f"or put the rows, as {files}, into the folder that WORKBENCH_DATA names (now {local_data()})"


def _check_catalogued(name: str, files: dict[str, Path], folder: Path | None) -> None:
    """Check a task, group or tag of lm-eval: reading its file is fast; the catalogue is read only if that is not
    enough."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = _written().get(name)
    config = load_yaml(path, resolve_func=False) if path else {}
    if config.get("task") == name:
        _check(name, config, files)
        return
    if _hub_reachable() or _kept():
        index = catalogue().task_index
        for leaf in _members(name, index):
            _check(leaf, index[leaf].cfg or {}, files)
        if name in index:
            return
    elif path:
        raise ValueError(
            f"`tasks`: {name!r} needs data from the hub, which cannot be reached; connect to a network, or take task "
            f"files with data on this machine{_near(name, files)}"
        )
    where = f"the task files in {folder}" if folder else f"task files ({local_data()}, see WORKBENCH_DATA, has none)"
    raise ValueError(
        f"`tasks`: {name!r} is neither among {where} nor lm-eval's own{_near(name, [*files, *_written()])}"
    )


def _members(name: str, index: dict[str, Any]) -> list[str]:
    entry = index.get(name)
    if entry is None:
        return []
    named = entry.tags if entry.yaml_path is None else (entry.cfg or {}).get("task")
    if not isinstance(named, list | set):
        return [name]
    inner = [member if isinstance(member, str) else member.get("task") for member in named]
    return [leaf for member in inner if isinstance(member, str) and member != name for leaf in _members(member, index)]


@functools.cache
def _written() -> dict[str, Path]:
    """{name: file} of the tasks, groups and tags that lm-eval's files name directly: nearly all of them, in half a
    second."""
    import lm_eval

    found: dict[str, Path] = {}
    for path in sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")):
        for kind, name in re.findall(
            r"^(task|group|tag):[ \t]*[\"']?([\w.+-]+)", path.read_text(encoding="utf-8"), re.M
        ):
            if kind == "task":
                found[name] = path
            else:
                found.setdefault(name, path)
    return found


def _on_hub(config: dict[str, Any]) -> str | None:
    """The data of a task that are not on this machine; None: all are, or the task's own function makes them."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as READERS

    data = config.get("dataset_kwargs") or {}
    remote = re.search(r'"(\w+://[^"]*)"', json.dumps([data.get("data_files"), data.get("data_dir")]))
    if remote:
        return remote.group(1)
    where = config.get("dataset_path")
    return None if config.get("custom_dataset") or where is None or where in READERS or Path(where).exists() else where


def _in_cache(where: str, configuration: str | None) -> bool:
    import datasets
    from datasets.naming import camelcase_to_snakecase

    *owner, name = where.split("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(name)])
    return (folder / configuration if configuration else folder).is_dir()


def _kept() -> bool:
    """Is any data set of the hub in the cache?"""
    import datasets

    return any(Path(datasets.config.HF_DATASETS_CACHE).glob("*___*"))


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), 5, 0.6)
    return f"; near it: {', '.join(close)}" if close else ""


def _identity(name: str, path: Path) -> str:
    """Hash of a task file with its included files, of the Python files beside it, and of its data."""
    from lm_eval.tasks._yaml_loader import load_yaml

    written = json.dumps(load_yaml(path, resolve_func=False), sort_keys=True, default=str)
    config = _local(name, path, functions=False)
    data = config.get("dataset_kwargs") or {}
    where = _texts([data.get("data_files"), data.get("data_dir"), config.get("dataset_path")])
    files = [Path(one) for text in where if Path(text).is_absolute() for one in sorted(glob.glob(text, recursive=True))]
    files = [file for one in files for file in (sorted(one.rglob("*")) if one.is_dir() else [one]) if file.is_file()]
    code = sorted(path.parent.glob("*.py"))
    return _sha(written.replace(str(path.parent), ""), *(f"{file.name} {_content(file)}" for file in [*code, *files]))


def _texts(value: Any) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for one in inner for text in _texts(one)]


def _content(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sha(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
