"""Factorisation of a size for the Triton kernels: n = a b c, one small product along each, or n = p l, two products."""

from functools import cache
from typing import NamedTuple

from kernels.hadamard.matrix import base

LARGEST_TILE = 32768  # elements of a row with its padding: 128 KiB of registers
TALLEST = 1024  # largest first factor of two: its product takes 2 p operations per element
NARROWEST, WIDEST = 16, 128  # least width of a product on tensor cores; a wider one is no longer a fast transform


class FactorPlan(NamedTuple):
    """H = H_a ⊗ H_b ⊗ H_c; `pa`, `pc`: powers of two to which a and c are padded. A size of 1 means no product."""

    a: int
    b: int
    c: int
    pa: int
    pc: int


@cache
def plan(n: int) -> FactorPlan | None:
    """The plan for n, or None if a row does not fit into one program or a factor is too large for a dense product."""
    m = base(n)
    if m is None:
        return None
    if n <= WIDEST:
        return FactorPlan(1, 1, n, 1, _padded(n))
    bits = (n // m).bit_length() - 1
    if m == 1:
        widths = [0, *_shares(bits, 2)] if bits <= 12 else _shares(bits, 3)
        a, b, c = (1 << width for width in widths)
    else:
        widths = [0, bits] if bits <= 7 else _shares(bits, 2)
        a, (b, c) = m, (1 << width for width in widths)
    found = FactorPlan(a, b, c, _padded(a) if a > 1 else 1, _padded(c))
    return found if max(a, b, c) <= WIDEST and found.pa * b * found.pc <= LARGEST_TILE else None


class Spread(NamedTuple):
    """H = H_p ⊗ H_l, where each program of a row computes some of the p lines; `pl`: power of two to which l is
    padded."""

    p: int
    l: int  # noqa: E741
    pl: int


@cache
def spread_plan(n: int) -> Spread | None:
    """The plan for n, or None if there is no matrix for n or its first factor is too large for a dense product."""
    m = base(n)
    if m is None:
        return None
    last = min(WIDEST, n // m)
    return Spread(n // last, last, _padded(last)) if n // last <= TALLEST else None


def codes_fit(n: int, group: int | None) -> bool:
    """Can programs that share a row round it in groups of this size? Each has whole lines, so groups must be whole."""
    s = spread_plan(n)
    return s is not None and group is not None and s.l == s.pl and group & (group - 1) == 0 and s.l % group == 0


def whole_codes_fit(n: int, group: int | None, columns: int) -> bool:
    """Can a program with whole rows round them in groups of this size? A group (None: all `columns` of a token) must be
    the row itself, or lie wholly within a row whose last factor is not padded."""
    p = plan(n)
    if p is None or p.c % 2:
        return False
    if group is None or group == n:
        return n == (columns if group is None else group)
    power = group & (group - 1) == 0
    return power and p.c == p.pc and (p.c % group == 0 or group % p.c == 0 and p.b % (group // p.c) == 0)


def shared_of(plan: FactorPlan) -> int:
    """Bytes of shared memory through which a program moves its tile, in float32, with a small margin."""
    return 4 * plan.pa * plan.b * plan.pc + 3072


def _shares(bits: int, parts: int) -> list[int]:
    """`bits` split into nearly equal parts, the larger ones last."""
    return [bits // parts + (i >= parts - bits % parts) for i in range(parts)]


def _padded(size: int) -> int:
    return max(NARROWEST, 1 << (size - 1).bit_length())
