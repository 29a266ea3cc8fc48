"""What is done to a linear's input before it is multiplied: a rotation, or rounding of the activations."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Transform(nn.Module):
    """x [..., in] -> x' [..., in]; its buffers are saved with the linear. `TRANSFORMS` lists the subclasses."""

    name: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        """What besides the tensors makes this transform, as JSON: `transform` (its name) and its own settings."""
        raise NotImplementedError

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Transform":
        """The transform that `spec()` and `state_dict()` described."""
        raise NotImplementedError


# By the names that checkpoints use. No method of the workbench makes one yet.
TRANSFORMS: dict[str, type[Transform]] = {}


def make_transform(spec: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Transform | None:
    """The transform that was described, None for none.

    Raises:
        ValueError: it is of a kind that this workbench does not have.
    """
    if spec is None:
        return None
    if spec["transform"] not in TRANSFORMS:
        known = ", ".join(TRANSFORMS) or "none"
        raise ValueError(f"the transform {spec['transform']!r} is not known to this workbench; it has {known}")
    return TRANSFORMS[spec["transform"]].from_tensors(spec, tensors)
