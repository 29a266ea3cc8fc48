"""The checks of `hadamard`, and the shapes on which it is timed."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.hadamard import hadamard, hadamard_matrix
from kernels.hadamard.codes import hadamard_codes
from kernels.hadamard.matrix import base
from kernels.interpreter import triton_takes
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes

ROTATED = 256 << 20  # bytes of operands and results in rotation
DENSE = 8192  # largest size that is also timed as a product with the whole matrix


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    cases = (
        ("one", (3, 1), torch.float32),
        ("two", (5, 2), torch.bfloat16),
        ("Paley, order 12", (2, 3, 12), torch.float16),
        ("Paley, order 36", (4, 36), torch.bfloat16),
        ("one product, odd rows", (67, 64), torch.bfloat16),
        ("one product, widest", (3, 128), torch.float32),
        ("two products", (5, 256), torch.float32),
        ("36 times 16", (5, 576), torch.bfloat16),
        ("12 times 128", (3, 1536), torch.float16),
        ("order 20, three products", (2, 5120), torch.float32),
        ("order 76", (1, 76 * 4), torch.float16),
        ("4096", (3, 4096), torch.bfloat16),
        ("three products", (1, 8192), torch.bfloat16),
        ("several programs a row, 28 times 512", (1, 14336), torch.bfloat16),
        ("several programs a row, 28672", (2, 28672), torch.float16),
        ("several programs a row, order 344", (1, 11008), torch.bfloat16),
        ("several programs a row, float32", (1, 9728), torch.float32),
        ("several programs a row, order 344, blocks of 64 lines", (16, 688), torch.bfloat16),
        ("no rows", (0, 64), torch.bfloat16),
    )
    found = []
    for name, shape, dtype in cases:
        found.append(_check(name, (torch.randn(shape, generator=generator) * 3).to(device, dtype)))
    wide = torch.randn(256, 40, generator=generator).to(device)
    found.append(_check("every other row", wide.t()[::2]))
    found.append(_check("offset, rows apart", wide[3:9, 5:37]))
    uneven = torch.randn(4, 512, generator=generator) * torch.logspace(-3, 3, 512)
    found.append(_check("outliers", uneven.to(device)))
    found.append(_check("another scale", wide[:4, :32].half(), scale=0.25))
    for shape, dtype, block, group, wide in (
        ((5, 576), torch.bfloat16, 576, None, 0),
        ((3, 1536), torch.float16, 1536, None, 1),
        ((2, 3, 4096), torch.bfloat16, 4096, 64, 0),
        ((3, 4096), torch.float16, 4096, 128, 3),
        ((3, 1024), torch.float32, 256, 64, 2),
        ((67, 128), torch.bfloat16, 64, 64, 1),
        ((2, 14336), torch.bfloat16, 14336, 64, 20),
        ((13, 5504), torch.bfloat16, 5504, 16, 0),
        ((1, 11008), torch.float32, 11008, 32, 3),
        ((1, 28672), torch.float16, 14336, 128, 113),
        ((0, 64), torch.bfloat16, 64, None, 0),
    ):
        found.append(_codes(generator, device, shape, dtype, block, group, wide))
    return found


def _codes(
    generator: torch.Generator,
    device: torch.device,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    block: int,
    group: int | None,
    wide: int,
) -> Check:
    """A check of codes times their steps. A code may differ if the rotated value is half-way between two codes."""
    x = (torch.randn(shape, generator=generator) * 3).to(device, dtype)
    signs = (torch.randint(2, shape[-1:], generator=generator) * 2 - 1).to(device, torch.int8)

    def run(impl: str) -> Tensor:
        codes, step = hadamard_codes(x, signs, block=block, bits=4, group=group, wide=wide, impl=impl)
        half = shape[-1] // 2
        codes = torch.stack([codes[..., :half], codes[..., half:]], -1).flatten(-2).float()
        return (codes.unflatten(-1, (step.shape[-1], -1)) * step[..., None]).flatten(-2)

    def expected() -> Tensor:
        turned = in_two((x.double() * signs).unflatten(-1, (-1, block)).flatten(0, -2)).view(shape).to(dtype)
        v = turned.double().unflatten(-1, (-1, group or shape[-1]))
        largest = torch.full((v.shape[-2], 1), 7.0, dtype=torch.float64, device=device)
        largest[:wide] = 127
        step = v.abs().amax(-1, keepdim=True) / largest
        return ((v / step).round() * step).flatten(-2)

    name = f"codes of {shape[-1]} columns, {block} together, g{group} of which {wide} in 8 bits, {shape[0]} rows"
    return Check("hadamard", f"{name}, {str(dtype).removeprefix('torch.')}", run, expected, 0.03)


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    bfloat16, float32 = torch.bfloat16, torch.float32
    if toy:
        cases = [(4, 64, bfloat16), (2, 576, bfloat16)] if triton_takes(device) else []
    elif device.type == "cuda":
        sizes = (4096, 14336, 28672, 8192, 1536, 576, 128)
        cases = [(max(2048, (1 << 24) // n), n, bfloat16) for n in sizes] + [
            (16, 4096, bfloat16),
            (4096, 4096, float32),
        ]
        cases += [(rows, n, bfloat16) for n in (14336, 28672) for rows in (1, 16)]  # several programs per row
        cases += [(2048, n, bfloat16) for n in (11008, 53248)]
    else:
        cases = [(1, 4096, float32), (256, 4096, float32), (2048, 576, float32), (2048, 1536, bfloat16)]
    for rows, n, dtype in cases:
        yield _contest(device, rows, n, dtype, toy)


def exact(x: Tensor, scale: float | None = None) -> Tensor:
    """The product with the whole matrix in float64."""
    n = x.shape[-1]
    return x.double() @ hadamard_matrix(n, dtype=torch.float64, device=x.device) * (n**-0.5 if scale is None else scale)


def in_two(x: Tensor, scale: float | None = None) -> Tensor:
    """The product in float64, with H = H_m ⊗ H_k if the whole matrix would be too large."""
    n, m = x.shape[-1], base(x.shape[-1])
    if n <= 2048:
        return exact(x, scale)
    k = n // m
    left, right = (hadamard_matrix(i, dtype=torch.float64, device=x.device) for i in (m, k))
    return (left @ (x.double().view(-1, m, k) @ right)).view(x.shape) * n**-0.5


def _check(name: str, x: Tensor, scale: float | None = None) -> Check:
    def expected() -> Tensor:
        return in_two(x, scale)

    impls = ("triton", "cpu") if x.device.type == "cpu" else ("triton",)
    return Check(
        "hadamard", name, lambda impl: hadamard(x, scale=scale, impl=impl), expected, TOLERANCE[x.dtype], impls
    )


def _contest(device: torch.device, rows: int, n: int, dtype: torch.dtype, toy: bool) -> Contest:
    ours = "triton" if device.type == "cuda" or toy else "cpu"
    least_bytes = 2 * rows * n * dtype.itemsize
    copies = 2 if toy else max(2, min(512, -(-ROTATED // least_bytes)))
    xs = [torch.randn(rows, n, device=device, dtype=dtype) for _ in range(copies)]
    contestants: dict[str, Callable[[int], object]] = {
        ours: lambda i: hadamard(xs[i], impl=ours),
        "copy": lambda i: xs[i].clone(),
    }
    if n <= DENSE:
        H = hadamard_matrix(n, dtype=dtype, device=device) * n**-0.5
        contestants["whole matrix"] = lambda i: torch.mm(xs[i], H)
    if device.type == "cuda" and base(n) == 1 and find_spec("fast_hadamard_transform"):
        from fast_hadamard_transform import hadamard_transform

        contestants["fast_hadamard_transform"] = lambda i: hadamard_transform(xs[i], n**-0.5)
    tune_key, candidates, configurations = None, [], {}
    if ours == "triton":
        from kernels.hadamard import spread, triton

        tune_key, candidates = triton.tuned(rows, n, dtype, device)
        if spread.few(rows, n, device) and triton.fits(n, device):
            contestants["one program a row"] = lambda i: triton.in_whole_rows(xs[i], n**-0.5)
            configurations["one program a row"] = spread.WHOLE
    on_gpu = device.type == "cuda" and not toy
    return Contest(
        op="hadamard",
        detail=str(dtype).removeprefix("torch."),
        shape=(n,),
        tokens=rows,
        contestants=contestants,
        copies=copies,
        ours=ours,
        baseline="copy" if ours == "triton" else "whole matrix",
        least_bytes=least_bytes,
        flops=rows * n * (base(n) - 1 + int(math.log2(n // base(n)))),
        rate="bfloat16" if ours == "triton" else "float32",
        goal=1 / 1.2 if on_gpu and rows >= 512 and n >= 4096 and dtype == torch.bfloat16 else None,
        tune_key=tune_key,
        candidates=candidates,
        configurations=configurations,
        expected={**dict.fromkeys(contestants, lambda _: in_two(xs[0])), "copy": lambda _: xs[0].double()},
    )
