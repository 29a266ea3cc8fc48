"""Inputs of a linear that are small become 0."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.transforms.base import Transform


class Threshold(Transform):
    """x' = x where |x| > limit, else 0.

    Args:
        limit: float32 without dimensions, 0 or more.
    """

    name: ClassVar[str] = "threshold"

    def __init__(self, limit: Tensor) -> None:
        super().__init__()
        self.register_buffer("limit", limit.float())

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > self.limit, x, x.new_zeros(()))

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Threshold":
        limit = tensors["limit"]
        if limit.dim() or not 0 <= limit < torch.inf:
            raise ValueError("a stored threshold is not a number of 0 or more; the file is damaged")
        return cls(limit)

    def extra_repr(self) -> str:
        return f"{self.limit.item():.4g}"
