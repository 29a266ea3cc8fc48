"""The `panels` layout of a codebook: the layout of `kernels.int_matmul.panels`, with a table."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import pack_bits
from kernels.int_matmul.panels import (
    DTYPES,
    WORD,
    by_panel,
    from_planes,
    from_words,
    in_planes,
    rows_of,
    to_planes,
    to_words,
)
from kernels.lut_matmul.layout import Codebook, unpack_codebook


def panels_fit(w: Codebook, dtype: torch.dtype, device: torch.device) -> bool:
    """Does the C++ kernel support this weight on this machine, with activations of this dtype? The whole weight must
    have one table."""
    return (
        device.type == "cpu"
        and w.table.dim() == 1
        and (in_planes(w.bits, w.group_size) or (w.bits <= 4 and w.group_size % WORD == 0))
        and dtype in DTYPES
        and (w.scale is None or w.scale.dtype in DTYPES)
        and native.why_not() is None
        and native.isa(dtype) != "portable"  # torch's own kernels are faster then
    )


def to_panels(w: Codebook) -> Codebook:
    """`rows` -> `panels`: codes as for integers; table float32; scale [panels, groups, 16], ones if there was none.

    The weight is bit for bit the same. If codes of 2 and 3 bits are stored in 4 bits, the table is repeated; `out` is
    rounded up to 16.
    """
    scale = torch.ones(w.shape[0], w.shape[1] // w.group_size, device=w.codes.device) if w.scale is None else w.scale
    codes, table = unpack_codebook(w), w.table.float()
    if in_planes(w.bits, w.group_size):
        return w._replace(layout="panels", codes=to_planes(codes, w.bits), table=table, scale=by_panel(scale))
    table = table.repeat(16 // table.numel())
    return w._replace(layout="panels", codes=to_words(codes), table=table, scale=by_panel(scale))


def to_rows(w: Codebook) -> Codebook:
    """`panels` -> `rows`: the inverse of `to_panels`, with the table in float32 and scales of one if there were
    none."""
    return take_rows(w, torch.arange(w.shape[0], device=w.codes.device))


def take_rows(w: Codebook, ids: Tensor) -> Codebook:
    """Rows `ids` [n] of `panels`, as `rows`."""
    planes = w.codes.dtype == torch.uint8
    codes = from_planes(w.codes, w.bits, ids) if planes else from_words(w.codes, ids)  # [n, in]
    scale = rows_of(w.scale, ids)
    table, shape = w.table[: 1 << w.bits], (len(ids), w.shape[1])
    return Codebook("rows", pack_bits(codes, w.bits), table, scale, w.bits, w.group_size, shape)


def matmul(x: Tensor, w: Codebook) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, on a CPU."""
    return torch.ops.workbench.panels_matmul(x, w.codes, w.scale, w.table, None, w.shape[0], "auto")
