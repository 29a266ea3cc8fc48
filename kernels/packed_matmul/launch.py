"""The choice and launch of a kernel of products.py for a product with packed weights.

- `small_batch`: each warp unpacks all rows of a block, and its share of the columns, into operands of mma.sync;
- `large_batch`: wgmma, with W from registers; columns are split between programs if there are too few programs;
- `overlapped`: the same for 4 bits on Hopper GPUs, with dequantisation during the previous product (hopper.py); for 33
  to 64 tokens, and where it was measured to be faster;
- `dequantise`: for float32 activations, and weights that the other kernels cannot read. W is dequantised slab by slab
  and multiplied by cuBLAS;
- `dequantise_whole`: for many tokens. The same, with slabs that hold most weights as a whole.

The kernels read the canonical layout (`rows`) directly. `kernels/int_matmul/README.md` explains how, and the cost.
"""

from kernels.interpreter import interpreting, prepare

prepare()

from typing import NamedTuple  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import multiprocessors, on_its_device  # noqa: E402
from kernels.linear import without_tf32  # noqa: E402
from kernels.packed_matmul import hopper  # noqa: E402
from kernels.packed_matmul.products import dequantise, large_batch, reduce, small_batch  # noqa: E402
from kernels.packed_matmul.weight import MAGIC, TYPES, PackedWeight  # noqa: E402
from kernels.tuning import Compilation, configuration, launch_options  # noqa: E402

OVERLAPPED = 33, 64  # tokens for which the kernel for Hopper was measured: 14336 x 4096, H200, reports/published/gpu.md
CROSSOVER = 512  # number of tokens from which the heuristic dequantises and calls cuBLAS
CROSSOVER_OF_TABLES = 128  # the same for tables, whose look-ups in registers cost `large_batch` more
# Bytes dequantised at a time. cuBLAS finds 32 MB in the L2 cache (60 MB on an H200). From `CROSSOVER` tokens on slabs
# are larger, as each takes two launches from Python, and the product of so few rows does not fill the GPU. This is
# unmeasured. With 32 MB, an H200 read prompts of 2,048 tokens at 0.65 times the speed of 16 bits
# (reports/published/gpu.md); `kernels.harness.model --ways prompt` times both.
SLABS = {"dequantise": 32 << 20, "dequantise_whole": 256 << 20}
TABLE_MAGIC = 0x32103210  # the identity selector of PRMT, in both halves of a word: see `look_up`
TABLE_OF_PAIRS = 32 << 10  # bytes of shared memory
PLAIN_SHARED = 48 << 10  # bytes of shared memory that a block gets without being asked for
MOST_STAGES = 8


class Blocks(NamedTuple):
    """The division of a row into blocks by `small_batch` and `large_batch`."""

    columns: int  # BLOCK_K
    words: int  # V
    word_scales: bool
    group: int  # columns that share a scale; 0: all columns of the row


def blocks(w: PackedWeight) -> Blocks | None:
    """The division of a row into blocks, or None if only `dequantise` reads this weight.

    Only `dequantise` reads 5 and 6 bits, rows that are not a whole number of words, and groups that end within a word.
    """
    if w.bits not in (2, 3, 4, 8) or w.codes.shape[1] % 4:
        return None
    group = 0 if w.group_size == w.shape[1] else w.group_size
    run, least = (32, 128) if w.bits == 3 else (32 // w.bits, 128 // w.bits)  # codes of one load, columns of one chunk
    columns = min(128, group & -group) if group else 128
    if columns >= max(least, 32):
        return Blocks(columns, 4 if w.bits == 3 else min(4, columns // least), False, group)
    if group % run == 0:  # in smaller blocks most of the work would be overhead
        return Blocks(128, 4 if w.bits == 3 else min(4, 128 // least), True, group)
    return None


def shape_key(w: PackedWeight, tokens: int) -> str:
    """The part of a configuration's key that both ops share; tokens are rounded up to a power of two."""
    return f"m{triton.next_power_of_2(tokens)} n{w.shape[0]} k{w.shape[1]}"


def short(dtype: torch.dtype) -> str:
    """ "bf16", "fp16" or "fp32"."""
    return TYPES[dtype].removeprefix("*")


def heuristic(w: PackedWeight, tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    """The configuration for activations of `dtype` in cases without measurements; its "kind" names the kernel."""
    out, cut, processors = w.shape[0], blocks(w), multiprocessors(w.codes.device)
    crossover = CROSSOVER if w.table is None else CROSSOVER_OF_TABLES
    if tokens >= CROSSOVER:
        return DEQUANTISE_WHOLE
    if cut is None or tokens >= crossover or (cut.word_scales and tokens > 16):
        return DEQUANTISE
    if tokens <= 16:
        block_n = 32 if out >= 32 * 2 * processors else 16
        warps = 4 if block_n == 32 and cut.columns == 128 else 8
        block_n = min(128, block_n * (128 // cut.columns))  # short groups: more rows, to limit the overhead of a round
        block_n = max(block_n, min(64, 2 * block_n)) if tokens > 4 else block_n  # x is read again by every block
        block_m = triton.next_power_of_2(tokens)
        plan = _with_pairs(_small(block_n, block_m, warps, 4), w)
        if block_m > (4 if plan["pairs"] else 8):  # the pairs take 32 KiB, and an RTX 4090's blocks have 99 KiB
            plan["stages"] = 3
        return plan
    if OVERLAPPED[0] <= tokens <= OVERLAPPED[1] and hopper.takes(w, dtype):
        return hopper.plans(w, tokens)[0]
    block_m = 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    programs = -(-out // 128) * -(-tokens // block_m)
    rounds = -(-w.shape[1] // cut.columns)
    splits = 1
    while splits < 8 and programs * splits < 2 * processors and rounds // (2 * splits) >= 4:
        splits *= 2
    return _large(128, block_m, 4 if block_m == 32 else 8, 3, splits)


def candidates(w: PackedWeight, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[dict]:
    """At most eight configurations worth timing with activations of `dtype`, the heuristic's first."""
    first, cut = heuristic(w, tokens, dtype), blocks(w)
    if cut is None:
        return [first]
    block_m = min(128, triton.next_power_of_2(tokens))
    small = [
        _small(n, block_m, *rest)
        for n, *rest in ((32, 4, 4), (16, 8, 4), (32, 8, 3), (64, 4, 3), (16, 4, 5), (32, 4, 3))
    ]
    block_m = max(16, block_m)
    large = [
        _large(128, block_m, 8, 3, 1),
        _large(128, block_m, 8, 3, 4),
        _large(64, block_m, 4, 4, 1),
        _large(64, block_m, 4, 4, 4),
        _large(128, min(64, block_m), 8, 4, 2),
    ]
    others = small + large[:1] if tokens <= 16 else large
    if tokens > 128:
        others = [DEQUANTISE_WHOLE, DEQUANTISE, *large[:1], *large[2:3], *large[4:]]
    if cut.word_scales:
        others = [c for c in others if c["kind"] != "large_batch"]
    others = [_with_pairs(c, w) for c in others]
    if tokens > 16 and hopper.takes(w, dtype):
        others = [*hopper.plans(w, tokens), *others]
    if first["pairs"]:
        others.insert(0, {**first, "pairs": False})
    return ([first] + [c for c in others if c != first])[:8]


def _with_pairs(plan: dict, w: PackedWeight) -> dict:
    """The plan, with a table of pairs instead of PRMT if the weight allows both: pairs need fewer instructions."""
    both = plan["kind"] == "small_batch" and w.table is not None and w.table.dim() == 1 and w.bits == 4
    return launchable({**plan, "pairs": True}, blocks(w)) if both else plan


def launchable(plan: dict, cut: Blocks) -> dict:
    """The plan for `small_batch`, with more stages or without a table of pairs if it could not be launched.

    CUDA allows a block 48 KiB without further ado, static and dynamic memory together, and Triton asks for more only if
    the dynamic part alone is larger. The table of pairs is static memory, of which Triton does not know.
    """
    if not plan["pairs"]:
        return plan
    for stages in range(plan["stages"], MOST_STAGES + 1):
        a_stage = plan["block_n"] * cut.columns // 2 + 2 * cut.columns * plan["block_m"]  # codes, and rows of x
        dynamic = plan["warps"] * ((stages - 1) * a_stage + 2 * plan["block_n"])  # and scales, once
        if dynamic + TABLE_OF_PAIRS <= PLAIN_SHARED or dynamic - 2 * plan["warps"] * plan["block_n"] > PLAIN_SHARED:
            return {**plan, "stages": stages}
    return {**plan, "pairs": False}


def _small(block_n: int, block_m: int, warps: int, stages: int) -> dict:
    """A plan for `small_batch`. All plans have the same fields, so that a measured one can replace any other."""
    return {
        "kind": "small_batch", "block_n": block_n, "block_m": block_m, "warps": warps, "stages": stages, "splits": 1,
        "pairs": False,
    }  # fmt: skip


def _large(block_n: int, block_m: int, warps: int, stages: int, splits: int) -> dict:
    return {**_small(block_n, block_m, warps, stages), "kind": "large_batch", "splits": splits}


DEQUANTISE, DEQUANTISE_WHOLE = ({**_small(0, 0, 0, 0), "kind": kind} for kind in SLABS)


def chosen(w: PackedWeight, tokens: int, dtype: torch.dtype, op: str, key: str) -> dict:
    """The configuration of a call with activations of `dtype`: the measured one, or the heuristic's."""
    if dtype not in MAGIC:
        return DEQUANTISE
    first = heuristic(w, tokens, dtype)
    plan = configuration(op, key, first)
    # The key does not contain dtypes: a plan may have been measured with another one.
    return first if plan["kind"] == "overlapped" and not hopper.fits(w, dtype) else plan


@on_its_device
def matmul(x: Tensor, w: PackedWeight, op: str, key: str) -> Tensor:
    """y [tokens, out] = x Wᵀ in x's dtype, from x [tokens, in] in float32, bfloat16 or float16.

    op, key: for looking up the configuration; see `kernels.tuning`.
    """
    assert x.dim() == 2
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[0])
    plan = chosen(w, x.shape[0], x.dtype, op, key)
    x = x if x.stride(1) == 1 else x.contiguous()
    table, scale, zero = (None if t is None else t.contiguous() for t in (w.table, w.scale, w.zero))
    w = w._replace(codes=aligned(w.codes), table=table, scale=scale, zero=zero)
    if plan["kind"] in SLABS:
        return slab_by_slab(x, w, SLABS[plan["kind"]])
    if plan["kind"] == "overlapped":
        return summed(*hopper.matmul(x, w, plan), x)
    return (_small_batch if plan["kind"] == "small_batch" else _large_batch)(x, w, plan)


@on_its_device
def of_experts(x: Tensor, w: PackedWeight, ends: Tensor) -> Tensor:
    """y [tokens, out]: each token times its own expert's weight.

    w: [experts out, in], expert after expert, divisible by `blocks`; ends: int32 [experts], the end of each expert's
    tokens in x [tokens, in], float16 or bfloat16.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, zero = (None if t is None else t.contiguous() for t in (w.scale, w.zero))
    w = w._replace(codes=aligned(w.codes), scale=scale, zero=zero)
    plan = for_experts(w, x.shape[0], len(ends))
    return (_small_batch if plan["kind"] == "small_batch" else _large_batch)(x, w, plan, ends)


def for_experts(w: PackedWeight, tokens: int, experts: int) -> dict:
    """The configuration for tokens distributed among experts; only the GPU knows the number for each expert."""
    each, out = -(-tokens // experts), w.shape[0] // experts
    if each <= 8 or blocks(w).word_scales:
        block_n = 32 if out * min(experts, tokens) >= 64 * multiprocessors(w.codes.device) else 16
        block_n = min(128, block_n * (128 // blocks(w).columns))
        return _small(block_n, 4 if each == 1 else 16, 4, 4 if each == 1 else 3)
    block_m = 32 if each <= 32 else 64 if each <= 64 else 128
    return _large(128, block_m, 4 if block_m == 32 else 8, 3, 1)


def _small_batch(x: Tensor, w: PackedWeight, plan: dict, ends: Tensor | None = None) -> Tensor:
    cut, columns = blocks(w), x.shape[1]
    warps = plan["warps"]
    while warps > 1 and (warps // 2) * cut.columns >= columns:  # no more warps than blocks of columns
        warps //= 2
    step = warps * cut.columns
    y = x.new_empty(x.shape[0], w.shape[0] // (1 if ends is None else len(ends)))
    plan = launchable({**plan, "warps": warps}, cut)
    _launch(small_batch, x, x.stride(0), w, y, plan, triton.cdiv(columns, step), 1, columns % step == 0, ends)
    return y


def _large_batch(x: Tensor, w: PackedWeight, plan: dict, ends: Tensor | None = None) -> Tensor:
    cut, columns = blocks(w), x.shape[1]
    x = reordered(x, cut, w)
    iterations = triton.cdiv(triton.cdiv(columns, cut.columns), plan["splits"])
    splits = triton.cdiv(columns, iterations * cut.columns)  # the plan's, or fewer
    y = x.new_empty(x.shape[0], w.shape[0] // (1 if ends is None else len(ends)))
    parts = y if splits == 1 else x.new_empty(splits, *y.shape, dtype=torch.float32)
    _launch(large_batch, x, x.shape[1], w, parts, plan, iterations, splits, ends=ends)
    return summed(parts, splits, x)


def summed(parts: Tensor, splits: int, x: Tensor) -> Tensor:
    """y [tokens, out] in x's dtype, the sum of float32 [splits, tokens, out]; with one split, `parts` itself."""
    if splits == 1:
        return parts
    y = x.new_empty(parts.shape[1:])
    reduce[(triton.cdiv(y.numel(), 1024),)](parts, y, y.numel(), SPLITS=splits, BLOCK=1024, **launch_options(x.device))
    return y


def _launch(
    kernel, x: Tensor, x_stride: int, w: PackedWeight, y: Tensor, plan: dict, iterations: int, splits: int,
    even: bool = False, ends: Tensor | None = None,
) -> None:  # fmt: skip
    words = w.codes.view(torch.int32)  # [out, words of a row]
    unit = next(unit for unit in (4, 2, 1) if words.shape[1] % unit == 0)  # words per load
    experts, token_blocks = 0, triton.cdiv(x.shape[0], plan["block_m"])
    if ends is not None:  # each expert's last block may be partly empty
        experts = len(ends)
        token_blocks = x.shape[0] // plan["block_m"] + min(experts, x.shape[0])
    out = w.shape[0] // max(1, experts)
    grid = (token_blocks, triton.cdiv(out, plan["block_n"]), splits)
    kernel[grid](
        x,
        words,
        w.table,
        w.scale,
        w.zero,
        y,
        x.shape[0],
        out,
        w.shape[1],
        x_stride,
        words.shape[1] // unit,
        w.shape[1] // w.group_size,
        0 if w.zero is None else w.zero.shape[1],
        iterations,
        MAGIC[x.dtype] if w.table is None else TABLE_MAGIC,
        ends,
        **_constants(w, plan, unit, even, experts),
        **launch_options(x.device),
        num_warps=plan["warps"],
        num_stages=plan["stages"],
    )


def _constants(w: PackedWeight, plan: dict, unit: int, even: bool, experts: int = 0) -> dict:
    """The constexpr arguments of `small_batch` or `large_batch`, according to the plan."""
    cut = blocks(w)
    constants = {
        "BITS": w.bits,
        "GROUP": cut.group,
        "PER_ROW": w.table is not None and w.table.dim() == 2,
        "UNIT": unit,
        "BLOCK_N": plan["block_n"],
        "BLOCK_M": plan["block_m"],
        "BLOCK_K": cut.columns,
        "V": cut.words,
        "PRMT": not interpreting(),
        "EXPERTS": experts,
        "POWER": triton.next_power_of_2(experts),
    }
    if plan["kind"] == "small_batch":
        constants |= {"EVEN": even, "WARPS": plan["warps"], "WORD_SCALES": cut.word_scales}
        constants["PAIRS"] = plan["pairs"]
    return constants


def slab_by_slab(x: Tensor, w: PackedWeight, size: int) -> Tensor:
    """y [tokens, out] = x Wᵀ by cuBLAS, without TF32; rows of W are dequantised one slab of `size` bytes at a time."""
    out, columns = w.shape
    y = x.new_empty(x.shape[0], out)
    slabs = triton.cdiv(out * columns * x.itemsize, size)
    rows = triton.cdiv(triton.cdiv(out, slabs), 64) * 64
    slab = x.new_empty(min(rows, out), columns)
    for first in range(0, out, rows):
        part = slab[: min(rows, out - first)]
        dequantise_rows(w, first, part)
        with without_tf32():
            torch.mm(x, part.t(), out=y[:, first : first + part.shape[0]])
    return y


def dequantise_rows(w: PackedWeight, first: int, out: Tensor) -> None:
    """Write rows first, first + 1, ... of W into out [rows, in], which is contiguous; in float32, rounded once."""
    words = _in_words(w)
    codes = w.codes.view(torch.int32) if words else w.codes
    grid = (triton.cdiv(w.shape[1], 256), triton.cdiv(out.shape[0], 16))
    dequantise[grid](
        codes,
        w.table,
        w.scale,
        w.zero,
        out,
        first,
        first + out.shape[0],
        w.shape[1],
        codes.shape[1],
        w.shape[1] // w.group_size,
        0 if w.zero is None else w.zero.shape[1],
        w.group_size,
        0 if w.table is None or w.table.dim() == 1 else w.table.shape[1],
        BITS=w.bits,
        WORDS=words,
        ROWS=16,
        COLUMNS=256,
        num_warps=4,
    )


def _in_words(w: PackedWeight) -> bool:
    """Can `dequantise` read the codes word by word?"""
    return 32 % w.bits == 0 and w.codes.shape[1] % 4 == 0 and w.group_size % (32 // w.bits) == 0


def reordered(x: Tensor, cut: Blocks, w: PackedWeight) -> Tensor:
    """x padded with zero columns to whole blocks, with its columns in the order in which `large_batch` multiplies."""
    if x.shape[1] % cut.columns:  # `pad` copies even if it adds nothing
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % cut.columns))
    if w.table is not None:
        return x.view(x.shape[0], -1, 4, cut.words, 4, 2).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    pairs = 4 if w.bits == 3 else 16 // w.bits
    return x.view(x.shape[0], -1, 4, cut.words, 2, pairs).permute(0, 1, 3, 5, 2, 4).reshape(x.shape)


def aligned(codes: Tensor) -> Tensor:
    """The same bytes, row after row, at an address that is a multiple of 16."""
    codes = codes.contiguous()
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


def compilation(name: str, w: PackedWeight, dtype: torch.dtype, tokens: int, experts: int = 0) -> Compilation:
    """The heuristic's compilation for activations of `dtype` with a weight on the meta device; `experts`: number of
    experts' weights that it holds."""
    plan = for_experts(w, tokens, experts) if experts else heuristic(w, tokens, dtype)
    y = torch.float32 if plan["splits"] > 1 else dtype
    arguments, absent = _types(w, x=dtype, y=y)
    integers = ("M", "N", "K", "x_stride", "row_units", "groups", "zero_bytes", "iterations", "magic")
    arguments |= {"codes": "*i32", **dict.fromkeys(integers, "i32")}
    constants = _constants(w, plan, 4, True, experts) | absent
    if experts:
        arguments["ends"] = "*i32"
    else:
        constants["ends"] = None
    multiples = ("N", "K", "x_stride", "row_units", "magic")
    multiples += ("groups",) if w.shape[1] // w.group_size % 16 == 0 else ()
    kernel, expects = (small_batch, "HMMA") if plan["kind"] == "small_batch" else (large_batch, "HGMMA")
    return Compilation(name, kernel, arguments, constants, plan["warps"], plan["stages"], multiples, (expects,))


def dequantise_compilation(name: str, w: PackedWeight, dtype: torch.dtype) -> Compilation:
    """The same for `dequantise`."""
    words = _in_words(w)
    arguments, absent = _types(w, out=dtype)
    integers = ("first", "end", "K", "row_size", "groups", "zero_bytes", "group_size", "table_stride")
    arguments |= dict.fromkeys(integers, "i32") | ({"codes": "*i32"} if words else {})
    constants = {"BITS": w.bits, "WORDS": words, "ROWS": 16, "COLUMNS": 256, **absent}
    return Compilation(name, dequantise, arguments, constants, 4, 3, ("first", "end", "K", "row_size", "group_size"))


def _types(w: PackedWeight, **dtypes: torch.dtype) -> tuple[dict[str, str], dict[str, None]]:
    """Triton's types of a kernel's pointer arguments, and the names of those that are None."""
    tensors = {"codes": w.codes, "table": w.table, "scale": w.scale, "zero": w.zero}
    dtypes |= {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    return {name: TYPES[dtype] for name, dtype in dtypes.items()}, dict.fromkeys(tensors.keys() - dtypes.keys())


def reduce_compilation(name: str) -> Compilation:
    """The compilation of the sum of eight splits."""
    arguments = {"parts": "*fp32", "y": "*bf16", "size": "i32"}
    return Compilation(name, reduce, arguments, {"SPLITS": 8, "BLOCK": 1024}, multiple_of_16=("size",))
