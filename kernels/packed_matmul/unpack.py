"""Device functions that turn packed codes into operands of a tensor core, in registers.

A 32-bit word of 4-bit codes holds 8 neighbouring columns. `(w >> 4i) & 0x000F000F | 0x43004300` is a pair of bfloat16,
128 + code of columns i and i + 4; subtracting 136 is exact. The tensor core needs a pair to be two neighbours among the
columns that it multiplies, so the columns of W and x are reordered:

    lane c of a row (of 4), its words v (of V, one 16-byte load), pair s of the word, half h
    W:  word = c V + v            code = s + h P          (P pairs a word: 4 at 4 bits, 2 at 8, 8 at 2)
    mma.sync (kWidth 4):  position = (v, s >> 1, c, s & 1, h)       wgmma (kWidth 2):  position = (v, s, c, h)
    x:  column = (c V + v) 2P + h P + s  at that position

At 3 bits, 8 codes are 24 bits; `(u >> 3i) & 0x00070070 | magic` pairs columns i and i + 4, 12 bits apart, with the low
one four bits up: 128 + 16 code, times 1/16, exactly. At 8 bits bfloat16 has one bit too few: 128 + the low seven bits,
then minus 128 or 256, whose bit patterns differ in just the bit that the code's eighth gives. float16 uses 0x6400
(1024).

Names of sizes: a word of 32 bits holds `PER` codes; the four lanes that share a row of the tensor core's A operand hold
`V` words each, next to each other, so that 4 * V * PER columns make a chunk and a block has `C` chunks. The pairs of
one word are numbered by `S1` and `S0`: with mma.sync, as Triton feeds it (kWidth 4), a lane's two neighbouring pairs
are columns that are neighbours (S0 = 2); with wgmma they are not (S0 = 1).
"""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def columns(x, V: tl.constexpr, PER: tl.constexpr, TABLE: tl.constexpr):
    """x [BATCH, BLOCK_M, BLOCK_K] in memory's order -> [BATCH, BLOCK_K, BLOCK_M] in the order of `floats`, or, with
    TABLE, of `look_up`; both for mma.sync (S0 = 2)."""
    BATCH: tl.constexpr = x.shape[0]
    BLOCK_M: tl.constexpr = x.shape[1]
    BLOCK_K: tl.constexpr = x.shape[2]
    CHUNKS: tl.constexpr = BLOCK_K // (4 * V * PER)
    if TABLE:
        x = x.reshape(BATCH, BLOCK_M, CHUNKS, 4, V, 2, 4)  # lanes, words, halves of a word, codes
        return x.trans(0, 2, 4, 5, 3, 6, 1).reshape(BATCH, BLOCK_K, BLOCK_M)
    else:
        x = x.reshape(BATCH, BLOCK_M, CHUNKS, 4, V, 2, PER // 4, 2)
        return x.trans(0, 2, 4, 6, 3, 7, 5, 1).reshape(BATCH, BLOCK_K, BLOCK_M)


@triton.jit
def lanes(words, V: tl.constexpr):
    """Words [BATCH, BLOCK_N, n] in memory's order -> [BATCH, BLOCK_N, chunks, V, 1, 4, 1], to be broadcast over S1 and
    S0."""
    BATCH: tl.constexpr = words.shape[0]
    BLOCK_N: tl.constexpr = words.shape[1]
    words = words.reshape(BATCH, BLOCK_N, words.shape[2] // (4 * V), 4, V)
    return words.trans(0, 1, 2, 4, 3)[:, :, :, :, None, :, None]


@triton.jit
def shifts(S1: tl.constexpr, S0: tl.constexpr, STEP: tl.constexpr):
    """The shift of a word for each of its pairs: [1, 1, 1, 1, S1, 1, S0]."""
    pair = tl.arange(0, S1)[:, None, None] * S0 + tl.arange(0, S0)[None, None, :]  # [S1, 1, S0]
    return (pair * STEP)[None, None, None, None, :, :, :]


@triton.jit
def half(pairs, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The low or the high 16 bits of int32 [...], as floats."""
    if HIGH:
        pairs = pairs >> 16
    return pairs.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def load_words(at, valid, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Words of a block.

    Args:
        at: pointers [BATCH, BLOCK_N, n] to words (3 bits: to runs of 32 codes, three words each).
        valid: [BATCH, 1, n], which of them exist; not used if EVEN.

    Returns:
        [BATCH, BLOCK_N, n]; at 3 bits [BATCH, BLOCK_N, 4 n], each with 8 codes in bits 4 to 27.
    """
    if BITS == 3:
        if EVEN:
            w0, w1, w2 = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        else:
            w0, w1 = tl.load(at, mask=valid, other=0), tl.load(at + 1, mask=valid, other=0)
            w2 = tl.load(at + 2, mask=valid, other=0)
        quarter = tl.arange(0, 4)[None, None, None, :]
        w0, w1, w2 = w0.to(tl.uint32)[:, :, :, None], w1.to(tl.uint32)[:, :, :, None], w2.to(tl.uint32)[:, :, :, None]
        early = tl.where(quarter == 0, w0 << 4, (w1 << 12) | (w0 >> 20))  # codes 0-7 and 8-15
        late = tl.where(quarter == 2, (w2 << 20) | (w1 >> 12), w2 >> 4)  # codes 16-23 and 24-31
        runs = tl.where(quarter < 2, early, late).to(tl.int32)
        return runs.reshape(runs.shape[0], runs.shape[1], 4 * runs.shape[2])
    elif EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=valid, other=0)


@triton.jit
def floats(words, zero, magic, BITS: tl.constexpr, DTYPE: tl.constexpr, S0: tl.constexpr):
    """code - zero, exactly, as 16-bit floats.

    Args:
        words: [BATCH, BLOCK_N, chunks, V, 1, 4, 1] from `lanes`.
        zero: zero points minus the middle code, in DTYPE, broadcastable with words; 0.0 if there are none. They are
            subtracted separately: combined with the constant, the compiler would no longer use packed pairs.
        magic: 0x43004300 (bfloat16: 128 in both halves) or 0x64006400 (float16: 1024). It is an argument of the kernel
            so that ptxas keeps it in a register: with two constants, AND and OR would be two instructions.

    Returns:
        [BATCH, BLOCK_N, chunks, V, S1, 4, S0, 2]; the halves are computed one by one, and the compiler packs them again
    """
    BASE: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0  # noqa: SIM300
    PER: tl.constexpr = 8 if BITS == 3 else 32 // BITS
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = 0x00070070 if BITS == 3 else ((1 << BITS) - 1) * 0x00010001
    shifted = words >> shifts(PER // 2 // S0, S0, BITS)
    # 128 + the low seven bits, then minus 128 or 256 by the eighth
    if BITS == 8 and DTYPE == tl.bfloat16:  # noqa: SIM300
        low = (shifted & 0x007F007F) | magic
        high = (shifted & 0x00800080) ^ (magic ^ -0x7F7F7F80)
        w0 = half(low, False, DTYPE) + half(high, False, DTYPE) - zero
        w1 = half(low, True, DTYPE) + half(high, True, DTYPE) - zero
        return tl.join(w0, w1)
    pairs = (shifted & MASK) | magic
    w0, w1 = half(pairs, False, DTYPE), half(pairs, True, DTYPE)
    if BITS == 3:  # the code of the low half lies four bits up: 128 + 16 code
        return tl.join(w0 * 0.0625 - (BASE / 16 + MIDDLE) - zero, w1 - (BASE + MIDDLE) - zero)
    return tl.join(w0 - (BASE + MIDDLE) - zero, w1 - (BASE + MIDDLE) - zero)


@triton.jit
def load_zero(zero, row, group, valid, row_bytes, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Zero points, minus the middle code, from their stream of bits.

    row: int64 [1, BLOCK_N(, 1)]; group: [BATCH, 1(, n)]; valid: mask of the entries to read.
    """
    start = group * BITS
    at = zero + row * row_bytes + (start >> 3)
    value = tl.load(at, mask=valid, other=0).to(tl.int32)
    if 8 % BITS != 0:
        more = tl.load(at + 1, mask=valid & ((start & 7) + BITS > 8), other=0).to(tl.int32)
        value = value | (more << 8)
    return (((value >> (start & 7)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))).to(tl.float32).to(DTYPE)


@triton.jit
def load_group(s_row, zero, row, k, K, row_bytes, BITS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """Scales and zero points (minus the middle code) of the groups that contain columns k; without scales 1.0, without
    zero points 0.0."""
    group = k // GROUP if GROUP > 0 else k * 0
    s = tl.full([], 1.0, tl.float32)
    if s_row is not None:
        s = tl.load(s_row + group, mask=k < K, other=0.0)
    z = tl.full([], 0.0, DTYPE)
    if zero is not None:
        z = load_zero(zero, row, group, k < K, row_bytes, BITS, DTYPE)
    return s, z


@triton.jit
def repeat(values, TIMES: tl.constexpr):
    """[a, b, n] -> [a, b, n * TIMES], each value TIMES times in a row."""
    if TIMES == 1:
        return values
    else:
        wide = tl.broadcast_to(values[:, :, :, None], [values.shape[0], values.shape[1], values.shape[2], TIMES])
        return wide.reshape(values.shape[0], values.shape[1], values.shape[2] * TIMES)


@triton.jit
def spread(z, BATCH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zero points of a block's rows, [BATCH, BLOCK_N], reshaped to broadcast with the result of `lanes`."""
    return tl.broadcast_to(z, [BATCH, BLOCK_N])[:, :, None, None, None, None, None]
