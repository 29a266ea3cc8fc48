"""QMoE: three values a row, GPTQ's correction on them, experts that few tokens reach, and one file in and out."""

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.formats import FORMATS, TernaryWeight, bits_of
from compress.linear import compressed_linears
from compress.recipe import parse_recipe
from compress.walk.hessian import factorise
from compress.weights.qmoe import qmoe


def correlated(rows=96, columns=80, tokens=400):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    X = torch.randn(tokens, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), 2 / tokens * X.t() @ X


def loss(W, stored, H):
    D = W - stored.dequantize()
    return (D @ H * D).sum().item()


@pytest.mark.parametrize("reach", [1.0, 0.5])
def test_rounded_to_the_nearest_of_three_values(reach):
    W, _ = correlated()
    W[0], W[1] = W[0].abs(), 0
    stored = qmoe(W, None, reach=reach).dequantize()
    for w, got in zip(W, stored, strict=True):
        values = torch.tensor([reach * w.min().clamp(max=0), 0, reach * w.max().clamp(min=0)]).bfloat16().float()
        nearest = values[(w[:, None] - values).abs().argmin(1)]
        assert torch.equal((w - got).abs(), (w - nearest).abs())


def test_correction_lowers_the_error_of_the_output():
    """Column by column, each weight is corrected for the errors before it, as a plain GPTQ in float64 does."""
    W, H = correlated()
    factor = factorise(H, 0.01, torch.arange(80))
    stored, plain = qmoe(W, factor, reach=0.5), qmoe(W, None, reach=0.5)
    assert loss(W, stored, H) < 0.8 * loss(W, plain, H)
    damped = H.double() + 0.01 * H.diagonal().mean().double() * torch.eye(80)
    U = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, expected = W.double().clone(), torch.zeros_like(W).double()
    low, high = ((0.5 * edge).bfloat16().double() for edge in (W.amin(1), W.amax(1)))
    for i in range(80):
        w = left[:, i]
        expected[:, i] = q = torch.where(w > high / 2, high, torch.where(w < low / 2, low, 0))
        left[:, i + 1 :] -= torch.outer((w - q) / U[i, i], U[i, i + 1 :])
    assert (stored.dequantize() != expected.float()).float().mean() < 0.01


def test_stored_bytes_and_values_of_a_ternary_weight():
    W, _ = correlated(rows=7, columns=33)
    stored = qmoe(W, None)
    assert stored.nbytes == 2 * len(stored.codes) + 7 * (2 + 2 + 2)
    assert stored.spec() == METHODS["qmoe"]().stores((7, 33))[0]
    again = FORMATS["ternary"].from_tensors(stored.spec(), stored.state_dict())
    again.to(torch.float16)
    again.for_compute(torch.float32, torch.device("cpu"))
    assert again.low.dtype == torch.bfloat16 and torch.equal(again.dequantize(), stored.dequantize())
    x = torch.randn(3, 33)
    assert torch.allclose(again.matmul(x), x @ stored.dequantize().t(), atol=1e-5)


def test_predicted_bits_are_near():
    place = torch.rand(256, 1024, generator=torch.Generator().manual_seed(0))
    symbols = (place > 0.885).byte() + (place > 0.9425).byte()
    stored = TernaryWeight.from_symbols(symbols, -torch.ones(256), torch.ones(256), p0=0.885)
    assert bits_of([stored.spec()]) == pytest.approx(stored.bits_per_weight, rel=0.1)


def test_saved_and_loaded_and_refused_elsewhere(tiny, tokens, tmp_path):
    result = apply(parse_recipe("qmoe(reach=0.6, min_tokens=8)"), tiny("llama"), tokens())
    record = result.layers[0]
    assert record.format == "ternary" and 0 < record.error < record.rtn_error
    save_compressed(result, tmp_path / "out")
    again = load_compressed(tmp_path / "out")
    ids = tokens(1, 17)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)
    assert all(linear.parts[0].name == "ternary" for linear in compressed_linears(again).values())
    with pytest.raises(ValueError, match="cannot hold|ternary"):
        save_compressed(result, tmp_path / "gptq", save_format="gptq")


def test_experts_that_few_tokens_reach_are_rounded(tiny, tokens):
    result = apply(parse_recipe("qmoe(min_tokens=60)"), tiny("qwen3_moe"), tokens())
    starved = [record for record in result.layers if record.tokens < 60]
    assert starved and len(starved) < len(result.layers)
    assert all("rounded to nearest" in record.notes[0] for record in starved)


def test_zeros_stay_zeros(tiny, tokens):
    pruned = apply(parse_recipe("wanda(ratio=0.5)"), tiny("llama"), tokens()).model
    both = apply(parse_recipe("wanda(ratio=0.5), qmoe(reach=0.6, min_tokens=8)"), tiny("llama"), tokens()).model
    for name, linear in compressed_linears(pruned).items():
        gone = linear.dequantize() == 0
        W = compressed_linears(both)[name].dequantize()
        if ".layers.0." in name and "down" not in name and "o_proj" not in name:  # its inputs were the same
            assert (W[gone] == 0).all()
        assert (W == 0).float().mean() >= 0.5


def test_embeddings_are_refused(tiny, tokens):
    with pytest.raises(ValueError, match="where"):
        apply(parse_recipe("qmoe(where=all)"), tiny("llama"), tokens())
