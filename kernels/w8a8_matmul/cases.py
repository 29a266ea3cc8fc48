"""The checks of `w8a8_matmul`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.capability import too_old
from kernels.cases.products import contest, copies_of, cpu_copies, dense
from kernels.interpreter import triton_takes
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes
from kernels.w8a8_matmul import BLOCK, W8, prepacked_fits, quantize_rows, quantize_weight, to_prepacked, w8a8_matmul
from kernels.w8a8_matmul.codes import w8a8_codes_matmul
from kernels.w8a8_matmul.layout import has_vnni, in_one_call, integer_dots

INT8, FP8 = torch.int8, torch.float8_e4m3fn
SHORT = 5e-4  # fp8 on Hopper: sums of 128 products are kept in about 14 bits; an H100 reached 1.3e-4 in float32
FAST = 1e-2  # libraries: all sums are kept in about 14 bits


def checks(device: torch.device) -> list[Check]:
    g = torch.Generator().manual_seed(0)
    cases = (  # name, tokens, out, in, block-wise, static, dtype of x
        ("one token", (1,), 96, 1024, False, False, torch.bfloat16),
        ("one token, odd", (1,), 37, 77, False, False, torch.float32),
        ("one token, static", (1,), 40, 130, False, True, torch.float16),
        ("a few, split", (2, 4), 96, 2176, False, False, torch.bfloat16),
        ("a few, odd, split", (5,), 70, 2101, False, False, torch.float32),
        ("static", (19,), 72, 160, False, True, torch.float32),
        ("tiles", (70,), 136, 272, False, False, torch.bfloat16),
        ("tiles, odd", (67,), 131, 77, False, False, torch.float32),
        ("tiles, static", (65,), 16, 48, False, True, torch.float16),
        ("blocks", (3,), 200, 704, True, False, torch.bfloat16),
        ("blocks, one token, odd", (1,), 37, 77, True, True, torch.float32),
        ("blocks, tiles", (66,), 136, 200, True, False, torch.float32),
        ("empty", (2, 0), 32, 64, False, False, torch.bfloat16),
    )
    found = []
    for kind in kinds(device):
        for name, tokens, out, columns, blocks, static, dtype in cases:
            W = torch.randn(out, columns, generator=g) * torch.rand(out, 1, generator=g)
            x = (torch.randn(*tokens, columns, generator=g) * 3).to(device, dtype)
            scale = torch.tensor(4.0 / (127 if kind == INT8 else 448), device=device) if static else None
            found.append(_check(name, x, _move(quantize_weight(W, kind, BLOCK if blocks else None), device), scale))
        x = torch.randn(2 * 96, 11, generator=g).to(device, torch.float16).t()[:, ::2]
        W = quantize_weight(torch.randn(48, 96, generator=g), kind)
        found.append(_check("x not contiguous", x, _move(W, device), None))
        found.append(
            _check("x of row stride", torch.randn(9, 200, generator=g).to(device)[:, 8:104], _move(W, device), None)
        )
        for tokens in (1, 5, 70):
            w = _move(quantize_weight(torch.randn(72, 1040, generator=g), kind), device)
            found.append(_check_codes(*quantize_rows(torch.randn(tokens, 1040, generator=g).to(device), kind), w))
    extreme = W8(
        "rows", torch.full((33, 14336), -128, dtype=INT8, device=device), torch.ones(33, device=device), (33, 14336)
    )
    found.append(_check("largest sums", torch.ones(2, 14336, device=device, dtype=torch.float32), extreme, None))
    return found


def kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    """The 8-bit types that this device multiplies: not every GPU has float8."""
    return (INT8, FP8) if too_old(device, float8=True) is None else (INT8,)


def _check(name: str, x: Tensor, w: W8, x_scale: Tensor | None) -> Check:
    blocked, int8 = w.scale.dim() == 2, w.codes.dtype == INT8
    impls = ("triton", "cpu") if int8 and not blocked and integer_dots(w.codes) else ("triton",)

    def run(impl: str) -> Tensor | tuple[Tensor, ...]:
        y = w8a8_matmul(x, w, x_scale=x_scale, impl=impl)
        if impl != "cpu" or not prepacked_fits(w):
            return y, y, y
        layouts = ("panels" if in_one_call() else "prepacked", "prepacked" if has_vnni() else "panels")
        return y, *(w8a8_matmul(x, to_prepacked(w, layout), x_scale=x_scale, impl=impl) for layout in layouts)

    def expected() -> tuple[Tensor, ...]:
        codes, scale = quantize_rows(x, w.codes.dtype, scale=x_scale, block=BLOCK if blocked else None)
        a, W = codes.double(), w.codes.double()
        if blocked:
            a = a * scale.double().repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
            W = W * w.scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: W.shape[0], : W.shape[1]]
            y = a @ W.t()
        else:
            y = (a @ W.t()) * w.scale.double() * scale.double()
        return y, y, y

    kind = "int8" if int8 else "fp8"
    tolerance = TOLERANCE[x.dtype] if int8 else max(SHORT, TOLERANCE[x.dtype])
    return Check("w8a8_matmul", f"{kind}, {name}", run, expected, tolerance, impls)


def _check_codes(codes: Tensor, step: Tensor, w: W8) -> Check:
    def run(impl: str) -> Tensor:
        return w8a8_codes_matmul(codes, step, w, dtype=torch.bfloat16, impl=impl)

    def expected() -> Tensor:
        return (codes.double() @ w.codes.double().t()) * w.scale.double() * step.double()

    kind = "int8" if w.codes.dtype == INT8 else "fp8"
    return Check("w8a8_matmul", f"{kind}, given codes, {len(codes)} tokens", run, expected, TOLERANCE[torch.bfloat16])


def _move(w: W8, device: torch.device) -> W8:
    return w._replace(codes=w.codes.to(device), scale=w.scale.to(device))


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy and triton_takes(device):
        for kind in kinds(device):
            for tokens in (1, 80):
                yield _gpu(device, kind, (160, 256), tokens, asked.dtype, 2)
    elif toy:
        yield from _cpu((160, 256), 16, asked.dtype)
    elif device.type == "cuda":
        for shape in asked.shapes or ((14336, 4096), (4096, 4096)):
            for kind in kinds(device):
                for tokens in asked.tokens or (1, 16, 64, 256, 2048):
                    yield _gpu(device, kind, shape, tokens, asked.dtype, copies_of(shape[0] * shape[1]))
    else:
        for shape in asked.shapes or ((192, 576), (576, 576), (1536, 576), (576, 1536), (4096, 4096), (14336, 4096)):
            for tokens in asked.tokens or (1, 16, 64, 256, 512):
                yield from _cpu(shape, tokens, asked.dtype)


def _gpu(
    device: torch.device, kind: torch.dtype, shape: tuple[int, int], tokens: int, dtype: torch.dtype, copies: int
) -> Contest:
    from kernels.w8a8_matmul.triton import candidates, key

    out, columns = shape
    x = torch.randn(tokens, columns, device=device, dtype=dtype)
    rival = dense(x, shape, copies)
    small = [quantize_weight(W, kind) for W in rival.weights]
    library = _library(x, small)
    calls = {"triton": lambda i: w8a8_matmul(x, small[i], impl="triton"), **library}
    return contest(
        "w8a8_matmul",
        "int8" if kind == INT8 else "fp8",
        x,
        shape,
        out * columns + 4 * out,
        calls,
        dict.fromkeys(calls, of_codes(x, lambda: small[0])),
        rival,
        rate="int8" if kind == INT8 else "float8",
        goal=1.6 if tokens == 1 or tokens >= 256 else None,
        tune_key=key(tokens, out, columns, kind),
        candidates=candidates(tokens, kind),
        tolerance={} if kind == INT8 else {"triton": SHORT, **dict.fromkeys(library, FAST)},
    )


def of_codes(x: Tensor, w: Callable[[], W8]) -> Expected:
    """x Wᵀ in float64, from the codes of x, token by token, and those of w, whose scales are per channel."""

    def expected(_: object) -> Tensor:
        weight = w()
        codes, scale = quantize_rows(x, weight.codes.dtype)
        return (codes.double() @ weight.codes.double().t()) * weight.scale.double() * scale.double()

    return expected


def _library(x: Tensor, small: list[W8]) -> dict[str, Callable[[int], object]]:
    """torch's own products of 8-bit matrices with the necessary quantisation, if they run here."""

    def int_mm(i: int) -> Tensor:
        codes, scale = quantize_rows(x, INT8)
        return (torch._int_mm(codes, small[i].codes.t()).float() * small[i].scale * scale).to(x.dtype)

    fast = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)  # as its users call it

    def scaled_mm(i: int) -> Tensor:
        codes, scale = quantize_rows(x, FP8)
        return fast(codes, small[i].codes.t(), scale, small[i].scale[None])

    def fused_int_mm(i: int) -> Tensor:
        """With our rounding and our scaling, in one launch each."""
        codes, scale = fused(padded, INT8, None, False)
        sums = torch._int_mm(codes, small[i].codes.t())[None, : x.shape[0]]
        return gathered(sums, scale, small[i].scale, torch.empty(sums.shape[1:], dtype=x.dtype, device=x.device), False)

    def fused_scaled_mm(i: int) -> Tensor:
        codes, scale = fused(x, FP8, None, False)
        return fast(codes[:, : x.shape[1]], small[i].codes.t(), scale, small[i].scale[None])

    def product_only(i: int) -> Tensor:
        return fast(fixed, small[i].codes.t(), fixed_scale, small[i].scale[None])

    from kernels.w8a8_matmul.triton import gathered
    from kernels.w8a8_matmul.triton import quantized as fused

    padded = F.pad(x, (0, 0, 0, 32 - len(x))) if len(x) <= 16 else x  # cuBLAS needs more tokens, once for all calls
    fixed, fixed_scale = quantize_rows(x, FP8)
    if small[0].codes.dtype == INT8:
        calls = {"_int_mm": int_mm} if x.shape[0] > 16 else {}  # cuBLAS needs more tokens than 16
        calls["_int_mm, rounding and scaling fused"] = fused_int_mm
    else:
        calls = {
            "_scaled_mm": scaled_mm,
            "_scaled_mm, rounding fused": fused_scaled_mm,
            "_scaled_mm, x already fp8": product_only,
        }
    found = {}
    for name, call in calls.items():
        try:
            call(0)
        except Exception:  # another GPU or torch, without these products
            continue
        found[name] = call
    return found


@torch.no_grad()
def _cpu(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> Iterator[Contest]:
    out, columns = shape
    if not has_vnni() or dtype == torch.float16:  # the baseline is oneDNN's
        return
    x = torch.randn(tokens, columns).to(dtype)
    rival = dense(x, shape, cpu_copies(shape))
    rows = [quantize_weight(W, INT8) for W in rival.weights]
    small, theirs = [to_prepacked(w) for w in rows], [to_prepacked(w, "prepacked") for w in rows]
    calls = {
        "cpu": lambda i: w8a8_matmul(x, small[i], impl="cpu"),
        "cpu oneDNN": lambda i: w8a8_matmul(x, theirs[i], impl="cpu"),
        "cpu int_mm": lambda i: w8a8_matmul(x, rows[i], impl="cpu"),
    }
    expected = dict.fromkeys(calls, of_codes(x, lambda: rows[0]))
    more = {"rate": "int8", "goal": 1.7 if tokens >= 256 or out >= 4096 else None}
    yield contest("w8a8_matmul", "int8", x, shape, out * columns + 4 * out, calls, expected, rival, **more)
