"""The `panels` layout: 32 rows of W per panel, in the order in which the C++ kernel of `kernels.native` reads them."""

import torch
from torch import Tensor

ROWS = 32  # rows of W in a panel: two vectors of sums
STEP = 4  # number of columns that one instruction sums
MIDDLE = -128  # flips the top bit: the byte is code + 128, because the instruction needs one unsigned operand


def to_panels(codes: Tensor) -> Tensor:
    """int8 [out, in] -> bytes [panels, ceil(in/4), 32, 4], viewed as int8; rows and columns beyond W's are code 0."""
    out, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % STEP, 0, -out % ROWS))
    return padded.view(-1, ROWS, padded.shape[1] // STEP, STEP).transpose(1, 2).contiguous().bitwise_xor_(MIDDLE)


def from_panels(panels: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `to_panels`: int8 [out, in]."""
    rows = panels.transpose(1, 2).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
    return rows.bitwise_xor(MIDDLE).contiguous()


def panels_shape(shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """The shape of the result of `to_panels` for W [out, in]."""
    return -(-shape[0] // ROWS), -(-shape[1] // STEP), ROWS, STEP
