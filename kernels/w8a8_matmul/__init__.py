"""`w8a8_matmul`: y = x Wᵀ with weights and activations in int8 or fp8. See README.md."""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described, too_old
from kernels.interpreter import triton_takes
from kernels.registry import ran
from kernels.w8a8_matmul import cpu, reference
from kernels.w8a8_matmul.layout import (
    BLOCK,
    LARGEST,
    MOST_COLUMNS,
    W8,
    has_vnni,
    in_one_call,
    int_mm_is_exact,
    integer_dots,
    prepacked_fits,
    quantize_rows,
    quantize_weight,
    to_prepacked,
    to_rows,
)
from kernels.w8a8_matmul.panels import panels_shape

__all__ = [
    "BLOCK",
    "W8",
    "prepacked_fits",
    "quantize_rows",
    "quantize_weight",
    "to_prepacked",
    "to_rows",
    "w8a8_matmul",
]

IMPLS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def w8a8_matmul(x: Tensor, w: W8, *, x_scale: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Product of activations, quantised in the call to the weight's 8-bit type, with a quantised weight.

    A token that contains a NaN or an infinity gives a row of NaN, for every type and scale.

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty. Quantised symmetrically, see
            `quantize_rows`: token by token, and for a block-wise w by token and 128 columns.
        w: [out, in], int8 or float8_e4m3fn (`W8`).
        x_scale: None (dynamic), or a positive float32 scalar: the step of all activations, which are clamped to its
            range.
        impl: "reference" (exact sums of products of codes; any layout, any device), "cpu" (int8 with a scale per output
            channel, on a CPU with VNNI or NEON's dot products; several times faster with `to_prepacked`), "triton"
            (layout "rows") or "auto": "triton" on CUDA, "cpu" if it supports the weight, else "reference".

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes or dtypes that do not match, or an implementation that does not exist or does not support
            these tensors.
    """
    _check(x, w, x_scale)
    use = _implementation(x, w, impl)
    if x.numel() == 0:
        use = "reference"
    x_scale = None if x_scale is None else x_scale.reshape(())
    if use == "cpu" and w.layout == "panels":
        ran("w8a8_matmul", f"cpu {native.integers(x.numel() > native.FEW * w.shape[1])}")
        return torch.ops.workbench.int8_matmul(x, w.codes, w.scale, x_scale)
    ran("w8a8_matmul", {"cpu": "cpu prepacked" if w.layout == "prepacked" else "cpu int_mm"}.get(use, use))
    float8 = w.codes.dtype == torch.float8_e4m3fn
    codes = w.codes.view(torch.int8) if float8 else w.codes  # torch's own tools for ops cannot compare float8
    return _op(x, codes, w.scale, x_scale, w.layout, w.shape[0], float8, use)


def _check(x: Tensor, w: W8, x_scale: Tensor | None) -> None:
    out, columns = w.shape
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={columns})")
    if x.dtype not in DTYPES:
        raise ValueError(f"`x` (={x.dtype}) must be float32, bfloat16 or float16")
    if w.layout not in ("rows", "panels", "prepacked"):
        raise ValueError(f"`w.layout` (={w.layout!r}) must be 'rows', 'panels' or 'prepacked'")
    if w.codes.dtype not in LARGEST:
        raise ValueError(f"`w.codes` (={w.codes.dtype}) must be torch.int8 or torch.float8_e4m3fn")
    expected = {"rows": (out, columns), "panels": panels_shape((out, columns))}.get(w.layout)
    if expected and (tuple(w.codes.shape) != expected or not w.codes.is_contiguous()):
        raise ValueError(
            f"`w.codes` {tuple(w.codes.shape)} of strides {w.codes.stride()} must be contiguous {expected}"
        )
    if not 0 < columns <= MOST_COLUMNS[w.codes.dtype]:
        raise ValueError(f"in_features (={columns}) must be 1 to {MOST_COLUMNS[w.codes.dtype]} for {w.codes.dtype}")
    blocks = (-(-out // BLOCK), -(-columns // BLOCK))
    if w.scale.dtype != torch.float32 or tuple(w.scale.shape) not in ((out,), blocks):
        raise ValueError(
            f"`w.scale` {w.scale.dtype} {tuple(w.scale.shape)} must be float32 {(out,)}, or {blocks} block by block"
        )
    if not x.device == w.codes.device == w.scale.device:
        raise ValueError(f"`x` on {x.device} and `w` on {w.codes.device}, {w.scale.device} must be on one device")
    if x_scale is not None and (x_scale.dtype != torch.float32 or x_scale.numel() != 1 or x_scale.device != x.device):
        kind = f"{x_scale.dtype} {tuple(x_scale.shape)} on {x_scale.device}"
        raise ValueError(f"`x_scale` must be None or one float32 number on {x.device}, not {kind}")


def _implementation(x: Tensor, w: W8, impl: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    on_cpu = w.codes.dtype == torch.int8 and w.scale.dim() == 1 and integer_dots(w.codes)
    on_cpu = on_cpu and {"panels": in_one_call, "prepacked": has_vnni, "rows": int_mm_is_exact}[w.layout]()
    if impl == "cpu" and not on_cpu:
        kind = f"{w.codes.dtype} in {w.layout} with scale {tuple(w.scale.shape)} on {x.device}"
        needs = "needs int8 with a scale per output channel on a CPU with VNNI or NEON's dot products"
        needs += ", which oneDNN uses, or the C++ kernels and 'panels'"
        raise ValueError(f"`impl` (='cpu') {needs}, not {kind}")
    float8 = w.codes.dtype == torch.float8_e4m3fn
    triton = triton_takes(x.device) and w.layout == "rows" and too_old(x.device, float8=float8) is None
    if impl == "triton" and not triton:
        needs = "needs triton and layout 'rows' on CUDA (on a CPU: TRITON_INTERPRET=1)"
        here = f"not {w.layout!r} on {described(x.device, float8=float8)}"
        raise ValueError(f"`impl` (='triton') {needs}, {here}; 'reference' works{', or int8' * float8}")
    if impl != "auto":
        return impl
    if x.device.type == "cuda" and triton:
        return "triton"
    return "cpu" if on_cpu else "reference"


@torch.library.custom_op("workbench::w8a8_matmul", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    layout: str,
    out_features: int,
    float8: bool,
    use: str,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], out_features)
    if use == "triton":
        from kernels.w8a8_matmul import triton as implementation
    else:
        implementation = cpu if use == "cpu" else reference
    codes = codes.view(torch.float8_e4m3fn) if float8 else codes
    y = implementation.w8a8_matmul(flat, W8(layout, codes, scale, (out_features, x.shape[-1])), x_scale)
    return y.view(*x.shape[:-1], out_features)


@_op.register_fake
def _(x, codes, scale, x_scale, layout, out_features, float8, use):
    return x.new_empty(*x.shape[:-1], out_features)


@native.shapes_of("int8_matmul")
def _(x, codes, scale, x_scale):
    return x.new_empty(*x.shape[:-1], scale.shape[0])
