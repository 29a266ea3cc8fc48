"""The `panels` layout of the C++ kernels: 16 rows of W per panel, in units of eight or sixteen columns."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import Packed, pack, unpack

ROWS = 16  # rows of W in a panel, one per vector lane
WORD = 8  # columns in a 32-bit word of nibbles, and in a unit of bytes
UNIT = 16  # columns in a unit of planes
PLANES = {2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2)}  # number of bits of a code in each plane, lowest bits first
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIDDLE = 8  # of the nibbles: the kernel multiplies by nibble - 8
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of a word's eight columns, see `to_words`
EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # order of eight columns of bytes; the kernel reads activations in this order


def panels_fit(w: Packed, dtype: torch.dtype, device: torch.device) -> bool:
    """Does the C++ kernel support this weight on this machine, with activations of this dtype?"""
    return (
        device.type == "cpu"
        and w.group_size % WORD == 0
        and dtype in DTYPES
        and w.scale.dtype in DTYPES
        and native.why_not() is None
        and native.isa(dtype) != "portable"  # torch's own kernels are faster then
    )


def to_panels(w: Packed) -> Packed:
    """`rows` -> `panels`, exactly. If a group is not a multiple of 16 columns, codes of 2 and 3 bits are stored in 4
    bits, codes of 5 and 6 bits in a byte."""
    codes, zero = unpack(w)
    middle = 1 << (w.bits - 1)
    if in_planes(w.bits, w.group_size):
        stored = to_planes(codes, w.bits)
    else:  # wider codes keep the middle code in the middle
        stored = to_words(codes + (MIDDLE - middle)) if w.bits <= 4 else to_bytes(codes, middle)
    centred = None if w.zero is None else (zero.to(torch.int16) - middle).to(torch.int8)
    return w._replace(
        layout="panels",
        codes=stored,
        scale=by_panel(w.scale),
        zero=None if centred is None else by_panel(centred),
    )


def to_rows(w: Packed) -> Packed:
    """`panels` -> `rows`, exactly: the inverse of `to_panels`."""
    return take_rows(w, torch.arange(w.shape[0], device=w.codes.device))


def take_rows(w: Packed, ids: Tensor) -> Packed:
    """Rows `ids` [n] of `panels`, as `rows`."""
    middle = 1 << (w.bits - 1)
    if w.codes.dtype == torch.uint8:
        codes = from_planes(w.codes, w.bits, ids)
    elif w.bits <= 4:
        codes = from_words(w.codes, ids) - (MIDDLE - middle)
    else:
        codes = from_bytes(w.codes, middle, ids)
    zero = None if w.zero is None else rows_of(w.zero, ids).to(torch.int16) + middle
    return pack(codes, rows_of(w.scale, ids), zero, bits=w.bits, group_size=w.group_size)


def in_planes(bits: int, group_size: int) -> bool:
    """Are codes of `bits` bits, in groups of `group_size` columns, stored as bit planes?"""
    return bits in PLANES and group_size % UNIT == 0


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """[out, in] of 0 .. 2^bits - 1 -> uint8 [panels, in/16, 32 * bits]: for each unit of 16 columns the low bits, then
    the high bits.

    A plane of four bits: as in `to_words`, 16 rows of the first eight columns, then of the other eight. Two bits: 32
    bits for each of 16 rows, even columns in the lower half. One bit: 16 bits for each of 16 rows, likewise.
    """
    out, columns = codes.shape
    panels = -(-out // ROWS)
    padded = torch.zeros(panels * ROWS, columns, dtype=torch.uint8, device=codes.device)
    padded[:out] = codes
    units = padded.view(panels, ROWS, columns // UNIT, UNIT)
    planes, below = [], 0
    for width in PLANES[bits]:
        words = _empty(width, panels, columns // UNIT, codes.device)
        for column, (word, shift) in enumerate(_places(width)):
            part = (units[..., column] >> below) & ((1 << width) - 1)  # [panels, 16, in/16]
            words[:, :, word] |= (part.to(words.dtype) << shift).transpose(1, 2)
        planes.append(words.view(torch.uint8).flatten(2))
        below += width
    return torch.cat(planes, -1)


def from_planes(units: Tensor, bits: int, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of the result of `to_planes`: uint8 [n, in]."""
    codes = torch.zeros(len(ids), units.shape[1], UNIT, dtype=torch.uint8, device=units.device)
    at = below = 0
    for width in PLANES[bits]:
        like = _empty(width, 0, 0, units.device)
        words = units[..., at : at + 32 * width].contiguous().view(like.dtype)
        words = words.view(*units.shape[:2], -1, ROWS)[ids // ROWS, :, :, ids % ROWS]  # [n, in/16, words]
        for column, (word, shift) in enumerate(_places(width)):
            part = (words[..., word] >> shift) & ((1 << width) - 1)
            codes[..., column] |= part.to(torch.uint8) << below
        at, below = at + 32 * width, below + width
    return codes.flatten(1)


def _empty(width: int, panels: int, units: int, device: torch.device) -> Tensor:
    """The words of a plane, [panels, units, words of a row, 16], all zero."""
    dtype = torch.int16 if width == 1 else torch.int32
    return torch.zeros(panels, units, 2 if width == 4 else 1, ROWS, dtype=dtype, device=device)


def _places(width: int) -> list[tuple[int, int]]:
    """(word, shift) for each of the sixteen columns of a unit."""
    if width == 4:
        return [(column // WORD, SHIFTS[column % WORD]) for column in range(UNIT)]
    half = 8 * width
    return [(0, column % 2 * half + column // 2 * width) for column in range(UNIT)]


def to_words(nibbles: Tensor) -> Tensor:
    """[out, in] of 0..15 -> int32 [panels, in/8, 16].

    Bit 4i of the low half of a word is the first bit of column 2i of its eight, in the high half of column 2i + 1: a
    shift by 4i leaves the pair (2i, 2i + 1), the operand of a 16-bit dot product. Rows beyond `out` hold the middle.
    """
    out, columns = nibbles.shape
    panels = -(-out // ROWS)
    padded = torch.full((panels * ROWS, columns), MIDDLE, dtype=torch.uint8, device=nibbles.device)
    padded[:out] = nibbles
    eights = padded.view(panels, ROWS, columns // WORD, WORD)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=nibbles.device)  # [panels, 16, in/8]
    for column, shift in enumerate(SHIFTS):  # one at a time: all at once would take sixteen bytes per weight
        words |= eights[..., column].to(torch.int32) << shift
    return words.transpose(1, 2).contiguous()


def from_words(words: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of the result of `to_words`: uint8 [n, in]."""
    mine = words[ids // ROWS, :, ids % ROWS]  # [n, in/8]
    return torch.stack([((mine >> shift) & 15).to(torch.uint8) for shift in SHIFTS], -1).flatten(1)


def to_bytes(codes: Tensor, middle: int) -> Tensor:
    """[out, in] of 0..255 -> int8 [panels, in/8, 8 * 16]: code - middle, the even ones of eight columns first, 16 rows
    for each column. Rows beyond `out` hold 0."""
    out, columns = codes.shape
    panels = -(-out // ROWS)
    centred = torch.zeros(panels * ROWS, columns, dtype=torch.int8, device=codes.device)
    centred[:out] = (codes ^ 128).view(torch.int8) if middle == 128 else codes.view(torch.int8) - middle
    eights = centred.view(panels, ROWS, columns // WORD, WORD)[..., list(EVEN_FIRST)]
    return eights.permute(0, 2, 3, 1).reshape(panels, columns // WORD, WORD * ROWS)


def from_bytes(stored: Tensor, middle: int, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of the result of `to_bytes`: uint8 [n, in]."""
    eights = stored.view(*stored.shape[:2], WORD, ROWS)[ids // ROWS, :, :, ids % ROWS]  # [n, in/8, 8]
    natural = eights[..., [EVEN_FIRST.index(column) for column in range(WORD)]]
    codes = natural.contiguous().view(torch.uint8)
    return (codes ^ 128 if middle == 128 else codes + middle).flatten(1)


def by_panel(values: Tensor) -> Tensor:
    """[out, groups] -> [panels, groups, 16], zeros beyond `out`: the order in which a product reads the values."""
    out, groups = values.shape
    panels = -(-out // ROWS)
    padded = values.new_zeros(panels * ROWS, groups)
    padded[:out] = values
    return padded.view(panels, ROWS, groups).transpose(1, 2).contiguous()


def rows_of(values: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of the result of `by_panel`: [n, groups]."""
    return values[ids // ROWS, :, ids % ROWS]


def matmul(x: Tensor, w: Packed, isa: str = "auto") -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, on a CPU."""
    return torch.ops.workbench.panels_matmul(x, w.codes, w.scale, None, w.zero, w.shape[0], isa)


@native.shapes_of("panels_matmul")
def _(x, codes, scale, table, zero, out, isa):
    return x.new_empty(*x.shape[:-1], out)
