"""The layouts of a 2:4 sparse weight: `rows`, the canonical one, and those that the GPU libraries read."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
ROWS, COLUMNS = 32, 64  # a library's weight is padded to these: CUTLASS requires it, and cuSPARSELt accepts it


class Sparse24(NamedTuple):
    """A weight with at most two nonzero values in every group of four neighbours in a row.

    layout "rows":       values [out, in/2], the two kept weights of each four in order; places uint8 [out, ceil(in/8)],
                         their places within the four, two bits each, low bits first: a byte describes two fours.
    layout "cusparselt": values is the result of `torch._cslt_compress`, places None; 16 bits.
    layout "cutlass":    values [out, in/2] and places int16 [out, in/16] in the order of CUTLASS; 16 bits.
    The last two are padded with zeros to whole tiles of 32 x 64.
    """

    layout: str
    values: Tensor
    places: Tensor | None
    shape: tuple[int, int]  # (out, in)


def compress24(W: Tensor) -> Sparse24:
    """Store a 2:4 sparse weight exactly, without its zeros.

    Args:
        W: [out, in], any dtype; `in` a multiple of 4.

    Raises:
        ValueError: W is not a matrix, `in` is not a multiple of 4, or W is not 2:4 sparse.
    """
    if W.dim() != 2 or W.shape[1] % 4:
        raise ValueError(
            f"`W` {tuple(W.shape)} must be [out, in] with in a multiple of 4; pad it with columns of zeros"
        )
    out, columns = W.shape
    fours = W.reshape(out, -1, 4)
    zero = fours == 0  # [out, in/4, 4]
    full = int((zero.sum(-1) < 2).sum())
    if full:
        raise ValueError(
            f"`W` has more than two nonzeros in {full} of its {out * columns // 4} fours; prune it to 2:4 first"
        )
    first = zero.to(torch.uint8).argsort(dim=-1, stable=True)[..., :2]  # nonzeros come first, then zeros, in order
    place = first.sort(-1).values  # [out, in/4, 2]
    values = fours.gather(-1, place).view(out, -1)
    nibble = (place[..., 0] | place[..., 1] << 2).to(torch.uint8)  # [out, in/4]
    pairs = F.pad(nibble, (0, nibble.shape[1] % 2)).view(out, -1, 2)
    return Sparse24("rows", values, pairs[..., 0] | pairs[..., 1] << 4, (out, columns))


def decompress24(w: Sparse24) -> Tensor:
    """W [out, in] in its own dtype, exactly, from any layout."""
    out, columns = w.shape
    if w.layout == "cusparselt":  # only the library knows its order: multiply by one
        eye = torch.eye(-(-columns // COLUMNS) * COLUMNS, dtype=w.values.dtype, device=w.values.device)
        return torch._cslt_sparse_mm(w.values, eye)[:out, :columns].contiguous()
    if w.layout == "cutlass":
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

        return sparse_semi_structured_to_dense_cutlass(w.values, w.places)[:out, :columns].contiguous()
    nibble = torch.stack([w.places & 15, w.places >> 4], -1).view(out, -1)[:, : columns // 4]
    place = torch.stack([nibble & 3, nibble >> 2], -1).long()  # [out, in/4, 2]
    fours = w.values.new_zeros(out, columns // 4, 4)
    return fours.scatter_(-1, place, w.values.view(out, -1, 2)).view(out, columns)


def library(device: torch.device) -> str | None:
    """The library by which torch multiplies 2:4 sparse weights on this device: "cusparselt", "cutlass" or None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    if major >= 8 and torch.backends.cusparselt.is_available():
        return "cusparselt"
    return "cutlass" if major == 8 else None  # torch compiles its CUTLASS kernels for sm_8x only


def to_library(w: Sparse24, layout: str | None = None) -> Sparse24:
    """`rows` -> the layout of the library that runs on w's device.

    Args:
        layout: "cusparselt" or "cutlass" instead (CUTLASS's can be made anywhere).

    Raises:
        ValueError: weights that are not 16-bit, or a device without such a library.
    """
    layout = layout or library(w.values.device)
    if layout is None:
        raise ValueError(
            f"no library multiplies 2:4 sparse weights on {w.values.device}: a GPU of sm_80 or later has one"
        )
    if w.values.dtype not in SIXTEEN_BIT:
        raise ValueError(f"`w` ({w.values.dtype}) must be bfloat16 or float16 for {layout}")
    W = F.pad(decompress24(w), (0, -w.shape[1] % COLUMNS, 0, -w.shape[0] % ROWS))
    if layout == "cusparselt":
        return Sparse24(layout, torch._cslt_compress(W), None, w.shape)
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    return Sparse24(layout, *sparse_semi_structured_from_dense_cutlass(W), w.shape)


def to_rows(w: Sparse24) -> Sparse24:
    """Any layout -> `rows`, exactly."""
    return w if w.layout == "rows" else compress24(decompress24(w))
