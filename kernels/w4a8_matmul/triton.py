"""The Triton kernels of `w4a8_matmul`, over symmetric 4-bit `rows`: the rounding of tokens, and the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.capability import multiprocessors, on_its_device
from kernels.int_matmul import Packed
from kernels.interpreter import interpreting, prepare
from kernels.launch_order import await_inputs, prefetch
from kernels.tuning import Compilation, configuration, launch_options
from kernels.w4a8_matmul.groups import common_group
from kernels.w8a8_matmul.triton import encode, gathered, magnitude, steps

prepare()

WIDTH = 4096  # number of columns that a program reads in one step of rounding


@triton.jit
def read(row, order, column, end, ORDERED: tl.constexpr):
    """The columns of a row in float32, or with ORDERED the columns order[column]; 0 from `end` on."""
    inside = column < end
    at = tl.load(order + column, mask=inside, other=0) if ORDERED else column
    return tl.load(row + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def round_tokens(
    x,
    fixed,
    order,
    codes,
    step,
    columns,
    stride,
    group,
    groups,
    wide,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
    EACH: tl.constexpr,
    ORDERED: tl.constexpr,
    FLOAT: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one token, `group` columns that share a step. Codes of even columns are in the first half of a row,
    codes of odd columns in the second, in the order of the two nibbles of W's bytes. The first `wide` groups have codes
    of 8 bits. FLOAT: codes are float8_e4m3fn."""
    await_inputs(EARLY)
    token, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = g * group, (g + 1) * group
    top = tl.zeros((WIDTH,), dtype=tl.int32)
    for k in range(start, end, WIDTH):
        column = k + tl.arange(0, WIDTH)
        top = tl.maximum(top, magnitude(read(x + token * stride, order, column, end, ORDERED)))
    largest = tl.where(g < wide, 127.0, LARGEST)
    size, inverse = steps(tl.max(top, 0), largest)
    if STATIC:
        given = tl.load(fixed + (g if EACH else 0))
        size = given + (size - size)  # NaN stays NaN
        inverse = tl.div_rn(1.0, given)
    tl.store(step + token * groups + g, size)
    for k in range(start, end, WIDTH):
        column = k + tl.arange(0, WIDTH)
        v = read(x + token * stride, order, column, end, ORDERED) * inverse
        v = tl.minimum(tl.maximum(v, -largest), largest)
        if FLOAT:
            code = v.to(tl.float8e4nv)
        else:
            code = (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # the sum's last byte is v to nearest even
        place = column // 2 + (column % 2) * (columns // 2)
        tl.store(codes + token * columns + place, code, mask=column < end)


@triton.jit
def low_nibbles(packed, ASM: tl.constexpr):
    """16 (code - 8) of the low nibbles of bytes, as int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A; }",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return ((packed << 4) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def high_nibbles(packed, ASM: tl.constexpr):
    """16 (code - 8) of the high nibbles of bytes, as int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    return ((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def low_floats(packed, ASM: tl.constexpr):
    """(code - 8) / 512 of the low nibbles of bytes, as float8_e4m3fn: a byte from 0 to 8 is so many 512ths, and bit 7
    is the sign."""
    if ASM:
        bytes = tl.inline_asm_elementwise(
            """{ .reg .b32 top, positive, code, negative;
            shl.b32 top, $1, 4; prmt.b32 positive, top, 0, 0xBA98; and.b32 code, $1, 0x0F0F0F0F;
            sub.u32 negative, 0x88888888, code; and.b32 code, code, 0x07070707;
            lop3.b32 $0, positive, code, negative, 0xCA; }""",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
        return bytes.to(tl.float8e4nv, bitcast=True)
    code = packed & 15
    return tl.where(code > 7, code - 8, 136 - code).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def high_floats(packed, ASM: tl.constexpr):
    """The same of the high nibbles."""
    if ASM:
        bytes = tl.inline_asm_elementwise(
            """{ .reg .b32 positive, code, negative;
            prmt.b32 positive, $1, 0, 0xBA98; shr.b32 code, $1, 4; and.b32 code, code, 0x0F0F0F0F;
            sub.u32 negative, 0x88888888, code; and.b32 code, code, 0x07070707;
            lop3.b32 $0, positive, code, negative, 0xCA; }""",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
        return bytes.to(tl.float8e4nv, bitcast=True)
    code = packed >> 4
    return tl.where(code > 7, code - 8, 136 - code).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def product(
    codes,
    step,
    w,
    w_scale,
    out,
    M,
    N,
    K,
    group_size,
    x_group,
    per_split,
    LARGEST: tl.constexpr,
    FUSED: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT: tl.constexpr,
    FLOAT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: ROWS outputs of TOKENS tokens; DEPTH columns, which share a scale and a step, in each round.

    codes: [M, in] in the order of `round_tokens`, int8 or (FLOAT) float8_e4m3fn, whose sums over DEPTH columns stay in
    the short accumulator of Hopper's tensor cores; or (FUSED) one token in 16 or 32 bits, which each program rounds
    itself to codes up to LARGEST. w: uint8 [out, in / 2].
    step: [M], or (STEPS) [M, in / x_group]; with FUSED one step of all tokens, or None.
    out: y [M, out], or (SPLIT) the sums over each per_split columns, float32 [splits, M, out].
    """
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    byte = tl.arange(0, DEPTH // 2)
    row = w + (output % N).to(tl.int64)[:, None] * (K // 2)
    x = codes + token.to(tl.int64)[None, :] * K + byte[:, None]
    present, groups = (token < M)[None, :], K // group_size
    first, last = 0, K
    if SPLIT:
        first = tl.program_id(2) * per_split
        last = min(first + per_split, K)
    if ASM and (FUSED or EARLY):  # while the token is computed by another kernel, or its largest entry here
        far = tl.minimum(first // 2 + tl.arange(0, 4) * 128, K // 2 - 1)
        prefetch(row + far[None, :])
    await_inputs(EARLY)
    if FUSED:
        top = tl.zeros((WIDTH,), dtype=tl.int32)
        for k in range(0, K, WIDTH):
            column = k + tl.arange(0, WIDTH)
            top = tl.maximum(top, magnitude(tl.load(codes + column, mask=column < K, other=0.0).to(tl.float32)))
        size, inverse = steps(tl.max(top, 0), LARGEST)
        if step is not None:
            size = tl.load(step) + (size - size)  # NaN stays NaN
            inverse = tl.div_rn(1.0, tl.load(step))
    acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for k in range(first, last, DEPTH):
        packed = tl.load(row + byte[None, :] + k // 2)
        if FUSED:
            code = encode(tl.load(codes + k + tl.arange(0, DEPTH)).to(tl.float32) * inverse, LARGEST)
            even, odd = tl.split(tl.reshape(code, (DEPTH // 2, 2)))
            even = tl.broadcast_to(even[:, None], (DEPTH // 2, TOKENS))
            odd = tl.broadcast_to(odd[:, None], (DEPTH // 2, TOKENS))
        else:
            even = tl.load(x + k // 2, mask=present, other=0.0)
            odd = tl.load(x + k // 2 + K // 2, mask=present, other=0.0)
        scale = tl.load(w_scale + (output % N).to(tl.int64) * groups + k // group_size).to(tl.float32)
        if FLOAT:
            sums = tl.dot(low_floats(packed, ASM), even)
            sums = tl.dot(high_floats(packed, ASM), odd, sums)
            scale *= 512.0
        else:
            sums = tl.dot(low_nibbles(packed, ASM), even, out_dtype=tl.int32)
            sums = tl.dot(high_nibbles(packed, ASM), odd, sums, out_dtype=tl.int32)
            scale *= 0.0625
        if STEPS:
            sizes = tl.load(step + token.to(tl.int64) * (K // x_group) + k // x_group, mask=token < M, other=0.0)
            acc += sums.to(tl.float32) * (scale[:, None] * sizes[None, :])
        else:
            acc += sums.to(tl.float32) * scale[:, None]
    if FUSED:
        acc *= size
    elif not STEPS:
        acc *= tl.load(step + token, mask=token < M, other=0.0)[None, :]
    here = present & (output < N)[:, None]
    place = token.to(tl.int64)[None, :] * N + output[:, None]
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * M * N
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=here)


NARROW = {"rows": 64, "tokens": 16, "split": 1, "num_warps": 4, "num_stages": 4}  # up to 16 tokens
SOME = {"rows": 64, "tokens": 64, "split": 1, "num_warps": 4, "num_stages": 3}
WIDE = {"rows": 128, "tokens": 128, "split": 1, "num_warps": 8, "num_stages": 3}


@on_its_device
def w4a8_matmul(
    x: Tensor,
    w: Packed,
    x_bits: int,
    x_group: int | None,
    x_scale: Tensor | None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype; w in symmetric 4-bit rows."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if len(x) == 1 and x_group in (None, x.shape[1]) and x_order is None and not x_wide:
        return _multiplied(x, x_scale, w, x.dtype, x_float, largest_code(x_bits, x_float))
    codes, step = rounded(x, x_bits, x_group, x_scale, x_wide, x_order, x_float)
    return _multiplied(codes, step, w, x.dtype, x_float)


def rounded(
    x: Tensor,
    x_bits: int,
    x_group: int | None,
    x_scale: Tensor | None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes [tokens, in], even columns first, and steps [tokens, groups] of x, whose rows are contiguous."""
    tokens, columns = x.shape
    shared = x_group or columns
    kind = torch.float8_e4m3fn if x_float else torch.int8
    codes = torch.empty(tokens, columns, dtype=kind, device=x.device)
    step = torch.empty(tokens, columns // shared, dtype=torch.float32, device=x.device)
    width = min(triton.next_power_of_2(shared), WIDTH)
    round_tokens[(tokens, columns // shared)](
        x, step if x_scale is None else x_scale, codes if x_order is None else x_order, codes, step, columns,
        x.stride(0), shared, columns // shared, x_wide, LARGEST=largest_code(x_bits, x_float),
        STATIC=x_scale is not None, EACH=x_scale is not None and x_scale.numel() > 1, ORDERED=x_order is not None,
        FLOAT=x_float, WIDTH=width, **launch_options(x.device), num_warps=min(8, max(1, width // 512)),
    )  # fmt: skip
    return codes, step


def largest_code(x_bits: int, x_float: bool) -> float:
    return 448.0 if x_float else 127.0 if x_bits == 8 else 7.0


@on_its_device
def multiplied(codes: Tensor, step: Tensor, w: Packed, dtype: torch.dtype) -> Tensor:
    """y [tokens, out] in this dtype, from codes [tokens, in], even columns first, and steps [tokens, groups]."""
    return _multiplied(codes, step, w, dtype, codes.dtype == torch.float8_e4m3fn)


def _multiplied(
    x: Tensor, step: Tensor | None, w: Packed, dtype: torch.dtype, float8: bool, largest: float | None = None
) -> Tensor:
    """largest: None: x holds codes. The largest code: x is one token that is rounded in the product, with one step that
    is given or None."""
    (tokens, columns), out, fused = x.shape, w.shape[0], largest is not None
    shared = columns if fused else columns // step.shape[1]
    y = torch.empty(tokens, out, dtype=dtype, device=x.device)
    c, depth = settings(w, tokens, float8), depth_of(common_group(w, shared))
    per_split = triton.cdiv(columns, c["split"] * depth) * depth
    splits = triton.cdiv(columns, per_split)
    sums = y if splits == 1 else torch.empty(splits, tokens, out, dtype=torch.float32, device=x.device)
    product[(triton.cdiv(out, c["rows"]), triton.cdiv(tokens, c["tokens"]), splits)](
        x, step, w.codes, w.scale, sums, tokens, out, columns, w.group_size, shared, per_split,
        LARGEST=largest, FUSED=fused, STEPS=shared < columns, SPLIT=splits > 1, FLOAT=float8, ASM=not interpreting(),
        ROWS=c["rows"], TOKENS=c["tokens"], DEPTH=depth,
        WIDTH=min(triton.next_power_of_2(columns), WIDTH) if fused else 1, **launch_options(x.device),
        num_warps=c["num_warps"], num_stages=c["num_stages"],
    )  # fmt: skip
    if splits > 1:  # the sums are scaled already
        gathered(sums, sums, sums, y, True)
    return y


def depth_of(group: int) -> int:
    """Number of columns in a round: a divisor of the group."""
    return 128 if group % 128 == 0 else 64


def settings(w: Packed, tokens: int, float8: bool = False) -> dict:
    """The configuration for a call."""
    (out, columns), processors = w.shape, multiprocessors(w.codes.device)
    full = triton.cdiv(tokens, WIDE["tokens"]) * triton.cdiv(out, WIDE["rows"])
    wanted = WIDE if full >= processors else SOME
    if tokens <= NARROW["tokens"]:
        programs, most = triton.cdiv(out, NARROW["rows"]), columns // (4 * 128)  # a split has at least four rounds
        enough = triton.cdiv(2 * processors, programs) if programs < processors else 1
        wanted = {**NARROW, "split": max(1, min(enough, most))}
    return configuration("w4a8_matmul", key(w, tokens, float8), wanted)


def candidates(tokens: int) -> list[dict]:
    """Configurations worth trying for this number of tokens."""
    if tokens <= NARROW["tokens"]:
        shapes = (64, 1), (64, 2), (64, 4), (64, 8), (128, 1), (128, 4)
        return [{**NARROW, "rows": rows, "split": split} for rows, split in shapes]
    return [NARROW, SOME, {**SOME, "rows": 128}, WIDE, {**WIDE, "num_stages": 4}]


def key(w: Packed, tokens: int, float8: bool = False) -> str:
    """The key of a configuration; the number of tokens is rounded up to a power of two."""
    return f"{'fp8 ' * float8}g{w.group_size} m{triton.next_power_of_2(tokens)} n{w.shape[0]} k{w.shape[1]}"


def shipped() -> list[Compilation]:
    found = []
    for kind, static, ordered, float8 in (
        ("bf16", False, False, False),
        ("fp32", True, False, False),
        ("bf16", False, True, False),
        ("bf16", False, False, True),
    ):
        found.append(
            Compilation(
                name=f"w4a8_matmul round {kind}{' static' * static}{' ordered' * ordered}{' to fp8' * float8}",
                kernel=round_tokens,
                arguments={
                    "x": f"*{kind}", "fixed": "*fp32", "order": "*i32", "codes": "*fp8e4nv" if float8 else "*i8",
                    "step": "*fp32", "columns": "i32", "stride": "i32", "group": "i32", "groups": "i32", "wide": "i32",
                },
                constants={
                    "LARGEST": 448.0 if float8 else 7.0, "STATIC": static, "EACH": False, "ORDERED": ordered,
                    "FLOAT": float8, "WIDTH": WIDTH,
                },
                num_warps=8,
                multiple_of_16=("columns", "stride", "group"),
            )
        )  # fmt: skip
    for title, c, depth, several, float8, split, largest in (
        ("narrow g128", NARROW, 128, False, False, False, None), ("narrow g64", NARROW, 64, False, False, False, None),
        ("narrow g128, split", NARROW, 128, False, False, True, None),
        ("64 tokens g128", SOME, 128, False, False, False, None),
        ("128 tokens g128", WIDE, 128, False, False, False, None),
        ("128 tokens g64", WIDE, 64, False, False, False, None),
        ("128 tokens g128, steps by group", WIDE, 128, True, False, False, None),
        ("narrow g128, fp8", NARROW, 128, False, True, False, None),
        ("64 tokens g128, fp8", SOME, 128, False, True, False, None),
        ("128 tokens g128, fp8", WIDE, 128, False, True, False, None),
        ("fused g128", NARROW, 128, False, False, False, 127.0), ("fused g64", NARROW, 64, False, False, False, 7.0),
        ("fused g128, split", NARROW, 128, False, False, True, 127.0),
        ("fused g128, fp8", NARROW, 128, False, True, False, 448.0),
    ):  # fmt: skip
        read = ("*bf16", None) if largest else ("*fp8e4nv" if float8 else "*i8", "*fp32")
        found.append(
            Compilation(
                name=f"w4a8_matmul product {title}",
                kernel=product,
                arguments={
                    "codes": read[0], **({"step": read[1]} if read[1] else {}), "w": "*u8", "w_scale": "*bf16",
                    "out": "*fp32" if split else "*bf16", "M": "i32", "N": "i32", "K": "i32", "group_size": "i32",
                    "x_group": "i32", "per_split": "i32",
                },
                constants={
                    "LARGEST": largest, "FUSED": largest is not None, "STEPS": several, "SPLIT": split, "FLOAT": float8,
                    "ASM": True, "ROWS": c["rows"], "TOKENS": c["tokens"], "DEPTH": depth,
                    "WIDTH": WIDTH if largest else 1, **({"step": None} if largest else {}),
                },
                num_warps=c["num_warps"],
                num_stages=c["num_stages"],
                multiple_of_16=("N", "K", "group_size", "x_group", "per_split"),
                expects=("QGMMA" if float8 else "IGMMA",),
            )
        )  # fmt: skip
    return found
