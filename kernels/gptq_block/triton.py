"""GPTQ's inner loop in one launch: each program processes all columns for some outputs. See README.md."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.capability import on_its_device
from kernels.tuning import Compilation, configuration

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits below 1, so it rounds to nearest, ties to even
CANDIDATES = [
    {"SUB": 16, "OUT": 32, "num_warps": 1},
    {"SUB": 16, "OUT": 64, "num_warps": 2},
    {"SUB": 8, "OUT": 64, "num_warps": 1},
    {"SUB": 16, "OUT": 128, "num_warps": 4},
    {"SUB": 8, "OUT": 32, "num_warps": 1},
    {"SUB": 8, "OUT": 128, "num_warps": 4},
]


@triton.jit
def row_of(tile, rows, i: tl.constexpr):
    """Row i of a float32 tile, as a sum of bits; if a thread holds whole columns, this compiles to no instructions."""
    bits = tl.where((rows == i)[:, None], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x, table, ENTRIES: tl.constexpr):
    """Code and value of the entry of an ascending table that is nearest to x; the lower one half-way between two."""
    below = tl.load(table)
    code, value = tl.zeros_like(x), tl.zeros_like(x) + below
    for entry in tl.static_range(1, ENTRIES):
        above = tl.load(table + entry)
        higher = x > (below + above) / 2
        code = tl.where(higher, float(entry), code)
        value = tl.where(higher, above, value)
        below = above
    return code, value


# Sizes and strides are not specialised: vector loads along `out` would spread a column over threads.
@triton.jit(do_not_specialize=["out", "w_batch", "w_row", "s_batch", "s_row", "z_batch", "z_row"])
def gptq_block_kernel(
    W,
    U,
    scale,
    zero,
    group,
    keep,
    table,
    codes,
    errors,
    rest,
    out,
    columns,
    steps,
    w_batch,
    w_row,
    u_batch,
    u_row,
    s_batch,
    s_row,
    z_batch,
    z_row,
    g_batch,
    TOP: tl.constexpr,
    KEEP: tl.constexpr,
    ENTRIES: tl.constexpr,
    SUB: tl.constexpr,
    OUT: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * OUT + tl.arange(0, OUT)
    here = o < out
    W += batch * w_batch
    U += batch * u_batch
    scale += batch * s_batch
    zero += batch * z_batch
    group += batch * g_batch
    keep += batch * steps * out
    codes += batch * steps * out
    errors += batch * steps * out
    rest += batch * (columns - steps) * out
    rows = tl.arange(0, SUB)
    u_sub, keep_sub = U, keep  # row `start` of each
    for start in range(0, columns, SUB):
        k = start + rows  # [SUB] columns of this sub-block
        k64 = k.to(tl.int64)
        w = tl.load(W + k64[:, None] * w_row + o[None, :], mask=(k < columns)[:, None] & here[None, :], other=0.0)
        # The corrections for the earlier columns, in their order.
        e_at = errors + o
        u_at = U + k
        for _ in tl.range(0, tl.minimum(start, steps), loop_unroll_factor=4):
            e = tl.load(e_at, mask=here, other=0.0)  # [OUT]
            u = tl.load(u_at, mask=k < columns, other=0.0)  # [SUB]
            w = tl.fma(u[:, None], -e[None, :], w)
            e_at += out
            u_at += u_row
        if start < steps:
            now = (k < steps)[:, None] & here[None, :]
            g = tl.load(group + k, mask=k < steps, other=0).to(tl.int64)
            s = tl.load(scale + g[:, None] * s_row + o[None, :], mask=now, other=1.0)
            z = tl.load(zero + g[:, None] * z_row + o[None, :], mask=now, other=0.0)
            e_tile = tl.zeros([SUB, OUT], tl.float32)
            q_tile = tl.zeros([SUB, OUT], tl.float32)
            for i in tl.static_range(SUB):
                wi, si, zi = row_of(w, rows, i), row_of(s, rows, i), row_of(z, rows, i)
                u_i = u_sub + i * u_row + start  # U_i,start
                d = tl.load(u_i + i, mask=start + i < steps, other=1.0)
                if ENTRIES == 0:
                    steps_away = tl.minimum(tl.maximum(tl.div_rn(wi, si), -4194304.0), 4194304.0)
                    q = tl.minimum(tl.maximum((steps_away + MAGIC) - MAGIC + zi, 0.0), TOP)
                else:
                    q, value = nearest(tl.div_rn(wi, si), table, ENTRIES)
                if KEEP:
                    kept = tl.load(keep_sub + i * out + o, mask=here & (start + i < steps), other=1)
                    q = tl.where(kept != 0, q, zi)
                if ENTRIES == 0:
                    value = q - zi
                elif KEEP:
                    value = tl.where(kept != 0, value, tl.load(table + zi.to(tl.int32), mask=here, other=0.0))
                quantised = tl.fma(value, si, tl.zeros([OUT], tl.float32))  # rounded separately, as torch does
                e = tl.div_rn(wi - quantised, d)
                e = tl.where(start + i < steps, e, 0.0)
                u = tl.load(u_i + rows, mask=(rows > i) & (k < columns) & (start + i < steps), other=0.0)
                w = tl.where((rows > i)[:, None], tl.fma(u[:, None], -e[None, :], w), w)
                e_tile = tl.where((rows == i)[:, None], e[None, :], e_tile)
                q_tile = tl.where((rows == i)[:, None], q[None, :], q_tile)
            at = k64[:, None] * out + o[None, :]
            tl.store(errors + at, e_tile, mask=now)
            tl.store(codes + at, q_tile.to(tl.uint8), mask=now)
            tl.debug_barrier()  # the next sub-block reads these errors
        u_sub += SUB * u_row
        keep_sub += SUB * out
        left = (k >= steps) & (k < columns)
        tl.store(rest + (k64 - steps)[:, None] * out + o[None, :], w, mask=left[:, None] & here[None, :])


@on_its_device
def gptq_block(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    bits: int,
    keep: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Arguments and results as in `kernels.gptq_block.gptq_block`."""
    shape = W.shape
    if W.dim() == 2:
        W, U, scale, zero, group = W[None], U[None], scale[None], zero[None], group[None]
    batch, columns, out = W.shape
    steps = U.shape[1]
    codes = torch.empty(batch, steps, out, dtype=torch.uint8, device=W.device)
    errors = torch.empty(batch, steps, out, device=W.device)
    rest = torch.empty(batch, columns - steps, out, device=W.device)
    if W.numel():
        W, U, scale, zero, group = (t if t.stride(-1) == 1 else t.contiguous() for t in (W, U, scale, zero, group))
        mask = codes if keep is None else keep.contiguous().view(torch.uint8)  # codes: not read
        chosen = dict(configuration("gptq_block", key(columns, out), CANDIDATES[0]))
        warps = chosen.pop("num_warps")
        gptq_block_kernel[triton.cdiv(out, chosen["OUT"]), batch](
            W,
            U,
            scale,
            zero,
            group,
            mask,
            scale if table is None else table.contiguous(),  # not read
            codes,
            errors,
            rest,
            out,
            columns,
            steps,
            *W.stride()[:2],
            *U.stride()[:2],
            *scale.stride()[:2],
            *zero.stride()[:2],
            group.stride(0),
            TOP=float((1 << bits) - 1),
            KEEP=keep is not None,
            ENTRIES=0 if table is None else len(table),
            **chosen,
            num_warps=warps,
        )
    lead = shape[:-2]
    return codes.view(*lead, steps, out), errors.view(*lead, steps, out), rest.view(*lead, columns - steps, out)


def key(columns: int, out: int) -> str:
    return f"columns{columns} out{out}"


def shipped() -> list[Compilation]:
    """The heuristic's one configuration, with a mask and without, and with a table; tuned ones are candidates."""
    pointers = {name: "*fp32" for name in ("W", "U", "scale", "zero", "table", "errors", "rest")}
    order = ("W", "U", "scale", "zero", "group", "keep", "table", "codes", "errors", "rest")
    arguments = {
        name: {"group": "*i64", "keep": "*u8", "codes": "*u8"}.get(name, pointers.get(name, "")) for name in order
    }
    sizes = (
        "out",
        "columns",
        "steps",
        "w_batch",
        "w_row",
        "u_batch",
        "u_row",
        "s_batch",
        "s_row",
        "z_batch",
        "z_row",
        "g_batch",
    )
    arguments |= dict.fromkeys(sizes, "i32")
    chosen = dict(CANDIDATES[0])
    warps = chosen.pop("num_warps")
    return [
        Compilation(
            name,
            gptq_block_kernel,
            arguments,
            {"TOP": 15.0, "KEEP": keep, "ENTRIES": entries, **chosen},
            num_warps=warps,
            multiple_of_16=("columns", "steps", "u_row"),
        )
        for name, keep, entries in (
            ("gptq_block 4 bits", False, 0),
            ("gptq_block 4 bits, pruned", True, 0),
            ("gptq_block table of 16", False, 16),
        )
    ]
