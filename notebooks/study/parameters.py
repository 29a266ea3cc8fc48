"""A notebook's parameters: read from its cell tagged `parameters`, checked before any work.

papermill only warns about a parameter that the notebook does not have, and checks no types.
"""

import ast
import contextlib
import difflib
import functools
import json
import math
import operator
import os
import reprlib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
_INJECTED = "# Parameters"  # first line of the cell that papermill injects
SAVE_FORMAT, OWN_FORMAT = "save_format", "workbench"  # the parameter, and its default
_WIDEST = 200  # characters of a value in a message
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict, _REPR.maxstring = 6, 24, 24, 24, _WIDEST
_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell: `name: type = default  # help`."""

    name: str
    type: Any
    default: Any
    help: str


def read_parameters(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters that a notebook declares, in order.

    Args:
        notebook: a path, or the name of one in this folder.

    Raises:
        ValueError: there is no such notebook, or its parameters cell has other lines than literals with types.
    """
    path = notebook_path(notebook)
    tagged = [cell for cell in read_cells(path) if "parameters" in cell.tags]
    if len(tagged) != 1:
        raise ValueError(f"{path.name} must have one cell tagged `parameters`, not {len(tagged)}")
    lines = tagged[0].source.splitlines()
    found = {}
    try:
        nodes = ast.parse(tagged[0].source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{path.name}: its parameters cell is not plain Python (`name: type = literal  # help`, no magics): {error}"
        ) from error
    for node in nodes:
        try:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
                raise ValueError("no parameter")
            default = ast.literal_eval(node.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{path.name}: line {node.lineno} of its parameters must read `name: type = literal  # help`"
            ) from error
        help = lines[node.end_lineno - 1].partition("#")[2].strip()
        found[node.target.id] = Parameter(node.target.id, _type(node.annotation), default, help)
    return found


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook: code or markdown, its text, its tags."""

    kind: str
    source: str
    tags: tuple[str, ...]


def read_cells(path: Path) -> list[Cell]:
    """All cells of a notebook, in order. (Not by nbformat, whose import takes seconds.)

    Raises:
        ValueError: the file is no notebook of format 4.
    """
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        return [
            Cell(cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", [])))
            for cell in made["cells"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"`notebook` (={str(path)!r}) cannot be read as a notebook of format 4: {error!r}") from error


def _type(node: ast.expr) -> Any:
    """The type that an annotation such as `int`, `str | None`, `"Union[int, str]"` or `list[int]` names."""
    match node:
        case ast.Name(id=name) if name in _TYPES:
            return _TYPES[name]
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left) | _type(right)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_type(item)]
        case ast.Constant(value=str(text)):  # papermill finds no parameter with |, and this needs no import
            return _type(ast.parse(text, mode="eval").body)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=kinds)):
            return functools.reduce(operator.or_, map(_type, kinds))
    raise ValueError(
        f"`{ast.unparse(node)}` is no type for a parameter: {', '.join(_TYPES)}, None, | and list[...] are"
    )


def notebook_path(notebook: str | Path) -> Path:
    """Path of a notebook given by path, or by name ("gptq")."""
    path = Path(notebook)
    if path.suffix != ".ipynb":
        path = FOLDER / f"{notebook}.ipynb"
    if not path.is_file():
        names = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
        known = ", ".join(names)
        raise ValueError(f"`notebook` (={str(notebook)!r}) is not there; {near(notebook, names)}known by name: {known}")
    return path


def near(name: str | Path, known: Iterable[str]) -> str:
    """The names that a user may have meant, for a message that goes on; "" if none is near."""
    found = difflib.get_close_matches(str(name), known, 3, 0.6)
    return f"did you mean {' or '.join(found)}? " if found else ""


def decides_result(name: str) -> bool:
    """Whether a parameter can change the result of a run; paths of files and the format of a saved model cannot."""
    return not name.endswith("_path") and name != SAVE_FORMAT


def check_parameters(values: dict[str, Any], declared: dict[str, Parameter]) -> dict[str, Any]:
    """The values of all declared parameters, defaults filled in.

    Raises:
        ValueError: a parameter is not declared, or a value has another type; the message names valid ones.
    """
    for name, value in values.items():
        if name not in declared:
            near = difflib.get_close_matches(name, declared, n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(
                f"`{name}` (={short_repr(value)}) is not a parameter of this notebook; {hint}"
                f"It has {', '.join(declared)}"
            )
        wanted = declared[name].type
        if not _fits(value, wanted):
            wants = f"must be {type_name(wanted)}, not {type(value).__name__}"
            raise ValueError(f"`{name}` (={short_repr(value)}) {wants}; its default is {declared[name].default!r}")
        if not all(map(_in_range, _numbers(value))):
            raise ValueError(
                f"`{name}` (={short_repr(value)}) must be finite, and below 2**63 in size if it is a whole number; "
                f"its default is {declared[name].default!r}"
            )
    return {name: _typed(values.get(name, parameter.default), parameter.type) for name, parameter in declared.items()}


def short_repr(value: Any) -> str:
    """A value for an error message, as Python writes it, cut if it is long; the rest of it is never written out."""
    if isinstance(value, str) and len(value) > _WIDEST:
        return f"{value[:120]!r}… ({len(value):,} characters)"
    try:
        text = _REPR.repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _WIDEST else f"{text[:120]}…"


def bounded(text: str, most: int = 2000) -> str:
    """A message, cut if it is long."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _numbers(value: Any) -> list[int | float]:
    """The numbers of a value that is a number or a list of numbers."""
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []


def _in_range(number: float) -> bool:
    """Whether torch and numpy can hold a number."""
    return abs(number) < 1 << 63 if isinstance(number, int) else math.isfinite(number)


def from_here(name: str, value: Any, place: Path | None = None) -> Any:
    """A path relative to `place` (None: to the folder of the command), made absolute.

    The notebook runs in the checkout. Paths are the parameters `*_path` and values that name a file or folder there;
    other values do not change.
    """
    if not isinstance(value, str) or not value:
        return value
    path = (place or Path()) / Path(value).expanduser()
    # os.path.exists: Path.exists raises for a text, such as a list of recipes, that is too long for a file's name
    is_path = name.endswith("_path") or ((path.suffix or "/" in value) and os.path.exists(path))
    return os.path.abspath(path) if is_path else value


def type_name(wanted: Any) -> str:
    """A parameter's type in the notation of its notebook."""
    return str(wanted) if typing.get_args(wanted) else getattr(wanted, "__name__", str(wanted))


def parse_value(text: str, wanted: Any) -> Any:
    """The value of a text on a command line by the declared type; a number or the text itself if it does not fit.

    A list may be written as JSON, or as its values between commas, with or without brackets.
    """
    if wanted is str:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    if typing.get_origin(wanted) is list and not isinstance(value, list):
        inside = text.strip().removeprefix("[").removesuffix("]")
        value = [parse_value(part.strip(), typing.get_args(wanted)[0]) for part in inside.split(",") if part.strip()]
    if _fits(value, wanted):
        return _typed(value, wanted)
    return value if isinstance(value, int | float) else text


def _typed(value: Any, wanted: Any) -> Any:
    """A whole number as a float, if a float is wanted: 1 and 1.0 are the same parameter."""
    if typing.get_origin(wanted) is list:
        return [_typed(item, typing.get_args(wanted)[0]) for item in value]
    among = typing.get_args(wanted) or (wanted,)
    return float(value) if type(value) is int and float in among and int not in among and _in_range(value) else value


def values_in(namespace: dict[str, Any], declared: dict[str, Parameter]) -> dict[str, Any]:
    """The values of all declared parameters in the `globals()` of a running notebook, checked.

    Raises:
        ValueError: as in `check_parameters`; or papermill was given a value that another cell has replaced, as happens
            where no cell, or more than one, is tagged `parameters`.
    """
    given = injected(namespace.get("In", []))
    check_parameters(given, declared)
    for name, value in given.items():
        if repr(namespace.get(name)) != repr(value):
            raise ValueError(
                f"`{name}` (={short_repr(value)}) was given, but is {short_repr(namespace.get(name))} where the run "
                "starts: a cell behind the injected one sets it again. Exactly one cell must be tagged `parameters`, "
                "and no other one may set them"
            )
    return check_parameters({name: namespace[name] for name in declared if name in namespace}, declared)


def injected(cells: list[str]) -> dict[str, Any]:
    """The parameters that papermill injected, from the sources of executed cells, the last ones of several; {} if there
    are none."""
    found = {}
    for source in (cell for cell in cells if cell.lstrip().startswith(_INJECTED)):
        with contextlib.suppress(SyntaxError, ValueError):  # a cell of the user with the same first line
            nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
            found |= {node.targets[0].id: _literal(node.value) for node in nodes}
    return found


def _literal(node: ast.expr) -> Any:
    """The value of a literal as papermill writes it; float('nan') and float('inf') too."""
    match node:
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            return float(text)
    return ast.literal_eval(node)


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(wanted))
    if wanted in (None, type(None)):
        return value is None
    if wanted is float:
        return type(value) in (int, float)
    if typing.get_origin(wanted) is list:
        return type(value) is list and all(_fits(v, typing.get_args(wanted)[0]) for v in value)
    return type(value) is wanted
