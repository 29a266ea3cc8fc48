"""Texts side by side: chance that is shared, settings that are not, ends of texts, and means done by hand."""

import copy
import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from compress import METHODS
from compress.kv import attach, attached, detach
from eval.record.measured import Generation, GenerationSettings
from eval.record.reading import plain
from eval.record.reading import row as row_of
from eval.writing.free_running import repetition
from eval.writing.generation import end_tokens, generate_samples, settings_aside, write
from eval.writing.generation_sweep import (
    FILE,
    SWEEP_PROMPTS,
    GeneratedText,
    Generations,
    SharedChance,
    check_generations,
    compare_generations,
    gumbel,
)

PROMPTS = ("w7 w8 w9", "w20 w21 w22 w23 w24", "w40 w3")


@pytest.fixture
def tokenizer():
    """96 words, one a token, as the tiny models have; no pad token, no template."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def endless(tiny):
    """A tiny model, and another one, that write on until they are cut."""

    def make(architecture="llama", **more):
        model = tiny(architecture, **more)
        model.generation_config = GenerationConfig()
        return model

    return make


def by_hand(model, prompt_ids, steps, prompt=None, seed=None, temperature=None):
    """Token by token, without a cache, without `generate`."""
    ids = list(prompt_ids)
    for step in range(steps):
        scores = model(torch.tensor([ids])).logits[0, -1].float()
        if seed is not None:
            scores = scores / temperature + gumbel(prompt, seed, step, 96)
        ids.append(int(scores.argmax()))
    return ids[len(prompt_ids) :]


def tokens_of(made, model, temperature, prompt=None):
    return [
        g.tokens
        for g in made.written
        if (g.model, g.temperature) == (model, temperature) and prompt in (None, g.prompt)
    ]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
def test_texts_are_those_of_a_plain_loop(endless, tokenizer, architecture):
    model = endless(architecture)
    made = compare_generations({"baseline": model}, tokenizer, PROMPTS, temperatures=[0.7, 1], new_tokens=6, seeds=2)
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        assert tokens_of(made, "baseline", 0.0, prompt) == [by_hand(model, ids, 6)]
        for t in (0.7, 1.0):
            assert tokens_of(made, "baseline", t, prompt) == [
                by_hand(model, ids, 6, prompt, seed, t) for seed in (0, 1)
            ]
    sampled = tokens_of(made, "baseline", 1.0)
    assert len({tuple(tokens) for tokens in sampled}) == len(sampled) == 6, "each prompt and seed has its own chance"
    assert all(g.text == " ".join(f"w{t}" for t in g.tokens) and not g.ended for g in made.written)


def test_gumbel_is_gumbel_and_depends_on_prompt_seed_and_step_alone():
    one = gumbel("a", 0, 0, 200_000).double()
    assert one.mean() == pytest.approx(0.57722, abs=0.02) and one.var() == pytest.approx(math.pi**2 / 6, rel=0.03)
    torch.manual_seed(5)
    assert torch.equal(one, gumbel("a", 0, 0, 200_000).double()) and one.isfinite().all()
    for other in (gumbel("b", 0, 0, 100), gumbel("a", 1, 0, 100), gumbel("a", 0, 1, 100)):
        assert not torch.isin(other, one[:100].float()).any()
    assert gumbel("a", 0, 0, 3).tolist() == pytest.approx([1.21993983, 0.92535567, 0.27414563], rel=1e-6), (
        "records of other machines have these"
    )


def draws(logits, temperature, n=4000):
    """The token that a step's scores give, for n seeds."""
    chance = SharedChance("p", range(n), temperature, start=4)
    return chance(torch.zeros(n, 4, dtype=torch.long), logits.expand(n, -1)).argmax(-1)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_samples_and_two_models_differ_as_their_distributions_do(temperature):
    n = 4000
    a, noise = torch.randn(2, 50)
    b = a + 0.3 * noise
    p, q = ((x / temperature).softmax(-1) for x in (a, b))
    first, second = draws(a, temperature), draws(b, temperature)
    for drawn, wanted in ((first, p), (second, q)):
        counts = torch.bincount(drawn, minlength=50)
        assert ((counts - n * wanted) ** 2 / (n * wanted)).sum() < 49 + 5 * 98**0.5, (
            "chi squared, 49 degrees of freedom"
        )
    tv = 0.5 * (p - q).abs().sum().item()
    differ, error = (first != second).double().mean().item(), 4 * (0.25 / n) ** 0.5
    assert 0.02 < tv - error < differ < 2 * tv / (1 + tv) + error < 1 - (p * q).sum().item() - error, (
        "less than by chance of one's own"
    )
    assert torch.equal(first, draws(a.clone(), temperature))


def test_cold_samples_are_greedy_and_the_same_model_never_differs(endless, tokenizer):
    model = endless()
    models = {"baseline": model, "twin": copy.deepcopy(model), "other": endless(seed=3)}
    made = compare_generations(models, tokenizer, PROMPTS, temperatures=[0.01, 1.5], new_tokens=8, seeds=3)
    assert tokens_of(made, "baseline", 0.01) == [t for t in tokens_of(made, "baseline", 0.0) for _ in range(3)]
    rows = {(row.model, row.temperature): row for row in made.rows()}
    assert list(rows) == [(m, t) for t in (0.0, 0.01, 1.5) for m in models]
    for t in (0.0, 0.01, 1.5):
        assert rows["twin", t].same_share == 1 and rows["twin", t].first_difference == 8 == rows["twin", t].length
        assert rows["other", t].same_share == 0 and rows["other", t].first_difference < 4
        assert rows["baseline", t].same_share is None is rows["baseline", t].first_difference
        assert rows["twin", t].n == (9 if t else 3)


def test_settings_of_the_models_own_are_set_aside_and_told(endless, tokenizer):
    plain, willful = endless(), endless()
    usual = by_hand(plain, tokenizer(PROMPTS[0]).input_ids, 6)
    own = {
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": usual,
        "min_new_tokens": 5,
        "do_sample": True,
        "temperature": 9.0,
        "num_beams": 1,
        "max_length": 4,
    }
    willful.generation_config = GenerationConfig(**own)
    kept = willful.generation_config
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    obeyed = willful.generate(ids, max_new_tokens=6, do_sample=False, num_beams=1)[0, ids.shape[1] :].tolist()
    assert obeyed != usual, "they do change what `generate` writes by itself"
    made = compare_generations(
        {"baseline": plain, "willful": willful}, tokenizer, PROMPTS, temperatures=[1.0], new_tokens=6
    )
    assert all(row.same_share == 1 for row in made.rows() if row.model == "willful")
    (sample, *_) = generate_samples({"baseline": plain, "willful": willful}, tokenizer, PROMPTS, new_tokens=6)
    assert sample.first_difference == {"willful": None}
    assert willful.generation_config is kept and settings_aside(plain) == {} == made.settings.aside["baseline"]
    told = made.settings.aside["willful"]
    assert {
        name: told[name] for name in ("repetition_penalty", "suppress_tokens", "min_new_tokens", "temperature")
    } == {name: own[name] for name in ("repetition_penalty", "suppress_tokens", "min_new_tokens", "temperature")}
    with pytest.raises(IndexError):
        write(willful, torch.tensor([[1000]]), ends=[], new_tokens=2)
    assert willful.generation_config is kept, "after an error too"


def test_texts_end_where_the_baselines_end_tokens_say(endless, tokenizer):
    """Several end tokens, rows of a batch that end at different times, no pad token anywhere."""
    model = endless()
    without = compare_generations({"baseline": model}, tokenizer, PROMPTS, temperatures=[1.0], new_tokens=12, seeds=4)
    ends = [tokens_of(without, "baseline", 1.0)[0][5], tokens_of(without, "baseline", 1.0)[1][2]]
    model.generation_config.eos_token_id = ends
    other = endless(seed=3)  # has no end token of its own
    models = {"baseline": model, "twin": copy.deepcopy(model), "other": other}
    made = compare_generations(models, tokenizer, PROMPTS, temperatures=[1.0], new_tokens=12, seeds=4)
    assert list(made.settings.end_tokens) == ends == end_tokens(model, tokenizer)
    before = [g.tokens for g in without.written]
    after = [g for g in made.written if g.model == "baseline"]
    for full, g in zip(before, after, strict=True):
        at = next((i for i, token in enumerate(full) if token in ends), None)
        assert (g.tokens, g.ended) == (full[:at], at is not None)
    assert len({len(g.tokens) for g in after}) > 2 and {g.ended for g in after} == {True, False}
    assert not any(set(g.tokens) & set(ends) for g in made.written) and any(
        g.ended for g in made.written if g.model == "other"
    )
    assert all(g.first_difference is None for g in made.written if g.model == "twin")
    tokenizer.eos_token = "w11"
    assert end_tokens(other, tokenizer) == [11], "the tokenizer's, where the model has none"


def test_templates_of_chats_are_used(endless, tokenizer):
    model = endless()
    tokenizer.chat_template = "w5 {{ messages[0]['content'] }} w6{% if add_generation_prompt %} w2{% endif %}"
    made = compare_generations({"baseline": model}, tokenizer, PROMPTS, new_tokens=4)
    assert tokens_of(made, "baseline", 0.0, PROMPTS[0]) == [by_hand(model, [5, 7, 8, 9, 6, 2], 4)]
    assert made.settings.chat is True and made.settings.seeds == 3 and len(made.written) == 3


def test_compressed_caches_that_are_attached_are_what_is_measured(endless, tokenizer):
    long = [" ".join(f"w{(i * k) % 96}" for i in range(40)) for k in (5, 7)]
    plain, model = endless(), endless()
    model.generation_config.cache_implementation = "static"  # would leave an attached cache out
    models = {"baseline": plain, "compressed": model}
    attach(model, [METHODS["knorm"](budget=1.0)])
    whole = compare_generations(models, tokenizer, long, temperatures=[1.0], new_tokens=6, seeds=2)
    assert all(row.same_share == 1 for row in whole.rows() if row.model == "compressed")
    detach(model)
    with attached(model, [METHODS["knorm"](budget=2)]):
        made = compare_generations(models, tokenizer, long, temperatures=[1.0], new_tokens=6, seeds=2)
        ids = tokenizer(long[0], return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation=None)[0, 40:].tolist()
    assert tokens_of(made, "compressed", 0.0, long[0]) == [alone]
    assert all(row.same_share < 1 for row in made.rows() if row.model == "compressed")
    assert [g for g in made.written if g.model == "baseline"] == [g for g in whole.written if g.model == "baseline"]


@pytest.fixture
def written():
    """Two prompts, two seeds, one of which is cut; by hand."""
    dtypes = {"baseline": "float32", "<b>": "bfloat16"}
    settings = GenerationSettings(8, prompts=2, seeds=2, temperatures=(0.5,), dtype=dtypes)
    made = Generations(settings)
    base = {"p": [[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3]], "q": [[5, 6, 7, 8, 9, 10], [5] * 7]}
    other = {"p": [(0, [9, 9, 9, 9, 9, 9]), (None, [1, 2, 3])], "q": [(4, [5, 6, 7, 8]), (7, [5] * 8)]}
    for prompt in "pq":
        for seed, tokens in enumerate(base[prompt]):
            made.written.append(
                GeneratedText(
                    "baseline", prompt, 0.5, seed, tokens, len(tokens) < 8, "<script>", None, repetition(tokens)
                )
            )
        for seed, (at, tokens) in enumerate(other[prompt]):
            made.written.append(
                GeneratedText("<b>", prompt, 0.5, seed, tokens, len(tokens) < 8, "a\u2028b\nc", at, repetition(tokens))
            )
    return made


def test_repetition_is_the_share_of_runs_of_four_seen_before():
    assert repetition([1, 2, 3]) is None and repetition([1, 2, 3, 4]) == 0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5) and repetition([5] * 7) == pytest.approx(3 / 4)


def test_means_and_their_standard_errors_by_hand(written):
    rows = {(r.model, r.temperature): r for r in written.rows()}
    other, base = rows["<b>", 0.5], rows["baseline", 0.5]
    assert other.n == 4 and other.first_difference == pytest.approx((0 + 3 + 4 + 7) / 4)
    assert other.first_difference_stderr == pytest.approx(math.sqrt(((3 - 7) ** 2 + (11 - 7) ** 2) * 2) / 4), (
        "by prompts"
    )
    assert other.same_share == 0.25 and other.length == (6 + 3 + 4 + 8) / 4 and other.ended_share == 0.75
    assert base.repetition == pytest.approx((1 / 5 + 0 + 3 / 4) / 3), "three tokens have no run of four"
    assert base.ended_share == 0.75 and base.first_difference is None is base.first_difference_stderr
    greedy = rows["baseline", 0.0]
    assert greedy.n == 0 and greedy.length is None, "nothing was written greedily here"
    assert (
        written.metrics["<b>"]["first_difference_tokens_t0.5"] == 3.5
        and "length_tokens_t0.5_stderr" in written.metrics["<b>"]
    )
    assert set(written.metrics["baseline"]) == {
        f"{m}_t0.5{end}" for m in ("length_tokens", "repetition_share", "ended_share") for end in ("", "_stderr")
    }
    written.written = [g for g in written.written if g.prompt == "p"]
    assert written.rows()[3].length_stderr is None, "one prompt has no spread"


def test_texts_in_the_record_and_in_its_file(written, tmp_path):
    found = json.loads(json.dumps(plain(written.found()), allow_nan=False))
    assert row_of(Generation, found) == written.found() and found["file"] == "", "no link to what is not there"
    assert [(s["prompt"], s["seed"]) for s in found["samples"]] == [("p", 0), ("q", 0), ("p", 1), ("q", 1)]
    assert found["samples"][0]["texts"] == {"baseline": "<script>", "<b>": "a\u2028b\nc"}
    assert found["samples"][0]["first_difference"] == {"<b>": 0} and found["samples"][2]["first_difference"] == {
        "<b>": None
    }
    path = written.save(tmp_path)
    assert path == tmp_path / FILE and written.found().file == FILE
    lines = path.read_text().splitlines()
    assert [GeneratedText(**json.loads(line)) for line in lines] == written.written
    written.written *= 10
    for i, one in enumerate(written.written):
        written.written[i] = GeneratedText(**{**vars(one), "prompt": f"{one.prompt}{i // 8}"})
    assert len(written.found().samples) == 12
    assert "<b>" not in written._repr_html_() and "&lt;b&gt;" in written._repr_html_()


def test_dtypes_are_each_models_own(endless, tokenizer):
    models = {"baseline": endless(), "half": endless().bfloat16()}
    made = compare_generations(models, tokenizer, PROMPTS[:1], new_tokens=2)
    assert made.settings.dtype == {"baseline": "float32", "half": "bfloat16"} and made.settings.prompts == 1
    assert made.settings.device == {"baseline": "cpu", "half": "cpu"} and made.settings.temperatures == ()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"new_tokens": 0}, r"`new_tokens` \(=0\)"),
        ({"seeds": True}, r"`seeds` \(=True\)"),
        ({"prompts": []}, "`prompts`"),
        ({"prompts": "w7"}, "a list of texts"),
        ({"prompts": ["w7", " "]}, "none of them empty"),
        ({"prompts": ["w7", "w8", "w7"]}, "'w7' twice"),
        ({"temperatures": [0.5, 0]}, r"which 0 is not; greedy, the temperature 0, is always done"),
        ({"temperatures": [float("nan")]}, "`temperatures`"),
        ({"temperatures": [math.inf]}, "`temperatures`"),
        ({"temperatures": ["1"]}, "which '1' is not"),
        ({"temperatures": [1, 1.0]}, "one twice"),
        ({"temperatures": [-1]}, "-1 is not"),
        (
            {"prompts": ["w7 " * 100], "new_tokens": 30},
            r"`new_tokens` \(=30\) after a prompt of 100 tokens .* 128 positions; 28 works",
        ),
    ],
)
def test_bad_arguments_of_generation_are_refused_before_any_work(endless, tokenizer, asked, message, monkeypatch):
    model = endless()
    monkeypatch.setattr(model, "generate", None)
    with pytest.raises(ValueError, match=message):
        check_generations(model, tokenizer, **{"prompts": PROMPTS, **asked})
    with pytest.raises(ValueError, match=message):
        compare_generations({"baseline": endless(), "x": model}, tokenizer, **{"prompts": PROMPTS, **asked})


def test_models_that_cannot_be_compared(endless, tokenizer):
    check_generations(endless(), tokenizer, PROMPTS, temperatures=(0.3, 1))
    with pytest.raises(ValueError, match=r"`models` \(=\['x'\]\) must have one by the name of 'baseline'"):
        compare_generations({"x": endless()}, tokenizer, PROMPTS)
    with pytest.raises(ValueError, match="share a vocabulary.*'x': 100"):
        compare_generations({"baseline": endless(), "x": endless(vocab_size=100)}, tokenizer, PROMPTS)


def rounded(model, bits):
    """Each row of each linear on a grid of its own."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            w = module.weight.data
            scale = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            w.div_(scale).round_().mul_(scale)
    return model


@pytest.mark.slow
def test_coarser_weights_part_earlier_on_the_real_model(real):
    model, tokenizer = real
    made = {"baseline": model, "eight": rounded(copy.deepcopy(model), 8), "four": rounded(copy.deepcopy(model), 4)}
    found = compare_generations(made, tokenizer, SWEEP_PROMPTS[2:4], temperatures=[1.0], new_tokens=8, seeds=1)
    at = {(r.model, r.temperature): r.first_difference for r in found.rows()}
    assert at["four", 0.0] + 3 < at["eight", 0.0] and at["four", 1.0] + 3 < at["eight", 1.0]
    assert found.settings.chat and all(g.text for g in found.written if g.model == "baseline")
    assert len(SWEEP_PROMPTS) == len(set(SWEEP_PROMPTS)) >= 12
