"""A weight as a matrix of floats. Sparse and low-rank parts can be added to it; pruned weights that are not packed are
stored in it."""

from typing import Any, ClassVar

from torch import Tensor

from compress.formats.base import Format
from compress.formats.stored import FLOATS, Stored
from compress.formats.trained import TrainedFloats
from kernels.linear import linear


class Dense(Format):
    """Floats [out, in], 16 or 32 bits each.

    Args:
        pruned: its zeros were made by a pruning method, and have to stay when the weight is stored again.
    """

    name: ClassVar[str] = "dense"
    follows: ClassVar[tuple[str, ...]] = ("weight",)
    looks_up: ClassVar[bool] = True

    def __init__(self, weight: Tensor, *, pruned: bool = False) -> None:
        super().__init__()
        self.shape, self.pruned = tuple(weight.shape), pruned
        self.register_buffer("weight", weight.contiguous())

    def dequantize(self) -> Tensor:
        return self.weight.float()

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))

    def trainable_floats(self) -> TrainedFloats:
        keep = self.weight != 0 if self.pruned else None
        return TrainedFloats(self.weight, keep, lambda W: Dense(W, pruned=self.pruned))

    @classmethod
    def stacks(cls, spec: dict[str, Any]) -> bool:
        return True

    def look_up(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float()

    def spec(self) -> dict[str, Any]:
        return self.spec_of(self.shape, pruned=self.pruned)

    @classmethod
    def spec_of(cls, shape: tuple[int, int], *, pruned: bool = False) -> dict[str, Any]:
        """The `spec()` of a weight of this shape."""
        return {"format": cls.name, "shape": list(shape), **({"pruned": True} if pruned else {})}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Dense":
        stored = Stored(spec, tensors)
        return cls(stored.tensor("weight", stored.shape, FLOATS), pruned=bool(spec.get("pruned", False)))
