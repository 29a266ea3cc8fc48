"""The checks of `w4a8_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import native
from kernels.capability import too_old
from kernels.cases.products import contest, copies_of, cpu_copies, dense, group_size_of
from kernels.int_matmul import Packed, int_matmul, pack, to_panels
from kernels.int_matmul.cases import against_four_bits, in_16_bits, integer_weight, moved, panels_of, stored_bytes
from kernels.int_matmul.reference import dequantize
from kernels.interpreter import triton_takes
from kernels.linear.onednn import lays_out
from kernels.lut_matmul import Codebook, pack_codebook
from kernels.lut_matmul import to_panels as codebook_panels
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes, times
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w4a8_matmul.codes import even_first, w4a8_codes_matmul
from kernels.w4a8_matmul.groups import native_takes, triton_reads
from kernels.w8a8_matmul import prepacked_fits, quantize_rows, quantize_weight, to_prepacked, w8a8_matmul
from kernels.w8a8_matmul.cases import SHORT, of_codes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def checks(device: torch.device) -> list[Check]:
    cases = (  # bits, out, in, group, symmetric, tokens, dtype, bits of x, group of x, static
        (4, 48, 512, 128, True, (1,), BF16, 8, None, False),
        (4, 37, 192, 64, True, (3,), FP32, 8, None, True),
        (4, 37, 192, 64, True, (1,), FP32, 4, None, True),
        (4, 70, 1536, 128, True, (1,), FP16, 8, None, False),  # sums of three splits
        (4, 64, 256, 64, True, (2, 9), FP16, 4, 128, False),
        (4, 64, 256, 64, True, (67,), FP32, 8, None, False),
        (4, 70, 384, 192, True, (3,), FP32, 4, 64, False),
        (4, 70, 1536, 128, True, (3,), BF16, 8, None, False),  # sums of three splits
        (4, 37, 1152, 64, True, (16,), FP32, 8, 128, False),
        (4, 131, 576, 64, False, (130,), BF16, 8, None, False),
        (4, 33, 256, 256, True, (5,), FP32, 8, 64, True),
        (4, 150, 192, 48, False, (40,), FP32, 8, None, False),
        (4, 40, 60, 12, False, (5,), FP16, 8, None, False),
        (8, 37, 320, 64, True, (33,), FP32, 8, None, False),
        (8, 48, 160, 32, False, (19,), FP32, 8, 16, False),
        (6, 50, 160, 80, False, (18,), FP32, 4, None, False),
        (5, 21, 96, 16, True, (2,), FP32, 8, 32, False),
        (3, 48, 384, 128, False, (29,), FP32, 8, None, False),
        (3, 20, 72, 24, True, (6,), FP32, 8, None, False),
        (2, 70, 256, 32, False, (7,), FP32, 8, 64, False),
        (2, 33, 256, 64, True, (140,), BF16, 4, 16, False),
        (4, 32, 128, 64, True, (0,), BF16, 8, None, False),
    )
    generator = torch.Generator().manual_seed(0)
    found = []
    for bits, out, columns, group_size, symmetric, tokens, dtype, x_bits, x_group, static in cases:
        w, W = integer_weight(generator, out, columns, bits, group_size, symmetric, device)
        x = (torch.randn(*tokens, columns, generator=generator) * 3).to(device, dtype)
        steps = columns // x_group if x_group else 1
        scale = (torch.rand(steps, generator=generator) * 0.5 + 0.01).to(device) if static else None
        zeros = "symmetric" if symmetric else "zero points"
        name = f"W{bits} g{group_size} {zeros} A{x_bits} g{x_group}{' static' * static}, {tokens} x {out} x {columns}"
        found.append(_check(name, x, w, W, x_bits, x_group, scale))
    for group_size, tokens, dtype, x_bits, x_group in (
        (16, 3, BF16, 8, None),
        (32, 35, FP32, 4, 32),
        (64, 130, FP16, 8, None),
    ):
        x = torch.randn(tokens, 192, generator=generator).to(device, dtype)
        w, W = _looked_up(generator, (37, 192), group_size, device)
        name = f"a table of integers g{group_size} A{x_bits} g{x_group}, {tokens} x 37 x 192"
        found.append(_check(name, x, w, W, x_bits, x_group, None))
    for bits, out, columns, group_size, tokens, dtype, x_group, wide, static in (
        (4, 48, 512, 128, 5, BF16, 64, 3, False),
        (4, 37, 256, 64, 40, FP32, 128, 1, True),
        (4, 50, 576, 64, 19, FP16, 64, 9, False),
        (4, 70, 192, 16, 33, FP32, 32, 1, False),
        (3, 20, 96, 48, 130, BF16, 16, 2, False),
    ):
        w, W = integer_weight(generator, out, columns, bits, group_size, True, device)
        x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
        scale = (torch.rand(columns // x_group, generator=generator) * 0.5 + 0.01).to(device) if static else None
        order = torch.randperm(columns, generator=generator).int().to(device) if wide != 9 else None
        how = {"x_wide": wide, "x_order": order}
        name = f"W{bits} g{group_size} A4 g{x_group} of which {wide} in 8 bits{', ordered' * (order is not None)}"
        name = f"{name}{' static' * static}, {tokens} x {out} x {columns}"
        found.append(_check(name, x, w, W, 4, x_group, scale, **how))
    for out, columns, group_size, symmetric, tokens, dtype, x_group, static in (
        (48, 512, 128, True, 3, BF16, None, False),
        (70, 1536, 128, True, 1, BF16, None, False),
        (37, 256, 64, True, 40, FP32, 128, True),
        (131, 384, 192, True, 130, FP16, 64, False),
        (20, 96, 24, False, 5, FP32, None, False),
    ):
        w, W = integer_weight(generator, out, columns, 4, group_size, symmetric, device)
        x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
        scale = (torch.rand(columns // x_group, generator=generator) * 0.01 + 0.002).to(device) if static else None
        name = f"W4 g{group_size} fp8 g{x_group}{' static' * static}, {tokens} x {out} x {columns}"
        found.append(_check(name, x, w, W, 8, x_group, scale, x_float=True))
    float8 = [(3, 64, None, BF16, True)] if too_old(device, float8=True) is None else []
    for tokens, group_size, x_group, dtype, x_float in (
        (3, 64, None, BF16, False), (33, 128, 64, FP32, False), (1, 64, None, BF16, False), *float8
    ):  # fmt: skip
        w, W = integer_weight(generator, 37, 256, 4, group_size, True, device)
        found.append(_check_codes(generator, device, tokens, w, W, x_group, dtype, x_float))
    w, W = integer_weight(generator, 48, 256, 4, 64, True, device)
    wide = torch.randn(2 * 256, 11, generator=generator).to(device, BF16).t()[:, ::2]
    found.append(_check("x transposed, every other column", wide, w, W, 8, None, None))
    return found


def _looked_up(
    generator: torch.Generator, shape: tuple[int, int], group_size: int, device: torch.device
) -> tuple[Codebook, Tensor]:
    """Indices into a table of integers, in rows, and W in float64."""
    table = torch.randint(-127, 128, (16,), generator=generator).float()
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = ((torch.rand(shape[0], shape[1] // group_size, generator=generator) - 0.3) * 0.01).to(BF16)
    W = table.double()[codes] * scale.double().repeat_interleave(group_size, 1)
    return moved(pack_codebook(codes, table, scale, group_size=group_size), device), W.to(device)


def _check(
    name: str,
    x: Tensor,
    w: Packed | Codebook,
    W: Tensor,
    x_bits: int,
    x_group: int | None,
    x_scale: Tensor | None,
    x_wide: int = 0,
    x_order: Tensor | None = None,
    x_float: bool = False,
) -> Check:
    in_panels = codebook_panels if isinstance(w, Codebook) else to_panels
    panels = in_panels(w) if w.group_size % 8 == 0 and x.device.type == "cpu" and native.w4a8_runs() else None
    cpu = panels is not None and native_takes(panels, x_group) and not x_float
    triton = triton_reads(w, x_group) and too_old(x.device, float8=x_float) is None

    def run(impl: str) -> Tensor:
        return w4a8_matmul(
            x, panels if impl == "cpu" else w, x_bits=x_bits, x_group=x_group, x_scale=x_scale, x_wide=x_wide,
            x_order=x_order, x_float=x_float, impl=impl,
        )  # fmt: skip

    def expected() -> Tensor:
        if x_float:
            codes, step = quantize_rows(x, torch.float8_e4m3fn, scale=x_scale, block=x_group)
        else:
            codes, step = _codes(x, x_bits, x_group, x_scale, x_wide, x_order)
        return (codes.double() * step.double().repeat_interleave(x_group or x.shape[-1], -1)) @ W.t()

    impls = ("triton",) * triton + ("cpu",) * cpu
    dtype = str(x.dtype).removeprefix("torch.")
    short = {"triton": SHORT} if x_float and x.is_cuda else {}  # tensor cores keep sums of fp8 in about 14 bits
    return Check("w4a8_matmul", f"{name}, {dtype}", run, expected, TOLERANCE[x.dtype], impls, short)


def _check_codes(
    generator: torch.Generator,
    device: torch.device,
    tokens: int,
    w: Packed,
    W: Tensor,
    x_group: int | None,
    dtype: torch.dtype,
    x_float: bool,
) -> Check:
    columns = w.shape[1]
    codes = torch.randint(-127, 128, (tokens, columns), generator=generator).to(device, torch.int8)
    codes = codes.to(torch.float8_e4m3fn) if x_float else codes
    groups = columns // (x_group or columns)
    step = (torch.rand(tokens, groups, generator=generator) + 0.1).to(device)

    def run(impl: str) -> Tensor:
        return w4a8_codes_matmul(even_first(codes), step, w, dtype=dtype, impl=impl)

    def expected() -> Tensor:
        return (codes.double() * step.double().repeat_interleave(columns // groups, -1)) @ W.t()

    kind = str(dtype).removeprefix("torch.")
    name = (
        f"given {'fp8 ' * x_float}codes, W4 g{w.group_size} A8 g{x_group}, {tokens} x {w.shape[0]} x {columns}, {kind}"
    )
    return Check("w4a8_matmul", name, run, expected, TOLERANCE[dtype])


def _codes(
    x: Tensor, x_bits: int, x_group: int | None, x_scale: Tensor | None, x_wide: int, x_order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and steps, with the first `x_wide` groups in 8 bits and the others in `x_bits`."""
    x = x if x_order is None else x[..., x_order.long()]
    found = [quantize_rows(x, torch.int8, scale=x_scale, block=x_group, bits=bits) for bits in (8, x_bits)]
    border = (x_wide * (x_group or 0), x_wide)
    codes, step = (
        torch.cat([first[..., :at], second[..., at:]], -1) for at, first, second in zip(border, *found, strict=True)
    )
    return codes, step


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy and triton_takes(device):
        for tokens in (2, 20):
            yield _gpu(device, (96, 256), tokens, asked.dtype, 2)
    elif toy:
        yield from _cpu((128, 256), 16, asked.dtype)
    elif device.type == "cuda":
        for shape in asked.shapes or ((14336, 4096), (4096, 4096)):
            for tokens in asked.tokens or (1, 16, 64, 256, 2048):
                yield _gpu(device, shape, tokens, asked.dtype, copies_of(shape[0] * shape[1]))
    else:
        for shape in asked.shapes or ((576, 576), (1536, 576), (576, 1536), (4096, 4096)):
            for tokens in asked.tokens or (1, 16, 64, 256, 512):
                yield from _cpu(shape, tokens, asked.dtype)
        for shape in asked.shapes or ((8192, 2048), (14336, 4096)):
            for bits in (2, 3):
                yield from _widths(shape, bits, asked.dtype)


def rounded(x: Tensor, w: Callable[[], Packed], bits: int = 8, kind: torch.dtype = torch.int8) -> Expected:
    """x Wᵀ in float64 with each token of x rounded to `bits`, or to float8."""

    def expected(_: object) -> Tensor:
        codes, step = quantize_rows(x, kind, bits=bits)
        return (codes.double() * step.double()) @ dequantize(w()).double().t()

    return expected


def _gpu(device: torch.device, shape: tuple[int, int], tokens: int, dtype: torch.dtype, copies: int) -> Contest:
    from kernels.w4a8_matmul.triton import candidates, key

    out, columns = shape
    x = torch.randn(tokens, columns, device=device, dtype=dtype)
    group_size, rival = 128, dense(x, shape, copies)
    scale = torch.rand(out, columns // group_size, device=device).to(BF16)
    codes = [torch.randint(0, 256, (out, columns // 2), device=device, dtype=torch.uint8) for _ in range(copies)]
    small = [Packed("rows", c, scale, None, 4, group_size, shape) for c in codes]
    eight = [quantize_weight(torch.randn(shape, device=device), torch.int8) for _ in range(copies)]
    fp8 = {"triton fp8": lambda i: w4a8_matmul(x, small[i], x_float=True, impl="triton")}
    calls = {
        "triton": lambda i: w4a8_matmul(x, small[i], impl="triton"),
        **(fp8 if too_old(device, float8=True) is None else {}),
        "w8a8": lambda i: w8a8_matmul(x, eight[i], impl="triton"),
        "int_matmul": lambda i: int_matmul(x, small[i], impl="triton"),
    }
    expected = {
        "triton": rounded(x, lambda: small[0]),
        "triton fp8": rounded(x, lambda: small[0], kind=torch.float8_e4m3fn),
        "w8a8": of_codes(x, lambda: eight[0]),
        "int_matmul": times(x, lambda: dequantize(small[0])),
    }
    more = {"rate": "int8", "tune_key": key(small[0], tokens), "candidates": candidates(tokens)}
    stored = stored_bytes(shape, 4, group_size)
    return contest("w4a8_matmul", f"W4 g{group_size} A8", x, shape, stored, calls, expected, rival, **more)


@torch.no_grad()
def _cpu(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Iterator[Contest]:
    """Compared with 8-bit weights and activations, the same weights with 16-bit activations, and 16-bit weights."""
    out, columns = shape
    group_size = group_size_of(columns, 64)
    if not native.w4a8_runs() or not lays_out(dtype) or dtype == FP16:
        return
    copies = cpu_copies(shape)
    x = torch.randn(tokens, columns).to(dtype)
    codes, scale = torch.randint(16, shape), torch.rand(out, columns // group_size).to(BF16)
    first = to_panels(pack(codes, scale, None, bits=4, group_size=group_size))
    small = [first._replace(codes=first.codes.clone()) for _ in range(copies)]
    rival = dense(x, shape, copies)
    calls: dict[str, Callable[[int], object]] = {
        "cpu": lambda i: w4a8_matmul(x, small[i], impl="cpu"),
        "A4": lambda i: w4a8_matmul(x, small[i], x_bits=4, impl="cpu"),
        "int_matmul": lambda i: int_matmul(x, small[i], impl="cpu"),
    }
    expected: dict[str, Expected] = {
        "cpu": rounded(x, lambda: small[0]),
        "A4": rounded(x, lambda: small[0], 4),
        "int_matmul": times(x, lambda: dequantize(small[0])),
        "w8a8": of_codes(x, lambda: rows),
    }
    rows = quantize_weight(rival.weights[0], torch.int8)
    if prepacked_fits(rows):
        eight = [to_prepacked(quantize_weight(W, torch.int8)) for W in rival.weights]
        calls["w8a8"] = lambda i: w8a8_matmul(x, eight[i], impl="cpu")
    baseline = "w8a8" if tokens >= 256 and "w8a8" in calls else "int_matmul"
    more = {"baseline": baseline, "rate": "int8", "goal": 1.0 if tokens == 1 or tokens >= 256 else None}
    stored = stored_bytes(shape, 4, group_size)
    yield contest("w4a8_matmul", f"W4 g{group_size} A8", x, shape, stored, calls, expected, rival, **more)


def _widths(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> Iterator[Contest]:
    if not native.w4a8_runs():
        return
    here, four = (panels_of(shape, b, bits, BF16) for b in (bits, 4))
    x = torch.randn(1, shape[1]).to(dtype)
    ways = {"cpu": (lambda w: w4a8_matmul(x, w, impl="cpu"), lambda w: rounded(x, lambda: w)), "A16": in_16_bits(x)}
    goal = {2: 1.6, 3: 1.25}[bits]
    yield against_four_bits("w4a8_matmul", " A8", x, here, four, ways, rate="int8", goal=goal)
