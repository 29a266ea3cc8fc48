"""A decoding step in plain torch: the same program, instruction by instruction, in float32."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kernels.step.program import Attention, Experts, InputChange, Mixture, Norm, Products, Program, Weight
from kernels.w8a8_matmul import W8

ACTIVATION = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "relu": relu}


def decode_step(
    program: Program, ids: Tensor, position: int, dtype: torch.dtype, hidden: Tensor | None = None
) -> Tensor:
    """Logits [tokens, vocabulary] of one step, in float32; changes the program's cache as the native step does.

    Tokens of one sequence are read one after the other.

    dtype: the dtype to which the inputs of products, the queries and the cache are rounded.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    if len(ids) > 1 and program.sequences == 1:
        given = [None] * len(ids) if hidden is None else hidden[:, None]
        steps = (decode_step(program, ids[[i]], position + i, dtype, given[i]) for i in range(len(ids)))
        return torch.cat(list(steps))
    if hidden is None:
        rows = rounded(program.embedding.dequantize()[ids.flatten()])
        hidden = rounded(rows * program.embedding_scale)
    stream = program.stream or InputChange()
    residual, results, attended, x, shares = stream.turn(hidden), {}, None, None, ()
    for one in program.instructions:
        if isinstance(one, Attention):
            attended = _attend(one, results[one.reads], position, rounded)
            continue
        if isinstance(one, Experts):  # x is the router's input
            chosen, of_chosen = one.choice(results[one.reads][0], dtype)
            shares = list(zip(chosen.tolist(), of_chosen, strict=True))
            results[one.writes] = [_of_experts(one, rounded(x[[t]]), chosen) for t, (chosen, _) in enumerate(shares)]
            continue
        if isinstance(one, Mixture):
            total = torch.stack(
                [_mixed(one, rounded(y), *its) for y, its in zip(results[one.reads], shares, strict=True)]
            )
            part = 1.0 if one.gate is None else results[one.gate][1].sigmoid()
            results[one.writes] = [total if one.added is None else total + part * results[one.added][0]]
            continue
        if one.added is not None:
            residual = residual + _normed(results[one.added][0], one.after)
        if one is program.instructions[-1]:
            residual = stream.turn_back(residual)
        x = _normed(residual, one.before) if one.reads == "residual" else attended if one.reads == "attention" else None
        results[one.writes] = _products(one, rounded(results[one.reads][0] if x is None else x))
    return rounded(results[program.instructions[-1].writes][0])


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def _products(p: Products, x: Tensor) -> list[Tensor]:
    y = [_met(w, x) @ w.dequantize().t() + (0 if w.bias is None else w.bias) for w in p.weights]
    return [ACTIVATION[p.activation](y[0]) * y[1]] if p.activation else y


def _of_experts(e: Experts, x: Tensor, chosen: list[int]) -> Tensor:
    """[chosen, out] of a token x [1, in]."""
    both = (Products("", "", (e.gates[i], e.others[i]), e.activation) for i in chosen)
    return torch.cat([_products(p, x)[0] for p in both])


def _mixed(m: Mixture, x: Tensor, chosen: list[int], shares: Tensor) -> Tensor:
    """[out] of a token with x [chosen, in]."""
    each = [_products(Products("", "", (m.weights[i],)), x[[j]])[0] for j, i in enumerate(chosen)]
    return (shares[:, None] * torch.cat(each)).sum(0)


def _met(w: Weight, x: Tensor) -> Tensor:
    """The changed input by which a weight is multiplied."""
    change = w.change or InputChange()
    if isinstance(w.stored, W8):
        change = InputChange(bits=8, group_size=x.shape[-1], step=0.0 if w.x_scale is None else float(w.x_scale))
    x = change.turn(x)
    x = x if change.order is None else x[..., change.order.long()]
    if not change.bits:
        return x
    groups = x.unflatten(-1, (-1, change.group_size))
    most = torch.full((groups.shape[-2], 1), 2.0 ** (change.bits - 1) - 1)
    most[: change.wide] = 127
    step = change.step or groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / most
    return ((groups / step).round().clamp(-most, most) * step).flatten(-2)


def _attend(a: Attention, qkv: list[Tensor], position: int, rounded) -> Tensor:
    tokens = len(qkv[0])
    q, k, v = (t.view(tokens, -1, a.channels) for t in qkv)
    q, k = (
        _turned(_headed(x, norm), a.cos[position], a.sin[position], a.neighbours)
        for x, norm in ((q, a.query_norm), (k, a.key_norm))
    )
    a.keys[:, :, position], a.values[:, :, position] = k.to(a.keys.dtype), v.to(a.values.dtype)
    a.length.add_(1)
    seen = slice(max(0, position + 1 - a.window) if a.window else 0, position + 1)
    keys, values = (t[:, :, seen].float() for t in (a.keys, a.values))  # [tokens, kv heads, seen, channels]
    q = rounded(q).view(tokens, a.kv_heads, -1, a.channels)
    scores = q @ keys.transpose(-1, -2) * a.scale
    if a.softcap:
        scores = a.softcap * (scores / a.softcap).tanh()
    return (scores.softmax(-1) @ values).reshape(tokens, -1)


def _headed(x: Tensor, norm: Norm | None) -> Tensor:
    """Heads [tokens, heads, channels] after the norm of each, or of all together."""
    whole = norm is not None and norm.weight.numel() > x.shape[-1]
    return _normed(x.flatten(1), norm).view_as(x) if whole else _normed(x, norm)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    n = len(cos)
    if neighbours:
        first, second = x[..., 0:n:2], x[..., 1:n:2]
        c, s = cos[: n // 2], sin[: n // 2]
        pairs = torch.stack([first * c - second * s, second * c + first * s], -1)
        return torch.cat([pairs.flatten(-2), x[..., n:]], -1)
    first, second, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
    return torch.cat([x[..., :n] * cos + torch.cat([-second, first], -1) * sin, rest], -1)
