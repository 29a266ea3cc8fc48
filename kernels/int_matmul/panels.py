"""The `panels` layout of the C++ kernel: four bits per weight, 16 rows of W per panel."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import Packed, pack, unpack

ROWS = 16  # of W in a panel, one to a vector lane
WORD = 8  # columns in a 32-bit word
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIDDLE = 8  # of the nibbles: the kernel multiplies by nibble - 8
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of a word's eight columns, see `to_words`


def panels_fit(w: Packed, dtype: torch.dtype, device: torch.device) -> bool:
    """Can the C++ kernel take this weight, with activations of this dtype, here?"""
    return (
        device.type == "cpu"
        and w.bits <= 4
        and w.group_size % WORD == 0
        and dtype in DTYPES
        and w.scale.dtype in DTYPES
        and native.why_not() is None
        and native.isa(dtype) != "portable"  # torch's own kernels are the faster ones then
    )


def to_panels(w: Packed) -> Packed:
    """`rows` -> `panels`, exactly; codes of 2 and 3 bits take the place of 4 there."""
    codes, zero = unpack(w)
    lift = MIDDLE - (1 << (w.bits - 1))  # keeps the middle code in the middle
    centred = None if w.zero is None else (zero.to(torch.int16) - (1 << (w.bits - 1))).to(torch.int8)
    return w._replace(
        layout="panels",
        codes=to_words(codes + lift),
        scale=by_group(w.scale),
        zero=None if centred is None else by_group(centred),
    )


def to_rows(w: Packed) -> Packed:
    """`panels` -> `rows`, exactly: the inverse of `to_panels`."""
    out = w.shape[0]
    middle = 1 << (w.bits - 1)
    codes = from_words(w.codes, out) - (MIDDLE - middle)
    zero = None if w.zero is None else w.zero[:, :out].t().to(torch.int16) + middle
    return pack(codes, w.scale[:, :out].t().contiguous(), zero, bits=w.bits, group_size=w.group_size)


def take_rows(w: Packed, ids: Tensor) -> Packed:
    """These rows [n] of `panels` as `rows`."""
    middle = 1 << (w.bits - 1)
    words = w.codes[ids // ROWS, :, ids % ROWS]  # [n, in/8]
    codes = nibbles_of(words) - (MIDDLE - middle)
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


def by_group(values: Tensor) -> Tensor:
    """[out, groups] -> [groups, 16 panels], zeros beyond `out`."""
    out, groups = values.shape
    padded = values.new_zeros(groups, -(-out // ROWS) * ROWS)
    padded[:, :out] = values.t()
    return padded


def matmul(x: Tensor, w: Packed, isa: str = "auto") -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, on a CPU."""
    return torch.ops.workbench.nibble_matmul(x, w.codes, w.scale, None, w.zero, w.shape[0], isa)
