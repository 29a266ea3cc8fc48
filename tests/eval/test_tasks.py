"""Tasks by lm-eval on models in memory: the same answers as lm-eval's own, of the right model, joined question by
question."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from compress import METHODS, apply
from compress.kv.attach import attached
from eval.record.reading import plain
from eval.tasks import harness, task_files
from eval.tasks.fingerprint import model_sha256, tokenizer_sha256
from eval.tasks.paired import AGGREGATES, calibration_error, compare, mcnemar, stderr
from eval.tasks.tasks import FLIPS, TaskScores, answer_tasks, check_tasks
from kernels.linear import fast_linear
from kernels.support import hub

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
}
WRITING = {
    "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    "filter_list": [{"name": "strict", "filter": [{"function": "regex", "regex_pattern": "^(x+)$"}, {"function": "take_first"}]},
                    {"name": "loose", "filter": [{"function": "regex", "regex_pattern": "(.)"}, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
READING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "q",
    "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}
LAST_WORD = {"output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": "{{answer}}",
             "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                             {"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
KINDS = {"choice": CHOICE, "writing": WRITING, "reading": READING, "last_word": LAST_WORD}


def documents(count: int) -> list[dict]:
    """Questions about nothing; the last two are the same."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) for _ in range(6 * count)]
    made = [
        {"q": " ".join(w[:3]), "choices": w[3:], "gold": i % 3, "answer": w[3]}
        for i in range(count)
        for w in [words[6 * i : 6 * i + 6]]
    ]
    return [*made[:-1], made[-2]]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Task files of every kind two folders below what their data's paths are relative to."""
    tasks = tmp_path / "mine" / "tasks"
    (tmp_path / "rows").mkdir()
    tasks.mkdir(parents=True)
    (tmp_path / "rows" / "test.json").write_text("\n".join(map(json.dumps, documents(24))))
    for name, kind in KINDS.items():
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "rows/test.json"}},
            "test_split": "test",
            "metadata": {"version": 3},
            **kind,
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(config))
    (tasks / "both.yaml").write_text(yaml.safe_dump({"group": "both", "task": ["choice", "more"]}))
    more = yaml.safe_load((tasks / "choice.yaml").read_text()) | {"task": "more", "doc_to_text": "{{q}} is"}
    (tasks / "more.yaml").write_text(yaml.safe_dump(more))
    return tasks


@pytest.fixture
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of 96 characters, with an end of text and nothing to pad by."""
    vocabulary = {c: i for i, c in enumerate(["<end>", "\n", *map(chr, range(32, 126))])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="?")


@pytest.fixture(autouse=True)
def _no_catalogue(monkeypatch):
    """Where all tasks are files, lm-eval's own are not read: that takes 10 s."""

    def read():
        raise AssertionError("the catalogue was read")

    monkeypatch.setattr(task_files, "catalogue", read)


def refuses(monkeypatch) -> None:
    def never(*_, **__):
        raise AssertionError("asked again")

    monkeypatch.setattr(harness, "answer", never)


# The same as lm-eval by itself


@pytest.mark.parametrize("num_fewshot", (0, 2))
def test_scores_are_lm_evals_own(folder, letters, tiny, num_fewshot):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = list(KINDS)
    found = answer_tasks(
        {"baseline": tiny("llama")},
        letters,
        names,
        task_path=str(folder),
        num_fewshot=num_fewshot,
        limit=8,
        seed=3,
        batch_size=4,
    ).metrics["baseline"]
    letters.pad_token = "?"
    configs = [task_files._local(name, folder / f"{name}.yaml", functions=True) for name in names]
    own = simple_evaluate(
        HFLM(tiny("llama"), tokenizer=letters, batch_size=4),
        tasks=configs,
        limit=8,
        num_fewshot=num_fewshot,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        fewshot_random_seed=3,
    )
    expected = {}
    for name, metrics in own["results"].items():
        for key, value in metrics.items():
            metric, _, kept = key.partition(",")
            if kept and not metric.endswith("_stderr"):
                expected[f"{metric}{'_loose' if kept == 'loose' else ''}_{name}"] = value
    values = {key: value for key, value in found.items() if "_stderr" not in key and not key.startswith("ece_")}
    assert values == expected and len(values) == 9
    assert 0 < values["acc_choice"] < 1 and values["bits_per_byte_reading"] > 3


def test_likelihoods_are_computed_in_float32(folder, letters, tiny):
    """Of a bfloat16 model, too: its logits are rounded, their softmax is not."""
    model = tiny("llama").to(torch.bfloat16)
    found = answer_tasks({"baseline": model}, letters, ["last_word"], task_path=str(folder), limit=6)
    for row, document in zip(documents(24), found.answers["baseline"]["last_word"].documents, strict=False):
        ids = letters(row["q"] + row["answer"], return_tensors="pt").input_ids
        with torch.no_grad(), fast_linear():
            logp = model(ids[:, :-1]).logits[0].double().log_softmax(-1)
        n = len(row["answer"])
        expected = logp[-n:].gather(1, ids[0, -n:, None]).sum().item()
        assert document.loglikelihoods == [pytest.approx(expected, rel=1e-6)]


def test_a_diverged_model_has_scores(folder, letters, tiny):
    """lm-eval's perplexity of it would raise OverflowError."""
    model = tiny("llama")
    model.lm_head.weight.data *= 1e6
    found = answer_tasks(
        {"baseline": tiny("llama"), "broken": model}, letters, ["last_word"], task_path=str(folder), limit=3
    )
    assert found.metrics["broken"]["perplexity_last_word"] == math.inf
    assert any("perplexity_last_word of broken is not finite (inf)" in note for note in found.notes)


def test_a_task_that_cannot_be_built_is_named(folder, letters, tiny, tmp_path):
    (tmp_path / "rows" / "test.json").write_text(json.dumps(documents(2)[0] | {"choices": ["", "a"]}))
    with pytest.raises(ValueError, match="`tasks`: 'choice' cannot be built: IndexError"):
        answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], task_path=str(folder))


@pytest.mark.parametrize("cached", [False, True])
def test_empty_texts_are_answered(folder, letters, tiny, tmp_path, cached):
    """An empty prompt, or one of spaces, is the beginning of a text; an empty continuation or text has likelihood 1."""
    rows = documents(6)
    rows[1] |= {"q": "", "choices": ["", "ab", "a"]}
    rows[2] |= {"q": "  ", "answer": ""}
    (tmp_path / "rows" / "test.json").write_text("\n".join(map(json.dumps, rows)))
    for name in ("choice", "last_word"):
        config = yaml.safe_load((folder / f"{name}.yaml").read_text())
        more = {"doc_to_text": "{{q}}", "target_delimiter": ""}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config | more))
    model = tiny("llama")
    with attached(model, [METHODS["streaming"](budget=1.0)]) if cached else contextlib.nullcontext():
        found = answer_tasks({"baseline": model}, letters, list(KINDS), task_path=str(folder)).answers["baseline"]
    assert found["choice"].documents[1].loglikelihoods[0] == 0.0
    end = letters.convert_tokens_to_ids("<end>")
    logp = model(torch.tensor([[end, letters.convert_tokens_to_ids("a")]])).logits[0, 0].double().log_softmax(-1)
    expected = logp[letters.convert_tokens_to_ids("a")].item()
    assert found["choice"].documents[1].loglikelihoods[2] == pytest.approx(expected, rel=1e-5)
    assert found["last_word"].documents[1].loglikelihoods[0] < 0 and found["reading"].documents[1].loglikelihoods == [0]
    assert all(len(found[name].documents) == 6 for name in KINDS)


def test_standard_errors_are_lm_evals_own():
    from lm_eval.api.metrics import bits_per_byte, mean_stderr, perplexity, weighted_perplexity

    rng = random.Random(1)
    right = [rng.randint(0, 1) for _ in range(37)]
    assert stderr(right) == pytest.approx(mean_stderr(right), rel=1e-12)
    assert stderr([1]) is None
    likelihoods = [-rng.random() for _ in range(50)]
    pairs = [(-rng.random() * n, n) for n in (rng.randint(5, 50) for _ in range(50))]
    for own, items in ((perplexity, likelihoods), (weighted_perplexity, pairs), (bits_per_byte, pairs)):
        assert AGGREGATES[own.__name__](np.array(items)) == pytest.approx(own(items), rel=1e-12)
    own = np.array(likelihoods)  # the delta method, for a mean's exponential
    assert stderr(likelihoods, "perplexity") == pytest.approx(math.exp(-own.mean()) * own.std() / 50**0.5, rel=0.1)


# Statistics of pairs


def test_the_calibration_error_is_the_papers():
    """Guo et al., equation 3, bin by bin."""
    generator = np.random.default_rng(0)
    certain = generator.uniform(0.2, 1.0, 400)
    right = (generator.uniform(size=400) < certain**2).astype(float)
    by_hand = 0.0
    for b in range(15):
        inside = [i for i in range(400) if b / 15 <= certain[i] < (b + 1) / 15]
        if inside:
            by_hand += len(inside) / 400 * abs(np.mean(right[inside]) - np.mean(certain[inside]))
    pairs = np.stack([certain, right], 1)
    assert calibration_error(pairs) == pytest.approx(by_hand) and by_hand > 0.05
    assert calibration_error(np.stack([pairs, pairs])).shape == (2,)
    assert 0 < stderr(pairs, "calibration_error") < 0.05
    assert calibration_error(np.array([[1.0, 1], [1.0, 1], [0.5, 0], [0.5, 1]])) == 0


def test_choices_have_a_calibration_error(folder, letters, tiny):
    found = answer_tasks({"model": tiny("llama")}, letters, ["choice"], task_path=str(folder))
    (of,) = found.answers["model"].values()
    by_hand = [
        (torch.softmax(torch.tensor(d.loglikelihoods[: len(d.choices)]), 0).max().item(), d.metrics["acc"])
        for d in of.documents
    ]
    (name,) = found.answers["model"]
    assert found.metrics["model"][f"ece_{name}"] == pytest.approx(float(calibration_error(np.array(by_hand))), abs=1e-6)
    assert f"ece_{name}_stderr" in found.metrics["model"] and not of.higher_is_better["ece"]


def test_mcnemar_is_the_exact_binomial():
    """Against counting all outcomes, and scipy."""
    from scipy.stats import binomtest

    for worse, better in itertools.product(range(6), repeat=2):
        n = worse + better
        heads = [sum(tosses) for tosses in itertools.product((0, 1), repeat=n)]
        assert mcnemar(worse, better) == pytest.approx(sum(abs(2 * k - n) >= abs(worse - better) for k in heads) / 2**n)
    for worse, better in ((9, 1), (150, 90), (0, 30), (700, 650)):
        assert mcnemar(worse, better) == pytest.approx(binomtest(worse, worse + better).pvalue, rel=1e-9)


def test_pairs_are_compared_as_pairs():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 400)
    b = np.where(rng.random(400) < 0.05, 1 - a, a)  # nearly the same answers
    found = compare(a.tolist(), b.tolist())
    worse, better = ((a == 1) & (b == 0)).sum(), ((a == 0) & (b == 1)).sum()
    assert (found.right_to_wrong, found.wrong_to_right, found.same) == (worse, better, 400 - worse - better)
    assert found.baseline == a.mean() and found.value == b.mean() and found.n == 400
    assert found.recovery == pytest.approx(b.mean() / a.mean()) and found.difference == pytest.approx(
        b.mean() - a.mean()
    )
    assert found.mcnemar_p == mcnemar(worse, better)
    wide, d = found.difference_high - found.difference_low, b - a
    assert wide == pytest.approx(2 * 1.96 * d.std() / 20, rel=0.12), (
        "of the differences, not of two samples that do not know each other"
    )
    assert found.recovery_low < found.recovery < found.recovery_high
    shuffled = compare(a.tolist(), rng.permutation(b).tolist())
    assert (
        shuffled.difference == pytest.approx(found.difference)
        and shuffled.difference_high - shuffled.difference_low > 2 * wide
    )


def test_the_same_answers_are_the_same():
    found = compare([0, 1, 1], [0, 1, 1])
    assert [getattr(found, k) for k in ("recovery", "recovery_low", "recovery_high", "difference", "mcnemar_p")] == [
        1,
        1,
        1,
        0,
        1,
    ]


def test_where_less_is_better_recovery_is_the_inverse():
    nats, size = np.log(2), 10
    found = compare(
        [(-size * nats, size)] * 5, [(-size * nats * 1.25, size)] * 5, aggregate="bits_per_byte", higher_is_better=False
    )
    assert (
        found.baseline == pytest.approx(1)
        and found.value == pytest.approx(1.25)
        and found.recovery == pytest.approx(0.8)
    )
    assert found.difference == pytest.approx(0.25) and found.right_to_wrong is None and found.mcnemar_p is None


def test_undefined_comparisons_are_none():
    found = compare([0, 0, 0, 0], [1, 0, 0, 1])
    assert found.recovery is None and found.recovery_low is None and found.difference == 0.5
    json.dumps(vars(compare([0, 1], [1, math.nan])), allow_nan=False)
    json.dumps(vars(compare([0, 0, 0, 1], [1, 0, 1, 1])), allow_nan=False)  # some resamples have nothing to divide by


# Whose answers


def test_models_of_one_name_do_not_get_each_others_answers(folder, letters, tiny, tmp_path, monkeypatch):
    ask = {"task_path": str(folder), "cache_path": tmp_path / "kept"}
    one, other = tiny("llama"), tiny("llama")
    other = apply([METHODS["rtn"](bits=2, group_size=32)], other, []).model
    first = answer_tasks({"baseline": one}, letters, ["choice", "reading"], **ask)
    second = answer_tasks({"baseline": other}, letters, ["choice", "reading"], **ask)
    assert first.cached == second.cached == {"baseline": []}
    assert first.metrics["baseline"]["bits_per_byte_reading"] != second.metrics["baseline"]["bits_per_byte_reading"]
    refuses(monkeypatch)
    again = answer_tasks({"baseline": one, "compressed": other}, letters, ["choice", "reading"], **ask)
    assert again.cached == {"baseline": ["choice", "reading"], "compressed": ["choice", "reading"]}
    assert again.metrics == {"baseline": first.metrics["baseline"], "compressed": second.metrics["baseline"]}
    assert again.answers["baseline"] == first.answers["baseline"]


@pytest.mark.parametrize("change", ({"limit": 5}, {"num_fewshot": 1}, {"batch_size": 2}, {"seed": 1}))
def test_other_settings_are_asked_anew(folder, letters, tiny, tmp_path, change, monkeypatch):
    ask = {"task_path": str(folder), "cache_path": tmp_path / "kept", "limit": 3}
    answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], **ask)
    refuses(monkeypatch)
    answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], **ask)
    with pytest.raises(AssertionError, match="asked again"):
        answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], **{**ask, **change})


@pytest.mark.parametrize("changed", ("data", "task", "dtype", "tokenizer", "machine", "broken"))
def test_changed_settings_invalidate_kept_answers(folder, letters, tiny, tmp_path, changed, monkeypatch):
    model, kept = tiny("llama"), tmp_path / "kept"
    ask = {"task_path": str(folder), "cache_path": kept, "limit": 3}
    answer_tasks({"baseline": model}, letters, ["choice"], **ask)
    refuses(monkeypatch)
    if changed == "data":
        rows = tmp_path / "rows" / "test.json"
        rows.write_text(rows.read_text().replace('"gold": 0', '"gold": 1', 1))
    elif changed == "task":
        (folder / "choice.yaml").write_text((folder / "choice.yaml").read_text().replace("Q: ", "Question: "))
    elif changed == "dtype":
        model = model.to(torch.bfloat16)
    elif changed == "tokenizer":
        letters.bos_token = "?"
    elif changed == "machine":  # the instructions that it has decide how it rounds
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    else:
        for path in kept.iterdir():
            path.write_text(path.read_text()[:-40])
    with pytest.raises(AssertionError, match="asked again"):
        answer_tasks({"baseline": model}, letters, ["choice"], **ask)


def test_a_killed_run_goes_on_where_it_was(folder, letters, tiny, tmp_path, monkeypatch):
    ask = {"task_path": str(folder), "cache_path": tmp_path / "kept", "limit": 4}
    models, whole, asked = {"baseline": tiny("llama"), "other": tiny("llama", seed=1)}, harness.answer, []

    def dies(*args, **kwargs):
        asked.append(args[2].task_name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(harness, "answer", dies)
        with pytest.raises(KeyboardInterrupt):
            answer_tasks(models, letters, ["choice", "reading"], **ask)
        found = answer_tasks(models, letters, ["choice", "reading"], **ask)
    assert asked == ["choice", "choice", "reading", "reading", "reading"]
    assert found.cached == {"baseline": ["choice"], "other": ["choice"]}
    assert found.metrics == answer_tasks(models, letters, ["choice", "reading"], task_path=str(folder), limit=4).metrics


def test_the_hash_of_a_model_covers_all_that_changes_its_answers(tiny, tokens):
    model = tiny("llama")
    own = model_sha256(model)
    assert own == model_sha256(tiny("llama")) and own != model_sha256(tiny("llama", seed=1))
    model(tokens()[0])
    model.generate(tokens()[0], max_new_tokens=3, do_sample=False)
    model.name_or_path = "another"
    assert own == model_sha256(model), "use and name change no answer"

    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert own != model_sha256(model)
    for change in (
        lambda m: setattr(m.config, "rms_norm_eps", 1e-2),
        lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 1e-2),
        lambda m: m.model.rotary_emb.inv_freq.mul_(2),  # not in the state dict
        lambda m: setattr(m.generation_config, "repetition_penalty", 1.5),
        lambda m: m.set_attn_implementation("eager"),
        lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None),
        lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x),
        lambda m: m.to(torch.bfloat16),
    ):
        changed = tiny("llama")
        change(changed)
        assert own != model_sha256(changed)


def test_hooks_count_by_what_they_hold(tiny):
    def hooked(factor: float) -> nn.Module:
        model = tiny("llama")
        model.model.norm.register_forward_hook(lambda _m, _i, out: out * factor)
        return model

    assert model_sha256(hooked(2.0)) == model_sha256(hooked(2.0)) != model_sha256(hooked(3.0))
    written = [tiny("llama") for _ in range(2)]
    written[0].model.norm.register_forward_hook(lambda _m, _i, out: out * 2)
    written[1].model.norm.register_forward_hook(lambda _m, _i, out: out * 3)
    assert model_sha256(written[0]) != model_sha256(written[1])


def test_compressed_models_count_by_more_than_their_tensors(tiny):
    made = {bits: apply([METHODS["rtn"](bits=bits, group_size=32)], tiny("llama"), []).model for bits in (3, 4)}
    again = apply([METHODS["rtn"](bits=4, group_size=32)], tiny("llama"), []).model
    assert model_sha256(made[4]) == model_sha256(again) != model_sha256(made[3])
    linear = again.model.layers[0].mlp.up_proj
    linear.parts[0].activation_bits = 8  # the same tensors, multiplied otherwise
    assert model_sha256(made[4]) != model_sha256(again)


def test_a_compressed_cache_is_another_model(folder, letters, tiny, tmp_path):
    """Its weights are the baseline's; what it writes is not, and is not kept for it."""
    model = tiny("llama")
    ask = {"task_path": str(folder), "cache_path": tmp_path / "kept"}
    own = model_sha256(model)
    full = answer_tasks({"baseline": model}, letters, ["writing", "choice"], **ask)
    policies = [METHODS["streaming"](budget=budget) for budget in (0.25, 0.5)]
    hashes = []
    for policy in policies:
        with attached(model, [policy]):
            hashes.append(model_sha256(model))
            model.generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=2, do_sample=False)
            assert hashes[-1] == model_sha256(model), "what was generated before changes nothing"
    assert len({own, *hashes}) == 3 and own == model_sha256(model)
    with attached(model, [policies[0]]):
        evicted = answer_tasks({"baseline": model}, letters, ["writing", "choice"], **ask)
    assert (
        evicted.cached == {"baseline": []}
        and "choice" in evicted.notes[0]
        and "writing" not in evicted.notes[0]
        and not full.notes
    )
    texts = [[d.answer for d in of.answers["baseline"]["writing"].documents] for of in (full, evicted)]
    assert texts[0] != texts[1], "lm-eval's generations go through the attached cache"
    assert (
        answer_tasks({"baseline": model}, letters, ["writing"], **ask).answers["baseline"]["writing"]
        == full.answers["baseline"]["writing"]
    )


def test_questions_go_into_the_chat_template_if_asked(folder, letters, tiny):
    letters.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    ask = {"task_path": str(folder), "limit": 2}
    plain, chat = (
        answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], chat=chat, **ask) for chat in (False, True)
    )
    assert [of.answers["baseline"]["choice"].documents[0].question[0] for of in (plain, chat)] == ["Q", "["]


def test_tokenizers_count_by_what_they_do(letters):
    own = tokenizer_sha256(letters)
    letters.pad_token = "?"
    assert own != tokenizer_sha256(letters)
    padded = tokenizer_sha256(letters)
    letters(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert padded == tokenizer_sha256(letters), "what a call sets is set anew by the next"


# What is left as it was


def test_model_tokenizer_and_process_are_left_alone(folder, letters, tiny):
    model = tiny("llama", tie_word_embeddings=True)
    head = nn.Linear(64, 96, bias=False)
    model.lm_head = head  # by itself, whatever the configuration says
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    model.model.norm.eval()
    modes, generation = [m.training for m in model.modules()], model.generation_config.to_dict()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    letters.padding_side = "right"
    untied = answer_tasks(
        {"baseline": model}, letters, ["choice", "writing"], task_path=str(folder), limit=4, batch_size=2
    )
    assert model.lm_head is head and all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    assert "tie_weights" not in vars(model) and model.generation_config.to_dict() == generation
    assert [m.training for m in model.modules()] == modes
    assert letters.pad_token is None and letters.padding_side == "right" and len(letters) == 96
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    tied = answer_tasks(
        {"baseline": tiny("llama", tie_word_embeddings=True)}, letters, ["choice"], task_path=str(folder), limit=4
    )
    one, other = (of.answers["baseline"]["choice"].documents[0].loglikelihoods for of in (untied, tied))
    assert one != other, "answered by its own output layer"


# What is found and saved


_answered: list[TaskScores] = []  # once for all tests that read it


@pytest.fixture
def scores(folder, letters, tiny):
    if not _answered:
        models = {"baseline": tiny("llama"), "<b>rtn</b>": tiny("llama", seed=1), "same": tiny("llama")}
        _answered.append(answer_tasks(models, letters, list(KINDS), task_path=str(folder)))
    return dataclasses.replace(_answered[0])


def test_flipped_answers_are_listed_by_question(scores):
    found = json.loads(json.dumps(plain(scores.found()), allow_nan=False))
    assert {row["task"]: row["metric"] for row in found["rows"]} == {
        "choice": "acc_norm",
        "writing": "exact_match",
        "reading": "bits_per_byte",
        "last_word": "acc",
    }
    assert all(row["n"] == 24 and row["version"] == "3" for row in found["rows"])
    assert [row["higher_is_better"] for row in found["rows"]] == [True, True, False, True]
    beside = found["compared"]["<b>rtn</b>"]["choice"]
    right = [[d.metrics["acc_norm"] for d in scores.answers[m]["choice"].documents] for m in ("baseline", "<b>rtn</b>")]
    turns = list(zip(*right, strict=True))
    assert beside["right_to_wrong"] == turns.count((1, 0)) > 0 and beside["wrong_to_right"] == turns.count((0, 1)) > 0
    assert beside["same"] == 24 - turns.count((1, 0)) - turns.count((0, 1)) and 0 < beside["mcnemar_p"] <= 1
    assert set(found["compared"]) == {"<b>rtn</b>", "same"}
    same = found["compared"]["same"]
    assert all(of["recovery"] == 1 or of["baseline"] == 0 for of in same.values()) and found["flips"]["same"] == []
    reading = found["compared"]["<b>rtn</b>"]["reading"]
    assert reading["recovery"] == pytest.approx(reading["baseline"] / reading["value"]) and reading["mcnemar_p"] is None

    flips = found["flips"]["<b>rtn</b>"]
    for direction, turn in (("right to wrong", (1, 0)), ("wrong to right", (0, 1))):
        mine = [flip for flip in flips if flip["direction"] == direction and flip["task"] == "choice"]
        assert len(mine) == min(FLIPS, turns.count(turn)) and all(turns[flip["doc_id"]] == turn for flip in mine)
        for flip in mine:
            doc = documents(24)[flip["doc_id"]]
            gold = doc["choices"][doc["gold"]]
            assert flip["gold"] == gold and flip["question"].endswith(f"Q: {doc['q']}\nA:")
            assert (flip["baseline_answer"] == gold, flip["answer"] == gold) == tuple(map(bool, turn))


def test_documents_that_are_the_same_are_told_apart(scores):
    documents = scores.answers["baseline"]["choice"].documents
    assert documents[-1].doc_hash == documents[-2].doc_hash and len({d.doc_hash for d in documents}) == 23
    assert scores.compared["same"]["choice"].n == 24


def test_every_filter_is_kept_and_the_first_counts(scores):
    of = scores.answers["baseline"]["writing"]
    assert (
        len(of.documents) == 24
        and {"exact_match", "exact_match_loose"} <= set(of.documents[0].metrics)
        and of.metric == "exact_match"
    )
    assert {
        "exact_match_writing",
        "exact_match_writing_stderr",
        "exact_match_loose_writing",
        "exact_match_loose_writing_stderr",
    } <= set(scores.metrics["baseline"])


def test_samples_are_saved_a_line_a_question(scores, tmp_path):
    files = scores.save(tmp_path)
    assert scores.found().files == files and len({path for of in files.values() for path in of.values()}) == 12
    for model, of in files.items():
        for task, path in of.items():
            lines = [json.loads(line) for line in (tmp_path / path).read_text().splitlines()]
            assert [line["doc_id"] for line in lines] == list(range(24)) and {line["model"] for line in lines} == {
                model
            }
            assert set(lines[0]) == {
                "task",
                "model",
                "doc_id",
                "doc_hash",
                "question",
                "gold",
                "answer",
                "right",
                "metrics",
                "loglikelihoods",
                "choices",
            }
            if task == "choice":
                assert np.mean([line["right"] for line in lines]) == scores.metrics[model]["acc_norm_choice"]
                assert all(
                    len(line["loglikelihoods"]) == 3 and line["answer"] in documents(24)[line["doc_id"]]["choices"]
                    for line in lines
                )
                assert all((line["answer"] == line["gold"]) == (line["right"] == 1) for line in lines)


def test_names_of_models_are_no_paths(scores, tmp_path):
    scores.answers = {name: scores.answers["baseline"] for name in ("../../up", "a/b", "a:b", "A/b", ".")}
    files = [path for of in scores.save(tmp_path / "here").values() for path in of.values()]
    assert len({path.lower() for path in files}) == 20 and all(
        (tmp_path / "here" / path).resolve().parent == tmp_path / "here" / "samples" for path in files
    )
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("rows", "mine")] == ["here"]


def test_a_model_that_breaks_is_recorded_as_strict_json(folder, letters, tiny, tmp_path):
    broken = tiny("llama")
    broken.model.norm.weight.data.fill_(math.nan)
    found = answer_tasks(
        {"baseline": tiny("llama"), "broken": broken}, letters, ["choice", "reading"], task_path=str(folder), limit=4
    )
    json.dumps(plain([found.metrics, found.found()]), allow_nan=False)
    found.save(tmp_path)
    for path in (tmp_path / "samples").iterdir():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (
        math.isnan(found.metrics["broken"]["bits_per_byte_reading"])
        and found.compared["broken"]["reading"].recovery is None
    )
    assert "<table>" in found._repr_html_()


def test_scores_show_themselves(scores):
    page = scores._repr_html_()
    assert "&lt;b&gt;rtn" in page and "<b>" not in page and "acc_norm" in page and "100.0 %" in page


def test_a_groups_score_is_of_all_its_questions(folder, letters, tiny):
    models = {"baseline": tiny("llama"), "other": tiny("llama", seed=1)}
    found = answer_tasks(models, letters, ["more", "both"], task_path=str(folder), limit=10)
    assert found.groups == {"both": ["choice", "more"]}
    assert {row.task: row.n for row in found.found().rows} == {"both": 20, "choice": 10, "more": 10}
    for scores in found.metrics.values():
        assert scores["acc_norm_both"] == pytest.approx((scores["acc_norm_choice"] + scores["acc_norm_more"]) / 2)
    parts = found.compared["other"]
    assert parts["both"].n == 20
    assert parts["both"].right_to_wrong == parts["choice"].right_to_wrong + parts["more"].right_to_wrong


# What is checked before


def refused(tasks, message: str, **more) -> None:
    with pytest.raises(ValueError, match=message):
        check_tasks(tasks, **more)


def test_bad_arguments_of_tasks_are_refused_before_any_work(folder, monkeypatch):
    path = str(folder)
    check_tasks(["choice", "both"], task_path=path, limit=1, num_fewshot=0, batch_size=8)
    for tasks in ("choice", [], [""], [3]):
        refused(tasks, "`tasks` .* must be a list of names", task_path=path)
    refused(["choice", "choice"], "twice", task_path=path)
    refused(["choise"], "'choise' is neither .*near it: choice", task_path=path)
    for knob, value in (
        ("limit", 0),
        ("limit", 0.5),
        ("limit", True),
        ("num_fewshot", -1),
        ("batch_size", 0),
        ("batch_size", "auto"),
    ):
        refused(["choice"], f"`{knob}` .*{value}.* must be a whole number", task_path=path, **{knob: value})
    refused(["choice"], "`task_path` .* must be a folder", task_path=path + "/choice.yaml")


def test_data_that_are_not_there_are_named(folder):
    shutil.rmtree(folder.parents[1] / "rows")
    refused(["choice"], "'choice' reads rows/test.json, which is neither beside its file", task_path=str(folder))


def test_data_are_found_from_any_folder(folder, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    folder.rename(folder.with_name("lm_eval_tasks"))
    check_tasks(["choice"])
    (task,), groups = task_files.find_tasks(["choice"])
    assert groups == {} and len(task.build().eval_docs) == 24
    with pytest.raises(ValueError, match="hellaswag"):
        check_tasks(["hellaswag"])


def test_lm_evals_own_task_reads_the_rows_of_the_local_data_sets(folder, monkeypatch, tmp_path):
    from datasets import Dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "data"))
    file = tmp_path / "data" / "piqa" / "validation.parquet"
    file.parent.mkdir(parents=True)
    rows = [{"goal": f"goal {i}", "sol1": "left", "sol2": "right", "label": i % 2} for i in range(3)]
    Dataset.from_list(rows).to_parquet(file)
    check_tasks(["piqa"], task_path=str(folder))
    (found,), _ = task_files.find_tasks(["piqa"], str(folder))
    task = found.build()
    assert [task.doc_to_text(doc) for doc in task.eval_docs] == [f"Question: goal {i}\nAnswer:" for i in range(3)]
    assert task.doc_to_choice(rows[0]) == ["left", "right"] and task.doc_to_target(rows[1]) == 1
    Dataset.from_list(rows[:2]).to_parquet(file)
    assert task_files.find_tasks(["piqa"], str(folder))[0][0].identity != found.identity
    refused(["piqa"], "'piqa' needs .* from the hub", task_path=str(folder), num_fewshot=2)  # of the training split


def test_the_hubs_tasks_need_a_network(folder, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "none"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    refused(["piqa"], "'piqa' needs .*piqa from the hub, which cannot be reached", task_path=str(folder))
    refused(["piqa"], "put the rows, as piqa/validation.parquet, into the folder that WORKBENCH_DATA names .*none")
    refused(["mine_local"], "'mine_local' is neither among task files .*none, see WORKBENCH_DATA")
    refused(["choice", "mmlu"], "'mmlu' needs data from the hub", task_path=str(folder))
    mine = yaml.safe_load((folder / "choice.yaml").read_text()) | {
        "task": "far",
        "dataset_path": "owner/set",
        "dataset_kwargs": None,
    }
    (folder / "far.yaml").write_text(yaml.safe_dump(mine))
    refused(["far"], "'far' needs owner/set", task_path=str(folder))
    (tmp_path / "owner___set").mkdir()
    check_tasks(["far"], task_path=str(folder))


def test_no_connection_is_as_good_as_offline(folder, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "none"))
    refused(["piqa"], "which cannot be reached", task_path=str(folder))


def test_code_that_a_model_wrote_is_not_run_unasked(folder, monkeypatch):
    refused(["humaneval"], "runs code that a model wrote.*HF_ALLOW_CODE_EVAL=1", task_path=str(folder))
    own = yaml.safe_load((folder / "writing.yaml").read_text()) | {"task": "own", "unsafe_code": True}
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    refused(["own"], "runs code", task_path=str(folder))
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    check_tasks(["own"], task_path=str(folder))


def test_models_and_tokenizers_are_checked(folder, letters, tiny):
    with pytest.raises(ValueError, match="`models`"):
        answer_tasks({}, letters, ["choice"], task_path=str(folder))
    with pytest.raises(ValueError, match="`chat`.*no chat template"):
        answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], task_path=str(folder), chat=True)
    letters.eos_token = None
    with pytest.raises(ValueError, match="`tokenizer`.*end of a text"):
        answer_tasks({"baseline": tiny("llama")}, letters, ["choice"], task_path=str(folder))


def test_the_local_tasks_are_all_there(data):
    names = [yaml.safe_load(path.read_text())["task"] for path in sorted((data / "lm_eval_tasks").glob("*.yaml"))]
    check_tasks(names, task_path=str(data / "lm_eval_tasks"))
    assert "hellaswag_local" in names and len(names) >= 18


# Real models


def test_fewer_bits_make_a_real_model_worse_at_reading(data, stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    rough = apply([METHODS["rtn"](bits=4, group_size=96)], copy.deepcopy(model), []).model
    found = answer_tasks(
        {"baseline": model, "rough": rough},
        tokenizer,
        ["tinystories_local"],
        limit=6,
        task_path=str(data / "lm_eval_tasks"),
    )
    assert (
        0.3 < found.metrics["baseline"]["bits_per_byte_tinystories_local"] < 0.6
    )  # perplexity 3.5 at 4 bytes a token: 0.45
    beside = found.compared["rough"]["tinystories_local"]
    assert beside.n == 6 and 0.5 < beside.recovery_low <= beside.recovery <= beside.recovery_high < 1


@pytest.mark.slow
def test_fewer_bits_lose_answers_of_a_real_model(data, real):
    model, tokenizer = real
    rough = apply([METHODS["rtn"](bits=2, group_size=64)], copy.deepcopy(model), []).model
    found = answer_tasks(
        {"baseline": model, "rough": rough},
        tokenizer,
        ["sciq_local"],
        task_path=str(data / "lm_eval_tasks"),
        limit=16,
        batch_size=8,
    )
    assert found.metrics["baseline"]["acc_sciq_local"] > 0.7
    beside = found.compared["rough"]["sciq_local"]
    assert beside.right_to_wrong > beside.wrong_to_right and beside.recovery_high < 1


def test_task_files_of_others_are_code_that_must_be_trusted(folder, monkeypatch):
    monkeypatch.delenv("WORKBENCH_TRUST")
    with pytest.raises(ValueError, match="`task_path` .* are code .* say `--trust"):
        task_files.find_tasks(["choice"], str(folder))
