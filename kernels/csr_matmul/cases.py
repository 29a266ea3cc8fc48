"""The checks of `csr_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.csr_matmul import Csr, csr_matmul, to_csr
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times

SHARE = 0.005  # share of the weights that are stored


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for out, columns, share, tokens, dtype in (
        (48, 512, 0.01, (1,), torch.bfloat16),
        (37, 65, 0.05, (2, 3), torch.float16),
        (131, 384, 0.005, (33,), torch.float32),
        (5, 7, 0.0, (4,), torch.float32),
        (24, 128, 1.0, (1, 1), torch.float32),
        (16, 64, 0.1, (0,), torch.bfloat16),
    ):
        w, W = _weight(generator, out, columns, share, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        name = f"{share:g} of {out} x {columns}, {tokens}, {str(dtype).removeprefix('torch.')}"
        found.append(_check(name, x, w, W))
    wide = torch.randn(2 * 384, 11, generator=generator).to(device)
    found.append(
        _check("x transposed, every other column", wide.t()[:, ::2], *_weight(generator, 40, 384, 0.1, device))
    )
    return found


def _weight(
    generator: torch.Generator, out: int, columns: int, share: float, device: torch.device
) -> tuple[Csr, Tensor]:
    """The weight in compressed rows, and W in float64."""
    chosen = torch.rand(out, columns, generator=generator) < share
    W = torch.randn(out, columns, generator=generator) * chosen
    return to_csr(W.to(device), chosen.to(device)), W.double().to(device)


def _check(name: str, x: Tensor, w: Csr, W: Tensor) -> Check:
    return Check(
        "csr_matmul",
        name,
        lambda impl: csr_matmul(x, w, impl=impl),
        lambda: x.double() @ W.t(),
        TOLERANCE[x.dtype],
        ("library",),
        repeats=not x.is_cuda,  # cuSPARSE adds in no fixed order
    )


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Comparison with the dense product, which a sparse one should outperform."""
    for shape in asked.shapes or (((96, 256),) if toy else ((1536, 576), (4096, 4096))):
        for tokens in asked.tokens or ((2,) if toy else (1, 16, 256)):
            yield _contest(device, shape, tokens, asked.dtype)


def _contest(device: torch.device, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Contest:
    out, columns = shape
    generator = torch.Generator().manual_seed(0)
    w, W = _weight(generator, out, columns, SHARE, device)
    x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
    copies = max(2, min(64, (128 << 20) // (2 * out * columns)))
    small = [w._replace(values=w.values.clone(), columns=w.columns.clone()) for _ in range(copies)]
    dense = [W.to(dtype) for _ in range(copies)]
    name = str(dtype).removeprefix("torch.")
    return Contest(
        op="csr_matmul",
        detail=f"{SHARE:.1%}",
        shape=shape,
        tokens=tokens,
        contestants={"library": lambda i: csr_matmul(x, small[i]), name: lambda i: F.linear(x, dense[i])},
        copies=copies,
        ours="library",
        baseline=name,
        rate="float32",
        least_bytes=8 * len(w.values) + 4 * (out + 1) + x.element_size() * tokens * (out + columns),
        flops=2 * tokens * len(w.values),
        expected={"library": times(x, lambda: W), name: times(x, lambda: dense[0])},
        repeats=device.type == "cpu",
    )
