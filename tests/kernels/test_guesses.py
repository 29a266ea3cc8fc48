"""Guessed tokens change the time of a text and not the text, nor its distribution."""

import copy
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast

from kernels import native
from kernels.step.accelerate import Acceleration, StepsInOneCall, accelerate
from kernels.step.assemble import NativeStep
from kernels.step.writing.guesses import RETRY, ROUNDS, Draft, DraftPace, LookupOrDraft, Pace, PromptLookup
from tests.kernels.test_generate import REQUESTS, Heard

pytestmark = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)
IDS = torch.arange(1, 13)[None] * 7919 % 95 + 1  # without the padding token
HOW = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


class Counts(list):
    """Numbers of tokens of steps, the models, and the furthest position behind a token."""

    def __init__(self):
        super().__init__()
        self.models, self.furthest = [], 0

    def clear(self):
        super().clear()
        self.models.clear()


@pytest.fixture
def read(monkeypatch):
    """The number of tokens of each step."""
    counts, call = Counts(), StepsInOneCall.__call__

    def noted(self, tokens):
        counts.append(tokens.shape[1])
        counts.models.append(self._acceleration.model)
        counts.furthest = max(counts.furthest, self._slot + tokens.shape[1])
        return call(self, tokens)

    monkeypatch.setattr(StepsInOneCall, "__call__", noted)
    return counts


def guess_from(text: list[int], monkeypatch, wrong: int = 5) -> None:
    """Guesses are the following tokens of a text, every `wrong`-th of which is another token."""

    def guess(self, known, most, choice):
        self._guessed = 3, min(most, 7)
        self._pace.count(3, 0.5)
        return [
            token if (len(known) + i) % wrong else (token + 1) % 96 for i, token in enumerate(text[len(known) :][:7])
        ][:most]

    monkeypatch.setattr(PromptLookup, "guess", guess)


KNOWN = [name for name in REQUESTS if name not in ("beams", "hidden states", "without a cache", "static cache")]


@torch.no_grad()
@pytest.mark.parametrize("request_name", [*KNOWN, "limit of length"])
@pytest.mark.parametrize("architecture, more", [
    ("llama", {}), ("gemma2", {"final_logit_softcapping": 3.0}), ("mistral", {"sliding_window": 8})
])  # fmt: skip
def test_a_guessed_text_is_the_one_without_guesses(tiny, request_name, architecture, more, monkeypatch, read):
    model = accelerate(tiny(architecture, **more).bfloat16())
    request = HOW | REQUESTS.get(request_name, {"max_length": 23, "max_new_tokens": None})
    heard = Heard(), Heard()
    expected = model.generate(IDS, **request, streamer=heard[0])
    alone = len(read)
    returned = not isinstance(expected, torch.Tensor)
    text = (expected.sequences if returned else expected)[0].tolist()
    guess_from([*text, 1, 2, 3, 4, 5, 6, 7, 8, 9], monkeypatch)
    found = model.generate(IDS, **request, streamer=heard[1], prompt_lookup_num_tokens=8)
    assert heard[0].tokens == heard[1].tokens and heard[0].ended == heard[1].ended == 1
    assert alone < 2 or (max(read[alone:]) > 1 and len(read) - alone < alone)
    if (most := {"plain": 32, "limit of length": 23}.get(request_name)) is not None:  # a text may end before
        assert len(text) <= read.furthest + 1 <= most, "no step reads beyond the last token that may be written"
    if not returned:
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences) and type(found) is type(expected)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name) or (), getattr(expected, name) or ()
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert found.past_key_values.get_seq_length() == len(text) - 1
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@torch.no_grad()
def test_look_up_finds_repetitions_in_prompts_and_texts(tiny, monkeypatch, read):
    """Without any help, but for the times of steps: a random model soon repeats itself."""
    note = Pace.note
    monkeypatch.setattr(
        Pace,
        "note",
        lambda self, kind, guessed, accepted, seconds: note(self, kind, guessed, accepted, 1 + guessed / 9),
    )
    model = accelerate(tiny("llama").bfloat16())
    how = HOW | {"max_new_tokens": 200}
    expected = model.generate(IDS, **how)
    alone = len(read)
    for more in (
        {"prompt_lookup_num_tokens": 10},
        {"generation_config": GenerationConfig(**how, prompt_lookup_num_tokens=10, max_matching_ngram_size=2)},
    ):
        read.clear()
        assert torch.equal(model.generate(IDS, **({} if "generation_config" in more else how), **more), expected)
        assert sum(read) >= alone and len(read) < 0.8 * alone and max(read) <= 11
    model.generation_config.prompt_lookup_num_tokens = 4
    read.clear()
    assert torch.equal(model.generate(IDS, **how), expected) and 1 < max(read) <= 5


@torch.no_grad()
def test_a_users_cache_goes_on_in_a_second_turn_and_grows(tiny, monkeypatch):
    model, written = accelerate(tiny("llama", max_position_embeddings=1024).bfloat16()), []
    count = Pace.count

    def always(self, kind, likely, **how):
        return max(self.most, count(self, kind, likely, **how))

    for more in ({}, {"prompt_lookup_num_tokens": 15}):
        cache, text = DynamicCache(config=model.config), IDS
        for _ in range(2):
            text = model.generate(text, past_key_values=cache, **(HOW | {"max_new_tokens": 280}), **more)
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, IDS], 1)
        written.append(text)
        monkeypatch.setattr(Pace, "count", always)
    assert torch.equal(*written)


@torch.no_grad()
def test_an_interrupted_text_leaves_the_cache_right(tiny, monkeypatch):
    model, cache = accelerate(tiny("llama").bfloat16()), DynamicCache()
    guess_from(model.generate(IDS, **HOW)[0].tolist(), monkeypatch)

    class Stops(Heard):
        def put(self, value):
            super().put(value)
            if len(self.tokens) > 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(IDS, past_key_values=cache, **HOW, streamer=Stops(), prompt_lookup_num_tokens=8)
    assert cache.get_seq_length() == cache.layers[0].keys.shape[2] == 12 + 4


@torch.no_grad()
def test_sampling_draws_the_same_tokens_with_the_same_seed(tiny, monkeypatch, read):
    model = accelerate(tiny("llama").bfloat16())
    how, texts = HOW | {"do_sample": True, "top_k": 12, "temperature": 1.3}, []
    for more in ({}, {"prompt_lookup_num_tokens": 8}):
        torch.manual_seed(5)
        texts.append(model.generate(IDS, **how, **more))
        guess_from(texts[0][0].tolist(), monkeypatch)
    assert torch.equal(*texts) and max(read) > 3


@torch.no_grad()
def test_sampling_keeps_the_distribution(tiny, monkeypatch):
    """Pairs of tokens, the second of which is guessed: a chi-squared test with the model's own probabilities."""
    model = accelerate(tiny("llama").bfloat16())
    top, draws = 3, 1200

    def likely(ids):  # the model's tokens of top-k, and their probabilities
        values, tokens = model(ids, past_key_values=DynamicCache()).logits[0, -1].float().mul(0.2).topk(top)
        return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

    first = likely(IDS)
    second = {token: likely(torch.cat([IDS, torch.tensor([[token]])], 1)) for token in first}
    guessed = {token: list(second[token])[i % top] for i, token in enumerate(first)}  # more and less likely ones

    def guess(self, known, most, choice):
        self._guessed = 1, 1
        self._pace.count(1, 0.5)
        return [guessed[known[-1]]] if most else []

    monkeypatch.setattr(PromptLookup, "guess", guess)
    how = {"max_new_tokens": 3, "do_sample": True, "top_k": top, "temperature": 5.0, "pad_token_id": 0}
    seen = {(a, b): 0 for a in first for b in second[a]}
    for _ in range(draws):
        a, b = model.generate(IDS, **how, prompt_lookup_num_tokens=3)[0, 12:14].tolist()
        seen[a, b] += 1
    expected = {(a, b): draws * first[a] * second[a][b] for a, b in seen}
    assert min(expected.values()) > 20
    chi_squared = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in seen)
    assert chi_squared < 26.1  # eight degrees of freedom, p = 0.001


@torch.no_grad()
def test_requests_that_cannot_be_verified_are_those_of_transformers(tiny, monkeypatch, read):
    model = accelerate(tiny("llama").bfloat16())
    with pytest.raises(ValueError, match="batch_size"):
        model.generate(IDS.repeat(2, 1), **HOW, prompt_lookup_num_tokens=4)
    expected = type(model).generate(model, IDS, **HOW, prompt_lookup_num_tokens=4)
    monkeypatch.setattr(Acceleration, "verifies", lambda self: False)
    read.clear()
    assert torch.equal(model.generate(IDS, **HOW, prompt_lookup_num_tokens=4), expected) and not read


@pytest.mark.parametrize("settings, message", [
    ({"prompt_lookup_num_tokens": 0}, "`prompt_lookup_num_tokens` .=0. must be 1 or more, or None"),
    ({"prompt_lookup_num_tokens": -3}, "`prompt_lookup_num_tokens` .=-3. must be 1 or more"),
    ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 0}, "`max_matching_ngram_size` .=0. must be 1 or more"),
])  # fmt: skip
def test_look_ups_without_tokens_are_refused(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        accelerate(tiny("llama").bfloat16()).generate(IDS, **HOW, **settings)


def test_more_looked_up_tokens_than_a_step_verifies_give_a_warning(tiny):
    model = accelerate(tiny("llama").bfloat16())
    expected = model.generate(IDS, **HOW)
    with pytest.warns(
        UserWarning, match=r"`prompt_lookup_num_tokens` \(=1000000\) is more than the 15 guesses"
    ) as said:
        assert torch.equal(model.generate(IDS, **HOW, prompt_lookup_num_tokens=10**6), expected)
    assert [one.filename for one in said] == [__file__]


def of_folder(model: torch.nn.Module, folder: Path, words: list[str], added: str = "<pad>") -> torch.nn.Module:
    """The model, as it is loaded from a folder with a tokenizer of these words."""
    model.save_pretrained(folder)
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token=added).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.bfloat16)


def test_a_draft_with_another_tokenizer_is_refused(tiny, tmp_path):
    """Tokens are compared, if both models are from folders; what was added to a vocabulary may differ."""
    words = ["<pad>", *(f"w{i}" for i in range(1, 96))]
    model = accelerate(of_folder(tiny("llama"), tmp_path / "model", words))
    alike = of_folder(tiny("llama"), tmp_path / "alike", ["[PAD]", *words[1:]], "[PAD]")
    other = of_folder(tiny("llama"), tmp_path / "other", [*words[:5], "w6", "w5", *words[7:]])
    said = r"`{}` \(='.*other'\) has another tokenizer than the model \(='.*model'\): its token 5 is 'w6', .* 'w5'"
    with pytest.raises(ValueError, match=said.format("draft")):
        accelerate(model, draft=other)
    with pytest.raises(ValueError, match=said.format("assistant_model")):
        model.generate(IDS, **HOW, assistant_model=accelerate(other))
    expected = model.generate(IDS, **HOW)
    assert torch.equal(accelerate(model, draft=alike).generate(IDS, **HOW), expected)
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    assert accelerate(model, draft=other).acceleration.draft is other, "of which nothing is known"


def test_a_draft_without_positions_for_the_text_is_refused(tiny, monkeypatch):
    model, draft = accelerate(tiny("llama").bfloat16()), tiny("llama", max_position_embeddings=30).bfloat16()
    accelerate(model, draft=draft)
    monkeypatch.setattr(model, "_prefill", lambda *_, **__: pytest.fail("the prompt is read"))
    said = r"has `max_position_embeddings` \(=30\), and the text may get 32 tokens; .* or `max_new_tokens` at most 18"
    for more in ({}, {"assistant_model": draft}, {"assistant_model": draft, "prompt_lookup_num_tokens": 4}):
        with pytest.raises(ValueError, match=said):
            model.generate(IDS, **HOW, **more)
    with pytest.raises(ValueError, match="or the prompt shorter"):
        model.generate(IDS.repeat(1, 3), **HOW)
    monkeypatch.undo()
    assert model.generate(IDS, **HOW | {"max_new_tokens": 18}).shape[1] <= 30
    short = accelerate(tiny("llama", max_position_embeddings=30).bfloat16(), draft=draft)
    assert short.generate(IDS, **HOW).shape[1] <= 32, "where the model itself has no more, transformers warns"


def drafts(tiny, noise: float, monkeypatch, drafting: float = 0.2) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model, and another one that differs by so much noise. All steps take the same time, and a guess this share."""
    note = DraftPace.note
    monkeypatch.setattr(
        DraftPace, "note", lambda self, sure, accepted, *_: note(self, sure, accepted, 1.0, drafting * len(sure))
    )
    model = tiny("llama", max_position_embeddings=1024).bfloat16()
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        parameter.data += noise * parameter.std() * torch.randn_like(parameter)
    return accelerate(model), accelerate(draft)


@torch.no_grad()
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_a_draft_changes_no_text(tiny, noise, samples, monkeypatch, read):
    model, draft = drafts(tiny, noise, monkeypatch)
    how = (
        HOW
        | {"max_new_tokens": 300, "do_sample": samples, "eos_token_id": None}
        | ({"top_k": 20, "temperature": 0.7} if samples else {})
    )
    texts = []
    for more in ({}, {"assistant_model": draft}):
        read.clear()
        torch.manual_seed(3)
        texts.append(model.generate(IDS, **how, **more))
        steps = {one: sum(of is one for of in read.models) for one in (model, draft)}
        if not more:
            assert steps == {model: 299, draft: 0}
    assert torch.equal(*texts)
    # Rounding of the prompt is another one, which shows in draws from the flat distributions of random models.
    assert steps[model] < {(0.0, False): 40, (0.0, True): 120, (0.1, False): 290}.get((noise, samples), 300)
    if noise == 1.0:
        assert steps[draft] < 60, "it is left alone after a second trial"


@torch.no_grad()
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_look_up_and_a_draft_together_change_no_text(tiny, noise, samples, monkeypatch, read):
    """Both guess, in the second text as well; the draft reads in steps, or as a prompt, what it did not guess."""
    model, draft = drafts(tiny, noise, monkeypatch)
    note, has_read, looked_up, prompts = Pace.note, Draft._has_read, [], []

    def noted(self, kind, guessed, accepted, seconds):
        looked_up.append(guessed)
        note(self, kind, guessed, accepted, 1 + guessed / 9)

    def counted(self, text, most):
        prompts.append(len(text) - self._read)
        return has_read(self, text, most)

    monkeypatch.setattr(Pace, "note", noted)
    monkeypatch.setattr(Draft, "_has_read", counted)
    how = HOW | {"max_new_tokens": 300, "do_sample": samples, "eos_token_id": None}
    how |= {"top_k": 4, "temperature": 0.3} if samples else {}
    read_on, read_again = [], []
    for ids in (IDS, IDS.flip(1)):
        texts = []
        for more in ({}, {"assistant_model": draft, "prompt_lookup_num_tokens": 10}):
            for one in (read, looked_up, prompts):
                one.clear()
            torch.manual_seed(3)
            texts.append(model.generate(ids, **how, **more))
            pairs = list(zip(read, read.models, strict=True))
            steps = {one: [count for count, of in pairs if of is one] for one in (model, draft)}
        assert torch.equal(*texts) and len(steps[model]) < 299 and steps[draft]
        if not samples:
            assert max(looked_up) > 1 and len(steps[model]) < 200
        read_on, read_again = [*read_on, *steps[draft]], [*read_again, *prompts[1:]]
    assert 4 in read_on and read_again


@torch.no_grad()
def test_what_gains_more_guesses():
    """Look-up, where it has a match and its expected speed-up is above that of the draft, or is not known; else the
    draft."""
    asked = []

    class Fake:
        rollback, ended = 0.5, False

        def guess(self, text, most, choice):
            asked.append("draft")
            return [7]

        def note(self, accepted, seconds):
            asked.append(f"noted {accepted}")

    def both(pace):
        return LookupOrDraft(PromptLookup(10, 3, pace), Fake(), pace)

    pace, text = DraftPace(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    first = both(pace)
    assert first.guess(text, 20, None) == [7] and first.rollback == 0.5, "no times of steps are known"
    first.note(1, 1.0)
    assert asked == ["draft", "noted 1"]
    pace.alone.extend([1.0] * 3)
    second = both(pace)
    assert second.guess(text, 20, None)[:3] == [4, 5, 6] and second.rollback == 0.0
    second.note(0, 1.5)
    assert asked == ["draft", "noted 1"], "the draft did not guess"
    pace._rounds.extend([(3, 1.0)] * ROUNDS)  # a draft that makes texts three times as fast
    assert second.guess([*text, 1, 2, 3], 20, None) == [7]
    second._draft.ended = True
    assert len(second.guess([*text, 1, 2, 3, 1, 2, 3], 20, None)) > 0 and second.rollback == 0.0


@torch.no_grad()
@pytest.mark.parametrize("rollback", [0.05, 3.0])
def test_with_a_rollback_guesses_stay_on_which_the_model_loses_little(tiny, rollback, monkeypatch, read):
    """Every token is the model's own choice, or one on which it loses at most the limit; some are of the second kind."""
    model, draft = drafts(tiny, 0.3, monkeypatch)
    how = HOW | {"max_new_tokens": 200, "eos_token_id": None}
    model.lm_head.weight.data *= 15  # of a model that is surer of its tokens
    draft.lm_head.weight.data *= 15
    exact = accelerate(model, draft=draft).generate(IDS, **how)
    exact_steps = sum(one is model for one in read.models)
    read.clear()
    text = accelerate(model, draft=draft, rollback=rollback).generate(IDS, **how)
    steps = sum(one is model for one in read.models)
    cache = DynamicCache(config=model.config)
    rows = [model(IDS, past_key_values=cache, logits_to_keep=1).logits[0]]
    rows += [model(text[:, i : i + 1], past_key_values=cache).logits[0] for i in range(IDS.shape[1], text.shape[1] - 1)]
    scores = torch.cat(rows).float().log_softmax(-1)
    written = text[0, IDS.shape[1] :]
    losses = -scores[range(len(written)), written]
    others = scores.argmax(-1) != written
    assert (losses[others] <= rollback + 1e-3).all()
    if rollback == 3.0:
        assert others.any() and not torch.equal(text, exact) and steps < exact_steps
    how |= {"min_new_tokens": 30, "eos_token_id": exact[0, -8:].tolist(), "suppress_tokens": exact[0, -20:-16].tolist()}
    text = accelerate(model, draft=draft, rollback=1e9).generate(IDS, **how)[0, IDS.shape[1] :].tolist()
    assert set(text[:29]).isdisjoint(how["eos_token_id"]) and set(text).isdisjoint(how["suppress_tokens"]), "forbidden"
    how = HOW | {"max_new_tokens": 200, "eos_token_id": None}
    assert torch.equal(accelerate(model, draft=draft).generate(IDS, **how), exact), "exact again"
    with pytest.raises(ValueError, match=r"`rollback` \(=-1\) must be a loss"):
        accelerate(model, draft=draft, rollback=-1)


@torch.no_grad()
def test_a_draft_is_given_once(tiny, monkeypatch, read):
    model, draft = drafts(tiny, 0.0, monkeypatch)
    expected, alone = model.generate(IDS, **HOW), len(read)
    draft.acceleration.remove()
    assert accelerate(model, draft=draft) is model and model.acceleration.draft is draft
    read.clear()
    assert torch.equal(model.generate(IDS, **HOW), expected)
    assert sum(one is model for one in read.models) < alone and any(one is draft for one in read.models)
    read.clear()
    twice = IDS.repeat(2, 1)
    assert torch.equal(model.generate(twice, **HOW)[0], expected[0]) and draft not in read.models, "not for a batch"
    read.clear()
    assert torch.equal(copy.deepcopy(model).generate(IDS, **HOW), expected) and draft in read.models


@torch.no_grad()
@pytest.mark.parametrize("args, name", [((None,), "input_ids"), ((), "input_ids"), ((), "inputs")])
def test_no_draft_guesses_for_a_batch_however_it_is_given(tiny, args, name, monkeypatch, read):
    model, draft = drafts(tiny, 0.0, monkeypatch)
    twice = IDS.repeat(2, 1)
    expected = model.generate(twice, **HOW)
    accelerate(model, draft=draft)
    given = {name: twice} | ({} if args else {"inputs": None} if name == "input_ids" else {})
    assert torch.equal(model.generate(*args, **given, **HOW), expected) and draft not in read.models


@torch.no_grad()
def test_a_soft_cap_of_logits_is_computed_once_per_step(tiny, monkeypatch, read):
    model = accelerate(tiny("gemma2", final_logit_softcapping=3.0).bfloat16())
    text, capped, own = model.generate(IDS, **HOW)[0].tolist(), [], NativeStep.logits.fget
    guess_from([*text, *range(9)], monkeypatch)
    monkeypatch.setattr(NativeStep, "logits", property(lambda self: capped.append(self) or own(self)))
    assert model.acceleration.verifies()  # takes steps of its own, once
    read.clear()
    capped.clear()
    assert model.generate(IDS, **HOW, prompt_lookup_num_tokens=8)[0].tolist() == text
    assert max(read) > 1 and len(capped) == len(read)


@torch.no_grad()
def test_a_long_prompt_is_not_read_for_a_few_tokens(tiny, monkeypatch, read):
    model, draft = drafts(tiny, 0.0, monkeypatch)
    model.generate(IDS.repeat(1, 5), **HOW, assistant_model=draft)
    assert draft not in read.models


def test_drafts_that_cannot_guess_are_refused(tiny):
    model, other = accelerate(tiny("llama").bfloat16()), accelerate(tiny("llama", vocab_size=80).bfloat16())
    with pytest.raises(ValueError, match="`assistant_model` has a vocabulary of 80 tokens, the model one of 96"):
        model.generate(IDS, **HOW, assistant_model=other)
    with pytest.raises(ValueError, match="`draft` has a vocabulary of 80 tokens"):
        accelerate(model, draft=other)
    with pytest.raises(ValueError, match="`draft` is the model itself"):
        accelerate(model, draft=model)
    with pytest.raises(ValueError, match=r"`draft` \(Linear\) must be a model of transformers"):
        accelerate(model, draft=torch.nn.Linear(2, 2))
    assert model.acceleration.draft is None
    untouched = tiny("llama")
    with pytest.raises(ValueError, match="`draft` has a vocabulary of 80 tokens"):
        accelerate(untouched, draft=other)
    assert untouched.dtype == torch.float32 and not hasattr(untouched, "acceleration")


def test_a_draft_stays_when_the_model_gets_another_dtype(tiny):
    model, draft = tiny("llama"), tiny("llama")
    accelerate(model, torch.bfloat16, draft=draft)
    accelerate(model, torch.float16)
    assert model.acceleration.draft is draft and draft.dtype == model.dtype == torch.float16


def test_a_draft_that_is_not_used_is_named_with_the_reason(tiny, monkeypatch):
    model = accelerate(tiny("llama"))
    with pytest.warns(UserWarning, match="the draft is not used: it is not accelerated: ") as heard:
        accelerate(model, draft=tiny("gpt2", vocab_size=96))
    assert [one.filename for one in heard] == [__file__], "the line of the user"
    with pytest.warns(UserWarning, match="the model is not accelerated: ") as heard:
        accelerate(tiny("gpt2"))
    assert [one.filename for one in heard] == [__file__]
    draft = accelerate(tiny("llama"))
    draft.acceleration.why_not_in_one_call = "a format without loops"
    with pytest.warns(UserWarning, match="not used: the draft has no steps in one call of C.+: a format without loops"):
        accelerate(model, draft=draft)
    monkeypatch.setattr(Acceleration, "verifies", lambda self: False)
    with pytest.warns(UserWarning, match="several tokens in one step of the model do not get the logits"):
        accelerate(model, draft=accelerate(tiny("llama")))


def test_guesses_follow_the_last_of_the_longest_earlier_n_grams():
    generator, lookup, text = torch.Generator().manual_seed(0), PromptLookup(5), [1]
    lookup._pace.count = lambda kind, likely, **_: 5
    for length in range(1, 300):
        expected = []
        for size in (3, 2, 1):
            places = [at for at in range(size, length) if length >= size and text[at - size : at] == text[-size:]]
            if places:
                longer = list(text)
                for _ in range(5):
                    longer.append(longer[places[-1] + len(longer) - length])
                expected = longer[length:]
                break
        assert lookup.guess(copy.copy(text), 9, None) == expected
        text.append(int(torch.randint(4, (1,), generator=generator)))


def test_the_number_of_guesses_follows_acceptance_and_cost():
    def after(accepted: int, row: float, rounds: int = 40) -> Pace:
        """Steps in which so many of up to 15 guesses were accepted; every guessed token takes `row` of a step."""
        pace = Pace(15)
        for _ in range(rounds):
            pace.note(0, 0, 0, 0.01)
            if count := pace.count(3, 0.6):
                pace.note(3, count, min(accepted, count), 0.01 * (1 + row * count))
        return pace

    assert after(15, 0.02).count(3, 0.6) == 15
    assert 1 <= after(2, 0.1).count(3, 0.6) < 8
    off = after(0, 0.1, 200)
    counts = [off.count(3, 0.6) for _ in range(4 * RETRY)]
    assert set(counts) == {0, 1} and sum(counts) == 4, "it is tried again now and then"
    assert sum(after(1, 1.5, 200).count(3, 0.6) for _ in range(RETRY - 1)) <= RETRY, "a token takes more than a step"
    again = off
    for _ in range(60):  # the text begins to repeat itself
        if count := again.count(3, 0.6):
            again.note(3, count, count, 0.01 * (1 + 0.02 * count))
    for _ in range(10 * RETRY):
        if count := again.count(3, 0.6):
            again.note(3, count, count, 0.01 * (1 + 0.02 * count))
    assert again.count(3, 0.6) > 5


def test_a_slow_first_step_does_not_make_guesses_look_free():
    """A text whose guesses cost more than they gain is written almost as fast as without them."""
    generator, pace, seconds, written = random.Random(0), Pace(15), 0.0, 0
    for step in range(400):
        count, accepted = pace.count(3, 0.7), 0
        while accepted < count and generator.random() < 0.3:
            accepted += 1
        taken = (3 if step == 0 else 1) + 0.5 * count
        pace.note(3, count, accepted, taken)
        seconds, written = seconds + taken, written + 1 + accepted
    assert seconds / written < 1.1


def written_by(pace: DraftPace, right, tokens: int, drafting: float = 0.38, row: float = 0.03) -> float:
    """Tokens per time of a step, of a text whose guesses are right with a probability: right(sure), for a draft that is
    sure of most of its guesses."""
    generator, seconds, written = random.Random(0), 0.0, 0
    while written < tokens:
        sure, likely = [], 1.0
        if pace.begins():
            while len(sure) < 15 and (not sure or pace.goes_on(likely)):
                sure.append(generator.choice([0.99, 0.99, 0.95, 0.6, 0.2]))
                likely *= pace.rate(sure[-1])
        accepted = next((i for i, one in enumerate(sure) if generator.random() >= right(one)), len(sure))
        took = 1 + row * len(sure)
        pace.note(sure, accepted, took, drafting * len(sure))
        seconds, written = seconds + took + drafting * len(sure), written + accepted + 1
    return written / seconds


def test_a_draft_guesses_further_where_it_is_surer():
    """A draft whose step takes 0.38 of the model's: fixed numbers of guesses gain 1.1 to 1.2 there."""
    assert written_by(DraftPace(), lambda sure: 0.97 if sure > 0.9 else sure, 2000) > 1.3


def test_a_draft_that_does_not_gain_rests_longer_and_longer():
    pace = DraftPace()
    assert written_by(pace, lambda sure: 0.1, 4000) > 0.97
    before = written_by(pace, lambda sure: 0.1, 2000)
    assert before > 0.98
    assert written_by(pace, lambda sure: 0.98, 20000) > 1.3, "and guesses again where it does gain"


def test_a_prompt_is_read_where_the_text_may_save_more_time_than_that_takes():
    pace = DraftPace()
    pace.alone.extend([1.0] * 3)
    assert pace.worth_reading(100, 50) and not pace.worth_reading(100, 49), "nothing was measured"
    pace.note_reading(100, 10.0)
    assert pace.worth_reading(100, 50), "there were no rounds yet"
    for _ in range(ROUNDS):  # three tokens in the time of two steps
        pace.note([0.95] * 3, 2, 1.4, 0.6)
    assert pace.gain == pytest.approx(1.5) and pace.worth_reading(100, 31) and not pace.worth_reading(100, 29)
    for _ in range(ROUNDS):  # two in the time of two
        pace.note([0.95] * 3, 1, 1.4, 0.6)
    asked = [pace.worth_reading(100, 1000) for _ in range(2 * RETRY)]
    assert pace.gain == pytest.approx(1.0) and sum(asked) == 2, "it is tried again once in a while"


def test_a_draft_of_nan_is_not_sure():
    pace = DraftPace()
    assert pace.rate(float("nan")) == pace.rate(0.0)
    for _ in range(9):
        pace.note([], 0, 1.0, 0.0)
    pace.note([float("nan")], 0, 1.0, 0.4)
    assert pace.rate(float("nan")) < pace.rate(0.4)
