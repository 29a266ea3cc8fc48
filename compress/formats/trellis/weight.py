"""Walks through a trellis, with a factor for each row and each column: whole bits per weight, with little overhead."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.stored import Stored
from compress.formats.trellis.rotation import turn_back
from compress.formats.trellis.trained import TrainedFactorsOfWalks
from kernels.hadamard import turned
from kernels.int_matmul import pack_bits, unpack_bits
from kernels.trellis_matmul import Trellis, decode, length_for, trellis_matmul
from kernels.trellis_matmul.layout import BITS, LONGEST, PANEL, STATES


class TrellisWeight(AsStored):
    """W = (row ⊗ column ⊙ V) rotated back along `in`, with V the values of the walks; `matmul` rotates x instead.

    Buffers: `codes` uint8 [segments, in, length * bits / 8], in the layout of `kernels.trellis_matmul.Trellis`; `row`
    [out] and `column` [in], bfloat16 factors; `signs` uint8 [ceil(in/8)], a bit for each input, 1 for +1.
    """

    name: ClassVar[str] = "trellis"
    settings: ClassVar[tuple[str, ...]] = ("bits", "states")

    def __init__(
        self,
        shape: tuple[int, int],
        codes: Tensor,
        row: Tensor,
        column: Tensor,
        signs: Tensor,
        *,
        bits: int,
        states: int,
    ) -> None:
        super().__init__()
        self.shape, self.bits, self.states = shape, bits, states
        for name, tensor in (("codes", codes), ("row", row), ("column", column), ("signs", signs)):
            self.register_buffer(name, tensor)

    @classmethod
    def from_codes(
        cls,
        shape: tuple[int, int],
        codes: Tensor,
        row: Tensor,
        column: Tensor,
        signs: Tensor,
        *,
        bits: int,
        states: int,
    ) -> "TrellisWeight":
        """From packed walks, factors of any dtype, and signs ±1 [in]."""
        packed = pack_bits((signs > 0)[None].to(torch.uint8), 1)[0]
        factors = row.to(torch.bfloat16), column.to(torch.bfloat16)
        return cls(shape, codes, *factors, packed, bits=bits, states=states)

    def dequantize(self) -> Tensor:
        values = decode(self._trellis(self.row.float())) * self.column.float()
        return turn_back(values, self._signs())

    def trainable_scales(self) -> TrainedFactorsOfWalks:
        def store(row: Tensor, column: Tensor) -> TrellisWeight:
            return TrellisWeight(self.shape, self.codes, row, column, self.signs, bits=self.bits, states=self.states)

        V = decode(self._trellis(torch.ones_like(self.row, dtype=torch.float32)))
        return TrainedFactorsOfWalks(V, self.row, self.column, self._signs(), store)

    @property
    def packed(self) -> Trellis:
        """The input of the product, for x that is rotated by `flips` and multiplied by `gains`."""
        return self._trellis(self.factors)

    def matmul(self, x: Tensor) -> Tensor:
        return trellis_matmul(turned(x, self.flips, self.gains), self.packed)

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"flips": self._signs(), "gains": self.column.float(), "factors": self.row.float()}

    @classmethod
    def spec_of(cls, shape: tuple[int, int], **settings: Any) -> dict[str, Any]:
        return super().spec_of(shape, **settings, length=length_for(shape[0]))

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        (out, columns), length = spec["shape"], spec["length"]
        walks = -(-out // length) * length * columns * spec["bits"]  # with padded rows
        return (walks + 16 * (out + columns) + columns) / (out * columns)

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "TrellisWeight":
        stored = Stored(spec, tensors)
        bits, states = stored.number("bits", BITS), stored.number("states", STATES)
        length = stored.number("length", range(PANEL, max(LONGEST, stored.out + PANEL) + 1, PANEL))
        codes = stored.tensor("codes", (-(-stored.out // length), stored.columns, length * bits // 8), torch.uint8)
        row = stored.tensor("row", (stored.out,), torch.bfloat16)
        column = stored.tensor("column", (stored.columns,), torch.bfloat16)
        signs = stored.tensor("signs", (-(-stored.columns // 8),), torch.uint8)
        return cls(stored.shape, codes, row, column, signs, bits=bits, states=states)

    def _trellis(self, row: Tensor) -> Trellis:
        return Trellis(self.codes, row, self.bits, self.states, self.shape)

    def _signs(self) -> Tensor:
        return unpack_bits(self.signs[None], 1, self.shape[1])[0].float() * 2 - 1
