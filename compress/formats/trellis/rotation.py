"""Random signs and a Hadamard transform, which bring the distribution of weights close to normal."""

import torch
from torch import Tensor

from kernels.hadamard import hadamard, widest_block


def signs_for(n: int, seed: int) -> Tensor:
    """Random signs, ±1 float32 [n]; the same ones for the same n and seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (n,), generator=generator) * 2.0 - 1


def turn(x: Tensor, signs: Tensor) -> Tensor:
    """Flip signs [n] along the last dimension of x, and then transform it: an orthogonal map.

    Source: incoherence processing of QuIP# (Tseng et al., 2024, arXiv:2402.04396, section 3.1), here of the inputs
    alone. If n has no Hadamard matrix, blocks of the largest divisor that has one are transformed.
    """
    return _transform(x * signs)


def turn_back(x: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `turn`."""
    return _transform(x) * signs


def _transform(x: Tensor) -> Tensor:
    """The transform, which is its own inverse."""
    n = x.shape[-1]
    block = widest_block(n)
    return hadamard(x.reshape(*x.shape[:-1], n // block, block)).view(x.shape)
