"""A weight of walks whose factors are trained while the walks stay."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.formats.base import Format, Trainable
from compress.formats.trellis.rotation import turn, turn_back


class TrainedFactorsOfWalks(Trainable):
    """W = (row ⊗ column ⊙ V) rotated back along `in`: `offsets` [out] and `factors` [in] are logarithms of the changes
    of both, which are rounded as they are stored.

    Args:
        V: [out, in], the values of the walks, in float32.
        row, column: bfloat16 [out] and [in].
        signs: ±1 [in].
        store: makes the format from new factors.
    """

    def __init__(
        self, V: Tensor, row: Tensor, column: Tensor, signs: Tensor, store: Callable[[Tensor, Tensor], Format]
    ) -> None:
        super().__init__()
        self.store, self.turned = store, False
        for name, tensor in (("V", V), ("row", row), ("column", column), ("signs", signs)):
            self.register_buffer(name, tensor)
        self.offsets, self.factors = nn.Parameter(torch.zeros(len(row))), nn.Parameter(torch.zeros(len(column)))

    def _stored_factors(self) -> tuple[Tensor, Tensor]:
        """Both factors, bfloat16."""
        both = (self.row, self.offsets), (self.column, self.factors)
        row, column = ((start.float() * moved.exp()).to(start.dtype) for start, moved in both)
        return row, column

    def keep_zeros(self, kept: Tensor) -> None:
        """Factors leave zeros as they are."""

    def on_turned_inputs(self) -> Callable[[Tensor], Tensor]:
        self.turned = True
        return lambda x: turn(x, self.signs)

    @torch.no_grad()
    def weight(self) -> Tensor:
        """W [out, in]; `collect` takes its gradient."""
        row, column = (factor.float() for factor in self._stored_factors())
        W = self.V * row[:, None] * column
        return W if self.turned else turn_back(W, self.signs)

    @torch.no_grad()
    def collect(self, gradient: Tensor) -> None:
        row, column = (factor.float() for factor in self._stored_factors())
        rotated = gradient.to(torch.float32, copy=True) if self.turned else turn(gradient.float(), self.signs)
        rotated.mul_(self.V)  # by row ⊗ column, entry by entry
        by_row, by_column = (rotated @ column) * row, (row @ rotated) * column
        for parameter, own in ((self.offsets, by_row), (self.factors, by_column)):
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)

    @torch.no_grad()
    def stored(self) -> Format:
        return self.store(*self._stored_factors())
