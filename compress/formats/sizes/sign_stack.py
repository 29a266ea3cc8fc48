"""A stack of blocks, each a matrix of signs times a matrix of low rank; the blocks at its end can be left out."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.stored import Stored
from kernels.int_matmul import pack_bits, unpack_bits
from kernels.linear import linear

BLOCKWISE = ("signs", "left", "right", "gains")  # buffers, whose first dimension counts blocks


class SignStack(AsStored):
    """W = Σ_b S_b ⊙ (left_b @ right_b) with S_b of ±1.

    Buffers: `signs` uint8 [blocks, out, ceil(in/8)], a set bit for -1, low bits first; `left` float16 [blocks, out,
    rank] and `right` float16 [blocks, rank, in]; and `gains` float32 [blocks], the decrease of the model's loss by each
    block after the blocks before it, in nats per token, by which `compress.checkpoint.resize` sorts blocks.

    `matmul` dequantises W at every call and multiplies by it. Between calls it holds only the stored tensors. It is not
    fast: no kernel reads the blocks. A dense W (`CompressedLinear.dense`) is faster over many batches.

    Attributes:
        left_out: gains of the blocks that `first` left out behind these blocks, on the CPU; not stored.
    """

    name: ClassVar[str] = "sign_stack"
    settings: ClassVar[tuple[str, ...]] = ("rank", "blocks")

    def __init__(self, shape: tuple[int, int], signs: Tensor, left: Tensor, right: Tensor, gains: Tensor) -> None:
        super().__init__()
        self.shape, self.rank, self.blocks = shape, left.shape[2], len(left)
        self.left_out = torch.zeros(0)
        for name, tensor in zip(BLOCKWISE, (signs, left, right, gains), strict=True):
            self.register_buffer(name, tensor)

    @classmethod
    def from_blocks(cls, blocks: Sequence[tuple[Tensor, Tensor, Tensor]], gains: Tensor) -> "SignStack":
        """From (mask [out, in] of negative entries, left [out, rank], right [rank, in]) of each block."""
        negative, left, right = zip(*blocks, strict=True)
        signs = torch.stack([pack_bits(one.to(torch.uint8), 1) for one in negative])
        return cls(tuple(negative[0].shape), signs, torch.stack(left).half(), torch.stack(right).half(), gains.float())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.nbytes // self.blocks

    def block(self, number: int) -> Tensor:
        """S ⊙ (left @ right) of one block, [out, in] in float32."""
        signs = unpack_bits(self.signs[number], 1, self.shape[1]).float().mul_(-2).add_(1)
        return signs.mul_(self.left[number].float() @ self.right[number].float())

    def first(self, blocks: int) -> "SignStack":
        """The same weight with only this number of its first blocks, in memory of their own."""
        kept = SignStack(self.shape, *(getattr(self, name)[:blocks].clone() for name in BLOCKWISE))
        kept.left_out = torch.cat([self.gains[blocks:].cpu(), self.left_out])
        return kept

    def followed_by(self, more: dict[str, Tensor]) -> "SignStack":
        """The same weight with further blocks behind these.

        Args:
            more: the four buffers of those blocks.
        """
        both = (torch.cat([own, more[name].to(own.device)]) for name, own in self.state_dict().items())
        longer = SignStack(self.shape, *both)
        longer.left_out = self.left_out[longer.blocks - self.blocks :]
        return longer

    def dequantize(self) -> Tensor:
        W = self.block(0)
        for number in range(1, self.blocks):
            W += self.block(number)
        return W

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.dequantize().to(x.dtype))

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return spec["blocks"] * (1 + 16 * spec["rank"] * sum(spec["shape"]) / math.prod(spec["shape"]))

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "SignStack":
        stored = Stored(spec, tensors)
        blocks, rank = stored.number("blocks", range(1, 1 << 31)), stored.number("rank", range(1, 1 << 31))
        signs = stored.tensor("signs", (blocks, stored.out, -(-stored.columns // 8)), torch.uint8)
        left = stored.tensor("left", (blocks, stored.out, rank), torch.float16)
        right = stored.tensor("right", (blocks, rank, stored.columns), torch.float16)
        return cls(stored.shape, signs, left, right, stored.tensor("gains", (blocks,), torch.float32))
