"""The Triton kernels that multiply by packed weights, or dequantise them. launch.py launches them.

Each kernel reads codes of `BITS` bits, row after row. Without a table the weight is scale (code - zero); with a table
it is scale * table[code]. `scale`, `zero` and `table` may each be None. GROUP is the number of columns that share a
scale; 0 means that the whole row shares one. Rows have fewer than 2^28 columns.
"""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.launch_order import await_inputs, prefetch  # noqa: E402
from kernels.packed_matmul.look_up import fill_pairs, load_table, look_up, look_up_pairs  # noqa: E402
from kernels.packed_matmul.unpack import (  # noqa: E402
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
def place(ends, block, EXPERTS: tl.constexpr, POWER: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tokens of a block, all from one expert: (first token, end of the expert's tokens, expert).

    Each expert has its own blocks, in order. ends: [EXPERTS], the end of each expert's tokens; POWER: a power of two,
    at least EXPERTS. For blocks after the last one, the end is before the first token.
    """
    e = tl.arange(0, POWER)
    end = tl.load(ends + e, mask=e < EXPERTS, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(blocks, 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    here = e == expert
    first = tl.sum(tl.where(here, begin + (block - upto + blocks) * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(here, end, 0), 0)
    return first, stop, tl.minimum(expert, EXPERTS - 1)


@triton.jit
def small_batch(
    x,
    codes,
    table,
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
    ends,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    PRMT: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
    WORD_SCALES: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[m, n] = sum of W[n, k] x[m, k] over k, with mma.sync, for few tokens.

    Each warp has all rows of the block and every WARPS-th block of columns; the warps' sums are added at the end.

    ends: None, or the ends of the tokens of EXPERTS experts (see `place`); W is then [EXPERTS N, K], expert after
    expert, and each token is multiplied by its expert's weight.
    UNIT: a row holds row_units * UNIT words. PER_ROW: each row has its own table.
    PRMT: see `permute`; False in the interpreter.
    PAIRS: two codes at a time are looked up in a table of pairs, which every block writes first.
    EVEN: the last block of columns ends with the row. WORD_SCALES: each word of weights is multiplied by its scale;
    otherwise the sums of a block are multiplied, and all columns of a block are in one group.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PER: tl.constexpr = 8 if BITS == 3 else 32 // BITS  # codes in a word that `load_words` returns
    RUN: tl.constexpr = 32 if BITS == 3 else PER  # codes in what it loads at once
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    STEP: tl.constexpr = WARPS * BLOCK_K
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)  # [BLOCK_N]
    if ends is not None:
        await_inputs(EARLY)
        first, M, expert = place(ends, tl.program_id(0), EXPERTS, POWER, BLOCK_M)
        m, row = first + tl.arange(0, BLOCK_M), row + expert.to(tl.int64) * N
        iterations = tl.where(first < M, iterations, 0)
    n_row = row[None, :]
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K  # [WARPS, 1]: where each warp's block begins
    word = (k // RUN)[:, :, None] + tl.arange(0, BLOCK_K // RUN)[None, None, :]  # [WARPS, 1, words]
    column = k[:, :, None] + tl.arange(0, BLOCK_K)[None, None, :]  # [WARPS, 1, BLOCK_K]
    w_at = codes + (n_row * (row_units * UNIT))[:, :, None] + word * WORDS  # [WARPS, BLOCK_N, words]
    x_at = x + (m.to(tl.int64) * x_stride)[None, :, None] + column  # [WARPS, BLOCK_M, BLOCK_K]
    x_rows = (m < M)[None, :, None]
    s_row = scale
    if scale is not None:
        s_row = scale + n_row * groups
    if PAIRS:
        pairs = fill_pairs(table, DTYPE, PRMT)
    elif table is not None:
        planes = load_table(table, row, 1 << BITS, PER_ROW, DTYPE)
    if ends is None:
        if PRMT and EARLY:
            far = tl.minimum(tl.arange(0, 8) * 32, row_units * UNIT - 1)  # words: the first 1,024 bytes of each row
            prefetch(codes + (row * (row_units * UNIT))[:, None] + far[None, :])
        await_inputs(EARLY)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    s, z = load_group(s_row, zero, n_row, k, K, zero_bytes, BITS, GROUP, DTYPE)
    for _ in range(iterations):
        inside = word * RUN < K
        words = lanes(load_words(w_at, inside, BITS, EVEN), V)
        if EVEN:
            xv = tl.load(x_at, mask=x_rows, other=0.0)
        else:
            xv = tl.load(x_at, mask=x_rows & (column < K), other=0.0)
        xv = columns(xv, V, PER, table is not None)
        s_next, z_next = s, z
        if GROUP > 0 and not WORD_SCALES:  # loaded one round early, because nothing else would hide its latency
            s_next, z_next = load_group(s_row, zero, n_row, k + STEP, K, zero_bytes, BITS, GROUP, DTYPE)
        if WORD_SCALES:
            s_word = tl.load(s_row[:, :, None] + word * RUN // GROUP, mask=inside, other=0.0).to(DTYPE)
        z_word = z
        if zero is not None:
            if WORD_SCALES:
                z_word = load_zero(zero, n_row[:, :, None], word * RUN // GROUP, inside, zero_bytes, BITS, DTYPE)
                z_word = lanes(repeat(z_word, RUN // PER), V)
            else:
                z_word = spread(z, WARPS, BLOCK_N)
        if table is None:
            w = floats(words, z_word, magic, BITS, DTYPE, 2)
        elif PAIRS:
            w = look_up_pairs(words, pairs, DTYPE, PRMT)
        else:
            w = look_up(words, planes, magic, BITS, 2, DTYPE, PRMT)
        if WORD_SCALES:
            w *= lanes(repeat(s_word, RUN // PER), V)[:, :, :, :, :, :, :, None]
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
    if GROUP == 0 and scale is not None:
        acc = acc * s.to(tl.float32)[:, :, None]
    total = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M], in a fixed order
    y += m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def large_batch(
    x,
    codes,
    table,
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
    ends,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    PRMT: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[split, m, n] = sum of W[n, k] x[m, k] over the split's k, with wgmma: W from registers, x from shared memory.

    x: [M, x_stride] contiguous, with zeros from column K on and its columns in the order of `reordered`.
    The other arguments are those of `small_batch`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    RUN: tl.constexpr = 32 if BITS == 3 else 32 // BITS  # codes in what `load_words` loads at once
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    await_inputs(EARLY)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)  # [BLOCK_N]
    k = tl.program_id(2) * iterations * BLOCK_K
    tokens = M
    if ends is not None:
        first, M, expert = place(ends, tl.program_id(0), EXPERTS, POWER, BLOCK_M)
        m, row = first + tl.arange(0, BLOCK_M), row + expert.to(tl.int64) * N
        iterations = tl.where(first < M, iterations, 0)
    word = k // RUN + tl.arange(0, BLOCK_K // RUN)
    w_at = codes + (row * (row_units * UNIT))[None, :, None] + word * WORDS  # [1, BLOCK_N, words]
    x_at = x + m.to(tl.int64)[:, None] * x_stride + (k + tl.arange(0, BLOCK_K))[None, :]
    s_row = scale
    if scale is not None:
        s_row = scale + row * groups
    if table is not None:
        planes = load_table(table, row, 1 << BITS, PER_ROW, DTYPE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    s, z = load_group(s_row, zero, row, k, K, zero_bytes, BITS, GROUP, DTYPE)
    for _ in range(iterations):
        words = lanes(load_words(w_at, (word * RUN < K)[None, None, :], BITS, False), V)
        xv = tl.load(x_at, mask=(m < M)[:, None] & (k < K), other=0.0)
        s_next, z_next = s, z
        if GROUP > 0:  # loaded one round early, because nothing else would hide its latency
            s_next, z_next = load_group(s_row, zero, row, k + BLOCK_K, K, zero_bytes, BITS, GROUP, DTYPE)
        z_row = z
        if zero is not None:
            z_row = spread(z[None, :], 1, BLOCK_N)
        if table is None:
            w = floats(words, z_row, magic, BITS, DTYPE, 1)
        else:
            w = look_up(words, planes, magic, BITS, 1, DTYPE, PRMT)
        w = w.reshape(BLOCK_N, BLOCK_K)
        # Never `tl.dot(w, x, acc)`: in triton 3.6.0 and 3.7.1 such products continue into the next round, which
        # overwrites w in registers (triton-lang/triton 9433; `kernels.harness.hazards` finds it). Each sum is waited
        # for instead, and `max_num_imprecise_acc`, which otherwise affects only float8, keeps sum and dot unfused.
        product = tl.dot(w, xv.trans(1, 0), max_num_imprecise_acc=BLOCK_K)
        if GROUP == 0:
            acc += product
        else:
            acc += product * s.to(tl.float32)[:, None]
        s, z = s_next, z_next
        k += BLOCK_K
        word += BLOCK_K // RUN
        w_at += BLOCK_K // RUN * WORDS
        x_at += BLOCK_K
    if GROUP == 0 and scale is not None:
        acc = acc * s.to(tl.float32)[:, None]
    y += (tl.program_id(2).to(tl.int64) * tokens + m[None, :]) * N + n[:, None]
    tl.store(y, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def reduce(parts, y, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """y [size] = parts [SPLITS, size] summed in order."""
    await_inputs(EARLY)
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
    table,
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
    table_stride,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[n - first, k] = W[n, k] for rows first <= n < end, in float32, rounded once; any bits, any group.

    WORDS: codes are int32 [N, row_size], the bits divide 32, and no word holds two groups. Otherwise codes are uint8
    [N, row_size]. A table is read from the L1 cache; row n's begins at n * table_stride.
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
        shifted = packed[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]
        code = shifted & ((1 << BITS) - 1)  # [ROWS, words, PER]
        group, known = word * PER // group_size, exists & (word * PER < K)
    else:
        at = codes + row * row_size + (k * BITS >> 3)
        start = (k * BITS) & 7
        code = tl.load(at, mask=inside, other=0).to(tl.int32)
        if 8 % BITS != 0:
            code = code | (tl.load(at + 1, mask=inside & (start + BITS > 8), other=0).to(tl.int32) << 8)
        code = (code >> start) & ((1 << BITS) - 1)
        group, known = k // group_size, inside
    if table is not None:
        entries = table + row * table_stride
        if WORDS:
            w = tl.load(entries[:, :, None] + code).to(tl.float32)
        else:
            w = tl.load(entries + code).to(tl.float32)
    else:
        w = (code - (1 << (BITS - 1))).to(tl.float32)
    if zero is not None:
        z = load_zero(zero, row, group, known, zero_bytes, BITS, tl.float32)
        if WORDS:
            z = z[:, :, None]
        w -= z
    if scale is not None:
        s = tl.load(scale + row * groups + group, mask=known, other=0.0).to(tl.float32)
        if WORDS:
            s = s[:, :, None]
        w *= s
    tl.store(out + (row - first) * K + k, w.reshape(ROWS, COLUMNS).to(out.dtype.element_ty), mask=inside)
