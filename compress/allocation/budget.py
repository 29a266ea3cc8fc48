"""The bytes of a stored model: the part that is divided among layers, and the fixed part."""

from collections.abc import Mapping
from math import prod

from torch import nn

from compress.embedding import compressed_embeddings
from compress.linear import compressed_linears, shape_of

HALF = 2  # bytes of a float in deployed models


def bytes_beside(model: nn.Module, shapes: Mapping[str, tuple[int, int]]) -> int:
    """Stored bytes of all other weights: parameters in 16 bits, compressed weights in their stored form.

    Args:
        shapes: (out, in) by name; a tied embedding belongs to its head, which has the name.
    """
    linears, tables = compressed_linears(model), compressed_embeddings(model)
    shared = sum(out * columns for name, (out, columns) in shapes.items() if name not in linears | tables)
    floats = sum(parameter.numel() for parameter in model.parameters()) - shared
    floats += sum(linear.bias.numel() for linear in linears.values() if linear.bias is not None)
    stored = {name: one for name, one in tables.items() if not one.tied} | linears
    bits = sum(one.bits_per_weight * prod(shape_of(one)) for name, one in stored.items() if name not in shapes)
    return HALF * floats + round(bits / 8)


def megabytes(size: float) -> str:
    """A number of bytes as text for readers."""
    return f"{size / 1e6:.2f} MB"
