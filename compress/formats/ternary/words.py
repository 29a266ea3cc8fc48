"""Ternary matrices as words of 16 bits, less than a bit per weight (QMoE, arXiv:2310.16795, section 4).

A word represents a sequence of 1 to 14 pairs of symbols. The dictionary holds the 2^16 sequences that are the most
probable if symbols are independent, a share `p0` of them is 0 and the others are `low` and `high` equally often. It is
computed from `p0`, by exact fractions, and is not stored; this takes 0.2 s, once per process. The encoder takes the
longest sequence each time, which gives the fewest words: on 88.5 % zeros (entropy 0.630 bits) 0.735 bits per weight,
and at least 16 / 28 bits, for zeros alone. `python -m compress.formats.ternary` prints the bits for other shares.
"""

from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

WORDS = 1 << 16
EMPTY, NONE = WORDS, WORDS + 1  # rows of `Dictionary.longer` that are not words: the empty sequence, and no sequence
PAIRS = 14  # number of pairs of symbols in the longest sequence of the dictionary
KINDS = 9  # number of different pairs: 3 * first + second
P0 = (0.34, 0.97)  # between these, the dictionary has every single pair, so that every matrix can be encoded
AT_ONCE = 1 << 22  # number of weights that are encoded or decoded at once


class Dictionary(NamedTuple):
    """The sequences represented by the words, each of 1 to 14 pairs of symbols 0, 1 and 2.

    pairs: uint8 [words, 14], 0 after the end. lengths: uint8 [words], in pairs. longer: int32 [words + 2, 9], the word
    of each sequence with one more pair, or `NONE`; its last rows are for the empty sequence and for no sequence.
    """

    pairs: Tensor
    lengths: Tensor
    longer: Tensor


class Ternary(NamedTuple):
    """A weight [out, in] of three values in each row: 0 (symbol 0), `low` (1) and `high` (2).

    codes: int16 [n], the words of all rows, one row after the other; a row of odd length ends with another 0.
    counts: [out], words of each row, any integer dtype. low, high: [out], floats. p0: of the dictionary.
    """

    codes: Tensor
    counts: Tensor
    low: Tensor
    high: Tensor
    shape: tuple[int, int]  # (out, in)
    p0: float


@cache
def dictionary(p0: float, device: torch.device) -> Dictionary:
    """The 2^16 most probable sequences of at most 14 pairs of independent symbols: a share `p0` of them is 0, and the
    others are 1 and 2 equally often.

    Probabilities are compared as fractions, so that every machine makes the same dictionary. Equally probable sequences
    are taken in lexicographic order. The beginnings and ends of a sequence are more probable than the sequence, so the
    dictionary also has them.

    Source: QMoE (arXiv:2310.16795), section 4.2.
    """
    taken = _taken(p0)
    nonzero = torch.tensor([(kind // 3 > 0) + (kind % 3 > 0) for kind in range(KINDS)])  # symbols of each pair
    sequences, counts = torch.zeros(1, PAIRS, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    found, longer, first = [], torch.full((WORDS + 2, KINDS), NONE, dtype=torch.int32), 0
    words = torch.tensor([EMPTY])
    for length in range(1, PAIRS + 1):
        candidates = (counts[:, None] + nonzero).flatten()  # symbols that are not 0, in lexicographic order
        kept = torch.zeros_like(candidates, dtype=torch.bool)
        for count in candidates.unique().tolist():
            kept[(candidates == count).nonzero()[: taken.get((length, count), 0)]] = True
        parent, kind = kept.view(-1, KINDS).nonzero(as_tuple=True)
        sequences = sequences[parent]
        sequences[:, length - 1] = kind.to(torch.uint8)
        counts, before = candidates[kept], words[parent]
        words = torch.arange(first, first := first + len(kind))
        longer[before, kind] = words.int()
        found.append(sequences)
    sizes = torch.tensor([len(part) for part in found])
    lengths = torch.arange(1, PAIRS + 1).repeat_interleave(sizes).to(torch.uint8)
    return Dictionary(*(tensor.to(device) for tensor in (torch.cat(found), lengths, longer)))


def _taken(p0: float) -> dict[tuple[int, int], int]:
    """{(length in pairs, number of nonzero symbols): number of these equally probable sequences in the dictionary}."""
    zero = Fraction(str(p0))
    other = (1 - zero) / 2
    probable = {(n, k): zero ** (2 * n - k) * other**k for n in range(1, PAIRS + 1) for k in range(2 * n + 1)}
    taken, left = {}, WORDS
    for n, k in sorted(probable, key=lambda kind: (-probable[kind], kind)):
        taken[n, k] = min(left, comb(2 * n, k) << k)
        left -= taken[n, k]
    return taken


def encode(symbols: Tensor, p0: float) -> tuple[Tensor, Tensor]:
    """Encode each row of symbols in words, using the longest possible sequence each time.

    No other encoding needs fewer words, because the dictionary also contains the ends of its sequences.

    Args:
        symbols: [out, in] of 0, 1 and 2, any integer dtype.

    Returns:
        codes int16 [n] and counts int64 [out], as in `Ternary`.

    Source: arXiv:2310.16795, section 4.2.
    """
    longer = dictionary(p0, symbols.device).longer.flatten()
    parts = [_encode(pairs_of(some), longer) for some in symbols.split(max(1, AT_ONCE // max(1, symbols.shape[1])))]
    codes, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, counts


def _encode(pairs: Tensor, longer: Tensor) -> tuple[Tensor, Tensor]:
    """`encode` for pairs [out, width]: all rows side by side, pair after pair."""
    pairs = pairs.t().contiguous().int()  # [width, out]
    written = torch.full((len(pairs) + 1, pairs.shape[1]), NONE, dtype=torch.int32, device=pairs.device)
    word = torch.full_like(written[0], EMPTY)
    for place, pair in enumerate(pairs):
        following = longer[word * KINDS + pair]
        ends = following == NONE
        written[place] = torch.where(ends, word, NONE)
        word = torch.where(ends, longer[EMPTY * KINDS + pair], following)
    written[-1] = word
    rows = written.t()
    used = rows < WORDS  # a row without columns has no word
    return rows[used].to(torch.int16), used.sum(1)  # 16 bits, the highest as the sign


def pairs_of(symbols: Tensor) -> Tensor:
    """uint8 [out, ceil(in / 2)]: 3 * first + second."""
    padded = torch.nn.functional.pad(symbols.to(torch.uint8), (0, symbols.shape[1] % 2))
    return 3 * padded[:, ::2] + padded[:, 1::2]


def check_rows(w: Ternary) -> None:
    """Raise ValueError unless the words of each row are as many pairs as the row has."""
    lengths = dictionary(w.p0, w.codes.device).lengths.long()[w.codes.long() & (WORDS - 1)]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[w.counts.long().cumsum(0)]  # pairs up to each row's end
    width = -(-w.shape[1] // 2)
    if not torch.equal(ends, torch.arange(1, w.shape[0] + 1, device=ends.device) * width):
        raise ValueError(f"`codes` of a ternary weight {w.shape}: not every row has words of {width} pairs")


def decode_symbols(w: Ternary) -> Tensor:
    """Symbols uint8 [out, in].

    Raises:
        ValueError: the words of some rows are more or fewer pairs than the rows have.
    """
    out, columns = w.shape
    width = -(-columns // 2)
    known = dictionary(w.p0, w.codes.device)
    ends = torch.nn.functional.pad(w.counts.long().cumsum(0), (1, 0)).tolist()
    rows = max(1, AT_ONCE // columns)
    symbols = torch.empty(out, 2 * width, dtype=torch.uint8, device=w.codes.device)
    for start, end in pairwise([*range(0, out, rows), out]):
        words = w.codes[ends[start] : ends[end]].long() & (WORDS - 1)
        inside = torch.arange(PAIRS, device=words.device) < known.lengths[words, None]
        pairs = known.pairs[words][inside]
        if len(pairs) != (end - start) * width:
            raise ValueError(
                f"`codes` of a ternary weight {w.shape}: rows {start} to {end} hold {len(pairs)} pairs instead of "
                f"{(end - start) * width}; were they written with `p0` (={w.p0})?"
            )
        both = torch.stack([pairs // 3, pairs % 3], 1)
        symbols[start:end] = both.view(end - start, 2 * width)
    return symbols[:, :columns]


def decode(w: Ternary) -> Tensor:
    """W [out, in] in float32."""
    symbols = decode_symbols(w)
    low, high = w.low.float()[:, None], w.high.float()[:, None]
    return torch.where(symbols == 1, low, 0.0) + torch.where(symbols == 2, high, 0.0)
