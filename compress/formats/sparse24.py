"""A 2:4 sparse weight: two of every four neighbours, and their places. Sparse tensor cores multiply it in this form."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.sparse import Sparse
from compress.formats.stored import Stored
from kernels.int_matmul import pack, unpack
from kernels.sparse24_matmul import Sparse24, compress24, decompress24, library, sparse24_matmul, to_library


class Sparse24Weight(Sparse):
    """Two weights, or codes, of every four in a row, and two bits each for their places.

    Buffers: `places` as in `kernels.sparse24_matmul.Sparse24`, and those of `values`, a dense or integer format of
    [out, in/2] whose groups are half as wide as those of the weight with its zeros. On a GPU with a library for it
    16-bit values are laid out for that library (`fast_values`, `fast_places`: not stored); else see `Sparse`.
    """

    name: ClassVar[str] = "sparse24"
    follows: ClassVar[tuple[str, ...]] = ("values.weight",)

    def __init__(self, values: Dense | IntGroup, places: Tensor) -> None:
        super().__init__()
        self.shape = (values.shape[0], 2 * values.shape[1])
        self.values = values
        self.register_buffer("places", places)
        self.register_buffer("fast_values", None, persistent=False)
        self.register_buffer("fast_places", None, persistent=False)

    @classmethod
    def from_plain(cls, plain: Dense | IntGroup, keep: Tensor) -> "Sparse24Weight":
        """Store the entries in `keep` [out, in] bool, two of every four, of a weight that is 0 elsewhere."""
        small = compress24(keep.to(torch.uint8))
        assert small.values.all(), "two of every four must be kept"
        index = _columns(keep)
        if isinstance(plain, Dense):
            return cls(Dense(plain.weight.gather(1, index)), small.places)
        rows = plain.packed
        codes, zero = unpack(rows)
        kept = pack(
            codes.gather(1, index),
            rows.scale,
            None if rows.zero is None else zero,
            bits=rows.bits,
            group_size=rows.group_size // 2,
        )
        return cls(IntGroup(kept), small.places)

    def keep(self) -> Tensor:
        """[out, in] bool: the stored entries."""
        ones = torch.ones(self.values.shape, dtype=torch.bool, device=self.places.device)
        return decompress24(Sparse24("rows", ones, self.places, self.shape))

    def expanded(self) -> Dense | IntGroup:
        if isinstance(self.values, Dense):
            return Dense(decompress24(Sparse24("rows", self.values.weight, self.places, self.shape)))
        rows = self.values.packed
        codes, zero = unpack(rows)
        groups = rows.shape[1] // rows.group_size
        full = zero.expand(self.shape[0], groups).repeat_interleave(2 * rows.group_size, 1)
        codes = full.scatter(1, _columns(self.keep()), codes)
        return IntGroup(
            pack(codes, rows.scale, None if rows.zero is None else zero, bits=rows.bits, group_size=2 * rows.group_size)
        )

    def matmul(self, x: Tensor) -> Tensor:
        if self.fast_values is None or x.dtype != self.fast_values.dtype:
            return super().matmul(x)
        return sparse24_matmul(x, Sparse24(library(x.device), self.fast_values, self.fast_places, self.shape))

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        self._laid_out_for, self.fast_values, self.fast_places = (dtype, device), None, None
        if library(device) and isinstance(self.values, Dense) and self.values.weight.dtype == dtype != torch.float32:
            fast = to_library(Sparse24("rows", self.values.weight, self.places, self.shape))
            self.fast_values, self.fast_places, self.plain = fast.values, fast.places, None
        else:
            super().for_compute(dtype, device)

    def spec(self) -> dict[str, Any]:
        return {"format": self.name, "shape": list(self.shape), "values": self.values.spec()}

    @classmethod
    def spec_of(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """The `spec()` of the result of `from_plain` for a weight that `plain` describes: floats or integers."""
        out, columns = plain["shape"]
        values = {**plain, "shape": [out, columns // 2]}
        if "group_size" in plain:
            values["group_size"] = plain["group_size"] // 2
        return {"format": cls.name, "shape": [out, columns], "values": values}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return 1 + _kind_of(spec["values"]).expected_bits(spec["values"], float_bits) / 2

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Sparse24Weight":
        own = {name.removeprefix("values."): t for name, t in tensors.items() if name.startswith("values.")}
        values, stored = _kind_of(spec["values"]).from_tensors(spec["values"], own), Stored(spec, tensors)
        places = stored.packed("places", stored.out, stored.columns, 1)
        if stored.columns % 4 or values.shape != (stored.out, stored.columns // 2):
            raise ValueError(f"a 2:4 sparse weight {stored.shape} holds {values.shape} values")
        made = cls(values, places)
        if not (made.keep().view(stored.out, -1, 4).sum(-1) == 2).all():
            raise ValueError(f"`places` of a 2:4 sparse weight {stored.shape} names a place twice")
        return made


def _columns(keep: Tensor) -> Tensor:
    """[out, in/2]: the column of each stored value."""
    return keep.nonzero()[:, 1].view(len(keep), -1)


def _kind_of(spec: dict[str, Any]) -> type[Dense | IntGroup]:
    """The format of the values."""
    return IntGroup if spec["format"] == IntGroup.name else Dense
