"""Completion of words in the shell, where the package argcomplete is installed; nothing else needs it.

$ pip install argcomplete          # or: pip install model-compression-workbench[completion]
$ eval "$(register-python-argcomplete workbench)"
"""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ASKED = "_ARGCOMPLETE"  # variable with which the shell asks for completions


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end, if it asks for completions; else return."""
    if ASKED not in os.environ:
        return
    with contextlib.suppress(ImportError):
        import argcomplete

        files = argcomplete.FilesCompleter()
        for action in _actions(parser):
            if words := _WORDS.get(action.dest):
                others = files if action.dest in _ALSO_PATHS else lambda *_, **__: []
                action.completer = _Completer(words, others)
        argcomplete.autocomplete(parser)


@dataclass(frozen=True)
class _Completer:
    """Words, and paths where those may be given, too, in the form that argcomplete calls."""

    words: Callable[..., list[str]]
    paths: Callable[..., Iterable[str]]

    def __call__(self, prefix: str = "", **how: object) -> list[str]:
        return [*self.words(**how), *self.paths(prefix)]


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def _notebooks(**_: object) -> list[str]:
    from notebooks.study.parameters import FOLDER

    return [path.stem for path in FOLDER.glob("*.ipynb")]


def _sweeps(**_: object) -> list[str]:
    from notebooks.batch.sweep import SWEEPS

    return [path.stem for path in SWEEPS.glob("*.yml")]


def _started(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Sweeps that were started, and runs."""
    from notebooks.batch.status import run_folders, runs_folder

    runs = runs_folder(getattr(parsed_args, "runs", None) or "")
    return [path.parent.name for path in runs.glob("sweeps/*/plan.json")] + [path.name for path in run_folders(runs)]


def _models(**_: object) -> list[str]:
    from compress.checkpoint.gguf.embedded import EMBEDDED

    return [*EMBEDDED, "tiny"]


def _recipes(**_: object) -> list[str]:
    from compress import METHODS

    return list(METHODS)


def _formats(**_: object) -> list[str]:
    from compress.checkpoint.save import SAVE_FORMATS

    return list(SAVE_FORMATS)


_ALSO_PATHS = ("what", "notebook", "sweeps", "sweep", "named", "model", "baseline")
_WORDS = {
    "what": lambda **how: [*_notebooks(), *_sweeps()], "notebook": _notebooks, "sweeps": _sweeps, "sweep": _started,
    "named": _started, "text": _started, "model": _models, "baseline": _models, "recipe": _recipes, "format": _formats,
}  # fmt: skip
