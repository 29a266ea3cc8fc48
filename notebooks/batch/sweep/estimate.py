"""How long a run should take, where none like it was measured: the time that its notebook states for its default
parameters, in proportion to the model, the texts and the recipes."""

import math
import re
from pathlib import Path
from typing import Any

from notebooks.study.identity import MODEL
from notebooks.study.parameters import notebook_path, read_cells, read_parameters

_NUMBERS = {"a": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
            "ten": 10, "fifteen": 15, "twenty": 20, "thirty": 30, "half an": 0.5, "a quarter of an": 0.25}  # fmt: skip
_TIME = re.compile(rf"\b({'|'.join(sorted(_NUMBERS, key=len, reverse=True))}|\d+) (minute|hour)s?\b")
# The amounts of each part of a notebook's work: calibration or contexts, scoring, timing. Parts take alike long.
_PARTS = (
    ("samples", "seqlen", "lengths", "tasks", "visibilities"),
    ("max_windows", "window"),
    ("speed_rounds", "speed_contexts"),
)
_RECIPES = ("compare", "curves", "beside")


def written_seconds(notebook: str | Path) -> float | None:
    """The time that a notebook's text states for its default parameters, the longer of two; None if it states none."""
    texts = [cell.source for cell in read_cells(notebook_path(notebook)) if cell.kind == "markdown"]
    if not (stated := _TIME.search(" ".join(texts[:2]))):
        return None
    number, unit = stated.groups()
    return float(_NUMBERS.get(number) or number) * (60 if unit == "minute" else 3600)


def estimated_seconds(notebook: str | Path, values: dict[str, Any]) -> float | None:
    """The expected time of a run with these parameters; None if its notebook states no time."""
    if (stated := written_seconds(notebook)) is None:
        return None
    usual = usual_values(notebook)
    return stated * _size(values.get(MODEL), usual.get(MODEL)) * (work_of(values, usual) or 1.0)


def usual_values(notebook: str | Path) -> dict[str, Any]:
    """{parameter: its default} of a notebook."""
    return {name: parameter.default for name, parameter in read_parameters(notebook).items()}


def work_of(values: dict[str, Any], usual: dict[str, Any]) -> float | None:
    """The work of a run on its texts and recipes, relative to that with the usual parameters of its notebook; None if
    the values are not those of this notebook."""
    values = usual | values
    try:
        return _amount(values, usual) * _recipes(values, usual)
    except (TypeError, ValueError):
        return None


def _size(model: Any, usual: Any) -> float:
    """Parameters of a model for each one of the usual model; 1 where a model cannot be read yet."""
    if model == usual or not model:
        return 1.0
    from compress.inputs.skeleton import skeleton

    try:
        ours, theirs = (sum(one.numel() for one in skeleton(name).parameters()) for name in (model, usual))
    except ValueError:
        return 1.0
    return ours / theirs


def _amount(values: dict[str, Any], usual: dict[str, Any]) -> float:
    """The work on texts and the timing, for that with the usual parameters; 1 for a notebook with neither."""
    parts = [[name for name in part if name in usual and _number(usual[name])] for part in _PARTS]
    ratios = [math.prod(_number(values[name]) / _number(usual[name]) for name in part) for part in parts if part]
    return sum(ratios) / len(ratios) if ratios else 1.0


def _number(value: Any) -> float:
    """How much a parameter asks for: a number, the sum of a list of numbers, or the length of another list."""
    if isinstance(value, list):
        return sum(value) if all(isinstance(one, int | float) for one in value) else len(value)
    return float(value)


def _recipes(values: dict[str, Any], usual: dict[str, Any]) -> float:
    """Recipes of a run for each one of a usual run; values in braces count one by one."""
    asked, before = (
        1 + sum(_listed(of[name]) for name in _RECIPES if isinstance(of.get(name), str)) for of in (values, usual)
    )
    return asked / before


def _listed(text: str) -> int:
    return sum(
        math.prod(inner.count(",") + 1 for inner in re.findall(r"\{([^}]*)\}", one))
        for one in text.split(";")
        if one.strip()
    )
