"""The Triton kernels of `lut_matmul`: those of `int_matmul` with a table in place of arithmetic.

Eight entries of 16 bits are four registers, two of low bytes and two of high bytes; one PRMT looks four codes up in two
of them at once, because its selector is four nibbles, which is how the codes lie in memory.
"""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.int_matmul.unpack import half, lanes, load_words, repeat  # noqa: E402


@triton.jit
def permute(a, b, selector, PRMT: tl.constexpr):
    """Four bytes out of the eight of (a, b), chosen by four nibbles of selector, each 0 to 7. All int32."""
    if PRMT:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], tl.int32, True, 1)
    else:  # for the interpreter
        result = (a + b + selector) * 0
        for i in tl.static_range(4):
            at = (selector >> (4 * i)) & 7
            byte = (tl.where(at < 4, a, b) >> (8 * (at & 3))) & 255
            result = result | (byte << (8 * i))
        return result


@triton.jit
def plane(entries, FIRST: tl.constexpr, SHIFT: tl.constexpr, PER_ROW: tl.constexpr, DTYPE: tl.constexpr):
    """The low (SHIFT 0) or high (8) bytes of four table entries in one int32; with PER_ROW, of each row's table.

    entries: pointer to a table, or [BLOCK_N] of them.
    """
    packed = tl.zeros_like(entries.to(tl.int64).to(tl.int32))
    for i in tl.static_range(4):
        bits = tl.load(entries + FIRST + i).to(tl.float32).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        packed = packed | (((bits >> SHIFT) & 255) << (8 * i))
    if PER_ROW:
        return packed[None, :, None, None, None, None, None]
    else:
        return packed


@triton.jit
def nibbles(words, BITS: tl.constexpr):
    """Eight codes to a word, four bits apart."""
    if BITS == 4:
        return words
    else:  # 24 bits from bit 4 on: spread by halves, by quarters, by eighths
        words = ((words >> 4) & 0x00000FFF) | (words & 0x0FFF0000)
        words = (words & 0x003F003F) | ((words & 0x0FC00FC0) << 2)
        return (words & 0x07070707) | ((words & 0x38383838) << 1)


@triton.jit
def look_up(
    words,
    l0,
    l1,
    l2,
    l3,
    h0,
    h1,
    h2,
    h3,
    magic,
    BITS: tl.constexpr,
    S0: tl.constexpr,
    DTYPE: tl.constexpr,
    PRMT: tl.constexpr,
):
    """Table entries of codes.

    Args:
        words: [BATCH, BLOCK_N, chunks, V, 1, 4, 1] from `lanes`.
        l0 .. h3: from `plane`: low and high bytes of entries 0-3, 4-7, 8-11 and 12-15 (of eight entries the first two).
        magic: 0x32103210, an argument of the kernel for the reason that `int_matmul`'s is.

    Returns:
        [BATCH, BLOCK_N, chunks, V, 2, 4, 2, 2] where S0 = 2 (mma.sync), [BATCH, BLOCK_N, chunks, V, 2, 2, 4, 2] where
        it is 1
    """
    codes = nibbles(words, BITS)
    upper = (tl.arange(0, 2) * 16)[None, None, None, None, :, None, None]  # a selector is the low 16 bits
    three = (codes & 0x77777777) >> upper
    low, high = permute(l0, l1, three, PRMT), permute(h0, h1, three, PRMT)
    if BITS == 4:
        choice = (((codes >> 1) & 0x44444444) | magic) >> upper  # byte i of the first or of the second
        low = permute(low, permute(l2, l3, three, PRMT), choice, PRMT)
        high = permute(high, permute(h2, h3, three, PRMT), choice, PRMT)
    pair = tl.arange(0, 2) * 0x2222 + 0x5140  # bytes 0 and 1 of both, bytes 2 and 3 of both
    if S0 == 2:
        pairs = permute(low, high, pair[None, None, None, None, None, None, :], PRMT)
    else:
        low, high = low.trans(0, 1, 2, 3, 4, 6, 5), high.trans(0, 1, 2, 3, 4, 6, 5)  # [..., 2, 1, 4]
        pairs = permute(low, high, pair[None, None, None, None, None, :, None], PRMT)
    return tl.join(half(pairs, False, DTYPE), half(pairs, True, DTYPE))


@triton.jit
def tables(table, row, ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, DTYPE: tl.constexpr):
    """The eight arguments of `look_up`; row: int64 [BLOCK_N]. Of eight entries, the last four of them are not looked
    at."""
    at = table
    if PER_ROW:
        at = table + row * ENTRIES
    LAST: tl.constexpr = ENTRIES - 8  # where the second half begins
    l0, l1 = plane(at, 0, 0, PER_ROW, DTYPE), plane(at, 4, 0, PER_ROW, DTYPE)
    l2, l3 = plane(at, LAST, 0, PER_ROW, DTYPE), plane(at, LAST + 4, 0, PER_ROW, DTYPE)
    h0, h1 = plane(at, 0, 8, PER_ROW, DTYPE), plane(at, 4, 8, PER_ROW, DTYPE)
    h2, h3 = plane(at, LAST, 8, PER_ROW, DTYPE), plane(at, LAST + 4, 8, PER_ROW, DTYPE)
    return l0, l1, l2, l3, h0, h1, h2, h3


@triton.jit
def scales(s_row, k, K, GROUP: tl.constexpr, SCALED: tl.constexpr):
    """Scales, in float32, of the groups that hold columns k; 1.0 where there are none."""
    if SCALED:
        group = k * 0
        if GROUP > 0:
            group = k // GROUP
        return tl.load(s_row + group, mask=k < K, other=0.0).to(tl.float32)
    else:
        return tl.full([], 1.0, tl.float32)


@triton.jit
def few(
    x,
    codes,
    table,
    scale,
    y,
    M,
    N,
    K,
    x_stride,
    row_units,
    groups,
    iterations,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    PER_ROW: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    WARPS: tl.constexpr,
    WORD_SCALES: tl.constexpr,
    PRMT: tl.constexpr,
):
    """y[m, n] = sum of W[n, k] x[m, k] over k, with mma.sync; the arguments are those of `int_matmul`'s `few`."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    RUN: tl.constexpr = 32 if BITS == 3 else 8  # codes in what `load_words` loads
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    STEP: tl.constexpr = WARPS * BLOCK_K
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K  # [WARPS, 1]
    word = (k // RUN)[:, :, None] + tl.arange(0, BLOCK_K // RUN)[None, None, :]  # [WARPS, 1, words]
    column = k[:, :, None] + tl.arange(0, BLOCK_K)[None, None, :]  # [WARPS, 1, BLOCK_K]
    w_at = codes + (row * (row_units * UNIT))[None, :, None] + word * WORDS  # [WARPS, BLOCK_N, words]
    x_at = x + (m.to(tl.int64) * x_stride)[None, :, None] + column  # [WARPS, BLOCK_M, BLOCK_K]
    s_row = scale
    if SCALED:
        s_row = scale + (row * groups)[None, :]
    l0, l1, l2, l3, h0, h1, h2, h3 = tables(table, row, 1 << BITS, PER_ROW, DTYPE)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    s = scales(s_row, k, K, GROUP, SCALED)
    for _ in range(iterations):
        inside = word * RUN < K
        words = lanes(load_words(w_at, inside, BITS, EVEN), V)
        if EVEN:
            xv = tl.load(x_at, mask=(m < M)[None, :, None], other=0.0)
        else:
            xv = tl.load(x_at, mask=(m < M)[None, :, None] & (column < K), other=0.0)
        xv = xv.reshape(
            WARPS, BLOCK_M, BLOCK_K // (32 * V), 4, V, 2, 4
        )  # chunks, lanes, words, halves of a word, codes
        xv = xv.trans(0, 2, 4, 5, 3, 6, 1).reshape(WARPS, BLOCK_K, BLOCK_M)
        s_next = s
        if GROUP > 0 and not WORD_SCALES:  # loaded one round early: nothing else would hide its latency
            s_next = scales(s_row, k + STEP, K, GROUP, SCALED)
        w = look_up(words, l0, l1, l2, l3, h0, h1, h2, h3, magic, BITS, 2, DTYPE, PRMT)
        if WORD_SCALES:
            s_word = tl.load(s_row[:, :, None] + word * RUN // GROUP, mask=inside, other=0.0).to(DTYPE)
            w *= lanes(repeat(s_word, RUN // 8), V)[:, :, :, :, :, :, :, None]
        w = w.reshape(WARPS, BLOCK_N, BLOCK_K)
        if GROUP == 0 or WORD_SCALES:
            acc = tl.dot(w, xv, acc)
        else:
            acc += tl.dot(w, xv) * s[:, :, None]
        s = s_next
        k += STEP
        word += STEP // RUN
        column += STEP
        w_at += STEP // RUN * WORDS
        x_at += STEP
    if GROUP == 0 and SCALED:
        acc *= s[:, :, None]
    total = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M], in a fixed order
    y += m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def many(
    x,
    codes,
    table,
    scale,
    y,
    M,
    N,
    K,
    x_stride,
    row_units,
    groups,
    iterations,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    PER_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    PRMT: tl.constexpr,
):
    """y[split, m, n] = sum of W[n, k] x[m, k] over the split's k, with wgmma; as `int_matmul`'s `many`."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    RUN: tl.constexpr = 32 if BITS == 3 else 8
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)  # [BLOCK_N]
    k = tl.program_id(2) * iterations * BLOCK_K
    word = k // RUN + tl.arange(0, BLOCK_K // RUN)
    w_at = codes + (row * (row_units * UNIT))[None, :, None] + word * WORDS  # [1, BLOCK_N, words]
    x_at = x + m.to(tl.int64)[:, None] * x_stride + (k + tl.arange(0, BLOCK_K))[None, :]
    s_row = scale
    if SCALED:
        s_row = scale + row * groups
    l0, l1, l2, l3, h0, h1, h2, h3 = tables(table, row, 1 << BITS, PER_ROW, DTYPE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    s = scales(s_row, k, K, GROUP, SCALED)
    for _ in range(iterations):
        words = lanes(load_words(w_at, (word * RUN < K)[None, None, :], BITS, False), V)
        xv = tl.load(x_at, mask=(m < M)[:, None] & (k < K), other=0.0)
        s_next = s
        if GROUP > 0:  # loaded one round early: nothing else would hide its latency
            s_next = scales(s_row, k + BLOCK_K, K, GROUP, SCALED)
        w = look_up(words, l0, l1, l2, l3, h0, h1, h2, h3, magic, BITS, 1, DTYPE, PRMT).reshape(BLOCK_N, BLOCK_K)
        if GROUP == 0:
            acc = tl.dot(w, xv.trans(1, 0), acc)
        else:
            acc += tl.dot(w, xv.trans(1, 0)) * s[:, None]
        s = s_next
        k += BLOCK_K
        word += BLOCK_K // RUN
        w_at += BLOCK_K // RUN * WORDS
        x_at += BLOCK_K
    if GROUP == 0 and SCALED:
        acc *= s[:, None]
    y += (tl.program_id(2).to(tl.int64) * M + m[None, :]) * N + n[:, None]
    tl.store(y, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def dequantise(
    codes,
    table,
    scale,
    out,
    first,
    end,
    K,
    row_bytes,
    groups,
    group_size,
    table_stride,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[n - first, k] = table[code] * scale for rows first <= n < end; the table is found in the L1 cache."""
    n = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, end - 1).to(tl.int64)[:, None]
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < end)[:, None] & (k < K)
    at = codes + row * row_bytes + (k * BITS >> 3)
    start = (k * BITS) & 7
    code = tl.load(at, mask=inside, other=0).to(tl.int32)
    if BITS == 3:
        code = code | (tl.load(at + 1, mask=inside & (start + BITS > 8), other=0).to(tl.int32) << 8)
    code = (code >> start) & ((1 << BITS) - 1)
    w = tl.load(table + row * table_stride + code, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        w *= tl.load(scale + row * groups + k // group_size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (row - first) * K + k, w.to(out.dtype.element_ty), mask=inside)
