"""A sweep: one YAML -> its runs, each checked before any kernel starts.

    title: Bits and groups             # of the comparison page; the file's name by default
    description: What is asked of it.
    gpus: 2                            # that each run has, where its device is a GPU; one by default
    slurm: {partition: gpu, time_min: 600, cpus: 16, memory_gb: 128}   # of `--engine slurm` alone: SlurmOptions
    files: [{path: runs/x.safetensors, command: compress.commands.train_costs}]   # made before the runs: MadeFile
    timeout_s: 3600                    # wall clock of a run; cell_timeout_s: of a cell
    base: {model_name: smollm2-135m}   # for every run of every notebook that has such parameters
    runs:
      - notebook: gptq                 # a name or a path
        base: {samples: 32}
        grid: {bits: [3, 4], group_size: [32, 64]}   # every combination
        list: [{order: group}, {order: none}]        # each with every one of the grid
        exclude: [{bits: 3, group_size: 64}]         # combinations that hold all of these values
        include: [{bits: 8, group_size: -1}]         # more runs, not of the grid
        gpus: 1                        # of each of these
        expected_s: 300                # of each; only for the estimate, until a run like it was measured

A sweep of one notebook may have `notebook`, `grid`, `list`, `include`, `exclude` at the top and no `runs`.
"""

import difflib
import math
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from notebooks.batch.preflight import check_run
from notebooks.batch.saved_model import check_save_path
from notebooks.batch.sweep.files import MadeFile, files_of
from notebooks.batch.sweep.loader import Loader
from notebooks.batch.sweep.resources import SlurmOptions, check_gpus
from notebooks.study.identity import identity, key_of
from notebooks.study.parameters import (
    FOLDER,
    SAVE_FORMAT,
    Parameter,
    bounded,
    check_parameters,
    from_here,
    near,
    notebook_path,
    read_parameters,
    short_repr,
)
from notebooks.study.places import check_run_path

SWEEPS = FOLDER / "sweeps"
_GROUP = ("notebook", "base", "grid", "list", "include", "exclude", "gpus", "expected_s")
_TOP = ("title", "description", "timeout_s", "cell_timeout_s", "gpus", "slurm", "files", "base", "runs")
MOST = 10_000  # runs of a sweep: more are a mistake in the grid
MOST_BYTES = 1 << 20  # of a sweep's file
MOST_PROBLEMS = 50  # that one message lists


@dataclass(frozen=True)
class Planned:
    """One run of a sweep: its notebook, all parameters by value, its key, and the parts of its identity."""

    notebook: str
    values: dict[str, Any]
    key: str
    identity: dict[str, str] = field(repr=False)
    varied: tuple[str, ...] = ()  # the parameters that differ from other runs of its sweep
    expected_s: float | None = None  # expected seconds, from its sweep
    gpus: int | None = None  # number if its device is a GPU; None: one


@dataclass(frozen=True)
class Sweep:
    """A sweep with its source text, and its runs in order; no two have the same key."""

    name: str
    title: str
    runs: tuple[Planned, ...]
    description: str = ""
    timeout_s: float | None = None
    cell_timeout_s: int | None = None
    source: str = ""  # its text, and the file
    file: str = ""
    slurm: SlurmOptions = SlurmOptions()  # resources of each run
    files: tuple[MadeFile, ...] = ()  # made before the runs


def read_sweep(where: str | Path, *, name: str = "", place: Path | None = None) -> Sweep:
    """The sweep of a YAML file, which is given by its path or by its name in notebooks/sweeps.

    Args:
        name: of the sweep, if it is not that of the file.
        place: the folder of its relative paths, if it is not that of the file.

    Raises:
        ValueError: the file does not exist, or has a key that sweeps do not have, a parameter that the notebook does
            not have, or a value of the wrong type or out of range; the message lists all such problems.
    """
    path = sweep_path(where)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(
            f"`sweep` (={str(where)!r}) is a file of {size / 1e6:.1f} MB; {MOST_BYTES / 1e6:.1f} MB are the most: a "
            f"`grid` says many runs in few words, and a sweep has {MOST:,} runs at most"
        )
    try:
        text = path.read_text(encoding="utf-8")
        made = yaml.load(text, Loader)
    except RecursionError as error:
        raise ValueError(f"`sweep` (={str(where)!r}) cannot be read: it is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = bounded(" ".join(str(error).split()))
        raise ValueError(f"`sweep` (={str(where)!r}) cannot be read: {said}") from error
    if not isinstance(made, dict):
        raise ValueError(
            f"`sweep` (={str(where)!r}) must be a mapping with `runs`, or with `notebook`, not {type(made).__name__}"
        )
    groups = made.get("runs") if "runs" in made else [{k: v for k, v in made.items() if k in _GROUP and k != "base"}]
    known = _TOP if "runs" in made else tuple(dict.fromkeys((*_TOP, *_GROUP)))
    _known(made, known, path.name)
    _shape(
        made,
        {
            "title": str,
            "description": str,
            "timeout_s": (int, float),
            "cell_timeout_s": int,
            "gpus": int,
            "slurm": dict,
            "files": list,
            "base": dict,
        },
        path.name,
    )
    for limit in ("timeout_s", "cell_timeout_s"):
        if made.get(limit) is not None and made[limit] <= 0:
            raise ValueError(
                f"`{limit}` (={short_repr(made[limit])}) of {path.name} must be positive seconds; leave it out for no "
                "limit"
            )
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"`runs` of {path.name} must be a list of mappings, each with a `notebook`")
    files = files_of(made.get("files"), path.name)
    runs, problems = _resolved(
        groups, made.get("base") or {}, path, place or path.absolute().parent, made.get("gpus"), files
    )
    if problems:
        listed = [bounded(problem) for problem in problems[:MOST_PROBLEMS]]
        listed += [f"and {len(problems) - MOST_PROBLEMS:,} more"] if len(problems) > MOST_PROBLEMS else []
        raise ValueError(
            f"{path.name} has {len(problems)} problem{'s' * (len(problems) > 1)}:\n  " + "\n  ".join(listed)
        )
    return Sweep(
        name or path.stem,
        made.get("title") or name or path.stem,
        tuple(runs),
        (made.get("description") or "").strip(),
        made.get("timeout_s"),
        made.get("cell_timeout_s"),
        text,
        str(path.absolute()),
        SlurmOptions.of(made.get("slurm") or {}),
        files,
    )


def sweep_path(where: str | Path) -> Path:
    """The file of a sweep given by path, or by its name in notebooks/sweeps."""
    path = Path(where)
    if path.suffix not in (".yml", ".yaml"):
        path = SWEEPS / f"{where}.yml"
    if not path.is_file():
        names = sorted(p.stem for p in SWEEPS.glob("*.yml"))
        known = f"{near(where, names)}give a .yml file, or one known by name: {', '.join(names)}"
        raise ValueError(f"`sweep` (={str(where)!r}) is not there; {known}")
    return path


def is_sweep(what: str) -> bool:
    """Whether this is the file or the name of a sweep, and not of a notebook.

    Raises:
        ValueError: it is the name of neither.
    """
    if Path(what).suffix in (".yml", ".yaml", ".ipynb"):
        return Path(what).suffix != ".ipynb"
    books, sweeps = (
        sorted(p.stem for p in place.glob(f"*{end}")) for place, end in ((FOLDER, ".ipynb"), (SWEEPS, ".yml"))
    )
    if what not in (*books, *sweeps):
        raise ValueError(
            f"`what` (={what!r}) is neither a notebook nor a sweep; {near(what, (*sweeps, *books))}Sweeps by name: "
            f"{', '.join(sweeps)}; notebooks: {', '.join(books)}"
        )
    return what not in books


def single(notebook: str | Path, given: dict[str, Any]) -> Sweep:
    """A sweep of one run, with checked values.

    Raises:
        ValueError: as in `read_sweep`; or `run_path` holds other files than a run.
    """
    book = Path(notebook).absolute() if Path(notebook).suffix == ".ipynb" else notebook
    declared = _writes_record(book)
    values = check_parameters(given, declared)
    check_run_path(values["run_path"])
    check_run(book, values, named=True)
    parts = identity(book, values)
    key = key_of(book, values, parts)
    check_save_path(values, key)
    return Sweep(key, key, (Planned(str(book), values, key, parts, tuple(given)),))


def with_gpus(sweep: Sweep, gpus: int | None) -> Sweep:
    """The sweep with this number of GPUs for each of its runs; unchanged for None.

    Raises:
        ValueError: a run cannot use this number.
    """
    if gpus is None:
        return sweep
    for run in sweep.runs:
        check_gpus(gpus, run.values, sweep.name)
    return replace(sweep, runs=tuple(replace(run, gpus=gpus) for run in sweep.runs))


def _writes_record(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook that makes a run; notebooks without `run_path` do not."""
    declared = read_parameters(notebook)
    if "run_path" not in declared:
        raise ValueError(
            f"`notebook` (={str(notebook)!r}) writes no record, so it cannot be a run: use it in Jupyter or with "
            "papermill; `workbench compare` does the same as the notebook compare"
        )
    return declared


def _resolved(
    groups: list[dict[str, Any]],
    base: dict[str, Any],
    path: Path,
    place: Path,
    gpus: int | None = None,
    files: tuple[MadeFile, ...] = (),
) -> tuple[list[Planned], list[str]]:
    runs: dict[str, Planned] = {}
    problems: dict[str, None] = {}
    used: set[str] = set()
    count = 0
    for position, group in enumerate(groups):
        where = f"{path.name}, runs[{position}]"
        try:
            _known(group, _GROUP, where)
            _shape(
                group,
                {
                    "base": dict,
                    "grid": dict,
                    "list": list,
                    "include": list,
                    "exclude": list,
                    "notebook": str,
                    "gpus": int,
                    "expected_s": (int, float),
                },
                where,
            )
            book = _book(group, where, place)
            declared = _writes_record(book)
            count += _count(group)
            if count > MOST:
                raise ValueError(f"{where} gives the sweep {count:,} runs; {MOST:,} are the most")
        except ValueError as error:
            problems[str(error)] = None
            continue
        own = {name: value for name, value in base.items() if name in declared}
        used |= set(own)
        expanded, wrong = _expanded(group, own, where)
        problems |= dict.fromkeys(wrong)
        for given in expanded:
            try:
                values = check_parameters(
                    {name: from_here(name, value, place) for name, value in given.items()}, declared
                )
                check_run_path(values["run_path"])
                check_run(book, values, awaited=frozenset(file.path for file in files))
                parts = identity(book, values)
                key = key_of(book, values, parts)
                check_save_path(values, key)
                asked = group.get("gpus", gpus)
                check_gpus(asked, values, path.name)
            except ValueError as error:
                problems[f"{where}: {error}"] = None
                continue
            seconds = group.get("expected_s")
            same = runs.setdefault(key, Planned(str(book), values, key, parts, _varied(group), seconds, asked))
            if any(same.values.get(name) != values.get(name) for name in ("save_path", SAVE_FORMAT)):
                problems[
                    f"{where}: two runs differ only in `save_path` or `save_format`: they are the same run; save its "
                    "model once, and `workbench export` writes it in other formats"
                ] = None
    for name in ("run_path", "save_path"):
        places = [run.values[name] for run in runs.values() if run.values.get(name)]
        for one in sorted({one for one in places if places.count(one) > 1}):
            problems[
                f"`{name}` (={short_repr(one)}) of {path.name} is that of {places.count(one)} runs; give each its own, "
                "or none"
            ] = None
    for name in sorted(set(base) - used):
        problems[f"`{name}` (={short_repr(base[name])}) of `base` is a parameter of no notebook in {path.name}"] = None
    if not runs and not problems:
        problems[f"{path.name} stands for no run: everything is excluded"] = None
    return list(runs.values()), list(problems)


def _book(group: dict[str, Any], where: str, place: Path) -> str | Path:
    if "notebook" not in group:
        raise ValueError(f"`notebook` is missing in {where}")
    beside = place / group["notebook"]
    if beside.suffix == ".ipynb" and beside.is_file():
        return beside.absolute()
    notebook_path(group["notebook"])
    return group["notebook"] if not group["notebook"].endswith(".ipynb") else Path(group["notebook"]).absolute()


def _expanded(group: dict[str, Any], base: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The parameters of every run of a group, and the mistakes in it."""
    problems: list[str] = []
    grid, base = group.get("grid") or {}, {**base, **(group.get("base") or {})}
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            problems.append(f"`{name}` (={short_repr(values)}) of `grid` in {where} must be a list of values")
    for kind in ("list", "include", "exclude"):
        for one in group.get(kind) or []:
            if not isinstance(one, dict) or not one:
                problems.append(
                    f"`{kind}` of {where} must be a list of mappings of parameters, not of {short_repr(one)}"
                )
    if problems:
        return [], problems
    made = [
        {**base, **dict(zip(grid, chosen, strict=True)), **one}
        for one in group.get("list") or [{}]
        for chosen in product(*grid.values())
    ]
    excluded = group.get("exclude") or []
    for one in excluded:
        if not any(_holds(given, one) for given in made):
            problems.append(
                f"`exclude` (={short_repr(one)}) of {where} leaves nothing out: no combination has these values"
            )
    only_included = not grid and not group.get("list") and group.get("include")
    kept = [] if only_included else [given for given in made if not any(_holds(given, one) for one in excluded)]
    return kept + [{**base, **one} for one in group.get("include") or []], problems


def _count(group: dict[str, Any]) -> int:
    """The number of runs of a group, before any is excluded."""
    sizes = [len(values) for values in (group.get("grid") or {}).values() if isinstance(values, list)]
    included = len(group.get("include") or [])
    alone = included and not sizes and not group.get("list")
    return included + (0 if alone else math.prod([*sizes, len(group.get("list") or [{}])]))


def _holds(given: dict[str, Any], some: dict[str, Any]) -> bool:
    return all(name in given and given[name] == value for name, value in some.items())


def _varied(group: dict[str, Any]) -> tuple[str, ...]:
    listed = [name for kind in ("list", "include") for one in group.get(kind) or [] for name in one]
    return tuple(dict.fromkeys([*(group.get("grid") or {}), *listed])) or tuple(group.get("base") or {})


def _known(made: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in made:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{near[0]}`? It" if near else "it"
            raise ValueError(f"`{bounded(key, 100)}` is not a key of {where}; {hint} may have {', '.join(known)}")


def _shape(made: dict[str, Any], kinds: dict[str, Any], where: str) -> None:
    for key, kind in kinds.items():
        value = made.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            wanted = {dict: "a mapping", list: "a list", str: "text"}.get(kind, "a number")
            raise ValueError(f"`{key}` (={short_repr(value)}) of {where} must be {wanted}, not {type(value).__name__}")
