"""Learned tables: the values with the least error for a kind of weights, if every group chooses its scale."""

import torch
from torch import Tensor

from compress.grid.grids import Table

LARGEST = 127.0


def learn_table(w: Tensor, table: Tensor, *, importance: Tensor | None = None, steps: int = 12) -> Tensor:
    """The table after some steps of Lloyd's algorithm: scales and codes for the table, then the table for those.

    Args:
        w: [groups, group_size], weights to learn from.
        table: float32 [2^bits], ascending, of either sign: where to start.
        importance: weights of the squared errors, broadcastable to w; None for equal ones.

    Returns:
        [2^bits], ascending; its largest magnitude is 127. For the least error each value becomes the mean of w / scale
        over the weights of its code, weighted by importance * scale².
    """
    bits = (len(table) - 1).bit_length()
    weight = torch.ones_like(w) if importance is None else importance.expand_as(w)
    for _ in range(steps):
        grid = Table(bits, table)
        scale, zero = grid.choose(w, lambda s: s, how="search", importance=importance, norm=2.0)
        s = scale[:, None]
        codes = grid.quantize(w, s, zero).long().flatten()
        sums = torch.zeros_like(table).index_add_(0, codes, (weight * w * s).flatten())
        squares = torch.zeros_like(table).index_add_(0, codes, (weight * s.square()).flatten())
        table = torch.where(squares > 0, sums / squares.clamp(min=1e-30), table)
        table = table * (LARGEST / table.abs().max())
    return table.sort().values
