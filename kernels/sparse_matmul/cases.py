"""The checks of `sparse_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.cases.products import contest, cpu_copies, dense
from kernels.int_matmul import pack_bits
from kernels.linear.onednn import lays_out
from kernels.linear.rows import products
from kernels.sparse_matmul import FEW, SparseRows, dense_rows, skips_zeros, sparse_matmul, starts_of
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times


def sparse_rows(W: Tensor, keep: Tensor) -> SparseRows:
    """The entries of W [out, in] in `keep`, of the same shape; `in` is a multiple of 8."""
    mask = pack_bits(keep, 1)
    return SparseRows(mask, W[keep], starts_of(mask))


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for out, columns, share, tokens, dtype in (
        (48, 64, 0.5, (1,), torch.bfloat16),
        (37, 96, 0.3, (2, 3), torch.float16),
        (5, 576, 0.5, (4,), torch.bfloat16),
        (300, 32, 0.05, (7,), torch.float16),
        (64, 160, 1.0, (1, 1), torch.bfloat16),
        (64, 160, 0.0, (8,), torch.bfloat16),
        (192, 1536, 0.5, (40,), torch.bfloat16),
        (2500, 576, 0.3, (9,), torch.bfloat16),
        (16, 24, 0.5, (2,), torch.bfloat16),  # columns that the loops do not take
        (16, 64, 0.5, (0,), torch.bfloat16),
    ):
        W = torch.randn(out, columns, generator=generator).to(device, dtype)
        keep = (torch.rand(out, columns, generator=generator) < share).to(device)
        keep[out // 2] = False  # a row of zeros
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        name = f"{share:.0%} of {out} x {columns}, {tokens}, {str(dtype).removeprefix('torch.')}"
        found.append(_check(name, x, sparse_rows(W, keep), W * keep))
    x = torch.randn(2 * 64, 11, generator=generator).to(device, torch.bfloat16)
    W = torch.randn(96, 64, generator=generator).to(device, torch.bfloat16)
    keep = W > 0
    found.append(_check("x transposed, every other column", x.t()[:, ::2], sparse_rows(W, keep), W * keep))
    return found


def _check(name: str, x: Tensor, w: SparseRows, W: Tensor) -> Check:
    return Check(
        "sparse_matmul",
        name,
        lambda impl: sparse_matmul(x, w, impl=impl),
        lambda: x.double() @ W.double().t(),
        TOLERANCE[x.dtype],
        ("cpu",) if skips_zeros(x.dtype, x.device, w.shape[1]) else (),
    )


@torch.no_grad()
def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Comparison with the dense products: oneDNN's, and for few tokens the loops that a step of decoding uses."""
    if not skips_zeros(asked.dtype, device, 32) or not lays_out(asked.dtype):
        return
    for shape in asked.shapes or (((96, 256),) if toy else ((1536, 576), (8192, 2048))):
        for tokens in asked.tokens or ((2,) if toy else (1, 4, 512)):
            for share in (0.5,) if toy else (0.5, 0.3):
                yield _contest(torch.randn(tokens, shape[1]).to(asked.dtype), shape, share)


def _contest(x: Tensor, shape: tuple[int, int], share: float) -> Contest:
    rival = dense(x, shape, cpu_copies(shape))
    small = [sparse_rows(W, torch.rand(shape) < share) for W in rival.weights]
    calls: dict[str, Any] = {"cpu": lambda i: sparse_matmul(x, small[i], impl="cpu")}
    expected = {"cpu": times(x, lambda: dense_rows(small[0]))}
    if len(x) <= FEW:
        calls["dense rows"] = lambda i: products(x, [rival.weights[i]], [None])[0]
        expected["dense rows"] = times(x, lambda: rival.weights[0])
    stored = small[0].mask.nbytes + small[0].values.nbytes
    return contest("sparse_matmul", f"{1 - share:.0%} zeros", x, shape, stored, calls, expected, rival)
