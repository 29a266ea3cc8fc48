"""One full float32 product in plain torch, on any device: what every other implementation is held against."""

import torch
from torch import Tensor


def gram(x: Tensor, H: Tensor) -> None:
    """H += XᵀX, never in TF32."""
    x = x.float()
    if x.device.type != "cuda":
        H.addmm_(x.t(), x)
        return
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        H.addmm_(x.t(), x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
