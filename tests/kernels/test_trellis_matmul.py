"""Trellis codes: Viterbi's search against an exhaustive one, distortion against the paper's, and the product."""

import numpy as np
import pytest
import torch

from kernels import native
from kernels.registry import recording
from kernels.support.declarations import OWN
from kernels.trellis_matmul import (
    BITS,
    STATES,
    UNIT,
    Trellis,
    decode,
    length_for,
    pack_symbols,
    trellis_matmul,
    values,
    viterbi,
    walk_states,
)
from kernels.trellis_matmul.cases import checks, contests

CPU = torch.device("cpu")
IMPLS = ["reference", *([] if native.why_not() else ["cpu"])]


def cheapest(x, table, bits, seam=None):
    """Cost of the cheapest closed walk, by dynamic programming in float64 from each seam (or this one) to itself."""
    states = len(table).bit_length() - 1
    keep = 1 << (states - bits)
    best = np.inf
    for first in range(keep) if seam is None else [seam]:
        cost = np.full(len(table), np.inf)
        cost[first * (1 << bits) : (first + 1) * (1 << bits)] = 0  # states whose upper bits are the seam
        cost = cost.reshape(keep, -1).min(1)
        for value in x:
            state = np.arange(len(table))
            cost = (cost[state % keep] + (value - table) ** 2).reshape(keep, -1).min(1)
        best = min(best, cost[first])
    return best


def costs_of(x, symbols, table, bits):
    states = len(table).bit_length() - 1
    return (x.double() - table.double()[walk_states(symbols, bits, states)]).square().sum(1).numpy()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, states", [(2, 8), (3, 10), (4, 12)])
def test_the_search_is_the_cheapest_walk_through_its_seam(bits, states, impl):
    x, table = torch.randn(3, 32), torch.randn(1 << states)
    symbols = viterbi(x, table, bits=bits, impl=impl)
    assert symbols.dtype == torch.uint8 and symbols.max() < 1 << bits
    costs = costs_of(x, symbols, table, bits)
    seams = walk_states(symbols, bits, states)[:, 0] % (1 << (states - bits))
    exact = [
        cheapest(a, table.double().numpy(), bits, s) for a, s in zip(x.double().numpy(), seams.tolist(), strict=True)
    ]
    assert np.allclose(costs, exact, rtol=1e-5)


def test_the_seam_is_nearly_the_best_one():
    x, table = torch.randn(12, 48), torch.randn(1 << 8)
    costs = costs_of(x, viterbi(x, table, bits=2), table, 2)
    exact = np.array([cheapest(a, table.double().numpy(), 2) for a in x.double().numpy()])
    assert (costs >= exact * (1 - 1e-5)).all() and costs.sum() <= 1.03 * exact.sum()


# QTIP's table 1, normal weights: 0.069 at 2 bits with 1MAC and states of 16 bits. Scalar quantisers with the best table
# (Max, 1960) reach 0.1175, 0.03454 and 0.00950; nothing reaches 4^-bits = 0.0625, 0.0156, 0.0039.
@pytest.mark.skipif("cpu" not in IMPLS, reason="needs the C++ kernels")
@pytest.mark.parametrize(
    "bits, states, most", [(2, 12, 0.076), (2, 14, 0.0735), (3, 12, 0.0205), (3, 14, 0.0192), (4, 12, 0.0057)]
)
def test_distortion_of_normal_weights(bits, states, most):
    x, table = torch.randn(24, 192), values(states) / UNIT
    symbols = viterbi(x, table, bits=bits)
    error = costs_of(x, symbols, table, bits).sum() / x.numel()
    assert 4.0**-bits < error < most


def test_values_look_normal():
    value = values(16).double() / UNIT
    assert abs(value.mean()) < 0.03 and abs(value.std() - 1) < 0.02 and abs((value**4).mean() - 2.7) < 0.1


@pytest.mark.parametrize("check", checks(CPU), ids=lambda c: c.name)
@pytest.mark.parametrize("impl", IMPLS)
def test_products_are_right(check, impl):
    assert check.error(impl) <= check.tolerance


@pytest.mark.parametrize(
    "out, length", [(1, 32), (40, 48), (576, 192), (640, 160), (1152, 192), (1536, 256), (257, 144)]
)
def test_walks_waste_few_rows(out, length):
    assert length_for(out) == length


@pytest.mark.skipif("cpu" not in IMPLS, reason="needs the C++ kernels")
def test_every_instruction_set_gives_the_same():
    x, table = torch.randn(2, 64), values(12) / UNIT
    codes = torch.randint(256, (2, 24, 24), dtype=torch.uint8)
    found = []
    for isa in filter(native.runs, native.ISAS):
        symbols, _ = torch.ops.workbench.trellis_encode(x, table, 3, 32, isa)
        W = torch.ops.workbench.trellis_decode(codes, 3, 12, isa)
        y = torch.ops.workbench.trellis_multiply(x[:, :24].contiguous(), codes, 3, 12, isa)
        assert torch.allclose(y, x[:, :24] @ W, rtol=1e-4, atol=0.1)
        found.append((costs_of(x, symbols, table, 3), W))
    assert all(np.allclose(found[0][0], cost) and torch.equal(found[0][1], W) for cost, W in found)


@pytest.mark.skipif("cpu" not in IMPLS, reason="needs the C++ kernels")
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("bits", BITS)
def test_products_of_every_instruction_set(bits, states):
    """Walks of four panels and less, of more, and of a number that four does not divide; with up to five tokens,
    of which four are taken at once."""
    for panels, columns in ((2, 1), (2, 3), (3, 5), (4, 2), (7, 4), (10, 3)):
        codes = torch.randint(256, (2, columns, 2 * bits * panels), dtype=torch.uint8)
        W = decode(Trellis(codes, torch.ones(2 * 16 * panels), bits, states, (2 * 16 * panels, columns)))
        for isa in filter(native.runs, native.ISAS):
            found = torch.ops.workbench.trellis_decode(codes, bits, states, isa)
            assert torch.equal(found.t(), W), (isa, panels)
            for tokens in range(1, 6):
                x = torch.randn(tokens, columns)
                y = torch.ops.workbench.trellis_multiply(x, codes, bits, states, isa)
                assert torch.allclose(y, x @ W.t(), rtol=1e-4, atol=0.1), (isa, panels, tokens)


@pytest.mark.skipif(
    not native.walks_in_tiles(), reason="this processor has no tiles, or not the instructions for walks"
)
@pytest.mark.parametrize("bits", BITS)
def test_products_in_tiles(bits):
    """Walks that end inside a tile, odd numbers of panels and columns, and rows that are padding."""
    for panels, columns, out, tokens in ((2, 1, 40, 17), (3, 33, 96, 20), (7, 64, 200, 40), (12, 50, 576, 33)):
        walks = -(-out // (16 * panels))
        codes = torch.randint(256, (walks, columns, 2 * bits * panels), dtype=torch.uint8)
        w = Trellis(codes, torch.rand(out) + 0.5, bits, 12, (out, columns))
        x = torch.randn(tokens, columns).bfloat16()
        expected = x.float() @ decode(w).t()
        with recording() as ran:
            found = [trellis_matmul(x, w)]
        assert ran["trellis_matmul"] == {f"cpu {native.walks_in_tiles()}"}
        found.append(torch.ops.workbench.trellis_tiles(x, codes, w.scale, bits, 12, "avx512 tiles"))
        for y in found:
            assert (y.float() - expected).abs().max() < 0.01 * expected.abs().max()
    with pytest.raises(RuntimeError, match="does not fit"):
        torch.ops.workbench.trellis_tiles(x[:, 1:].contiguous(), codes, w.scale, bits, 12, "auto")
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.workbench.trellis_tiles(x, codes, torch.ones(4000), bits, 12, "auto")


def test_the_op_survives_the_compiler_and_says_what_ran(backend):
    w = Trellis(torch.randint(256, (1, 24, 12), dtype=torch.uint8), torch.rand(40) / UNIT, 2, 12, (40, 24))
    x = torch.randn(3, 24)
    torch.library.opcheck(torch.ops.workbench.trellis_matmul.default, (x, w.codes, w.scale, 2, 12, 40, IMPLS[-1]))
    with recording() as ran:
        y = torch.compile(lambda x: trellis_matmul(x, w) + 1, fullgraph=True, backend=backend)(x)
    assert torch.allclose(y, x @ decode(w).t() + 1, atol=1e-4)
    assert len(ran["trellis_matmul"]) == 1 and ran["trellis_matmul"].pop().startswith(IMPLS[-1])


def test_products_of_many_tokens_survive_the_compiler(backend):
    w = Trellis(torch.randint(256, (1, 24, 12), dtype=torch.uint8), torch.rand(40) / UNIT, 2, 12, (40, 24))
    x = torch.randn(20, 24).bfloat16()
    y = torch.compile(lambda x: trellis_matmul(x, w) + 1, fullgraph=True, backend=backend)(x)
    expected = x.float() @ decode(w).t() + 1
    assert (y.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_walks_are_packed_and_found_again():
    symbols = torch.randint(8, (2, 5, 48), dtype=torch.uint8)
    w = Trellis(pack_symbols(symbols, 3), torch.ones(96), 3, 12, (96, 5))
    expected = values(12)[walk_states(symbols.flatten(0, 1), 3, 12)].view(2, 5, 48).transpose(1, 2).reshape(96, 5)
    assert w.codes.shape == (2, 5, 18) and torch.equal(decode(w), expected)


def test_bad_arguments_say_what_works():
    w = Trellis(torch.zeros(1, 3, 12, dtype=torch.uint8), torch.ones(48), 2, 12, (48, 3))
    with pytest.raises(ValueError, match=r"must end in in_features \(=3\)"):
        trellis_matmul(torch.ones(1, 4), w)
    with pytest.raises(ValueError, match="`impl`"):
        trellis_matmul(torch.ones(1, 3), w, impl="cuda")
    with pytest.raises(ValueError, match="`impl` .='triton'. needs triton and a CUDA tensor"):
        trellis_matmul(torch.ones(1, 3), w, impl="triton")
    with pytest.raises(ValueError, match="`impl` .='triton'.: there is no such search"):
        viterbi(torch.ones(1, 32), torch.ones(256), bits=2, impl="triton")


def test_contests_have_the_dense_product_in_them():
    for contest in contests(CPU, True, OWN):
        assert {contest.ours, contest.baseline} == contest.contestants.keys()
        assert all(torch.isfinite(call(0)).all() for call in contest.contestants.values())
