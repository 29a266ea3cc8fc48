"""Some input columns of a weight, stored in another format; the other columns are 0. Several such parts with different
columns add up to the whole weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.codebook import CodebookGroup
from compress.formats.dense import Dense
from compress.formats.eight_bit import EightBit
from compress.formats.stored import Stored

INNER = {
    inner.name: inner for inner in (Dense, EightBit, CodebookGroup)
}  # formats in which the chosen columns may be stored


class Columns(Format):
    """W with `inner` [out, columns] in its chosen columns: y = inner(x[..., chosen]).

    Buffers: `chosen`, a mask [in] of bytes, and those of `inner`; the columns' numbers are computed from the mask.
    """

    name: ClassVar[str] = "columns"
    follows: ClassVar[tuple[str, ...]] = ("inner.weight",)

    def __init__(self, inner: Format, chosen: Tensor) -> None:
        """chosen: [in] bool or uint8, true for the columns that `inner` holds."""
        super().__init__()
        index = chosen.nonzero().squeeze(1)
        assert len(index) == inner.shape[1], f"{len(index)} columns are chosen, {inner.shape[1]} are stored"
        self.shape = (inner.shape[0], len(chosen))
        self.inner = inner
        self.register_buffer("chosen", chosen.to(torch.uint8))
        self.register_buffer("index", index, persistent=False)

    @property
    def activation_bits(self) -> int | None:
        return self.inner.activation_bits

    def dequantize(self) -> Tensor:
        W = torch.zeros(self.shape, device=self.index.device)
        return W.index_copy_(1, self.index, self.inner.dequantize())

    def matmul(self, x: Tensor) -> Tensor:
        return self.inner.matmul(x.index_select(-1, self.index))

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        self.inner.for_compute(dtype, device)

    def spec(self) -> dict[str, Any]:
        return self.spec_of(self.shape, self.inner.spec())

    @classmethod
    def spec_of(cls, shape: tuple[int, int], inner: dict[str, Any]) -> dict[str, Any]:
        """The `spec()` of a weight of this shape whose chosen columns are stored as `inner` describes."""
        return {"format": cls.name, "shape": list(shape), "inner": inner}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        inner = spec["inner"]
        return INNER[inner["format"]].expected_bits(inner, float_bits) * inner["shape"][1] / spec["shape"][1]

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Columns":
        own = {name.removeprefix("inner."): t for name, t in tensors.items() if name.startswith("inner.")}
        inner = INNER[spec["inner"]["format"]].from_tensors(spec["inner"], own)
        stored = Stored(spec, tensors)
        chosen = stored.tensor("chosen", (stored.columns,), torch.uint8)
        if inner.shape != (stored.out, int(chosen.count_nonzero())):
            raise ValueError(f"{int(chosen.count_nonzero())} columns are chosen, {inner.shape} weights are stored")
        return cls(inner, chosen)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.index = self.chosen.nonzero().squeeze(1)
