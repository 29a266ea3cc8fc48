"""A weight of three values in each row, in a code of less than a bit per weight."""

from compress.formats.ternary.weight import TernaryWeight

__all__ = ["TernaryWeight"]
