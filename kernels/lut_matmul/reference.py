"""Look up, scale and multiply, in plain torch on any device: the reference for every other implementation."""

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.lut_matmul import panels
from kernels.lut_matmul.layout import Codebook, unpack_codebook


def dequantize(w: Codebook, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [out, in] = table[code] * scale, computed in float32 and rounded once to `dtype`."""
    w = panels.to_rows(w) if w.layout == "panels" else w
    codes, table = unpack_codebook(w).long(), w.table.float()
    W = table[codes] if table.dim() == 1 else table.gather(1, codes)  # [out, in]
    if w.scale is not None:
        W = (W.view(w.shape[0], -1, w.group_size) * w.scale.float()[..., None]).view(w.shape)
    return W.to(dtype)


def look_up(w: Codebook, ids: Tensor) -> Tensor:
    """Rows `ids` [n] of W, [n, in] in float32, equal to those of `dequantize`; the other rows are not unpacked."""
    if w.layout == "panels":
        return dequantize(panels.take_rows(w, ids))
    table = w.table if w.table.dim() == 1 else w.table[ids]
    scale = None if w.scale is None else w.scale[ids]
    return dequantize(w._replace(codes=w.codes[ids], table=table, scale=scale, shape=(len(ids), w.shape[1])))


def lut_matmul(x: Tensor, w: Codebook) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype."""
    return linear(x, dequantize(w, x.dtype))
