"""Products of many tokens with 4-bit weights on Hopper GPUs; dequantisation overlaps with the previous tile's product.

The kernel is in Gluon, Triton's language of explicit layouts and copies. One warp copies tiles of x and of codes into
shared memory; eight warps convert codes into 16-bit floats in registers, the left operand of wgmma, and continue with
the next tile while the tensor cores work. `kernels/int_matmul/README.md` has the layout and the cost.

Triton's interpreter does not run Gluon: the kernel is checked on a GPU alone (`kernels.int_matmul.cases`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_N, BLOCK_K, WARPS = 128, 64, 8  # rows of W and columns of a tile; two warpgroups, with 64 rows each
UNROLLED = gl.constexpr(4)  # tiles per iteration of the loop; divides the number of stages
# Two columns of a word: bytes $3 of the word and of the word shifted by a nibble; 128 + code (float16: 1024 + code),
# less $7, times $8.
PAIR = """{
.reg .b32 t;
shr.u32 t, $1, 4;
prmt.b32 t, $1, t, $3;
lop3.b32 t, t, 0x000F000F, $5, 0xEA;
sub.rn.bf16x2 t, t, $7;
mul.rn.bf16x2 $0, t, $8;
}"""
SCALED = gl.constexpr(PAIR)
SCALED_FP16 = gl.constexpr(PAIR.replace("bf16x2", "f16x2"))
EXACT = gl.constexpr(PAIR.replace("sub.rn.bf16x2 t", "sub.rn.bf16x2 $0").replace("mul.rn.bf16x2 $0, t, $8;\n", ""))
EXACT_FP16 = gl.constexpr(EXACT.value.replace("bf16x2", "f16x2"))


@gluon.constexpr_function
def pairs_layout(rows, columns, warps):
    """[rows, words, 4, 2]: the distribution of a word's four pairs of columns over lanes, as for wgmma's left operand:
    four lanes share a row, and each has one pair of every word."""
    words = [[0, 1 << i, 0, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    bands = [[16 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], *words, [8, 0, 0, 0]], lanes, bands, [], [rows, columns // 8, 4, 2]
    )


@gluon.jit
def fetch(x, codes, xs, ws, full, empty, m, n, k, iterations, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """The producer's warp: copies tile after tile, as soon as the products with a stage's previous tile are done."""
    for step in range(iterations):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, x.block_type.nbytes + codes.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [m, k + step * BLOCK_K], bar, xs.index(stage))
        tma.async_copy_global_to_shared(codes, [n, (k + step * BLOCK_K) // 8], bar, ws.index(stage))


@gluon.jit
def group_of(scale, zero, row, k, K, groups, zero_bytes, GROUP: gl.constexpr, BASE: gl.constexpr):
    """Scale of the rows at column k, and BASE and their stored zero points; 0 from column K on, where x is 0 too."""
    g = k // GROUP if GROUP > 0 else k * 0
    s = gl.load(scale + row * groups + g, mask=k < K, other=0.0)
    z = s
    if zero is not None:
        byte = gl.load(zero + row * zero_bytes + (g >> 1), mask=k < K, other=0).to(gl.int32)
        z = (((byte >> ((g & 1) * 4)) & 15) + BASE).to(gl.float32)
    return s, z


@gluon.jit
def operand(
    words, s, z, select, magic, ZERO: gl.constexpr, GROUP: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr,
    DTYPE: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """(code - zero) scale [rows, columns] in DTYPE, rounded once; if GROUP is 0, exact and without the scale."""
    ROWS: gl.constexpr = words.shape[0]
    COLUMNS: gl.constexpr = words.shape[1] * 8
    w = gl.expand_dims(gl.expand_dims(words, 2), 3)
    if not ZERO:
        z = gl.full([ROWS], BASE + 8.0, gl.float32, gl.SliceLayout(1, WORDS))
    z = z.to(DTYPE)
    z = gl.expand_dims(gl.expand_dims(gl.expand_dims(z, 1), 2), 3)
    if GROUP > 0:
        s = gl.expand_dims(gl.expand_dims(gl.expand_dims(s.to(DTYPE), 1), 2), 3)
        SCALED_PAIR: gl.constexpr = SCALED if DTYPE == gl.bfloat16 else SCALED_FP16  # noqa: SIM300
        v = gl.inline_asm_elementwise(SCALED_PAIR, "=r,r,r,r,r,r,r,r,r", [w, select, magic, z, s], z.dtype, True, 2)
    else:
        EXACT_PAIR: gl.constexpr = EXACT if DTYPE == gl.bfloat16 else EXACT_FP16  # noqa: SIM300
        v = gl.inline_asm_elementwise(EXACT_PAIR, "=r,r,r,r,r,r,r,r", [w, select, magic, z], z.dtype, True, 2)
    return gl.convert_layout(v.reshape([ROWS, COLUMNS]), A, assert_trivial=True)


@gluon.jit
def tile(
    acc, s, z, xs, ws, full, empty, stage, phase, later, select, magic,
    ZERO: gl.constexpr, GROUP: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr, STAGES: gl.constexpr,
    BASE: gl.constexpr,
):  # fmt: skip
    """Start the product with one tile, and release the previous tile's stage once that tile's product is done.

    The registers of this tile's weights may be overwritten by the tile after the next: after the wait in the next one.
    later: is there a previous tile?
    """
    mbarrier.wait(full.index(stage), phase)
    words = ws.index(stage).load(WORDS)
    w = operand(words, s, z, select, magic, ZERO, GROUP, WORDS, A, xs.dtype, BASE)
    acc = warpgroup_mma(w, xs.index(stage).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=later)
    return acc


@gluon.jit
def multiply(
    xs, ws, full, empty, scale, zero, y, m, n, k, M, N, K, groups, zero_bytes, iterations, magic,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers' warps: compute all tiles' products, then store the sums, tokens by rows of W."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PAIRS: gl.constexpr = pairs_layout(BLOCK_N, BLOCK_K, WARPS)
    WORDS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, PAIRS))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, PAIRS)))
    HALVES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))
    ZERO: gl.constexpr = zero is not None
    BASE: gl.constexpr = 128 if xs.dtype == gl.bfloat16 else 1024  # the value of the magic number
    TURNS: gl.constexpr = STAGES // UNROLLED
    row = gl.minimum(n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS)), N - 1)
    lane, half = gl.arange(0, 4, LANES), gl.arange(0, 2, HALVES)
    select = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane * 0x1111 + 0x4400, 0), 1), 3)
    select = select + gl.expand_dims(gl.expand_dims(gl.expand_dims(half * 0, 0), 1), 2)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    s0, z0 = group_of(scale, zero, row, k, K, groups, zero_bytes, GROUP, BASE)
    s1, z1 = group_of(scale, zero, row, k + BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
    s2, z2 = group_of(scale, zero, row, k + 2 * BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
    s3, z3 = group_of(scale, zero, row, k + 3 * BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
    for turn in range(iterations // UNROLLED):
        first = (turn % TURNS) * UNROLLED
        phase = (turn // TURNS) & 1
        k += UNROLLED * BLOCK_K
        acc = tile(
            acc, s0, z0, xs, ws, full, empty, first, phase, turn > 0, select, magic, ZERO, GROUP, WORDS, A, STAGES, BASE
        )
        if GROUP > 0:  # scales are loaded one iteration early, because nothing else would hide the memory latency
            s0, z0 = group_of(scale, zero, row, k, K, groups, zero_bytes, GROUP, BASE)
        acc = tile(
            acc, s1, z1, xs, ws, full, empty, first + 1, phase, True, select, magic, ZERO, GROUP, WORDS, A, STAGES, BASE
        )
        if GROUP > 0:
            s1, z1 = group_of(scale, zero, row, k + BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
        acc = tile(
            acc, s2, z2, xs, ws, full, empty, first + 2, phase, True, select, magic, ZERO, GROUP, WORDS, A, STAGES, BASE
        )
        if GROUP > 0:
            s2, z2 = group_of(scale, zero, row, k + 2 * BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
        acc = tile(
            acc, s3, z3, xs, ws, full, empty, first + 3, phase, True, select, magic, ZERO, GROUP, WORDS, A, STAGES, BASE
        )
        if GROUP > 0:
            s3, z3 = group_of(scale, zero, row, k + 3 * BLOCK_K, K, groups, zero_bytes, GROUP, BASE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if GROUP == 0:
        acc = acc * gl.expand_dims(gl.convert_layout(s0, gl.SliceLayout(1, MMA)), 1).to(gl.float32)
    if y.dtype.element_ty == gl.float32:  # eight rows of a warp fill 32 bytes as they are
        OUT: gl.constexpr = MMA
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])
    out = gl.convert_layout(acc.to(y.dtype.element_ty), OUT)
    rows = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    tokens = m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    at = y + (gl.program_id(2).to(gl.int64) * M + tokens.to(gl.int64))[None, :] * N + rows[:, None]
    gl.store(at, out, mask=(tokens < M)[None, :] & (rows < N)[:, None])


@gluon.jit
def overlapped(
    x, codes, scale, zero, y, M, N, K, groups, zero_bytes, iterations, magic,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """y[split, m, n] = sum of W[n, k] x[m, k] over the split's `iterations` tiles of BLOCK_K columns.

    x, codes: descriptors of x [M, K] and of W's words, int32 [N, K / 8]; columns beyond K are read as 0.
    `iterations` is a multiple of UNROLLED; GROUP: number of columns that share a scale, 0: the whole row.
    """
    m = gl.program_id(0) * BLOCK_M
    n = gl.program_id(1) * BLOCK_N
    k = gl.program_id(2) * iterations * BLOCK_K
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, BLOCK_K // 8], codes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                xs, ws, full, empty, scale, zero, y, m, n, k, M, N, K, groups, zero_bytes, iterations, magic,
                GROUP, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, WARPS,
            )),
            (fetch, (x, codes, xs, ws, full, empty, m, n, k, iterations, BLOCK_K, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(empty.index(i))
