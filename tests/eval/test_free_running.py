"""Continuations of passages: what they are, and that every number follows from the texts and the logits."""

import copy

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from compress.kv import attach
from compress.recipe import parse_recipe
from eval.evaluate import evaluate
from eval.writing import free_running as module
from eval.writing.free_running import free_running, passages, repetition
from kernels.support.modes import evaluating


@pytest.fixture
def pair(tiny):
    """A tiny model, and a copy whose head is disturbed."""
    model = tiny("llama", vocab_size=96)
    model.generation_config = GenerationConfig()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight += 0.3 * other.lm_head.weight.std() * torch.randn_like(other.lm_head.weight)
    return model, other


def text(n):
    return torch.randint(3, 90, (1, n))


def by_hand(model, ids, steps):
    ids = ids.tolist()
    for _ in range(steps):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_passages_are_disjoint_and_lie_all_over_the_texts():
    first, second = torch.arange(1000)[None], torch.arange(5000, 5130)[None]
    made = passages([first, second], 20, beginning=[7])
    assert made.shape == (8 + 6, 21) and set(made[:, 0].tolist()) == {7}, "the second text has room for 6"
    assert made[:8, 1].tolist() == list(range(0, 1000, 125)) and made[8:, 1].tolist() == [
        5000,
        5021,
        5043,
        5065,
        5086,
        5108,
    ]
    assert not passages([first[:, :19]], 20).numel() and not passages([first], 0).numel()


def test_every_number_follows_from_texts_and_logits(pair):
    model, other = pair
    ids = text(16 * 8)
    found = free_running(
        {"baseline": model, "same": copy.deepcopy(model), "other": other}, [ids], new_tokens=6, ends=[], beginning=[1]
    )
    assert set(found["baseline"]) == {
        f"free_running_{name}{end}" for name in ("repetition", "tokens") for end in ("", "_stderr")
    }
    same = found["same"]
    assert same["free_running_kl"] == pytest.approx(0, abs=1e-6) and same["guess_acceptance"] == 1
    assert same["free_running_same_tokens"] == same["free_running_tokens"] == 6

    prompts = passages([ids], module.PASSAGE_TOKENS, [1])
    with torch.no_grad(), evaluating(model), evaluating(other):
        lines, theirs = ([by_hand(m, p, 6) for p in prompts] for m in (model, other))
        written, of_other = ([line[-6:] for line in own] for own in (lines, theirs))
        logs = [[m(torch.tensor([line])).logits[0, -7:-1].log_softmax(-1) for line in lines] for m in (model, other)]
    kl = sum((a.exp() * (a - b)).sum() for a, b in zip(*logs, strict=True)) / (6 * len(lines))
    hits = [(b.argmax(-1) == torch.tensor(own)).float() for b, own in zip(logs[1], written, strict=True)]
    agreed = [next((i for i in range(6) if a[i] != b[i]), 6) for a, b in zip(written, of_other, strict=True)]
    made = found["other"]
    assert made["free_running_kl"] == pytest.approx(float(kl), rel=1e-3) and kl > 0.001
    assert made["guess_acceptance"] == pytest.approx(float(torch.cat(hits).mean())) and 0 < made["guess_acceptance"] < 1
    assert made["free_running_same_tokens"] == pytest.approx(sum(agreed) / len(agreed))
    assert made["free_running_repetition"] == pytest.approx(sum(map(repetition, of_other)) / len(of_other))


def test_a_text_ends_at_its_end_token(pair):
    """The baseline's most frequent token, taken as the end, makes texts shorter."""
    model, other = pair
    ids, models = text(16 * 64), {"baseline": model, "other": other}
    with torch.no_grad(), evaluating(model):
        often = torch.mode(model(passages([ids], module.PASSAGE_TOKENS)).logits[:, -1].argmax(-1)).values.item()
    whole, cut = (free_running(models, [ids], new_tokens=6, ends=ends)["baseline"] for ends in ([], [often]))
    assert cut["free_running_tokens"] < whole["free_running_tokens"] == 6


def test_a_compressed_cache_is_read_through(pair):
    model, _ = pair
    small = copy.deepcopy(model)
    attach(small, parse_recipe("kv_int(bits=2, residual=0)"))
    found = free_running({"baseline": model, "cache": small}, [text(16 * 80)], new_tokens=6)
    assert found["cache"]["free_running_kl"] > 1e-4


@pytest.mark.parametrize("recipe", ["kv_int(bits=2)", "quest(budget=0.25, full_layers=0)"])
def test_passages_are_long_enough_for_caches(tiny, recipe):
    """Of 64 tokens, codes with their default residual would keep all in 16 bits, and a reading would read all."""
    model = tiny("llama", max_position_embeddings=512)
    small = copy.deepcopy(model)
    attach(small, parse_recipe(recipe))
    found = free_running({"baseline": model, "cache": small}, [text(4 * 256)], new_tokens=6)
    assert found["cache"]["free_running_kl"] > 1e-7


def test_a_model_that_is_not_finite_has_no_error_of_zero(pair):
    model, other = pair
    with torch.no_grad():
        other.lm_head.weight[5] = float("nan")
    found = free_running({"baseline": model, "other": other}, [text(16 * 64)], new_tokens=6)["other"]
    assert not found["free_running_kl"] < 1 and found["free_running_kl_stderr"] != 0


@pytest.mark.parametrize("size", [30, 6])
def test_short_texts_and_few_positions_give_less(tiny, size):
    model = tiny("llama", max_position_embeddings=size)
    found = free_running({"baseline": model, "same": model}, [text(40)], new_tokens=8)
    assert bool(found["same"]) == (size == 30), "no room is left for a passage"


def test_evaluate_measures_all_models(pair, tiny):
    class Words(nn.Module):
        chat_template, eos_token_id = None, None

    model, other = pair
    more = {"texts": {"t": text(200)}, "window": 50, "speed_rounds": 0, "prompts": ()}
    scores = evaluate(other, Words(), baseline=model, others={"third": model}, write_tokens=4, **more)
    assert (
        scores.metrics["third"]["free_running_same_tokens"]
        == 4
        > scores.metrics["compressed"]["free_running_same_tokens"]
    )
    alone = evaluate(other, Words(), baseline=None, write_tokens=4, **more).metrics["compressed"]
    assert "free_running_repetition" in alone and "free_running_kl" not in alone
    none = evaluate(other, Words(), baseline=model, write_tokens=0, **more).metrics["compressed"]
    assert not any(name.startswith("free_running") for name in none)
