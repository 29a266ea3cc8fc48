"""The interface of transforms of a linear's input before it is multiplied, such as a rotation, or rounding."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Transform(nn.Module):
    """x [..., in] -> x' [..., in]; its buffers are saved with the linear.

    `compress.transforms.TRANSFORMS` lists the subclasses.
    """

    name: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        """The description of this transform beside its tensors, as JSON: `transform` (its name) and its settings."""
        raise NotImplementedError

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Transform":
        """The transform that `spec()` and `state_dict()` described."""
        raise NotImplementedError

    def check(self, columns: int) -> None:
        """Raise ValueError unless this transform, made from the tensors of a file, takes inputs of this width."""
        try:
            fits = self(torch.zeros(1, columns)).shape == (1, columns)
        except (RuntimeError, IndexError, ValueError, AssertionError, TypeError) as error:
            raise ValueError(f"a stored transform ({self.name}) cannot take inputs of {columns} channels") from error
        if not fits:
            raise ValueError(f"a stored transform ({self.name}) changes the width of inputs of {columns} channels")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transform":
        # Devices change; dtypes do not: `.to(bfloat16)` is about the activations.
        for part in self.children():
            part._apply(fn)
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(fn(tensor.new_empty(0)).device)
        return self


def same_transform(a: Transform | None, b: Transform | None) -> bool:
    """Whether both give the same result for every input."""
    if a is None or b is None:
        return a is b
    ours, theirs = a.state_dict(), b.state_dict()
    return a.spec() == b.spec() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
