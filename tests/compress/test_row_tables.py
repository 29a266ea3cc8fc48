"""Tables for every row: k-means against exact dynamic programming, nested codes, and one file in several widths."""

import numpy as np
import pytest
import torch

from compress import apply, load_compressed, save_compressed
from compress.formats import FORMATS, RowTables
from compress.formats.csr import entry_count
from compress.formats.sizes.row_tables import at_bits
from compress.grid.kmeans import kmeans_rows, nested_rows
from compress.linear import compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe
from compress.weights.squeezellm import outlying


def exact_cost(x, weight, entries):
    """Of the best centres: dynamic programming over all runs of the sorted row, in float64."""
    order = np.argsort(x)
    x, weight = x[order], weight[order]
    sums = [np.concatenate([[0], np.cumsum(weight * x**power)]) for power in range(3)]
    mass, first, second = (one[None] - one[:, None] for one in sums)  # [start, end]
    place = np.arange(len(x) + 1)
    cost = np.where(place[None] > place[:, None], second - first**2 / np.where(mass > 0, mass, 1), np.inf)
    best = np.where(place == 0, 0, np.inf)
    for _ in range(entries):
        best = np.minimum(best, (best[:, None] + cost).min(0))
    return best[-1]


def rows_and_importance(rows=6, columns=160):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(rows, columns, generator=generator)
    return W, torch.randn(rows, columns, generator=generator).square() * torch.rand(columns).mul(3).exp()


def cost_of(W, F, codes, table):
    return (F * (W - table.gather(1, codes.long())).square()).double().sum(1)


@pytest.mark.parametrize("entries", [4, 8, 16])
def test_centres_are_as_good_as_the_best_there_are(entries):
    W, F = rows_and_importance()
    found = cost_of(W, F, *kmeans_rows(W, F, entries))
    best = torch.tensor(
        [exact_cost(w, f, entries) for w, f in zip(W.double().numpy(), F.double().numpy(), strict=True)]
    )
    assert (found >= best * (1 - 1e-4)).all() and (found <= best * 1.05).all() and found.sum() <= 1.01 * best.sum()


def test_rows_of_few_values_and_weights_of_nothing():
    W, F = torch.zeros(3, 12), torch.zeros(3, 12)
    W[1, :4], W[2] = 2.0, torch.arange(12) // 6
    codes, table = kmeans_rows(W, F, 8)
    assert torch.allclose(table.gather(1, codes.long()), W) and torch.isfinite(table).all()


def test_upper_bits_are_the_codes_of_fewer_bits():
    W, F = rows_and_importance()
    codes, tables = nested_rows(W, F, 2, 4)
    costs = [cost_of(W, F, codes >> (4 - bits), table) for bits, table in zip((2, 3, 4), tables, strict=True)]
    assert (costs[0] > costs[1]).all() and (costs[1] > costs[2]).all()
    assert torch.equal(codes >> 2, kmeans_rows(W, F, 4)[0]), "the seed is the best table of 4 entries"
    stored = RowTables.from_codes(codes, tables)
    for bits, table in zip((2, 3, 4), tables, strict=True):
        part = stored.at(bits)
        assert torch.equal(part.dequantize(), table.half().float().gather(1, (codes >> (4 - bits)).long()))
        assert part.nbytes == 6 * (160 * bits // 8 + 2 * sum(1 << b for b in range(2, bits + 1)))
        again = FORMATS["row_tables"].from_tensors(part.spec(), part.state_dict())
        again.for_compute(torch.float32, torch.device("cpu"))
        x = torch.randn(3, 160)
        assert torch.allclose(again.matmul(x), x @ part.dequantize().t(), atol=1e-3)
    with pytest.raises(ValueError, match=r"`bits` \(=5\) must lie between 2 and 4"):
        stored.at(5)


def test_outliers_are_the_requested_shares_of_the_entries():
    W, F = rows_and_importance(8, 50)
    apart = outlying(W, F, 0.02, 0.05)
    assert apart.sum() == entry_count(0.02, W.shape) + entry_count(0.05, W.shape)
    assert apart.flatten()[F.flatten().topk(entry_count(0.02, W.shape)).indices].all()


def test_one_file_is_loaded_in_several_widths(tiny, tokens, tmp_path):
    result = apply(parse_recipe("any_precision"), tiny("llama"), tokens())
    save_compressed(result, tmp_path / "saved")
    ids, exact = tokens(1, 9)[0], tiny("llama")(tokens(1, 9)[0]).logits
    model = load_compressed(tmp_path / "saved")
    assert torch.equal(model(ids).logits, result.model(ids).logits)
    errors = [(at_bits(model, bits)(ids).logits - exact).norm().item() for bits in (4, 3, 2)]
    assert errors == sorted(errors)
    assert {part.bits for linear in compressed_linears(model).values() for part in linear.parts} == {2}
    with pytest.raises(ValueError, match="no weight of this model"):
        at_bits(tiny("llama"), 3)


def test_sensitive_and_large_weights_are_exact(tiny, tokens):
    model = tiny("llama")
    W = model.model.layers[0].mlp.up_proj.weight.clone()
    result = apply(parse_recipe("squeezellm(bits=3, largest=0.02)"), model, tokens())
    linear = result.model.model.layers[0].mlp.up_proj
    stored = linear.parts[1].dequantize() != 0
    top = W.abs() >= W.abs().flatten().topk(10).values.min()
    assert stored[top].all() and torch.allclose(linear.dequantize()[top], W[top], atol=2e-3)
    with pytest.raises(ValueError, match="gradients of floats"):
        settle(parse_recipe("wanda, squeezellm"))
