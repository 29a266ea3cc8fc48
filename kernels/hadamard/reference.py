"""Butterflies in plain torch, on any device: the reference for every other implementation."""

import torch
from torch import Tensor

from kernels.hadamard.matrix import base, paley
from kernels.linear import without_tf32


def hadamard(x: Tensor, scale: float) -> Tensor:
    """y = scale x H [rows, n], computed in float32 (float64 for float64) and rounded once."""
    rows, n = x.shape
    m = base(n)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if m > 1:
        with without_tf32():
            y = torch.matmul(torch.from_numpy(paley(m)).to(y.device, y.dtype), y.reshape(rows, m, n // m))
    half = 1
    while half < n // m:
        pairs = y.reshape(-1, 2, half)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        half *= 2
    return (y.reshape(rows, n) * scale).to(x.dtype)
