"""Transforms of a linear's input before it is multiplied."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from compress.transforms.base import Transform, same_transform
from compress.transforms.kronecker import Kronecker
from compress.transforms.permutation import Permutation
from compress.transforms.rotation import Hadamard, Orthogonal, Rotation
from compress.transforms.rounding import Rounding
from compress.transforms.threshold import Threshold

__all__ = [
    "TRANSFORMS", "ChainedTransform", "Hadamard", "Kronecker", "Orthogonal", "Permutation", "Rotation", "Rounding",
    "Threshold", "Transform", "followed_by", "make_transform", "orders", "parted", "same_transform",
]  # fmt: skip


class ChainedTransform(Transform):
    """Several transforms, one after the other."""

    name: ClassVar[str] = "chain"

    def __init__(self, steps: Sequence[Transform]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name, "steps": [step.spec() for step in self.steps]}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "ChainedTransform":
        return cls([make_transform(one, below(tensors, f"steps.{i}.")) for i, one in enumerate(spec["steps"])])


# By the names that checkpoints use.
TRANSFORMS: dict[str, type[Transform]] = {
    one.name: one for one in (ChainedTransform, Hadamard, Kronecker, Orthogonal, Permutation, Rounding, Threshold)
}


def followed_by(first: Transform | None, second: Transform | None) -> Transform | None:
    """Both transforms, one after the other; either may be None."""
    if first is None or second is None:
        return first or second
    steps = [step for one in (first, second) for step in (one.steps if isinstance(one, ChainedTransform) else [one])]
    return ChainedTransform(steps)


def parted(transform: Transform | None) -> tuple[list[Transform], Rounding | None]:
    """The steps of a transform before its rounding, and the rounding, if it is the last step; else all and None."""
    if transform is None:
        return [], None
    steps = list(transform.steps) if isinstance(transform, ChainedTransform) else [transform]
    return (steps[:-1], steps[-1]) if isinstance(steps[-1], Rounding) else (steps, None)


def orders(transform: Transform | None) -> bool:
    """Whether the last step of a transform, except for rounding, reorders the channels."""
    before, _ = parted(transform)
    return bool(before) and isinstance(before[-1], Permutation)


def make_transform(spec: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Transform | None:
    """The transform that `spec` describes; None for None.

    Raises:
        ValueError: its kind is not known to this workbench.
    """
    if spec is None:
        return None
    if spec["transform"] not in TRANSFORMS:
        known = ", ".join(TRANSFORMS)
        raise ValueError(f"the transform {spec['transform']!r} is not known to this workbench; it has {known}")
    return TRANSFORMS[spec["transform"]].from_tensors(spec, tensors)


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
