"""The checks of `expert_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.int_matmul.experts import expert_matmul, split, stacked
from kernels.int_matmul.layout import Packed, pack
from kernels.int_matmul.reference import dequantize
from kernels.support.declarations import TOLERANCE, Check, Contest

ROTATED = 256 << 20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for bits, out, columns, group_size, symmetric, counts, dtype in (
        (4, 48, 256, 128, True, (3, 0, 1, 20, 2), BF16),
        (4, 40, 192, 64, False, (0, 0, 7), FP16),
        (4, 150, 384, 128, True, (40, 1, 33), BF16),
        (4, 150, 256, 256, False, (70, 2), FP16),
        (2, 40, 192, 32, False, (20, 0, 1, 30), BF16),
        (3, 48, 384, 128, True, (1, 1), BF16),
        (8, 32, 128, 64, True, (1, 0, 0), FP16),
        (4, 16, 128, 64, True, (0, 0), BF16),
    ):
        parts = []
        for _ in counts:
            groups = columns // group_size
            zero = None if symmetric else torch.randint(0, 1 << bits, (out, groups), generator=generator)
            scale = ((torch.rand(out, groups, generator=generator) - 0.3) * 0.1).bfloat16()
            codes = torch.randint(0, 1 << bits, (out, columns), generator=generator)
            parts.append(pack(codes, scale, zero, bits=bits, group_size=group_size))
        x = torch.randn(sum(counts), columns, generator=generator).to(device, dtype)
        w = stacked(parts)
        zero = None if symmetric else w.zero.to(device)
        w = w._replace(codes=w.codes.to(device), scale=w.scale.to(device), zero=zero)
        kind = f"W{bits} g{group_size} {'symmetric' if symmetric else 'zero points'}"
        name = f"experts, {kind}, {counts} tokens x {out} x {columns}, {str(dtype).removeprefix('torch.')}"
        found.append(_check(name, x, w, counts))
    return found


def _check(name: str, x: Tensor, w: Packed, counts: tuple[int, ...]) -> Check:
    ends = torch.tensor(counts).cumsum(0).to(x.device, torch.int32)

    def run(impl: str) -> Tensor:
        return expert_matmul(x, w, ends, impl=impl)

    return Check("int_matmul", name, run, lambda: _exact(x, w, counts), TOLERANCE[x.dtype])


def _exact(x: Tensor, w: Packed, counts: tuple[int, ...]) -> Tensor:
    each = zip(x.double().split(counts), split(w, len(counts)), strict=True)
    return torch.cat([part @ dequantize(one).double().t() for part, one in each])


def contest(
    device: torch.device, experts: int, shape: tuple[int, int], pairs: int, dtype: torch.dtype, copies: int = 0
) -> Contest:
    """W4 g128 weights of `experts` experts, each of `shape` (out, in), with `pairs` (token, expert) drawn at random."""
    from kernels.int_matmul import int_matmul

    out, columns = shape
    chosen = torch.randint(experts, (pairs,), generator=torch.Generator().manual_seed(0))
    counts = tuple(torch.bincount(chosen, minlength=experts).tolist())
    reached = sum(count > 0 for count in counts)
    ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    x = torch.randn(pairs, columns, device=device, dtype=dtype)
    copies = copies or max(2, -(-ROTATED // (reached * out * columns // 2)))

    def weight() -> Packed:
        codes = torch.randint(0, 256, (experts * out, columns // 2), device=device, dtype=torch.uint8)
        scale = torch.rand(experts * out, columns // 128, device=device).mul_(0.01).to(BF16)
        return Packed("rows", codes, scale, None, 4, 128, (experts * out, columns))

    small = [weight() for _ in range(copies)]
    views = [split(w, experts) for w in small]

    def one_by_one(i: int) -> Tensor:
        parts = zip(x.split(counts), views[i], strict=True)
        return torch.cat([int_matmul(part, w, impl="triton") for part, w in parts if len(part)])

    contestants: dict[str, Callable[[int], object]] = {
        "triton": lambda i: expert_matmul(x, small[i], ends, impl="triton"),
        "one by one": one_by_one,
    }
    expected = dict.fromkeys(contestants, lambda _: _exact(x, small[0], counts))
    if device.type == "cuda" and dtype == BF16:
        dense = [torch.randn(experts, columns, out, device=device, dtype=dtype) for _ in range(2)]
        try:
            torch._grouped_mm(x, dense[0], offs=ends)
            contestants["grouped bfloat16"] = lambda i: torch._grouped_mm(x, dense[i % 2], offs=ends)
            expected["grouped bfloat16"] = lambda _: torch.cat(
                [part @ W for part, W in zip(x.double().split(counts), dense[0].double(), strict=True)]
            )
        except (RuntimeError, AttributeError):  # another GPU, or another torch
            pass
    least = reached * (out * columns // 2 + 2 * out * columns // 128) + 2 * pairs * (out + columns)
    return Contest(
        op="int_matmul",
        detail=f"W4 g128, {experts} experts, {reached} reached",
        shape=shape,
        tokens=pairs,
        contestants=contestants,
        copies=copies,
        ours="triton",
        baseline="one by one",
        rate=str(dtype).removeprefix("torch."),
        least_bytes=least,
        flops=2 * pairs * out * columns,
        expected=expected,
    )
