"""The checks of `sparse24_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sparse24_matmul import compress24, library, sparse24_matmul, to_library
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times

ROTATED = 256 << 20  # bytes of weights in rotation


def prune24(W: Tensor) -> Tensor:
    """W with the two smallest of every four neighbours made zero."""
    fours = W.view(W.shape[0], -1, 4)
    return fours.scatter(-1, fours.abs().argsort(dim=-1)[..., :2], 0).view(W.shape)


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    cases = (
        ("whole tiles", (16,), 64, 128, torch.bfloat16),
        ("odd rows", (3, 5), 37, 72, torch.float16),
        ("one token", (1,), 96, 64, torch.bfloat16),
        ("few columns", (9,), 5, 4, torch.float16),
        ("empty", (2, 0), 32, 64, torch.bfloat16),
        ("float32", (7,), 33, 44, torch.float32),
    )
    found = []
    for name, tokens, out, columns, dtype in cases:
        W = prune24(torch.randn(out, columns, generator=generator)).to(device, dtype)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        found.append(_check(name, x, W))
    x = torch.randn(2 * 64, 10, generator=generator).to(device, torch.bfloat16).t()[:, ::2]
    W = prune24(torch.randn(48, 64, generator=generator)).to(device, torch.bfloat16)
    found.append(_check("x not contiguous", x, W))
    return found


def _check(name: str, x: Tensor, W: Tensor) -> Check:
    w = compress24(W)
    fast = to_library(w) if library(x.device) and x.dtype != torch.float32 else None

    def run(impl: str) -> Tensor:
        return sparse24_matmul(x, w if fast is None else fast, impl=impl)

    def expected() -> Tensor:
        return x.double() @ W.double().t()

    return Check(
        "sparse24_matmul",
        name,
        run,
        expected,
        TOLERANCE[x.dtype],
        () if fast is None or not x.numel() else ("library",),
    )


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if not library(device):
        return
    shapes = asked.shapes or ([(64, 128)] if toy else [(4096, 4096), (14336, 4096)])
    for out, columns in shapes:
        copies = 2 if toy else -(-ROTATED // (out * columns * 9 // 8))
        dense = [prune24(torch.randn(out, columns, device=device)).to(asked.dtype) for _ in range(copies)]
        sparse = [to_library(compress24(W)) for W in dense]
        for tokens in asked.tokens or ((8,) if toy else (1, 16, 256, 2048)):
            x = torch.randn(tokens, columns, device=device, dtype=asked.dtype)
            yield Contest(
                op="sparse24_matmul",
                detail=f"2:4 {sparse[0].layout}",
                shape=(out, columns),
                tokens=tokens,
                contestants={
                    "2:4": lambda i, x=x, sparse=sparse: sparse24_matmul(x, sparse[i], impl="library"),
                    "bfloat16": lambda i, x=x, dense=dense: F.linear(x, dense[i]),
                },
                copies=copies,
                ours="2:4",
                baseline="bfloat16",
                least_bytes=out * columns * 9 // 8 + 2 * tokens * (out + columns),
                flops=tokens
                * out
                * columns,  # two for each kept weight, at the dense rate, which sparse tensor cores reach
                expected=dict.fromkeys(("2:4", "bfloat16"), times(x, lambda dense=dense: dense[0])),
            )
