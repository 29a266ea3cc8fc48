"""The checks of the operations between the products of a step on a GPU; whole steps are timed by
`kernels.harness.model`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.capability import too_old
from kernels.interpreter import triton_takes
from kernels.step.codes import Codes, Coding
from kernels.step.gpu.between import add_norm, add_norm_codes, gated, gated_codes, turn_and_store
from kernels.step.program import Norm
from kernels.support.declarations import TOLERANCE, Check, Contest, TimedSizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODED = {8: 1e-2, 4: 1e-1}  # relative RMS errors allowed where few codes of so many bits differ


def checks(device: torch.device) -> list[Check]:
    torch.manual_seed(0)
    found = []
    for dtype in DTYPES:
        for batch, columns in ((1, 64), (3, 100), (2, 4096)):
            for kind in ("norm", "sum and norm", "sum of a norm, and norm", "sum alone"):
                found.append(_norms(device, dtype, batch, columns, kind))
        for activation in ("silu", "gelu_tanh", "relu"):
            found.append(_gates(device, dtype, 3, 1100, activation))
        for coding in _codings(device):
            for batch, columns, kind in ((3, 100, "norm"), (2, 4096, "sum of a norm, and norm")):
                found.append(_codes_of_norms(device, dtype, batch, columns, coding, kind))
            found.append(_codes_of_gates(device, dtype, 3, 1100, coding))
        for batch, heads, kv_heads, channels in ((1, 4, 1, 64), (3, 6, 2, 24), (2, 8, 8, 128)):
            for normed, apart in ((False, False), (True, False), (True, True)):
                found.append(_turns(device, dtype, batch, heads, kv_heads, channels, normed, apart))
    return found


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """None: what these operations cost shows in whole steps."""
    return iter(())


def _check(
    name: str, dtype: torch.dtype, run: Callable, expected: Callable, device: torch.device, coding: Coding | None = None
) -> Check:
    """coding: of a result; values that differ in their last bit may get neighbouring codes."""
    impls = ("triton",) if triton_takes(device) else ()
    kind = str(dtype).removeprefix("torch.")
    allowed = max(TOLERANCE[dtype], 2e-6) if coding is None else CODED[coding.bits]
    return Check("step", f"{name}, {kind}", run, expected, allowed, impls)


def _codings(device: torch.device) -> list[Coding]:
    """Codes in both orders and all types, with a step for each token or one for all."""
    step = torch.tensor(0.02, device=device)
    found = [Coding(torch.int8), Coding(torch.int8, 4, even_first=True), Coding(torch.int8, step=step, even_first=True)]
    if too_old(device, float8=True) is None:
        found += [Coding(torch.float8_e4m3fn, step=step / 8), Coding(torch.float8_e4m3fn, even_first=True)]
    return found


def _norms(device: torch.device, dtype: torch.dtype, batch: int, columns: int, kind: str) -> Check:
    residual, added, after, norm = _stream(device, dtype, batch, columns, kind)

    def run(impl: str) -> tuple[Tensor, ...]:
        stream, y = residual.clone(), torch.zeros(batch, columns, dtype=dtype, device=device)
        add_norm(stream, added, after, norm, y, impl)
        return stream, y

    def expected() -> tuple[Tensor, ...]:
        total = _sum(residual, added, after)
        return total, torch.zeros_like(total) if norm is None else _normed(total, norm)

    return _check(f"{kind}, {batch} x {columns}", dtype, run, expected, device)


def _codes_of_norms(
    device: torch.device, dtype: torch.dtype, batch: int, columns: int, coding: Coding, kind: str
) -> Check:
    residual, added, after, norm = _stream(device, dtype, batch, columns, kind)

    def run(impl: str) -> tuple[Tensor, ...]:
        stream = residual.clone()
        return stream, _decoded(add_norm_codes(stream, added, after, norm, dtype, coding, impl), coding)

    def expected() -> tuple[Tensor, ...]:
        total = _sum(residual, added, after)
        return total, _rounded(_normed(total, norm), dtype, coding)

    return _check(f"{kind}, {batch} x {columns}, to {_name(coding)}", dtype, run, expected, device, coding)


def _stream(
    device: torch.device, dtype: torch.dtype, batch: int, columns: int, kind: str
) -> tuple[Tensor, Tensor | None, Norm | None, Norm | None]:
    """The residual stream, what is added, and the two norms."""
    residual, wide = torch.randn(batch, columns, device=device), torch.randn(batch, columns + 28, device=device)
    added = None if kind == "norm" else wide.to(dtype)[:, :columns]  # rows apart, as in a joined product
    gains = torch.rand(2, columns, device=device) + 0.5
    after = Norm(gains[0], 1e-6) if kind == "sum of a norm, and norm" else None
    return residual, added, after, None if kind == "sum alone" else Norm(gains[1], 1e-5)


def _sum(residual: Tensor, added: Tensor | None, after: Norm | None) -> Tensor:
    """The residual stream after the sum, in float64."""
    if added is None:
        return residual.double()
    return residual.double() + (added.double() if after is None else _normed(added.double(), after))


def _rounded(x: Tensor, dtype: torch.dtype, coding: Coding) -> Tensor:
    """The values of the codes of x, which is rounded to this dtype first, in float64."""
    x = x.to(dtype).double()
    step = x.abs().amax(1, keepdim=True) / coding.largest if coding.step is None else coding.step.double()
    codes = (x / step).clamp(-coding.largest, coding.largest)
    return (codes.round() if coding.dtype == torch.int8 else codes.to(coding.dtype).double()) * step


def _decoded(codes: Codes, coding: Coding) -> Tensor:
    values = codes.codes.double() * codes.step
    return torch.stack(values.chunk(2, 1), 2).flatten(1) if coding.even_first else values


def _name(coding: Coding) -> str:
    kind = f"int{coding.bits}" if coding.dtype == torch.int8 else "fp8"
    return f"{kind}{'' if coding.step is None else ', static'}{', even first' * coding.even_first}"


def _gates(device: torch.device, dtype: torch.dtype, batch: int, inner: int, activation: str) -> Check:
    gate, up = _halves(device, dtype, batch, inner)

    def run(impl: str) -> Tensor:
        return gated(gate, up, activation, impl)

    def expected() -> Tensor:
        return _gated(gate, up, activation)

    return _check(f"{activation} gate, {batch} x {inner}", dtype, run, expected, device)


def _codes_of_gates(device: torch.device, dtype: torch.dtype, batch: int, inner: int, coding: Coding) -> Check:
    gate, up = _halves(device, dtype, batch, inner)

    def run(impl: str) -> Tensor:
        return _decoded(gated_codes(gate, up, "silu", coding, impl), coding)

    def expected() -> Tensor:
        return _rounded(_gated(gate, up, "silu"), dtype, coding)

    return _check(f"gate, {batch} x {inner}, to {_name(coding)}", dtype, run, expected, device, coding)


def _halves(device: torch.device, dtype: torch.dtype, batch: int, inner: int) -> tuple[Tensor, Tensor]:
    gate, up = (2 * torch.randn(batch, 2 * inner, device=device)).to(dtype).split(inner, -1)
    return gate, up


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    x = gate.double()
    x = {
        "silu": lambda: x / (1 + (-x).exp()),
        "gelu_tanh": lambda: x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
        "relu": lambda: x.clamp(min=0),
    }[activation]()
    return x * up.double()


def _turns(
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    kv_heads: int,
    channels: int,
    normed: bool,
    apart: bool,
) -> Check:
    """apart: the slots of the new position are not its place, and differ from head to head."""
    positions, held = 17, 7
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * channels, device=device).to(dtype)
    parts = qkv.split((heads * channels, kv_heads * channels, kv_heads * channels), -1)
    angle = 6.3 * torch.rand(positions, channels // 2, device=device)
    tables = torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)
    length = torch.full((batch, kv_heads), held, dtype=torch.int32, device=device)
    gains = torch.rand(2, channels, device=device) + 0.5
    norms = (Norm(gains[0], 1e-6), Norm(gains[1], 1e-6)) if normed else (None, None)
    before = torch.randn(2, batch, kv_heads, positions, channels, device=device).to(dtype)
    ends = torch.arange(1, 1 + batch * kv_heads, device=device, dtype=torch.int32).view(batch, kv_heads)

    def run(impl: str) -> tuple[Tensor, ...]:
        keys, values = before.clone()
        slots = ends if apart else None
        return turn_and_store(parts, tables, length, norms, keys, values, impl, slots), keys, values

    def expected() -> tuple[Tensor, ...]:
        """By complex numbers: channel i is the real part, i + channels / 2 the imaginary one."""
        q, k, v = (x.double().unflatten(1, (-1, channels)) for x in parts)
        turn = torch.polar(torch.ones_like(angle[held - 1], dtype=torch.float64), angle[held - 1].double())
        turned = []
        for x, norm in ((q, norms[0]), (k, norms[1])):
            x = x if norm is None else _normed(x, norm)
            y = torch.complex(*(half.contiguous() for half in x.chunk(2, -1))) * turn
            turned.append(torch.cat([y.real, y.imag], -1))
        keys, values = before.double()
        for row in range(batch):
            for head in range(kv_heads):
                slot = int(ends[row, head] if apart else length[row, head]) - 1
                keys[row, head, slot], values[row, head, slot] = turned[1][row, head], v[row, head]
        return turned[0], keys, values

    more = "".join(f", {word}" for word, on in (("normed", normed), ("apart", apart)) if on)
    name = f"turn and store, {batch} x {heads} / {kv_heads} heads of {channels}{more}"
    return _check(name, dtype, run, expected, device)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
