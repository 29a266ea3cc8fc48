"""An accelerated model's decoding loop writes the tokens of transformers' loop, and draws from its distribution."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compress import load_model
from compress.kv import attach
from compress.recipe import parse_recipe
from kernels import native
from kernels.step.accelerate import accelerate
from kernels.step.writing import sampling, sampling_on_gpu

pytestmark = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended += 1


class OfOdd(StoppingCriteria):
    """A user's criterion: a sequence ends with its second odd token behind the prompt."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 12:] % 2).sum(1) >= 2


def prefers_next(input_ids, scores):
    """A user's processor, which changes the scores in place."""
    scores.scatter_add_(1, (input_ids[:, -1:] + 1) % scores.shape[1], torch.full((len(scores), 1), 0.5))
    return scores


REQUESTS = {
    "plain": {},
    "few tokens": {"max_new_tokens": 1},
    "end": {"eos_token_id": list(range(0, 96, 5)), "pad_token_id": 1},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "processor": {"logits_processor": LogitsProcessorList([prefers_next])},
    "criterion": {"stopping_criteria": [OfOdd()], "eos_token_id": 95},
    "beams": {"num_beams": 3},
    "returned": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "min_new_tokens": 4},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "without a cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 5},
    "static cache": {"cache_implementation": "static"},
}  # fmt: skip


SIMPLE = [name for name in REQUESTS if name not in ("plain", "end", "returned", "criterion")]


@torch.no_grad()
@pytest.mark.parametrize("request_name, batch, padded, cache", [
    *((name, 3, False, "") for name in REQUESTS if name in SIMPLE),
    *(pytest.param(name, batch, padded, "", marks=[pytest.mark.slow] * ((turn + at) % 3 > 0))
      for turn, name in enumerate(name for name in REQUESTS if name not in SIMPLE)
      for at, (batch, padded) in enumerate(((1, False), (3, True), (9, False)))),
    ("plain", 2, False, "snapkv(budget=8, observed=4)"), ("penalty", 2, True, "kv_int(bits=8)"),
])  # fmt: skip
def test_tokens_are_those_of_transformers_loop(tiny, request_name, batch, padded, cache):
    more = {"final_logit_softcapping": 3.0} if request_name == "plain" else {}
    model = accelerate(tiny("gemma2" if more else "llama", **more).bfloat16())
    if cache:
        attach(model, parse_recipe(cache))
    ids = (torch.arange(batch * 12) * 7919 % 96).view(batch, 12)
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    request = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **REQUESTS[request_name]}
    heard = Heard(), Heard()
    told = [{} if "num_beams" in request else {"streamer": one} for one in heard]
    found = model.generate(ids, attention_mask=mask, **request, **told[0])
    expected = type(model).generate(model, ids, attention_mask=mask, **request, **told[1])
    assert heard[0].tokens == heard[1].tokens and heard[0].ended == heard[1].ended
    if not request.get("return_dict_in_generate"):
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences) and type(found) is type(expected)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name) or (), getattr(expected, name) or ()
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@torch.no_grad()
def test_a_users_cache_goes_on_in_a_second_turn_and_grows(tiny):
    model = accelerate(tiny("llama", max_position_embeddings=1024).bfloat16())
    ids = torch.arange(12)[None] * 7919 % 96
    written = []
    for generate in (model.generate, type(model).generate.__get__(model)):
        cache, text = DynamicCache(config=model.config), ids
        for _ in range(2):
            text = generate(text, past_key_values=cache, max_new_tokens=280, do_sample=False, pad_token_id=0)
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, ids], 1)
        written.append(text)
    assert torch.equal(*written)


@torch.no_grad()
def test_an_interrupted_text_leaves_the_cache_right(tiny):
    model, cache = accelerate(tiny("llama").bfloat16()), DynamicCache()

    class Stops(Heard):
        def put(self, value):
            super().put(value)
            if len(self.tokens) > 5:
                raise KeyboardInterrupt

    ids = torch.arange(12)[None] * 7919 % 96
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, streamer=Stops())
    assert cache.get_seq_length() == cache.layers[0].keys.shape[2] == 12 + 4


@torch.no_grad()
def test_stop_strings_and_copies():
    model, tokenizer = load_model("tiny", dtype="bfloat16")
    accelerate(model)
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    text = tokenizer.decode(model.generate(ids, **how)[0, ids.shape[1] :])
    stops = {"stop_strings": text[len(text) // 2 :][:3], "tokenizer": tokenizer}
    for generate in (model.generate, copy.deepcopy(model).generate):
        expected = type(model).generate(model, ids, **how, **stops)
        assert torch.equal(generate(ids, **how, **stops), expected)
        assert torch.equal(generate(ids, **how, **stops, prompt_lookup_num_tokens=3), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, **how, stop_strings="x")
    model.acceleration.remove()
    assert "generate" not in vars(model)


WARPERS = {
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top-k": [TopKLogitsWarper(7)],
    "top-k beyond the vocabulary": [TopKLogitsWarper(5000)],
    "top-p": [TopPLogitsWarper(0.8)],
    "top-p of nearly all": [TopPLogitsWarper(0.9999)],
    "top-p of one": [TopPLogitsWarper(0.0)],
    "min-p": [MinPLogitsWarper(0.1)],
    "all": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    "some of many ties": [TopKLogitsWarper(20), TopPLogitsWarper(0.98)],
    "at least three": [TopPLogitsWarper(0.05, min_tokens_to_keep=3), MinPLogitsWarper(0.9, min_tokens_to_keep=3)],
    "penalty first": [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(9), TemperatureLogitsWarper(0.5)],
}  # fmt: skip


@pytest.mark.parametrize("grain", [0.0, 0.25, 20.0])  # logits in 16 bits are often equal; with 20 nearly all are
@pytest.mark.parametrize("warpers", WARPERS)
def test_the_distribution_is_that_of_transformers(warpers, grain):
    scores = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)) * 4
    scores = (scores / grain).round() * grain if grain else scores
    ids, processors = torch.arange(30).view(3, 10), LogitsProcessorList(WARPERS[warpers])
    expected = processors(ids, scores.clone()).softmax(-1)
    choice = sampling.choice_of(processors, True, False, False)
    assert len(choice.processors) == (warpers == "penalty first")
    left, tokens = sampling.warped(choice.processors(ids, scores.clone()), choice.warpers)
    found = left.softmax(-1)
    found = found if tokens is None else torch.zeros_like(scores).scatter_(1, tokens, found)
    weights = sampling_on_gpu.weights_of(choice.processors(ids, scores.clone()), choice.warpers)
    on_gpu = by_score(weights / weights.sum(-1, keepdim=True), choice.processors(ids, scores.clone()))
    assert torch.allclose(on_gpu, by_score(expected, choice.processors(ids, scores.clone())), atol=1e-5)
    # Of tokens with equal scores at its border, top-p keeps any: transformers' own choice depends on its sort.
    found, expected = found.sort(-1).values, expected.sort(-1).values
    assert torch.allclose(found, expected, atol=1e-6)


def by_score(probabilities, scores):
    """The probability of all tokens together that have the score of a token of a row: [rows, tokens]."""
    return (probabilities[:, None] * (scores[:, None] == scores[:, :, None])).sum(-1)


def one_by_one(probabilities):
    return torch.stack([sampling.drawn(probabilities)[:, 0] for _ in range(4000)])


def at_once_on_gpu(probabilities):
    return sampling_on_gpu.drawn_unread(probabilities.log().repeat(4000, 1), [])[0].view(4000, -1)


@pytest.mark.parametrize("drawn", [one_by_one, at_once_on_gpu])
def test_tokens_are_drawn_with_their_probabilities(drawn):
    torch.manual_seed(3)
    probabilities = torch.tensor([[0.0, 0.4, 0.0, 0.1, 0.3, 0.2, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    draws = drawn(probabilities)
    assert bool((draws[:, 1] == 3).all())
    seen = torch.bincount(draws[:, 0], minlength=7)
    expected = 4000 * probabilities[0]
    likely = expected > 0
    assert int(seen[~likely].sum()) == 0
    chi_squared = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    assert chi_squared < 16.3  # three degrees of freedom, p = 0.001


@pytest.mark.parametrize("warpers", ["penalty first", "all", "top-p", "min-p"])
def test_tokens_that_cannot_be_drawn_are_found(warpers):
    warpers = [one for one in WARPERS[warpers] if type(one) in sampling.WARPERS]
    for bad in (torch.full((9,), torch.nan), torch.full((9,), -torch.inf), torch.tensor([torch.nan, *range(8)])):
        scores = torch.stack([torch.arange(9.0), bad])
        with pytest.raises(ValueError, match="not finite"):
            sampling.drawn(sampling.warped(scores, warpers)[0].softmax(-1))
        tokens, finite = sampling_on_gpu.drawn_unread(scores, warpers)
        assert not finite and bool((tokens < 9).all()), "tokens that the next step can read"
    assert sampling_on_gpu.drawn_unread(scores[:1], warpers)[1]


@torch.no_grad()
def test_sampled_texts_repeat_with_their_seed(tiny):
    model = accelerate(tiny("llama").bfloat16())
    ids, texts = torch.arange(12)[None] * 7919 % 96, []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=20, do_sample=True, top_k=40, temperature=1.5, pad_token_id=0))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
