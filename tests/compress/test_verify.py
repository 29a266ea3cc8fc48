"""Rounding explains a few positions that are far apart, and explains neither wrong positions everywhere nor a NaN."""

import math
from contextlib import contextmanager

import pytest
import torch

from compress.checkpoint.verify import NEW_TOKENS, PROMPTS, _agreement, compare_logits

T, VOCABULARY = 16 + NEW_TOKENS - 1, 64
NOISE, MASSIVE = 0.1, 40.0  # of bfloat16 at an ordinary position; the difference where activations are massive


def logits(noise: float, seed: int) -> torch.Tensor:
    """Logits [prompts, T, vocabulary] whose largest stand out, with the rounding of one model."""
    exact = torch.randn(len(PROMPTS), T, VOCABULARY, generator=torch.Generator().manual_seed(0))
    exact[..., 7] += 20
    return exact + noise * torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))


def allowed() -> torch.Tensor:
    return torch.full((len(PROMPTS), T), 3 * NOISE)


def test_a_first_token_with_massive_activations_may_go_either_way():
    ours, theirs = logits(NOISE, 1), logits(NOISE, 2)
    theirs[:, 0] += MASSIVE * torch.randn(len(PROMPTS), VOCABULARY)  # in one model only, so that no noise shows it
    agreement = _agreement(ours, theirs, allowed())
    assert agreement and agreement.same == agreement.greedy
    assert agreement.largest > MASSIVE, "it is still said how large it is"


@pytest.mark.parametrize("wrong", [slice(None), slice(0, None, 5)], ids=["everywhere", "a fifth"])
def test_other_logits_at_many_positions_are_refused(wrong):
    ours, theirs = logits(NOISE, 1), logits(NOISE, 2)
    theirs[:, wrong] += 5 * NOISE * torch.randn(theirs[:, wrong].shape)
    assert not _agreement(ours, theirs, allowed())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_refused_at_a_single_position(value):
    theirs = logits(NOISE, 2)
    theirs[0, 0, 0] = value
    assert not _agreement(logits(NOISE, 1), theirs, allowed())


def test_another_token_is_refused_where_it_is_no_tie():
    theirs = logits(NOISE, 2)
    theirs[0, -1, 3] += 40
    assert not _agreement(logits(NOISE, 1), theirs, allowed())


@pytest.mark.parametrize("how", ["rounded activations", "products of its own"])
def test_wrong_products_are_not_taken_for_rounding(tiny, how):
    """The loaded model computes the product that it is compared with for its rounding, and not its own."""
    model, loaded = tiny("llama").bfloat16(), tiny("llama").bfloat16()
    flaws = [1.0]
    for block in loaded.model.layers:
        block.mlp.down_proj.register_forward_hook(lambda *given: given[-1] * flaws[-1])

    @contextmanager
    def as_they_are(_):
        flaws.append(1.0)
        yield
        flaws.pop()

    def compared():
        plain = {"plain": tiny("llama").bfloat16()} if how == "products of its own" else {}
        return compare_logits(model, loaded.bfloat16(), None, **plain or {"activations_as_they_are": as_they_are})

    assert compared()
    flaws.append(-8.0)
    with pytest.raises(RuntimeError, match="different logits"):
        compared()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", ["frequencies", "epsilon", "attention scale"])
def test_a_model_with_another_setting_is_refused(tiny, dtype, setting):
    model, other = tiny("llama").to(dtype), tiny("llama").to(dtype)
    assert compare_logits(model, tiny("llama").to(dtype), None)
    if setting == "frequencies":
        other.model.rotary_emb.inv_freq.mul_(0.9)
    for block in other.model.layers:
        if setting == "epsilon":
            block.input_layernorm.variance_epsilon = 1e-2
        if setting == "attention scale":
            block.self_attn.scaling *= 1.05
    with pytest.raises(RuntimeError, match="different logits"):
        compare_logits(model, other, None)
