"""The Triton kernels of `int_matmul`: the products, and the dequantisation. triton.py launches them."""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.int_matmul.unpack import (  # noqa: E402
    columns,
    floats,
    lanes,
    load_group,
    load_words,
    load_zero,
    repeat,
    spread,
)


@triton.jit
def few(
    x,
    codes,
    scale,
    zero,
    y,
    M,
    N,
    K,
    x_stride,
    row_units,
    groups,
    zero_bytes,
    iterations,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    WARPS: tl.constexpr,
    WORD_SCALES: tl.constexpr,
):
    """y[m, n] = sum of W[n, k] x[m, k] over k, with mma.sync: each warp has all rows of the block and every WARPS-th
    block of columns; their sums meet at the end.

    GROUP: columns that share a scale; 0: the whole row does. UNIT: row_units * UNIT words are a row.
    WORD_SCALES: weights are scaled, each word by its own scale; else the sums of a block are (all in one group).
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PER: tl.constexpr = 8 if BITS == 3 else 32 // BITS  # codes in what `load_words` gives
    RUN: tl.constexpr = 32 if BITS == 3 else PER  # codes in what it loads
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    STEP: tl.constexpr = WARPS * BLOCK_K
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n, N - 1).to(tl.int64)[None, :]  # [1, BLOCK_N]
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K  # [WARPS, 1]: where each warp's block begins
    word = (k // RUN)[:, :, None] + tl.arange(0, BLOCK_K // RUN)[None, None, :]  # [WARPS, 1, words]
    column = k[:, :, None] + tl.arange(0, BLOCK_K)[None, None, :]  # [WARPS, 1, BLOCK_K]
    w_at = codes + (n_row * (row_units * UNIT))[:, :, None] + word * WORDS  # [WARPS, BLOCK_N, words]
    x_at = x + (m.to(tl.int64) * x_stride)[None, :, None] + column  # [WARPS, BLOCK_M, BLOCK_K]
    x_rows = (m < M)[None, :, None]
    s_row = scale + n_row * groups
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    s, z = load_group(s_row, zero, n_row, k, K, zero_bytes, BITS, GROUP, SYMMETRIC, DTYPE)
    for _ in range(iterations):
        inside = word * RUN < K
        words = lanes(load_words(w_at, inside, BITS, EVEN), V)
        if EVEN:  # noqa: SIM108
            xv = tl.load(x_at, mask=x_rows, other=0.0)
        else:
            xv = tl.load(x_at, mask=x_rows & (column < K), other=0.0)
        xv = columns(xv, V, PER, 2)
        s_next, z_next = s, z
        if GROUP > 0 and not WORD_SCALES:  # loaded one round early: nothing else would hide its latency
            s_next, z_next = load_group(s_row, zero, n_row, k + STEP, K, zero_bytes, BITS, GROUP, SYMMETRIC, DTYPE)
        if WORD_SCALES:
            group = word * RUN // GROUP
            s_word = tl.load(s_row[:, :, None] + group, mask=inside, other=0.0).to(DTYPE)
            z_word = z
            if not SYMMETRIC:
                z_word = lanes(
                    repeat(load_zero(zero, n_row[:, :, None], group, inside, zero_bytes, BITS, DTYPE), RUN // PER), V
                )
            w = (
                floats(words, z_word, magic, BITS, DTYPE, 2)
                * lanes(repeat(s_word, RUN // PER), V)[:, :, :, :, :, :, :, None]
            )
        else:
            w = floats(words, spread(z, WARPS, BLOCK_N, SYMMETRIC), magic, BITS, DTYPE, 2)
        w = w.reshape(WARPS, BLOCK_N, BLOCK_K)
        if GROUP == 0 or WORD_SCALES:
            acc = tl.dot(w, xv, acc)
        else:
            acc += tl.dot(w, xv) * s.to(tl.float32)[:, :, None]
        s, z = s_next, z_next
        k += STEP
        word += STEP // RUN
        column += STEP
        w_at += STEP // RUN * WORDS
        x_at += STEP
    if GROUP == 0:
        acc = acc * s.to(tl.float32)[:, :, None]
    total = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M], in a fixed order
    y += m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def many(
    x,
    codes,
    scale,
    zero,
    y,
    M,
    N,
    K,
    x_stride,
    row_units,
    groups,
    zero_bytes,
    iterations,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
):
    """y[split, m, n] = sum of W[n, k] x[m, k] over the split's k, with wgmma: W from registers, x from shared memory.

    x: [M, x_stride] contiguous, zeros from K on, its columns in the order of `lanes` (S0 = 1): see `reordered`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    RUN: tl.constexpr = 32 if BITS == 3 else 32 // BITS  # codes in what `load_words` loads
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n, N - 1).to(tl.int64)  # [BLOCK_N]
    k = tl.program_id(2) * iterations * BLOCK_K
    word = k // RUN + tl.arange(0, BLOCK_K // RUN)
    w_at = codes + (n_row * (row_units * UNIT))[None, :, None] + word * WORDS  # [1, BLOCK_N, words]
    x_at = x + m.to(tl.int64)[:, None] * x_stride + (k + tl.arange(0, BLOCK_K))[None, :]
    s_row = scale + n_row * groups
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    s, z = load_group(s_row, zero, n_row, k, K, zero_bytes, BITS, GROUP, SYMMETRIC, DTYPE)
    for _ in range(iterations):
        words = lanes(load_words(w_at, (word * RUN < K)[None, None, :], BITS, False), V)
        xv = tl.load(x_at, mask=(m < M)[:, None] & (k < K), other=0.0)
        s_next, z_next = s, z
        if GROUP > 0:  # loaded one round early: nothing else would hide its latency
            s_next, z_next = load_group(s_row, zero, n_row, k + BLOCK_K, K, zero_bytes, BITS, GROUP, SYMMETRIC, DTYPE)
        z_row = z
        if not SYMMETRIC:
            z_row = z[None, :]
        w = floats(words, spread(z_row, 1, BLOCK_N, SYMMETRIC), magic, BITS, DTYPE, 1).reshape(BLOCK_N, BLOCK_K)
        if GROUP == 0:
            acc = tl.dot(w, xv.trans(1, 0), acc)
        else:
            acc += tl.dot(w, xv.trans(1, 0)) * s.to(tl.float32)[:, None]
        s, z = s_next, z_next
        k += BLOCK_K
        word += BLOCK_K // RUN
        w_at += BLOCK_K // RUN * WORDS
        x_at += BLOCK_K
    if GROUP == 0:
        acc = acc * s.to(tl.float32)[:, None]
    y += (tl.program_id(2).to(tl.int64) * M + m[None, :]) * N + n[:, None]
    tl.store(y, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def reduce(parts, y, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y [size] = parts [SPLITS, size] summed in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = parts + i
    for _ in tl.static_range(SPLITS):
        total += tl.load(at, mask=i < size, other=0.0)
        at += size
    tl.store(y + i, total.to(y.dtype.element_ty), mask=i < size)


@triton.jit
def dequantise(
    codes,
    scale,
    zero,
    out,
    first,
    end,
    K,
    row_size,
    groups,
    zero_bytes,
    group_size,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[n - first, k] = scale (code - zero) for rows first <= n < end; any bits, any group.

    WORDS: codes are int32 [N, row_size], the bits divide 32 and no word holds two groups; else uint8 [N, row_size].
    """
    n = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, end - 1).to(tl.int64)[:, None]
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < end)[:, None] & (k < K)
    if WORDS:
        PER: tl.constexpr = 32 // BITS
        word = tl.program_id(0) * (COLUMNS // PER) + tl.arange(0, COLUMNS // PER)[None, :]
        exists = (n < end)[:, None] & (word < row_size)
        packed = tl.load(codes + row * row_size + word, mask=exists, other=0)
        code = (packed[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]) & (
            (1 << BITS) - 1
        )  # [ROWS, words, PER]
        group, known = word * PER // group_size, exists & (word * PER < K)
    else:
        at = codes + row * row_size + (k.to(tl.int64) * BITS >> 3)
        start = (k * (BITS % 8)) & 7
        code = tl.load(at, mask=inside, other=0).to(tl.int32)
        if 8 % BITS != 0:
            code = code | (tl.load(at + 1, mask=inside & (start + BITS > 8), other=0).to(tl.int32) << 8)
        code = (code >> start) & ((1 << BITS) - 1)
        group, known = k // group_size, inside
    s = tl.load(scale + row * groups + group, mask=known, other=0.0).to(tl.float32)
    z = tl.zeros_like(s)
    if not SYMMETRIC:
        z = load_zero(zero, row, group, known, zero_bytes, BITS, tl.float32)
    if WORDS:
        s, z = s[:, :, None], z[:, :, None]
    w = ((code - (1 << (BITS - 1))).to(tl.float32) - z) * s
    tl.store(out + (row - first) * K + k, w.reshape(ROWS, COLUMNS).to(out.dtype.element_ty), mask=inside)
