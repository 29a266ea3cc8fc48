"""A weight in the form that the kernels of this folder read."""

from typing import NamedTuple

import torch
from torch import Tensor

MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}  # 128 and 1024, in both halves of a word: see `floats`
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}


class PackedWeight(NamedTuple):
    """A weight in the layout `rows`: the fields of `Packed` and of `Codebook`, some of which are None."""

    codes: Tensor
    table: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]  # (out, in)
