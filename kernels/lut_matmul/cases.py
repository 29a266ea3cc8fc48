"""The checks of `lut_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.cases.products import contest, copies_of, cpu_copies, dense, group_size_of
from kernels.interpreter import triton_takes
from kernels.linear.onednn import lays_out
from kernels.lut_matmul import FP4, NF4, Codebook, lut_matmul, pack_codebook, panels_fit, to_panels
from kernels.lut_matmul.reference import dequantize
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes, times
from kernels.tuning import under

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def checks(device: torch.device) -> list[Check]:
    cases = (  # table, out, in, group (None: no scales), tokens, dtype
        ("NF4", 48, 512, 64, (1,), BF16),
        ("NF4", 37, 640, 128, (3,), FP16),
        ("FP4", 40, 256, 32, (2, 3), FP16),
        ("NF4", 131, 384, 64, (33,), BF16),
        ("16 a row", 48, 512, None, (1,), BF16),
        ("16 a row", 70, 200, None, (16,), FP16),
        ("16 a row", 70, 256, None, (20,), FP16),
        ("16", 33, 60, 12, (5,), BF16),
        ("NF4", 24, 128, 64, (4,), FP32),
        ("8 a row", 48, 384, None, (1,), BF16),
        ("8", 40, 256, 128, (9,), FP16),
        ("8 a row", 70, 256, None, (18,), BF16),
        ("8", 21, 192, 64, (3,), BF16),
        ("8 a row", 5, 7, None, (2,), FP16),
        ("NF4", 48, 256, 64, (600,), BF16),
        ("16 a row", 21, 264, None, (130,), FP16),
        ("NF4", 32, 128, 64, (0,), BF16),
    )
    if device.type == "cuda":  # loops over all columns and several blocks of tokens take too long in the interpreter
        kinds = (("NF4", 64), ("16", 4096), ("16 a row", None), ("8 a row", None))
        cases += tuple((table, 1024, 4096, group, (tokens,), BF16) for table, group in kinds for tokens in (33, 200))
    generator = torch.Generator().manual_seed(0)
    found = []
    for table, out, columns, group_size, tokens, dtype in cases:
        w, W = _weight(generator, table, out, columns, group_size, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        found.append(_check(f"{table} g{group_size}, {tokens} x {out} x {columns}", x, w, W))
    w, W = _weight(generator, "NF4", 48, 256, 64, device)
    wide = torch.randn(2 * 256, 11, generator=generator).to(device, BF16)
    found.append(_check("x transposed, every other column", wide.t()[:, ::2], w, W))
    found.append(_check("x of row stride", torch.randn(20, 300, generator=generator).to(device, FP16)[:, 9:265], w, W))
    return found


def _weight(
    generator: torch.Generator, kind: str, out: int, columns: int, group_size: int | None, device: torch.device
) -> tuple[Codebook, Tensor]:
    """The packed weight, and W in float64."""
    entries = 8 if kind.startswith("8") else 16
    if kind in ("NF4", "FP4"):
        table = {"NF4": NF4, "FP4": FP4}[kind]
    else:
        table = torch.randn(*((out,) if "row" in kind else ()), entries, generator=generator)
    codes = torch.randint(0, entries, (out, columns), generator=generator)
    W = (table.double()[codes] if table.dim() == 1 else table.double().gather(1, codes)).to(device)
    scale = None
    if group_size is not None:
        scale = (torch.rand(out, columns // group_size, generator=generator) * 0.1 + 0.01).bfloat16().to(device)
        W = W * scale.double().repeat_interleave(group_size, 1)
    return pack_codebook(codes.to(device), table.to(device), scale, group_size=group_size), W


def _check(name: str, x: Tensor, w: Codebook, W: Tensor) -> Check:
    panels = to_panels(w) if panels_fit(w, x.dtype, x.device) else None

    def run(impl: str) -> Tensor:
        return lut_matmul(x, panels if impl == "cpu" else w, impl=impl)

    impls = ("triton",) if panels is None else ("triton", "cpu")
    dtype = str(x.dtype).removeprefix("torch.")
    return Check("lut_matmul", f"{name}, {dtype}", run, lambda: x.double() @ W.t(), TOLERANCE[x.dtype], impls)


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy and triton_takes(device):
        yield _gpu(device, (96, 256), 2, "NF4", asked.dtype, 2)
        yield _gpu(device, (96, 256), 20, "16 a row", asked.dtype, 2)
    elif toy:
        yield from _cpu((128, 256), 1, asked.dtype)
    elif device.type == "cuda":
        for shape in asked.shapes or ((14336, 4096),):
            for tokens in asked.tokens or (1, 16, 64, 256, 2048):
                yield _gpu(device, shape, tokens, "NF4", asked.dtype)
        if not asked.shapes:
            yield _gpu(device, (4096, 4096), 1, "NF4", asked.dtype)
        for kind in ("16 a row", "8 a row"):
            for shape in asked.shapes or ((14336, 4096),):
                yield _gpu(device, shape, 1, kind, asked.dtype)
    else:
        for shape in asked.shapes or ((1536, 576), (8192, 2048)):
            for tokens in asked.tokens or (1, 4, 16, 64):
                yield from _cpu(shape, tokens, asked.dtype)


def _gpu(
    device: torch.device, shape: tuple[int, int], tokens: int, kind: str, dtype: torch.dtype, copies: int | None = None
) -> Contest:
    from kernels.lut_matmul.triton import candidates, key

    out, columns = shape
    bits, group_size = (3 if kind.startswith("8") else 4), (group_size_of(columns, 64) if kind == "NF4" else columns)
    copies = copies or copies_of(out * columns * bits // 8)
    x = torch.randn(tokens, columns, device=device, dtype=dtype)

    def weight() -> Codebook:
        codes = torch.randint(0, 256, (out, -(-columns // 8) * bits), device=device, dtype=torch.uint8)
        if kind == "NF4":
            scale = torch.rand(out, columns // group_size, device=device).mul_(0.01).to(dtype)
            return Codebook("rows", codes, NF4.to(device), scale, bits, group_size, shape)
        return Codebook(
            "rows", codes, torch.randn(out, 1 << bits, device=device, dtype=dtype), None, bits, group_size, shape
        )

    small = [weight() for _ in range(copies)]
    rival = dense(x, shape, copies)
    calls: dict[str, Callable[[int], object]] = {"triton": lambda i: lut_matmul(x, small[i], impl="triton")}
    expected = {"triton": times(x, lambda: dequantize(small[0]))}
    tune_key, plans = key(small[0], tokens), candidates(small[0], tokens)
    configurations = {"triton, permutations": plans[1]} if plans[0]["pairs"] else {}  # the other way to look codes up
    for name, plan in configurations.items():
        calls[name], expected[name] = under("lut_matmul", tune_key, plan, calls["triton"]), expected["triton"]
    if kind == "NF4" and group_size == 64 and device.type == "cuda":
        calls |= _bitsandbytes(x, rival.weights, expected)
    tables = 2 * out * columns // group_size if kind == "NF4" else 2 * out << bits
    return contest(
        "lut_matmul",
        f"{kind} g{group_size}" if kind == "NF4" else kind,
        x,
        shape,
        out * columns * bits // 8 + tables,
        calls,
        expected,
        rival,
        goal=3.0 if kind == "NF4" and tokens == 1 and out == 14336 else None,
        tune_key=tune_key,
        candidates=plans,
        configurations=configurations,
    )


def _bitsandbytes(x: Tensor, dense: list[Tensor], expected: dict[str, Expected]) -> dict[str, Callable[[int], object]]:
    """bitsandbytes' NF4 product, if it is installed with its CUDA library."""
    try:
        import bitsandbytes as bnb

        packed = [bnb.functional.quantize_4bit(W, blocksize=64, quant_type="nf4") for W in dense]
        bnb.matmul_4bit(x, packed[0][0].t(), packed[0][1])
    except Exception:  # not installed, or without a library for this GPU
        return {}
    expected["bitsandbytes"] = times(x, lambda: bnb.functional.dequantize_4bit(*packed[0]))
    return {"bitsandbytes": lambda i: bnb.matmul_4bit(x, packed[i][0].t(), packed[i][1])}


@torch.no_grad()
def _cpu(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Iterator[Contest]:
    """NF4 compared with the fastest dense product, and with bitsandbytes' own on a CPU if it is installed."""
    out, columns = shape
    group_size, copies = group_size_of(columns, 64), cpu_copies(shape)
    codes, scale = torch.randint(0, 16, shape), torch.rand(out, columns // group_size).to(dtype)
    first = pack_codebook(codes, NF4, scale, group_size=group_size)
    if not lays_out(dtype) or dtype == FP16 or not panels_fit(first, dtype, codes.device):
        return
    x = torch.randn(tokens, columns).to(dtype)
    small = [to_panels(pack_codebook(codes.roll(i, 0), NF4, scale, group_size=group_size)) for i in range(copies)]
    rival, expected = dense(x, shape, copies), {"panels": times(x, lambda: dequantize(small[0]))}
    calls = {"panels": lambda i: lut_matmul(x, small[i], impl="cpu"), **_bitsandbytes(x, rival.weights, expected)}
    stored = out * columns // 2 + 2 * out * columns // group_size
    yield contest("lut_matmul", f"NF4 g{group_size}", x, shape, stored, calls, expected, rival)
