"""Viterbi's search, the decoder and the product in plain torch, on any device."""

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.trellis_matmul.layout import Trellis, states_of, values


def viterbi(x: Tensor, table: Tensor, bits: int, window: int) -> Tensor:
    """Symbols uint8 [n, length] of the walks; see `kernels.trellis_matmul.viterbi`."""
    length, count = x.shape[1], len(table) >> bits
    free = x.new_zeros(len(x), count)
    around = torch.cat([x[:, length - window :], x[:, :window]], 1)
    arguments, cost = _forward(around, table, bits, free)
    seam = cost.argmin(1)
    for t in range(2 * window - 1, window - 1, -1):
        seam = _before(arguments[t], seam, bits)[1]
    fixed = torch.full_like(free, torch.inf).scatter_(1, seam[:, None], 0)
    arguments, cost = _forward(x, table, bits, fixed)
    symbols = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    place = seam
    for t in range(length - 1, -1, -1):
        symbols[:, t], place = _before(arguments[t], place, bits)
    return symbols


def _forward(x: Tensor, table: Tensor, bits: int, cost: Tensor) -> tuple[list[Tensor], Tensor]:
    """For every step and the higher bits of its state, the lowest bits [n, 2^(states - bits)] on the cheapest path; and
    the costs of the paths at the end."""
    count = len(table) >> bits
    arguments = []
    for t in range(x.shape[1]):
        reached = cost.repeat(1, 1 << bits) + (x[:, t, None] - table).square()  # [n, states]
        cost, symbol = reached.view(len(x), count, 1 << bits).min(2)
        arguments.append(symbol.to(torch.uint8))
    return arguments, cost


def _before(arguments: Tensor, place: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The symbol of a step whose state has the higher bits `place` [n], and the higher bits one step earlier."""
    symbol = arguments.gather(1, place[:, None])[:, 0]
    return symbol, ((place << bits) + symbol) % arguments.shape[1]


def decode(w: Trellis) -> Tensor:
    """Values without scales, float32 [in, segments * length], transposed as in the order of the walks."""
    table = values(w.states, w.codes.device)
    return table[states_of(w)].transpose(0, 1).reshape(w.shape[1], -1)


def trellis_matmul(x: Tensor, w: Trellis) -> Tensor:
    """y [..., out] = x [..., in] Wᵀ in x's dtype."""
    W = decode(w)[:, : w.shape[0]].mul_(w.scale)
    return linear(x, W.t().to(x.dtype))
