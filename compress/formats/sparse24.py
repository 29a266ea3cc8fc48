"""A 2:4 sparse weight: two of every four neighbours, and their places. Sparse tensor cores multiply it in this form."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.sparse import Sparse
from compress.formats.stored import Stored
from kernels.int_matmul import pack, pack_bits, unpack
from kernels.registry import ran

ROWS, COLUMNS, TOKENS = 32, 64, 8  # torch's libraries multiply whole tiles of W, and a multiple of 8 tokens


class Sparse24Weight(Sparse):
    """Two weights, or codes, of every four in a row, and two bits each for their places.

    Buffers: `places` (see `compress24`), and those of `values`, a dense or integer format of [out, in/2] whose groups
    are half as wide as those of the weight with its zeros. On a GPU with a library for it 16-bit values are laid out
    for that library (`fast_values`, `fast_places`: not stored); else see `Sparse`, whose product needs a `mask`, which
    is not stored either.
    """

    name: ClassVar[str] = "sparse24"
    follows: ClassVar[tuple[str, ...]] = ("values.weight",)

    def __init__(self, values: Dense | IntGroup, places: Tensor) -> None:
        super().__init__()
        self.shape = (values.shape[0], 2 * values.shape[1])
        self.values = values
        self.register_buffer("places", places)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("fast_values", None, persistent=False)
        self.register_buffer("fast_places", None, persistent=False)

    @classmethod
    def from_plain(cls, plain: Dense | IntGroup, keep: Tensor) -> "Sparse24Weight":
        """Store the entries in `keep` [out, in] bool, two of every four, of a weight that is 0 elsewhere."""
        ones, places = compress24(keep.to(torch.uint8))
        assert ones.all(), "two of every four must be kept"
        index = _columns(keep)
        if isinstance(plain, Dense):
            return cls(Dense(plain.weight.gather(1, index)), places)
        rows = plain.packed
        codes, zero = unpack(rows)
        kept = pack(
            codes.gather(1, index),
            rows.scale,
            None if rows.zero is None else zero,
            bits=rows.bits,
            group_size=rows.group_size // 2,
        )
        return cls(IntGroup(kept), places)

    def keep(self) -> Tensor:
        """[out, in] bool: the stored entries."""
        ones = torch.ones(self.values.shape, dtype=torch.bool, device=self.places.device)
        return decompress24(ones, self.places)

    def floats(self) -> tuple[Tensor, Tensor] | None:
        if not isinstance(self.values, Dense):
            return None
        if self.mask is None:
            self.mask = pack_bits(self.keep(), 1)
        return self.mask, self.values.weight.flatten()

    def expanded(self) -> Dense | IntGroup:
        if isinstance(self.values, Dense):
            return Dense(decompress24(self.values.weight, self.places))
        rows = self.values.packed
        codes, zero = unpack(rows)
        groups = rows.shape[1] // rows.group_size
        full = zero.expand(self.shape[0], groups).repeat_interleave(2 * rows.group_size, 1)
        codes = full.scatter(1, _columns(self.keep()), codes)
        return IntGroup(
            pack(codes, rows.scale, None if rows.zero is None else zero, bits=rows.bits, group_size=2 * rows.group_size)
        )

    def matmul(self, x: Tensor) -> Tensor:
        fast = self.fast_values
        if fast is None or x.dtype != fast.dtype or not x.numel():
            return super().matmul(x)
        ran("sparse24_matmul", "cusparselt" if self.fast_places is None else "cutlass")
        out, columns = self.shape
        flat = x.reshape(-1, columns)
        beyond = -columns % COLUMNS, -len(flat) % TOKENS
        padded = F.pad(flat, (0, beyond[0], 0, beyond[1])) if any(beyond) else flat.contiguous()
        if self.fast_places is None:
            y = torch._cslt_sparse_mm(fast, padded.t(), transpose_result=True)  # [tokens, out], padded
        else:
            y = torch._sparse_semi_structured_mm(fast, self.fast_places, padded.t()).t()
        return y[: len(flat), :out].reshape(*x.shape[:-1], out)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        self._laid_out_for, self.mask, self.fast_values, self.fast_places = (dtype, device), None, None, None
        if library(device) and isinstance(self.values, Dense) and self.values.weight.dtype == dtype != torch.float32:
            W = decompress24(self.values.weight, self.places)
            self.fast_values, self.fast_places = to_library(W, library(device))
            self.plain = None
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


def compress24(W: Tensor) -> tuple[Tensor, Tensor]:
    """The two kept entries of each four of W [out, in], 0 elsewhere, and their places; `in` is a multiple of 4.

    Returns:
        values [out, in/2], in order; zeros fill up fours with fewer nonzeros.
        places uint8 [out, ceil(in/8)]: two bits for each value, low bits first, so that a byte describes two fours. A
            four's nibble is the one that NVIDIA's hardware reads.
    """
    fours = W.reshape(len(W), -1, 4)
    zero = fours == 0  # [out, in/4, 4]
    assert (zero.sum(-1) >= 2).all(), "at most two of every four are not zero"
    first = zero.to(torch.uint8).argsort(dim=-1, stable=True)[..., :2]  # nonzeros come first, then zeros, in order
    place = first.sort(-1).values  # [out, in/4, 2]
    nibble = (place[..., 0] | place[..., 1] << 2).to(torch.uint8)  # [out, in/4]
    pairs = F.pad(nibble, (0, nibble.shape[1] % 2)).view(len(W), -1, 2)
    return fours.gather(-1, place).flatten(1), pairs[..., 0] | pairs[..., 1] << 4


def decompress24(values: Tensor, places: Tensor) -> Tensor:
    """W [out, in] in the dtype of `values`: the inverse of `compress24`."""
    out, fours = values.shape[0], values.shape[1] // 2
    nibble = torch.stack([places & 15, places >> 4], -1).view(out, -1)[:, :fours]
    place = torch.stack([nibble & 3, nibble >> 2], -1).long()  # [out, in/4, 2]
    return values.new_zeros(out, fours, 4).scatter_(-1, place, values.view(out, fours, 2)).view(out, -1)


def library(device: torch.device) -> str | None:
    """The library by which torch multiplies 2:4 sparse weights on this device: "cusparselt", "cutlass" or None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    if major >= 8 and torch.backends.cusparselt.is_available():
        return "cusparselt"
    return "cutlass" if major == 8 else None  # torch compiles its CUTLASS kernels for sm_8x only


def to_library(W: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """A 2:4 sparse W [out, in] of 16 bits in the layout of a library: values, and CUTLASS's places."""
    W = F.pad(W, (0, -W.shape[1] % COLUMNS, 0, -W.shape[0] % ROWS))
    if name == "cusparselt":
        return torch._cslt_compress(W), None
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    return sparse_semi_structured_from_dense_cutlass(W)
