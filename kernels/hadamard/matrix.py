"""Symmetric Hadamard matrices, by construction: Sylvester's doubling of the two that Paley builds from a finite field.

Source: J. J. Sylvester (1867); R. E. A. C. Paley, "On orthogonal matrices" (1933). Deviation: the columns of Paley's
    first
matrix are reordered and signs moved so that it is symmetric too; hence every matrix here is its own transpose, and
H/sqrt(n) its own inverse.
"""

from functools import cache

import numpy as np

LARGEST = 1024  # largest order of a Paley matrix; beyond it, the dense product is no longer a fast transform


@cache
def base(n: int) -> int | None:
    """Least m with n = m 2^k that is 1 or the order of a Paley matrix; None if there is none up to `LARGEST`."""
    if n < 1:
        return None
    m = n & -n  # the power of two in n
    odd = n // m
    if odd == 1:
        return 1
    return next((odd << j for j in range(2, m.bit_length()) if odd << j <= LARGEST and _field(odd << j)), None)


def near(n: int) -> list[int]:
    """The nearest sizes below and above n for which there is a matrix."""
    below = next((i for i in range(n - 1, 0, -1) if base(i)), None)
    above = next(i for i in range(max(n, 0) + 1, 2 * max(n, 0) + 3) if base(i))  # this range contains a power of two
    return [i for i in (below, above) if i]


def sylvester(n: int) -> np.ndarray:
    """int8 [n, n] of ±1 for a power of two: the sign is the parity of the bits set in both row and column index."""
    H = np.ones((1, 1), np.int8)
    while len(H) < n:
        H = np.block([[H, H], [H, -H]])
    return H


@cache
def paley(m: int) -> np.ndarray:
    """int8 [m, m] of ±1, symmetric, with H Hᵀ = m I; for m = `base(n)` of some n. Cached: do not change it."""
    if m == 1:
        return np.ones((1, 1), np.int8)
    kind, p, degree = _field(m)
    chi, plus, minus = _character(p, degree)
    if kind == 1:  # core -chi(a + b), with chi(0) = 1
        H = np.ones((m, m), np.int8)
        H[1:, 1:] = -np.where(chi == 0, 1, chi)[plus]
        return H
    C = np.ones((m // 2, m // 2), np.int8)  # a symmetric conference matrix: zeros on the diagonal
    C[0, 0] = 0
    C[1:, 1:] = chi[minus]
    on, off = np.array([[1, -1], [-1, -1]], np.int8), np.array([[1, 1], [1, -1]], np.int8)
    return np.kron(C, off) + np.kron(np.eye(m // 2, dtype=np.int8), on)


def _field(m: int) -> tuple[int, int, int] | None:
    """(1 or 2 of Paley's constructions, p, degree) of the field of p^degree elements that gives order m, or None."""
    for kind, q in ((1, m - 1), (2, m // 2 - 1)):
        power = _prime_power(q)
        if m % 4 == 0 and power and q % 4 == (3 if kind == 1 else 1):
            return kind, *power
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, degree) with q = p^degree, degree up to 3."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    return next(((p, degree) for degree in (1, 2, 3) if p**degree == q), None)


def _character(p: int, degree: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables of the field of q = p^degree elements, numbered by their coefficients in base p.

    Returns:
        chi int8 [q]: 1 for squares, -1 for the others, 0 for 0; plus, minus [q, q]: numbers of a + b and a - b.
    """
    q = p**degree
    powers = p ** np.arange(degree)
    digits = np.arange(q)[:, None] // powers % p  # [q, degree], lowest coefficient first
    product = np.zeros((q, 2 * degree - 1), np.int64)
    for i in range(degree):
        product[:, i : i + degree] += digits[:, i : i + 1] * digits
    tail = _irreducible(p, degree)  # x^degree = tail
    for i in range(2 * degree - 2, degree - 1, -1):
        product[:, i - degree : i] += product[:, i : i + 1] * tail
    chi = np.full(q, -1, np.int8)
    chi[(product[:, :degree] % p * powers).sum(1)] = 1
    chi[0] = 0
    plus = ((digits[:, None] + digits) % p * powers).sum(-1)
    minus = ((digits[:, None] - digits) % p * powers).sum(-1)
    return chi, plus, minus


def _irreducible(p: int, degree: int) -> np.ndarray:
    """[degree] coefficients t of a polynomial x^degree - t that has no root, hence, up to degree 3, no factor."""
    if degree == 1:
        return np.zeros(1, np.int64)
    x = np.arange(p)
    for number in range(p**degree):
        tail = number // p ** np.arange(degree) % p
        if ((x**degree - (tail * x[:, None] ** np.arange(degree)).sum(1)) % p).all():
            return tail
    raise AssertionError(f"no irreducible polynomial of degree {degree} over {p}")
