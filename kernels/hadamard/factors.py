"""Shared code of `hadamard`'s Triton kernels: products with matrices of ±1, and these matrices on the device."""

from kernels.interpreter import prepare

prepare()

from functools import cache  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.hadamard.matrix import base, paley, sylvester  # noqa: E402


@triton.jit
def times(t, H, PIECES: tl.constexpr):
    """float32 t [M, K] times H [K, N] of ±1: t as a sum of 2 (16 bits of it) or 3 (all 24) bfloat16 matrices."""
    high = t.to(tl.bfloat16)
    t -= high.to(tl.float32)
    middle = t.to(tl.bfloat16)
    y = tl.dot(middle, H)
    if PIECES == 3:
        low = (t - middle.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(low, H, y)
    return tl.dot(high, H, y)


def pieces(dtype: torch.dtype) -> int:
    """The number of bfloat16 values that represent an intermediate float32."""
    return 3 if dtype == torch.float32 else 2


@cache
def factor(order: int, padded: int, device: torch.device) -> Tensor:
    """bfloat16 [padded, padded]: the symmetric matrix of this order, zeros beyond it."""
    m = base(order)
    H = np.zeros((padded, padded), np.float32)
    H[:order, :order] = np.kron(paley(m), sylvester(order // m))
    return torch.from_numpy(H).to(device, torch.bfloat16)
