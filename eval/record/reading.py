"""Values of a given type from JSON: missing and ill-typed values become None, "" or empty."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    """A value in the form of JSON: lists for tuples, and a text for each number that is not finite."""
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
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        (of,) = (one for one in inner if one is not NoneType)
        return None if value is None or (is_dataclass(of) and not value) else row(of, value)
    if is_dataclass(kind):
        held = vars(value) if is_dataclass(value) else value if isinstance(value, Mapping) else {}
        return kind(**{name: row(of, held.get(name)) for name, of in _types(kind).items()})
    if origin is tuple:
        return tuple(one for v in value if _fits(one := row(inner[0], v), inner[0])) if _is_list(value) else ()
    if origin is dict:
        pairs = ((_key(inner[0], k), row(inner[1], v)) for k, v in value.items()) if isinstance(value, Mapping) else ()
        return {k: v for k, v in pairs if k is not None and _fits(v, inner[1])}
    if kind is str:
        return "" if value is None else str(value)
    if kind is bool:
        return value if isinstance(value, bool) else None
    return value if kind is object else _number(kind, value)


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _fits(value: Any, kind: Any) -> bool:
    """Is a member kept? None, such as for a value that is not a number, is dropped unless the type allows None."""
    return value is not None or kind is object or NoneType in get_args(kind)


def _key(kind: type, key: Any) -> Any:
    return str(key) if kind is str else int(key) if str(key).isdigit() else None


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
