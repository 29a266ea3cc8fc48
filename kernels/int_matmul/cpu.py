"""CPU paths over the `tiles` layout: torch's int4 kernel for few tokens, dequantise and oneDNN for many."""

import torch
from torch import Tensor

from kernels.int_matmul.layout import Packed, nibble_of_row, tile_height
from kernels.int_matmul.reference import dequantize

CROSSOVER = 80  # tokens from which dequantising once pays; measured, see README.md
SLAB = 1 << 20  # weights dequantised at a time, so that they are still in cache when they are multiplied


def small(x: Tensor, codes: Tensor, scale: Tensor, group_size: int, shape: tuple[int, int]) -> Tensor:
    """torch's `_weight_int4pack_mm_for_cpu`. It has a fake implementation of its own, so it compiles as it is."""
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.reshape(-1, shape[1]).contiguous(), codes, group_size, scale)
    return y.view(*x.shape[:-1], shape[0])


def large(x: Tensor, w: Packed) -> Tensor:
    """Dequantise slab by slab of output rows into x's dtype and multiply: y [tokens, out]."""
    out, columns = w.shape
    height = tile_height()
    rows = max(height, SLAB // columns // height * height)
    full = out // height * height
    y = x.new_empty(x.shape[0], out)
    for start in range(0, full, rows):
        end = min(start + rows, full)
        torch.mm(x, _transposed_slab(w, start, end, x.dtype), out=y[:, start:end])
    if full < out:
        rest = w._replace(codes=w.codes[full:], scale=w.scale[:, full:], shape=(out - full, columns))
        y[:, full:] = x @ dequantize(rest, x.dtype).t()
    return y


def _transposed_slab(w: Packed, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Wᵀ [in, end - start] of whole tiles; both bounds are multiples of the tile height."""
    columns, height = w.shape[1], tile_height()
    nibbles = w.codes[start:end].view(-1, columns, height // 2)  # [tiles, in, height/2]
    both = torch.cat([nibbles & 15, nibbles >> 4], -1)  # [tiles, in, height]
    order = nibble_of_row(height)
    if order is not None:
        both = both[..., order]
    centred = (both.view(torch.int8) - 8).permute(1, 0, 2).to(dtype, memory_format=torch.contiguous_format)
    weights = centred.view(-1, w.group_size, end - start)  # [groups, group_size, rows]
    scale, offset = w.scale[:, None, start:end].unbind(-1)  # [groups, 1, rows] each
    weights.mul_(scale.contiguous())
    if w.bits == 4 and w.zero is not None:
        weights.add_(offset.contiguous())
    return weights.view(columns, end - start)
