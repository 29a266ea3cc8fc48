"""The `panels` layout of a codebook: that of `kernels.int_matmul.panels`, with a table."""

import torch
from torch import Tensor

from kernels import native
from kernels.int_matmul.layout import pack_bits
from kernels.int_matmul.panels import DTYPES, ROWS, WORD, by_group, from_words, nibbles_of, to_words
from kernels.lut_matmul.layout import Codebook, pack_codebook, unpack_codebook


def panels_fit(w: Codebook, dtype: torch.dtype, device: torch.device) -> bool:
    """Can the C++ kernel take this weight, with activations of this dtype, here? One table for the whole weight
    only."""
    return (
        device.type == "cpu"
        and w.table.dim() == 1
        and w.bits <= 4
        and w.group_size % WORD == 0
        and dtype in DTYPES
        and (w.scale is None or w.scale.dtype in DTYPES)
        and native.why_not() is None
        and native.isa(dtype) != "portable"  # torch's own kernels are the faster ones then
    )


def to_panels(w: Codebook) -> Codebook:
    """`rows` -> `panels`: codes int32 [out/16, in/8, 16]; table float32 [16]; scale [groups, out], ones where there was
    none.

    Bit for bit the same weight; a table of fewer entries is repeated, and `out` rounded up to 16.
    """
    scale = torch.ones(w.shape[0], w.shape[1] // w.group_size, device=w.codes.device) if w.scale is None else w.scale
    table = w.table.float().repeat(16 // w.table.numel())
    return w._replace(layout="panels", codes=to_words(unpack_codebook(w)), table=table, scale=by_group(scale))


def to_rows(w: Codebook) -> Codebook:
    """`panels` -> `rows`: the inverse of `to_panels`, with the table in float32 and scales of one where there were
    none."""
    table, codes = w.table[: 1 << w.bits], from_words(w.codes, w.shape[0])
    return pack_codebook(codes, table, w.scale[:, : w.shape[0]].t().contiguous(), group_size=w.group_size)


def take_rows(w: Codebook, ids: Tensor) -> Codebook:
    """These rows [n] of `panels` as `rows`."""
    codes = nibbles_of(w.codes[ids // ROWS, :, ids % ROWS])  # [n, in]
    scale = w.scale[:, ids].t().contiguous()
    table, shape = w.table[: 1 << w.bits], (len(ids), w.shape[1])
    return Codebook("rows", pack_bits(codes, w.bits), table, scale, w.bits, w.group_size, shape)


def matmul(x: Tensor, w: Codebook) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype, on a CPU."""
    return torch.ops.workbench.nibble_matmul(x, w.codes, w.scale, w.table, None, w.shape[0], "auto")
