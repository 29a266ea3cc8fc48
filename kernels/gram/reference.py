"""One full float32 product in plain torch, on any device: the reference for every other implementation."""

from torch import Tensor

from kernels.linear import without_tf32


def gram(x: Tensor, H: Tensor) -> None:
    """H += XᵀX, never in TF32."""
    x = x.float()
    with without_tf32():
        H.addmm_(x.t(), x)
