"""Answers from compressed caches are what the model gives; timed caches are as long as they say."""

import functools

import pytest
import torch

from compress import METHODS, apply
from compress.kv import CacheBatch, attached
from compress.kv.attach import slots_of
from compress.kv.timed import FilledCache
from compress.recipe import parse_recipe
from eval.contexts.answers import bootstrap
from eval.contexts.haystack import ContextSample, Question
from eval.contexts.long_context import VISIBILITIES, score_long_context
from eval.speed import cache_speed
from eval.speed.cache_speed import measure_cache_speed
from kernels.step.in_parts import StepInParts
from kernels.step.recognition.recognise import recognise

STREAMING, KV_INT = METHODS["streaming"], METHODS["kv_int"]


@pytest.fixture
def sample(tiny, tokens):
    """A context and two questions; the first one's answer is what the model writes, and the second's is not."""
    model, (context, ask, other, wrong) = tiny("llama"), [one[0] for one in tokens(4, 40)]
    ask, other, wrong = ask[:5], other[:4], wrong[:3]
    ids = torch.cat([context, ask])
    for _ in range(4):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1:].argmax(-1)])
    questions = Question(ask, ids[45:], ((3, 9), (20, 22))), Question(other, wrong, ((30, 34),))
    return model, ContextSample("word", context, questions, 0.5, 40)


def scored(model, samples, **more):
    with attached(model) as attachment:
        return score_long_context(model, samples, observer=lambda: attachment.cache(observes=True, traces=True), **more)


def test_full_cache_answers_as_the_model_does(sample):
    model, one = sample
    first, second = one.questions
    found = scored(model, [one], variants={"all": lambda cache: cache.compressed(STREAMING(budget=1.0))})
    before = {
        "agnostic": (one.context, first),
        "another": (one.context, second),
        "turns": (torch.cat([one.context, first.ask, first.answer]), second),
        "visible": (one.context, first),
        "follow-up": (torch.cat([one.context, first.ask, first.answer]), second),
    }
    for visibility in VISIBILITIES:
        read, question = before[visibility]
        ids = torch.cat([read, question.ask, question.answer])
        logits = model(ids[None]).logits[0, -len(question.answer) - 1 : -1].log_softmax(-1)
        for name in ("full", "all"):
            answer = found.answers[name]["word", 40, visibility][0]
            assert answer.exact == (question is first) == bool((logits.argmax(-1) == question.answer).all())
            assert answer.nll == pytest.approx(-logits.gather(-1, question.answer[:, None]).mean().item(), abs=1e-4)
            assert len(answer.kl) == len(question.answer) and max(answer.kl) < 1e-6
    assert max(found.errors["all"]) < 1e-8 and found.survival["all"]["word", 40] == [[1.0, 1.0]] * 2
    assert found.metrics()["full"]["cache_bytes_40"] >= 2 * 2 * 2 * 40 * 16 * 2


def test_the_head_is_given_whole_rows_and_left_as_it_was(sample, monkeypatch):
    """The hidden states of the last tokens alone lie apart, even where only a dimension of one row says so."""
    model, one = sample
    head, strides = model.get_output_embeddings(), []
    linear = torch.nn.functional.linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight is head.weight:
            strides.append(x.stride() == torch.empty(x.shape).stride())
        return linear(x, weight, bias)

    hooks = len(head._forward_pre_hooks)
    with attached(model) as attachment:  # a model is tried and its rotations are learned once, by passes of their own
        attachment.cache(observes=True)
        monkeypatch.setattr(torch.nn.functional, "linear", noted)
    scored(model, [one], variants={}, visibilities=["agnostic"])
    assert len(strides) == 2 and all(strides) and len(head._forward_pre_hooks) == hooks


def test_caches_asked_together_answer_as_each_alone(sample, monkeypatch):
    model, one = sample
    variants = {
        f"{share}": lambda cache, share=share: cache.compressed(STREAMING(budget=share)) for share in (0.9, 0.5, 0.2)
    }
    variants["codes"] = lambda cache: cache.compressed(None, KV_INT(group_size=32, residual=4))
    alone = scored(model, [one], variants=variants)
    for size in (2, 16):
        monkeypatch.setattr("eval.contexts.long_context._AT_ONCE", size)
        together = scored(model, [one], variants=variants, batched=CacheBatch)
        assert list(together.answers) == list(alone.answers)
        for name, groups in alone.answers.items():
            for key, (expected,) in groups.items():
                (found,) = together.answers[name][key]
                assert found.exact == expected.exact and found.nll == pytest.approx(expected.nll, abs=1e-4)
                assert found.kl == pytest.approx(expected.kl, abs=1e-4)
            assert together.errors[name] == pytest.approx(alone.errors[name], abs=1e-5)
            assert together.survival[name] == alone.survival[name] and together.kept[name] == alone.kept[name]


def test_texts_behind_caches_are_those_of_a_plain_loop(sample):
    """Compressed without the question: a cache that keeps everything writes what the model does, a short one does not;
    the numbers along the full cache's text follow from the model's logits."""
    model, one = sample
    variants = {
        "all": lambda cache: cache.compressed(STREAMING(budget=1.0)),
        "few": lambda cache: cache.compressed(STREAMING(budget=0.2)),
    }
    ids = torch.cat([one.context, one.questions[0].ask])
    for _ in range(8):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1:].argmax(-1)])
    plain = scored(model, [one], variants=variants, visibilities=["agnostic"])
    assert not plain.written and "free_running_kl" not in plain.metrics()["few"]
    for batched in (None, CacheBatch):
        found = scored(model, [one], variants=variants, visibilities=["agnostic"], write_tokens=8, batched=batched)
        assert found.answers["few"]["word", 40, "agnostic"][0].nll == pytest.approx(
            plain.answers["few"]["word", 40, "agnostic"][0].nll, abs=1e-4
        )
        (full,), (whole,), (few,) = (found.written[name] for name in ("full", "all", "few"))
        assert full.tokens == whole.tokens == ids[45:].tolist() != few.tokens
        assert whole.kl < 1e-4 < few.kl and whole.guessed == whole.count == few.count == 8 > few.guessed
        metrics = found.metrics()
        assert metrics["all"]["free_running_same_tokens"] == 8 > metrics["few"]["free_running_same_tokens"]
        assert (
            metrics["few"]["free_running_kl"] == pytest.approx(few.kl / 8) and metrics["all"]["guess_acceptance"] == 1
        )
        assert metrics["full"]["free_running_tokens"] == 8 and "free_running_kl" not in metrics["full"]


def test_evicted_positions_change_the_scores(sample):
    model, one = sample
    found = scored(model, [one, one], variants={"half": lambda cache: cache.compressed(STREAMING(budget=20, sinks=4))})
    made = found.found()
    assert found.kept["half"][40] == [[20, 20]] * 2
    assert found.survival["half"]["word", 40] == [[pytest.approx(1 / 8)] * 2] * 2, (
        "of 3 to 8 and 20, 21 only 3 is among 0-3, 24-39"
    )
    assert found.cache_bytes["half"][40] < 0.6 * found.cache_bytes["full"][40] and min(found.errors["half"]) > 1e-6
    row = next(row for row in made.answers if row.variant == "half" and row.visibility == "visible")
    assert len(row.exact) == 2 and row.kl[0] > 1e-6 and len(row.kl_by_token) == 4
    assert "<th style='text-align:left'>half</th>" in found._repr_html_() and len(repr(found)) < 100
    assert made.against["half"]["agnostic"] == found.against("half", visibility="agnostic")
    assert "nll_word_40_follow_up_stderr" in found.metrics()["half"]
    lost = {v: found.answers["half"]["word", 40, v][0].kl for v in ("another", "turns", "follow-up")}
    assert len({tuple(kl) for kl in lost.values()}) == 3 and all(max(kl) > 1e-6 for kl in lost.values())
    only = scored(model, [one], variants={}, visibilities=["follow-up"])
    assert (
        set(only.answers["full"]) == {("word", 40, "follow-up")}
        and only.cache_bytes["full"][40] > found.cache_bytes["full"][40]
    )


def test_bad_input(sample):
    model, one = sample
    alone = ContextSample("word", one.context, one.questions[:1], 0.5, 40)
    longer = ContextSample("word", torch.zeros(130, dtype=torch.long), one.questions, None, 130)
    for samples, more, message in (
        ([], {}, "`samples`"),
        ([one], {"visibilities": ["hidden"]}, "`visibilities`.*agnostic"),
        ([one], {"visibilities": []}, "`visibilities`"),
        ([alone], {"visibilities": ["follow-up"]}, "no second question"),
        ([alone], {"visibilities": ["another", "turns"]}, "no second question; agnostic"),
        ([longer], {}, "128 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            scored(model, samples, variants={}, **more)


def test_bootstrap():
    assert bootstrap([1.0] * 7) == (1.0, 1.0, 1.0) and bootstrap([0, 1] * 50) == bootstrap([0, 1] * 50)
    mean, low, high = bootstrap([0, 1] * 50)
    assert mean == 0.5 and low == pytest.approx(0.4, abs=0.02) and high == pytest.approx(0.6, abs=0.02)


def test_made_up_caches_are_as_long_as_they_say(tiny):
    model = tiny("gemma3_text")
    for methods, kept in (
        ((None, None), 60),
        ((STREAMING(budget=0.25), None), 15),
        ((STREAMING(budget=40), KV_INT(group_size=32)), 40),
    ):
        with attached(model):
            cache = FilledCache(model, 100, *methods).at(60)
            (layer,) = cache.filled
            assert layer.lengths.tolist() == [[kept] * 2] and cache.get_seq_length() == 60
            assert cache.layers[0].get_seq_length() == 60 and cache.layers[0].keys.shape[2] <= 8
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
            assert layer.lengths.tolist() == [[kept + 1] * 2] and cache.get_seq_length() == 61
            assert cache.at(60).filled[0].lengths.tolist() == [[kept] * 2] and cache.get_seq_length() == 60
    with pytest.raises(ValueError, match="`tokens`"):
        cache.at(101)


def test_speed_of_caches(tiny):
    model = tiny("llama", max_position_embeddings=16384)
    make = functools.partial(FilledCache, model, 16000)
    variants = {"full": make, "few": lambda: make(STREAMING(budget=0.02))}
    with attached(model):
        found = measure_cache_speed(model, variants, [32, 16000], new_tokens=2, rounds=3)
    assert all(how.startswith("eager; no native step: activations in float32") for how in found.execution.values())
    assert set(found.tokens_per_s) == {"full", "few"} and set(found.attention_s) == {"full", "few", cache_speed.SDPA}
    assert all(low <= middle <= high for of in found.tokens_per_s.values() for middle, low, high in of.values())
    assert set(found.spread) == {"decode", "attention"} and found.load.seconds > 0
    assert found.attention_speedup["few"][16000] > 1.2, "320 positions of 16,000: a wide margin"
    assert "16,000 tokens" in found._repr_html_() and found.settings.rounds == 3 and "kv_decode" in found.kernels
    for wrong in ({"contexts": [0]}, {"contexts": [32], "rounds": 0}, {"contexts": [32], "new_tokens": 1.5}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            measure_cache_speed(model, variants, **wrong)
    with pytest.raises(ValueError, match="`variants`"):
        measure_cache_speed(model, {"few": make}, [32])


def test_layers_of_other_widths_with_a_window_are_timed(tiny):
    model = tiny("gemma4_unified_text", layers=4)
    with attached(model):
        found = measure_cache_speed(model, {"full": lambda: FilledCache(model, 64)}, [32], new_tokens=2, rounds=1)
    assert found.tokens_per_s["full"][32][0] > 0 and found.attention_s["full"][32][0] > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_layers_without_attention_are_filled_with_nothing(tiny, tokens, architecture):
    model = apply("layer_drop(layers='0')", tiny(architecture, num_hidden_layers=3), tokens()).model.bfloat16()
    with attached(model):
        cache = FilledCache(model, 100).at(60)
        assert len(cache.filled) == len(FilledCache(tiny(architecture, num_hidden_layers=3), 100).at(60).filled) - (
            architecture == "llama"
        )
        assert cache.get_seq_length() == 60 and sum(layer.get_seq_length() == 60 for layer in cache.layers) == 3
        found = measure_cache_speed(model, {"full": lambda: FilledCache(model, 100)}, [60], new_tokens=2, rounds=1)
    assert found.execution["full"] == "native step" and found.tokens_per_s["full"][60][0] > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_native_step_is_timed_where_it_knows_the_model(tiny, architecture):
    """It takes what is lent (16 bits, codes, few positions, windows) and what attends itself (sparse reading); each
    variant's logits are compared with the model's before anything is timed."""
    model = tiny(architecture).bfloat16()
    recipes = ("", "kv_int(bits=4, group_size=32)", "kv_int(bits=2, group_size=32, residual=8)", "streaming(budget=0.5)",
               "quest(budget=8, page=4, full_layers=1)", "kv_fp8(group_size=32)")  # fmt: skip
    variants = {
        recipe or "full": functools.partial(FilledCache, model, 300, *slots_of(parse_recipe(recipe) if recipe else []))
        for recipe in recipes
    }
    with attached(model):
        found = measure_cache_speed(model, variants, [96, 300], new_tokens=3, rounds=1)
    assert set(found.execution.values()) == {"native step"} and "decode_step" in found.kernels
    for name in recipes:
        for context in (96, 300):
            attention, speed = (of[name or "full"][context][0] for of in (found.attention_s, found.tokens_per_s))
            assert 0 < attention < 1 / speed, "a part of the step"
    cache = variants["kv_int(bits=4, group_size=32)"]()
    number = len(cache.layers) - 1
    one, two = (cache.at(96).lend(number).counts, cache.lend(number).counts)
    assert two == [one[0], one[1] + 1] and cache.at(96).lend(number).counts == one


def test_pages_of_a_timed_cache_hold_the_tokens_that_it_decodes(tiny):
    """The bounds by which pages are chosen are those of all keys, the new ones too."""
    model = tiny("llama").bfloat16()
    with attached(model):
        cache = FilledCache(model, 64, None, None, METHODS["quest"](budget=16, page=4, full_layers=0)).at(30)
        step = StepInParts(recognise(model, by_cache=True), 1)
        for place in range(30, 36):
            step(torch.tensor([[place]]), cache, torch.tensor([[place]]))
    for layer in cache.filled:
        (slab,) = layer.slabs
        pages = slab.keys_from(0).unflatten(2, (9, 4))
        assert slab.noted == 36 and torch.equal(slab.notes[0].view, torch.cat(pages.aminmax(dim=3), -1))
