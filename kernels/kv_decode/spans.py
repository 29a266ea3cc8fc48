"""The kernels that read the cache: each program takes one kv head through one span of positions. See README.md."""

from kernels.interpreter import prepare

prepare()  # bfloat16 in the interpreter

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.launch_order import await_inputs  # noqa: E402

# Four bytes of codes -> float16, exactly, minus the middle code: 0x6400 | c is 1024 + c; 0x6400 | c << 4 is 1024 + 16
# c.
CENTRED_8 = tl.constexpr("""{
.reg .b32 a, b, m;
mov.b32 m, 0xE480E480;
prmt.b32 a, $2, 0x64, 0x4140;
prmt.b32 b, $2, 0x64, 0x4342;
add.rn.f16x2 $0, a, m;
add.rn.f16x2 $1, b, m;
}""")  # m: -1152
CENTRED_4 = tl.constexpr("""{
.reg .b32 a, b, c, d, m, s, t;
mov.b32 m, 0xE408E408;
mov.b32 s, 0x2C002C00;
mov.b32 t, 0xD480D480;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 c, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 d, b, 0x000F000F, 0x64006400, 0xEA;
add.rn.f16x2 $0, c, m;
add.rn.f16x2 $1, d, m;
lop3.b32 c, a, 0x00F000F0, 0x64006400, 0xEA;
lop3.b32 d, b, 0x00F000F0, 0x64006400, 0xEA;
fma.rn.f16x2 $2, c, s, t;
fma.rn.f16x2 $3, d, s, t;
}""")  # m: -1032, s: 1/16, t: -72


@triton.jit
def centred_8(codes, ASM: tl.constexpr):
    """uint8 -> float16 code - 128."""
    if ASM:
        return tl.inline_asm_elementwise(CENTRED_8, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def centred_4(codes, ASM: tl.constexpr):
    """uint8 -> two of float16: low nibble - 8, high nibble - 8."""
    if ASM:
        return tl.inline_asm_elementwise(
            CENTRED_4, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        pair = codes.to(tl.int16)
        low = ((pair & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        return low, ((pair >> 4) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def parameters(words):
    """int32 words that hold bfloat16 pairs -> scale, offset in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def visible_range(starts, lengths, i, base, S, total):
    """Row i's positions [first, last) within this part of the cache, counted from the part's first position."""
    start = 0
    if starts is not None:
        start = tl.load(starts + i).to(tl.int32)
    end = tl.minimum(start + tl.load(lengths + i).to(tl.int32), total)
    return tl.maximum(start - base, 0), tl.minimum(end - base, S), end - base


@triton.jit
def span(starts, lengths, i, split, splits, base, S, total, heads, STEP: tl.constexpr):
    """Positions [first, last) of row i that this program reads: the same number in every program, so that short rows
    need fewer programs."""
    begin, end, _ = visible_range(starts, lengths, i, base, S, total)
    longest = tl.cdiv(end, STEP) - begin // STEP
    for at in range(0, tl.where(splits > 1, heads, 0), 256):
        rows = at + tl.arange(0, 256)
        start = tl.zeros((256,), tl.int32)
        if starts is not None:
            start = tl.load(starts + rows, mask=rows < heads, other=0).to(tl.int32)
        length = tl.load(lengths + rows, mask=rows < heads, other=0).to(tl.int32)
        last = tl.minimum(tl.minimum(start + length, total) - base, S)
        steps = tl.cdiv(last, STEP) - tl.maximum(start - base, 0) // STEP
        longest = tl.maximum(longest, tl.max(tl.where(length > 0, steps, 0), 0))
    each = tl.cdiv(tl.maximum(longest, 0), splits) * STEP
    first = begin // STEP * STEP + split * each
    return first, tl.minimum(first + each, end)


@triton.jit
def finish(acc, m, sum_p, out, partial, stats, rows, R, D, d_):
    """Store a program's sum of p v [rows, D], and its largest score and sum of p."""
    tl.store(partial + (out + rows)[:, None] * D + d_[None, :], acc, mask=(rows < R)[:, None] & (d_ < D)[None, :])
    tl.store(stats + (out + rows) * 2, m, mask=rows < R)
    tl.store(stats + (out + rows) * 2 + 1, sum_p, mask=rows < R)


@triton.jit(do_not_specialize=["base", "S", "total", "slot", "slots", "splits"])
def dense_kernel(
    q,
    k,
    v,
    starts,
    lengths,
    indices,
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
    v_row,
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
    SOFTCAP: tl.constexpr,
    SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    R = G * T_q
    blocks = tl.cdiv(R, ROWS)
    bh = block // blocks
    batch, head = (bh // kv_heads).to(tl.int64), (bh % kv_heads).to(tl.int64)
    rows = block % blocks * ROWS + tl.arange(0, ROWS)
    d_ = tl.arange(0, BLOCK_D)
    n_ = tl.arange(0, STEP)
    begin, end, stop = visible_range(starts, lengths, bh, base, S, total)
    first, last = span(starts, lengths, bh, split, splits, base, S, total, heads, STEP)
    limit = stop - (T_q - 1 - rows % T_q)  # the last position that a row sees is its own

    q += batch * q_batch + head * G * q_head
    at_q = (rows // T_q).to(tl.int64)[:, None] * q_head + (rows % T_q)[:, None] * q_token + d_[None, :]
    query = tl.load(q + at_q, mask=(rows < R)[:, None] & (d_ < D)[None, :], other=0.0)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    scores += bh.to(tl.int64) * R * total + base
    at_k = n_.to(tl.int64)[:, None] * k_row + d_[None, :]
    at_v = n_.to(tl.int64)[:, None] * v_row + d_[None, :]
    at_scores = rows.to(tl.int64)[:, None] * total + n_[None, :]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l_each = tl.zeros((ROWS, STEP), tl.float32)  # summed over positions once, after the loop
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for turn in range(0, tl.cdiv(last - first, STEP)):
        at = first + turn * STEP
        n = at + n_
        inside = (n >= begin) & (n < end)
        mask = inside[:, None] & (d_ < D)[None, :]
        if indices is not None:  # entries of a list give the positions
            place = tl.load(indices + bh.to(tl.int64) * total + n, mask=inside, other=0).to(tl.int64)
            keys = tl.load(k + place[:, None] * k_row + d_[None, :], mask=mask, other=0.0)
            values = tl.load(v + place[:, None] * v_row + d_[None, :], mask=mask, other=0.0)
        else:
            keys = tl.load(k + at.to(tl.int64) * k_row + at_k, mask=mask, other=0.0)
            values = tl.load(v + at.to(tl.int64) * v_row + at_v, mask=mask, other=0.0)
        s = tl.dot(query, keys.T, input_precision="ieee") * factor
        if SOFTCAP:
            s = cap - 2.0 * cap / (1.0 + tl.exp2(s))
        s = tl.where(inside[None, :] & (n[None, :] < limit[:, None]), s, float("-inf"))
        if SCORES:
            tl.store(scores + at + at_scores, s, mask=(rows < R)[:, None] & inside[None, :])
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        l_each = l_each * alpha[:, None] + p
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    out = (bh.to(tl.int64) * slots + slot + split) * R
    finish(acc, m, tl.sum(l_each, 1), out, partial, stats, rows, R, D, d_)


@triton.jit(do_not_specialize=["base", "S", "total", "slot", "slots", "splits"])
def quantised_kernel(
    q,
    k,
    v,
    k_words,
    v_words,
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
    kw_batch,
    kw_head,
    kw_group,
    vw_batch,
    vw_head,
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    OPERAND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Everything is transposed: scores [positions, rows], acc [D, rows]. Codes are the first operand of each product,
    # which registers hold in the order in which they are loaded, and eight rows need no padding to sixteen.
    await_inputs(EARLY)
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    R = G * T_q
    blocks = tl.cdiv(R, ROWS)
    bh = block // blocks
    batch, head = (bh // kv_heads).to(tl.int64), (bh % kv_heads).to(tl.int64)
    HALVES: tl.constexpr = 8 // BITS  # nibbles split both the channels of K and the positions of V
    TOKENS: tl.constexpr = STEP // HALVES
    C_BLOCK: tl.constexpr = BLOCK_D // HALVES
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    SHIFT: tl.constexpr = 256.0 if BITS == 8 else 16.0  # keeps what is rounded to float16 among its normal numbers
    rows = block % blocks * ROWS + tl.arange(0, ROWS)
    d_ = tl.arange(0, BLOCK_D)
    c_ = tl.arange(0, C_BLOCK)
    n_ = tl.arange(0, TOKENS)
    C = D // HALVES
    begin, end, stop = visible_range(starts, lengths, bh, base, S, total)
    first, last = span(starts, lengths, bh, split, splits, base, S, total, heads, GROUP)
    limit = tl.minimum(stop - (T_q - 1 - rows % T_q), end)

    q += batch * q_batch + head * G * q_head
    at_q = (rows // T_q).to(tl.int64)[None, :] * q_head + (rows % T_q)[None, :] * q_token + c_[:, None]
    q_mask = (rows < R)[None, :] & (c_ < C)[:, None]
    q_low = tl.load(q + at_q, mask=q_mask, other=0.0).to(tl.float32)  # [C_BLOCK, ROWS]
    largest = tl.max(tl.abs(q_low), 0)
    if BITS == 4:
        q_high = tl.load(q + C + at_q, mask=q_mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(q_high), 0))
    largest = tl.maximum(largest, 1e-30)
    q_low *= (SHIFT / largest)[None, :]
    if BITS == 4:
        q_high *= (SHIFT / largest)[None, :]
    row_factor = (largest * (factor / SHIFT))[None, :]

    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_words += batch * kw_batch + head * kw_head
    v_words += batch * vw_batch + head * vw_head
    scores += bh.to(tl.int64) * R * total + base
    at_k = n_.to(tl.int64)[:, None] * k_row + c_[None, :]
    at_v = d_.to(tl.int64)[:, None] * v_channel + n_[None, :]
    at_scores = rows.to(tl.int64)[None, :] * total + n_[:, None]
    half_group = tl.full((), GROUP // 2, tl.int64) * k_row
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l_each = tl.zeros((TOKENS, ROWS), tl.float32)  # these two are summed over positions once, after the loop
    rest_each = tl.zeros((TOKENS, ROWS), tl.float32)
    acc = tl.zeros((BLOCK_D, ROWS), tl.float32)
    for turn in range(0, tl.cdiv(last - first, GROUP) * (GROUP // STEP)):  # whole groups: nibbles split each group
        at = first + turn * STEP
        g = (at // GROUP).to(tl.int64)
        inner = 0  # first byte of this step in the group's rows of V; the compiler must see its divisors
        if STEP < GROUP:
            inner = tl.multiple_of(at % GROUP, STEP)
            if BITS == 4:
                inner = tl.multiple_of(inner // 2, TOKENS)
        begins = at // GROUP * GROUP + inner
        n = begins + n_
        k_at = k + begins.to(tl.int64) * k_row
        v_at = v + g * v_group + inner
        words = k_words + g * kw_group
        if EVEN:
            k_codes = tl.load(k_at + at_k)
            v_codes = tl.load(v_at + at_v)
            scale, offset = parameters(tl.load(words + c_))
        else:
            k_codes = tl.load(k_at + at_k, mask=(c_ < C)[None, :], other=0)
            v_codes = tl.load(v_at + at_v, mask=(d_ < D)[:, None], other=0)
            scale, offset = parameters(tl.load(words + c_, mask=c_ < C, other=0))
        scaled = (q_low * scale[:, None]).to(OPERAND)
        constant = (
            q_low * (offset + MIDDLE * scale)[:, None]
        )  # the part of a score that is the same for the whole group
        if BITS == 8:
            s = tl.dot(centred_8(k_codes, ASM).to(OPERAND), scaled, input_precision="ieee")
        else:
            if EVEN:
                k_codes_2 = tl.load(k_at + half_group + at_k)
                scale, offset = parameters(tl.load(words + C + c_))
            else:
                k_codes_2 = tl.load(k_at + half_group + at_k, mask=(c_ < C)[None, :], other=0)
                scale, offset = parameters(tl.load(words + C + c_, mask=c_ < C, other=0))
            scaled_high = (q_high * scale[:, None]).to(OPERAND)
            constant += q_high * (offset + MIDDLE * scale)[:, None]
            low, high = centred_4(k_codes, ASM)
            s = tl.dot(low.to(OPERAND), scaled, input_precision="ieee")
            s = tl.dot(high.to(OPERAND), scaled_high, s, input_precision="ieee")
            low, high = centred_4(k_codes_2, ASM)
            s_2 = tl.dot(low.to(OPERAND), scaled, input_precision="ieee")
            s_2 = tl.dot(high.to(OPERAND), scaled_high, s_2, input_precision="ieee")
        constant = tl.sum(constant, 0)[None, :]
        s = (s + constant) * row_factor
        if SOFTCAP:
            s = cap - 2.0 * cap / (1.0 + tl.exp2(s))
        s = tl.where((n >= begin)[:, None] & (n[:, None] < limit[None, :]), s, float("-inf"))
        if SCORES:
            tl.store(scores + begins + at_scores, s, mask=(rows < R)[None, :] & ((n >= begin) & (n < end))[:, None])
        top = s
        if BITS == 4:
            n_2 = n + GROUP // 2
            s_2 = (s_2 + constant) * row_factor
            if SOFTCAP:
                s_2 = cap - 2.0 * cap / (1.0 + tl.exp2(s_2))
            s_2 = tl.where((n_2 >= begin)[:, None] & (n_2[:, None] < limit[None, :]), s_2, float("-inf"))
            if SCORES:
                tl.store(
                    scores + begins + GROUP // 2 + at_scores,
                    s_2,
                    mask=(rows < R)[None, :] & ((n_2 >= begin) & (n_2 < end))[:, None],
                )
            top = tl.maximum(s, s_2)
        m_new = tl.maximum(m, tl.max(top, 0))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)
        alpha = tl.exp2(m - shift)[None, :]
        p = tl.exp2(s - shift[None, :])
        scale, offset = parameters(tl.load(v_words + n, mask=(n >= begin) & (n < end), other=0))
        acc *= alpha
        l_each = l_each * alpha + p
        rest_each = rest_each * alpha + p * (offset + MIDDLE * scale)[:, None]
        weights = (p * (SHIFT * scale)[:, None]).to(OPERAND)
        if BITS == 8:
            acc = tl.dot(centred_8(v_codes, ASM).to(OPERAND), weights, acc, input_precision="ieee")
        else:
            p = tl.exp2(s_2 - shift[None, :])
            scale, offset = parameters(tl.load(v_words + n_2, mask=(n_2 >= begin) & (n_2 < end), other=0))
            l_each += p
            rest_each += p * (offset + MIDDLE * scale)[:, None]
            low, high = centred_4(v_codes, ASM)
            acc = tl.dot(low.to(OPERAND), weights, acc, input_precision="ieee")
            weights = (p * (SHIFT * scale)[:, None]).to(OPERAND)
            acc = tl.dot(high.to(OPERAND), weights, acc, input_precision="ieee")
        m = m_new
    out = (bh.to(tl.int64) * slots + slot + split) * R
    acc = acc / SHIFT + tl.sum(rest_each, 0)[None, :]
    finish(tl.trans(acc), m, tl.sum(l_each, 0), out, partial, stats, rows, R, D, d_)
