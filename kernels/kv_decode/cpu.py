"""The CPU path in plain torch, for caches in float8, and for machines where the C++ kernels cannot be built.

The query heads of one kv head are the rows of one product, and only positions in use are read.

bfloat16 and float32 caches with the same range in all rows use torch's own flash attention. All others are converted to
float32 one head after another, slab by slab, so that a slab is still in the CPU's cache when it is multiplied.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_decode.layout import KV, from_float8

SLAB = 1 << 19  # elements converted at a time


def kv_decode(
    q: Tensor,
    cache: KV,
    lengths: Tensor,
    starts: Tensor | None,
    scale: float,
    softcap: float,
    return_mass: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y [B, H_q, T_q, D], mass [B, H_kv, S + R] or None, lse [B, H_q, T_q] or None."""
    B, H_q, T_q, D = q.shape
    H_kv, positions = cache.k.shape[1], cache.positions
    rows = q.reshape(B, H_kv, H_q // H_kv * T_q, D)
    start = torch.zeros_like(lengths) if starts is None else starts
    ends = (start + lengths).clamp(0, positions).flatten().tolist()
    begins = start.clamp(0, positions).flatten().tolist()
    used = {divmod(i, H_kv): (a, b) for i, (a, b) in enumerate(zip(begins, ends, strict=True)) if a < b}
    y = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    mass = q.new_zeros(B, H_kv, positions, dtype=torch.float32) if return_mass else None
    plain = (
        cache.bits == 16 and q.dtype != torch.float16 and T_q == 1 and not softcap and not (return_mass or return_lse)
    )
    if plain and len(used) == B * H_kv and len(set(used.values())) == 1:
        ((a, b),) = set(used.values())
        return (
            F.scaled_dot_product_attention(rows, cache.k[:, :, a:b], cache.v[:, :, a:b], scale=scale).view(q.shape),
            None,
            None,
        )
    lse = rows.new_full(rows.shape[:3], -torch.inf, dtype=torch.float32)
    for (i, h), (a, b) in used.items():
        y[i, h], p, lse[i, h] = _head(rows[i, h].float(), cache, i, h, a, b, T_q, scale, softcap)
        if mass is not None:
            mass[i, h, a:b] = p
    return y.view(q.shape), mass, lse.view(q.shape[:3])


def _head(
    rows: Tensor, cache: KV, i: int, h: int, a: int, b: int, T_q: int, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One head over positions a to b, in float32: y [rows, D], the mass [b - a] and the log-sum-exp [rows]."""
    parts: list[_Dense | _Groups | _Floats] = []
    S = cache.k.shape[2]
    k, v = cache.k[i, h], cache.v[i, h]
    if cache.bits == 16:
        parts = [_Dense(k[c:d], v[c:d]) for c, d in _cut(a, b, SLAB // rows.shape[1])]
    else:
        for c, d in _cut(a, min(b, S), SLAB // rows.shape[1] // 128 * 128):
            first, last = c // cache.group, -(-d // cache.group)
            whole = slice(first * cache.group, last * cache.group)
            if cache.float8:
                scales = cache.params_k[i, h, first:last], cache.params_v[i, h, first:last]
                parts.append(_Floats(k[whole], v[first:last], *scales, c - whole.start, d - c))
                continue
            pairs = cache.params_k[i, h, first:last].float(), cache.params_v[i, h, c:d].float()
            parts.append(_Groups(k[whole], v[first:last], *pairs, cache.bits, c - whole.start))
        if b > S:
            tail = slice(max(a - S, 0), b - S)
            parts.append(_Dense(cache.tail_k[i, h, tail], cache.tail_v[i, h, tail]))
    scores = torch.cat([part.scores(rows) for part in parts], 1).mul_(scale)  # [rows, b - a]
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    hidden = None
    if T_q > 1:  # the queries' own positions are the last T_q
        own = torch.arange(T_q).repeat(rows.shape[0] // T_q)[:, None]
        hidden = torch.arange(b - a) >= b - a - (T_q - 1 - own)
        scores.masked_fill_(hidden, -torch.inf)
    p = scores.softmax(-1)
    if hidden is not None:
        p.masked_fill_(hidden, 0)  # a row that sees nothing: zeros instead of NaN
    y, at = torch.zeros_like(rows), 0
    for part in parts:
        y += part.sum(p[:, at : at + part.positions])
        at += part.positions
    return y, p.sum(0), scores.logsumexp(-1)


def _cut(a: int, b: int, step: int) -> list[tuple[int, int]]:
    """Positions a to b, cut at multiples of step; empty if a is not before b."""
    return [(max(a, at), min(b, at + step)) for at in range(a // step * step, b, step)] if a < b else []


class _Dense(NamedTuple):
    """Positions of one head without quantisation: k, v [positions, D]."""

    k: Tensor
    v: Tensor

    @property
    def positions(self) -> int:
        return self.k.shape[0]

    def scores(self, rows: Tensor) -> Tensor:
        return rows @ self.k.float().t()

    def sum(self, p: Tensor) -> Tensor:
        return p @ self.v.float()


class _Groups(NamedTuple):
    """Positions of one head in whole groups. The first `skip` positions and those after params_v's are not used.

    Codes are multiplied directly: scales are multiplied into q and p, and offsets form a separate product.
    """

    k: Tensor  # [groups * group, bytes]
    v: Tensor  # [groups, D, bytes]
    params_k: Tensor  # [groups, D, 2]
    params_v: Tensor  # [positions, 2]
    bits: int
    skip: int

    @property
    def positions(self) -> int:
        return self.params_v.shape[0]

    def scores(self, rows: Tensor) -> Tensor:
        scale, offset = self.params_k.unbind(-1)  # [groups, D]
        constant = (offset @ rows.t())[..., None]  # [groups, rows, 1]
        s = constant + self._product(rows * scale[:, None], self.k.unflatten(0, (scale.shape[0], -1)))
        return s.transpose(0, 1).flatten(1)[:, self.skip : self.skip + self.positions]

    def sum(self, p: Tensor) -> Tensor:
        scale, offset = self.params_v.unbind(-1)  # [positions]
        groups = self.v.shape[0]
        w = p.new_zeros(p.shape[0], self.k.shape[0])  # zeros for positions outside
        w[:, self.skip : self.skip + self.positions] = p * scale
        w = w.unflatten(1, (groups, -1)).transpose(0, 1)  # [groups, rows, group]
        return self._product(w, self.v).sum(0) + (p @ offset)[:, None]

    def _product(self, x: Tensor, codes: Tensor) -> Tensor:
        """x [groups, rows, n] by codes [groups, m, n], both along n."""
        if self.bits == 8:
            return torch.bmm(x, codes.float().transpose(1, 2))
        low, high = x.chunk(2, -1)
        y = torch.bmm(low, (codes & 15).float().transpose(1, 2))
        return y.baddbmm_(high, (codes >> 4).float().transpose(1, 2))


class _Floats(NamedTuple):
    """Positions of one head in whole groups of float8, of which `positions` from `skip` on are used."""

    k: Tensor  # [groups * group, D]
    v: Tensor  # [groups, D, group]
    scale_k: Tensor  # [groups]
    scale_v: Tensor  # [groups]
    skip: int
    positions: int

    def scores(self, rows: Tensor) -> Tensor:
        s = (rows @ from_float8(self.k).t()).unflatten(1, (len(self.scale_k), -1)) * self.scale_k[:, None]
        return s.flatten(1)[:, self.skip : self.skip + self.positions]

    def sum(self, p: Tensor) -> Tensor:
        w = p.new_zeros(p.shape[0], self.k.shape[0])
        w[:, self.skip : self.skip + self.positions] = p
        w = (w.unflatten(1, (len(self.scale_v), -1)) * self.scale_v[:, None]).transpose(0, 1)  # [groups, rows, group]
        return torch.bmm(w, from_float8(self.v).transpose(1, 2)).sum(0)
