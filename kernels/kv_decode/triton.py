"""Split-K attention for one step of decoding: spans of positions side by side, merged in order. See README.md."""

from kernels.interpreter import interpreting, prepare

prepare()  # bfloat16 in the interpreter

from itertools import product  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import multiprocessors, on_its_device  # noqa: E402
from kernels.kv_decode.layout import KV  # noqa: E402
from kernels.kv_decode.spans import dense_kernel, quantised_kernel, visible_range  # noqa: E402
from kernels.kv_decode.spans_float8 import float8_kernel  # noqa: E402
from kernels.launch_order import await_inputs  # noqa: E402
from kernels.tuning import Compilation, configuration, launch_options  # noqa: E402

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LEAST = 128  # positions that a span must have to be worth a program
SLOTS = {16: 4, 128: 8}  # number of spans that are merged at once: number of warps
MASS_BLOCK = 1024  # positions whose mass one program computes
CANDIDATES = [
    {"STEP": 128, "PER_SM": 2, "num_warps": 4, "num_stages": 3},
    {"STEP": 128, "PER_SM": 3, "num_warps": 4, "num_stages": 3},
    {"STEP": 128, "PER_SM": 12, "num_warps": 4, "num_stages": 3},
    {"STEP": 64, "PER_SM": 3, "num_warps": 4, "num_stages": 3},
    {"STEP": 64, "PER_SM": 6, "num_warps": 4, "num_stages": 4},
    {"STEP": 64, "PER_SM": 12, "num_warps": 4, "num_stages": 3},
    {"STEP": 64, "PER_SM": 4, "num_warps": 2, "num_stages": 3},
    {"STEP": 64, "PER_SM": 8, "num_warps": 2, "num_stages": 4},
]


@triton.jit(do_not_specialize=["slots"])
def merge_kernel(
    partial, stats, y, lse, slots, R, D, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One row's partial sums, in their order: y = Σ w acc / Σ w l with w = 2^(m - max m)."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    out = row // R * slots * R + row % R
    i_ = tl.arange(0, SLOTS)
    d_ = tl.arange(0, BLOCK_D)
    largest = tl.full((SLOTS,), float("-inf"), tl.float32)
    for at in range(0, slots, SLOTS):
        m = tl.load(stats + (out + (at + i_) * R) * 2, mask=at + i_ < slots, other=float("-inf"))
        largest = tl.maximum(largest, m)
    top = tl.max(largest, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.zeros((SLOTS,), tl.float32)
    acc = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    for at in range(0, slots, SLOTS):
        here = out + (at + i_) * R
        m = tl.load(stats + here * 2, mask=at + i_ < slots, other=float("-inf"))
        used = m > float("-inf")
        weight = tl.exp2(m - shift)
        total += weight * tl.load(stats + here * 2 + 1, mask=used, other=0.0)
        mask = used[:, None] & (d_ < D)[None, :]
        acc += weight[:, None] * tl.load(partial + here[:, None] * D + d_[None, :], mask=mask, other=0.0)
    sum_p = tl.sum(total, 0)
    sum_p = tl.where(sum_p > 0.0, sum_p, 1.0)
    tl.store(y + row * D + d_, (tl.sum(acc, 0) / sum_p).to(y.dtype.element_ty), mask=d_ < D)
    tl.store(lse + row, tl.where(top > float("-inf"), shift + tl.log2(sum_p), float("-inf")))


@triton.jit(do_not_specialize=["total"])
def mass_kernel(scores, lse, starts, lengths, mass, total, R, BLOCK: tl.constexpr):
    """Probabilities summed over a kv head's rows, from the stored scores."""
    blocks = tl.cdiv(total, BLOCK)
    bh = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    begin, end, _ = visible_range(starts, lengths, bh, 0, total, total)
    inside = (n >= begin) & (n < end)
    found = tl.zeros((BLOCK,), tl.float32)
    for r in range(R):
        row = bh.to(tl.int64) * R + r
        s = tl.load(scores + row * total + n, mask=inside, other=float("-inf"))
        whole = tl.load(lse + row)
        found += tl.exp2(s - tl.where(whole > float("-inf"), whole, 0.0))
    tl.store(mass + bh.to(tl.int64) * total + n, found, mask=n < total)


def heuristic(bits: int, group: int, block_d: int, rows: int, itemsize: int, float8: bool = False) -> dict:
    """Configuration for GPUs without tuned ones, derived from the machine code of the kernels for sm_90.

    Returns:
        STEP:    positions per turn of the loop; at most a group.
        PER_SM:  programs asked for per multiprocessor: a multiple of the two or three of four warps that its registers
                 hold (four of two warps, eight of one), so that the last round of programs is as full as the first.
    """
    if itemsize == 4:
        step, num_warps = 32 if bits < 16 or block_d <= 64 else 16, 4 if bits < 16 and block_d <= 128 else 8
        return {"STEP": step, "PER_SM": 4, "num_warps": num_warps, "num_stages": 2 if bits < 16 else 3}
    if bits == 16:
        return {"STEP": 64 if block_d <= 128 else 32, "PER_SM": 6, "num_warps": 4, "num_stages": 3}
    if rows == 16:
        step, num_warps = 64 if bits == 4 or float8 else 32, 2
    else:
        step = group if block_d <= 128 else min(group, 64)
        num_warps = step // 32 if block_d <= 128 else step // 16
    return {"STEP": step, "PER_SM": {4: 6, 2: 8, 1: 16}[num_warps], "num_warps": num_warps, "num_stages": 3}


def rows_of(bits: int, group: int, D: int, R: int, itemsize: int) -> int:
    """Rows (query heads of a kv head, times tokens) that one program takes; with more of them the cache is read
    again."""
    if bits == 16:
        widest = 16 if itemsize == 4 else 64 if D <= 128 else 32
        return min(max(triton.next_power_of_2(R), 16), widest)
    return 16 if R > 8 and itemsize == 2 and group >= 64 and D in (32, 64, 128) else 8


def kind_of(cache: KV) -> str:
    """The `kind` argument of `key` for a cache of codes."""
    return f"e4m3 g{cache.group}" if cache.float8 else f"int{cache.bits} g{cache.group}"


def key(kind: str, D: int, R: int) -> str:
    """The key of a tuned configuration; `kind` is a dtype's name, "int4 g64" or "e4m3 g64"."""
    return f"{kind} d{D} rows{R}"


@on_its_device
def kv_decode(
    q: Tensor,
    cache: KV,
    lengths: Tensor,
    starts: Tensor | None,
    indices: Tensor | None,
    scale: float,
    softcap: float,
    return_mass: bool,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y [B, H_q, T_q, D], mass [B, H_kv, S + R or n] or None, lse [B, H_q, T_q] or None, for checked arguments.

    indices: [B, H_kv, n], for a cache of 16 bits, or None.
    """
    B, H_q, T_q, D = q.shape
    kv_heads, total = cache.k.shape[1], cache.positions if indices is None else indices.shape[2]
    indices = None if indices is None else indices.contiguous()
    heads, R = B * kv_heads, H_q // kv_heads * T_q
    lengths = lengths.contiguous()
    starts = None if starts is None else starts.contiguous()
    y = q.new_empty(B, H_q, T_q, D)
    mass = q.new_empty(B, kv_heads, total, dtype=torch.float32) if return_mass else None
    if y.numel() == 0 or total == 0:
        return y.zero_(), mass, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    main = cache.k.shape[2] if indices is None else total
    parts = [(cache.bits, 0, main)] if main else []
    if cache.tail_k is not None and cache.tail_k.shape[2]:
        parts.append((16, cache.k.shape[2], cache.tail_k.shape[2]))
    chosen = [_choose(q, cache, heads, R, bits, S) for bits, _, S in parts]
    slots = sum(c["splits"] for c in chosen)
    partial = torch.empty(heads * slots * R * D, dtype=torch.float32, device=q.device)
    stats = torch.empty(heads * slots * R * 2, dtype=torch.float32, device=q.device)
    scores = torch.empty(heads * R * total if return_mass else 0, dtype=torch.float32, device=q.device)
    factor, cap = (2 * LOG2E * scale / softcap, LOG2E * softcap) if softcap else (LOG2E * scale, 0.0)
    slot = 0
    for (bits, base, S), c in zip(parts, chosen, strict=True):
        counts = (base, S, total, slot, slots, c["splits"], heads, kv_heads, H_q // kv_heads, T_q, D, factor, cap)
        constants = {
            "SOFTCAP": softcap > 0,
            "SCORES": return_mass,
            "ROWS": c["ROWS"],
            "STEP": c["STEP"],
            "BLOCK_D": c["BLOCK_D"],
            **launch_options(q.device),
            "num_warps": c["num_warps"],
            "num_stages": c["num_stages"],
        }
        grid = (heads * -(-R // c["ROWS"]) * c["splits"],)
        if bits == 16:
            k, v = (cache.tail_k, cache.tail_v) if base or cache.bits != 16 else (cache.k, cache.v)
            dense_kernel[grid](
                q,
                k,
                v,
                starts,
                lengths,
                indices,
                partial,
                stats,
                scores,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                *counts,
                **constants,
            )
        elif cache.float8:
            k, v = (t.view(torch.float8_e4m3fn) for t in (cache.k, cache.v))
            float8_kernel[grid](
                q,
                k,
                v,
                cache.params_k,
                cache.params_v,
                starts,
                lengths,
                partial,
                stats,
                scores,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:4],
                *cache.params_k.stride()[:2],
                *cache.params_v.stride()[:2],
                *counts,
                GROUP=cache.group,
                EVEN=c["BLOCK_D"] == D,
                OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16,
                **constants,
            )
        else:
            k_words, v_words = (
                cache.params_k.view(torch.int32).squeeze(-1),
                cache.params_v.view(torch.int32).squeeze(-1),
            )
            quantised_kernel[grid](
                q,
                cache.k,
                cache.v,
                k_words,
                v_words,
                starts,
                lengths,
                partial,
                stats,
                scores,
                *q.stride()[:3],
                *cache.k.stride()[:3],
                *cache.v.stride()[:4],
                *k_words.stride()[:3],
                *v_words.stride()[:2],
                *counts,
                BITS=bits,
                GROUP=cache.group,
                EVEN=c["BLOCK_D"] == D,
                ASM=not interpreting(),
                OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16,
                **constants,
            )
        slot += c["splits"]
    lse = torch.empty(heads * R, dtype=torch.float32, device=q.device)
    merged = 16 if slots <= 16 else 128
    merge_kernel[(heads * R,)](
        partial, stats, y, lse, slots, R, D, SLOTS=merged, BLOCK_D=triton.next_power_of_2(D),
        **launch_options(q.device), num_warps=SLOTS[merged],
    )  # fmt: skip
    if return_mass:
        mass_kernel[(heads * triton.cdiv(total, MASS_BLOCK),)](
            scores, lse, starts, lengths, mass, total, R, BLOCK=MASS_BLOCK, num_warps=4
        )
    return y, mass, lse.mul_(LN2).view(B, H_q, T_q) if return_lse else None


def _choose(q: Tensor, cache: KV, heads: int, R: int, bits: int, S: int) -> dict:
    """Configuration of one part of the cache, with the sizes that follow from it."""
    group, D, itemsize = cache.group, q.shape[-1], q.element_size()
    # tl.dot sums over at least 16 channels, and 4 bits halve them.
    block_d, rows = max(32 if bits == 4 else 16, triton.next_power_of_2(D)), rows_of(bits, group, D, R, itemsize)
    kind = str(q.dtype).removeprefix("torch.") if bits == 16 else kind_of(cache)
    otherwise = heuristic(bits, group, block_d, rows, itemsize, bits == 8 and cache.float8)
    chosen = configuration("kv_decode", key(kind, D, R), otherwise)
    wanted = chosen["PER_SM"] * (multiprocessors(q.device) if q.is_cuda else 8) // (heads * -(-R // rows))
    splits = max(1, min(wanted, -(-S // max(chosen["STEP"], group, LEAST))))
    return {**chosen, "ROWS": rows, "BLOCK_D": block_d, "splits": splits}


def candidates_for(bits: int, group: int) -> list[dict]:
    """Configurations worth trying for one kind of cache."""
    return [c for c in CANDIDATES if (c["num_warps"] == 4 if bits == 16 else c["STEP"] <= group)]


def shipped() -> list[Compilation]:
    """The compilations that the heuristic selects: the dtypes, groups and widths in use, with and without the mass."""
    found = [
        _spans("bf16", bits, group, D, R)
        for bits, group, D, R in (
            (16, 0, 128, 4),
            (16, 0, 64, 3),
            (16, 0, 80, 1),
            (16, 0, 256, 8),
            (16, 0, 128, 64),
            (8, 128, 128, 4),
            (8, 64, 64, 3),
            (8, 64, 128, 16),
            (8, 32, 256, 8),
            (4, 128, 128, 4),
            (4, 64, 128, 7),
            (4, 64, 128, 16),
            (4, 32, 80, 1),
            (4, 128, 256, 8),
        )
    ]
    found += [_spans("bf16", bits, group, 128, 4, mass=True) for bits, group in ((16, 0), (8, 128), (4, 128))]
    found += [_spans("bf16", 16, 0, D, R, listed=True) for D, R in ((128, 4), (64, 3))]
    found += [
        _spans("bf16", 8, group, D, R, float8=True)
        for group, D, R in ((128, 128, 4), (64, 64, 3), (64, 128, 4), (64, 128, 16), (32, 80, 1), (32, 256, 8))
    ]
    found += [_spans("bf16", 8, 128, 128, 4, mass=True, float8=True), _spans("fp32", 8, 64, 128, 4, float8=True)]
    found += [_spans("fp16", 16, 0, 128, 4, softcap=True), _spans("fp16", 4, 64, 128, 4, softcap=True)]
    found += [_spans("fp32", 16, 0, 128, 4), _spans("fp32", 8, 64, 128, 4), _spans("fp32", 4, 64, 128, 4)]
    merge = {"partial": "*fp32", "stats": "*fp32", "y": "*bf16", "lse": "*fp32", "slots": "i32", "R": "i32", "D": "i32"}
    for D, (slots, warps) in product((64, 128, 256), SLOTS.items()):
        constants = {"SLOTS": slots, "BLOCK_D": D}
        found.append(Compilation(f"kv_decode merge {slots} d{D}", merge_kernel, merge, constants, warps, 3, ("D",)))
    mass = {
        "scores": "*fp32",
        "lse": "*fp32",
        "starts": "*i32",
        "lengths": "*i32",
        "mass": "*fp32",
        "total": "i32",
        "R": "i32",
    }
    found.append(Compilation("kv_decode mass", mass_kernel, mass, {"BLOCK": MASS_BLOCK}, 4))
    return found


def _spans(
    dtype: str,
    bits: int,
    group: int,
    D: int,
    R: int,
    mass: bool = False,
    softcap: bool = False,
    listed: bool = False,
    float8: bool = False,
) -> Compilation:
    itemsize = 4 if dtype == "fp32" else 2
    block_d, rows = triton.next_power_of_2(D), rows_of(bits, group, D, R, itemsize)
    c = heuristic(bits, group, block_d, rows, itemsize, float8)
    strides = ["q_batch", "q_head", "q_token", "k_batch", "k_head", "k_row", "v_batch", "v_head"]
    pointers = {"q": dtype, "k": dtype, "v": dtype, "starts": "i32", "lengths": "i32"}
    constants = {"SOFTCAP": softcap, "SCORES": mass, "ROWS": rows, "STEP": c["STEP"], "BLOCK_D": block_d}
    operand = tl.float32 if dtype == "fp32" else tl.float16
    aligned = (*strides, "D")
    if bits == 16:
        strides.append("v_row")
        pointers |= {"indices": "i64"} if listed else {}
        constants |= {} if listed else {"indices": None}
        aligned = (*strides, "D")
    elif float8:
        aligned = (*strides, "v_group", "v_channel", "D")  # strides of scales count groups
        strides += ["v_group", "v_channel", "ks_batch", "ks_head", "vs_batch", "vs_head"]
        pointers |= {"k": "fp8e4nv", "v": "fp8e4nv", "k_scales": "fp32", "v_scales": "fp32"}
        constants |= {"GROUP": group, "EVEN": block_d == D, "OPERAND": operand}
    else:
        strides += ["v_group", "v_channel", "kw_batch", "kw_head", "kw_group", "vw_batch", "vw_head"]
        pointers |= {"k": "u8", "v": "u8", "k_words": "i32", "v_words": "i32"}
        constants |= {"BITS": bits, "GROUP": group, "EVEN": block_d == D, "ASM": True, "OPERAND": operand}
        aligned = (*strides, "D")
    counts = ["base", "S", "total", "slot", "slots", "splits", "heads", "kv_heads", "G", "T_q", "D"]
    arguments = {
        name: f"*{kind}" for name, kind in (pointers | dict.fromkeys(("partial", "stats", "scores"), "fp32")).items()
    }
    arguments |= dict.fromkeys(strides + counts, "i32") | {"factor": "fp32", "cap": "fp32"}
    kind = dtype if bits == 16 else f"{dtype} {'e4m3' if float8 else f'int{bits}'} g{group}"
    more = "".join(f" {word}" for word, on in (("mass", mass), ("capped", softcap), ("listed", listed)) if on)
    name = f"kv_decode {kind} d{D} rows{R}{more}"
    kernel = dense_kernel if bits == 16 else float8_kernel if float8 else quantised_kernel
    expects = () if dtype == "fp32" else ("HGMMA",) if rows == 64 else ("HMMA",)
    return Compilation(name, kernel, arguments, constants, c["num_warps"], c["num_stages"], aligned, expects)
