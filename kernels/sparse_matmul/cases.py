"""The checks of `sparse_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.cases.products import contest, copies_of, cpu_copies, dense
from kernels.int_matmul import pack_bits
from kernels.interpreter import triton_takes
from kernels.linear.onednn import lays_out
from kernels.linear.rows import products
from kernels.sparse_matmul import FEW, SparseRows, dense_rows, skips_zeros, sparse_matmul, starts_of, triton_fits
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
        _impls(x, w),
    )


def _impls(x: Tensor, w: SparseRows) -> tuple[str, ...]:
    cpu = ("cpu",) if skips_zeros(x.dtype, x.device, w.shape[1]) else ()
    return (*cpu, "triton") if triton_fits(x.device, x.dtype, w.shape[1]) else cpu


@torch.no_grad()
def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Comparison with the dense products: oneDNN's or cuBLAS's, and on a CPU for few tokens the loops that a step of
    decoding uses. Where oneDNN only emulates products in 16 bits, these loops are the rival."""
    if device.type == "cuda" or (toy and triton_takes(device)):
        for shape in asked.shapes or (((96, 256),) if toy else ((4096, 4096), (14336, 4096))):
            for tokens in asked.tokens or ((2,) if toy else (1, 16, 64, 512)):
                for share in (0.5,) if toy else (0.5, 0.3):
                    x = torch.randn(tokens, shape[1], device=device, dtype=asked.dtype)
                    yield _gpu(x, shape, share, 2 if toy else copies_of(2 * shape[0] * shape[1]))
        return
    if not skips_zeros(asked.dtype, device, 32):
        return
    for shape in asked.shapes or (((96, 256),) if toy else ((1536, 576), (8192, 2048))):
        for tokens in asked.tokens or ((2,) if toy else (1, 4, 512)):
            if tokens > FEW and not lays_out(asked.dtype):
                continue
            for share in (0.5,) if toy else (0.5, 0.3):
                yield _contest(torch.randn(tokens, shape[1]).to(asked.dtype), shape, share)


def _gpu(x: Tensor, shape: tuple[int, int], share: float, copies: int) -> Contest:
    from kernels.sparse_matmul.triton import FEW, candidates, key

    rival = dense(x, shape, copies)
    small = [sparse_rows(W, torch.rand(shape, device=x.device) < share) for W in rival.weights]
    calls: dict[str, Any] = {"triton": lambda i: sparse_matmul(x, small[i], impl="triton")}
    expected = {"triton": times(x, lambda: dense_rows(small[0]))}
    w, tokens = small[0], len(x)
    tuned = {"tune_key": key(w, tokens), "candidates": candidates(w, tokens)} if tokens <= FEW else {}
    stored = w.mask.nbytes + w.values.nbytes
    return contest("sparse_matmul", f"{1 - share:.0%} zeros", x, shape, stored, calls, expected, rival, **tuned)


def _contest(x: Tensor, shape: tuple[int, int], share: float) -> Contest:
    rival = dense(x, shape, cpu_copies(shape))
    small = [sparse_rows(W, torch.rand(shape) < share) for W in rival.weights]
    calls: dict[str, Any] = {"cpu": lambda i: sparse_matmul(x, small[i], impl="cpu")}
    expected = {"cpu": times(x, lambda: dense_rows(small[0]))}
    if len(x) <= FEW:
        calls["dense rows"] = lambda i: products(x, [rival.weights[i]], [None])[0]
        expected["dense rows"] = times(x, lambda: rival.weights[0])
    stored = small[0].mask.nbytes + small[0].values.nbytes
    more = {} if lays_out(x.dtype) else {"baseline": "dense rows"}
    return contest("sparse_matmul", f"{1 - share:.0%} zeros", x, shape, stored, calls, expected, rival, **more)
