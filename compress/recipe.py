"""Recipes as text, one language for every parameter that takes recipes.

`smoothquant(alpha=0.5), gptq(bits=8, group_size=-1), int8` is a list of methods in order, with knobs by name. If
several recipes are compared, semicolons separate them, a name may stand before each (`static:
int8(activations=tensor)`), and a knob may have several values in braces: `wanda(ratio={0.3, 0.5})`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from compress.grammar import RecipeVariant, split_recipes, variants_of
from compress.method import METHODS, Method, settle

Recipe = str | Method | Iterable[str | Method]  # wherever a function takes a recipe
TAKEN = {"baseline", "compressed", "unsmoothed", "bfloat16", "float32"}  # names that a run gives to its own models


def parse_variants(
    text: str, parameter: str = "recipe", also: Iterable[type[Method]] = ()
) -> tuple[str, list[RecipeVariant]]:
    """`compress.grammar.variants_of` for the methods in METHODS.

    Args:
        also: further methods that the text may name, such as one that a notebook defines.
    """
    return variants_of(text, METHODS | {method.name: method for method in also}, parameter)


def parse_recipe(text: str, parameter: str = "recipe", also: Iterable[type[Method]] = ()) -> list[Method]:
    """The methods that a text names, in order, as `parse_variants` reads it.

    Raises:
        ValueError: as in `parse_variants`; or values in braces: one recipe has one value for each knob.
    """
    _, variants = parse_variants(text, parameter, also)
    if variants[0].values:
        raise ValueError(
            f"`{parameter}` (={text!r}) has several values in braces, which only comparisons and curves take"
        )
    return variants[0].methods


def methods_of(recipe: Recipe, parameter: str = "recipe") -> list[Method]:
    """The methods of a recipe in any form: a text, a method, or a list of them.

    Args:
        parameter: the name of the recipe's parameter, for errors.

    Raises:
        ValueError: as in `parse_recipe`, or something else was given.
    """
    if isinstance(recipe, Method):
        return [recipe]
    if isinstance(recipe, str):
        return parse_recipe(recipe, parameter)
    if isinstance(recipe, Iterable) and not isinstance(recipe, Mapping | bytes | type):
        return [
            method
            for one in recipe
            for method in (methods_of(one, parameter) if isinstance(one, str | type) else [one])
        ]
    hint = ""
    if isinstance(recipe, type) and issubclass(recipe, Method):
        hint = f"; a class has no knobs yet: METHODS[{recipe.name!r}]() has"
    raise ValueError(
        f"`{parameter}` (={recipe!r}) must be a method, such as METHODS['gptq'](bits=4), a list of methods, or a text, "
        f"such as 'smoothquant, int8'{hint}"
    )


def parse_recipes(text: str, also: Iterable[type[Method]] = (), parameter: str = "") -> dict[str, list[Method]]:
    """Several recipes, separated by semicolons, each with an optional name before a colon: "static:
    int8(activations='tensor'); gptq(bits={3, 4})". Values in braces give a recipe each.

    Args:
        also: as for `parse_variants`.
        parameter: that gives the text, for errors; "": `recipe` for one recipe, `recipes` for all.

    Raises:
        ValueError: as in `parse_variants`; or two recipes have the same name.
    """
    recipes: dict[str, list[Method]] = {}
    for part in split_recipes(text):
        name, colon, rest = part.partition(":")
        named = bool(colon) and "(" not in name
        for variant in parse_variants(rest if named else part, parameter or "recipe", also)[1]:
            label = ", ".join((name.strip(), *variant.values)) if named else variant.text
            if label in recipes:
                raise ValueError(
                    f"`{parameter or 'recipes'}` (={text!r}) holds {label!r} twice; put a name before one, such as: "
                    f"another: {part}"
                )
            recipes[label] = variant.methods
    return recipes


def call(name: str, **knobs: Any) -> str:
    """A method with these knobs as text for `parse_recipe`; knobs with the value "" keep the method's defaults.

    Without a name the result is "", which `chain` leaves out.
    """
    if not name:
        return ""
    given = ", ".join(f"{knob}={value!r}" for knob, value in knobs.items() if value != "")
    return f"{name}({given})"


def chain(*calls: str) -> str:
    """A recipe of these methods, one after the other; empty texts are left out."""
    return ", ".join(filter(None, calls))


def trained_by(recipe: str, training: str) -> str:
    """The recipe with a training behind what it stores, and before its methods of the cache.

    Raises:
        ValueError: as in `parse_recipe`.
    """
    methods = parse_recipe(recipe)
    caches = [str(method) for method in methods if method.stage == "cache"]
    if not caches:
        return chain(recipe, training)
    return chain(*(str(method) for method in methods if method.stage != "cache"), training, *caches)


def recipes_of_run(recipe: str, compare: str = "") -> dict[str, list[Method]]:
    """The recipes of a run, by the names that its models have in the scores.

    Args:
        recipe: the main recipe of the run, "compressed"; if it transforms something before it quantises, the recipe
            without the transforms is added, as "unsmoothed".
        compare: further recipes, as text for `parse_recipes`.

    Raises:
        ValueError: as in `parse_recipe` and `parse_recipes`; methods do not compose; or a name is taken.
    """
    methods, others = parse_recipe(recipe), others_of_run(compare)
    plain = [method for method, settled in zip(methods, settle(methods), strict=True) if settled.stage != "transform"]
    without = {"unsmoothed": plain} if 0 < len(plain) < len(methods) else {}
    recipes = {"compressed": methods, **without, **others}
    settle(plain)
    return recipes


def others_of_run(compare: str) -> dict[str, list[Method]]:
    """Further recipes of a run, by the names that their models have in the scores; {} for an empty text.

    Raises:
        ValueError: as in `parse_recipes`; methods do not compose; or a name is taken.
    """
    others = parse_recipes(compare)
    for name in TAKEN & set(others):
        raise ValueError(
            f"`compare` (={compare!r}): {name!r} is what another model of the run is called; name it differently"
        )
    for one in others.values():
        settle(one)
    return others
