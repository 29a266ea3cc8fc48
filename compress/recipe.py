"""Recipes as text, for parameters of notebooks: "smoothquant(alpha=0.5), gptq(bits=8, group_size=-1), int8"."""

import ast
import difflib
from typing import Any

from compress import METHODS
from compress.method import Method, settle

TAKEN = {"baseline", "compressed", "unsmoothed", "bfloat16", "float32"}  # what models of a run are called already


def parse_recipe(text: str) -> list[Method]:
    """The methods that a text names, in order; each by its name in METHODS, with knobs as keyword arguments or without.

    Raises:
        ValueError: no recipe, a method or a knob that does not exist, or a knob's value that is no literal or does not
            fit.
    """
    try:
        node = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last three: null bytes, and deep nesting
        node = None
    if not text.strip() or not isinstance(node, ast.List):
        text = text if len(text) <= 200 else f"{text[:120]}…"
        raise ValueError(f"`recipe` (={text!r}) must name methods, such as: smoothquant(alpha=0.5), int8")
    return [_method(element, text) for element in node.elts]


def parse_recipes(text: str) -> dict[str, list[Method]]:
    """Several recipes apart by semicolons, each with a name if one is put before it: "static:
    int8(activations='tensor'); nf4".

    Raises:
        ValueError: as `parse_recipe` does, or two recipes of one name.
    """
    found: dict[str, list[Method]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, colon, rest = part.partition(":")
        named = bool(colon) and "(" not in name
        name = name.strip() if named else part
        if name in found:
            raise ValueError(
                f"`recipes` (={text!r}) holds {name!r} twice; put a name before one, such as: another: {part}"
            )
        found[name] = parse_recipe(rest if named else part)
    return found


def call(name: str, **knobs: Any) -> str:
    """A method with these knobs as `parse_recipe` reads it; those that are "" are left to the method's own defaults.

    Without a name there is no method: "", which `chain` leaves out.
    """
    if not name:
        return ""
    given = ", ".join(f"{knob}={value!r}" for knob, value in knobs.items() if value != "")
    return f"{name}({given})"


def chain(*calls: str) -> str:
    """A recipe of these methods, one after the other; "" among them are left out."""
    return ", ".join(filter(None, calls))


def recipes_of_run(recipe: str, compare: str = "") -> dict[str, list[Method]]:
    """The recipes of a run, by the names that its models have in the scores.

    Args:
        recipe: the one that the run is about, "compressed"; where it transforms something before it quantises, the same
            without that comes too, as "unsmoothed".
        compare: further ones, as `parse_recipes` reads them.

    Raises:
        ValueError: as `parse_recipe` and `parse_recipes` do; methods that do not compose; or a name that is taken.
    """
    methods, others = parse_recipe(recipe), parse_recipes(compare)
    for name in TAKEN & set(others):
        raise ValueError(
            f"`compare` (={compare!r}): {name!r} is what another model of the run is called; name it differently"
        )
    plain = [method for method, settled in zip(methods, settle(methods), strict=True) if settled.stage != "transform"]
    without = {"unsmoothed": plain} if 0 < len(plain) < len(methods) else {}
    recipes = {"compressed": methods, **without, **others}
    for one in recipes.values():
        settle(one)
    return recipes


def _method(node: ast.expr, text: str) -> Method:
    called = node if isinstance(node, ast.Call) else None
    name = called.func if called else node
    if not isinstance(name, ast.Name) or name.id not in METHODS:
        shown = ast.unparse(name)
        near = difflib.get_close_matches(shown, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"`recipe` (={text!r}): {shown} is not a method; {hint}There are {', '.join(METHODS)}")
    method = METHODS[name.id]
    if called and called.args:
        raise ValueError(f"`recipe` (={text!r}): knobs of {name.id} are given by name: {', '.join(method.knobs())}")
    values = {}
    for keyword in called.keywords if called else []:
        if keyword.arg not in method.knobs():
            near = difflib.get_close_matches(str(keyword.arg), method.knobs(), n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(f"`{keyword.arg}` is not a knob of {name.id}; {hint}It has {', '.join(method.knobs())}")
        try:
            bare = isinstance(keyword.value, ast.Name)  # a word, which command lines would rather not quote
            values[keyword.arg] = keyword.value.id if bare else ast.literal_eval(keyword.value)
        except ValueError:
            shown = ast.unparse(keyword.value)
            raise ValueError(
                f"`{keyword.arg}` (={shown}) of {name.id} must be a literal: 4, 0.5, True, search"
            ) from None
    return method(**values)
