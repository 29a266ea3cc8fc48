"""The `panels` layout of the C++ kernels: 16 rows of W per panel, in units of eight or sixteen columns."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import Packed, pack, unpack

ROWS = 16  # rows of W in a panel, one per vector lane
WORD = 8  # columns in a 32-bit word of nibbles, and in a unit of bytes
UNIT = 16  # columns in a unit of planes
PLANES = {2: (8,), 3: (8, 4), 5: (8, 8, 4), 6: (8, 8, 8)}  # of each plane, the bits that four columns share
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIDDLE = 8  # of the nibbles: the kernel multiplies by nibble - 8
# For each of the four columns: the plane, the first bit there, the first bit of the code, the number of bits.
SHARES = {
    2: [[(0, 0, 0, 2)], [(0, 2, 0, 2)], [(0, 4, 0, 2)], [(0, 6, 0, 2)]],
    3: [[(0, 0, 0, 3)], [(0, 3, 0, 3)], [(0, 6, 1, 2), (1, 0, 0, 1)], [(1, 1, 0, 3)]],
    5: [[(0, 0, 0, 5)], [(1, 0, 0, 5)], [(0, 5, 0, 3), (2, 0, 3, 2)], [(1, 5, 0, 3), (2, 2, 3, 2)]],
    6: [[(0, 0, 0, 6)], [(1, 0, 0, 6)], [(2, 0, 0, 6)], [(0, 6, 0, 2), (1, 6, 2, 2), (2, 6, 4, 2)]],
}
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
    """[out, in] of 0 .. 2^bits - 1 -> uint8 [panels, in/16, 32 * bits]: the planes of each unit of 16 columns.

    A plane of bytes has a word of 32 bits for each of the 16 rows, and four columns share each byte of it. A plane of
    half bytes has 8 words: the lower half of every byte belongs to rows 0 to 7, the upper half to rows 8 to 15.
    """
    out, columns = codes.shape
    panels = -(-out // ROWS)
    padded = torch.zeros(panels * ROWS, columns, dtype=torch.uint8, device=codes.device)
    padded[:out] = codes
    units = padded.view(panels, ROWS, columns // UNIT, UNIT).transpose(1, 2)  # [panels, in/16, 16, 16]
    planes = []
    for plane, width in enumerate(PLANES[bits]):
        words = torch.zeros(units.shape[:3], dtype=torch.int32, device=codes.device)
        for column, shift, below, count in _parts(bits, plane):
            part = (units[..., column] >> below) & ((1 << count) - 1)
            words |= part.to(torch.int32) << shift
        if width == 4:
            words = words[..., : ROWS // 2] | words[..., ROWS // 2 :] << 4
        planes.append(words.contiguous().view(torch.uint8))
    return torch.cat(planes, -1)


def from_planes(units: Tensor, bits: int, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of the result of `to_planes`: uint8 [n, in]."""
    codes = torch.zeros(len(ids), units.shape[1], UNIT, dtype=torch.uint8, device=units.device)
    panel, row, at = ids // ROWS, ids % ROWS, 0
    for plane, width in enumerate(PLANES[bits]):
        words = units[..., at : at + 8 * width].contiguous().view(torch.int32)
        mine = words[panel, :, row % (2 * width)]  # [n, in/16]
        if width == 4:
            mine = mine >> (row // 8 * 4)[:, None]
        for column, shift, below, count in _parts(bits, plane):
            codes[..., column] |= ((mine >> shift) & ((1 << count) - 1)).to(torch.uint8) << below
        at += 8 * width
    return codes.flatten(1)


def _parts(bits: int, plane: int) -> list[tuple[int, int, int, int]]:
    """(column, shift, below, count): `count` bits of a column's code, those from bit `below` on, lie in a row's word of
    this plane from bit `shift` on."""
    parts = []
    for column in range(UNIT):
        i, odd = column // 2, column % 2
        at = 16 * odd + i // 4 * 8
        parts += [(column, at + bit, below, count) for of, bit, below, count in SHARES[bits][i % 4] if of == plane]
    return parts


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
