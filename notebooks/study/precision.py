"""Recipes from parameters that say how many bits each part of a model has."""

from compress.grammar import split_recipes

FULL = 16  # bits of what is not quantised


def below_full(bits: int, method: str) -> str:
    """The method as text, which rounds something to so many bits; "", no method, where it stays in 16."""
    return method if bits < FULL else ""


def each_before(transforms: str, rest: str) -> str:
    """Recipes, separated by semicolons, each of which is one of these transforms and then the rest.

    Args:
        transforms: recipes, separated by semicolons, each with an optional name before a colon.
    """
    return "; ".join(f"{one}, {rest}" if rest else one for one in split_recipes(transforms))
