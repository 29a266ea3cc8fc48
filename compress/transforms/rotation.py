"""Orthogonal maps of a linear's input, which spread outliers over many channels."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.transforms.base import Transform
from kernels.hadamard import hadamard, widest_block
from kernels.linear import linear


class Rotation(Transform):
    """x' = x Q with an orthogonal Q [n, n]. Lengths and dot products stay as they are."""

    def back(self, x: Tensor) -> Tensor:
        """x Qᵀ: the inverse."""
        raise NotImplementedError


class Hadamard(Rotation):
    """Random signs, and then a Hadamard transform of every `block` neighbouring channels (arXiv:2402.04396, 3.1).

    Args:
        signs: [n], ±1.
        block: a width that has a Hadamard matrix, and divides n.
    """

    name: ClassVar[str] = "hadamard"

    def __init__(self, signs: Tensor, block: int) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("signs", signs.to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return self._mixed(x * self.signs.to(x.dtype))

    def back(self, x: Tensor) -> Tensor:
        return self._mixed(x) * self.signs.to(x.dtype)

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name, "block": self.block}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Hadamard":
        return cls(tensors["signs"], spec["block"])

    def extra_repr(self) -> str:
        return f"{len(self.signs)}, block={self.block}"

    def _mixed(self, x: Tensor) -> Tensor:
        """The transform, which is its own inverse, because the matrix is symmetric."""
        return hadamard(x.reshape(*x.shape[:-1], -1, self.block)).view(x.shape)


class Orthogonal(Rotation):
    """Any orthogonal matrix.

    Args:
        matrix: Q [n, n], float32.
    """

    name: ClassVar[str] = "orthogonal"

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.float(), self.matrix.t()).to(x.dtype)

    def back(self, x: Tensor) -> Tensor:
        return linear(x.float(), self.matrix).to(x.dtype)

    def spec(self) -> dict[str, Any]:
        return {"transform": self.name}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Orthogonal":
        return cls(tensors["matrix"])

    def extra_repr(self) -> str:
        return str(len(self.matrix))


def random_hadamard(n: int, seed: int, block: int = 0) -> Hadamard:
    """Random signs and Hadamard transforms of width n, or of its widest divisor with a matrix if n has none.

    Args:
        block: the largest number of channels that are transformed together; 0: as many as possible.
    """
    generator = torch.Generator().manual_seed(seed)
    return Hadamard(torch.randint(2, (n,), generator=generator) * 2 - 1, widest_block(n, block))


def random_orthogonal(n: int, seed: int, *, fixes_ones: bool = False) -> Orthogonal:
    """A rotation that is as likely as any other (Haar measure; Stewart, 1980).

    Args:
        fixes_ones: keep the direction (1, ..., 1), and rotate the space perpendicular to it. The mean over the channels
            is then the same before and after, so that a LayerNorm commutes with the rotation.
    """
    generator = torch.Generator().manual_seed(seed)
    free = n - fixes_ones
    Q, R = torch.linalg.qr(torch.randn(free, free, generator=generator, dtype=torch.float64))
    Q = Q * R.diagonal().sign()
    if fixes_ones:
        v = torch.full((n,), n**-0.5, dtype=torch.float64)
        v[0] -= 1  # the reflection along v exchanges the first axis and the direction of ones
        mirror = torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / v.square().sum()
        Q = mirror @ torch.block_diag(torch.ones(1, 1, dtype=torch.float64), Q) @ mirror
    return Orthogonal(Q)
