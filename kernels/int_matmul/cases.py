"""The checks of `int_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.int_matmul import Packed, int_matmul, pack, panels_fit, rivals, tiles_fit, to_panels, to_tiles
from kernels.int_matmul.experts import cases as expert_cases
from kernels.int_matmul.reference import dequantize
from kernels.interpreter import triton_takes
from kernels.linear.onednn import lay_out, lays_out, product
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times
from kernels.tuning import trying

ROTATED = 256 << 20  # bytes of packed weights in rotation
MOST = 1024  # largest number of copies: small weights are in a cache anyway
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GOALS = {  # (bits, out) -> tokens -> times cuBLAS in bfloat16
    (4, 14336): {1: 3.3, 16: 3.0, 64: 2.0, 256: 0.85, 2048: 0.85},
    (4, 4096): {1: 2.0, 16: 2.0, 64: 2.0, 256: 0.85, 2048: 0.85},
    (8, 14336): {1: 1.8}, (3, 14336): {1: 3.6}, (2, 14336): {1: 4.5},
}  # fmt: skip


def checks(device: torch.device) -> list[Check]:
    cases = (  # bits, out, in, group, symmetric, tokens, dtype
        (4, 48, 512, 128, True, (1,), BF16),
        (4, 37, 640, 128, False, (3,), FP16),
        (4, 64, 256, 64, True, (2, 3), BF16),
        (4, 70, 96, 32, False, (7,), BF16),
        (4, 40, 200, 200, True, (16,), FP16),
        (4, 150, 384, 128, True, (33,), FP16),
        (4, 131, 576, 64, False, (70,), BF16),
        (4, 33, 60, 12, False, (5,), FP16),
        (4, 24, 128, 32, True, (4,), FP32),
        (8, 48, 320, 64, True, (2,), BF16),
        (8, 37, 100, 100, False, (5,), BF16),
        (8, 130, 256, 128, False, (20,), FP16),
        (3, 48, 384, 128, True, (1,), BF16),
        (3, 40, 192, 64, False, (9,), FP16),
        (3, 70, 256, 128, False, (18,), BF16),
        (2, 48, 512, 128, True, (1,), FP16),
        (2, 40, 192, 32, False, (3,), BF16),
        (2, 70, 256, 64, False, (40,), BF16),
        (5, 21, 60, 12, False, (3,), BF16),
        (6, 21, 40, 40, True, (3,), FP32),
        (3, 5, 7, 7, False, (2,), FP16),
        (4, 128, 4096, 128, True, (1,), FP16),
        (4, 48, 256, 128, False, (600,), BF16),
        (4, 32, 128, 64, True, (0,), BF16),
    )
    if device.type == "cuda":  # loops over all columns and several blocks of tokens take too long in the interpreter
        cases += tuple(
            (bits, 1024, 4096, group_size, bits != 2, (tokens,), BF16)
            for bits in (4, 8, 3, 2)
            for group_size in (128, 4096)
            for tokens in (33, 200)
        )
    generator = torch.Generator().manual_seed(0)
    found = [*_overlapped(device), *expert_cases.checks(device)]
    for bits, out, columns, group_size, symmetric, tokens, dtype in cases:
        w, W = _weight(generator, out, columns, bits, group_size, symmetric, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        kind = f"W{bits} g{group_size} {'symmetric' if symmetric else 'zero points'}, {tokens} x {out} x {columns}"
        found.append(_check(kind, x, w, W))
    w, W = _weight(generator, 48, 256, 4, 64, False, device)
    wide = torch.randn(2 * 256, 11, generator=generator).to(device, BF16)
    found.append(_check("x transposed, every other column", wide.t()[:, ::2], w, W))
    found.append(_check("x of row stride", torch.randn(20, 300, generator=generator).to(device, FP16)[:, 9:265], w, W))
    shifted = torch.empty(w.codes.numel() + 4, dtype=torch.uint8, device=device)[4:].view_as(w.codes).copy_(w.codes)
    found.append(_check("codes not aligned", wide.t()[:, :256], w._replace(codes=shifted), W))
    return found


def _overlapped(device: torch.device) -> list[Check]:
    """Checks of the kernel that runs only on Hopper GPUs and that no heuristic selects."""
    if device.type != "cuda":
        return []
    from kernels.int_matmul.triton import overlapped

    generator, found = torch.Generator().manual_seed(1), []
    for out, columns, group_size, symmetric, tokens in (
        (14336, 4096, 128, True, 64), (14336, 4096, 128, False, 256), (1000, 4096, 64, True, 600),
        (4096, 4096, 4096, False, 33), (130, 640, 128, True, 20), (100, 576, 64, False, 70),
        (4096, 11008, 128, True, 64),
    ):  # fmt: skip
        w, W = _weight(generator, out, columns, 4, group_size, symmetric, device)
        if plan := overlapped(w, tokens):
            for dtype in (BF16, FP16) if tokens < 256 else (BF16,):
                x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
                found.append(_check(f"overlapped, g{group_size}, {tokens} x {out} x {columns}", x, w, W, plan))
    return found


def _weight(
    generator: torch.Generator,
    out: int,
    columns: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    device: torch.device,
) -> tuple[Packed, Tensor]:
    """The packed weight, and W in float64."""
    groups = columns // group_size
    codes = torch.randint(0, 1 << bits, (out, columns), generator=generator)
    scale = ((torch.rand(out, groups, generator=generator) - 0.3) * 0.1).bfloat16()
    zero = None if symmetric else torch.randint(0, 1 << bits, (out, groups), generator=generator)
    shift = 1 << (bits - 1) if zero is None else zero.repeat_interleave(group_size, 1)
    W = (codes - shift).double() * scale.double().repeat_interleave(group_size, 1)
    w = pack(codes, scale, zero, bits=bits, group_size=group_size)
    return _moved(w, device), W.to(device)


def _moved(w: Packed, device: torch.device) -> Packed:
    return w._replace(
        codes=w.codes.to(device), scale=w.scale.to(device), zero=None if w.zero is None else w.zero.to(device)
    )


def _check(name: str, x: Tensor, w: Packed, W: Tensor, plan: dict | None = None) -> Check:
    """plan: the configuration to run, or None for the selected one."""
    panels = to_panels(w) if panels_fit(w, x.dtype, x.device) else None

    def run(impl: str) -> Tensor:
        return int_matmul(x, panels if impl == "cpu" else w, impl=impl)

    if plan is not None:
        run = _by(plan, run, w, x.shape[0])

    impls = ("triton",) if panels is None else ("triton", "cpu")
    dtype = str(x.dtype).removeprefix("torch.")
    return Check("int_matmul", f"{name}, {dtype}", run, lambda: x.double() @ W.t(), TOLERANCE[x.dtype], impls)


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy and triton_takes(device):
        yield _gpu(device, (96, 256), 2, 4, 128, asked, 2)
        yield _gpu(device, (96, 256), 20, 4, 128, asked, 2)
        yield expert_cases.contest(device, 4, (48, 256), 6, asked.dtype, 2)
    elif toy:
        yield from _cpu((128, 256), 1, asked.dtype)
    elif device.type == "cuda":
        for shape in asked.shapes or ((14336, 4096), (4096, 4096)):
            for tokens in asked.tokens or (1, 16, 64, 256, 2048):
                yield _gpu(device, shape, tokens, 4, group_size_of(shape[1], 128), asked)
        for shape in asked.shapes or ((14336, 4096),):
            for bits in (8, 3, 2):
                for tokens in asked.tokens or (1, 16):
                    yield _gpu(device, shape, tokens, bits, group_size_of(shape[1], 128), asked)
        if not asked.shapes:
            for pairs in (8, 128, 4096):  # 1, 16 and 512 tokens, 8 experts each, of a layer of Qwen3-30B-A3B
                yield expert_cases.contest(device, 128, (1536, 2048), pairs, asked.dtype)
    else:
        for shape in asked.shapes or ((576, 576), (1536, 576), (576, 1536), (8192, 2048), (4096, 4096), (14336, 4096)):
            for tokens in asked.tokens or (1, 4, 16, 64, 256):
                yield from _cpu(shape, tokens, asked.dtype)
        for shape in asked.shapes or ((8192, 2048), (14336, 4096)):
            for bits in (2, 3, 5, 6, 8):
                yield from _widths(shape, bits, asked.dtype)


def group_size_of(columns: int, wanted: int) -> int:
    """The largest group up to `wanted` that divides the columns, a multiple of 8 if there is one."""
    divisors = [size for size in range(min(wanted, columns), 0, -1) if columns % size == 0]
    return next((size for size in divisors if size % 8 == 0), divisors[0])


def _gpu(
    device: torch.device,
    shape: tuple[int, int],
    tokens: int,
    bits: int,
    group_size: int,
    asked: TimedSizes,
    copies: int | None = None,
) -> Contest:
    from kernels.int_matmul.triton import candidates, key, overlapped

    (out, columns), dtype = shape, asked.dtype
    copies = copies or min(MOST, max(2, -(-ROTATED // (out * columns * bits // 8))))
    x = torch.randn(tokens, columns, device=device, dtype=dtype)

    def weight() -> Packed:
        codes = torch.randint(0, 256, (out, -(-columns // 8) * bits), device=device, dtype=torch.uint8)
        scale = torch.rand(out, columns // group_size, device=device).mul_(0.01).to(BF16)
        return Packed("rows", codes, scale, None, bits, group_size, shape)

    small = [weight() for _ in range(copies)]
    dense = [torch.randn(out, columns, device=device, dtype=dtype) for _ in range(copies)]
    name = str(dtype).removeprefix("torch.")
    contestants: dict[str, Callable[[int], object]] = {
        "triton": lambda i: int_matmul(x, small[i], impl="triton"),
        name: lambda i: F.linear(x, dense[i]),
    }
    expected = {"triton": times(x, lambda: dequantize(small[0])), name: times(x, lambda: dense[0])}
    tolerance: dict[str, float] = {}
    if bits == 4 and dtype != FP32 and tokens > 16 and (plan := overlapped(small[0], tokens)):
        contestants["overlapped"] = _by(plan, lambda i: int_matmul(x, small[i], impl="triton"), small[0], tokens)
        expected["overlapped"] = expected["triton"]
    wanted = asked.rivals and asked.wants(f"int_matmul W4 g{group_size} {out}x{columns} M={tokens}")
    if wanted and bits == 4 and dtype == BF16 and device.type == "cuda":
        contestants |= rivals.contestants(x, small, expected, tolerance)
    goals = GOALS.get((bits, out), {})
    return Contest(
        op="int_matmul",
        detail=f"W{bits} g{group_size}",
        shape=shape,
        tokens=tokens,
        contestants=contestants,
        copies=copies,
        ours="triton",
        baseline=name,
        rate=name,
        least_bytes=_least(shape, tokens, bits, group_size),
        flops=2 * tokens * out * columns,
        goal=goals.get(tokens),
        goal_us=8.8 if (bits, out, tokens) == (4, 14336, 1) else None,
        tune_key=key(small[0], tokens),
        candidates=candidates(small[0], tokens),
        expected=expected,
        tolerance=tolerance,
    )


def _by(plan: dict, call: Callable, w: Packed, tokens: int) -> Callable:
    """The call with this configuration."""
    from kernels.int_matmul.triton import key

    def run(which: int | str) -> Tensor:
        with trying("int_matmul", key(w, tokens), plan):
            return call(which)

    return run


def _least(shape: tuple[int, int], tokens: int, bits: int, group_size: int) -> int:
    out, columns = shape
    return out * columns * bits // 8 + 2 * out * columns // group_size + 2 * tokens * (out + columns)


@torch.no_grad()
def _cpu(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Iterator[Contest]:
    out, columns = shape
    group_size = group_size_of(columns, 64)
    copies = max(2, min(64, (128 << 20) // (2 * out * columns)))
    codes, scale = torch.randint(0, 16, shape), torch.rand(out, columns // group_size).to(dtype)
    x = torch.randn(tokens, columns).to(dtype)
    rows = [pack(codes.roll(i, 0), scale, None, bits=4, group_size=group_size) for i in range(copies)]
    dense = [torch.randn(out, columns).to(dtype) for _ in range(copies)]
    name = str(dtype).removeprefix("torch.")
    contestants: dict[str, Callable[[int], object]] = {name: lambda i: F.linear(x, dense[i])}
    expected = {name: times(x, lambda: dense[0])}
    baseline = name
    if lays_out(dtype) and dtype != FP16:
        reordered = [lay_out(W, tokens) for W in dense]
        baseline = f"{name} prepacked"
        contestants[baseline] = lambda i: product(x, reordered[i])
        expected[baseline] = expected[name]
    if tiles_fit(shape, 4, group_size, dtype, x.device):
        tiles = [to_tiles(w, dtype) for w in rows]
        contestants["tiles"] = lambda i: int_matmul(x, tiles[i], impl="cpu")
        expected["tiles"] = times(x, lambda: dequantize(tiles[0]))
    if panels_fit(rows[0], dtype, x.device):
        panels = [to_panels(w) for w in rows]
        contestants["panels"] = lambda i: int_matmul(x, panels[i], impl="cpu")
        expected["panels"] = times(x, lambda: dequantize(panels[0]))
    ours = next((name for name in ("panels", "tiles") if name in contestants), None)
    if ours is not None:
        yield Contest(
            op="int_matmul",
            detail=f"W4 g{group_size}",
            shape=shape,
            tokens=tokens,
            contestants=contestants,
            copies=copies,
            ours=ours,
            baseline=baseline,
            rate="bfloat16" if dtype == BF16 else "float32",
            least_bytes=_least(shape, tokens, 4, group_size),
            flops=2 * tokens * out * columns,
            goal=2.5 if tokens == 1 and dtype == BF16 and shape in ((8192, 2048), (14336, 4096)) else None,
            expected=expected,
        )


@torch.no_grad()
def _widths(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> Iterator[Contest]:
    """One token times codes of `bits` bits, and times 4-bit codes, both read from memory."""
    out, columns = shape
    group_size = group_size_of(columns, 64)
    scale = torch.rand(out, columns // group_size).to(dtype)
    x = torch.randn(1, columns).to(dtype)
    if not panels_fit(
        pack(torch.zeros(shape, dtype=torch.uint8), scale, None, bits=4, group_size=group_size), dtype, x.device
    ):
        return
    copies = max(2, ROTATED // (out * columns * min(bits, 4) // 8))

    def weights(bits: int) -> list[Packed]:
        first = to_panels(pack(torch.randint(1 << bits, shape), scale, None, bits=bits, group_size=group_size))
        return [first._replace(codes=first.codes.clone()) for _ in range(copies)]

    here, four = weights(bits), weights(4)
    yield Contest(
        op="int_matmul",
        detail=f"W{bits} g{group_size}, against 4 bits",
        shape=shape,
        tokens=1,
        contestants={
            "panels": lambda i: int_matmul(x, here[i], impl="cpu"),
            "4 bits": lambda i: int_matmul(x, four[i], impl="cpu"),
        },
        copies=copies,
        ours="panels",
        baseline="4 bits",
        rate="bfloat16" if dtype == BF16 else "float32",
        least_bytes=_least(shape, 1, bits, group_size),
        flops=2 * out * columns,
        goal={2: 1.6, 3: 1.25}.get(bits) if dtype == BF16 else None,
        expected={
            "panels": times(x, lambda: dequantize(here[0])),
            "4 bits": times(x, lambda: dequantize(four[0])),
        },
    )
