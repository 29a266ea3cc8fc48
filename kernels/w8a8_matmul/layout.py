"""Weights and activations in 8 bits: their quantisation, and the layouts of a weight in memory."""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kernels import native
from kernels.w8a8_matmul.panels import from_panels, to_panels

BLOCK = 128  # number of rows and columns that share a scale in a block-wise weight, and of columns in its activations
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LARGEST_OF_FOUR_BITS = 7.0
SMALLEST = 2.0**-100  # a row whose largest magnitude is smaller is quantised as if it were this
MOST_COLUMNS = {torch.int8: 1 << 17, torch.float8_e4m3fn: 1 << 30}  # 2^17 products of at most 2^14 are below 2^31 ...


class W8(NamedTuple):
    """A weight in 8 bits: w = scale * code.

    layout "rows":      codes int8 or float8_e4m3fn [out, in], contiguous; scale float32 [out], or
                        [ceil(out/128), ceil(in/128)] for one scale per block.
    layout "panels":    codes + 128, viewed as int8, in panels of 32 rows, see panels.py; scale float32 [out].
    layout "prepacked": codes int8 in the blocks that oneDNN reads; scale float32 [out]. The codes are opaque: such a
                        tensor cannot be saved, copied or moved.
    """

    layout: str
    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]  # (out, in)


def quantize_rows(
    x: Tensor, dtype: torch.dtype, *, scale: Tensor | None = None, block: int | None = None, bits: int = 8
) -> tuple[Tensor, Tensor]:
    """Quantise activations symmetrically, token by token.

    The step is max|x| / 127 for int8 and max|x| / 448 for float8_e4m3fn, a float32; codes are x * (127 or 448) /
    max|x|, rounded to nearest even in float32. The codes of a row of zeros are zeros. If a row contains a NaN or an
    infinity, its scale is NaN, so that its products are NaN too; its codes are undefined.

    Args:
        x: [..., in], float32, bfloat16 or float16.
        dtype: torch.int8 or torch.float8_e4m3fn.
        scale: one positive float32 step for all of x (static), or one for each block of columns [ceil(in / block)];
            values beyond the largest code are clamped to it.
        block: number of columns that share a step, or None for the whole row.
        bits: 8, or 4 for int8 codes of -7 to 7, whose step is max|x| / 7.

    Returns:
        codes [..., in] and scale float32 [..., 1], or [..., ceil(in / block)].

    Raises:
        ValueError: another `dtype` or number of `bits`.
    """
    if dtype not in LARGEST:
        raise ValueError(f"`dtype` (={dtype}) must be torch.int8 or torch.float8_e4m3fn")
    if bits != 8 and (bits, dtype) != (4, torch.int8):
        raise ValueError(f"`bits` (={bits}) must be 8, or 4 with torch.int8, not with {dtype}")
    largest = LARGEST[dtype] if bits == 8 else LARGEST_OF_FOUR_BITS
    columns = x.shape[-1]
    width = block or columns
    v = F.pad(x.float(), (0, -columns % width)).unflatten(-1, (-1, width))  # [..., groups, width]
    top = v.abs().amax(-1, keepdim=True)
    step, inverse = _step(top, largest, None if scale is None else scale.reshape(-1, 1))
    codes = encode(v * inverse, dtype, largest).flatten(-2)[..., :columns]
    return codes.contiguous(), torch.where(top.isfinite(), step, torch.nan).squeeze(-1)


def quantize_weight(W: Tensor, dtype: torch.dtype, block: int | None = None) -> W8:
    """Round a weight to nearest: one scale per output channel, or per 128 x 128 block.

    Args:
        W: [out, in], any floating dtype.
        dtype: torch.int8 (codes -127 to 127) or torch.float8_e4m3fn.
        block: None or 128.

    Raises:
        ValueError: a `dtype` or `block` that cannot be stored, or a W that is not a finite matrix.
    """
    if block not in (None, BLOCK):
        raise ValueError(f"`block` (={block}) must be None (a scale per output channel) or {BLOCK}")
    if W.dim() != 2 or not W.isfinite().all():
        raise ValueError(f"`W` {tuple(W.shape)} must be a matrix of finite numbers")
    if block is None:
        codes, scale = quantize_rows(W, dtype)
        return W8("rows", codes, scale.squeeze(-1), tuple(W.shape))
    if dtype not in LARGEST:
        raise ValueError(f"`dtype` (={dtype}) must be torch.int8 or torch.float8_e4m3fn")
    out, columns = W.shape
    padded = F.pad(W.float(), (0, -columns % BLOCK, 0, -out % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [out/128, 128, in/128, 128]
    step, inverse = _step(tiles.abs().amax((1, 3), keepdim=True), LARGEST[dtype], None)
    codes = encode(tiles * inverse, dtype).flatten(2).flatten(0, 1)
    return W8("rows", codes[:out, :columns].contiguous(), step[:, 0, :, 0].contiguous(), (out, columns))


def encode(v: Tensor, dtype: torch.dtype, largest: float | None = None) -> Tensor:
    """float32, in units of the step -> codes: to nearest even, and never beyond the largest code (None: the type's)."""
    largest = largest or LARGEST[dtype]
    v = v.clamp(-largest, largest)
    return v.round().to(dtype) if dtype == torch.int8 else v.to(dtype)


def to_prepacked(w: W8, layout: str | None = None) -> W8:
    """`rows` -> the layout with the fastest product on this CPU, for int8 with a scale per output channel; inverse:
    `to_rows`.

    Args:
        w: [out, in], in "rows".
        layout: None, or the layout to use: "panels" (for the C++ op), or "prepacked" (for oneDNN, if there is no C++
            compiler; only with VNNI).

    Raises:
        ValueError: a weight without a fast int8 product on this machine, or an unknown `layout`.
    """
    if layout not in (None, "panels", "prepacked"):
        raise ValueError(f"`layout` (={layout!r}) must be None, 'panels' or 'prepacked'")
    if not prepacked_fits(w):
        kind = f"{w.codes.dtype} with scale {tuple(w.scale.shape)} on {w.codes.device}"
        needs = "int8 rows with a scale per output channel, on a CPU with VNNI or NEON's dot products"
        raise ValueError(f"`w` must be {needs}, not {kind}")
    layout = layout or ("panels" if in_one_call() else "prepacked")
    if layout == "prepacked" and not has_vnni():
        raise ValueError("`layout` (='prepacked') is oneDNN's, on a CPU with VNNI; here 'panels' works")
    codes = to_panels(w.codes) if layout == "panels" else torch.ops.onednn.qlinear_prepack(w.codes, None)
    return w._replace(layout=layout, codes=codes)


def to_rows(w: W8) -> W8:
    """`panels` or `prepacked` -> `rows`, exactly."""
    if w.layout == "panels":
        return w._replace(layout="rows", codes=from_panels(w.codes, w.shape))
    return w._replace(layout="rows", codes=w.codes.to_dense().t().contiguous()) if w.layout == "prepacked" else w


def prepacked_fits(w: W8) -> bool:
    """Does `to_prepacked` support this weight on this machine?"""
    fits = w.layout == "rows" and w.codes.dtype == torch.int8 and w.scale.dim() == 1
    return fits and w.codes.numel() > 0 and integer_dots(w.codes)


def integer_dots(codes: Tensor) -> bool:
    """Are there exact int8 dot products on this tensor's device: a CPU with AVX512-VNNI, or NEON's and the C++ op?"""
    return codes.device.type == "cpu" and (has_vnni() or native.integers() != "")


@torch.compiler.assume_constant_result
def has_vnni() -> bool:
    """Does oneDNN use VNNI here? torch says whether the processor has it, `int_mm_is_exact` whether oneDNN may."""
    supported = bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())
    return torch.backends.mkldnn.is_available() and supported and int_mm_is_exact()


@torch.compiler.assume_constant_result
def int_mm_is_exact() -> bool:
    """Are torch's int8 products exact in this process?

    Without VNNI, oneDNN adds pairs of products in 16 bits, which saturates. The processor may have VNNI and oneDNN not
    use it (ONEDNN_MAX_CPU_ISA), so that the largest product is tried.
    """
    return _int_mm_is_exact()


@cache
def _int_mm_is_exact() -> bool:
    with unset_fake_temporarily():  # also called while a compiler traces
        x, w = (torch.full((rows, 64), 127, dtype=torch.int8) for rows in (16, 32))
        return bool((torch._int_mm(x, w.t()) == 64 * 127 * 127).all())


@torch.compiler.assume_constant_result
def in_one_call() -> bool:
    """Is there the C++ op that quantises, multiplies by a weight in panels, and scales?"""
    return native.why_not() is None


def _step(top: Tensor, largest: float, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The step and its inverse for the largest magnitude, each from one exact division; torch does not divide exactly
    if one operand is a Python number."""
    if scale is not None:
        return scale, torch.div(scale.new_ones(()), scale)
    bound, top = top.new_full((), largest), top.clamp_min(SMALLEST)
    return torch.div(top, bound), torch.div(bound, top)
