"""The checks of `gram`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.gram import gram, symmetric
from kernels.interpreter import triton_takes
from kernels.support.declarations import Check, Contest, Expected, TimedSizes
from kernels.tuning import trying

ROTATED = 256 << 20  # bytes of operands in rotation
TOLERANCE = 1e-5  # sums are float32 whatever the activations are


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases = (
        ("odd columns", 77, 37, bf16, {}),
        ("one token", 1, 16, fp16, {}),
        ("two tiles", 70, 144, bf16, {}),
        ("square tiles", 40, 272, fp16, {}),
        ("wide tiles", 40, 272, bf16, {"columns": 256, "num_warps": 8}),
        ("wide tiles, split", 560, 144, fp16, {"columns": 256, "num_warps": 8}),
        ("split over tokens", 600, 48, bf16, {}),
        ("split, odd", 530, 33, fp16, {}),
        ("chunks", 150, 48, bf16, {"chunk": 64}),
        ("split and chunks", 530, 33, bf16, {"chunk": 64}),
        ("float32", 45, 80, fp32, {}),
        ("float32, split", 520, 17, fp32, {}),
        ("no tokens", 0, 24, bf16, {}),
    )
    found = []
    for name, tokens, columns, dtype, changes in cases:
        x = (torch.randn(tokens, columns, generator=generator) * 2).to(device, dtype)
        found.append(_check(name, x, _start(columns, device), changes))
    wide = torch.randn(48, 2 * 40, generator=generator).to(device, bf16)
    found.append(_check("every other column", wide[:, ::2], _start(40, device)))
    found.append(_check("transposed", wide.t(), _start(48, device)))
    found.append(_check("offset", wide[3:, 5:69], _start(64, device)))
    return found


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy:
        shapes = [(64, 48)] if triton_takes(device) else []
    elif device.type == "cuda":
        shapes = [(2048, 576), (2048, 4096), (16384, 4096), (2048, 14336)]
    else:
        shapes = [(2048, 576), (2048, 1536), (2048, 4096)] if torch.backends.mkldnn.is_available() else []
    for tokens, columns in shapes:
        yield _contest(device, tokens, columns, toy)


def _check(name: str, x: Tensor, H: Tensor, changes: dict | None = None) -> Check:
    """`changes`: changes to the heuristic's launch configuration."""

    def run(impl: str) -> Tensor:
        if impl != "triton" or not changes:
            return symmetric(gram(x, H.clone(), impl=impl))
        from kernels.gram.triton import heuristic, key

        with trying("gram", key(x.dtype, x.shape[1]), {**heuristic(x.dtype, x.shape[1]), **changes}):
            return symmetric(gram(x, H.clone(), impl=impl))

    def expected() -> Tensor:
        return symmetric(H.double() + x.double().t() @ x.double())

    impls = ("triton", "cpu") if x.device.type == "cpu" else ("triton",)
    return Check("gram", name, run, expected, TOLERANCE, impls)


def _start(columns: int, device: torch.device) -> Tensor:
    """An initial H that is not zero."""
    return torch.arange(columns * columns, dtype=torch.float32, device=device).view(columns, columns) % 7


def _contest(device: torch.device, tokens: int, columns: int, toy: bool) -> Contest:
    ours = "triton" if device.type == "cuda" or toy else "cpu"
    dtype = torch.bfloat16 if ours == "triton" else torch.float32
    bytes_each = 4 * columns * columns + dtype.itemsize * tokens * columns
    copies = 2 if toy else max(2, -(-ROTATED // bytes_each))
    xs = [torch.randn(tokens, columns, device=device, dtype=dtype) for _ in range(copies)]
    sums = [torch.zeros(columns, columns, device=device) for _ in range(copies)]
    contestants: dict[str, Callable[[int], object]] = {
        ours: lambda i: gram(xs[i], sums[i], impl=ours),
        "float32 addmm": lambda i: gram(xs[i], sums[i], impl="reference"),
    }
    tune_key, candidates = None, []
    if device.type == "cuda":  # cuBLAS on tensor cores with float32 sums: the full product, where ours is half of one
        contestants["bfloat16 addmm"] = lambda i: torch.addmm(
            sums[i], xs[i].t(), xs[i], out_dtype=torch.float32, out=sums[i]
        )
        contestants["bfloat16 mm"] = lambda i: sums[i].add_(torch.mm(xs[i].t(), xs[i], out_dtype=torch.float32))
    if ours == "triton":
        from kernels.gram.triton import CANDIDATES, key

        tune_key, candidates = key(dtype, columns), CANDIDATES
    return Contest(
        op="gram",
        detail=str(dtype).removeprefix("torch."),
        shape=(columns, columns),
        tokens=tokens,
        contestants=contestants,
        copies=copies,
        ours=ours,
        baseline="bfloat16 addmm" if "bfloat16 addmm" in contestants else "float32 addmm",
        least_bytes=dtype.itemsize * tokens * columns
        + 4 * columns * (columns + 1),  # X once; H's upper half read and written
        flops=tokens * columns * (columns + 1),
        rate="bfloat16" if ours == "triton" else "float32",
        tune_key=tune_key,
        candidates=candidates,
        expected=dict.fromkeys(contestants, _upper(lambda: xs[0])),
        tolerance=dict.fromkeys(contestants, TOLERANCE),
    )


def _upper(x: Callable[[], Tensor]) -> Expected:
    """The expected result: XᵀX in the upper triangle, which alone is specified; below it, the values found."""

    def expected(found: Tensor) -> Tensor:
        exact = x().double().t() @ x().double()
        return torch.where(torch.ones_like(exact, dtype=torch.bool).triu_(), exact, found)

    return expected
