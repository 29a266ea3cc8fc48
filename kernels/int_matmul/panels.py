"""The `panels` layout of the C++ kernels: 16 rows of W per panel, four bits per weight, or a byte beyond 4 bits."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import Packed, pack, unpack

ROWS = 16  # of W in a panel, one to a vector lane
WORD = 8  # columns in a 32-bit word
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIDDLE = 8  # of the nibbles: the kernel multiplies by nibble - 8
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of a word's eight columns, see `to_words`
EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # order of eight columns of bytes, that in which the kernel takes activations


def panels_fit(w: Packed, dtype: torch.dtype, device: torch.device) -> bool:
    """Can the C++ kernel take this weight, with activations of this dtype, here?"""
    return (
        device.type == "cpu"
        and w.group_size % WORD == 0
        and dtype in DTYPES
        and w.scale.dtype in DTYPES
        and native.why_not() is None
        and native.isa(dtype) != "portable"  # torch's own kernels are the faster ones then
    )


def to_panels(w: Packed) -> Packed:
    """`rows` -> `panels`, exactly; codes of 2 and 3 bits take the place of 4 there, those of 5 and 6 a byte."""
    codes, zero = unpack(w)
    lift = MIDDLE - (1 << (w.bits - 1))  # keeps the middle code in the middle
    centred = None if w.zero is None else (zero.to(torch.int16) - (1 << (w.bits - 1))).to(torch.int8)
    return w._replace(
        layout="panels",
        codes=to_words(codes + lift) if w.bits <= 4 else to_bytes(codes, 1 << (w.bits - 1)),
        scale=by_group(w.scale),
        zero=None if centred is None else by_group(centred),
    )


def to_rows(w: Packed) -> Packed:
    """`panels` -> `rows`, exactly: the inverse of `to_panels`."""
    out = w.shape[0]
    middle = 1 << (w.bits - 1)
    if w.bits <= 4:
        codes = from_words(w.codes, out) - (MIDDLE - middle)
    else:
        codes = from_bytes(w.codes.view(len(w.codes), -1, WORD, ROWS).permute(0, 3, 1, 2), middle).flatten(0, 1)[:out]
    zero = None if w.zero is None else w.zero[:, :out].t().to(torch.int16) + middle
    return pack(codes, w.scale[:, :out].t().contiguous(), zero, bits=w.bits, group_size=w.group_size)


def take_rows(w: Packed, ids: Tensor) -> Packed:
    """These rows [n] of `panels` as `rows`."""
    middle = 1 << (w.bits - 1)
    if w.bits <= 4:
        codes = nibbles_of(w.codes[ids // ROWS, :, ids % ROWS]) - (MIDDLE - middle)
    else:
        eights = w.codes.view(len(w.codes), -1, WORD, ROWS)
        codes = from_bytes(eights[ids // ROWS, :, :, ids % ROWS], middle)  # of [n, in/8, 8]
    zero = None if w.zero is None else w.zero[:, ids].t().to(torch.int16) + middle
    return pack(codes, w.scale[:, ids].t().contiguous(), zero, bits=w.bits, group_size=w.group_size)


def to_words(nibbles: Tensor) -> Tensor:
    """[out, in] of 0..15 -> int32 [panels, in/8, 16].

    Bits 4i of the low half of a word hold column 2i of its eight, those of the high half column 2i + 1: a shift by 4i
    leaves the pair (2i, 2i + 1), which is what a 16-bit dot product takes. Rows beyond `out` hold the middle.
    """
    out, columns = nibbles.shape
    panels = -(-out // ROWS)
    padded = torch.full((panels * ROWS, columns), MIDDLE, dtype=torch.uint8, device=nibbles.device)
    padded[:out] = nibbles
    eights = padded.view(panels, ROWS, columns // WORD, WORD)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=nibbles.device)  # [panels, 16, in/8]
    for column, shift in enumerate(SHIFTS):  # one at a time: all at once would take sixteen bytes a weight
        words |= eights[..., column].to(torch.int32) << shift
    return words.transpose(1, 2).contiguous()


def from_words(words: Tensor, out: int) -> Tensor:
    """Inverse of `to_words`: uint8 [out, in]."""
    return nibbles_of(words.transpose(1, 2).flatten(0, 1))[:out]


def nibbles_of(words: Tensor) -> Tensor:
    """int32 [rows, in/8] -> uint8 [rows, in]."""
    nibbles = torch.stack([((words >> shift) & 15).to(torch.uint8) for shift in SHIFTS], -1)
    return nibbles.flatten(1)


def to_bytes(codes: Tensor, middle: int) -> Tensor:
    """[out, in] of 0..255 -> int8 [panels, in/8, 8 * 16]: code - middle, of eight columns the even ones first, each
    with its 16 rows. Rows beyond `out` hold 0."""
    out, columns = codes.shape
    panels = -(-out // ROWS)
    centred = torch.zeros(panels * ROWS, columns, dtype=torch.int8, device=codes.device)
    centred[:out] = (codes ^ 128).view(torch.int8) if middle == 128 else codes.view(torch.int8) - middle
    eights = centred.view(panels, ROWS, columns // WORD, WORD)[..., list(EVEN_FIRST)]
    return eights.permute(0, 2, 3, 1).reshape(panels, columns // WORD, WORD * ROWS)


def from_bytes(eights: Tensor, middle: int) -> Tensor:
    """Inverse of `to_bytes`, of int8 [..., in/8, 8]: uint8 [..., in]."""
    natural = eights[..., [EVEN_FIRST.index(column) for column in range(WORD)]]
    codes = natural.contiguous().view(torch.uint8)
    return (codes ^ 128 if middle == 128 else codes + middle).flatten(-2)


def by_group(values: Tensor) -> Tensor:
    """[out, groups] -> [groups, 16 panels], zeros beyond `out`."""
    out, groups = values.shape
    padded = values.new_zeros(groups, -(-out // ROWS) * ROWS)
    padded[:, :out] = values.t()
    return padded


def matmul(x: Tensor, w: Packed, isa: str = "auto") -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, on a CPU."""
    if w.codes.dtype == torch.int8:
        return torch.ops.workbench.byte_matmul(x, w.codes, w.scale, w.zero, w.shape[0], isa)
    return torch.ops.workbench.nibble_matmul(x, w.codes, w.scale, None, w.zero, w.shape[0], isa)
