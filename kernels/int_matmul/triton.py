"""`int_matmul` with Triton, over the `rows` layout: which kernel takes a product, and how it is launched.

- few tokens (`few`): each warp unpacks all rows of a block, and its share of the columns, into operands of mma.sync;
- more tokens (`many`): wgmma, with W from registers; columns split between programs where there are too few;
- many tokens, float32 activations, and what the others cannot read: dequantise slab by slab, and cuBLAS.

The kernels read the canonical layout as it is; unpack.py says how, README.md what it costs.
"""

from kernels.interpreter import prepare

prepare()

from collections.abc import Callable  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.int_matmul.layout import Packed  # noqa: E402
from kernels.int_matmul.products import dequantise, few, many, reduce  # noqa: E402
from kernels.linear import without_tf32  # noqa: E402
from kernels.tuning import Compilation, configuration  # noqa: E402

CROSSOVER = 512  # tokens from which the heuristic dequantises and calls cuBLAS
SLAB = 32 << 20  # bytes dequantised at a time: cuBLAS finds them in the L2 cache (60 MB on an H200)
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}  # 128 and 1024, in both halves of a word
MULTIPROCESSORS = 132  # of an H200; the heuristic wants each to have work


class Blocks(NamedTuple):
    """How the fused kernels cut a row."""

    columns: int  # BLOCK_K
    words: int  # V
    word_scales: bool
    group: int  # columns that share a scale, 0: all


def blocks(w: Packed) -> Blocks | None:
    """None where only the dequantising kernel reads this weight: 5 and 6 bits, rows that are no whole words, odd
    groups."""
    if w.bits not in (2, 3, 4, 8) or w.codes.shape[1] % 4:
        return None
    group = 0 if w.group_size == w.shape[1] else w.group_size
    run, least = (32, 128) if w.bits == 3 else (32 // w.bits, 128 // w.bits)  # codes of one load, columns of one chunk
    columns = min(128, group & -group) if group else 128
    if columns >= max(least, 32):
        return Blocks(columns, 4 if w.bits == 3 else min(4, columns // least), False, group)
    if group % run == 0:  # smaller blocks would be all overhead
        return Blocks(128, 4 if w.bits == 3 else min(4, 128 // least), True, group)
    return None


def key(w: Packed, tokens: int) -> str:
    """What the choice of a configuration depends on; tokens are rounded up to a power of two."""
    return f"w{w.bits} g{w.group_size} m{triton.next_power_of_2(tokens)} n{w.shape[0]} k{w.shape[1]}"


def heuristic(w: Packed, tokens: int) -> dict:
    """{"kind": "few", block_n, block_m, warps, stages}, {"kind": "many", ... splits} or {"kind": "dequantise"}."""
    out, cut = w.shape[0], blocks(w)
    if cut is None or tokens >= CROSSOVER or (cut.word_scales and tokens > 16):
        return {"kind": "dequantise"}
    if tokens <= 16:
        block_n = 32 if out >= 32 * 2 * MULTIPROCESSORS else 16
        warps = 4 if block_n == 32 and cut.columns == 128 else 8
        block_n = min(128, block_n * (128 // cut.columns))  # short groups: more rows, or a round is all overhead
        block_n = max(block_n, min(64, 2 * block_n)) if tokens > 4 else block_n  # x is read again by every block
        block_m = triton.next_power_of_2(tokens)
        return {
            "kind": "few",
            "block_n": block_n,
            "block_m": block_m,
            "warps": warps,
            "stages": 4 if block_m <= 8 else 3,
        }
    block_m = 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    programs = -(-out // 128) * -(-tokens // block_m)
    rounds = -(-w.shape[1] // cut.columns)
    splits = 1
    while splits < 8 and programs * splits < 2 * MULTIPROCESSORS and rounds // (2 * splits) >= 4:
        splits *= 2
    return {
        "kind": "many",
        "block_n": 128,
        "block_m": block_m,
        "warps": 4 if block_m == 32 else 8,
        "stages": 3,
        "splits": splits,
    }


def candidates(w: Packed, tokens: int) -> list[dict]:
    """At most eight configurations worth timing, the heuristic's first."""
    first = heuristic(w, tokens)
    if blocks(w) is None:
        return [first]
    block_m = min(128, triton.next_power_of_2(tokens))
    small = [
        {"kind": "few", "block_n": n, "block_m": block_m, "warps": warps, "stages": stages}
        for n, warps, stages in ((32, 4, 4), (16, 8, 4), (32, 8, 3), (64, 4, 3), (16, 4, 5), (32, 4, 3))
    ]
    block_m = max(16, block_m)
    large = [
        {"kind": "many", "block_n": n, "block_m": m, "warps": warps, "stages": stages, "splits": splits}
        for n, m, warps, stages, splits in (
            (128, block_m, 8, 3, 1),
            (128, block_m, 8, 3, 4),
            (64, block_m, 4, 4, 1),
            (64, block_m, 4, 4, 4),
            (128, min(64, block_m), 8, 4, 2),
        )
    ]
    others = small + large[:1] if tokens <= 16 else large
    if tokens > 128:
        others = [*large[:1], *large[2:3], *large[4:], {"kind": "dequantise"}]
    if blocks(w).word_scales:
        others = [c for c in others if c["kind"] != "many"]
    return ([first] + [c for c in others if c != first])[:8]


def int_matmul(x: Tensor, w: Packed) -> Tensor:
    """y [tokens, out] in x's dtype, from x [tokens, in] in float32, bfloat16 or float16 and `rows`."""
    assert w.layout == "rows" and x.dim() == 2
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[0])
    plan = (
        configuration("int_matmul", key(w, x.shape[0]), heuristic(w, x.shape[0]))
        if x.dtype in MAGIC
        else {"kind": "dequantise"}
    )
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, zero = w.scale.contiguous(), None if w.zero is None else w.zero.contiguous()
    w = w._replace(codes=aligned(w.codes), scale=scale, zero=zero)
    return {"few": _launch_few, "many": _launch_many, "dequantise": _launch_dequantise}[plan["kind"]](x, w, plan)


def _launch_few(x: Tensor, w: Packed, plan: dict) -> Tensor:
    tokens, columns = x.shape
    cut, rows, unit = blocks(w), *as_words(w.codes)
    y = x.new_empty(tokens, w.shape[0])
    warps = fitting_warps(plan, cut, columns)
    step = warps * cut.columns
    grid = (triton.cdiv(tokens, plan["block_m"]), triton.cdiv(w.shape[0], plan["block_n"]))
    few[grid](
        x,
        rows,
        w.scale,
        w.zero,
        y,
        tokens,
        *w.shape,
        x.stride(0),
        rows.shape[1] // unit,
        w.scale.shape[1],
        0 if w.zero is None else w.zero.shape[1],
        triton.cdiv(columns, step),
        MAGIC[x.dtype],
        BITS=w.bits,
        GROUP=cut.group,
        SYMMETRIC=w.zero is None,
        EVEN=columns % step == 0,
        UNIT=unit,
        BLOCK_N=plan["block_n"],
        BLOCK_M=plan["block_m"],
        BLOCK_K=cut.columns,
        V=cut.words,
        WARPS=warps,
        WORD_SCALES=cut.word_scales,
        num_warps=warps,
        num_stages=plan["stages"],
    )
    return y


def _launch_many(x: Tensor, w: Packed, plan: dict) -> Tensor:
    tokens, columns = x.shape
    cut, rows, unit = blocks(w), *as_words(w.codes)
    x = reordered(x, cut, w.bits)
    iterations, splits = divided(plan, cut, columns)
    y, parts = outputs(x, w.shape[0], splits)
    grid = (triton.cdiv(tokens, plan["block_m"]), triton.cdiv(w.shape[0], plan["block_n"]), splits)
    many[grid](
        x,
        rows,
        w.scale,
        w.zero,
        parts,
        tokens,
        *w.shape,
        x.shape[1],
        rows.shape[1] // unit,
        w.scale.shape[1],
        0 if w.zero is None else w.zero.shape[1],
        iterations,
        MAGIC[x.dtype],
        BITS=w.bits,
        GROUP=cut.group,
        SYMMETRIC=w.zero is None,
        UNIT=unit,
        BLOCK_N=plan["block_n"],
        BLOCK_M=plan["block_m"],
        BLOCK_K=cut.columns,
        V=cut.words,
        num_warps=plan["warps"],
        num_stages=plan["stages"],
    )
    return gathered(parts, y)


def _launch_dequantise(x: Tensor, w: Packed, plan: dict) -> Tensor:
    return slab_by_slab(x, w.shape, lambda first, part: dequantise_rows(w, first, part))


def dequantise_rows(w: Packed, first: int, out: Tensor) -> None:
    """Rows first, first + 1, ... of W into out [rows, in], which is contiguous; in float32, rounded once."""
    codes, words = w.codes, 32 % w.bits == 0 and w.codes.shape[1] % 4 == 0 and w.group_size % (32 // w.bits) == 0
    if words:
        codes, _ = as_words(codes)
    end = first + out.shape[0]
    grid = (triton.cdiv(w.shape[1], 256), triton.cdiv(out.shape[0], 16))
    dequantise[grid](
        codes,
        w.scale,
        w.zero,
        out,
        first,
        end,
        w.shape[1],
        codes.shape[1],
        w.scale.shape[1],
        0 if w.zero is None else w.zero.shape[1],
        w.group_size,
        BITS=w.bits,
        SYMMETRIC=w.zero is None,
        WORDS=words,
        ROWS=16,
        COLUMNS=256,
        num_warps=4,
    )


def fitting_warps(plan: dict, cut: Blocks, columns: int) -> int:
    """The plan's warps, but no more than there are blocks of columns."""
    warps = plan["warps"]
    while warps > 1 and (warps // 2) * cut.columns >= columns:
        warps //= 2
    return warps


def divided(plan: dict, cut: Blocks, columns: int) -> tuple[int, int]:
    """Blocks of columns for each program, and into how many splits that divides them: the plan's, or fewer."""
    iterations = triton.cdiv(triton.cdiv(columns, cut.columns), plan["splits"])
    return iterations, triton.cdiv(columns, iterations * cut.columns)


def outputs(x: Tensor, out: int, splits: int) -> tuple[Tensor, Tensor]:
    """y [tokens, out], and where the programs write: y itself, or float32 [splits, tokens, out]."""
    y = x.new_empty(x.shape[0], out)
    return y, y if splits == 1 else x.new_empty(splits, *y.shape, dtype=torch.float32)


def gathered(parts: Tensor, y: Tensor) -> Tensor:
    """y, with the splits' parts summed in order where there are several."""
    if parts is not y:
        reduce[(triton.cdiv(y.numel(), 1024),)](parts, y, y.numel(), SPLITS=parts.shape[0], BLOCK=1024)
    return y


def slab_by_slab(x: Tensor, shape: tuple[int, int], fill: Callable[[int, Tensor], None]) -> Tensor:
    """y [tokens, out] = x Wᵀ by cuBLAS, without TF32; fill(first, part) writes W's rows from `first` on into part
    [rows, in]."""
    out, columns = shape
    y = x.new_empty(x.shape[0], out)
    slabs = triton.cdiv(out * columns * x.itemsize, SLAB)
    rows = triton.cdiv(triton.cdiv(out, slabs), 64) * 64
    slab = x.new_empty(min(rows, out), columns)
    for first in range(0, out, rows):
        part = slab[: min(rows, out - first)]
        fill(first, part)
        with without_tf32():
            torch.mm(x, part.t(), out=y[:, first : first + part.shape[0]])
    return y


def reordered(x: Tensor, cut: Blocks, bits: int) -> Tensor:
    """x with zero columns up to whole blocks, its columns in the order in which `many` multiplies them."""
    pairs = 4 if bits == 3 else 16 // bits
    if x.shape[1] % cut.columns:  # without columns to add it would be a copy all the same
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % cut.columns))
    return x.view(x.shape[0], -1, 4, cut.words, 2, pairs).permute(0, 1, 3, 5, 2, 4).reshape(x.shape)


def as_words(codes: Tensor) -> tuple[Tensor, int]:
    """Codes as int32 [out, words] and the largest of 4, 2 and 1 that divides words: what loads may be aligned to."""
    words = codes.view(torch.int32)
    return words, next(unit for unit in (4, 2, 1) if words.shape[1] % unit == 0)


def aligned(codes: Tensor) -> Tensor:
    """The same bytes, row after row, from an address that 16 divides."""
    codes = codes.contiguous()
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


def shipped() -> list[Compilation]:
    """What the heuristic reaches, at representative widths (in = 4096) and dtypes."""
    found = [
        _compilation(4, 128, True, "bf16", out, tokens)
        for out, tokens in (
            (14336, 1),
            (4096, 1),
            (14336, 4),
            (14336, 8),
            (14336, 16),
            (14336, 32),
            (14336, 64),
            (14336, 256),
        )
    ]
    for bits, group_size, symmetric, dtype in (
        (4, 128, False, "bf16"),
        (4, 64, True, "fp16"),
        (4, 32, True, "bf16"),
        (4, 4096, False, "fp16"),
        (8, 128, True, "bf16"),
        (8, 4096, False, "fp16"),
        (3, 128, True, "bf16"),
        (3, 64, False, "fp16"),
        (2, 128, True, "bf16"),
        (2, 32, False, "fp16"),
    ):
        found.append(_compilation(bits, group_size, symmetric, dtype, 14336, 1))
        if blocks(_meta(bits, group_size, 14336)).word_scales is False and dtype == "bf16":
            found.append(_compilation(bits, group_size, symmetric, dtype, 14336, 64))
    found += [
        _dequantise_compilation(*which)
        for which in (
            (4, 128, True, "bf16"),
            (4, 128, False, "fp16"),
            (8, 128, True, "bf16"),
            (3, 128, False, "bf16"),
            (5, 128, True, "fp32"),
        )
    ]
    arguments = {"parts": "*fp32", "y": "*bf16", "size": "i32"}
    constants = {"SPLITS": 8, "BLOCK": 1024}
    return [*found, Compilation("int_matmul reduce", reduce, arguments, constants, multiple_of_16=("size",))]


def _meta(bits: int, group_size: int, out: int, columns: int = 4096) -> Packed:
    codes = torch.empty(out, -(-columns // 8) * bits, dtype=torch.uint8, device="meta")
    scale = torch.empty(out, columns // group_size, dtype=torch.bfloat16, device="meta")
    return Packed("rows", codes, scale, None, bits, group_size, (out, columns))


def _compilation(bits: int, group_size: int, symmetric: bool, dtype: str, out: int, tokens: int) -> Compilation:
    w = _meta(bits, group_size, out)
    plan, cut = heuristic(w, tokens), blocks(w)
    integers = ("M", "N", "K", "x_stride", "row_units", "groups", "zero_bytes", "iterations", "magic")
    arguments = {
        "x": f"*{dtype}",
        "codes": "*i32",
        "scale": "*bf16",
        "zero": "*u8",
        "y": "*fp32" if plan.get("splits", 1) > 1 else f"*{dtype}",
        **dict.fromkeys(integers, "i32"),
    }
    constants = {
        "BITS": bits,
        "GROUP": cut.group,
        "SYMMETRIC": symmetric,
        "UNIT": 4,
        "BLOCK_N": plan["block_n"],
        "BLOCK_M": plan["block_m"],
        "BLOCK_K": cut.columns,
        "V": cut.words,
    }
    if symmetric:
        constants["zero"] = arguments.pop("zero") and None
    if plan["kind"] == "few":
        constants |= {"EVEN": True, "WARPS": plan["warps"], "WORD_SCALES": cut.word_scales}
    aligned = ("N", "K", "x_stride", "row_units", "magic") + (("groups",) if w.scale.shape[1] % 16 == 0 else ())
    name = f"int_matmul w{bits} g{group_size} {'sym' if symmetric else 'asym'} {dtype} n{out} m{tokens}"
    kernel, expects = (few, "HMMA") if plan["kind"] == "few" else (many, "HGMMA")
    return Compilation(name, kernel, arguments, constants, plan["warps"], plan["stages"], aligned, (expects,))


def _dequantise_compilation(bits: int, group_size: int, symmetric: bool, dtype: str) -> Compilation:
    words = 32 % bits == 0
    arguments = {
        "codes": "*i32" if words else "*u8",
        "scale": "*bf16",
        "zero": "*u8",
        "out": f"*{dtype}",
        **dict.fromkeys(("first", "end", "K", "row_size", "groups", "zero_bytes", "group_size"), "i32"),
    }
    constants = {"BITS": bits, "SYMMETRIC": symmetric, "WORDS": words, "ROWS": 16, "COLUMNS": 256}
    if symmetric:
        constants["zero"] = arguments.pop("zero") and None
    name = f"int_matmul dequantise w{bits} g{group_size} {'sym' if symmetric else 'asym'} {dtype}"
    return Compilation(name, dequantise, arguments, constants, 4, 3, ("first", "end", "K", "row_size", "group_size"))
