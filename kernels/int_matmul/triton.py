"""`int_matmul` with Triton, over the `rows` layout, by the kernels of `kernels.packed_matmul`."""

import torch
from torch import Tensor

from kernels.int_matmul.layout import Packed
from kernels.packed_matmul import hopper, launch
from kernels.packed_matmul.weight import PackedWeight
from kernels.tuning import Compilation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def key(w: Packed, tokens: int) -> str:
    """The key by which a configuration is chosen; the number of tokens is rounded up to a power of two."""
    return f"w{w.bits} g{w.group_size} {launch.shape_key(w, tokens)}"


def candidates(w: Packed, tokens: int, dtype: torch.dtype) -> list[dict]:
    """At most eight configurations worth timing with activations of `dtype`, the heuristic's first."""
    return launch.candidates(_weight(w), tokens, dtype)


def chosen(w: Packed, tokens: int, dtype: torch.dtype) -> dict:
    """The configuration of a call with activations of `dtype`."""
    return launch.chosen(_weight(w), tokens, dtype, "int_matmul", key(w, tokens))


def overlapped(w: Packed, tokens: int, dtype: torch.dtype) -> dict | None:
    """The configuration of `kernels.packed_matmul.overlapped`, or None if it cannot run on this GPU."""
    return hopper.plans(_weight(w), tokens)[0] if hopper.takes(_weight(w), dtype) else None


def int_matmul(x: Tensor, w: Packed) -> Tensor:
    """y [tokens, out] in x's dtype, from x [tokens, in] in float32, bfloat16 or float16 and `rows`."""
    assert w.layout == "rows"
    return launch.matmul(x, _weight(w), "int_matmul", key(w, x.shape[0]))


def cuts_into_blocks(w: Packed) -> bool:
    """Can the product kernels read this weight, and not only `dequantise`?"""
    return launch.blocks(_weight(w)) is not None


def expert_matmul(x: Tensor, w: Packed, ends: Tensor) -> Tensor:
    """y [tokens, out]; see `kernels.int_matmul.experts`, whose `takes` must be true."""
    return launch.of_experts(x, _weight(w), ends)


def _weight(w: Packed) -> PackedWeight:
    return PackedWeight(w.codes, None, w.scale, w.zero, w.bits, w.group_size, w.shape)


def shipped() -> list[Compilation]:
    """The compilations that the heuristic selects, at representative widths (in = 4096) and dtypes."""
    cases = [  # bits, group size, symmetric, dtype, out, tokens
        (4, 128, True, BF16, 4096, 1),
        *((4, 128, True, BF16, 14336, tokens) for tokens in (1, 4, 8, 16, 32, 64, 256)),
    ]
    for bits, group_size, symmetric, dtype in (
        (4, 128, False, BF16),
        (4, 64, True, FP16),
        (4, 32, True, BF16),
        (4, 4096, False, FP16),
        (4, 4096, True, BF16),
        (8, 128, True, BF16),
        (8, 4096, False, FP16),
        (3, 128, True, BF16),
        (3, 64, False, FP16),
        (2, 128, True, BF16),
        (2, 32, False, FP16),
    ):
        cases += [
            (bits, group_size, symmetric, dtype, 14336, tokens) for tokens in ((1, 64) if dtype == BF16 else (1,))
        ]
    compilations = []
    for bits, group_size, symmetric, dtype, out, tokens in cases:
        w = _meta(bits, group_size, symmetric, out)
        name = f"{_name('', bits, group_size, symmetric, dtype)} n{out} m{tokens}"
        compilations.append(launch.compilation(name, w, dtype, tokens))
    for bits, symmetric, dtype in (
        (4, True, BF16),
        (4, False, FP16),
        (8, True, BF16),
        (3, False, BF16),
        (5, True, FP32),
    ):
        name = _name("dequantise ", bits, 128, symmetric, dtype)
        compilations.append(launch.dequantise_compilation(name, _meta(bits, 128, symmetric, 14336), dtype))
    for out, group_size, symmetric, dtype, tokens in (
        (14336, 128, True, BF16, 64), (14336, 128, True, BF16, 128), (14336, 128, True, BF16, 256),
        (14336, 64, False, BF16, 256), (14336, 4096, True, BF16, 32), (4096, 128, True, BF16, 64),
        (4096, 128, False, BF16, 256), (14336, 128, False, FP16, 256), (14336, 4096, True, FP16, 64),
    ):  # fmt: skip
        w = _meta(4, group_size, symmetric, out)
        name = f"{_name('overlapped ', 4, group_size, symmetric, dtype)} n{out} m{tokens}"
        compilations.append(hopper.compilation(name, w, hopper.plans(w, tokens)[0], dtype))
    for bits, group_size, symmetric, tokens in (
        (4, 128, True, 8), (4, 128, True, 512), (4, 128, False, 4096), (3, 128, True, 8),
    ):  # fmt: skip
        w = _meta(bits, group_size, symmetric, 128 * 1536, 2048)
        name = f"{_name('of 128 experts ', bits, group_size, symmetric, BF16)} n1536 m{tokens}"
        compilations.append(launch.compilation(name, w, BF16, tokens, 128))
    return [*compilations, launch.reduce_compilation("int_matmul reduce")]


def _name(kernel: str, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype) -> str:
    return f"int_matmul {kernel}w{bits} g{group_size} {'sym' if symmetric else 'asym'} {launch.short(dtype)}"


def _meta(bits: int, group_size: int, symmetric: bool, out: int, columns: int = 4096) -> PackedWeight:
    groups = columns // group_size
    codes = torch.empty(out, columns // 8 * bits, dtype=torch.uint8, device="meta")
    scale = torch.empty(out, groups, dtype=BF16, device="meta")
    zero = None if symmetric else torch.empty(out, -(-groups // 8) * bits, dtype=torch.uint8, device="meta")
    return PackedWeight(codes, None, scale, zero, bits, group_size, (out, columns))
