"""A weight with zeros anywhere: the other weights one after another, and a mask with a bit per weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.sparse import Sparse
from compress.formats.stored import FLOATS, Stored
from kernels.int_matmul import BITS, pack, pack_bits, unpack, unpack_bits


class Bitmap(Sparse):
    """Kept weights row by row, left to right, and a mask.

    Buffers: `mask` uint8 [out, ceil(in/8)], low bits first; `values` [kept], floats; or `codes` uint8 (kept codes,
        eight to `bits`
    bytes), `scale` [out, groups] and, asymmetric, `zero`, where the groups are those of the weight with its zeros.
    """

    name: ClassVar[str] = "bitmap"
    follows: ClassVar[tuple[str, ...]] = ("values",)

    def __init__(
        self, shape: tuple[int, int], mask: Tensor, values: Tensor | None, ints: dict[str, Any] | None = None
    ) -> None:
        """ints: None, or bits, group_size, codes, scale and zero (None: symmetric)."""
        super().__init__()
        self.shape, self.bits, self.group_size = shape, (ints or {}).get("bits"), (ints or {}).get("group_size")
        self.register_buffer("mask", mask)
        self.register_buffer("values", values)
        for name in ("codes", "scale", "zero"):
            self.register_buffer(name, (ints or {}).get(name))

    @classmethod
    def from_plain(cls, plain: Dense | IntGroup, keep: Tensor) -> "Bitmap":
        """Store the entries in `keep` [out, in] bool of a weight that is 0 elsewhere."""
        mask = pack_bits(keep, 1)
        if isinstance(plain, Dense):
            return cls(plain.shape, mask, plain.weight[keep])
        rows = plain.packed
        codes = pack_bits(unpack(rows)[0][keep][None], rows.bits)[0]
        ints = {
            "bits": rows.bits,
            "group_size": rows.group_size,
            "codes": codes,
            "scale": rows.scale,
            "zero": rows.zero,
        }
        return cls(plain.shape, mask, None, ints)

    def keep(self) -> Tensor:
        """[out, in] bool: the stored entries."""
        return unpack_bits(self.mask, 1, self.shape[1]).bool()

    def floats(self) -> tuple[Tensor, Tensor] | None:
        return None if self.values is None else (self.mask, self.values)

    def expanded(self) -> Dense | IntGroup:
        keep = self.keep()
        if self.bits is None:
            return Dense(self.values.new_zeros(self.shape).masked_scatter_(keep, self.values))
        _, columns = self.shape
        groups = columns // self.group_size
        zero = None if self.zero is None else unpack_bits(self.zero, self.bits, groups)
        middle = (
            torch.full((1, 1), 1 << (self.bits - 1), dtype=torch.uint8, device=self.codes.device)
            if zero is None
            else zero
        )
        codes = middle.expand(self.shape[0], groups).repeat_interleave(self.group_size, 1)
        count = int(keep.sum())
        codes = codes.masked_scatter(keep, unpack_bits(self.codes[None], self.bits, count)[0].contiguous())
        return IntGroup(pack(codes, self.scale, zero, bits=self.bits, group_size=self.group_size))

    def spec(self) -> dict[str, Any]:
        grid = {"bits": self.bits, "group_size": self.group_size, "symmetric": self.zero is None}
        return {"format": self.name, "shape": list(self.shape), **grid}

    @classmethod
    def spec_of(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """The `spec()` of the result of `from_plain` for a weight that `plain` describes: floats or integers."""
        grid = {"bits": None, "group_size": None, "symmetric": True}
        return {**grid, **plain, "format": cls.name}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return 1 + (1 - zeros) * super().expected_bits(spec, float_bits)  # a bit for every place

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Bitmap":
        stored = Stored(spec, tensors)
        mask = stored.packed("mask", stored.out, stored.columns, 1)
        kept = int(unpack_bits(mask, 1, stored.columns).sum(dtype=torch.int64))
        if spec["bits"] is None:
            return cls(stored.shape, mask, stored.tensor("values", (kept,), FLOATS))
        bits, group_size = stored.number("bits", BITS), stored.group_size()
        groups = stored.columns // group_size
        ints = {
            "bits": bits,
            "group_size": group_size,
            "codes": stored.tensor("codes", (-(-kept // 8) * bits,), torch.uint8),
            "scale": stored.tensor("scale", (stored.out, groups), FLOATS),
            "zero": None if spec["symmetric"] else stored.packed("zero", stored.out, groups, bits),
        }
        return cls(stored.shape, mask, None, ints)

    def _apply(self, fn, recurse=True):
        scale = self.scale
        super()._apply(fn, recurse)
        if scale is not None:  # as stored; `.to(bfloat16)` is about the activations
            self.scale = scale.to(self.mask.device)
        return self
