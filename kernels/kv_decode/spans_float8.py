"""The kernel that reads a cache in float8_e4m3fn, for GPUs that have it. See README.md."""

from kernels.interpreter import prepare

prepare()  # float8 in the interpreter

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.kv_decode.spans import finish, span, visible_range  # noqa: E402
from kernels.launch_order import await_inputs  # noqa: E402


@triton.jit(do_not_specialize=["base", "S", "total", "slot", "slots", "splits"])
def float8_kernel(
    q,
    k,
    v,
    k_scales,
    v_scales,
    starts,
    lengths,
    partial,
    stats,
    scores,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_group,
    v_channel,
    ks_batch,
    ks_head,
    vs_batch,
    vs_head,
    base,
    S,
    total,
    slot,
    slots,
    splits,
    heads,
    kv_heads,
    G,
    T_q,
    D,
    factor,
    cap,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Transposed like `quantised_kernel`: scores [positions, rows], acc [D, rows].
    await_inputs(EARLY)
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    R = G * T_q
    blocks = tl.cdiv(R, ROWS)
    bh = block // blocks
    batch, head = (bh // kv_heads).to(tl.int64), (bh % kv_heads).to(tl.int64)
    SHIFT: tl.constexpr = 256.0  # keeps what is rounded to float16 among its normal numbers
    rows = block % blocks * ROWS + tl.arange(0, ROWS)
    d_ = tl.arange(0, BLOCK_D)
    n_ = tl.arange(0, STEP)
    begin, end, stop = visible_range(starts, lengths, bh, base, S, total)
    first, last = span(starts, lengths, bh, split, splits, base, S, total, heads, GROUP)
    limit = tl.minimum(stop - (T_q - 1 - rows % T_q), end)

    q += batch * q_batch + head * G * q_head
    at_q = (rows // T_q).to(tl.int64)[None, :] * q_head + (rows % T_q)[None, :] * q_token + d_[:, None]
    query = tl.load(q + at_q, mask=(rows < R)[None, :] & (d_ < D)[:, None], other=0.0).to(tl.float32)  # [D, ROWS]
    largest = tl.maximum(tl.max(tl.abs(query), 0), 1e-30)
    query = (query * (SHIFT / largest)[None, :]).to(OPERAND)
    row_factor = largest * (factor / SHIFT)

    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_scales += batch * ks_batch + head * ks_head
    v_scales += batch * vs_batch + head * vs_head
    scores += bh.to(tl.int64) * R * total + base
    at_k = n_.to(tl.int64)[:, None] * k_row + d_[None, :]
    at_v = d_.to(tl.int64)[:, None] * v_channel + n_[None, :]
    at_scores = rows.to(tl.int64)[None, :] * total + n_[:, None]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l_each = tl.zeros((STEP, ROWS), tl.float32)  # summed over positions once, after the loop
    acc = tl.zeros((BLOCK_D, ROWS), tl.float32)  # in units of the values' scale of the previous turn
    unit = 1.0
    for turn in range(0, tl.cdiv(last - first, GROUP) * (GROUP // STEP)):
        at = first + turn * STEP
        g = (at // GROUP).to(tl.int64)
        inner = 0  # first byte of this step in the group's rows of V; the compiler must see its divisors
        if STEP < GROUP:
            inner = tl.multiple_of(at % GROUP, STEP)
        n = at + n_
        k_at = k + at.to(tl.int64) * k_row
        v_at = v + g * v_group + inner
        if EVEN:
            keys = tl.load(k_at + at_k)
            values = tl.load(v_at + at_v)
        else:
            keys = tl.load(k_at + at_k, mask=(d_ < D)[None, :], other=0.0)
            values = tl.load(v_at + at_v, mask=(d_ < D)[:, None], other=0.0)
        scale = tl.load(k_scales + g)
        s = tl.dot(keys.to(tl.float16).to(OPERAND), query, input_precision="ieee") * (row_factor * scale)[None, :]
        if SOFTCAP:
            s = cap - 2.0 * cap / (1.0 + tl.exp2(s))
        s = tl.where((n >= begin)[:, None] & (n[:, None] < limit[None, :]), s, float("-inf"))
        if SCORES:
            tl.store(scores + at + at_scores, s, mask=(rows < R)[None, :] & ((n >= begin) & (n < end))[:, None])
        m_new = tl.maximum(m, tl.max(s, 0))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[None, :])
        l_each = l_each * alpha[None, :] + p
        scale = tl.load(v_scales + g)
        acc *= (alpha * (unit / scale))[None, :]
        unit = scale
        weights = (p * SHIFT).to(OPERAND)
        acc = tl.dot(values.to(tl.float16).to(OPERAND), weights, acc, input_precision="ieee")
        m = m_new
    out = (bh.to(tl.int64) * slots + slot + split) * R
    finish(tl.trans(acc * (unit / SHIFT)), m, tl.sum(l_each, 0), out, partial, stats, rows, R, D, d_)
