"""Hadamard products for some rows per program, as two or three small products on tensor cores. See README.md."""

from kernels.interpreter import prepare

prepare()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import has_shared, on_its_device  # noqa: E402
from kernels.hadamard import spread  # noqa: E402
from kernels.hadamard.factors import factor, pieces, times  # noqa: E402
from kernels.hadamard.plan import LARGEST_TILE, FactorPlan, codes_fit, plan, shared_of, whole_codes_fit  # noqa: E402
from kernels.tuning import Compilation, configuration  # noqa: E402
from kernels.w8a8_matmul.triton import magnitude, steps  # noqa: E402


@triton.jit
def transformed(
    t, HA, HB, HC, scale, PA: tl.constexpr, B: tl.constexpr, PC: tl.constexpr, R: tl.constexpr, PIECES: tl.constexpr
):
    """scale t (H_A ⊗ H_B ⊗ H_C) in float32, for a tile t [R PA B, PC] of R rows, in 16 bits, whose products are exact,
    or in float32."""
    c = tl.arange(0, PC)
    hc = tl.load(HC + c[:, None] * PC + c[None, :])
    t = times(t, hc, PIECES) if t.dtype == tl.float32 else tl.dot(t, hc.to(t.dtype))
    if B > 1:
        b = tl.arange(0, B)
        t = tl.reshape(tl.permute(tl.reshape(t, (R * PA, B, PC)), (0, 2, 1)), (R * PA * PC, B))
        t = times(t, tl.load(HB + b[:, None] * B + b[None, :]), PIECES)  # [R PA PC, B]
    if PA > 1:
        a = tl.arange(0, PA)
        t = tl.reshape(tl.permute(tl.reshape(t, (R, PA, PC * B)), (0, 2, 1)), (R * PC * B, PA))
        t = times(t, tl.load(HA + a[:, None] * PA + a[None, :]), PIECES)  # [R PC B, PA]
    t = t * scale
    return t


@triton.jit
def in_rows(t, PA: tl.constexpr, B: tl.constexpr, PC: tl.constexpr, R: tl.constexpr):
    """The result of `transformed`, reshaped to [R PA B, PC]."""
    if PA > 1:
        t = tl.permute(tl.reshape(t, (R, PC, B, PA)), (0, 3, 2, 1))
    elif B > 1:
        t = tl.permute(tl.reshape(t, (R, PC, B)), (0, 2, 1))
    return tl.reshape(t, (R * PA * B, PC))


@triton.jit
def largest_of_groups(
    v, PA: tl.constexpr, B: tl.constexpr, PC: tl.constexpr, R: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """The largest integer of every EACH elements of v [R PA B, PC], the result of `in_rows`: [R PA B PC / EACH].

    Triton (3.6 and 3.7) shuffles neighbouring lanes of a warp when it reduces (harness/hazards.py). Two lane bits of a
    product's result hold columns, bits 1 and 2 of b (with PA > 1: of a), and three hold the lowest bits of rows, those
    of c (of b and then c). Where the lanes of a group of several lines are not neighbours, it is reduced in two steps,
    which takes more registers."""
    LINES: tl.constexpr = EACH // PC
    NEIGHBOURS: tl.constexpr = (B >= 8) if PA > 1 else (LINES != 4)
    if LINES > 1 and EACH < PA * B * PC and not NEIGHBOURS:
        top = tl.max(tl.max(tl.reshape(v, (R * PA * B // LINES, LINES, PC)), 2), 1)
    else:
        top = tl.max(tl.reshape(v, (R * PA * B * PC // EACH, EACH)), 1)
    return top


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
    """y [rows, A B C] = scale x (H_A ⊗ H_B ⊗ H_C), R rows per program; HA [PA, PA], HB [B, B], HC [PC, PC] are padded
    with zeros."""
    i = tl.arange(0, R * PA * B)
    row = tl.program_id(0).to(tl.int64) * R + i // (PA * B)  # [R PA B]
    ab = i % (PA * B)
    c = tl.arange(0, PC)
    here = ((row < rows) & (ab < A * B))[:, None] & (c < C)[None, :]
    inside = ab[:, None] * C + c[None, :]
    t = tl.load(x + row[:, None] * x_row + inside, mask=here, other=0.0)
    t = transformed(t, HA, HB, HC, scale, PA, B, PC, R, PIECES).to(y.dtype.element_ty)
    t = in_rows(t, PA, B, PC, R)
    tl.store(y + row[:, None] * (A * B * C) + inside, t, mask=here)


@triton.jit
def codes_kernel(
    x,
    signs,
    codes,
    step,
    HA,
    HB,
    HC,
    rows,
    blocks,
    wide,
    scale,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    PA: tl.constexpr,
    PC: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    PIECES: tl.constexpr,
):
    """int8 codes and steps of scale (signs x) H, first rounded to x's dtype as in `hadamard_kernel`.

    x: [rows, A B C]; `blocks` rows form a token. codes: [tokens, blocks A B C], even columns first, then the odd ones.
    step: [rows, groups]; GROUP columns share a step; with GROUP 0 a whole row does. The first `wide` groups of a token
    have codes of 8 bits.
    """
    N: tl.constexpr = A * B * C
    EACH: tl.constexpr = PA * B * PC if GROUP == 0 else GROUP  # elements of a tile that share a step
    HELD: tl.constexpr = PA * B * PC // EACH  # groups of a row of the tile
    GROUPS: tl.constexpr = 1 if GROUP == 0 else N // GROUP  # number of groups without padding
    i = tl.arange(0, R * PA * B)
    row = tl.program_id(0) * R + i // (PA * B)  # [R PA B]
    ab, part = i % (PA * B), row % blocks
    start = (row - part).to(tl.int64) * N  # of the token
    c = tl.arange(0, PC)
    there = (row < rows) & (ab < A * B)
    here = there[:, None] & (c < C)[None, :]
    column = (part * N + ab * C)[:, None] + c[None, :]
    t = tl.load(x + start[:, None] + column, mask=here, other=0.0)
    t = (t.to(tl.float32) * tl.load(signs + column, mask=here, other=0).to(tl.float32)).to(t.dtype)
    kind: tl.constexpr = x.dtype.element_ty
    v = in_rows(transformed(t, HA, HB, HC, scale, PA, B, PC, R, PIECES).to(kind), PA, B, PC, R)
    tops = largest_of_groups(magnitude(v.to(tl.float32)), PA, B, PC, R, EACH)
    v = tl.reshape(v.to(tl.float32), (R * HELD, EACH))
    j = tl.arange(0, R * HELD)
    first, group = tl.program_id(0) * R + j // HELD, j % HELD
    largest = tl.where((first % blocks) * GROUPS + group < wide, 127.0, LARGEST)
    size, inverse = steps(tops, largest)
    tl.store(step + first.to(tl.int64) * GROUPS + group, size, mask=(first < rows) & (group < GROUPS))
    v = tl.minimum(tl.maximum(v * inverse[:, None], -largest[:, None]), largest[:, None])
    code = (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # the sum's last byte is v to nearest even
    even, odd = tl.split(tl.reshape(code, (R * PA * B, PC // 2, 2)))  # each is stored side by side
    half = tl.arange(0, PC // 2)
    place = (start + part * (N // 2) + ab * (C // 2))[:, None] + half[None, :]
    here = there[:, None] & (half < C // 2)[None, :]
    tl.store(codes + place, even, mask=here)
    tl.store(codes + place + blocks * (N // 2), odd, mask=here)


@on_its_device
def hadamard_codes(
    x: Tensor, signs: Tensor, block: int, bits: int, group: int | None, wide: int
) -> tuple[Tensor, Tensor]:
    """int8 codes [tokens, in] and steps [tokens, in / group] of x [tokens, in]; `takes` must be true."""
    tokens, columns = x.shape
    rows, blocks, p, device = tokens * (columns // block), columns // block, plan(block), x.device
    whole = whole_codes_fit(block, group, columns) and fits(block, device)
    if rows and codes_fit(block, group) and (not whole or spread.few(rows, block, device)):
        wanted = spread.heuristic(rows, block, x.dtype, device)
        c = configuration("hadamard", spread.key(rows, block, x.dtype), wanted)
        if c["lines"] or not whole:
            return spread.hadamard_codes(x, signs, block, bits, group, wide, c if c["lines"] else wanted)
    codes = torch.empty(tokens, columns, dtype=torch.int8, device=device)
    step = torch.empty(tokens, columns // (group or columns), dtype=torch.float32, device=device)
    if rows:
        chosen = dict(configuration("hadamard", key(block, x.dtype), heuristic(p)))
        warps = chosen.pop("num_warps")
        factors = (factor(p.a, p.pa, device), factor(p.b, p.b, device), factor(p.c, p.pc, device))
        codes_kernel[(triton.cdiv(rows, chosen["R"]),)](
            x.contiguous(), signs, codes, step, *factors, rows, blocks, wide, block**-0.5, A=p.a, B=p.b, C=p.c,
            PA=p.pa, PC=p.pc, GROUP=0 if group in (None, block) else group, LARGEST=127.0 if bits == 8 else 7.0,
            PIECES=pieces(x.dtype), **chosen, num_warps=warps,
        )  # fmt: skip
    return codes, step


@on_its_device
def hadamard(x: Tensor, scale: float) -> Tensor:
    """y [rows, n]; `plan(n)` or `spread_plan(n)` must not be None."""
    rows, n = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if not rows:
        return torch.empty(rows, n, dtype=x.dtype, device=x.device)
    whole = fits(n, x.device)
    if not whole or spread.few(rows, n, x.device):
        wanted = spread.heuristic(rows, n, x.dtype, x.device)
        c = configuration("hadamard", spread.key(rows, n, x.dtype), wanted)
        if c["lines"] or not whole:
            return spread.hadamard(x, scale, c if c["lines"] else wanted)
    return in_whole_rows(x, scale)


def tuned(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[str, list[dict[str, int]]]:
    """The key of the configuration for these rows, and the configurations worth timing."""
    whole = fits(n, device)
    if not whole or spread.few(rows, n, device):
        return spread.key(rows, n, dtype), spread.candidates(rows, n, dtype, whole, device)
    return key(n, dtype), candidates(n)


def fits(n: int, device: torch.device) -> bool:
    """Can one program compute a row of n elements?"""
    return plan(n) is not None and has_shared(device, shared_of(plan(n)))


def in_whole_rows(x: Tensor, scale: float) -> Tensor:
    """y [rows, n], where one program computes each row."""
    rows, n = x.shape
    p, device = plan(n), x.device
    y = torch.empty(rows, n, dtype=x.dtype, device=device)
    chosen = dict(configuration("hadamard", key(n, x.dtype), heuristic(p)))
    warps = chosen.pop("num_warps")
    factors = (factor(p.a, p.pa, device), factor(p.b, p.b, device), factor(p.c, p.pc, device))
    hadamard_kernel[(triton.cdiv(rows, chosen["R"]),)](
        x, y, *factors, rows, x.stride(0), scale, A=p.a, B=p.b, C=p.c, PA=p.pa, PC=p.pc, PIECES=pieces(x.dtype),
        **chosen, num_warps=warps,
    )  # fmt: skip
    return y


def key(n: int, dtype: torch.dtype) -> str:
    return f"n{n} {str(dtype).removeprefix('torch.')}"


def heuristic(p: FactorPlan) -> dict[str, int]:
    """Tiles of at least 4096 elements and, for wgmma, 64 lines; 32 elements per thread in tiles of 4096, 64 in larger
    ones."""
    return _sized(p, max(1, 4096 // _row(p), 64 // (p.pa * p.b)))


def candidates(n: int) -> list[dict[str, int]]:
    p = plan(n)
    least = heuristic(p)["R"]
    wider = [_sized(p, least * f) for f in (2, 4) if least * f * _row(p) <= LARGEST_TILE]
    tried = [heuristic(p), *wider, *({**c, "num_warps": 2 * c["num_warps"]} for c in (heuristic(p), *wider))]
    return [c for c in tried if c["num_warps"] <= 16]


def _sized(p: FactorPlan, R: int) -> dict[str, int]:
    return {"R": R, "num_warps": max(4, R * _row(p) // 2048)}


def _row(p: FactorPlan) -> int:
    """Elements of a row with its padding."""
    return p.pa * p.b * p.pc


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
    rounded = ((576, "bf16", 0), (4096, "bf16", 64), (4096, "bf16", 0), (14336, "bf16", 128), (256, "fp32", 64))
    whole = [_compilation(n, dtype) for n, dtype in sizes] + [_codes_compilation(*each) for each in rounded]
    return whole + spread.shipped()


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


def _codes_compilation(n: int, dtype: str, group: int) -> Compilation:
    plain = _compilation(n, dtype)
    arguments = {"x": f"*{dtype}", "signs": "*i8", "codes": "*i8", "step": "*fp32", "HA": "*bf16", "HB": "*bf16"}
    arguments |= {"HC": "*bf16", "rows": "i32", "blocks": "i32", "wide": "i32", "scale": "fp32"}
    return Compilation(
        f"hadamard {n} {dtype} to codes{f' g{group}' * (group > 0)}",
        codes_kernel,
        arguments,
        {**plain.constants, "GROUP": group, "LARGEST": 7.0},
        num_warps=plain.num_warps,
        expects=("HGMMA",),
    )
