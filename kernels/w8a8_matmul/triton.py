"""The Triton kernels of `w8a8_matmul`: `narrow` for few tokens, `tile` for many, and the quantisation of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.capability import multiprocessors, on_its_device
from kernels.interpreter import interpreting, prepare
from kernels.launch_order import await_inputs, prefetch
from kernels.tuning import Compilation, configuration, launch_options
from kernels.w8a8_matmul.layout import BLOCK, LARGEST, W8

prepare()

NARROW = 64  # largest number of tokens for which `narrow` is used
WIDTH = 4096  # number of columns that a program reads in one step of quantisation
EVERY = tl.constexpr(128)  # columns of fp8 products summed in Hopper's short accumulator before adding to float32


@triton.jit
def steps(bits, largest):
    """Step and inverse step from the bits of the largest |x|; NaN and 0 if it is not finite."""
    top = tl.maximum(bits.to(tl.float32, bitcast=True), 7.888609052210118e-31)  # 2^-100
    finite = bits < 0x7F800000
    return tl.where(finite, tl.div_rn(top, largest), float("nan")), tl.where(finite, tl.div_rn(largest, top), 0.0)


@triton.jit
def magnitude(v):
    """Bits of |v|: as integers they have the order of |v|, infinity above finite values and NaN above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode(v, LARGEST: tl.constexpr):
    """Codes of float32 in units of the step: float8 if LARGEST is 448, else int8. The bounds prevent the compiler from
    fusing product and sum, which would omit one rounding."""
    v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
    if LARGEST == 448.0:
        return v.to(tl.float8e4nv)
    else:  # 1.5 * 2^23: the sum's last byte is v to nearest even
        return (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize(
    x,
    fixed,
    codes,
    scale,
    columns,
    stride,
    codes_stride,
    groups,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one token, one group of GROUP columns (0: all of them). Codes beyond the last column are zeros."""
    await_inputs(EARLY)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = group * GROUP
    end = columns
    if GROUP:
        end = min(columns, start + GROUP)
    top = tl.zeros((WIDTH,), dtype=tl.int32)
    for k in range(start, end, WIDTH):
        column = k + tl.arange(0, WIDTH)
        v = tl.load(x + token * stride + column, mask=column < end, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(v))
    step, inverse = steps(tl.max(top, 0), LARGEST)
    if STATIC:
        step = tl.load(fixed) + (step - step)  # NaN stays NaN
        inverse = tl.div_rn(1.0, tl.load(fixed))
    tl.store(scale + token * groups + group, step)
    for k in range(start, end, WIDTH):
        column = k + tl.arange(0, WIDTH)
        v = tl.load(x + token * stride + column, mask=column < end, other=0.0).to(tl.float32)
        tl.store(codes + token * codes_stride + column, encode(v * inverse, LARGEST), mask=column < end)


@triton.jit
def narrow(
    x,
    x_scale,
    w,
    w_scale,
    out,
    M,
    N,
    K,
    stride,
    per_split,
    LARGEST: tl.constexpr,
    FUSED: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCKED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: COLUMNS outputs of all tokens over per_split columns of W.

    x:   codes [M, in] with this stride and their scales; or (FUSED) one unquantised token, which each program quantises
        itself.
    out: y [M, out], or (SPLIT) the sums of each split [splits, M, out].
    """
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    row = w + (output % N).to(tl.int64)[:, None] * K
    if PREFETCH and (FUSED or EARLY):  # while the token is computed by another kernel, or its largest entry here
        far = tl.minimum(tl.arange(0, 2 * DEPTH // 128) * 128, K - 1)
        prefetch(row + far[None, :])
    await_inputs(EARLY)
    if FUSED:
        top = tl.zeros((WIDTH,), dtype=tl.int32)
        for k in range(0, K, WIDTH):
            column = k + tl.arange(0, WIDTH)
            top = tl.maximum(top, magnitude(tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)))
        step, inverse = steps(tl.max(top, 0), LARGEST)
        if STATIC:
            step = tl.load(x_scale) + (step - step)
            inverse = tl.div_rn(1.0, tl.load(x_scale))
    acc = tl.zeros((COLUMNS, TOKENS), dtype=tl.int32 if LARGEST == 127.0 and not BLOCKED else tl.float32)
    start = tl.program_id(1) * per_split
    for k in range(start, min(start + per_split, K), DEPTH):
        column = k + depth
        b = tl.load(row + column[None, :], mask=EVEN or (column < K)[None, :], other=0.0)
        if FUSED:
            v = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
            a = tl.broadcast_to(encode(v * inverse, LARGEST)[:, None], (DEPTH, TOKENS))
        else:
            here = (token < M)[None, :] & (column < K)[:, None]
            a = tl.load(x + token.to(tl.int64)[None, :] * stride + column[:, None], mask=here, other=0.0)
        if BLOCKED:
            blocks = tl.cdiv(K, 128)
            block_scale = tl.load(w_scale + tl.program_id(0) * COLUMNS // 128 * blocks + k // 128)
            token_scale = tl.load(x_scale + token * blocks + k // 128, mask=token < M, other=0.0)
            acc += tl.dot(b, a, out_dtype=tl.int32 if LARGEST == 127.0 else tl.float32).to(tl.float32) * (
                block_scale * token_scale[None, :]
            )
        elif LARGEST == 127.0:
            acc = tl.dot(b, a, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(b, a, acc, max_num_imprecise_acc=EVERY)
    here = (token < M)[None, :] & (output < N)[:, None]
    if SPLIT:
        place = (tl.program_id(1).to(tl.int64) * M + token[None, :]) * N + output[:, None]
        tl.store(out + place, acc, mask=here)
    else:
        y = acc.to(tl.float32)
        if not BLOCKED:
            y *= tl.load(w_scale + output, mask=output < N, other=0.0)[:, None]
            if FUSED:
                y *= step
            else:
                y *= tl.load(x_scale + token, mask=token < M, other=0.0)[None, :]
        tl.store(out + token.to(tl.int64)[None, :] * N + output[:, None], y.to(out.dtype.element_ty), mask=here)


@triton.jit
def gather(
    sums, x_scale, w_scale, out, M, N, splits, BLOCKED: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One program: COLUMNS outputs of one token; the splits are added in order."""
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), dtype=sums.dtype.element_ty)
    for s in range(splits):
        acc += tl.load(sums + (s * M + token) * N + output, mask=output < N, other=0)
    y = acc.to(tl.float32)
    if not BLOCKED:
        y = y * tl.load(w_scale + output, mask=output < N, other=0.0) * tl.load(x_scale + token)
    tl.store(out + token * N + output, y.to(out.dtype.element_ty), mask=output < N)


@triton.jit
def tile(
    x,
    x_scale,
    w,
    w_scale,
    out,
    M,
    N,
    K,
    LARGEST: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: ROWS tokens by COLUMNS outputs; x and w are tensor descriptors of codes. Bands of BAND rows of tiles
    run column by column, so that programs that run at once share operands in L2."""
    await_inputs(EARLY)
    tiles = tl.cdiv(N, COLUMNS)
    band = tl.program_id(0) // (BAND * tiles)
    inside = tl.program_id(0) % (BAND * tiles)
    height = min(tl.cdiv(M, ROWS) - band * BAND, BAND)
    first_token = (band * BAND + inside % height) * ROWS
    first_output = inside // height * COLUMNS
    token, output = first_token + tl.arange(0, ROWS), first_output + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.int32 if LARGEST == 127.0 and not BLOCKED else tl.float32)
    for k in range(0, K, DEPTH):
        a, b = x.load([first_token, k]), w.load([first_output, k])
        if BLOCKED:
            blocks = tl.cdiv(K, 128)
            block_scale = tl.load(w_scale + first_output // 128 * blocks + k // 128)
            token_scale = tl.load(x_scale + token.to(tl.int64) * blocks + k // 128, mask=token < M, other=0.0)
            acc += tl.dot(a, b.T, out_dtype=tl.int32 if LARGEST == 127.0 else tl.float32).to(tl.float32) * (
                block_scale * token_scale[:, None]
            )
        elif LARGEST == 127.0:
            acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=EVERY)
    y = acc.to(tl.float32)
    if not BLOCKED:
        y *= tl.load(w_scale + output, mask=output < N, other=0.0)[None, :]
        y *= tl.load(x_scale + token, mask=token < M, other=0.0)[:, None]
    here = (token < M)[:, None] & (output < N)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * N + output[None, :], y.to(out.dtype.element_ty), mask=here)


FUSED = {"columns": 16, "depth": 512, "split": 1, "num_warps": 1, "num_stages": 4}
FEW = {"columns": 64, "depth": 256, "split": 1, "num_warps": 4, "num_stages": 4}  # up to 16 tokens
SOME = {"columns": 64, "depth": 128, "split": 1, "num_warps": 4, "num_stages": 5}
WIDE = {"rows": 128, "columns": 256, "depth": 128, "num_warps": 8, "num_stages": 4}
SQUARE = {"rows": 128, "columns": 128, "depth": 128, "num_warps": 8, "num_stages": 3}
LOW = {"rows": 64, "columns": 128, "depth": 128, "num_warps": 4, "num_stages": 4}
CANDIDATES = {
    "one token": [
        FUSED, {**FUSED, "depth": 256, "num_stages": 5}, {**FUSED, "depth": 1024, "num_stages": 3},
        {**FUSED, "columns": 32, "depth": 256, "num_warps": 2},
        {**FUSED, "columns": 32, "depth": 512, "num_warps": 2, "num_stages": 3}, {**FEW, "num_stages": 3},
    ],
    "narrow": [
        {**FEW, "split": 1, "depth": 128, "num_stages": 6}, {**SOME, "split": 2}, {**SOME, "split": 4},
        {**SOME, "split": 8}, {**SOME, "columns": 128, "split": 1}, {**SOME, "columns": 128, "split": 4},
        {**SOME, "columns": 128, "split": 8},
    ],
    "tile": [
        WIDE, {**WIDE, "num_stages": 3}, SQUARE, {**SQUARE, "num_stages": 4}, {**SQUARE, "num_warps": 4}, LOW,
        {**LOW, "num_stages": 3}, {**SQUARE, "depth": 256},
    ],
}  # fmt: skip


@on_its_device
def w8a8_matmul(x: Tensor, w: W8, x_scale: Tensor | None) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype; w in rows."""
    (tokens, columns), dtype, blocked = x.shape, x.dtype, w.scale.dim() == 2
    kernel, c = settings(tokens, w.shape[0], columns, w.codes.dtype, blocked, x.device)
    fused = kernel == "one token" and c["split"] == 1
    a, scale = (x.contiguous(), x_scale) if fused else quantized(x, w.codes.dtype, x_scale, blocked)
    return _multiplied(kernel, c, fused, a, scale, w, dtype)


@on_its_device
def multiplied(codes: Tensor, scale: Tensor, w: W8, dtype: torch.dtype) -> Tensor:
    """y [tokens, out] in this dtype, from codes [tokens, in], whose row stride is a multiple of 16, and their scale
    [tokens, groups]."""
    tokens, columns = codes.shape
    how = settings(tokens, w.shape[0], columns, codes.dtype, w.scale.dim() == 2, codes.device)
    return _multiplied(*how, False, codes, scale, w, dtype)


def _multiplied(
    kernel: str, c: dict, fused: bool, x: Tensor, x_scale: Tensor | None, w: W8, dtype: torch.dtype
) -> Tensor:
    """x: codes, or (fused) one unquantised token."""
    out, codes, w_scale, blocked = w.shape[0], w.codes, w.scale.contiguous(), w.scale.dim() == 2
    if codes.data_ptr() % 16:
        codes = codes.clone()
    y = torch.empty(len(x), out, dtype=dtype, device=x.device)
    if out == 0:
        return y
    if kernel == "tile":
        _tile(c, LARGEST[codes.dtype], x, x_scale, codes, w_scale, y, blocked)
    else:
        single = kernel == "one token" and c["split"] == 1
        _narrow(c, LARGEST[codes.dtype], fused, single, x, x_scale, codes, w_scale, y, blocked)
    return y


def settings(
    tokens: int, out: int, columns: int, dtype: torch.dtype, blocked: bool, device: torch.device | None = None
) -> tuple[str, dict]:
    """The kernel ("one token", "narrow" or "tile") for a call, and its configuration."""
    int8, processors = dtype == torch.int8, multiprocessors(device)
    if tokens > NARROW:
        kernel, wanted = "tile", LOW
        for shape in (WIDE, SQUARE, LOW) if int8 else (SQUARE, LOW):  # WIDE has no registers left for fp8's second sums
            wanted = shape
            if triton.cdiv(tokens, shape["rows"]) * triton.cdiv(out, shape["columns"]) >= 0.8 * processors:
                break
    elif tokens == 1 and not blocked:
        kernel, wanted = "one token", FUSED
    else:
        kernel, wanted = "narrow", FEW if tokens <= 16 and not blocked else SOME
        tiles = max(1, triton.cdiv(out, wanted["columns"]))
        if tiles < processors:
            most = max(1, columns // (4 * wanted["depth"]))  # a split has at least four steps
            wanted = {**wanted, "split": min(triton.cdiv(2 * processors, tiles), most)}
    return kernel, wanted if blocked else configuration("w8a8_matmul", key(tokens, out, columns, dtype), wanted)


def candidates(tokens: int, dtype: torch.dtype) -> list[dict]:
    """Configurations worth trying for this number of tokens."""
    kernel = settings(tokens, 1, 1, dtype, False)[0]
    return [c for c in CANDIDATES[kernel] if dtype == torch.int8 or c.get("columns") != WIDE["columns"]]


def key(tokens: int, out: int, columns: int, dtype: torch.dtype) -> str:
    """The key of a configuration; the number of tokens is rounded up to a power of two."""
    kind = "int8" if dtype == torch.int8 else "fp8"
    return f"{kind} m{triton.next_power_of_2(tokens)} n{out} k{columns}"


def quantized(x: Tensor, dtype: torch.dtype, x_scale: Tensor | None, blocked: bool) -> tuple[Tensor, Tensor]:
    """Codes [tokens, in], whose row stride is a multiple of 16 bytes, and scale [tokens, groups]."""
    tokens, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    groups = triton.cdiv(columns, BLOCK) if blocked else 1
    codes = torch.empty(tokens, triton.cdiv(columns, 16) * 16, dtype=dtype, device=x.device)
    scale = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    width = BLOCK if blocked else min(triton.next_power_of_2(columns), WIDTH)
    quantize[(tokens, groups)](
        x,
        scale if x_scale is None else x_scale,
        codes,
        scale,
        columns,
        x.stride(0),
        codes.stride(0),
        groups,
        LARGEST=LARGEST[dtype],
        STATIC=x_scale is not None,
        GROUP=BLOCK if blocked else 0,
        WIDTH=width,
        **launch_options(x.device),
        num_warps=min(8, max(1, width // 512)),
    )
    return codes[:, :columns], scale


def _narrow(
    c: dict,
    largest: float,
    fused: bool,
    single: bool,
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    y: Tensor,
    blocked: bool,
) -> None:
    (tokens, columns), out = x.shape, w.shape[0]
    per_split = triton.cdiv(triton.cdiv(columns, c["split"]), c["depth"]) * c["depth"]
    splits = triton.cdiv(columns, per_split)
    kind = torch.int32 if largest == 127 and not blocked else torch.float32
    target = y if splits == 1 else torch.empty(splits, tokens, out, dtype=kind, device=y.device)
    narrow[(triton.cdiv(out, c["columns"]), splits)](
        x,
        w_scale if x_scale is None else x_scale,
        w,
        w_scale,
        target,
        tokens,
        out,
        columns,
        x.stride(0),
        per_split,
        LARGEST=largest,
        FUSED=fused,
        STATIC=x_scale is not None,
        BLOCKED=blocked,
        SPLIT=splits > 1,
        EVEN=columns % c["depth"] == 0,
        PREFETCH=not interpreting(),
        TOKENS=1 if single else max(16, triton.next_power_of_2(tokens)),
        COLUMNS=c["columns"],
        DEPTH=c["depth"],
        WIDTH=min(triton.next_power_of_2(columns), WIDTH) if fused else 1,
        **launch_options(x.device),
        num_warps=c["num_warps"],
        num_stages=c["num_stages"],
    )
    if splits > 1:
        gathered(target, x_scale, w_scale, y, blocked)


@on_its_device
def gathered(sums: Tensor, x_scale: Tensor, w_scale: Tensor, y: Tensor, blocked: bool) -> Tensor:
    """y [tokens, out], filled with the sums [splits, tokens, out] of all splits, in units of the scales."""
    splits, tokens, out = sums.shape
    wide = min(1024, triton.next_power_of_2(out))
    gather[(tokens, triton.cdiv(out, wide))](
        sums, x_scale, w_scale, y, tokens, out, splits, BLOCKED=blocked, COLUMNS=wide, **launch_options(y.device)
    )
    return y


def _tile(
    c: dict, largest: float, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, y: Tensor, blocked: bool
) -> None:
    (tokens, columns), out = x.shape, w.shape[0]
    if columns % 16:  # a stride that the copy engine does not support; no common model has such a weight
        w = torch.nn.functional.pad(w.view(torch.int8), (0, -columns % 16)).view(w.dtype)[:, :columns]
    a = TensorDescriptor(x, [tokens, columns], [x.stride(0), 1], [c["rows"], c["depth"]])
    b = TensorDescriptor(w, [out, columns], [w.stride(0), 1], [c["columns"], c["depth"]])
    tile[(triton.cdiv(tokens, c["rows"]) * triton.cdiv(out, c["columns"]),)](
        a,
        x_scale,
        b,
        w_scale,
        y,
        tokens,
        out,
        columns,
        LARGEST=largest,
        BLOCKED=blocked,
        ROWS=c["rows"],
        COLUMNS=c["columns"],
        DEPTH=c["depth"],
        BAND=8,
        **launch_options(x.device),
        num_warps=c["num_warps"],
        num_stages=c["num_stages"],
    )


def shipped() -> list[Compilation]:
    found = []
    for name, code, largest in (("int8", "i8", 127.0), ("fp8", "fp8e4nv", 448.0)):
        mma = {"int8": "IGMMA", "fp8": "QGMMA"}[name]
        small = {"int8": "IMMA", "fp8": "HMMA"}[
            name
        ]  # sm_90 has no narrow fp8 product: codes become fp16, losing nothing
        for group, kind in ((0, "bf16"), (0, "fp32"), (BLOCK, "bf16")):
            width = group or WIDTH
            found.append(
                Compilation(
                    name=f"w8a8_matmul {name} quantize{f' by {group}' if group else ''} {kind}",
                    kernel=quantize,
                    arguments={
                        "x": f"*{kind}",
                        "fixed": "*fp32",
                        "codes": f"*{code}",
                        "scale": "*fp32",
                        "columns": "i32",
                        "stride": "i32",
                        "codes_stride": "i32",
                        "groups": "i32",
                    },
                    constants={"LARGEST": largest, "STATIC": False, "GROUP": group, "WIDTH": width},
                    num_warps=min(8, max(1, width // 512)),
                    multiple_of_16=("columns", "stride", "codes_stride"),
                )
            )
        for tokens, c, split, blocked, static in (
            (1, FUSED, False, False, False),
            (1, FUSED, False, False, True),
            (1, FUSED, False, False, None),
            (16, FEW, False, False, False),
            (16, FEW, True, False, False),
            (32, SOME, True, False, False),
            (64, SOME, False, False, False),
            (64, SOME, True, False, False),
            (16, SOME, True, True, False),
        ):
            fused = tokens == 1 and static is not None  # None: the codes are given
            what = "fused" if fused else "one token" if tokens == 1 else f"{tokens} tokens"
            sums = "i32" if name == "int8" and not blocked else "fp32"
            found.append(
                Compilation(
                    name=f"w8a8_matmul {name} {what}{' split' * split}{' blocks' * blocked}{' static' * bool(static)}",
                    kernel=narrow,
                    arguments={
                        "x": "*bf16" if fused else f"*{code}",
                        "x_scale": "*fp32",
                        "w": f"*{code}",
                        "w_scale": "*fp32",
                        "out": f"*{sums}" if split else "*bf16",
                        "M": "i32",
                        "N": "i32",
                        "K": "i32",
                        "stride": "i32",
                        "per_split": "i32",
                    },
                    constants={
                        "LARGEST": largest,
                        "FUSED": fused,
                        "STATIC": bool(static),
                        "BLOCKED": blocked,
                        "SPLIT": split,
                        "EVEN": True,
                        "PREFETCH": True,
                        "TOKENS": tokens,
                        "COLUMNS": c["columns"],
                        "DEPTH": c["depth"],
                        "WIDTH": WIDTH if fused else 1,
                    },
                    num_warps=c["num_warps"],
                    num_stages=c["num_stages"],
                    multiple_of_16=("N", "K", "stride", "per_split"),
                    expects=(small if tokens == 1 else mma,),
                )
            )
        for title, c, blocked in (
            ("128x256", WIDE, False),
            ("128x128", SQUARE, False),
            ("64x128", LOW, False),
            ("128x128 blocks", SQUARE, True),
            ("64x128 blocks", LOW, True),
        ):
            if c is WIDE and name == "fp8":
                continue
            found.append(
                Compilation(
                    name=f"w8a8_matmul {name} tile {title}",
                    kernel=tile,
                    arguments={
                        "x": f"tensordesc<{code}[{c['rows']},{c['depth']}]>",
                        "x_scale": "*fp32",
                        "w": f"tensordesc<{code}[{c['columns']},{c['depth']}]>",
                        "w_scale": "*fp32",
                        "out": "*bf16",
                        "M": "i32",
                        "N": "i32",
                        "K": "i32",
                    },
                    constants={
                        "LARGEST": largest,
                        "BLOCKED": blocked,
                        "ROWS": c["rows"],
                        "COLUMNS": c["columns"],
                        "DEPTH": c["depth"],
                        "BAND": 8,
                    },
                    num_warps=c["num_warps"],
                    num_stages=c["num_stages"],
                    multiple_of_16=("N", "K"),
                    expects=(mma,),
                )
            )
    for sums, blocked in (("i32", False), ("fp32", False), ("fp32", True)):
        found.append(
            Compilation(
                name=f"w8a8_matmul gather {sums}{' blocks' * blocked}",
                kernel=gather,
                arguments={
                    "sums": f"*{sums}",
                    "x_scale": "*fp32",
                    "w_scale": "*fp32",
                    "out": "*bf16",
                    "M": "i32",
                    "N": "i32",
                    "splits": "i32",
                },
                constants={"BLOCKED": blocked, "COLUMNS": 1024},
                multiple_of_16=("N",),
            )
        )
    return found
