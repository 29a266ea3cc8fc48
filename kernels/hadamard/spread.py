"""One row's Hadamard transform by several programs: H = H_p ⊗ H_l, and each program computes some of the p lines.

Each program reads the whole row, which is in the L2 cache, so programs exchange no data, and one launch is enough.
"""

from kernels.interpreter import prepare

prepare()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import multiprocessors  # noqa: E402
from kernels.hadamard.factors import factor, pieces, times  # noqa: E402
from kernels.hadamard.plan import Spread, codes_fit, spread_plan  # noqa: E402
from kernels.tuning import Compilation  # noqa: E402
from kernels.w8a8_matmul.triton import magnitude, steps  # noqa: E402

SHORTEST = 8192  # rows of up to this many elements are never shared by programs, even if there are few rows
WHOLE = {"lines": 0, "depth": 0, "num_warps": 0, "num_stages": 0}  # one program computes the whole row


@triton.jit
def lines_of(
    x_at,
    sign_at,
    HP,
    HL,
    line,
    scale,
    P: tl.constexpr,
    L: tl.constexpr,
    PL: tl.constexpr,
    HP_ROW: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """float32 [LINES, PL]: lines of scale (signs x) (H_P ⊗ H_L) of the row [P L] at x_at; sign_at may be None.

    HP [HP_ROW, HP_ROW] and HL [PL, PL] hold zeros beyond, and DEPTH divides HP_ROW."""
    k = tl.arange(0, DEPTH)
    column = tl.arange(0, PL)
    inside = k[:, None] * L + column[None, :]
    h_at = HP + line[:, None] * HP_ROW + k[None, :]
    sums = tl.zeros([line.shape[0], PL], tl.float32)
    for first in range(0, P, DEPTH):
        h = tl.load(h_at + first)  # [LINES, DEPTH]
        here = (first + k < P)[:, None] & (column < L)[None, :]
        v = tl.load(x_at + first * L + inside, mask=here, other=0.0)
        if sign_at is not None:
            sign = tl.load(sign_at + first * L + inside, mask=here, other=0)
            v = (v.to(tl.float32) * sign.to(tl.float32)).to(v.dtype)
        if v.dtype == tl.float32:
            high = v.to(tl.bfloat16)
            v -= high.to(tl.float32)
            middle = v.to(tl.bfloat16)
            sums = tl.dot(h, (v - middle.to(tl.float32)).to(tl.bfloat16), sums)
            sums = tl.dot(h, middle, sums)
            sums = tl.dot(h, high, sums)
        else:
            sums = tl.dot(h.to(v.dtype), v, sums)
    return times(sums, tl.load(HL + column[:, None] * PL + column[None, :]), PIECES) * scale


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
    """LINES of the p lines of a row of y [rows, P L] = scale x (H_P ⊗ H_L)."""
    BLOCKS: tl.constexpr = (P + LINES - 1) // LINES
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    line = (tl.program_id(0) % BLOCKS) * LINES + tl.arange(0, LINES)
    t = lines_of(x + row * x_row, None, HP, HL, line, scale, P, L, PL, HP_ROW, DEPTH, PIECES)
    column = tl.arange(0, PL)
    y_at = y + row * (P * L) + line[:, None] * L + column[None, :]
    tl.store(y_at, t.to(y.dtype.element_ty), mask=(line < P)[:, None] & (column < L)[None, :])


@triton.jit
def spread_codes_kernel(
    x,
    signs,
    codes,
    step,
    HP,
    HL,
    blocks,
    wide,
    scale,
    P: tl.constexpr,
    L: tl.constexpr,
    HP_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Store the results of `codes_kernel` of triton.py for LINES lines of a row; L and GROUP are powers of two, and
    GROUP divides L.

    x: [rows, P L]; `blocks` rows form a token."""
    BLOCKS: tl.constexpr = (P + LINES - 1) // LINES
    N: tl.constexpr = P * L
    HELD: tl.constexpr = L // GROUP  # groups of a line
    row = tl.program_id(0) // BLOCKS
    part = row % blocks
    line = (tl.program_id(0) % BLOCKS) * LINES + tl.arange(0, LINES)
    start = (row - part).to(tl.int64) * N  # of the token
    kind: tl.constexpr = x.dtype.element_ty
    t = lines_of(
        x + start + part * N, signs + part * N, HP, HL, line, scale, P, L, L, HP_ROW, DEPTH, PIECES
    ).to(kind)  # fmt: skip
    v = tl.reshape(t.to(tl.float32), (LINES * HELD, GROUP))
    j = (tl.program_id(0) % BLOCKS) * (LINES * HELD) + tl.arange(0, LINES * HELD)  # group of the row
    largest = tl.where(part * (P * HELD) + j < wide, 127.0, LARGEST)
    size, inverse = steps(tl.max(magnitude(v), 1), largest)
    tl.store(step + row.to(tl.int64) * (P * HELD) + j, size, mask=j < P * HELD)
    v = tl.minimum(tl.maximum(v * inverse[:, None], -largest[:, None]), largest[:, None])
    code = (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # the sum's last byte is v to nearest even
    even, odd = tl.split(tl.reshape(code, (LINES, L // 2, 2)))  # each is stored side by side
    half = tl.arange(0, L // 2)
    at = codes + start + part * (N // 2) + line[:, None] * (L // 2) + half[None, :]
    tl.store(at, even, mask=(line < P)[:, None])
    tl.store(at + blocks * (N // 2), odd, mask=(line < P)[:, None])


def hadamard(x: Tensor, scale: float, c: dict[str, int]) -> Tensor:
    """y [rows, n]; x's rows are contiguous, `spread_plan(n)` is not None, and c is not `WHOLE`."""
    rows, n = x.shape
    s, y = spread_plan(n), torch.empty(rows, n, dtype=x.dtype, device=x.device)
    padded = triton.cdiv(s.p, 128) * 128
    spread_kernel[(rows * triton.cdiv(s.p, c["lines"]),)](
        x, y, factor(s.p, padded, x.device), factor(s.l, s.pl, x.device), x.stride(0), scale, P=s.p, L=s.l, PL=s.pl,
        HP_ROW=padded, LINES=c["lines"], DEPTH=c["depth"], PIECES=pieces(x.dtype), num_warps=c["num_warps"],
        num_stages=c["num_stages"],
    )  # fmt: skip
    return y


def hadamard_codes(
    x: Tensor, signs: Tensor, block: int, bits: int, group: int, wide: int, c: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """int8 codes [tokens, in] and steps [tokens, in / group] of x [tokens, in]; `codes_fit` must be true."""
    (tokens, columns), s, device = x.shape, spread_plan(block), x.device
    codes = torch.empty(tokens, columns, dtype=torch.int8, device=device)
    step = torch.empty(tokens, columns // group, dtype=torch.float32, device=device)
    blocks, padded = columns // block, triton.cdiv(s.p, 128) * 128
    spread_codes_kernel[(tokens * blocks * triton.cdiv(s.p, c["lines"]),)](
        x.contiguous(), signs, codes, step, factor(s.p, padded, device), factor(s.l, s.pl, device), blocks, wide,
        block**-0.5, P=s.p, L=s.l, HP_ROW=padded, GROUP=group, LARGEST=127.0 if bits == 8 else 7.0,
        LINES=c["lines"], DEPTH=c["depth"], PIECES=pieces(x.dtype), num_warps=c["num_warps"],
        num_stages=c["num_stages"],
    )  # fmt: skip
    return codes, step


def few(rows: int, n: int, device: torch.device) -> bool:
    """Is a row long enough to share, and do all programs of these rows run at once?"""
    return n > SHORTEST and spread_plan(n) is not None and _at_once(rows, n, device)


def _at_once(rows: int, n: int, device: torch.device | None) -> bool:
    return rows * triton.cdiv(spread_plan(n).p, 16) <= 2 * multiprocessors(device)


def key(rows: int, n: int, dtype: torch.dtype) -> str:
    """The key of a configuration; the number of rows is rounded up to a power of two."""
    return f"m{triton.next_power_of_2(rows)} n{n} {str(dtype).removeprefix('torch.')}"


def heuristic(rows: int, n: int, dtype: torch.dtype, device: torch.device | None = None) -> dict[str, int]:
    """As many programs as possible for few rows; for many rows, blocks of 64 lines, which suit wgmma."""
    wide, lines = dtype == torch.float32, 16 if _at_once(rows, n, device) else 64
    stages = 2 if wide and lines == 64 else 3
    return {"lines": lines, "depth": 32 if wide else 64, "num_warps": 4, "num_stages": stages}


def candidates(rows: int, n: int, dtype: torch.dtype, whole: bool, device: torch.device) -> list[dict[str, int]]:
    """Configurations, the heuristic's first; `whole`: can one program compute a whole row?"""
    first = heuristic(rows, n, dtype, device)
    other = {**first, "lines": 80 - first["lines"]}
    deep = {**first, "depth": 2 * first["depth"], "num_stages": 2}
    found = [first, {**first, "lines": 32}, other, deep, {**first, "num_warps": 8}]
    return found + [WHOLE] * whole


def shipped() -> list[Compilation]:
    cases = [(1, n, "bf16") for n in (14336, 28672, 11008, 53248)]
    cases += [(1, 14336, "fp16"), (1, 28672, "fp32"), (2048, 28672, "bf16"), (2048, 65536, "fp32")]
    codes = [(1, 14336, "bf16", 128), (1, 28672, "bf16", 64), (2048, 28672, "bf16", 128)]
    return [_compilation(*each) for each in cases] + [_codes_compilation(*each) for each in codes]


def _codes_compilation(rows: int, n: int, dtype: str, group: int) -> Compilation:
    assert codes_fit(n, group)
    plain = _compilation(rows, n, dtype)
    arguments = {"x": f"*{dtype}", "signs": "*i8", "codes": "*i8", "step": "*fp32", "HP": "*bf16", "HL": "*bf16"}
    constants = {name: value for name, value in plain.constants.items() if name != "PL"}
    return Compilation(
        f"{plain.name} to codes g{group}",
        spread_codes_kernel,
        arguments | {"blocks": "i32", "wide": "i32", "scale": "fp32"},
        constants | {"GROUP": group, "LARGEST": 7.0},
        num_warps=plain.num_warps,
        num_stages=plain.num_stages,
        expects=plain.expects,
    )


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
