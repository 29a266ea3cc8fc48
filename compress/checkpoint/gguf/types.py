"""Stored codes as blocks of GGUF's types: bit layouts, and the smallest type that holds a weight without a change.

Sources: `ggml-quants.h` of ggml for the layouts; every block is checked with the decoder of the package `gguf`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGML
from torch import Tensor

from compress.formats import Dense, Format
from compress.formats.masked import kept_of
from compress.formats.sparse import Sparse
from kernels.int_matmul import to_rows as ints_to_rows
from kernels.int_matmul import unpack
from kernels.lut_matmul import unpack_codebook
from kernels.w8a8_matmul import to_rows as bytes_to_rows

BLOCK = 32  # weights of a row that share a scale, in each of the types below
ROUNDING = 2.0**-10  # largest change of a weight, relative to its block's range: that of 16-bit floats
E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # values of MXFP4's codes, in halves; the highest bit is the sign
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Grid:
    """A weight as integers: w = scale * (code - zero).

    Attributes:
        codes: int16 [out, in]; signed if `zero` is None, else from 0 on.
        scale: float32 [out, groups].
        zero: int16 [out, groups], or None.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def rows(self, order: Tensor) -> "Grid":
        """The same weight with its output channels in another order."""
        return Grid(self.codes[order], self.scale[order], None if self.zero is None else self.zero[order])

    @classmethod
    def joined(cls, grids: Sequence["Grid | None"]) -> "Grid | None":
        """The rows of several weights in one; None if they are not of one kind, or one is None."""
        kinds = {None if grid is None else (grid.scale.shape[1], grid.zero is None) for grid in grids}
        if len(kinds) > 1 or None in kinds:
            return None
        codes, scale = (torch.cat([getattr(grid, name) for grid in grids]) for name in ("codes", "scale"))
        return cls(codes, scale, None if grids[0].zero is None else torch.cat([grid.zero for grid in grids]))

    def signed(self) -> Tensor:
        """code - zero, int16 [out, in]."""
        if self.zero is None:
            return self.codes
        return self.codes - self.zero.repeat_interleave(self.codes.shape[1] // self.zero.shape[1], 1)

    def dequantize(self) -> Tensor:
        """W [out, in] in float32."""
        out, groups = self.scale.shape
        return (self.signed().view(out, groups, -1).float() * self.scale[..., None]).view(out, -1)


class Encoded(NamedTuple):
    """A weight in the form of GGUF.

    kind: the type. data: the array for the writer, rows first. rounding: as the function `rounding` gives it.
    """

    kind: GGML
    data: np.ndarray
    rounding: float


def grid_of(parts: Sequence[Format]) -> Grid | None:
    """The integers of a stored weight; None if it is a sum of parts, is of floats, or has groups unknown to GGUF."""
    reader = _READERS.get(parts[0].name) if len(parts) == 1 else None
    grid = None if reader is None else reader(parts[0])
    if grid is None:
        return None
    columns, groups = grid.codes.shape[1], grid.scale.shape[1]
    return grid if columns % BLOCK == 0 and (columns // groups) % BLOCK == 0 else None


def encode(W: Tensor, grid: Grid | None, *, keep_zeros: bool = False) -> Encoded:
    """W [out, in] in the smallest type that holds it: blocks of its codes, or else floats.

    Args:
        W: float32 [out, in], the values of the codes; any shape if `grid` is None.
        grid: its codes, if `grid_of` found any.
        keep_zeros: refuse types that would turn a 0 into another value; for pruned weights.
    """
    for kind, low, high, offset in _TYPES if grid is not None else ():
        if kind == GGML.MXFP4:
            data = _mx_blocks(grid)
        else:
            data = _offset_blocks(grid, kind, high) if offset else _signed_blocks(grid, kind, low, high)
        if data is None:
            continue
        if keep_zeros and decode(data, kind)[W.numpy() == 0].any():
            continue
        if (change := rounding(W, data, kind)) <= ROUNDING:
            return Encoded(kind, data, change)
    return encode_floats(W)


def encode_floats(W: Tensor, kinds: Sequence[GGML] = (GGML.F16, GGML.BF16, GGML.F32)) -> Encoded:
    """W, float32 of any shape, in 16 bits: in a type that holds it exactly, else rounded to the first that fits."""
    array = W.contiguous().numpy()
    tried = []
    for kind in kinds:
        with np.errstate(over="ignore"):
            data = gguf.quantize(array, kind)
        tried.append(Encoded(kind, data, rounding(W, data, kind)))
    exact = next((one for one in tried if one.rounding == 0 and one.kind != GGML.F32), None)
    return exact or next((one for one in tried if one.rounding <= ROUNDING), tried[-1])


def decode(data: np.ndarray, kind: GGML) -> np.ndarray:
    """The values of stored data as the package `gguf` decodes them, in float32."""
    with np.errstate(invalid="ignore"):  # a scale beyond the range of 16 bits
        return gguf.dequantize(data, kind)


def rounding(W: Tensor, data: np.ndarray, kind: GGML) -> float:
    """Largest change of a weight, relative to the range of its block, or for floats to its row's largest weight."""
    expected = W.contiguous().numpy()
    change = np.abs(decode(data, kind).reshape(expected.shape) - expected)
    if kind in _LARGEST:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        d = data.reshape(-1, size)[:, :2].copy().view(np.float16).astype(np.float32)[:, 0]
        change, reach = change.reshape(-1, BLOCK).max(-1), np.abs(d) * _LARGEST[kind]
    else:
        width = expected.shape[-1]
        change, reach = change.reshape(-1, width).max(-1), np.abs(expected.reshape(-1, width)).max(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # inf / inf is not finite, either
        relative = np.where(change == 0, 0, change / np.maximum(reach, np.finfo(np.float32).tiny))
    worst = float(relative.max(initial=0))
    return worst if np.isfinite(worst) else float("inf")


def keeps_zeros(parts: Sequence[Format]) -> bool:
    """Whether a stored weight was pruned, so that its zeros must stay."""
    return kept_of(parts) is not None


def of_floats(parts: Sequence[Format]) -> bool:
    """Whether a stored weight is made of floats alone, with or without its zeros."""
    return all((part.expanded() if isinstance(part, Sparse) else part).name == Dense.name for part in parts)


# (type, smallest code, largest code, whether a block has an offset beside its scale), by size
_TYPES: tuple[tuple[GGML, int, int, bool], ...] = (
    (GGML.MXFP4, -12, 12, False),
    (GGML.Q4_0, -8, 7, False),
    (GGML.IQ4_NL, -127, 113, False),
    (GGML.Q4_1, 0, 15, True),
    (GGML.Q5_0, -16, 15, False),
    (GGML.Q5_1, 0, 31, True),
    (GGML.Q8_0, -128, 127, False),
)
_LARGEST = {kind: max(-low, high) for kind, low, high, _ in _TYPES if kind != GGML.MXFP4}  # MXFP4's scales are exact


def _signed_blocks(grid: Grid, kind: GGML, low: int, high: int) -> np.ndarray | None:
    """Blocks of w = d * q with low <= q <= high; None if the codes do not fit. A block may negate both q and d."""
    q = grid.signed().numpy().reshape(-1, BLOCK)  # [blocks, 32]
    d = _per_block(grid.scale, grid.codes.shape[1])
    turned = (q.max(-1) > high) | (q.min(-1) < low)
    q, d = np.where(turned[:, None], -q, q), np.where(turned, -d, d)
    if q.max() > high or q.min() < low:
        return None
    if kind == GGML.IQ4_NL:
        places = np.searchsorted(IQ4_NL_VALUES, q).clip(max=15)
        if (np.take(IQ4_NL_VALUES, places) != q).any():
            return None
        body = [_halves(places)]
    elif kind == GGML.Q8_0:
        body = [q.astype(np.int8).view(np.uint8)]
    else:
        body = _packed(q - low, high - low)
    return _joined(grid, [_fp16(d), *body])


def _mx_blocks(grid: Grid) -> np.ndarray | None:
    """Blocks of w = d * q with d a power of two and |q| one of E2M1_HALVES; None if the weight has no such form."""
    q = grid.signed().numpy().reshape(-1, BLOCK)
    d = _per_block(grid.scale, grid.codes.shape[1])
    fraction, exponent = np.frexp(np.abs(d))
    exponent = exponent - 1 + 128  # the stored exponent, for halves
    if (fraction != 0.5).any() or exponent.min() < 0 or exponent.max() > 254:
        return None
    places = np.searchsorted(E2M1_HALVES, np.abs(q)).clip(max=7)
    if (np.take(E2M1_HALVES, places) != np.abs(q)).any():
        return None
    codes = places | np.where((q < 0) != (d < 0)[:, None], 8, 0)
    return _joined(grid, [exponent.astype(np.uint8)[:, None], _halves(codes)])


def _offset_blocks(grid: Grid, kind: GGML, high: int) -> np.ndarray | None:
    """Blocks of w = d * q + m with 0 <= q <= high and m = -zero * scale; None if the codes do not fit."""
    if grid.zero is None:
        return None
    q = grid.codes.numpy().reshape(-1, BLOCK)
    if q.max() > high:
        return None
    columns = grid.codes.shape[1]
    d, m = _per_block(grid.scale, columns), _per_block(-grid.zero * grid.scale, columns)
    return _joined(grid, [_fp16(d), _fp16(m), *_packed(q, high)])


def _packed(q: np.ndarray, high: int) -> list[np.ndarray]:
    """4 bits of each code, and before them the fifth bits, if there are any."""
    low = _halves(q & 15)
    if high <= 15:
        return [low]
    return [np.packbits((q >> 4).astype(np.uint8), axis=-1, bitorder="little"), low]


def _halves(q: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes: the first half of a block in the low bits, the second in the high ones."""
    return (q[:, : BLOCK // 2] | (q[:, BLOCK // 2 :] << 4)).astype(np.uint8)


def _fp16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)[:, None].view(np.uint8)


def _per_block(values: Tensor, columns: int) -> np.ndarray:
    """[out, groups] -> [blocks], repeated if a group is several blocks wide."""
    blocks = columns // BLOCK
    return values.repeat_interleave(blocks // values.shape[1], 1).numpy().reshape(-1)


def _joined(grid: Grid, fields: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(fields, axis=-1).reshape(grid.codes.shape[0], -1)


def _from_int_group(part: Format) -> Grid | None:
    packed = ints_to_rows(part.packed)
    codes, zero = unpack(packed)
    codes, middle = codes.to("cpu", torch.int16), 1 << (packed.bits - 1)
    scale = packed.scale.to("cpu", torch.float32)
    if packed.zero is None:
        return Grid(codes - middle, scale)
    return Grid(codes, scale, zero.to("cpu", torch.int16))


def _from_eight_bit(part: Format) -> Grid | None:
    rows = bytes_to_rows(part.w8)
    if rows.codes.dtype != torch.int8 or rows.scale.dim() != 1:
        return None
    return Grid(rows.codes.to("cpu", torch.int16), rows.scale[:, None].to("cpu", torch.float32))


def _from_bnb_int8(part: Format) -> Grid | None:
    return Grid(part.CB.to("cpu", torch.int16), (part.SCB[:, None] / 127).to("cpu", torch.float32))


def _from_codebook(part: Format) -> Grid | None:
    """A table whose entries are multiples, up to 127, of one number: those of 4-bit floats, or of IQ4_NL."""
    rows = part.rows()
    table = rows.table.to("cpu", torch.float64)
    if table.dim() != 1 or rows.scale is None:
        return None
    unit = table / table.abs().max()
    for steps in range(1, 128):
        multiples = (unit * steps).round()
        if torch.allclose(multiples, unit * steps, rtol=0, atol=1e-5):
            codes = multiples.to(torch.int16)[unpack_codebook(rows).to("cpu", torch.long)]
            return Grid(codes, rows.scale.to("cpu", torch.float32) * (table.abs().max() / steps).float())
    return None


def _from_sparse(part: Format) -> Grid | None:
    plain = part.expanded()
    reader = _READERS.get(plain.name)
    return None if reader is None else reader(plain)


_READERS: dict[str, Callable[[Any], Grid | None]] = {
    "int_group": _from_int_group,
    "eight_bit": _from_eight_bit,
    "bnb_int8": _from_bnb_int8,
    "codebook": _from_codebook,
    "bitmap": _from_sparse,
    "sparse24": _from_sparse,
}
