"""Indices into a table per row; with nested tables, the weight can be read in several numbers of bits."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats.base import AsStored
from compress.formats.stored import Stored
from kernels.int_matmul import pack_bits, unpack_bits
from kernels.lut_matmul import BITS, Codebook, lut_matmul

LEAST = 3  # bits of a table that the product takes; smaller tables are repeated


class RowTables(AsStored):
    """w = table[row, code].

    Buffers: `codes` uint8 [out, ceil(in/8) * bits], as `kernels.int_matmul.pack_bits` packs them, and `tables` float16
    [out, Σ 2^b], for each number b of bits from `least` to `bits` the values of the upper b bits of a code.
    """

    name: ClassVar[str] = "row_tables"
    settings: ClassVar[tuple[str, ...]] = ("bits", "least")

    def __init__(self, shape: tuple[int, int], codes: Tensor, tables: Tensor, *, bits: int, least: int) -> None:
        super().__init__()
        self.shape, self.bits, self.least = shape, bits, least
        self.register_buffer("codes", codes)
        self.register_buffer("tables", tables)

    @classmethod
    def from_codes(cls, codes: Tensor, tables: list[Tensor]) -> "RowTables":
        """From indices [out, in] and the tables [out, 2^b] of successive b; the last table is for whole indices."""
        least, bits = (table.shape[1].bit_length() - 1 for table in (tables[0], tables[-1]))
        tables16 = torch.cat(tables, 1).to(torch.float16)
        return cls(tuple(codes.shape), pack_bits(codes, bits), tables16, bits=bits, least=least)

    def at(self, bits: int) -> "RowTables":
        """The same weight in fewer bits, without the tensors for other numbers of bits.

        Raises:
            ValueError: no table of this number of bits is stored.
        """
        if not self.least <= bits <= self.bits:
            raise ValueError(f"`bits` (={bits}) must lie between {self.least} and {self.bits}, what this weight holds")
        codes = unpack_bits(self.codes, self.bits, self.shape[1]) >> (self.bits - bits)
        end = sum(1 << b for b in range(self.least, bits + 1))
        tables = self.tables[:, :end].contiguous()
        return RowTables(self.shape, pack_bits(codes, bits), tables, bits=bits, least=self.least)

    def dequantize(self) -> Tensor:
        codes = unpack_bits(self.codes, self.bits, self.shape[1])
        return self._table().float().gather(1, codes.long())

    def matmul(self, x: Tensor) -> Tensor:
        codes = self.codes if self.bits >= LEAST else self.wider
        bits = max(self.bits, LEAST)
        return lut_matmul(x, Codebook("rows", codes, self.table, None, bits, self.shape[1], self.shape))

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        table = self._table().to(dtype).contiguous()
        if self.bits >= LEAST:
            return {"table": table}
        codes = pack_bits(unpack_bits(self.codes, self.bits, self.shape[1]), LEAST)
        return {"table": table.repeat(1, 1 << (LEAST - self.bits)), "wider": codes}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return spec["bits"] + 16 * sum(1 << b for b in range(spec["least"], spec["bits"] + 1)) / spec["shape"][1]

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "RowTables":
        stored = Stored(spec, tensors)
        bits = stored.number("bits", BITS)
        least = stored.number("least", range(1, bits + 1))
        tables = stored.tensor("tables", (stored.out, sum(1 << b for b in range(least, bits + 1))), torch.float16)
        return cls(
            stored.shape, stored.packed("codes", stored.out, stored.columns, bits), tables, bits=bits, least=least
        )

    def _table(self) -> Tensor:
        """The table [out, 2^bits] of whole indices."""
        return self.tables[:, -(1 << self.bits) :]


def at_bits(model: nn.Module, bits: int) -> nn.Module:
    """Reduce every weight with nested tables to this number of bits, in place; other weights do not change.

    Raises:
        ValueError: no weight of the model holds nested tables, or one of them has no table of this number of bits.
    """
    taken = 0
    for module in model.modules():
        parts = getattr(module, "parts", None)
        for i, part in enumerate(parts if isinstance(parts, nn.ModuleList) else ()):
            if isinstance(part, RowTables):
                parts[i] = part.at(bits)
                parts[i].for_compute(module.dtype, part.codes.device)
                taken += 1
    if not taken:
        raise ValueError(f"`bits` (={bits}): no weight of this model is stored with nested tables")
    return model
