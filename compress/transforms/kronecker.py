"""An invertible map of a linear's input: a factor for every channel, and then a Kronecker product of two matrices."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.transforms.base import Transform


class Kronecker(Transform):
    """x' = x P with P = diag(scale) (left ⊗ right), which costs n (n1 + n2 + 1) products for a token of n = n1 n2
    channels (FlatQuant, arXiv:2410.09426, section 3.2).

    Args:
        left: [n1, n1]. right: [n2, n2]. scale: [n], the factor of each channel. All float32; none is 0, or singular.
    """

    name: ClassVar[str] = "kronecker"

    def __init__(self, left: Tensor, right: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("left", left.float().contiguous())
        self.register_buffer("right", right.float().contiguous())
        self.register_buffer("scale", scale.float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return kronecker(x.float() * self.scale, self.left, self.right).to(x.dtype)

    def fold(self, W: Tensor) -> Tensor:
        """W P⁻ᵀ [out, in] in float32, the weight whose product with x' is that of W with x; computed in float64."""
        left, right = (torch.linalg.inv(one.double()).t() for one in (self.left, self.right))
        return kronecker(W.double() / self.scale.double(), left, right).float()

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Kronecker":
        return cls(tensors["left"], tensors["right"], tensors["scale"])

    def extra_repr(self) -> str:
        return f"{len(self.left)} x {len(self.right)}"


def kronecker(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x (left ⊗ right) [..., n1 n2], without making that product: leftᵀ X right, with x as a matrix X [n1, n2]."""
    X = x.unflatten(-1, (len(left), len(right)))
    return (left.t() @ (X @ right)).flatten(-2)
