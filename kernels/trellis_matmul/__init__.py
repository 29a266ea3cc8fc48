"""`trellis_matmul`: y = x Wᵀ with the columns of W stored as walks through a trellis, which `viterbi` finds.

See README.md.
"""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described
from kernels.interpreter import triton_takes
from kernels.linear import linear
from kernels.registry import ran
from kernels.trellis_matmul import reference
from kernels.trellis_matmul.layout import BITS, STATES, UNIT, Trellis, length_for, pack_symbols, values, walk_states

__all__ = [
    "BITS", "STATES", "UNIT", "Trellis", "decode", "length_for", "pack_symbols", "trellis_matmul", "values",
    "viterbi", "walk_states",
]  # fmt: skip

IMPLS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 16  # largest number of tokens for which weights are decoded in registers rather than into memory


def trellis_matmul(x: Tensor, w: Trellis, *, impl: str = "auto") -> Tensor:
    """Product with a trellis-coded weight, QTIP's (arXiv:2406.11235).

    Args:
        x: [..., in]; float32, bfloat16 or float16; any strides; may be empty.
        w: [out, in] (`Trellis`).
        impl: "reference" (decode and multiply; any device), "cpu" (C++: decodes in registers up to 16 tokens; beyond,
            into tiles for bfloat16 and a processor with AMX or AVX512-BF16, otherwise into a float32 matrix), "triton"
            (CUDA, or the interpreter: in registers up to 8 tokens) or "auto": "cpu" or "triton" if available.

    Returns:
        [..., out] in x's dtype

    Raises:
        ValueError: shapes that do not match, or an implementation that does not exist or does not support the tensors.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must end in in_features (={w.shape[1]})")
    use = _which(impl, x.device, x.dtype)
    in_tiles = use == "cpu" and _in_tiles(x.dtype, x.numel() // max(x.shape[-1], 1))
    ran(
        "trellis_matmul",
        f"cpu {native.walks_in_tiles() if in_tiles else native.isa(torch.float32)}" if use == "cpu" else use,
    )
    return _op(x, w.codes, w.scale, w.bits, w.states, w.shape[0], use)


def viterbi(x: Tensor, table: Tensor, *, bits: int, window: int | None = None, impl: str = "auto") -> Tensor:
    """The walks whose values are nearest to these sequences.

    A state has log2(len(table)) bits. Its `bits` lowest ones are the symbol of the step; in the next state, the other
    bits are shifted down by `bits` places, and new bits come in at the top. The last states continue with the first
    symbols (tail-biting), so that a walk is stored in exactly `bits` bits per step.

    Args:
        x: [n, length] float32; length at least 32 and a multiple of 16.
        table: [2^states] float32, the value of each state; states at least 2 * bits + 4.
        window: number of weights on each side of the seam that determine the state there; None: four times `states`.
        impl: "reference", "cpu" (C++) or "auto": "cpu" if available.

    Returns:
        uint8 [n, length], symbols below 2^bits.

    Source: arXiv:2406.11235, algorithm 4. Deviation: the first search runs over a window around the seam, not over
    the whole sequence, which costs 0.5 % of the error and saves a fourth to a half of the time.
    """
    window = min(4 * (len(table).bit_length() - 1) if window is None else window, x.shape[1] // 2)
    x, table = x.contiguous().float(), table.contiguous().float()
    if impl == "triton":
        raise ValueError("`impl` (='triton'): there is no such search in Triton; 'cpu' or 'reference' works")
    if _which(impl, x.device, x.dtype) == "cpu":
        ran("viterbi", f"cpu {native.isa(torch.float32)}")
        return torch.ops.workbench.trellis_encode(x, table, bits, window, "auto")[0]
    ran("viterbi", "reference")
    return reference.viterbi(x, table, bits, window)


def decode(w: Trellis) -> Tensor:
    """W [out, in] in float32."""
    use = _which("auto", w.codes.device, torch.float32)
    if use == "triton":
        from kernels.trellis_matmul import triton

        return triton.decode(w)
    if use == "cpu":
        W = torch.ops.workbench.trellis_decode(w.codes, w.bits, w.states, "auto")
    else:
        W = reference.decode(w)
    return W[:, : w.shape[0]].t() * w.scale[:, None]


def _which(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    cpu = device.type == "cpu" and dtype in DTYPES and native.why_not() is None
    if impl == "cpu" and not cpu:
        raise ValueError(f"`impl` (='cpu') needs the C++ kernels and a CPU, not {dtype} on {device}")
    if impl == "triton" and not (dtype in DTYPES and triton_takes(device)):
        raise ValueError(
            f"`impl` (='triton') needs triton and a CUDA tensor, or TRITON_INTERPRET=1, "
            f"not {dtype} on {described(device)}"
        )
    if impl != "auto":
        return impl
    triton = device.type == "cuda" and dtype in DTYPES and triton_takes(device)
    return "cpu" if cpu else "triton" if triton else "reference"


@torch.library.custom_op("workbench::trellis_matmul", mutates_args=())
def _op(x: Tensor, codes: Tensor, scale: Tensor, bits: int, states: int, out_features: int, use: str) -> Tensor:
    # Opaque to the compiler on purpose: if the decoder were traced, freezing would fold it into a dense weight.
    w = Trellis(codes, scale, bits, states, (out_features, codes.shape[1]))
    flat = x.reshape(-1, x.shape[-1])
    if use == "reference":
        y = reference.trellis_matmul(flat, w)
    elif use == "triton":
        from kernels.trellis_matmul import triton

        y = triton.trellis_matmul(flat, w)
    elif len(flat) <= FEW:
        y = torch.ops.workbench.trellis_multiply(flat.float().contiguous(), codes, bits, states, "auto")
        y = (y[:, :out_features] * scale).to(x.dtype)
    elif _in_tiles(flat.dtype, len(flat)):
        y = torch.ops.workbench.trellis_tiles(flat.contiguous(), codes, scale, bits, states, "auto")
    else:
        W = torch.ops.workbench.trellis_decode(codes, bits, states, "auto")[:, :out_features]
        y = linear(flat, W.mul_(scale).t().to(x.dtype))
    return y.reshape(*x.shape[:-1], out_features)


def _in_tiles(dtype: torch.dtype, tokens: int) -> bool:
    """Are there enough tokens for products in tiles, and does this machine have them?"""
    return dtype == torch.bfloat16 and tokens > FEW and bool(native.walks_in_tiles())


@_op.register_fake
def _(x, codes, scale, bits, states, out_features, use):
    return x.new_empty(*x.shape[:-1], out_features)


@native.shapes_of("trellis_encode")
def _(x, table, bits, window, isa):
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0])


@native.shapes_of("trellis_decode")
def _(codes, bits, states, isa):
    return codes.new_empty(codes.shape[1], codes.shape[0] * codes.shape[2] * 8 // bits, dtype=torch.float32)


@native.shapes_of("trellis_tiles")
def _(x, codes, scale, bits, states, isa):
    return x.new_empty(*x.shape[:-1], scale.numel())


@native.shapes_of("trellis_multiply")
def _(x, codes, bits, states, isa):
    return x.new_empty(x.shape[0], codes.shape[0] * codes.shape[2] * 8 // bits)
