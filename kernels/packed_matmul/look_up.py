"""Device functions that turn packed codes into the entries of a table of 8 or 16 values.

If the whole weight has one table, two codes at a time are looked up in shared memory (`look_up_pairs`). For tables per
row, and for the operands of wgmma, codes are looked up in registers (`look_up`).

Eight entries of 16 bits fill four registers: two hold the low bytes, two the high bytes. One PRMT instruction looks
four codes up in two of these registers at once, because its selector is four nibbles, the form in which the codes are
stored.
"""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.packed_matmul.unpack import half, shifts  # noqa: E402


@triton.jit
def permute(a, b, selector, PRMT: tl.constexpr):
    """Four of the eight bytes of (a, b), chosen by four nibbles of selector, each 0 to 7. All int32."""
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
    """The low (SHIFT 0) or high (8) bytes of four table entries in one int32; with PER_ROW, from each row's table.

    entries: pointer to a table, or pointers [BLOCK_N].
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
    """Eight codes per word, four bits apart."""
    if BITS == 4:
        return words
    else:  # 24 bits from bit 4 on: spread by halves, by quarters, by eighths
        words = ((words >> 4) & 0x00000FFF) | (words & 0x0FFF0000)
        words = (words & 0x003F003F) | ((words & 0x0FC00FC0) << 2)
        return (words & 0x07070707) | ((words & 0x38383838) << 1)


@triton.jit
def look_up(words, planes, magic, BITS: tl.constexpr, S0: tl.constexpr, DTYPE: tl.constexpr, PRMT: tl.constexpr):
    """Table entries of codes.

    Args:
        words: [BATCH, BLOCK_N, chunks, V, 1, 4, 1] from `lanes`.
        planes: from `load_table`.
        magic: 0x32103210, the identity selector of PRMT. It is an argument of the kernel for the reason that `floats`
            gives.

    Returns:
        [BATCH, BLOCK_N, chunks, V, 2, 4, 2, 2] if S0 = 2 (mma.sync), [BATCH, BLOCK_N, chunks, V, 2, 2, 4, 2] if S0 = 1
    """
    l0, l1, l2, l3, h0, h1, h2, h3 = planes
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
def load_table(table, row, ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, DTYPE: tl.constexpr):
    """The `planes` of `look_up`: low bytes of entries 0-3, 4-7, 8-11 and 12-15, then their high bytes.

    row: int64 [BLOCK_N], the rows whose tables are read if PER_ROW. A table of eight entries uses the first two planes
    of each kind; the others repeat them and are not read.
    """
    at = table
    if PER_ROW:
        at = table + row * ENTRIES
    LAST: tl.constexpr = ENTRIES - 8  # where the second half begins
    l0, l1 = plane(at, 0, 0, PER_ROW, DTYPE), plane(at, 4, 0, PER_ROW, DTYPE)
    l2, l3 = plane(at, LAST, 0, PER_ROW, DTYPE), plane(at, LAST + 4, 0, PER_ROW, DTYPE)
    h0, h1 = plane(at, 0, 8, PER_ROW, DTYPE), plane(at, 4, 8, PER_ROW, DTYPE)
    h2, h3 = plane(at, LAST, 8, PER_ROW, DTYPE), plane(at, LAST + 4, 8, PER_ROW, DTYPE)
    return l0, l1, l2, l3, h0, h1, h2, h3


# A table of pairs in shared memory: 256 words, one for each byte of two 4-bit codes, in 32 copies, so that each lane
# reads its own bank. Triton does not manage it: it is a static variable of the kernel, beside Triton's dynamic memory.
DECLARE = tl.constexpr(".shared .align 128 .b32 pairs_of_entries[8192];\nmov.u32 $0, pairs_of_entries;")
# $1: the word for a byte, $2: the address of its 32 copies. Lanes begin at different copies; otherwise all would use
# one bank.
FILL = tl.constexpr("""{
.reg .b32 a, l;
mov.u32 l, %laneid;
shl.b32 l, l, 4;
and.b32 l, l, 0x70;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x10;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x30;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x10;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x70;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x10;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x30;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
xor.b32 l, l, 0x10;
add.u32 a, $2, l;
st.shared.v4.b32 [a], {$1, $1, $1, $1};
mov.b32 $0, 0;
}""")
LANE = tl.constexpr("""{
.reg .b32 l;
mov.u32 l, %laneid;
shl.b32 $0, l, 2;
}""")
# $1: 128 times the byte, $2: the result of LANE, $3: the address of the table.
READ = tl.constexpr("""{
.reg .b32 a;
or.b32 a, $1, $2;
add.u32 a, a, $3;
ld.shared.b32 $0, [a];
}""")


@triton.jit
def fill_pairs(table, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Write the table of pairs; returns the argument with which `look_up_pairs` reads it."""
    if not ASM:  # for the interpreter
        return table, table
    byte = tl.arange(0, 256)
    low = tl.load(table + (byte & 15)).to(tl.float32).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = tl.load(table + (byte >> 4)).to(tl.float32).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    base = tl.inline_asm_elementwise(DECLARE, "=r,r", [0], tl.int32, False, 1)
    tl.inline_asm_elementwise(FILL, "=r,r,r", [low | (high << 16), base + byte * 128], tl.int32, False, 1)
    tl.debug_barrier()
    # Not pure, and so placed after the barrier, like all reads that depend on it. Each thread has its own value in this
    # scalar, which only `look_up_pairs` may use.
    return base, tl.inline_asm_elementwise(LANE, "=r,r", [base], tl.int32, False, 1)


@triton.jit
def look_up_pairs(words, pairs, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """`look_up` of 16 entries for mma.sync (S0 = 2), from the table that `fill_pairs` wrote."""
    base, lane = pairs
    if not ASM:
        byte = (words >> shifts(2, 2, 8)) & 255
        low, high = tl.load(base + (byte & 15)), tl.load(base + (byte >> 4))
        return tl.join(low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE))
    offsets = ((words >> shifts(2, 2, 8)) << 7) & 0x7F80
    found = tl.inline_asm_elementwise(READ, "=r,r,r,r", [offsets, lane, base], tl.int32, True, 1)
    return tl.join(half(found, False, DTYPE), half(found, True, DTYPE))
