"""Recipes as text, one language for every parameter that takes recipes.

`smoothquant(alpha=0.5), gptq(bits=8, group_size=-1), int8` is a list of methods in order, with knobs by name. Where
several recipes are compared, semicolons separate them, a name may stand before each (`static:
int8(activations=tensor)`), and a knob may have several values in braces: `wanda(ratio={0.3, 0.5})`.
"""

import ast
import difflib
import itertools
import math
from typing import Any, NamedTuple

from compress import METHODS
from compress.method import Method, settle

TAKEN = {"baseline", "compressed", "unsmoothed", "bfloat16", "float32"}  # names that a run gives to its own models
MOST_VARIANTS = 1000  # recipes that one text with braces may stand for


class Variant(NamedTuple):
    """A recipe with one value chosen from each pair of braces.

    values: the chosen values as text. text: the recipe with them in place; as it was written if it has no braces.
    """

    values: tuple[str, ...]
    text: str
    methods: list[Method]


def parse_variants(text: str, parameter: str = "recipe") -> tuple[str, list[Variant]]:
    """A recipe with {} in the place of its braces, and one variant for each combination of the values in them.

    Args:
        text: methods, each by its name in METHODS, with knobs as keyword arguments or without; a knob may have several
            values in braces: "wanda(ratio={0.3, 0.5}), gptq(bits=4)".
        parameter: where the text comes from, for errors.

    Raises:
        ValueError: no recipe, a method or a knob that does not exist, or a knob's value that is no literal or does not
            fit.
    """
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a null byte, brackets in brackets in brackets
        tree = None
    if not text.strip() or not isinstance(tree, ast.List):
        shown = text if len(text) <= 200 else f"{text[:120]}…"
        raise ValueError(
            f"`{parameter}` (={shown!r}) must name methods with their knobs, such as: smoothquant(alpha=0.5), int8"
        )
    knobs = [keyword for call in tree.elts if isinstance(call, ast.Call) for keyword in call.keywords]
    several = [(knob, knob.value.elts) for knob in knobs if isinstance(knob.value, ast.Set)]
    choices = [{ast.unparse(element): element for element in elements} for _, elements in several]
    if (count := math.prod(map(len, choices))) > MOST_VARIANTS:
        raise ValueError(f"`{parameter}` (={text!r}) stands for {count} recipes; at most {MOST_VARIANTS} would do")
    variants = []
    for chosen in itertools.product(*(choice.items() for choice in choices)):
        for (knob, _), (_, value) in zip(several, chosen, strict=True):
            knob.value = value
        methods = [_method(element, text, parameter) for element in tree.elts]
        variants.append(Variant(tuple(value for value, _ in chosen), _shown(tree) if several else text, methods))
    for knob, _ in several:
        knob.value = ast.Name("__values__")
    return (_shown(tree).replace("__values__", "{}") if several else text), variants


def parse_recipe(text: str) -> list[Method]:
    """The methods that a text names, in order, as `parse_variants` reads it.

    Raises:
        ValueError: as `parse_variants`, or values in braces: one recipe has one value for each knob.
    """
    _, variants = parse_variants(text)
    if variants[0].values:
        raise ValueError(f"`recipe` (={text!r}) has several values in braces, which only comparisons and curves take")
    return variants[0].methods


def parse_recipes(text: str) -> dict[str, list[Method]]:
    """Several recipes apart by semicolons, each with a name if one is put before it: "static:
    int8(activations='tensor'); gptq(bits={3, 4})". Values in braces give a recipe each.

    Raises:
        ValueError: as `parse_variants` does, or two recipes of one name.
    """
    recipes: dict[str, list[Method]] = {}
    for part in split_recipes(text):
        name, colon, rest = part.partition(":")
        named = bool(colon) and "(" not in name
        for variant in parse_variants(rest if named else part)[1]:
            label = ", ".join((name.strip(), *variant.values)) if named else variant.text
            if label in recipes:
                raise ValueError(
                    f"`recipes` (={text!r}) holds {label!r} twice; put a name before one, such as: another: {part}"
                )
            recipes[label] = variant.methods
    return recipes


def split_recipes(text: str) -> list[str]:
    """The recipes of a text that are apart by semicolons."""
    return [part for part in map(str.strip, text.split(";")) if part]


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


def _shown(tree: ast.List) -> str:
    return ast.unparse(tree)[1:-1]


def _method(node: ast.expr, text: str, parameter: str) -> Method:
    called = node if isinstance(node, ast.Call) else None
    name = called.func if called else node
    if not isinstance(name, ast.Name) or name.id not in METHODS:
        shown = ast.unparse(name)
        near = difflib.get_close_matches(shown, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"`{parameter}` (={text!r}): {shown} is not a method; {hint}There are {', '.join(METHODS)}")
    method = METHODS[name.id]
    if called and called.args:
        raise ValueError(
            f"`{parameter}` (={text!r}): knobs of {name.id} are given by name: {', '.join(method.knobs())}"
        )
    values = {}
    for keyword in called.keywords if called else []:
        if keyword.arg not in method.knobs():
            near = difflib.get_close_matches(str(keyword.arg), method.knobs(), n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(f"`{keyword.arg}` is not a knob of {name.id}; {hint}It has {', '.join(method.knobs())}")
        if isinstance(keyword.value, ast.Dict):
            raise ValueError(
                f"`{keyword.arg}` of {name.id} in `{parameter}` (={text!r}): braces hold values, as in {{1, 2}}"
            )
        try:
            bare = isinstance(keyword.value, ast.Name)  # a word, which command lines would rather not quote
            values[keyword.arg] = keyword.value.id if bare else ast.literal_eval(keyword.value)
        except ValueError:
            shown = ast.unparse(keyword.value)
            raise ValueError(
                f"`{keyword.arg}` (={shown}) of {name.id} must be a literal: 4, 0.5, True, search"
            ) from None
    return method(**values)
