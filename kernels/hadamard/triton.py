"""Hadamard products for some rows per program, as two or three small products on tensor cores. See README.md."""

from kernels.interpreter import prepare

prepare()

from functools import cache  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.hadamard.matrix import base, paley, sylvester  # noqa: E402
from kernels.hadamard.plan import LARGEST_TILE, Plan, plan  # noqa: E402
from kernels.tuning import Compilation, configuration  # noqa: E402


@triton.jit
def times(t, H, PIECES: tl.constexpr):
    """float32 t [M, K] times H [K, N] of ±1: t as a sum of 2 (16 bits of it) or 3 (all 24) bfloat16 matrices."""
    high = t.to(tl.bfloat16)
    t -= high.to(tl.float32)
    middle = t.to(tl.bfloat16)
    y = tl.dot(middle, H)
    if PIECES == 3:
        low = (t - middle.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(low, H, y)
    return tl.dot(high, H, y)


@triton.jit
def hadamard_kernel(
    x,
    y,
    HA,
    HB,
    HC,
    rows,
    x_row,
    scale,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    PA: tl.constexpr,
    PC: tl.constexpr,
    R: tl.constexpr,
    PIECES: tl.constexpr,
):
    """y [rows, A B C] = scale x (H_A ⊗ H_B ⊗ H_C), R rows a program; HA [PA, PA], HB [B, B], HC [PC, PC] hold zeros
    beyond."""
    i = tl.arange(0, R * PA * B)
    row = tl.program_id(0).to(tl.int64) * R + i // (PA * B)  # [R PA B]
    ab = i % (PA * B)
    c = tl.arange(0, PC)
    here = ((row < rows) & (ab < A * B))[:, None] & (c < C)[None, :]
    inside = ab[:, None] * C + c[None, :]
    t = tl.load(x + row[:, None] * x_row + inside, mask=here, other=0.0)
    hc = tl.load(HC + tl.arange(0, PC)[:, None] * PC + c[None, :])
    t = times(t, hc, PIECES) if x.dtype.element_ty == tl.float32 else tl.dot(t, hc.to(t.dtype))  # products are exact
    if B > 1:
        b = tl.arange(0, B)
        t = tl.reshape(tl.permute(tl.reshape(t, (R * PA, B, PC)), (0, 2, 1)), (R * PA * PC, B))
        t = times(t, tl.load(HB + b[:, None] * B + b[None, :]), PIECES)  # [R PA PC, B]
    if PA > 1:
        a = tl.arange(0, PA)
        t = tl.reshape(tl.permute(tl.reshape(t, (R, PA, PC * B)), (0, 2, 1)), (R * PC * B, PA))
        t = times(t, tl.load(HA + a[:, None] * PA + a[None, :]), PIECES)  # [R PC B, PA]
    t = (t * scale).to(y.dtype.element_ty)
    if PA > 1:
        t = tl.permute(tl.reshape(t, (R, PC, B, PA)), (0, 3, 2, 1))
    elif B > 1:
        t = tl.permute(tl.reshape(t, (R, PC, B)), (0, 2, 1))
    t = tl.reshape(t, (R * PA * B, PC))
    tl.store(y + row[:, None] * (A * B * C) + inside, t, mask=here)


def hadamard(x: Tensor, scale: float) -> Tensor:
    """y [rows, n]; `plan(n)` must not be None."""
    rows, n = x.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        x = x if x.stride(-1) == 1 else x.contiguous()
        p, device = plan(n), x.device
        chosen = dict(configuration("hadamard", key(n, x.dtype), heuristic(p)))
        warps = chosen.pop("num_warps")
        factors = (_factor(p.a, p.pa, device), _factor(p.b, p.b, device), _factor(p.c, p.pc, device))
        hadamard_kernel[(triton.cdiv(rows, chosen["R"]),)](
            x,
            y,
            *factors,
            rows,
            x.stride(0),
            scale,
            A=p.a,
            B=p.b,
            C=p.c,
            PA=p.pa,
            PC=p.pc,
            PIECES=pieces(x.dtype),
            **chosen,
            num_warps=warps,
        )
    return y


def key(n: int, dtype: torch.dtype) -> str:
    return f"n{n} {str(dtype).removeprefix('torch.')}"


def pieces(dtype: torch.dtype) -> int:
    return 3 if dtype == torch.float32 else 2


def heuristic(p: Plan) -> dict[str, int]:
    """Tiles of at least 4096 elements and, for wgmma, 64 lines; 32 elements a thread in those of 4096, 64 in larger
    ones."""
    return _sized(p, max(1, 4096 // _row(p), 64 // (p.pa * p.b)))


def candidates(n: int) -> list[dict[str, int]]:
    p = plan(n)
    least = heuristic(p)["R"]
    wider = [_sized(p, least * f) for f in (2, 4) if least * f * _row(p) <= LARGEST_TILE]
    tried = [heuristic(p), *wider, *({**c, "num_warps": 2 * c["num_warps"]} for c in (heuristic(p), *wider))]
    return [c for c in tried if c["num_warps"] <= 16]


def _sized(p: Plan, R: int) -> dict[str, int]:
    return {"R": R, "num_warps": max(4, R * _row(p) // 2048)}


def _row(p: Plan) -> int:
    """Elements of a row with its padding."""
    return p.pa * p.b * p.pc


@cache
def _factor(order: int, padded: int, device: torch.device) -> Tensor:
    """bfloat16 [padded, padded]: the symmetric matrix of this order, zeros beyond it."""
    m = base(order)
    H = np.zeros((padded, padded), np.float32)
    H[:order, :order] = np.kron(paley(m), sylvester(order // m))
    return torch.from_numpy(H).to(device, torch.bfloat16)


def shipped() -> list[Compilation]:
    sizes = (
        (64, "bf16"),
        (576, "bf16"),
        (1536, "bf16"),
        (4096, "bf16"),
        (4096, "fp16"),
        (4096, "fp32"),
        (8192, "bf16"),
        (14336, "bf16"),
        (28672, "bf16"),
        (32768, "fp32"),
    )
    return [_compilation(n, dtype) for n, dtype in sizes]


def _compilation(n: int, dtype: str) -> Compilation:
    p = plan(n)
    chosen = heuristic(p)
    arguments = {"x": f"*{dtype}", "y": f"*{dtype}", "HA": "*bf16", "HB": "*bf16", "HC": "*bf16"}
    arguments |= {"rows": "i32", "x_row": "i32", "scale": "fp32"}
    constants = {
        "A": p.a,
        "B": p.b,
        "C": p.c,
        "PA": p.pa,
        "PC": p.pc,
        "PIECES": 3 if dtype == "fp32" else 2,
        "R": chosen["R"],
    }
    return Compilation(
        f"hadamard {n} {dtype}",
        hadamard_kernel,
        arguments,
        constants,
        num_warps=chosen["num_warps"],
        multiple_of_16=("x_row",),
        expects=("HGMMA",),
    )
