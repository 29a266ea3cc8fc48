"""Ternary matrices in words: the dictionary, the fewest words, exact symbols again, and the product."""

import heapq
from math import inf, prod

import pytest
import torch

from compress.formats import TernaryWeight
from compress.formats.ternary.words import Ternary, decode, decode_symbols, dictionary, encode

CPU = torch.device("cpu")


def drawn(out, columns, zeros, seed=0):
    """Independent symbols, of which a share is 0."""
    place = torch.rand(out, columns, generator=torch.Generator().manual_seed(seed))
    return (place > zeros).to(torch.uint8) + (place > (1 + zeros) / 2).to(torch.uint8)


def written(symbols, p0=0.885):
    codes, counts = encode(symbols, p0)
    ones = torch.ones(len(symbols))
    return Ternary(codes, counts, -ones, 2 * ones, tuple(symbols.shape), p0)


def sequences(p0):
    known = dictionary(p0, CPU)
    return [tuple(pairs[:n]) for pairs, n in zip(known.pairs.tolist(), known.lengths.tolist(), strict=True)]


def test_the_dictionary_holds_the_most_probable_sequences():
    """Against a search that always extends the most probable sequence so far."""
    p0 = 0.8
    probability = [a * b for a in (p0, 0.1, 0.1) for b in (p0, 0.1, 0.1)]
    waiting, least, count = [(-1.0, ())], 1.0, -1  # the first is the empty one
    while count < 1 << 16:
        p, sequence = heapq.heappop(waiting)
        least, count = -p, count + 1
        if len(sequence) < 14:
            for kind, one in enumerate(probability):
                heapq.heappush(waiting, (p * one, (*sequence, kind)))
    ours = sequences(p0)
    assert len(set(ours)) == 1 << 16
    assert min(prod(probability[kind] for kind in s) for s in ours) >= least * 0.999, "no less probable one is in"


@pytest.mark.parametrize("p0", [0.34, 0.885, 0.97])
def test_every_single_pair_and_all_beginnings_and_ends_are_in(p0):
    ours = set(sequences(p0))
    assert {(kind,) for kind in range(9)} <= ours
    assert all(s[:-1] in ours and s[1:] in ours for s in ours if len(s) > 1)


@pytest.mark.in_turns
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (7, 27), (5, 28), (40, 129), (2, 3001), (0, 8), (300, 64)])
@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("p0", [0.5, 0.885])
def test_symbols_come_back_exactly(shape, zeros, p0, monkeypatch):
    monkeypatch.setattr("compress.formats.ternary.words.AT_ONCE", 1000)  # several portions of rows
    symbols = drawn(*shape, zeros)
    w = written(symbols, p0)
    assert w.codes.dtype == torch.int16 and w.counts.sum() == len(w.codes) and len(w.counts) == shape[0]
    assert torch.equal(decode_symbols(w), symbols)
    expected = torch.tensor([0.0, -1, 2])[symbols.long()]
    assert torch.equal(decode(w), expected)


def test_no_parse_takes_fewer_words():
    symbols, known = drawn(6, 400, 0.85), set(sequences(0.885))
    for row, count in zip(symbols.tolist(), written(symbols).counts.tolist(), strict=True):
        pairs = [3 * a + b for a, b in zip(row[::2], row[1::2], strict=True)]
        fewest = [0, *[inf] * len(pairs)]
        for end in range(1, len(pairs) + 1):
            starts = range(max(0, end - 14), end)
            fewest[end] = min(fewest[s] + 1 for s in starts if tuple(pairs[s:end]) in known)
        assert count == fewest[-1]


def test_bits_for_each_weight():
    """The entropy of 88.5 % zeros is 0.630 bits; a match of mean length would take 0.685, the parse takes more."""
    bits = 16 * len(written(drawn(64, 8192, 0.885)).codes) / (64 * 8192)
    assert 0.685 < bits < 0.75
    assert 16 * len(written(torch.zeros(4, 2800, dtype=torch.uint8)).codes) / (4 * 2800) == 16 / 28


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "zeros", "tokens"), [((37, 65), 0.3, (2, 3)), ((131, 383), 0.95, (33,)), ((5, 1), 0.5, (4,)), ((16, 64), 1.0, (0,))])  # fmt: skip
def test_products_are_right(shape, zeros, tokens, dtype):
    low, high, x = -torch.rand(shape[0]), torch.rand(shape[0]), torch.randn(*tokens, shape[1]).to(dtype)
    symbols = drawn(*shape, zeros)
    stored = TernaryWeight.from_symbols(symbols, low, high, p0=0.885)
    values = torch.stack([torch.zeros(shape[0]), low.bfloat16().float(), high.bfloat16().float()], 1)
    expected = x.double() @ values.double().gather(1, symbols.long()).t()
    error = (stored.matmul(x).double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert stored.matmul(x).dtype == dtype and error <= {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 1e-2)


@pytest.mark.slow
def test_the_op_survives_the_compiler():
    stored, x = (
        TernaryWeight.from_symbols(drawn(24, 64, 0.8), -torch.ones(24), torch.ones(24), p0=0.885),
        torch.randn(3, 64),
    )
    buffers = stored.codes, stored.counts, stored.low, stored.high
    torch.library.opcheck(torch.ops.workbench.ternary_product.default, (x, *buffers, 64, 0.885))
    y = torch.compile(lambda x: stored.matmul(x) + 1, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(y, x @ stored.dequantize().t() + 1, atol=1e-5)


def test_words_of_another_shape_are_refused():
    w = written(drawn(4, 6, 0.5))
    with pytest.raises(ValueError, match="`codes`"):
        decode(w._replace(shape=(4, 60)))
