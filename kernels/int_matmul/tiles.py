"""The `tiles` layout of torch's int4 CPU kernel, for machines where the C++ kernels cannot be built."""

from functools import cache

import torch
from torch import Tensor

from kernels.int_matmul.layout import Packed, pack_bits, unpack, unpack_bits

GROUP_SIZES = (32, 64, 128, 256)
CROSSOVER = 80  # number of tokens from which dequantising once is faster; measured, see seeds/log.md
SLAB = 1 << 20  # weights dequantised at a time, so that they are still in cache when they are multiplied


def tiles_fit(shape: tuple[int, int], bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Does torch's int4 CPU kernel support this weight with activations of this dtype?"""
    out, columns = shape
    return (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float16)
        and bits <= 4
        and group_size in GROUP_SIZES
        and columns % group_size == 0
        and out % 16 == 0
    )


def to_tiles(w: Packed, dtype: torch.dtype) -> Packed:
    """`rows` -> `tiles` for activations of `dtype`; codes of 2 and 3 bits are stored in 4 bits."""
    codes, zero = unpack(w)
    scale, shift = w.scale.float(), 8 - zero.float()
    if w.bits < 4:
        codes = codes.to(torch.int32) + shift.to(torch.int32).expand(scale.shape).repeat_interleave(w.group_size, 1)
    offset = shift * scale if w.bits == 4 else torch.zeros_like(scale)  # [out, groups]
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    pair = torch.stack([scale, offset], -1).transpose(0, 1).to(dtype).contiguous()  # [groups, out, 2]
    return Packed("tiles", tiles, pair, w.zero, w.bits, w.group_size, w.shape)


def to_rows(w: Packed) -> Packed:
    """`tiles` -> `rows`, exactly: the inverse of `to_tiles`; scales come back in the tiles' dtype."""
    nibbles = tile_nibbles(w)
    if w.bits < 4:
        groups = w.shape[1] // w.group_size
        zero = (
            1 << (w.bits - 1)
            if w.zero is None
            else unpack_bits(w.zero, w.bits, groups).repeat_interleave(w.group_size, 1)
        )
        nibbles = nibbles + zero - 8
    return Packed("rows", pack_bits(nibbles, w.bits), w.scale[..., 0].t().contiguous(), w.zero, *w[4:])


def dequantize(w: Packed) -> Tensor:
    """W [out, in] in float32, with the values that the kernel uses: at 4 bits with a zero point, the 16-bit offset is
    rounded."""
    out, columns = w.shape
    scale, offset = w.scale.float().permute(2, 1, 0)[..., None].contiguous()  # [out, groups, 1] each
    nibbles = tile_nibbles(w).view(out, -1, w.group_size).float()
    return torch.addcmul(offset, nibbles - 8, scale).view(out, columns)


def tile_nibbles(w: Packed) -> Tensor:
    """Nibbles uint8 [out, in] from the `tiles` layout."""
    assert w.layout == "tiles"
    out, columns = w.shape
    flat = w.codes.reshape(-1)
    full = tile_height()
    parts, start = [], 0
    for height, count in ((full, out // full), (out % full, 1)):
        if height == 0 or count == 0:
            continue
        nibbles = flat[start : start + count * height * columns // 2].view(count, columns, height // 2)
        start += count * height * columns // 2
        both = torch.cat([nibbles & 15, nibbles >> 4], -1)  # [count, in, height]
        order = nibble_of_row(height)
        rows = both if order is None else both[..., order]
        parts.append(rows.transpose(1, 2).reshape(-1, columns))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


@cache
def tile_height() -> int:
    """Rows per tile: 64 with AVX-512, 32 otherwise; found from the place of row 32 of a probe."""
    probe = torch.zeros(64, 2, dtype=torch.int32)
    probe[32, 0] = 1
    return 64 if torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1).reshape(-1)[:32].any() else 32


@cache
def nibble_of_row(height: int) -> Tensor | None:
    """[height]: the place of each row of a tile among its low nibbles, then its high ones (None: in order).

    It is read from probes, because torch's order differs between full and partial tiles, and by instruction set.
    """
    row = torch.arange(height, dtype=torch.int32)
    place = torch.zeros(height, dtype=torch.int64)
    for digit, shift in ((1, 0), (16, 4)):
        probe = ((row >> shift) & 15)[:, None].expand(height, 2).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1).reshape(-1)[: height // 2]
        place += digit * torch.cat([packed & 15, packed >> 4]).long()  # [position] -> row
    return None if torch.equal(place, torch.arange(height)) else place.argsort()


def small(x: Tensor, codes: Tensor, scale: Tensor, group_size: int, shape: tuple[int, int]) -> Tensor:
    """torch's `_weight_int4pack_mm_for_cpu`, which has its own fake implementation and so compiles as it is."""
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
        y[:, full:] = x @ dequantize(rest).to(x.dtype).t()
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
