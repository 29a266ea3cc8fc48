"""The operations between the products of a decoding step, one launch each: sum and norms, rotation and store, gate."""

from kernels.interpreter import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.capability import on_its_device  # noqa: E402
from kernels.step.program import ACTIVATIONS, Norm  # noqa: E402
from kernels.tuning import Compilation  # noqa: E402

GATED = 1024  # elements of `gated` per program


@triton.jit
def add_norm_kernel(
    residual, added, after, gain, y, columns, added_stride, after_eps, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program. `added`, `after` and `gain` may be None: nothing is added, or not normalised."""
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
        tl.store(y + row * columns + j, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(
    q, k, v, cos, sin, length, ends, query_gain, key_gain, keys, values, turned,
    heads, kv_heads, positions, q_stride, k_stride, v_stride, eps, CHANNELS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one sequence per program: queries, then keys, then values. `ends` may be None: a new position's slot
    in the cache is its place in the text. HALF: a power of two, at least half of CHANNELS."""
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
def gate_kernel(gate, up, y, inner, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + row * gate_stride + i, mask=i < inner, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + i, mask=i < inner, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        a = a * tl.sigmoid(a)
    elif ACTIVATION == 2:  # tanh(z) = 2 sigmoid(2 z) - 1, so that (1 + tanh(z)) / 2 = sigmoid(2 z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    else:
        a = tl.maximum(a, 0.0)
    tl.store(y + row * inner + i, (a * b).to(y.dtype.element_ty), mask=i < inner)


@on_its_device
def add_norm(residual: Tensor, added: Tensor | None, after: Norm | None, norm: Norm | None, y: Tensor) -> Tensor:
    """Like `between.add_norm`."""
    rows, columns = residual.shape
    block = triton.next_power_of_2(columns)
    add_norm_kernel[(rows,)](
        residual, added, None if after is None else after.weight, None if norm is None else norm.weight, y, columns,
        0 if added is None else added.stride(0), 0.0 if after is None else after.eps, 0.0 if norm is None else norm.eps,
        BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return y


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
        CHANNELS=channels, HALF=triton.next_power_of_2(channels // 2), num_warps=1,
    )  # fmt: skip
    return turned


@on_its_device
def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Like `between.gated`."""
    rows, inner = gate.shape
    y = gate.new_empty(rows, inner)
    gate_kernel[(rows, triton.cdiv(inner, GATED))](
        gate, up, y, inner, gate.stride(0), up.stride(0), ACTIVATION=ACTIVATIONS.index(activation), BLOCK=GATED,
        num_warps=4,
    )  # fmt: skip
    return y


def shipped() -> list[Compilation]:
    """The shipped compilations, at the widths of an 8B model."""
    norm = {"residual": "*fp32", "gain": "*fp32", "y": "*bf16"}
    numbers = {"columns": "i32", "added_stride": "i32", "after_eps": "fp32", "eps": "fp32"}
    turn = dict.fromkeys(("q", "k", "v", "keys", "values", "turned"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    strides = ("q_stride", "k_stride", "v_stride")
    turn |= {"length": "*i32", "eps": "fp32"}
    turn |= dict.fromkeys(("heads", "kv_heads", "positions", *strides), "i32")
    no_gains, gains = {"query_gain": None, "key_gain": None}, {"query_gain": "*fp32", "key_gain": "*fp32"}
    wide, whole = ("columns", "added_stride"), {"BLOCK": 4096}
    gate = {"gate": "*bf16", "up": "*bf16", "y": "*bf16", "inner": "i32", "gate_stride": "i32", "up_stride": "i32"}
    heads, here = {"CHANNELS": 128, "HALF": 64}, {"ends": None}
    turn_strides = ("positions", *strides)
    return [
        Compilation("step add_norm", add_norm_kernel, {**norm, "added": "*bf16", **numbers}, {**whole, "after": None},
                    16, 3, wide),
        Compilation("step add_norm after", add_norm_kernel, {**norm, "added": "*bf16", "after": "*fp32", **numbers},
                    whole, 16, 3, wide),
        Compilation("step norm", add_norm_kernel, {**norm, **numbers}, {**whole, "added": None, "after": None}, 16, 3,
                    wide),
        Compilation("step turn", turn_kernel, turn, {**heads, **no_gains, **here}, 1, 3, turn_strides),
        Compilation("step turn normed", turn_kernel, {**turn, **gains}, {**heads, **here}, 1, 3, turn_strides),
        Compilation("step turn apart", turn_kernel, {**turn, "ends": "*i32"}, {**heads, **no_gains}, 1, 3,
                    turn_strides),
        Compilation("step gate", gate_kernel, gate, {"ACTIVATION": 1, "BLOCK": GATED}, 4, 3,
                    ("inner", "gate_stride", "up_stride")),
    ]  # fmt: skip
