"""JSON files, and values of a given type from JSON: missing and ill-typed values become None, "" or empty."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


class DamagedError(ValueError):
    """A file that is there, but is not what its name says; the message names the file and what is wrong with it."""


def read_object(path: Path, shape: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The JSON object of a file; {} if there is no such file. Entries that are null are left out.

    Args:
        shape: the types of entries, if they are there.

    Raises:
        DamagedError: the file cannot be read, holds something else, or an entry has another type.
    """
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedError(f"{path.name} is damaged: {why}") from error
    if not isinstance(made, dict):
        raise DamagedError(f"{path.name} is damaged: it holds no object, but {type(made).__name__}")
    made = {name: value for name, value in made.items() if value is not None}
    if wrong := [name for name, kind in shape.items() if name in made and not isinstance(made[name], kind)]:
        raise DamagedError(f"{path.name} is damaged: `{wrong[0]}` is of the type {type(made[wrong[0]]).__name__}")
    return made


def read_json(path: Path, shape: Mapping[str, Any] = {}) -> dict[str, Any]:
    """As `read_object`, and {} for a damaged file: for files that another process may be writing."""
    try:
        return read_object(path, shape)
    except DamagedError:
        return {}


def plain(value: Any) -> Any:
    """A value in the form of JSON: objects for dataclasses, lists for tuples, and a text for each number that is not
    finite."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if _is_list(value):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def row(kind: Any, value: Any) -> Any:
    """A value of this type from a JSON value, which may be incomplete.

    Args:
        kind: a dataclass of this module, tuple[X, ...], dict[K, X], X | None, str, int, float, bool, or object.
        value: the value in a record; a dataclass is read by its attributes.
    """
    return _reader(kind)(value)


def is_complete(value: Any) -> bool:
    """Whether a typed value, and everything in it, has all entries that its types need: those that can be neither None
    nor left out."""
    if isinstance(value, Mapping):
        return all(map(is_complete, value.values()))
    if _is_list(value):
        return all(map(is_complete, value))
    if not is_dataclass(value):
        return True
    parts = {name: getattr(value, name) for name in vars(value)}
    return not any(parts[name] is None for name in _needed(type(value))) and all(map(is_complete, parts.values()))


@cache
def _needed(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass without a default that cannot be None."""
    hints = get_type_hints(kind)
    required = (field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    return tuple(name for name in required if not _keeps_none(hints[name]))


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that reads values of a type; made once, because a record has thousands of values."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        (of,) = (one for one in inner if one is not NoneType)
        read, whole = _reader(of), is_dataclass(of)
        return lambda value: None if value is None or (whole and not value) else read(value)
    if is_dataclass(kind):
        return _row_reader(kind)
    if origin is tuple:
        return _tuple_reader(inner[0])
    if origin is dict:
        return _dict_reader(*inner)
    if kind is str:
        return lambda value: "" if value is None else str(value)
    if kind is bool:
        return lambda value: value if isinstance(value, bool) else None
    return (lambda value: value) if kind is object else (lambda value: _number(kind, value))


def _row_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = [(field.name, _reader(hints[field.name])) for field in fields(kind)]

    def read(value: Any) -> Any:
        held = value if isinstance(value, Mapping) else vars(value) if is_dataclass(value) else {}
        return kind(**{name: of(held.get(name)) for name, of in readers})

    return read


def _tuple_reader(kind: Any) -> Callable[[Any], tuple]:
    read, keeps_none = _reader(kind), _keeps_none(kind)

    def items(value: Any) -> tuple:
        made = map(read, value) if _is_list(value) else ()
        return tuple(made if keeps_none else (one for one in made if one is not None))

    return items


def _dict_reader(key: type, kind: Any) -> Callable[[Any], dict]:
    read, keeps_none = _reader(kind), _keeps_none(kind)

    def items(value: Any) -> dict:
        made = ((_key(key, k), read(v)) for k, v in value.items()) if isinstance(value, Mapping) else ()
        return {k: v for k, v in made if k is not None and (keeps_none or v is not None)}

    return items


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _keeps_none(kind: Any) -> bool:
    """Whether a member that is None, such as for a value that is not a number, is kept: if the type allows None."""
    return kind is object or NoneType in get_args(kind)


def _key(kind: type, key: Any) -> Any:
    return sys.intern(str(key)) if kind is str else int(key) if str(key).isdigit() else None


def _number(kind: type, value: Any) -> float | int | None:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        value = float(value)
    if not isinstance(value, int | float):
        return None
    if kind is int:  # NaN, infinity and huge numbers are not counts
        return int(value) if abs(value) < 2**63 else None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
