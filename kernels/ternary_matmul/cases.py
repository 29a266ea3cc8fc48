"""The checks of `ternary_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times
from kernels.ternary_matmul import Ternary, encode, ternary_matmul

P0 = 0.885


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for out, columns, zeros, tokens, dtype in (
        (48, 512, 0.885, (1,), torch.bfloat16),
        (37, 65, 0.3, (2, 3), torch.float16),
        (131, 383, 0.95, (33,), torch.float32),
        (5, 1, 0.5, (4,), torch.float32),
        (16, 64, 1.0, (0,), torch.bfloat16),
    ):
        w, W = _weight(generator, out, columns, zeros, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        name = f"{zeros:g} zeros, {tokens} x {out} x {columns}, {str(dtype).removeprefix('torch.')}"
        found.append(_check(name, x, w, W))
    wide = torch.randn(2 * 48, 11, generator=generator).to(device)
    found.append(_check("x transposed, every other column", wide.t()[:, ::2], *_weight(generator, 96, 48, 0.8, device)))
    return found


def _weight(
    generator: torch.Generator, out: int, columns: int, zeros: float, device: torch.device
) -> tuple[Ternary, Tensor]:
    """The weight in words, and W in float64."""
    place = torch.rand(out, columns, generator=generator)
    symbols = (place > zeros).to(torch.uint8) + (place > (1 + zeros) / 2).to(torch.uint8)
    low, high = -torch.rand(out, generator=generator), torch.rand(out, generator=generator)
    W = torch.stack([torch.zeros(out), low, high], 1).double().gather(1, symbols.long())
    codes, counts = encode(symbols.to(device), P0)
    return Ternary(codes, counts, low.to(device), high.to(device), (out, columns), P0), W.to(device)


def _check(name: str, x: Tensor, w: Ternary, W: Tensor) -> Check:
    return Check(
        "ternary_matmul",
        name,
        lambda impl: ternary_matmul(x, w, impl=impl),
        lambda: x.double() @ W.t(),
        TOLERANCE[x.dtype],
        (),
    )


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Comparison with the dense product, to show the cost of decoding at each call."""
    generator = torch.Generator().manual_seed(0)
    for out, columns in asked.shapes or (((96, 256),) if toy else ((1536, 576), (4096, 4096))):
        for tokens in asked.tokens or ((2,) if toy else (1, 256)):
            w, W = _weight(generator, out, columns, P0, device)
            dense, x = W.to(asked.dtype), torch.randn(tokens, columns, generator=generator).to(device, asked.dtype)
            name = str(asked.dtype).removeprefix("torch.")
            yield Contest(
                op="ternary_matmul",
                detail=f"{P0:g} zeros",
                shape=(out, columns),
                tokens=tokens,
                contestants={
                    "reference": lambda i, x=x, w=w: ternary_matmul(x, w),
                    name: lambda i, x=x, dense=dense: F.linear(x, dense),
                },
                copies=1,
                ours="reference",
                baseline=name,
                rate="float32",
                least_bytes=2 * len(w.codes) + 4 * out + x.element_size() * tokens * (out + columns),
                flops=2 * tokens * out * columns,
                expected={"reference": times(x, lambda W=W: W), name: times(x, lambda dense=dense: dense)},
            )
