"""The trellis code: the possible walks, the value of each state, and the division of a weight into walks."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.int_matmul.layout import pack_bits, unpack_bits

BITS = (2, 3, 4)  # new bits per step
STATES = (12, 14, 16)  # bits of a state
MULTIPLIER = 3500900923  # as in native/trellis.cpp
UNIT = 147.8  # standard deviation of a value, which is the sum of four bytes
PANEL = 16  # number of rows that the CPU decodes at once
SHORTEST, LONGEST = 96, 256  # number of weights in a walk, if a column has so many


class Trellis(NamedTuple):
    """A weight [out, in] whose columns are cut into walks of `length` rows, the last one padded with further rows.

    codes: uint8 [segments, in, length * bits / 8], the bits of each walk in their order, lowest first.
    scale: float32 [out], one factor for each row.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    states: int
    shape: tuple[int, int]  # (out, in)

    @property
    def length(self) -> int:
        return self.codes.shape[2] * 8 // self.bits


def length_for(out: int) -> int:
    """Weights in a walk for columns of `out` rows: the multiple of 16 from 96 to 256 with the fewest padded rows, and
    the longest of those; shorter columns are one walk of at least 32."""
    if out <= LONGEST:
        return max(-(-out // PANEL) * PANEL, 2 * PANEL)
    return min(range(LONGEST, SHORTEST - 1, -PANEL), key=lambda length: -(-out // length) * length)


def pack_symbols(symbols: Tensor, bits: int) -> Tensor:
    """Symbols below 2^bits [segments, in, length] -> codes as in `Trellis`."""
    segments, columns, length = symbols.shape
    return pack_bits(symbols.reshape(-1, length), bits).view(segments, columns, -1)


def walk_states(symbols: Tensor, bits: int, states: int) -> Tensor:
    """The state of each walk [n, length] of symbols at each step, int64 [n, length]: the walk's next `states` bits."""
    state = torch.zeros_like(symbols, dtype=torch.int64)
    for i in range(-(-states // bits)):
        state |= symbols.long().roll(-i, 1) << (bits * i)
    return state & ((1 << states) - 1)


def states_of(w: Trellis) -> Tensor:
    """The states of all walks of a weight, int64 [segments, in, length]."""
    symbols = unpack_bits(w.codes.flatten(0, 1), w.bits, w.length)
    return walk_states(symbols, w.bits, w.states).view(*w.codes.shape[:2], -1)


def values(states: int, device: torch.device | str | None = None) -> Tensor:
    """float32 [2^states]: the value of each state, an integer: the sum of the four signed bytes of its hash.

    Source: the 1MAC code of QTIP (arXiv:2406.11235, algorithm 1). Deviation: no constant is added, bytes count as
    signed, and the multiplier is the best of a few dozen for states of 14 bits; all three save instructions on a CPU.
    """
    state = torch.arange(1 << states, device=device)
    hashed = state * MULTIPLIER & 0xFFFFFFFF
    signed = [((hashed >> shift & 255) ^ 128) - 128 for shift in (0, 8, 16, 24)]
    return sum(signed).float()
