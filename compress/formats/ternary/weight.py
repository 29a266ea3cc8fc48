"""Three values per row, written in words of a dictionary: the more weights are 0, the fewer bits are needed."""

from math import log2
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import AsStored
from compress.formats.csr import index_dtype
from compress.formats.stored import Stored
from compress.formats.ternary.words import P0, Ternary, check_rows, decode, encode
from kernels.linear import linear


class TernaryWeight(AsStored):
    """w is 0, or the `low` or the `high` of its row.

    Buffers: `codes` int16 [words], `counts` [out] words of each row, int16 or int32 where rows are longer than 32,767,
    and `low` and `high` [out] bfloat16; see `compress.formats.ternary.words.Ternary`.
    """

    name: ClassVar[str] = "ternary"
    settings: ClassVar[tuple[str, ...]] = ("p0",)  # the number of words depends on the values

    def __init__(
        self, shape: tuple[int, int], codes: Tensor, counts: Tensor, low: Tensor, high: Tensor, *, p0: float
    ) -> None:
        super().__init__()
        self.shape, self.p0 = shape, p0
        for name, tensor in (("codes", codes), ("counts", counts), ("low", low), ("high", high)):
            self.register_buffer(name, tensor)

    @classmethod
    def from_symbols(cls, symbols: Tensor, low: Tensor, high: Tensor, *, p0: float) -> "TernaryWeight":
        """From 0, 1 (low) and 2 (high) [out, in], and the two values of each row [out].

        Args:
            p0: the share of zeros for which the dictionary is best; any matrix can be written with any dictionary.
        """
        shape = (symbols.shape[0], symbols.shape[1])
        codes, counts = encode(symbols, p0)
        values = low.to(torch.bfloat16), high.to(torch.bfloat16)
        return cls(shape, codes, counts.to(index_dtype(shape[1])), *values, p0=p0)

    def dequantize(self) -> Tensor:
        return decode(self._ternary())

    def matmul(self, x: Tensor) -> Tensor:
        """x Wᵀ; the whole weight is decoded at every call, so that only the words stay in memory."""
        return _product(x, *self._ternary()[:4], self.shape[1], self.p0)

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        """The entropy for a share `p0` of zeros and a tenth of it, and the bits of each row."""
        p0 = spec["p0"]
        entropy = -p0 * log2(p0) - (1 - p0) * log2((1 - p0) / 2)
        return 1.1 * entropy + 48 / spec["shape"][1]

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "TernaryWeight":
        stored, p0 = Stored(spec, tensors), spec["p0"]
        if not isinstance(p0, float) or not P0[0] <= p0 <= P0[1]:
            raise ValueError(f"`p0` (={p0!r}) of a stored weight must be a number between {P0[0]} and {P0[1]}")
        codes = stored.tensor("codes", (None,), torch.int16)
        counts = stored.counted("counts", len(codes))
        low, high = (stored.tensor(name, (stored.out,), torch.bfloat16) for name in ("low", "high"))
        made = cls(stored.shape, codes, counts, low, high, p0=p0)
        check_rows(made._ternary())
        return made

    def _ternary(self) -> Ternary:
        return Ternary(self.codes, self.counts, self.low, self.high, self.shape, self.p0)


@torch.library.custom_op("workbench::ternary_product", mutates_args=())
def _product(
    x: Tensor, codes: Tensor, counts: Tensor, low: Tensor, high: Tensor, in_features: int, p0: float
) -> Tensor:
    # Opaque to the compiler on purpose: if the decoder were traced, freezing would fold it into a dense weight.
    W = decode(Ternary(codes, counts, low, high, (len(counts), in_features), p0))
    return linear(x.reshape(-1, in_features), W.to(x.dtype)).view(*x.shape[:-1], len(counts))


@_product.register_fake
def _(x, codes, counts, low, high, in_features, p0):
    return x.new_empty(*x.shape[:-1], len(counts))
