"""The language of recipes: turns a text into methods with their knobs."""

import ast
import itertools
import keyword as python
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from compress.method import Method, allowed, check_knob_names

MOST_VARIANTS = 1000  # most recipes from one text with braces
# A quoted text, or a value that is a word here and a keyword in Python's parser, such as `global`.
_WORDS = "|".join(set(python.kwlist) - {"True", "False", "None"})
_KEYWORD = re.compile(rf"'[^']*'|\"[^\"]*\"|(?<=[={{,])\s*({_WORDS})\s*(?=[,)}}])")


class RecipeVariant(NamedTuple):
    """A recipe with one value chosen from each pair of braces.

    values: the chosen values as text. text: the recipe with these values; unchanged if it has no braces.
    """

    values: tuple[str, ...]
    text: str
    methods: list[Method]


def variants_of(
    text: str, methods: Mapping[str, type[Method]], parameter: str = "recipe"
) -> tuple[str, list[RecipeVariant]]:
    """A recipe with {} in the place of its braces, and one variant for each combination of the values in them.

    Args:
        text: methods, each by its name, with knobs as keyword arguments or without; a knob may have several
            values in braces: "wanda(ratio={0.3, 0.5}), gptq(bits=4)".
        methods: all methods, by their names.
        parameter: the name of the text's parameter, for errors.

    Raises:
        ValueError: no recipe, a method or a knob that does not exist, or a knob's value that is no literal or does not
            fit.
    """
    try:
        quoted = _KEYWORD.sub(lambda found: repr(found[1]) if found[1] else found[0], text)
        tree = ast.parse(f"[{quoted}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a null byte, brackets in brackets in brackets
        tree = None
    if not text.strip() or not isinstance(tree, ast.List):
        shown = text if len(text) <= 200 else f"{text[:120]}…"
        raise ValueError(
            f"`{parameter}` (={shown!r}) must name methods with their knobs, such as: smoothquant(alpha=0.5), int8"
            f"{_mistake(text)}"
        )
    knobs = [keyword for call in tree.elts if isinstance(call, ast.Call) for keyword in call.keywords]
    several = [(knob, knob.value.elts) for knob in knobs if isinstance(knob.value, ast.Set)]
    choices = [{ast.unparse(element): element for element in elements} for _, elements in several]
    if (count := math.prod(map(len, choices))) > MOST_VARIANTS:
        raise ValueError(f"`{parameter}` (={text!r}) stands for {count} recipes; at most {MOST_VARIANTS} are possible")
    variants = []
    for chosen in itertools.product(*(choice.items() for choice in choices)):
        for (knob, _), (_, value) in zip(several, chosen, strict=True):
            knob.value = value
        made = [_method(element, methods, text, parameter) for element in tree.elts]
        variants.append(RecipeVariant(tuple(value for value, _ in chosen), _shown(tree) if several else text, made))
    for knob, _ in several:
        knob.value = ast.Name("__values__")
    return (_shown(tree).replace("__values__", "{}") if several else text), variants


def split_recipes(text: str) -> list[str]:
    """The recipes of a text, separated by semicolons; semicolons inside quotes belong to a knob's value."""
    parts, quote = [""], ""
    for character in text:
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        if character == ";" and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in map(str.strip, parts) if part]


def _mistake(text: str) -> str:
    """The mistake in a text that cannot be parsed, as the end of an error's message; "" if it is not known."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)  # without quoted texts
    if "'" in bare.replace("''", "") or '"' in bare:
        return "; a quotation mark is never closed"
    stack: list[str] = []
    for character in bare:
        if character in "([{":
            stack.append(character)
        elif character in ")]}" and (not stack or stack.pop() + character not in ("()", "[]", "{}")):
            return f"; {character!r} closes nothing"
    if stack:
        return f"; {stack[-1]!r} is never closed"
    without_comma = re.search(r"[\w)]\s+([A-Za-z_]\w*)", bare)
    return f"; a comma must stand before {without_comma[1]!r}" if without_comma else ""


def _shown(tree: ast.List) -> str:
    return ast.unparse(tree)[1:-1]


def _method(node: ast.expr, methods: Mapping[str, type[Method]], text: str, parameter: str) -> Method:
    called = node if isinstance(node, ast.Call) else None
    name = called.func if called else node
    if not isinstance(name, ast.Name) or name.id not in methods:
        shown = ast.unparse(name)
        names = allowed(shown, methods, "there are")
        raise ValueError(f"`{parameter}` (={text!r}): {shown} is not a method; {names}")
    method = methods[name.id]
    if called and called.args:
        raise ValueError(
            f"`{parameter}` (={text!r}): knobs of {name.id} are given by name: {', '.join(method.knobs())}"
        )
    values: dict[str, Any] = {}
    for keyword in called.keywords if called else []:
        knob = str(keyword.arg)
        check_knob_names(method, [knob])
        if isinstance(keyword.value, ast.Dict):
            raise ValueError(
                f"`{keyword.arg}` of {name.id} in `{parameter}` (={text!r}): braces hold values, as in {{1, 2}}"
            )
        try:
            bare = isinstance(keyword.value, ast.Name)  # a word, so that command lines need no quotes
            values[knob] = keyword.value.id if bare else ast.literal_eval(keyword.value)
        except ValueError:
            shown = ast.unparse(keyword.value)
            raise ValueError(
                f"`{keyword.arg}` (={shown}) of {name.id} must be a literal: 4, 0.5, True, search; quote what is not "
                "a single word, such as a path: 'runs/a-file'"
            ) from None
    return method(**values)
