"""Acceptance of a draft's guesses, and lossless speed, against a text that is verified token by token."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.record.measured import GuessingSpeed, Lossless
from eval.record.metrics import better
from eval.record.reading import plain
from eval.record.rows import typed
from eval.speed import lossless
from eval.speed.lossless import (
    AGAIN,
    KINDS,
    agreement,
    check_lossless,
    lossless_speed_ups,
    mean_accepted,
    measure_lossless,
)
from eval.writing.generation import encode_prompt
from kernels import native
from kernels.step.accelerate import accelerate
from kernels.step.writing.guesses import Draft, Pace
from kernels.support.deploy import deployed
from kernels.support.positions import positions
from reports.page.lossless import context
from reports.page.render import page

needs_steps = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)


@pytest.fixture
def tokenizer():
    """96 words, one a token, as the tiny models have."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w7"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def noisy(model: torch.nn.Module, noise: float) -> torch.nn.Module:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += noise * parameter.std() * torch.randn_like(parameter)
    return other


@torch.no_grad()
@pytest.mark.parametrize("guesses", [1, 3, 8])
def test_accepted_guesses_are_those_of_a_draft_that_guesses(tiny, guesses):
    """Of a real draft, whose guesses go on from its own guesses, not from the text."""
    model = tiny("llama")
    draft, ids = noisy(model, 0.1), torch.arange(1, 9)[None]
    text = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None)[0, 8:].tolist()
    agreed = agreement(draft, ids, text)
    accepted, steps, at = 0, 0, 0
    while at < 60:
        known = torch.cat([ids, torch.tensor([text[:at]], dtype=torch.int64)], 1)
        guessed = draft.generate(known, max_new_tokens=guesses, do_sample=False, eos_token_id=None)[0, known.shape[1] :]
        right = 0
        while right < guesses and at + right < 60 and int(guessed[right]) == text[at + right]:
            right += 1
        accepted, steps, at = accepted + right, steps + 1, at + right + 1
    assert 0.2 < sum(agreed) / 60 < 1
    assert mean_accepted(agreed, guesses) == pytest.approx(accepted / steps)


@needs_steps
@torch.no_grad()
def test_an_accelerated_draft_reads_texts_in_its_own_passes(tiny, monkeypatch):
    model = tiny("llama").bfloat16()
    draft, ids = accelerate(copy.deepcopy(model)), torch.arange(1, 40)[None]
    text = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 39:].tolist()
    expected = agreement(model, ids, text)
    agreement(draft, ids, text)  # assembles its passes, and compares them with transformers'
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("transformers' own pass"))
    assert sum(a == b for a, b in zip(agreement(draft, ids, text), expected, strict=True)) >= 18, "but for rounding"


@pytest.fixture
def short_prompts(monkeypatch):
    monkeypatch.setattr(lossless, "undisturbed", nullcontext)  # these times are not looked at
    monkeypatch.setattr(lossless, "KINDS", {kind: ("w1 w2 w3 w4 w1 w2 w3",) for kind in KINDS})


def test_every_way_writes_the_same_text(tiny, tokenizer, short_prompts):
    model = tiny("llama")
    models = {"baseline": model, "near": noisy(model, 0.05), "far": noisy(model, 2.0)}
    made = measure_lossless(models, tokenizer, guess_tokens=24, speed_rounds=2)
    near, far = (made.record.drafts[name] for name in ("near", "far"))
    assert near.acceptance > far.acceptance and near.tokens == 3 * 23, "the pass over the prompt gives the first"
    assert all(0 <= far.lengths[k] <= near.lengths[k] <= k for k in (1, 2, 4, 8))
    assert made.metrics["near"]["guess_acceptance"] == near.acceptance and better("guess_acceptance") == 1
    if native.why_not() is None and native.isa(torch.bfloat16) != "portable":
        ways = [(one.kind, one.way) for one in made.record.speeds]
        both = ("look-up and near", "look-up and far")
        assert ways == [(kind, way) for kind in KINDS for way in ("plain", "look-up", "near", "far", *both)]
        assert all(one.same and one.tokens_per_s > 0 and one.spread >= 0 for one in made.record.speeds)
        assert AGAIN not in {way for _, way in ways}
        speeds = {one.way: one for one in made.record.speeds}
        assert speeds["plain"].guessed is None and speeds["look-up"].guessed >= 0
    run = typed({"lossless": plain(made.record)})
    assert run.lossless == made.record
    shown = context(run)
    assert [row[0] for row in shown["drafts"]] == ["near", "far"] and len(shown["speeds"]) == len(made.record.speeds)
    assert "near" in made._repr_html_() and context(typed({})) == {}


@needs_steps
def test_approximate_texts_stand_beside_their_loss(tiny, tokenizer, short_prompts):
    model = tiny("llama")
    models = {"baseline": model, "near": noisy(model, 0.05)}
    record = measure_lossless(models, tokenizer, guess_tokens=24, speed_rounds=1, rollback=50.0).record
    rows = [one for one in record.speeds if one.kind == "editing"]
    ways = ("plain", "look-up", "near", "look-up and near")
    assert [(one.way, one.rollback) for one in rows] == [*((way, 0) for way in ways), ("near", 50.0)]
    assert all(one.same and one.loss is None for one in rows[:4])
    half = accelerate(deployed(model))
    ids = encode_prompt(tokenizer, "w1 w2 w3 w4 w1 w2 w3")
    text = half.generate(ids, max_new_tokens=24, do_sample=False)
    own = half(text[:, :-1]).logits[0, ids.shape[1] - 1 :].float().log_softmax(-1)
    wanted = -own[range(24), text[0, ids.shape[1] :]].mean()
    assert rows[4].plain_loss == pytest.approx(float(wanted), rel=0.02) and rows[4].loss > 0
    run = typed({"lossless": plain(record)})
    assert run.lossless == record
    assert sum(row[1].startswith("near, rollback 50") for row in context(run)["speeds"]) == len(KINDS)
    assert "texts are approximate" in page({"lossless": plain(record)})
    with pytest.raises(ValueError, match="`rollback` .=-2. must be a loss"):
        measure_lossless(models, tokenizer, guess_tokens=24, rollback=-2)


@needs_steps
def test_guesses_are_counted_and_a_way_without_any_is_marked(tiny, tokenizer, short_prompts, monkeypatch):
    monkeypatch.setattr(Pace, "measured", True)
    monkeypatch.setattr(Pace, "count", lambda self, kind, *_, **__: self._rates.setdefault(kind, [1.0, 1.0]) and 2)
    model = tiny("llama")
    models = {"baseline": model, "near": noisy(model, 0.05)}
    monkeypatch.setattr(Draft, "_has_read", lambda self, text, most: False)  # as with a prompt that is too long
    record = measure_lossless(models, tokenizer, guess_tokens=24, speed_rounds=1).record
    counts = {way: [one.guessed for one in record.speeds if one.way == way] for way in ("plain", "look-up", "near")}
    assert counts["near"] == [0] * len(KINDS) and min(counts["look-up"]) > 0 and counts["plain"] == [None] * len(KINDS)
    run = typed({"lossless": plain(record)})
    assert run.lossless == record
    shown = [row[1] for row in context(run)["speeds"]]
    assert shown == ["plain", "look-up", "near (did not guess)", "look-up and near"] * len(KINDS)
    assert "near (did not guess)" in lossless.Guessing(record)._repr_html_()
    earlier = plain(record)
    for one in earlier["speeds"]:
        del one["guessed"]
    assert "near" in [row[1] for row in context(typed({"lossless": earlier}))["speeds"]], "not known"


@needs_steps
def test_drafts_without_verifying_steps_are_not_timed_and_named(tiny, tokenizer, short_prompts):
    models = {"baseline": tiny("llama"), "near": tiny("llama"), "other": tiny("gpt2", vocab_size=96)}
    with pytest.warns(UserWarning, match="the model is not accelerated"):
        record = measure_lossless(models, tokenizer, guess_tokens=8, speed_rounds=1).record
    assert set(record.drafts) == {"near", "other"} and {one.way for one in record.speeds} == {
        "plain",
        "look-up",
        "near",
        "look-up and near",
    }
    why_not = context(typed({"lossless": plain(record)}))["why_not"]
    assert "other was not timed: the draft is not accelerated on a CPU: " in why_not, "with the reason"


@needs_steps
def test_the_speed_up_by_a_draft_is_the_ratio_of_times(tiny, monkeypatch):
    model, now, made = tiny("llama"), [0.0], []
    drafts = {"near": noisy(model, 0.01), "plain again": noisy(model, 2.0), "other": tiny("gpt2", vocab_size=96)}
    with pytest.warns(UserWarning, match="the model is not accelerated"):
        monkeypatch.setattr(lossless, "accelerate", lambda one: made.append(accelerate(one)) or made[-1])
        monkeypatch.setattr(lossless, "undisturbed", nullcontext)
        prompts = [torch.arange(1, 9)[None], torch.arange(20, 29)[None]]
        found, refused = lossless_speed_ups(model, drafts, prompts, new_tokens=8, rounds=2)
    assert set(found) == {"near", "plain again"} and refused[0].startswith("other: the draft is not accelerated")
    assert all(one["lossless_speed_up"] > 0 and one["lossless_speed_up_stderr"] >= 0 for one in found.values())

    def takes(original, ids, new_tokens, look_up=None):  # of the second drafts that are made below
        now[0] += {None: 6.0, made[5]: 3.0, made[6]: 12.0}.get(original.acceleration.draft, 1.0)
        return [7] * new_tokens

    monkeypatch.setattr(lossless, "_text", takes)
    monkeypatch.setattr(lossless.time, "perf_counter", lambda: now[0])
    drafts.pop("other")
    found, refused = lossless_speed_ups(model, drafts, prompts, new_tokens=8, rounds=2)
    assert {name: own["lossless_speed_up"] for name, own in found.items()} == {"near": 2.0, "plain again": 0.5}
    assert not refused and found["near"]["lossless_speed_up_stderr"] == 0


def test_texts_end_at_the_first_end_token(tiny, tokenizer, short_prompts):
    model = tiny("llama")
    whole = lossless._text(accelerate(deployed(model)), encode_prompt(tokenizer, "w1 w2 w3 w4 w1 w2 w3"), 24)
    model.generation_config.eos_token_id = whole[9]
    upto = whole.index(whole[9]) + 1
    models = {"baseline": model, "near": noisy(model, 0.05)}
    record = measure_lossless(models, tokenizer, guess_tokens=24, speed_rounds=1).record
    assert record.drafts["near"].tokens == len(KINDS) * (upto - 1) and all(one.same for one in record.speeds)
    model.generation_config.eos_token_id = whole[0]
    record = measure_lossless(models, tokenizer, guess_tokens=24, speed_rounds=0).record
    assert record.drafts["near"].acceptance is None, "no text has a second token"


def test_measurements_that_cannot_be_made_are_refused(tiny, tokenizer, short_prompts, monkeypatch):
    model, right = tiny("llama"), {"guess_tokens": 8, "speed_rounds": 1}
    most = positions(model) - encode_prompt(tokenizer, "w1 w2 w3 w4 w1 w2 w3").shape[1]
    check_lossless(model, tokenizer, **right | {"guess_tokens": most, "drafts": ["compressed", "x"]})
    check_lossless(model, None, **right | {"guess_tokens": positions(model)})  # prompts are not known
    with pytest.raises(ValueError, match="`guess_tokens` .*model's 128 positions"):
        check_lossless(model, None, **right | {"guess_tokens": positions(model) + 1})
    short = tiny("llama", max_position_embeddings=16)
    with pytest.raises(ValueError, match="`guess_tokens` .=24. must be an integer from 2 to 9"):
        measure_lossless({"baseline": model, "short": short}, tokenizer, guess_tokens=24)
    for given, message in (
        ({"guess_tokens": 1}, f"`guess_tokens` .=1. must be an integer from 2 to {most}, the model's positions behind"),
        ({"guess_tokens": most + 1}, "`guess_tokens` .=.*longest prompt of 7 tokens"),
        ({"speed_rounds": -1}, "`speed_rounds` .=-1. must be a positive integer"),
        ({"drafts": ["compressed", "look-up"]}, "`compare` names a draft 'look-up'; every name is allowed but"),
        ({"drafts": ["plain again"]}, "`compare` names a draft 'plain again'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_lossless(model, tokenizer, **right | given)
    with pytest.raises(ValueError, match="must have a 'baseline'"):
        measure_lossless({"compressed": model}, tokenizer)
    monkeypatch.setattr(lossless, "KINDS", {"free text": (" ".join(["w1"] * positions(model)),)})
    with pytest.raises(ValueError, match="the model has 128 positions, too few for guesses to be measured"):
        check_lossless(model, tokenizer, **right)


def test_a_page_does_not_say_that_texts_are_the_same_where_they_differ():
    for same in (True, False):
        speeds = (
            GuessingSpeed("editing", "plain", 9.0, 1.0, 0.1, True),
            GuessingSpeed("editing", "x", 9.0, 1.0, 0.1, same),
        )
        html = page({"lossless": plain(Lossless(8, 1, {}, speeds))})
        assert ("its text stays the same" in html) is same and ("Texts differ from plain" in html) is not same
