"""Another order of a linear's input channels."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.transforms.base import Transform


class Permutation(Transform):
    """x' = x[..., order]. A weight W [out, in] with its columns in the same order, W[:, order], gives the same output
    for x'.

    Args:
        order: [in], every channel once.
    """

    name: ClassVar[str] = "permutation"

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order.to(torch.int32).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.order)

    def back(self, x: Tensor) -> Tensor:
        """The inverse: x from x'."""
        return x.index_select(-1, self.order.argsort())

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Permutation":
        order = tensors["order"]
        check_order(order)
        return cls(order)

    def extra_repr(self) -> str:
        return str(len(self.order))


def check_order(order: Tensor) -> None:
    """Raise ValueError unless these numbers [in] name every channel once."""
    if not torch.equal(order.sort().values, torch.arange(order.numel(), dtype=order.dtype, device=order.device)):
        raise ValueError("a stored permutation does not name every channel once; the file is damaged")
