"""The operations between the products, one launch each: sum and norm, rotary embedding and store, gate."""

from kernels.interpreter import prepare

prepare()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.tuning import Compilation  # noqa: E402

BLOCK = 1024  # elements of `gate` per program


@triton.jit
def add_norm_kernel(x, added, gain, total, normed, columns, eps, BLOCK: tl.constexpr):
    """One row per program; if `added` is None, nothing is written to `total`."""
    at, j = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, BLOCK)
    inside = j < columns
    v = tl.load(x + at + j, mask=inside, other=0.0)
    if added is not None:
        v = (v.to(tl.float32) + tl.load(added + at + j, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + at + j, v, mask=inside)
    wide = v.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    g = tl.load(gain + j, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at + j, (wide * factor * g).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(
    qkv, cos, sin, length, keys, values, q, heads, kv_heads, positions, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """One head of one sequence per program: queries, then keys, then values."""
    b, h = tl.program_id(0), tl.program_id(1)
    place = tl.load(length + b * kv_heads).to(tl.int64) - 1
    half: tl.constexpr = CHANNELS // 2
    i = tl.arange(0, BLOCK)
    inside = i < half
    at = qkv + (b * (heads + 2 * kv_heads) + h).to(tl.int64) * CHANNELS + i
    first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    if h < heads + kv_heads:
        c = tl.load(cos + place * half + i, mask=inside, other=0.0)
        s = tl.load(sin + place * half + i, mask=inside, other=0.0)
        a, z = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - z * s).to(first.dtype), (z * c + a * s).to(first.dtype)
    if h < heads:
        to = q + (b * heads + h).to(tl.int64) * CHANNELS + i
        tl.store(to, first, mask=inside)
        tl.store(to + half, second, mask=inside)
    else:
        is_key = h < heads + kv_heads
        row = (b * kv_heads + (h - heads) % kv_heads).to(tl.int64) * positions + place
        offset = row * CHANNELS + i
        tl.store(keys + offset, first, mask=inside & is_key)
        tl.store(keys + offset + half, second, mask=inside & is_key)
        tl.store(values + offset, first, mask=inside & (h >= heads + kv_heads))
        tl.store(values + offset + half, second, mask=inside & (h >= heads + kv_heads))


@triton.jit
def gate_kernel(x, y, inner, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + row * 2 * inner + i
    first = tl.load(at, mask=i < inner, other=0.0).to(tl.float32)
    second = tl.load(at + inner, mask=i < inner, other=0.0).to(tl.float32)
    tl.store(y + row * inner + i, (first * tl.sigmoid(first) * second).to(y.dtype.element_ty), mask=i < inner)


def add_norm(x: Tensor, added: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like `reference.add_norm`."""
    normed, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    add_norm_kernel[(x.shape[0],)](
        x, added, gain, total, normed, x.shape[1], eps, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    return total, normed


def turn_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, length: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Like `reference.turn_and_store`."""
    batch, kv_heads, positions, channels = keys.shape
    heads = qkv.shape[1] // channels - 2 * kv_heads
    q = qkv.new_empty(batch, heads, channels)
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and length.is_contiguous()
    turn_kernel[(batch, heads + 2 * kv_heads)](
        qkv, cos, sin, length, keys, values, q, heads, kv_heads, positions,
        CHANNELS=channels, BLOCK=triton.next_power_of_2(channels // 2), num_warps=1,
    )  # fmt: skip
    return q


def gate(x: Tensor) -> Tensor:
    """Like `reference.gate`."""
    inner = x.shape[1] // 2
    y = x.new_empty(x.shape[0], inner)
    gate_kernel[(x.shape[0], triton.cdiv(inner, BLOCK))](x, y, inner, BLOCK=BLOCK, num_warps=4)
    return y


def shipped() -> list[Compilation]:
    """The shipped compilations, at the widths of an 8B model."""
    norm = {"x": "*bf16", "gain": "*bf16", "total": "*bf16", "normed": "*bf16", "columns": "i32", "eps": "fp32"}
    turn = dict.fromkeys(("qkv", "keys", "values", "q"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    turn |= {"length": "*i32"} | dict.fromkeys(("heads", "kv_heads", "positions"), "i32")
    wide, whole = ("columns",), {"BLOCK": 4096}
    return [
        Compilation("decoder add_norm", add_norm_kernel, {**norm, "added": "*bf16"}, whole, 8, 3, wide),
        Compilation("decoder norm", add_norm_kernel, norm, {**whole, "added": None}, 8, 3, wide),
        Compilation("decoder turn", turn_kernel, turn, {"CHANNELS": 128, "BLOCK": 64}, 1, 3, ("heads", "positions")),
        Compilation("decoder gate", gate_kernel, {"x": "*bf16", "y": "*bf16", "inner": "i32"}, {"BLOCK": BLOCK}, 4, 3,
                    ("inner",)),
    ]  # fmt: skip
