"""Checks the inputs of a run while it is planned: nothing is loaded, downloaded or written.

A notebook checks its own parameters: its cells up to the last one tagged `check` are executed here, with the run's
parameters. That is done only for notebooks that the user trusts (`eval.tasks.trust`). Then the recipes that these cells
made are checked against the shapes of the model, and the texts against the numbers of tokens asked for.
"""

import contextlib
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from eval.tasks.trust import is_trusted
from notebooks.study.parameters import FOLDER, notebook_path, read_cells, short_repr

NEEDED_BYTES = 64 << 20  # free space for records, pages and executed notebooks
_PLENTY = 40  # bytes of a corpus per token of one part: more than enough in any language


def check_run(
    notebook: str | Path, values: dict[str, Any], *, named: bool = False, awaited: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError if a run of this notebook with these values would fail for a reason that is known now.

    Args:
        named: the user named this notebook on the command line, so that its cells may be executed.
        awaited: files that are made before the run; the run itself checks the methods that read them.
    """
    path = notebook_path(notebook)
    if not named and not is_trusted(path, (FOLDER,)):
        return
    namespace = _executed(path, values)
    if values.get("device", "auto") not in ("auto", "cpu"):  # these two exist everywhere, and are checked without torch
        from compress.inputs.model import check_device

        check_device(values["device"])
    if values.get("model_name"):
        _check_model(values, list(_recipes(namespace.values())), awaited)
    for name, part in (("corpus", "calibration"), ("eval_corpus", "evaluation"), ("haystack", "evaluation")):
        if values.get(name):
            _check_text(name, part, values)


def check_folder(runs: Path) -> None:
    """Raise ValueError if nothing can be written into a folder of runs, which need not exist yet."""
    there = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"`--runs` (={str(runs)!r}): nothing can be written in {there}: {error.strerror}; name another folder"
        ) from error
    if free < NEEDED_BYTES:
        raise ValueError(
            f"`--runs` (={str(runs)!r}) has {free / 1e6:.0f} MB free; runs need {NEEDED_BYTES / 1e6:.0f} MB at least: "
            "make room, or name another folder"
        )


def _executed(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The namespace of a notebook after its last cell tagged `check`.

    Raises:
        ValueError: one of these cells refuses the values, or has a mistake.
    """
    cells = [cell for cell in read_cells(path) if cell.kind == "code"]
    last = max((i for i, cell in enumerate(cells) if "check" in cell.tags), default=-1)
    # `check_save_path` checks whether `save_path` is free: an earlier attempt may be there now.
    given = values | ({"save_path": _free_beside(values["save_path"])} if values.get("save_path") else {})
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells[: last + 1]:
        if "parameters" in cell.tags:
            namespace |= given
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(cell.source, path.name, "exec"), namespace)
        except ValueError as error:  # with the path that the user gave
            raise ValueError(
                str(error).replace(str(given.get("save_path") or "\0"), str(values.get("save_path")))
            ) from error
        except Exception as error:  # a mistake in the notebook itself: reported now, not after hours
            raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    return namespace


def _free_beside(path: str) -> str:
    """A path in the same folder that does not exist."""
    return f"{path.rstrip('/')}.{uuid.uuid4().hex}.planned"


def _recipes(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Every list of methods among these values, in dicts and in objects with a dict `recipes` too."""
    from compress.method import Method

    for value in values:
        if isinstance(value, list) and value and all(isinstance(one, Method) for one in value):
            yield value
        elif isinstance(value, dict):
            yield from _recipes(one for name, one in value.items() if name != "__builtins__")
        elif isinstance(getattr(value, "recipes", None), dict):
            yield from _recipes(value.recipes.values())


def _check_model(values: dict[str, Any], recipes: list[list[Any]], awaited: frozenset[str]) -> None:
    """Raise ValueError if the model does not exist, or a recipe does not fit the shapes of its weights."""
    from compress.inputs.skeleton import skeleton
    from compress.plan import check_recipe
    from eval.evaluate import check_evaluation

    model = skeleton(values["model_name"])
    for recipe in recipes:
        check_recipe(recipe, model, outline=True, awaited=awaited)
    if "window" in values:
        counts = {name: values[name] for name in ("speed_rounds", "write_tokens") if name in values}
        check_evaluation(model, {}, window=values["window"], **counts)
    if "guess_tokens" in values or values.get("lossless"):
        _check_guesses(model, values)


def _check_guesses(model: Any, values: dict[str, Any]) -> None:
    """Raise ValueError if guesses cannot be measured like this."""
    from compress.inputs.skeleton import cheap_tokenizer
    from eval.speed.lossless import check_lossless

    length = "guess_tokens" if "guess_tokens" in values else "write_tokens"
    how = {name: values[name] for name in ("speed_rounds", "rollback") if name in values}
    try:
        check_lossless(model, cheap_tokenizer(values["model_name"]), guess_tokens=values[length], **how)
    except ValueError as error:
        raise ValueError(str(error).replace("`guess_tokens`", f"`{length}`")) from error


def _check_text(name: str, part: str, values: dict[str, Any]) -> None:
    """Raise ValueError if a corpus does not exist, or a part of it is too short, if that can be found quickly."""
    from compress.inputs.corpus import check_corpus, local_file
    from eval.contexts.haystack import NOISE

    corpus = values[name]
    if name == "haystack" and corpus == NOISE:
        return
    try:
        check_corpus(corpus, part)
        file = local_file(corpus)
        stat = file.stat() if file else None
        asked = (values.get("samples"), values.get("seqlen")) if part == "calibration" else (1, values.get("window"))
        if name != "haystack" and stat and all(asked) and stat.st_size < _PLENTY * asked[0] * asked[1]:
            _check_length(corpus, part, *asked, values.get("model_name", ""), stat.st_mtime_ns)
    except ValueError as error:
        raise ValueError(str(error).replace("`corpus`", f"`{name}`")) from error


@cache
def _check_length(corpus: str, part: str, samples: int, seqlen: int, model_name: str, changed_ns: int) -> None:
    """Raise ValueError if a part of a corpus has too few tokens, or, without a tokenizer, too few characters."""
    from compress.inputs.calibration import calibration, held_out
    from compress.inputs.corpus import load_text
    from compress.inputs.skeleton import cheap_tokenizer
    from eval.text.windows import windows

    tokenizer = cheap_tokenizer(model_name) if model_name else None
    if tokenizer is None:
        characters = len("\n\n".join(load_text(corpus, part)).encode())
        if characters < samples * seqlen:
            raise ValueError(
                f"`corpus` (={short_repr(corpus)}) has {characters} bytes in its {part} part, too few for {samples} x "
                f"{seqlen} tokens; take another corpus, or fewer tokens"
            )
    elif part == "calibration":
        calibration(tokenizer, corpus=corpus, samples=samples, seqlen=seqlen)
    else:
        windows(held_out(tokenizer, corpus=corpus), window=seqlen, limit=1)
