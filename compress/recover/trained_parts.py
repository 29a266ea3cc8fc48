"""A compressed linear while its stored parts are trained."""

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from compress.formats.base import Trainable
from compress.linear import CompressedLinear, StandIn


class TrainedParts(StandIn):
    """Stands for a compressed linear of which some parts are trained, and the others do not change.

    Args:
        views: the trained parts, by their numbers.
        keep_zeros: stored weights that are 0 stay 0.
        apart: numbers of parts that `weight` leaves out.
    """

    def __init__(
        self,
        linear: CompressedLinear,
        views: Mapping[int, Trainable],
        *,
        keep_zeros: bool = False,
        apart: Container[int] = (),
    ) -> None:
        super().__init__(linear)
        self.views, self.apart = dict(views), apart
        for i, view in self.views.items():
            if keep_zeros and view.offsets.requires_grad and not linear.parts[i].exact:
                view.keep_zeros(linear.parts[i].dequantize() != 0)
        fixed = [p.dequantize() for i, p in enumerate(linear.parts) if i not in self.views and i not in apart]
        self.rest = sum(fixed, torch.zeros(()))

    def weight(self) -> Tensor:
        """W [out, in] in float32, as it would be stored; differentiable."""
        return sum((view.weight() for i, view in self.views.items() if i not in self.apart), self.rest)

    def stored(self) -> CompressedLinear:
        """The linear with the trained parts."""
        linear = self.stands_for
        parts = [self.views[i].stored() if i in self.views else part for i, part in enumerate(linear.parts)]
        return CompressedLinear(parts, linear.bias, dtype=linear.dtype, transform=linear.transform)
