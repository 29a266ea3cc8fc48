"""Recipes from parameters that set the number of bits of each part of a model."""

from compress.grammar import split_recipes

FULL = 16  # bits of parts that are not quantised


def below_full(bits: int, method: str) -> str:
    """The method as text, which rounds to this number of bits; "" (no method) for 16 bits."""
    return method if bits < FULL else ""


def each_before(transforms: str, rest: str) -> str:
    """Recipes, separated by semicolons, each of which is one of these transforms followed by `rest`.

    Args:
        transforms: recipes, separated by semicolons, each with an optional name before a colon.
    """
    return "; ".join(f"{one}, {rest}" if rest else one for one in split_recipes(transforms))
