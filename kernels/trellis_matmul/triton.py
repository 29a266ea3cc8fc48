"""`trellis_matmul` with Triton: walks are decoded in registers for few tokens, and into a dense matrix for more."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from kernels.capability import multiprocessors, on_its_device
from kernels.interpreter import interpreting, prepare
from kernels.trellis_matmul.layout import MULTIPLIER, Trellis
from kernels.tuning import Compilation, configuration

prepare()

FEW = 8  # largest number of tokens for which weights are decoded in registers
FACTOR = tl.constexpr(MULTIPLIER)


@triton.jit
def sum_of_bytes(hashed, ASM: tl.constexpr):
    """The sum of the four signed bytes of int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x01010101; dp4a.s32.s32 $0, $1, one, 0; }",
            "=r,r",
            [hashed],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return ((hashed << 24) >> 24) + ((hashed << 16) >> 24) + ((hashed << 8) >> 24) + (hashed >> 24)


@triton.jit
def two_words(words, at, total, mask):
    """32 bits of each walk from word `at` on; after the last word comes the first."""
    low = tl.load(words + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
    high = tl.load(words + (at + 1) % total, mask=mask, other=0).to(tl.int32)
    return low | (high << 16)


@triton.jit
def decoded(words, group, groups, present, BITS: tl.constexpr, STATES: tl.constexpr, ASM: tl.constexpr):
    """float32 [columns, 16 groups]: the values of 16 rows for each group.

    words: pointers [columns, 1] to the 16-bit words of a walk. group: [1, G]. present: bool [columns, G].
    """
    row = tl.arange(0, 16)[None, None, :]
    bit = row * BITS
    total, at = groups * BITS, group * BITS
    bits = two_words(words, at, total, present)[:, :, None]
    for i in tl.static_range(1, BITS):
        bits = tl.where(bit // 16 == i, two_words(words, at + i, total, present)[:, :, None], bits)
    state = (bits >> (bit % 16)) & ((1 << STATES) - 1)
    hashed = (state.to(tl.uint32) * FACTOR).to(tl.int32, bitcast=True)
    value = sum_of_bytes(hashed, ASM).to(tl.float32)
    return tl.reshape(value, (value.shape[0], value.shape[1] * 16))


@triton.jit
def few_kernel(
    x,
    words,
    y,
    tokens,
    x_row,
    columns,
    share,
    groups,
    y_rows,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    ASM: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: 16 GROUPS rows of one walk, times `share` columns of all tokens.

    words: 16 bits each, [segments, columns, groups BITS]. y: float32 [parts, tokens, y_rows], before scales.
    """
    pieces = tl.cdiv(groups, GROUPS)
    segment, piece, part = tl.program_id(0) // pieces, tl.program_id(0) % pieces, tl.program_id(1)
    group = piece * GROUPS + tl.arange(0, GROUPS)
    token = tl.arange(0, TOKENS)
    here = token < tokens
    walks = words + segment.to(tl.int64) * columns * groups * BITS
    acc = tl.zeros((TOKENS, COLUMNS, GROUPS * 16), dtype=tl.float32)
    for start in range(part * share, min((part + 1) * share, columns), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        given = tl.load(
            x + token[:, None].to(tl.int64) * x_row + column[None, :], mask=here[:, None] & inside[None, :], other=0.0
        )
        present = inside[:, None] & (group < groups)[None, :]
        of = walks + column[:, None] * (groups * BITS)
        value = decoded(of, group[None, :], groups, present, BITS, STATES, ASM)
        acc += given.to(tl.float32)[:, :, None] * value[None, :, :]
    row = piece * (GROUPS * 16) + tl.arange(0, GROUPS * 16)
    place = (part * tokens + token[:, None]).to(tl.int64) * y_rows + segment * (groups * 16) + row[None, :]
    tl.store(y + place, tl.sum(acc, axis=1), mask=here[:, None] & (row < groups * 16)[None, :])


@triton.jit
def decode_kernel(
    words,
    scale,
    W,
    rows,
    columns,
    groups,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    ASM: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: decodes 16 GROUPS rows of one walk and COLUMNS columns of W [rows, columns]."""
    pieces = tl.cdiv(groups, GROUPS)
    segment, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    group = piece * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    of = words + (segment.to(tl.int64) * columns + column[:, None]) * (groups * BITS)
    present = inside[:, None] & (group < groups)[None, :]
    value = decoded(of, group[None, :], groups, present, BITS, STATES, ASM)  # [COLUMNS, 16 GROUPS]
    own = piece * (GROUPS * 16) + tl.arange(0, GROUPS * 16)
    row = segment * (groups * 16) + own
    real = (own < groups * 16) & (row < rows)
    value = value * tl.load(scale + row, mask=real, other=0.0)[None, :]
    place = W + row[None, :].to(tl.int64) * columns + column[:, None]
    tl.store(place, value.to(W.dtype.element_ty), mask=inside[:, None] & real[None, :])


def decode(w: Trellis, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [out, in]."""
    return _decode(w.codes, w, dtype)


@on_its_device
def _decode(codes: Tensor, w: Trellis, dtype: torch.dtype) -> Tensor:
    segments, columns, _ = codes.shape
    W = torch.empty(w.shape, dtype=dtype, device=codes.device)
    groups, c = w.length // 16, DECODE
    decode_kernel[(segments * triton.cdiv(groups, c["GROUPS"]), triton.cdiv(columns, c["COLUMNS"]))](
        words_of(w), w.scale, W, w.shape[0], columns, groups, BITS=w.bits, STATES=w.states, ASM=not interpreting(), **c
    )
    return W


@on_its_device
def trellis_matmul(x: Tensor, w: Trellis) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype."""
    tokens, out = x.shape[0], w.shape[0]
    if tokens > FEW:
        return linear(x, decode(w, x.dtype))
    x = x if x.stride(1) == 1 else x.contiguous()
    segments, columns, _ = w.codes.shape
    groups, rows = w.length // 16, segments * w.length
    c = dict(configuration("trellis_matmul", key(w, tokens), heuristic(w, tokens)))
    parts = c.pop("parts")
    share = triton.cdiv(triton.cdiv(columns, c["COLUMNS"]), parts) * c["COLUMNS"]
    y = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x.device)
    if tokens:
        few_kernel[(segments * triton.cdiv(groups, c["GROUPS"]), parts)](
            x, words_of(w), y, tokens, x.stride(0), columns, share, groups, rows,
            BITS=w.bits, STATES=w.states, ASM=not interpreting(), TOKENS=triton.next_power_of_2(tokens), **c,
        )  # fmt: skip
    return (y.sum(0)[:, :out] * w.scale).to(x.dtype)


def words_of(w: Trellis) -> Tensor:
    """The codes as int16; a walk has an even number of bytes."""
    return w.codes.contiguous().view(torch.int16)


DECODE = {"GROUPS": 4, "COLUMNS": 64, "num_warps": 4}


def key(w: Trellis, tokens: int) -> str:
    """The key of a configuration; the number of tokens is rounded up to a power of two."""
    return f"w{w.bits} s{w.states} m{triton.next_power_of_2(max(tokens, 1))} n{w.shape[0]} k{w.shape[1]}"


def heuristic(w: Trellis, tokens: int) -> dict[str, int]:
    """Tiles of 32 sums per thread and token for one token, fewer for more; enough parts for all multiprocessors."""
    wide = {"GROUPS": 4, "COLUMNS": 64} if tokens <= 1 else {"GROUPS": 2, "COLUMNS": 64 if tokens <= 4 else 32}
    return _with_parts(w, {**wide, "num_warps": 4})


def candidates(w: Trellis, tokens: int) -> list[dict[str, int]]:
    """Configurations worth timing, the heuristic's first; registers hold at most 64 sums per thread."""
    first, rows = heuristic(w, tokens), triton.next_power_of_2(tokens)
    tiles = [(g, c) for g, c in ((4, 32), (2, 64), (2, 32), (8, 32), (1, 128)) if 16 * g * c * rows <= 128 * 64]
    others = [_with_parts(w, {"GROUPS": g, "COLUMNS": c, "num_warps": 4}) for g, c in tiles]
    return [first, *(o for o in others if o != first), {**first, "parts": 2 * first["parts"]}]


def _with_parts(w: Trellis, tile: dict[str, int]) -> dict[str, int]:
    programs = w.codes.shape[0] * triton.cdiv(w.length // 16, tile["GROUPS"])
    most = triton.cdiv(w.shape[1], tile["COLUMNS"])
    return {**tile, "parts": max(1, min(most, triton.cdiv(4 * multiprocessors(w.codes.device), programs)))}


def shipped() -> list[Compilation]:
    """The compilations that the heuristic selects at 14336 x 4096, in bfloat16."""
    found = []
    for bits, tokens in ((2, 1), (2, 4), (2, 8), (3, 1), (4, 1)):
        codes = torch.empty(56, 4096, 256 * bits // 8, dtype=torch.uint8, device="meta")
        w = Trellis(codes, torch.empty(14336, device="meta"), bits, 14, (14336, 4096))
        c = heuristic(w, tokens)
        sizes = ("tokens", "x_row", "columns", "share", "groups", "y_rows")
        found.append(
            Compilation(
                name=f"trellis_matmul {bits} bits m{tokens}",
                kernel=few_kernel,
                arguments={"x": "*bf16", "words": "*i16", "y": "*fp32"} | dict.fromkeys(sizes, "i32"),
                constants={
                    "BITS": bits, "STATES": 14, "ASM": True, "TOKENS": tokens, "GROUPS": c["GROUPS"],
                    "COLUMNS": c["COLUMNS"],
                },
                num_warps=c["num_warps"],
                multiple_of_16=("x_row", "columns", "share", "groups", "y_rows"),
                expects=("IDP",),
            )
        )  # fmt: skip
    for bits in (2, 3):
        found.append(
            Compilation(
                name=f"trellis_matmul decode {bits} bits",
                kernel=decode_kernel,
                arguments={"words": "*i16", "scale": "*fp32", "W": "*bf16", "rows": "i32", "columns": "i32",
                           "groups": "i32"},
                constants={
                    "BITS": bits, "STATES": 14, "ASM": True, "GROUPS": DECODE["GROUPS"], "COLUMNS": DECODE["COLUMNS"],
                },
                num_warps=DECODE["num_warps"],
                multiple_of_16=("rows", "columns", "groups"),
            )
        )  # fmt: skip
    return found
