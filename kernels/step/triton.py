"""The operations between the products of a decoding step, one launch each: sum and norms, rotation and store, gate.
Norms and gates also round their results to codes."""

from typing import Any

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import on_its_device  # noqa: E402
from kernels.launch_order import await_inputs  # noqa: E402
from kernels.step.codes import MOST_GATED, Codes, Coding  # noqa: E402
from kernels.step.program import ACTIVATIONS, Norm  # noqa: E402
from kernels.tuning import Compilation, launch_options  # noqa: E402
from kernels.w8a8_matmul.triton import encode, magnitude, steps  # noqa: E402

GATED = 1024  # elements of `gated` per program
NOT_ROUNDED: dict[str, Any] = {"KIND": None, "LARGEST": 0.0, "EVEN_FIRST": False}


@triton.jit
def store_row(
    v, y, step, fixed, row, start, columns, stride,
    KIND: tl.constexpr, LARGEST: tl.constexpr, EVEN_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the BLOCK elements v of a row from column `start` on in y [rows, stride]; or, if `step` is not None, the
    codes of a whole row v, which is rounded to KIND first, and their step.

    v: float32, 0 beyond the last column. fixed: one step of all rows, or None. EVEN_FIRST: codes of the even columns
    are stored in the first half of the row, those of the odd ones in the second."""
    j = start + tl.arange(0, BLOCK)
    if step is None:
        tl.store(y + row * stride + j, v.to(y.dtype.element_ty), mask=j < columns)
    else:
        v = v.to(KIND).to(tl.float32)
        size, inverse = steps(tl.max(magnitude(v), 0), LARGEST)
        if fixed is not None:
            given = tl.load(fixed)
            size, inverse = given + (size - size), tl.div_rn(1.0, given)  # NaN stays NaN
        tl.store(step + row, size)
        code = encode(v * inverse, LARGEST)
        if EVEN_FIRST:
            even, odd = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
            half = tl.arange(0, BLOCK // 2)
            tl.store(y + row * stride + half, even, mask=half < columns // 2)
            tl.store(y + row * stride + columns // 2 + half, odd, mask=half < columns // 2)
        else:
            tl.store(y + row * stride + j, code, mask=j < columns)


@triton.jit
def add_norm_kernel(
    residual, added, after, gain, y, step, fixed, columns, added_stride, y_stride, after_eps, eps,
    KIND: tl.constexpr, LARGEST: tl.constexpr, EVEN_FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row per program. `added`, `after` and `gain` may be None: nothing is added, or not normalised. The arguments
    from `step` to `fixed`, and from KIND to EVEN_FIRST are those of `store_row`."""
    await_inputs(EARLY)
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = j < columns
    v = tl.load(residual + row * columns + j, mask=inside, other=0.0)
    if added is not None:
        more = tl.load(added + row * added_stride + j, mask=inside, other=0.0).to(tl.float32)
        if after is not None:
            outer = tl.load(after + j, mask=inside, other=0.0)
            more = more * tl.rsqrt(tl.sum(more * more, 0) / columns + after_eps) * outer
        v += more
        tl.store(residual + row * columns + j, v, mask=inside)
    if gain is not None:
        inner = tl.load(gain + j, mask=inside, other=0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / columns + eps) * inner
        store_row(v, y, step, fixed, row, 0, columns, y_stride, KIND, LARGEST, EVEN_FIRST, BLOCK)


@triton.jit
def turn_kernel(
    q, k, v, cos, sin, length, ends, query_gain, key_gain, keys, values, turned,
    heads, kv_heads, positions, q_stride, k_stride, v_stride, eps,
    CHANNELS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one sequence per program: queries, then keys, then values. `ends` may be None: a new position's slot
    in the cache is its place in the text. HALF: a power of two, at least half of CHANNELS."""
    await_inputs(EARLY)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = CHANNELS // 2
    i = tl.arange(0, HALF)
    inside = i < half
    place = tl.load(length + b * kv_heads).to(tl.int64) - 1
    slot = place
    if ends is not None:
        slot = tl.load(ends + b * kv_heads + (h - heads) % kv_heads, mask=h >= heads, other=1).to(tl.int64) - 1
    if h < heads:
        at = q + b * q_stride + h * CHANNELS
    elif h < heads + kv_heads:
        at = k + b * k_stride + (h - heads) * CHANNELS
    else:
        at = v + b * v_stride + (h - heads - kv_heads) * CHANNELS
    first, second = tl.load(at + i, mask=inside, other=0.0), tl.load(at + half + i, mask=inside, other=0.0)
    if h < heads + kv_heads:
        a, z = first.to(tl.float32), second.to(tl.float32)
        if query_gain is not None:
            factor = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(z * z, 0)) / CHANNELS + eps)
            if h < heads:
                gain = query_gain
            else:
                gain = key_gain
            a = a * factor * tl.load(gain + i, mask=inside, other=0.0)
            z = z * factor * tl.load(gain + half + i, mask=inside, other=0.0)
        c = tl.load(cos + place * CHANNELS + i, mask=inside, other=0.0)
        s = tl.load(sin + place * CHANNELS + i, mask=inside, other=0.0)
        first, second = (a * c - z * s).to(first.dtype), (z * c + a * s).to(first.dtype)
    if h < heads:
        to = turned + (b * heads + h) * CHANNELS
    elif h < heads + kv_heads:
        to = keys + ((b * kv_heads + h - heads) * positions + slot) * CHANNELS
    else:
        to = values + ((b * kv_heads + h - heads - kv_heads) * positions + slot) * CHANNELS
    tl.store(to + i, first, mask=inside)
    tl.store(to + half + i, second, mask=inside)


@triton.jit
def gate_kernel(
    gate, up, y, step, fixed, inner, gate_stride, up_stride, y_stride, ACTIVATION: tl.constexpr, KIND: tl.constexpr,
    LARGEST: tl.constexpr, EVEN_FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of a row per program: for codes, see `store_row`, all of them."""
    await_inputs(EARLY)
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    i = start + tl.arange(0, BLOCK)
    a = tl.load(gate + row * gate_stride + i, mask=i < inner, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + i, mask=i < inner, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        a = a * tl.sigmoid(a)
    elif ACTIVATION == 2:  # tanh(z) = 2 sigmoid(2 z) - 1, so that (1 + tanh(z)) / 2 = sigmoid(2 z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    else:
        a = tl.maximum(a, 0.0)
    store_row(a * b, y, step, fixed, row, start, inner, y_stride, KIND, LARGEST, EVEN_FIRST, BLOCK)


@on_its_device
def add_norm(
    residual: Tensor,
    added: Tensor | None,
    after: Norm | None,
    norm: Norm | None,
    y: Tensor | Codes,
    coding: Coding | None = None,
) -> None:
    """Like `between.add_norm`; with codes, which are filled, like `between.add_norm_codes`."""
    rows, columns = residual.shape
    block, (result, *rounded), constants = triton.next_power_of_2(columns), *_stored(y, coding)
    add_norm_kernel[(rows,)](
        residual, added, None if after is None else after.weight, None if norm is None else norm.weight,
        result, *rounded, columns, 0 if added is None else added.stride(0), result.stride(0),
        0.0 if after is None else after.eps, 0.0 if norm is None else norm.eps,
        **constants, BLOCK=block, **launch_options(residual.device), num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


def _stored(
    y: Tensor | Codes, coding: Coding | None
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], dict[str, Any]]:
    """The arguments of `store_row` from `y` to `fixed`, and its constants."""
    if isinstance(y, Tensor):
        return (y, None, None), NOT_ROUNDED
    kind = getattr(tl, str(y.dtype).removeprefix("torch."))
    constants = {"KIND": kind, "LARGEST": coding.largest, "EVEN_FIRST": coding.even_first}
    return (y.codes, y.step, coding.step), constants


@on_its_device
def turn_and_store(
    keys: Tensor,
    values: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    length: Tensor,
    norms: tuple[Norm | None, Norm | None],
    ends: Tensor | None = None,
) -> Tensor:
    """Like `between.turn_and_store`."""
    (batch, kv_heads, positions, channels), (q, k, v) = keys.shape, qkv
    heads, (query, key) = q.shape[1] // channels, norms
    turned = q.new_empty(batch, heads, channels)
    turn_kernel[(batch, heads + 2 * kv_heads)](
        q, k, v, *tables, length, ends, None if query is None else query.weight, None if key is None else key.weight,
        keys, values, turned, heads, kv_heads, positions, q.stride(0), k.stride(0), v.stride(0),
        0.0 if query is None else query.eps,
        CHANNELS=channels, HALF=triton.next_power_of_2(channels // 2), **launch_options(q.device), num_warps=1,
    )  # fmt: skip
    return turned


@on_its_device
def gated(gate: Tensor, up: Tensor, activation: str, y: Tensor | Codes, coding: Coding | None = None) -> None:
    """Like `between.gated`, into y; with codes, which are filled, like `between.gated_codes`."""
    rows, inner = gate.shape
    block = GATED if coding is None else triton.next_power_of_2(inner)
    (result, *rounded), constants = _stored(y, coding)
    gate_kernel[(rows, triton.cdiv(inner, block))](
        gate, up, result, *rounded, inner, gate.stride(0), up.stride(0), result.stride(0),
        ACTIVATION=ACTIVATIONS.index(activation), **constants, BLOCK=block, **launch_options(gate.device),
        num_warps=warps_of_gate(block),
    )  # fmt: skip


def warps_of_gate(block: int) -> int:
    return min(16, max(4, block // 256))


def shipped() -> list[Compilation]:
    """The shipped compilations, at the widths of an 8B model."""
    norm = {"residual": "*fp32", "gain": "*fp32", "y": "*bf16"}
    norm |= dict.fromkeys(("columns", "added_stride", "y_stride"), "i32") | {"after_eps": "fp32", "eps": "fp32"}
    turn = dict.fromkeys(("q", "k", "v", "keys", "values", "turned"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    strides = ("q_stride", "k_stride", "v_stride")
    turn |= {"length": "*i32", "eps": "fp32"}
    turn |= dict.fromkeys(("heads", "kv_heads", "positions", *strides), "i32")
    no_gains, gains = {"query_gain": None, "key_gain": None}, {"query_gain": "*fp32", "key_gain": "*fp32"}
    added, after = {"added": "*bf16"}, {"after": "*fp32"}
    wide, whole = ("columns", "added_stride", "y_stride"), {"BLOCK": 4096, "step": None, "fixed": None, **NOT_ROUNDED}
    gate_strides = ("inner", "gate_stride", "up_stride", "y_stride")
    gate = dict.fromkeys(("gate", "up", "y"), "*bf16") | dict.fromkeys(gate_strides, "i32")
    gated = {"ACTIVATION": 1, "step": None, "fixed": None, **NOT_ROUNDED, "BLOCK": GATED}
    heads, here = {"CHANNELS": 128, "HALF": 64}, {"ends": None}
    turn_strides = ("positions", *strides)
    found = [
        Compilation("step add_norm", add_norm_kernel, {**norm, **added}, {**whole, "after": None}, 16, 3, wide),
        Compilation("step add_norm after", add_norm_kernel, {**norm, **added, **after}, whole, 16, 3, wide),
        Compilation("step norm", add_norm_kernel, norm, {**whole, "added": None, "after": None}, 16, 3, wide),
        Compilation("step turn", turn_kernel, turn, {**heads, **no_gains, **here}, 1, 3, turn_strides),
        Compilation("step turn normed", turn_kernel, {**turn, **gains}, {**heads, **here}, 1, 3, turn_strides),
        Compilation("step turn apart", turn_kernel, {**turn, "ends": "*i32"}, {**heads, **no_gains}, 1, 3,
                    turn_strides),
        Compilation("step gate", gate_kernel, gate, gated, 4, 3, gate_strides),
    ]  # fmt: skip
    for title, code, largest, even_first in (
        ("int8", "*i8", 127.0, False), ("fp8", "*fp8e4nv", 448.0, False), ("int8 even first", "*i8", 127.0, True),
        ("fp8 even first", "*fp8e4nv", 448.0, True), ("int4 even first", "*i8", 7.0, True),
    ):  # fmt: skip
        codes = {"y": code, "step": "*fp32"}
        how = {"KIND": tl.bfloat16, "LARGEST": largest, "EVEN_FIRST": even_first, "fixed": None}
        row = {"BLOCK": 4096, "after": None, **how}
        found.append(Compilation(f"step add_norm to {title}", add_norm_kernel, {**norm, **added, **codes}, row, 16, 3,
                                 wide))  # fmt: skip
        for inner in (14336, MOST_GATED):
            block = triton.next_power_of_2(inner)
            row = {"ACTIVATION": 1, "BLOCK": block, **how}
            found.append(Compilation(f"step gate {inner} to {title}", gate_kernel, {**gate, **codes}, row,
                                     warps_of_gate(block), 3, gate_strides))  # fmt: skip
    return found
