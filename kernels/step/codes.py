"""Inputs of products as codes of 8 or 4 bits, with one step for each token."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.w4a8_matmul.codes import even_first
from kernels.w8a8_matmul import quantize_rows
from kernels.w8a8_matmul.layout import LARGEST, LARGEST_OF_FOUR_BITS

MOST_GATED = 1 << 15  # largest number of columns of a gate whose codes one program computes


class Coding(NamedTuple):
    """How products read their input: rounded to symmetric codes.

    dtype: torch.int8 or torch.float8_e4m3fn. bits: 8, or 4 for int8 codes of -7 to 7.
    step: one step of all tokens, float32 without dimensions; None: a step for each token, from its largest value.
    even_first: whether codes of the even columns are stored before those of the odd ones.
    """

    dtype: torch.dtype
    bits: int = 8
    step: Tensor | None = None
    even_first: bool = False

    @property
    def largest(self) -> float:
        """The largest code."""
        return LARGEST[self.dtype] if self.bits == 8 else LARGEST_OF_FOUR_BITS

    def same(self, other: "Coding | None") -> bool:
        """Do the two give the same codes for every input?"""
        if other is None or (self.dtype, self.bits, self.even_first) != (other.dtype, other.bits, other.even_first):
            return False
        a, b = self.step, other.step
        return a is b if a is None or b is None else torch.equal(a, b)


class Codes(NamedTuple):
    """A rounded input.

    codes: int8 or float8_e4m3fn [tokens, in], rows at a distance that is a multiple of 16. step: float32 [tokens, 1];
    NaN for a token that is not finite. dtype: of the activations before they were rounded.
    """

    codes: Tensor
    step: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, tokens: int, columns: int, coding: Coding, like: Tensor, dtype: torch.dtype) -> "Codes":
        """Codes to be filled, on the device of `like`."""
        codes = like.new_empty(tokens, -(-columns // 16) * 16, dtype=coding.dtype)[:, :columns]
        return cls(codes, like.new_empty(tokens, 1, dtype=torch.float32), dtype)


def coded(x: Tensor, coding: Coding) -> Codes:
    """The codes of x [tokens, in], in plain torch."""
    codes, step = quantize_rows(x, coding.dtype, scale=coding.step, bits=coding.bits)
    made = Codes.empty(*x.shape, coding, x, x.dtype)
    made.codes.copy_(even_first(codes) if coding.even_first else codes)
    return made._replace(step=step)
