"""The contract of a stored weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Format(nn.Module):
    """One stored weight [out, in]: its buffers are all that it takes, in memory and on disk.

    Subclasses set `name` and implement the four methods below. What they keep in buffers may be laid out for the device
    at hand, but `state_dict` always holds the canonical tensors, and `from_tensors` takes those.
    """

    name: ClassVar[str]
    shape: tuple[int, int]  # (out, in)
    follows: ClassVar[tuple[str, ...]] = ()  # buffers of floats that are cast with the model
    activation_bits: int | None = None  # to which `matmul` rounds x; None: it takes x as it comes

    def dequantize(self) -> Tensor:
        """W [out, in] in float32."""
        raise NotImplementedError

    def matmul(self, x: Tensor) -> Tensor:
        """y [..., out] = x [..., in] Wᵀ, in x's dtype."""
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        """What besides the tensors makes this weight, as JSON: `format`, `shape` and the format's own settings."""
        raise NotImplementedError

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Format":
        """The weight that `spec()` and `state_dict()` described."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that the canonical tensors take: what is stored."""
        return sum(t.nbytes for t in self.state_dict().values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, floats that are cast with the model counted as the 16 bits in which models are
        deployed."""
        state = self.state_dict().items()
        return (
            8
            * sum(2 * t.numel() if name in self.follows else t.nbytes for name, t in state)
            / (self.shape[0] * self.shape[1])
        )

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        """Lay the buffers out for activations of this dtype on this device; called whenever the model moves."""
