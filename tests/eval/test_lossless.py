"""Acceptance of a draft's guesses, and lossless speed, against a text that is verified token by token."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.record.metrics import better
from eval.record.reading import plain
from eval.record.rows import typed
from eval.speed import lossless
from eval.speed.lossless import AGAIN, KINDS, agreement, check_lossless, mean_accepted, measure_lossless
from kernels import native
from reports.page.lossless import context


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


def test_every_way_writes_the_same_text(tiny, tokenizer, monkeypatch):
    monkeypatch.setattr(lossless, "PASSAGE", "w1 w2 w3")
    monkeypatch.setattr(lossless, "KINDS", {kind: ("w1 w2 w3 w4 w1 w2 w3",) for kind in KINDS})
    model = tiny("llama")
    models = {"baseline": model, "near": noisy(model, 0.05), "far": noisy(model, 2.0)}
    made = measure_lossless(models, tokenizer, new_tokens=24, rounds=2)
    near, far = (made.record.drafts[name] for name in ("near", "far"))
    assert near.acceptance > far.acceptance and near.tokens == 3 * 24
    assert all(0 <= far.lengths[k] <= near.lengths[k] <= k for k in (1, 2, 4, 8))
    assert made.metrics["near"]["guess_acceptance"] == near.acceptance and better("guess_acceptance") == 1
    if native.why_not() is None and native.isa(torch.bfloat16) != "portable":
        ways = [(one.kind, one.way) for one in made.record.speeds]
        assert ways == [(kind, way) for kind in KINDS for way in ("plain", "look-up", "near", "far")]
        assert all(one.same and one.tokens_per_s > 0 and one.spread >= 0 for one in made.record.speeds)
        assert AGAIN not in {way for _, way in ways}
    run = typed({"lossless": plain(made.record)})
    assert run.lossless == made.record
    shown = context(run)
    assert [row[0] for row in shown["drafts"]] == ["near", "far"] and len(shown["speeds"]) == len(made.record.speeds)
    assert "near" in made._repr_html_() and context(typed({})) == {}


def test_measurements_that_cannot_be_made_are_refused(tiny, tokenizer):
    model = tiny("llama")
    for given, message in (
        ({"new_tokens": 1, "rounds": 1}, "`new_tokens` .=1. must be an integer from 2 to"),
        ({"new_tokens": 10**6, "rounds": 1}, "half of the model's positions"),
        ({"new_tokens": 8, "rounds": -1}, "`rounds` .=-1. must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            check_lossless(model, **given)
    with pytest.raises(ValueError, match="must have a 'baseline'"):
        measure_lossless({"compressed": model}, tokenizer)
