"""One row's Hadamard transform by several programs: H = H_p ⊗ H_l, and each program computes some of the p lines.

A program reads the whole row, which the L2 cache holds, so nothing passes between programs, and a launch does it all.
"""

from kernels.interpreter import prepare

prepare()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.hadamard.factors import factor, pieces, times  # noqa: E402
from kernels.hadamard.plan import Spread, spread_plan  # noqa: E402
from kernels.tuning import Compilation  # noqa: E402

PROGRAMS = 2 * 132  # that run at once on an H200
SHORTEST = 8192  # a program has a row of so many elements to itself, however few rows there are
WHOLE = {"lines": 0, "depth": 0, "num_warps": 0, "num_stages": 0}  # a row is left to one program


@triton.jit
def spread_kernel(
    x,
    y,
    HP,
    HL,
    x_row,
    scale,
    P: tl.constexpr,
    L: tl.constexpr,
    PL: tl.constexpr,
    HP_ROW: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """LINES of the p lines of a row of y [rows, P L] = scale x (H_P ⊗ H_L); HP [HP_ROW, HP_ROW] and HL [PL, PL] hold
    zeros beyond, and DEPTH and LINES divide HP_ROW."""
    BLOCKS: tl.constexpr = (P + LINES - 1) // LINES
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    line = (tl.program_id(0) % BLOCKS) * LINES + tl.arange(0, LINES)
    k = tl.arange(0, DEPTH)
    column = tl.arange(0, PL)
    x_at = x + row * x_row + k[:, None] * L + column[None, :]
    h_at = HP + line[:, None] * HP_ROW + k[None, :]
    sums = tl.zeros([LINES, PL], tl.float32)
    for first in range(0, P, DEPTH):
        h = tl.load(h_at + first)  # [LINES, DEPTH]
        v = tl.load(x_at + first * L, mask=(first + k < P)[:, None] & (column < L)[None, :], other=0.0)
        if v.dtype == tl.float32:
            high = v.to(tl.bfloat16)
            v -= high.to(tl.float32)
            middle = v.to(tl.bfloat16)
            sums = tl.dot(h, (v - middle.to(tl.float32)).to(tl.bfloat16), sums)
            sums = tl.dot(h, middle, sums)
            sums = tl.dot(h, high, sums)
        else:
            sums = tl.dot(h.to(v.dtype), v, sums)
    t = times(sums, tl.load(HL + column[:, None] * PL + column[None, :]), PIECES) * scale  # [LINES, PL]
    y_at = y + row * (P * L) + line[:, None] * L + column[None, :]
    tl.store(y_at, t.to(y.dtype.element_ty), mask=(line < P)[:, None] & (column < L)[None, :])


def hadamard(x: Tensor, scale: float, c: dict[str, int]) -> Tensor:
    """y [rows, n]; x's rows are contiguous, `spread_plan(n)` is not None, and c is no `WHOLE`."""
    rows, n = x.shape
    s, y = spread_plan(n), torch.empty(rows, n, dtype=x.dtype, device=x.device)
    padded = triton.cdiv(s.p, 128) * 128
    spread_kernel[(rows * triton.cdiv(s.p, c["lines"]),)](
        x, y, factor(s.p, padded, x.device), factor(s.l, s.pl, x.device), x.stride(0), scale, P=s.p, L=s.l, PL=s.pl,
        HP_ROW=padded, LINES=c["lines"], DEPTH=c["depth"], PIECES=pieces(x.dtype), num_warps=c["num_warps"],
        num_stages=c["num_stages"],
    )  # fmt: skip
    return y


def few(rows: int, n: int) -> bool:
    """Is a row long enough to share, and do all programs of these rows run at once?"""
    return n > SHORTEST and spread_plan(n) is not None and _at_once(rows, n)


def _at_once(rows: int, n: int) -> bool:
    return rows * triton.cdiv(spread_plan(n).p, 16) <= PROGRAMS


def key(rows: int, n: int, dtype: torch.dtype) -> str:
    """What a configuration is measured for: the rows up to the next power of two."""
    return f"m{triton.next_power_of_2(rows)} n{n} {str(dtype).removeprefix('torch.')}"


def heuristic(rows: int, n: int, dtype: torch.dtype) -> dict[str, int]:
    """As many programs as there can be for few rows; for many, blocks of 64 lines, which wgmma takes."""
    wide, lines = dtype == torch.float32, 16 if _at_once(rows, n) else 64
    stages = 2 if wide and lines == 64 else 3
    return {"lines": lines, "depth": 32 if wide else 64, "num_warps": 4, "num_stages": stages}


def candidates(rows: int, n: int, dtype: torch.dtype, whole: bool) -> list[dict[str, int]]:
    """The heuristic's first; `whole`: can one program have a row?"""
    first = heuristic(rows, n, dtype)
    other = {**first, "lines": 80 - first["lines"]}
    deep = {**first, "depth": 2 * first["depth"], "num_stages": 2}
    found = [first, {**first, "lines": 32}, other, deep, {**first, "num_warps": 8}]
    return found + [WHOLE] * whole


def shipped() -> list[Compilation]:
    cases = [(1, n, "bf16") for n in (14336, 28672, 11008, 53248)]
    cases += [(1, 14336, "fp16"), (1, 28672, "fp32"), (2048, 28672, "bf16"), (2048, 65536, "fp32")]
    return [_compilation(*each) for each in cases]


def _compilation(rows: int, n: int, dtype: str) -> Compilation:
    s: Spread = spread_plan(n)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    c = heuristic(rows, n, kind)
    return Compilation(
        f"hadamard {n} {dtype}, {c['lines']} of {s.p} lines a program",
        spread_kernel,
        {"x": f"*{dtype}", "y": f"*{dtype}", "HP": "*bf16", "HL": "*bf16", "x_row": "i32", "scale": "fp32"},
        {
            "P": s.p, "L": s.l, "PL": s.pl, "HP_ROW": triton.cdiv(s.p, 128) * 128, "LINES": c["lines"],
            "DEPTH": c["depth"], "PIECES": pieces(kind),
        },
        num_warps=c["num_warps"],
        num_stages=c["num_stages"],
        multiple_of_16=("x_row",),
        expects=("HGMMA",) if c["lines"] >= 64 else ("HMMA",),
    )  # fmt: skip
