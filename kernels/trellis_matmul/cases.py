"""The checks of `trellis_matmul`, and the shapes on which it is timed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.cases.products import contest, copies_of, cpu_copies, dense
from kernels.interpreter import triton_takes
from kernels.linear.onednn import lays_out
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes, times
from kernels.trellis_matmul import UNIT, Trellis, length_for, trellis_matmul
from kernels.trellis_matmul.layout import MULTIPLIER
from kernels.trellis_matmul.reference import decode


def checks(device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for out, columns, bits, states, tokens, dtype in (
        (48, 64, 2, 14, (1,), torch.float32),
        (37, 65, 3, 16, (2, 3), torch.float16),
        (192, 40, 4, 12, (4,), torch.bfloat16),
        (576, 20, 3, 14, (1, 1), torch.bfloat16),
        (272, 33, 2, 16, (7,), torch.float32),
        (300, 64, 2, 12, (40,), torch.bfloat16),
        (16, 64, 4, 16, (0,), torch.bfloat16),
    ):
        w, W = _weight(generator, out, columns, bits, states, device)
        x = torch.randn(*tokens, columns, generator=generator).to(device, dtype)
        name = f"{bits} bits of {states}, {tokens} x {out} x {columns}, {str(dtype).removeprefix('torch.')}"
        found.append(_check(name, x, w, W))
    wide = torch.randn(2 * 48, 11, generator=generator).to(device)
    found.append(
        _check("x transposed, every other column", wide.t()[:, ::2], *_weight(generator, 96, 48, 3, 14, device))
    )
    return found


def _weight(
    generator: torch.Generator, out: int, columns: int, bits: int, states: int, device: torch.device
) -> tuple[Trellis, Tensor]:
    """A weight of random bits, and its W in float64, decoded bit by bit."""
    length = length_for(out)
    segments = -(-out // length)
    codes = torch.randint(256, (segments, columns, length * bits // 8), generator=generator, dtype=torch.uint8)
    scale = torch.rand(out, generator=generator) / UNIT
    stream = (codes[..., None].long() >> torch.arange(8) & 1).flatten(2)  # [segments, in, length * bits]
    first = torch.arange(length) * bits
    places = (first[:, None] + torch.arange(states)) % (length * bits)
    hashed = (stream[..., places] << torch.arange(states)).sum(-1) * MULTIPLIER % (1 << 32)
    value = sum(((hashed >> shift) % 256 + 128) % 256 - 128 for shift in (0, 8, 16, 24))
    W = value.transpose(1, 2).reshape(-1, columns)[:out].double() * scale.double()[:, None]
    return Trellis(codes.to(device), scale.to(device), bits, states, (out, columns)), W.to(device)


def _check(name: str, x: Tensor, w: Trellis, W: Tensor) -> Check:
    impls = ("triton",) if triton_takes(w.codes.device) else ()
    if w.codes.device.type == "cpu" and native.why_not() is None:
        impls += ("cpu",)
    return Check(
        "trellis_matmul",
        name,
        lambda impl: trellis_matmul(x, w, impl=impl),
        lambda: x.double() @ W.t(),
        TOLERANCE[x.dtype],
        impls,
    )


def weights(w: Trellis) -> Tensor:
    """W [out, in] in float32."""
    return decode(w)[:, : w.shape[0]].mul_(w.scale).t()


@torch.no_grad()
def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Comparison with the fastest dense product."""
    if device.type == "cuda" or (toy and triton_takes(device)):
        shapes = asked.shapes or (((96, 256),) if toy else ((4096, 4096), (14336, 4096)))
        for shape in shapes:
            for tokens in asked.tokens or ((2,) if toy else (1, 4, 8, 64)):
                for bits in (3,) if toy else (2, 3, 4):
                    yield _gpu(device, shape, tokens, bits, asked.dtype, 2 if toy else None)
        return
    if device.type != "cpu" or native.why_not() or not lays_out(asked.dtype):
        return
    if asked.dtype == torch.float16:
        return
    for shape in asked.shapes or (((96, 256),) if toy else ((1536, 576), (8192, 2048))):
        for tokens in asked.tokens or ((2,) if toy else (1, 4, 64)):
            for bits in (3,) if toy else (2, 3):
                x = torch.randn(tokens, shape[1]).to(asked.dtype)
                yield _contest(x, _random(shape, bits, cpu_copies(shape), device), "cpu", rate="float32")


def _random(shape: tuple[int, int], bits: int, copies: int, device: torch.device) -> list[Trellis]:
    """Weights of random bits, in walks of states of 14 bits."""
    out, columns = shape
    length = length_for(out)
    size = (-(-out // length), columns, length * bits // 8)

    def one() -> Trellis:
        codes = torch.randint(256, size, dtype=torch.uint8, device=device)
        return Trellis(codes, torch.rand(out, device=device) / UNIT, bits, 14, shape)

    return [one() for _ in range(copies)]


def _gpu(
    device: torch.device, shape: tuple[int, int], tokens: int, bits: int, dtype: torch.dtype, copies: int | None
) -> Contest:
    from kernels.trellis_matmul.triton import FEW, candidates, key

    small = _random(shape, bits, copies or copies_of(shape[0] * shape[1] * bits // 8), device)
    x = torch.randn(tokens, shape[1], device=device, dtype=dtype)
    tuned = {"tune_key": key(small[0], tokens), "candidates": candidates(small[0], tokens)} if tokens <= FEW else {}
    return _contest(x, small, "triton", **tuned)


def _contest(x: Tensor, small: list[Trellis], impl: str, **more: Any) -> Contest:
    calls = {impl: lambda i: trellis_matmul(x, small[i], impl=impl)}
    expected = {impl: times(x, lambda: weights(small[0]))}
    w, rival = small[0], dense(x, small[0].shape, len(small))
    stored = w.shape[0] * w.shape[1] * w.bits // 8 + 4 * w.shape[0]
    return contest("trellis_matmul", f"{w.bits} bits", x, w.shape, stored, calls, expected, rival, **more)
