"""Codes as 32-bit words in compressed-tensors and GPTQ files: element i at bit i * bits, low bits first.

The workbench packs eight codes to `bits` bytes in the same order, so that its bytes are those words, except for the
length of a row: rows of words are padded to 4 bytes, rows of the workbench to eight codes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.int_matmul import pack_bits, unpack_bits


def words_of_bytes(packed: Tensor, bits: int, n: int) -> Tensor:
    """uint8 [rows, ceil(n/8) * bits] as `pack_bits` makes it -> int32 [rows, ceil(n * bits / 32)]."""
    wanted = 4 * -(-n * bits // 32)
    # The padding beyond n codes is zeros, so that cutting and padding lose nothing.
    return F.pad(packed[:, :wanted], (0, max(0, wanted - packed.shape[1]))).contiguous().view(torch.int32)


def bytes_of_words(words: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of `words_of_bytes`."""
    wanted = -(-n // 8) * bits
    packed = words.contiguous().view(torch.uint8)
    return F.pad(packed[:, :wanted], (0, max(0, wanted - packed.shape[1]))).contiguous()


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Integers [rows, n] below 2^bits -> int32 [rows, ceil(n * bits / 32)]."""
    return words_of_bytes(pack_bits(codes, bits), bits, codes.shape[1])


def from_words(words: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of `to_words`: uint8 [rows, n]."""
    return unpack_bits(bytes_of_words(words, bits, n), bits, n)
