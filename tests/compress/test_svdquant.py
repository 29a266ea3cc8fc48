"""Parts in 16 bits meet the inputs before they are rounded: a branch of low rank, and corrections."""

import copy

import pytest
import torch
from torch.nn.functional import linear

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint.fits import linears_to_be
from compress.formats import CsrWeight, LowRankWeight
from compress.grid.nearest import rtn
from compress.linear import CompressedLinear, compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe
from compress.transforms import Rounding, followed_by
from compress.transforms.rotation import random_hadamard

SVDQUANT = METHODS["svdquant"]


def rounded(x, largest=7):
    """Integers of 4 bits with a step for each token, in plain torch."""
    step = x.abs().amax(-1, keepdim=True) / largest
    return (x / step).round() * step


@pytest.mark.parametrize("rotated", [False, True])
def test_the_layer_is_that_of_plain_torch(rotated):
    """Also by the dequantised weight, copied, and out of its tensors."""
    W, x = torch.randn(24, 32), torch.randn(3, 5, 32)
    L, R, entries = torch.randn(24, 4), torch.randn(4, 32), torch.randn(24, 32)
    parts = [rtn(W, bits=4), LowRankWeight.from_factors(L, R), CsrWeight.from_chosen(entries, entries > 1.5)]
    rotation = random_hadamard(32, 0)
    layer = CompressedLinear(parts, torch.ones(24), dtype=torch.float32)
    layer.transform = followed_by(rotation if rotated else None, Rounding(4))
    seen = rotation(x) if rotated else x
    sparse = torch.where(entries > 1.5, entries, 0)
    expected = linear(rounded(seen), parts[0].dequantize()) + linear(seen, L @ R + sparse) + 1
    state = layer.state_dict()
    for one in (layer, copy.deepcopy(layer), CompressedLinear.from_tensors(layer.spec(), state, torch.float32)):
        assert torch.allclose(one(x), expected, atol=2e-2, rtol=1e-3)
        with one.dense():
            assert torch.allclose(one(x), expected, atol=2e-2, rtol=1e-3)


def test_the_split_is_the_singular_value_decomposition_and_the_rest_is_quantised(tiny, tokens):
    model = tiny("llama")
    W = model.model.layers[1].mlp.down_proj.weight.clone()
    result = apply([SVDQUANT(rank=6), METHODS["rtn"](bits=4, group_size=16)], model)
    parts = result.model.model.layers[1].mlp.down_proj.parts
    U, S, V = torch.linalg.svd(W)
    branch = (U[:, :6] * S[:6]) @ V[:6]
    assert torch.allclose(parts[1].dequantize(), branch, atol=2e-3 * S[0])
    expected = rtn(W - branch, bits=4, group_size=16).dequantize()
    assert ((parts[0].dequantize() - expected).abs() > 2e-3).float().mean() < 0.02  # factors in float16 move few codes
    record = next(one for one in result.layers if one.name.endswith("1.mlp.down_proj"))
    left = W - parts[0].dequantize() - parts[1].dequantize()
    assert record.format == "int_group+low_rank"
    assert record.error == pytest.approx((left.square().sum() / W.square().sum()).item(), rel=1e-3)


def with_large_directions(model, factor=8.0):
    """The model with a few directions in its weights that are far larger than the others."""
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".layers." in name:
            p += factor * p.std() * torch.randn(len(p), 1) @ torch.randn(1, p.shape[1]) / 4
    return model


RECIPE = "rtn(bits=4, group_size=-1, scale=absmax), activations(bits=4)"


def test_the_branch_takes_what_four_bits_lose(tiny, tokens, tmp_path):
    """Of weights and of inputs; recorded errors are those of the layer, and the saved model gives the same bits."""
    model, ids, losses = with_large_directions(tiny("llama")), torch.cat(tokens(4, 20)), {}
    expected = model(ids).logits
    for recipe in (RECIPE, f"svdquant(rank=4), {RECIPE}"):
        result = apply(parse_recipe(recipe), copy.deepcopy(model), tokens())
        found = result.model(ids).logits
        losses[recipe] = ((found - expected).norm() / expected.norm()).item(), sum(r.error for r in result.layers)
    plain, branched = losses.values()
    assert branched[0] < 0.8 * plain[0] and branched[1] < 0.4 * plain[1]
    linears = compressed_linears(result.model)
    assert all(isinstance(one.transform, Rounding) and len(one.parts) == 2 for one in linears.values())
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, found)
    with pytest.raises(ValueError, match="sum of parts|transform|rounded"):
        save_compressed(result, tmp_path / "other", save_format="compressed-tensors")


def test_recorded_errors_are_those_of_the_first_layer(tiny, tokens):
    """q_proj of the first block reads the same in both models."""
    model, x = with_large_directions(tiny("llama")), []
    q = model.model.layers[0].self_attn.q_proj
    handle = q.register_forward_pre_hook(lambda _, args: x.append(args[0].flatten(0, 1)))
    for batch in tokens():
        model(batch)
    handle.remove()
    x, W = torch.cat(x), q.weight.clone()
    result = apply(parse_recipe(f"svdquant(rank=4), {RECIPE}"), model, tokens())
    rest, branch = (part.dequantize() for part in model.model.layers[0].self_attn.q_proj.parts)
    y = linear(rounded(x), rest) + linear(x, branch)
    error = (y - linear(x, W)).square().sum() / linear(x, W).square().sum()
    record = next(one for one in result.layers if one.name.endswith("0.self_attn.q_proj"))
    assert record.error == pytest.approx(error.item(), rel=0.02)


def test_a_correction_meets_inputs_before_they_are_rounded(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 20))
    result = apply(parse_recipe("rtn(bits=3, group_size=16), low_rank(rank=4), activations(bits=8)"), model, tokens())
    layer, x = model.model.layers[0].mlp.gate_proj, torch.randn(3, 64)
    rest, added = (part.dequantize() for part in layer.parts)
    assert torch.allclose(layer(x), linear(rounded(x, 127), rest) + linear(x, added), atol=1e-2, rtol=1e-3)
    assert model(ids).logits.isfinite().all() and result.layers[0].format == "int_group+low_rank"


def test_stored_formats_are_predicted_and_impossible_recipes_refused(tiny, tokens):
    model = tiny("llama")
    recipe = parse_recipe("svdquant(rank=4), gptq(bits=4, group_size=16, min_tokens=8)")
    specs, _ = linears_to_be(settle(recipe), model)
    result = apply(recipe, copy.deepcopy(model), tokens())
    stored = {name: one.spec()["parts"] for name, one in compressed_linears(result.model).items()}
    assert stored == {name: spec["parts"] for name, spec in specs.items()}
    assert all(one.error < one.rtn_error < 0.03 for one in result.layers), "rounding to nearest has the branch, too"
    for text in ("svdquant, smoothquant, rtn", "svdquant, wanda, rtn", "svdquant, rotate", "svdquant, awq"):
        with pytest.raises(ValueError, match="before it has split them"):
            settle(parse_recipe(text))
    with pytest.raises(ValueError, match="`where`"):
        SVDQUANT(where="all")
