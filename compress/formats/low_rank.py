"""A weight of low rank: the product of a tall and a wide matrix, in 16 or 8 bits."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.stored import Stored
from compress.formats.trained import TrainedFactors
from kernels.linear import linear

BITS = (16, 8)  # of a factor's entries
LARGEST = 127  # code of 8 bits


class LowRankWeight(AsStored):
    """W = left @ right, multiplied as two small products: y = (x rightᵀ) leftᵀ.

    Buffers: `left` [out, rank] and `right` [rank, in], both float16; or both int8 with `scale` [rank] in float32, where
    W = left @ diag(scale) @ right. They keep these dtypes when the model is cast.
    """

    name: ClassVar[str] = "low_rank"
    settings: ClassVar[tuple[str, ...]] = ("rank", "bits")
    exact: ClassVar[bool] = True

    def __init__(self, left: Tensor, right: Tensor, scale: Tensor | None = None) -> None:
        super().__init__()
        self.shape = (left.shape[0], right.shape[1])
        self.rank, self.bits = left.shape[1], 16 if scale is None else 8
        for name, tensor in (("left", left), ("right", right), ("scale", scale)):
            self.register_buffer(name, None if tensor is None else tensor.contiguous())

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, *, bits: int = 16) -> "LowRankWeight":
        """Store left [out, rank] @ right [rank, in]: as floats, with balanced magnitudes, or rounded to nearest, with a
        scale for each column of `left` and its row of `right`."""
        if bits == 16:
            gain = (right.norm(dim=1) / left.norm(dim=0).clamp_min(1e-30)).sqrt()
            gain = torch.where((gain > 0) & gain.isfinite(), gain, 1.0)
            return cls((left * gain).to(torch.float16), (right / gain[:, None]).to(torch.float16))
        (a, left), (b, right) = rounded(left.t()), rounded(right)
        return cls(left.t().contiguous(), right, (a * b).squeeze(1))

    def dequantize(self) -> Tensor:
        left = self.left.float() if self.scale is None else self.left * self.scale
        return left @ self.right.float()

    def matmul(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.right_floats.to(x.dtype)), self.left_floats.to(x.dtype))

    def trainable_factors(self) -> TrainedFactors | None:
        return TrainedFactors(self.left, self.right, LowRankWeight) if self.bits == 16 else None

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        left = self.left if self.scale is None else self.left * self.scale
        return {"left_floats": left.to(dtype), "right_floats": self.right.to(dtype)}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return spec["bits"] * spec["rank"] * sum(spec["shape"]) / math.prod(spec["shape"])

    @classmethod
    def macs(cls, spec: dict[str, Any]) -> int:
        return spec["rank"] * sum(spec["shape"])

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "LowRankWeight":
        stored = Stored(spec, tensors)
        bits, rank = stored.number("bits", BITS), stored.number("rank", range(1, min(stored.shape) + 1))
        dtype = torch.float16 if bits == 16 else torch.int8
        left = stored.tensor("left", (stored.out, rank), dtype)
        right = stored.tensor("right", (rank, stored.columns), dtype)
        return cls(left, right, None if bits == 16 else stored.tensor("scale", (rank,), torch.float32))


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [rows, 1] and int8 codes of the rows of a matrix, rounded to nearest."""
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / LARGEST
    return scale, (rows / scale).round().to(torch.int8)
