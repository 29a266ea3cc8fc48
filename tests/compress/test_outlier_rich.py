"""Four bits on models that were made to have outliers: plain rounding is broken, and what spreads, moves or keeps them
is far better."""

import copy

import pytest
import torch

from compress import METHODS, apply, calibration
from compress.recipe import parse_recipe

WEIGHTS, INPUTS = "rtn(bits=4, group_size={group})", "activations(bits=4)"
RECIPES = {
    "plain": f"{WEIGHTS}, {INPUTS}",
    "rotated": f"rotate, {WEIGHTS}, {INPUTS}",
    "smoothed": f"smoothquant(alpha=0.9), {WEIGHTS}, {INPUTS}",
    "gathered": f"{WEIGHTS}, activations(bits=4, group_size={{group}}, outliers=0.2)",
    "branched": f"smoothquant(alpha=0.9), svdquant(rank=8), {WEIGHTS}, {INPUTS}",
}


def relative(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


@pytest.mark.slow
def test_outliers_break_four_bits_and_what_mends_that(tiny, tokens, with_outliers, with_massive):
    """Outlier channels of inputs, and a massive activation at the first token."""
    *batches, ids = (batch.clamp_min(1) for batch in [*tokens(6), torch.cat(tokens(4, seed=2))])
    for batch in (*batches, ids):
        batch[:, 0] = 0
    plain, seen = with_massive(tiny("llama", initializer_range=0.02)), []
    model, expected = with_outliers(plain, 20, inside=True), plain(ids).logits
    assert relative(model(ids).logits, expected) < 1e-5
    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].abs()))
    model(ids)
    first, others = seen[0][:, 0].amax(), seen[0][:, 1:].median()
    assert first > 300 * others
    error = {}
    for name, text in RECIPES.items():
        result = apply(parse_recipe(text.format(group=16)), copy.deepcopy(model), batches)
        error[name] = relative(result.model(ids).logits, expected)
    assert error["plain"] > 1, "the logits are as wrong as zeros would be"
    assert max(error["rotated"], error["smoothed"]) < 0.45 * error["plain"]
    assert error["gathered"] < 0.55 * error["plain"] and error["branched"] < 0.8 * error["smoothed"]
    eight = apply([METHODS["rotate"](), METHODS["activations"](bits=8)], copy.deepcopy(model), batches).model
    assert relative(eight(ids).logits, expected) < 0.1 * error["rotated"]


@pytest.mark.slow
def test_outliers_in_real_weights(real, with_outliers):
    """Of the first four blocks of the embedded model, which has a massive first token by itself."""
    model, tokenizer = real
    del model.model.layers[4:]
    model.config.num_hidden_layers = 4
    ids, *batches = calibration(tokenizer, samples=3, seqlen=128)
    spiky, expected, loss = with_outliers(model, 20, inside=True), model(ids).logits, {}
    assert relative(spiky(ids).logits, expected) < 1e-4
    for name, text in RECIPES.items():
        result = apply(parse_recipe(text.format(group=64)), copy.deepcopy(spiky), batches)
        loss[name] = relative(result.model(ids).logits, expected)
    others = {name: one for name, one in loss.items() if name != "plain"}
    assert max(others.values()) < 0.7 * loss["plain"], loss
