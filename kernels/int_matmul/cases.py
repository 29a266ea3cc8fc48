"""The checks of `int_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cases.products import ROTATED, Dense, contest, copies_of, cpu_copies, dense, group_size_of
from kernels.int_matmul import Packed, int_matmul, pack, panels_fit, rivals, tiles_fit, to_panels, to_tiles
from kernels.int_matmul.experts import cases as expert_cases
from kernels.int_matmul.reference import dequantize
from kernels.interpreter import triton_takes
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes, times
from kernels.tuning import under

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GOALS = {  # (bits, out, in) -> tokens -> times cuBLAS in bfloat16
    (4, 14336, 4096): {1: 3.3, 16: 3.0, 64: 0.95, 256: 0.95, 2048: 0.85},
    (4, 4096, 4096): {1: 2.0, 16: 2.0, 64: 0.95, 256: 0.95, 2048: 0.85},
    (8, 14336, 4096): {1: 1.8}, (3, 14336, 4096): {1: 3.6}, (2, 14336, 4096): {1: 4.5},
}  # fmt: skip
GOALS_US = {  # the same -> part of the GPU's name -> microseconds
    (4, 14336, 4096): {
        1: {"NVIDIA H200": 8.8, "H100 80GB HBM3": 15.0},
        64: {"H100 80GB HBM3": 25.0},
        256: {"H100 80GB HBM3": 85.0},
    }
}


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
        w, W = integer_weight(generator, out, columns, bits, group_size, symmetric, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        kind = f"W{bits} g{group_size} {'symmetric' if symmetric else 'zero points'}, {tokens} x {out} x {columns}"
        found.append(_check(kind, x, w, W))
    w, W = integer_weight(generator, 48, 256, 4, 64, False, device)
    wide = torch.randn(2 * 256, 11, generator=generator).to(device, BF16)
    found.append(_check("x transposed, every other column", wide.t()[:, ::2], w, W))
    found.append(_check("x of row stride", torch.randn(20, 300, generator=generator).to(device, FP16)[:, 9:265], w, W))
    shifted = torch.empty(w.codes.numel() + 4, dtype=torch.uint8, device=device)[4:].view_as(w.codes).copy_(w.codes)
    found.append(_check("codes not aligned", wide.t()[:, :256], w._replace(codes=shifted), W))
    return found


def _overlapped(device: torch.device) -> list[Check]:
    """Checks of the kernel that runs only on Hopper GPUs, also where the heuristic does not select it."""
    if device.type != "cuda":
        return []
    from kernels.int_matmul.triton import overlapped

    generator, found = torch.Generator().manual_seed(1), []
    for out, columns, group_size, symmetric, tokens in (
        (14336, 4096, 128, True, 64), (14336, 4096, 128, False, 256), (1000, 4096, 64, True, 600),
        (4096, 4096, 4096, False, 33), (130, 640, 128, True, 20), (100, 576, 64, False, 70),
        (4096, 11008, 128, True, 64),
    ):  # fmt: skip
        w, W = integer_weight(generator, out, columns, 4, group_size, symmetric, device)
        for dtype in (BF16, FP16) if tokens < 256 else (BF16,):
            if plan := overlapped(w, tokens, dtype):
                x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
                found.append(_check(f"overlapped, g{group_size}, {tokens} x {out} x {columns}", x, w, W, plan))
    return found


def integer_weight(
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
    return moved(pack(codes, scale, zero, bits=bits, group_size=group_size), device), W.to(device)


def moved(w: Any, device: torch.device) -> Any:
    """A stored weight with its tensors on a device."""
    return w._replace(**{name: part.to(device) for name, part in w._asdict().items() if isinstance(part, Tensor)})


def _check(name: str, x: Tensor, w: Packed, W: Tensor, plan: dict | None = None) -> Check:
    """plan: the configuration to run, or None for the selected one."""
    panels = to_panels(w) if panels_fit(w, x.dtype, x.device) else None

    def run(impl: str) -> Tensor:
        return int_matmul(x, panels if impl == "cpu" else w, impl=impl)

    if plan is not None:
        from kernels.int_matmul.triton import key

        run = under("int_matmul", key(w, x.shape[0]), plan, run)

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


def _gpu(
    device: torch.device,
    shape: tuple[int, int],
    tokens: int,
    bits: int,
    group_size: int,
    asked: TimedSizes,
    copies: int | None = None,
) -> Contest:
    from kernels.int_matmul.triton import candidates, chosen, key, overlapped

    (out, columns), dtype = shape, asked.dtype
    x = torch.randn(tokens, columns, device=device, dtype=dtype)
    rival = dense(x, shape, copies or copies_of(out * columns * bits // 8))

    def weight() -> Packed:
        codes = torch.randint(0, 256, (out, -(-columns // 8) * bits), device=device, dtype=torch.uint8)
        scale = torch.rand(out, columns // group_size, device=device).mul_(0.01).to(BF16)
        return Packed("rows", codes, scale, None, bits, group_size, shape)

    small = [weight() for _ in rival.weights]
    calls: dict[str, Callable[[int], object]] = {"triton": lambda i: int_matmul(x, small[i], impl="triton")}
    expected = {"triton": times(x, lambda: dequantize(small[0]))}
    tolerance: dict[str, float] = {}
    configurations, tune_key = {}, key(small[0], tokens)
    plan = overlapped(small[0], tokens, dtype)
    if plan and tokens > 16 and plan != chosen(small[0], tokens, dtype):
        calls["overlapped"] = under("int_matmul", tune_key, plan, calls["triton"])
        expected["overlapped"], configurations["overlapped"] = expected["triton"], plan
    wanted = asked.rivals and asked.wants(f"int_matmul W4 g{group_size} {out}x{columns} M={tokens}")
    if wanted and bits == 4 and dtype == BF16 and device.type == "cuda":
        calls |= rivals.contestants(x, small, expected, tolerance)
    return contest(
        "int_matmul",
        f"W{bits} g{group_size}",
        x,
        shape,
        stored_bytes(shape, bits, group_size),
        calls,
        expected,
        rival,
        goal=GOALS.get((bits, *shape), {}).get(tokens),
        goals_us=GOALS_US.get((bits, *shape), {}).get(tokens, {}),
        tune_key=tune_key,
        candidates=candidates(small[0], tokens, dtype),
        configurations=configurations,
        tolerance=tolerance,
    )


def stored_bytes(shape: tuple[int, int], bits: int, group_size: int) -> int:
    """Bytes of codes, and of scales in 16 bits."""
    return shape[0] * shape[1] * bits // 8 + 2 * shape[0] * shape[1] // group_size


@torch.no_grad()
def _cpu(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Iterator[Contest]:
    out, columns = shape
    group_size, copies = group_size_of(columns, 64), cpu_copies(shape)
    codes, scale = torch.randint(0, 16, shape), torch.rand(out, columns // group_size).to(dtype)
    x = torch.randn(tokens, columns).to(dtype)
    rows = [pack(codes.roll(i, 0), scale, None, bits=4, group_size=group_size) for i in range(copies)]
    calls: dict[str, Callable[[int], object]] = {}
    expected: dict[str, Expected] = {}
    if panels_fit(rows[0], dtype, x.device):
        panels = [to_panels(w) for w in rows]
        calls["panels"] = lambda i: int_matmul(x, panels[i], impl="cpu")
        expected["panels"] = times(x, lambda: dequantize(panels[0]))
    if tiles_fit(shape, 4, group_size, dtype, x.device):
        tiles = [to_tiles(w, dtype) for w in rows]
        calls["tiles"] = lambda i: int_matmul(x, tiles[i], impl="cpu")
        expected["tiles"] = times(x, lambda: dequantize(tiles[0]))
    if not calls:
        return
    rival, name = dense(x, shape, copies), str(dtype).removeprefix("torch.")
    if rival.name != name:
        calls[name], expected[name] = lambda i: F.linear(x, rival.weights[i]), times(x, lambda: rival.weights[0])
    goal = 2.5 if tokens == 1 and dtype == BF16 and shape in ((8192, 2048), (14336, 4096)) else None
    more = {"rate": "bfloat16" if dtype == BF16 else "float32", "goal": goal}
    stored = stored_bytes(shape, 4, group_size)
    yield contest("int_matmul", f"W4 g{group_size}", x, shape, stored, calls, expected, rival, **more)


def _widths(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> Iterator[Contest]:
    here, four = (panels_of(shape, b, bits, dtype) for b in (bits, 4))
    x = torch.randn(1, shape[1]).to(dtype)
    if panels_fit(here[0], dtype, x.device):
        more = {"rate": "bfloat16" if dtype == BF16 else "float32"}
        more |= {"goal": {2: 1.6, 3: 1.25}.get(bits) if dtype == BF16 else None}
        yield against_four_bits("int_matmul", "", x, here, four, {"panels": in_16_bits(x)}, **more)


def panels_of(shape: tuple[int, int], bits: int, against: int, dtype: torch.dtype) -> list[Packed]:
    """Copies of a weight of random codes in `panels`, as many as the comparison of `against` bits with 4 needs."""
    group_size = group_size_of(shape[1], 64)
    scale, codes = torch.rand(shape[0], shape[1] // group_size).to(dtype), torch.randint(1 << bits, shape)
    first = to_panels(pack(codes, scale, None, bits=bits, group_size=group_size))
    copies = max(2, ROTATED // (shape[0] * shape[1] * min(against, 4) // 8))
    return [first._replace(codes=first.codes.clone()) for _ in range(copies)]


Way = tuple[Callable[[Packed], Tensor], Callable[[Packed], Expected]]  # a product with a weight, and what is right


def in_16_bits(x: Tensor) -> Way:
    """`int_matmul` on a CPU."""
    return lambda w: int_matmul(x, w, impl="cpu"), lambda w: times(x, lambda: dequantize(w))


def against_four_bits(
    op: str, suffix: str, x: Tensor, here: list[Packed], four: list[Packed], ways: dict[str, Way], **more: Any
) -> Contest:
    """One token times codes of some bits, and times 4-bit codes, both read from memory; ours is the first way."""
    calls, expected = {}, {}
    for number, (way, (call, right)) in enumerate(ways.items()):
        for name, weights in ((way, here), (f"4 bits {way}" if number else "4 bits", four)):
            calls[name] = lambda i, call=call, weights=weights: call(weights[i])
            expected[name] = right(weights[0])
    w, rival = here[0], Dense("4 bits", four, calls["4 bits"])
    name, stored = f"W{w.bits} g{w.group_size}{suffix}, against 4 bits", stored_bytes(w.shape, w.bits, w.group_size)
    made = contest(op, name, x, w.shape, stored, calls, expected, rival, **more)
    return replace(made, expected=expected)
