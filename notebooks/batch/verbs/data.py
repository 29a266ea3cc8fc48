"""`workbench data`: finds the models, texts and tasks that sweeps need, fetches those that the hub has, and says where
it looked for the others."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PARTS = {"corpus": "calibration", "eval_corpus": "evaluation", "haystack": "evaluation"}


class Need(NamedTuple):
    """What a parameter of a run names. kind: model, task, or the part of a text."""

    name: str
    kind: str


class Answer(NamedTuple):
    """state: there, fetched, on the hub or missing. where: the place, or where it was looked for."""

    state: str
    where: str


def declare(command) -> None:
    """The options of `workbench data`."""
    about = "sweeps, by name or file (default: all of notebooks/sweeps, which published results come from)"
    sweeps = {"nargs": "*", "metavar": "SWEEP", "help": about}
    parser = command("data", data, "find or fetch the models, texts and tasks that sweeps need", ("sweeps", sweeps))
    parser.add_argument("--look", action="store_true", help="fetch nothing: say only what is there")


def data(options: argparse.Namespace) -> int:
    """Exit status: 0 if everything is there, 1 if something is missing, or would have to be fetched."""
    from notebooks.batch.status import aligned
    from notebooks.batch.sweep import SWEEPS, sweep_path

    files = [sweep_path(name) for name in options.sweeps] or sorted(SWEEPS.glob("*.yml"))
    needed: dict[Need, list[str]] = {}
    for file in files:
        for need in needs_of(file):
            needed.setdefault(need, []).append(file.stem)
    answers = {need: _found(need, fetch=not options.look) for need in needed}
    rows = [("what", "kind", "needed by", "state", "where")]
    rows += [(need.name, need.kind, ", ".join(needed[need]), *answer) for need, answer in answers.items()]
    print(aligned(rows))
    absent = [need.name for need, answer in answers.items() if answer.state in ("missing", "on the hub")]
    print(f"\n{len(answers) - len(absent)} of {len(answers)} are there{f'; {_looked()}' if absent else ''}")
    return int(bool(absent))


def needs_of(file: Path) -> list[Need]:
    """The models, texts and tasks that the runs of a sweep name, in order; of notebooks with their defaults.

    Raises:
        ValueError: the file is no YAML, or names a notebook that is not there.
    """
    import yaml

    from notebooks.batch.sweep.loader import Loader

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"`SWEEP` (={str(file)!r}) cannot be read: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`SWEEP` (={str(file)!r}) must be a mapping with `runs`, or with `notebook`")
    base = content.get("base") or {}
    groups = content.get("runs") or [{name: value for name, value in content.items() if name != "base"}]
    return list(dict.fromkeys(need for group in groups for need in _of_group(group, base, file.parent)))


def _of_group(group: dict[str, Any], base: dict[str, Any], place: Path) -> Iterator[Need]:
    from notebooks.study.parameters import read_parameters

    beside = place / str(group.get("notebook"))
    declared = read_parameters(beside if beside.suffix == ".ipynb" and beside.is_file() else group.get("notebook", ""))
    usual = {name: parameter.default for name, parameter in declared.items()} | base | (group.get("base") or {})
    varied = [*(group.get("list") or []), *(group.get("include") or [])]
    for name in ("model_name", *_PARTS, "tasks"):
        values = [one[name] for one in varied if name in one] + list((group.get("grid") or {}).get(name, []))
        for value in values or [usual.get(name)] if name in declared else []:
            yield from _of_value(name, value, "task_path" in declared)


def _of_value(name: str, value: Any, of_harness: bool) -> Iterator[Need]:
    """The needs of one value of a parameter; of_harness: whether `tasks` are those of lm-eval."""
    if name == "tasks":
        yield from (Need(task, "task") for task in (value or []) if of_harness)
    elif value:
        yield Need(str(value), "model" if name == "model_name" else f"{_PARTS[name]} text")


def _found(need: Need, fetch: bool) -> Answer:
    """Where something is; it is fetched if it is only on the hub, and `fetch` allows that."""
    look = {"model": _model, "task": _task}.get(need.kind, _text)
    try:
        return look(need, fetch)
    except ValueError as error:
        return Answer("missing", str(error).replace("`model_name` (=", "`model` (="))


def _model(need: Need, fetch: bool) -> Answer:
    from compress.inputs.model import PACKAGES, is_on_hub, load_model
    from compress.inputs.skeleton import skeleton

    if is_on_hub(need.name) and fetch:
        load_model(need.name)
        return Answer("fetched", f"the hub's cache ({_cache()})")
    skeleton(need.name)
    if is_on_hub(need.name):
        return Answer("on the hub", "not fetched")
    return Answer("there", f"the package {PACKAGES[need.name]}" if need.name in PACKAGES else need.name)


def _text(need: Need, fetch: bool) -> Answer:
    from compress.inputs.corpus import check_corpus, load_text, names_of, sources
    from eval.contexts.haystack import NOISE

    if need.name == NOISE:
        return Answer("there", "made when it is needed")
    if (names := names_of(need.name)) != [need.name]:
        answers = [_text(need._replace(name=name), fetch) for name in names]
        return next((one for one in answers if one.state != "there"), answers[0])
    part, found = need.kind.partition(" ")[0], sources(need.name)
    check_corpus(need.name, part)
    if found.files and not (found.repositories and part == "calibration"):
        return Answer("there", str(found.files[0]))
    if not fetch:
        return Answer("on the hub", ", ".join(found.repositories))
    load_text(need.name, part)
    return Answer("fetched", f"{', '.join(found.repositories)}, in the hub's cache ({_cache()})")


def _task(need: Need, fetch: bool) -> Answer:
    from eval.tasks.task_files import check_names, find_tasks, local_place

    check_names([need.name])
    if place := local_place(need.name):
        return Answer("there", str(place))
    if not fetch:
        return Answer("on the hub", "lm-eval's own")
    find_tasks([need.name])
    return Answer("fetched", f"lm-eval's own, in the hub's cache ({_cache()})")


def _cache() -> str:
    from huggingface_hub.constants import HF_HOME

    return str(HF_HOME)


def _looked() -> str:
    """The places where data were looked for."""
    from compress.inputs.corpus import shared_data
    from kernels.support.hub import hub_reachable

    folder = shared_data()
    hub = "can be reached" if hub_reachable() else "cannot be reached from here, or was switched off"
    here = "" if folder.is_dir() else ", which is not there"
    return f"looked in {folder}{here} (WORKBENCH_DATA names another folder), in {_cache()}, and on the hub, which {hub}"
