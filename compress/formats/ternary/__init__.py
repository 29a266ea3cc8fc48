"""A weight with three values per row, stored in less than a bit per weight."""

from compress.formats.ternary.weight import TernaryWeight

__all__ = ["TernaryWeight"]
