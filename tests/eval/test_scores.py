"""Scores against hand computations, and the record that keeps them."""

import copy
import dataclasses
import json
import math
from datetime import UTC, datetime

import pytest
import torch

from compress import METHODS, apply
from compress.recipe import parse_recipe
from eval import run_record
from eval.evaluate import Scores, check_evaluation, evaluate, score_text
from eval.machine.memory import peak_above_start, peak_memory
from eval.machine.size import bits_per_weight, size
from eval.record.compression import FoldRecord, Magnitudes
from eval.record.html import CELL_COLOURS
from eval.record.measured import Sample
from eval.record.rows import typed
from eval.record.schema import problems_of, read_record, write_record
from eval.run_record import RunInfo, record
from eval.text.divergence import compare_on_text
from eval.text.names import short_path, text_name, with_short_names
from eval.text.perplexity import Perplexity, perplexity
from eval.text.windows import mean_and_stderr, windows
from eval.writing.generation import first_difference, generate_samples, write
from kernels.support.deploy import deployed


def loss_of(model, ids, first):
    """Summed loss of ids [1, n] from position `first` on, in one plain pass."""
    logits = model(ids).logits[0].double()
    logp = torch.log_softmax(logits, -1)
    return -sum(logp[i - 1, ids[0, i]] for i in range(first, ids.shape[1])).item()


def test_disjoint_windows_are_the_classic_protocol(tiny, tokens):
    model, ids = tiny("llama"), tokens(1, 50)[0]
    found = perplexity(model, ids, window=16)
    parts = [loss_of(model, ids[:, s : s + 16], 1) for s in (0, 16, 32)]
    assert found.tokens == 45 and found.counts == (15, 15, 15)
    assert found.value == pytest.approx(math.exp(sum(parts) / 45), rel=1e-5)
    assert found.sums == pytest.approx(parts, rel=1e-5)
    means = torch.tensor(parts) / 15
    assert found.stderr == pytest.approx(found.value * (means.std() / 3**0.5).item(), rel=1e-4)


def test_beginning_of_sequence_goes_before_the_text_or_before_every_window(tiny, tokens):
    """Once: the text is tokenised with its BOS and cut, as in the code of the GPTQ paper."""
    model, ids, head = tiny("llama"), tokens(1, 30)[0], torch.tensor([[2]])
    found = perplexity(model, ids, window=10, beginning=[2])
    whole = torch.cat([head, ids], 1)
    parts = [loss_of(model, whole[:, s : s + 10], 1) for s in (0, 10, 20)]
    assert found.tokens == 27 and found.value == pytest.approx(math.exp(sum(parts) / 27), rel=1e-5)
    found = perplexity(model, ids, window=11, beginning=[2], bos="each")
    parts = [loss_of(model, torch.cat([head, ids[:, s : s + 10]], 1), 1) for s in (0, 10, 20)]
    assert found.tokens == 30 and found.value == pytest.approx(math.exp(sum(parts) / 30), rel=1e-5)


def test_limits_and_bad_windows(tokens):
    ids = tokens(1, 50)[0]
    assert len(windows(ids, window=16, limit=2)) == 2
    for bad in ({"window": 1}, {"window": 16, "limit": 0}):
        with pytest.raises(ValueError, match="`window`"):
            windows(ids, **bad)
    with pytest.raises(ValueError, match=r"`bos` \(='never'\) must be one of once, each"):
        windows(ids, window=16, bos="never")
    with pytest.raises(ValueError, match=r"`window` \(=64\) needs as many tokens; the text has 50"):
        windows(ids, window=64)


def test_window_beyond_the_models_positions(tiny, tokens):
    with pytest.raises(ValueError, match=r"`window` \(=256\) must be at most 128"):
        check_evaluation(tiny("gpt2"), {"t": tokens(1, 300)[0]}, window=256)


def test_standard_error_by_clusters():
    assert mean_and_stderr([2.0, 4.0], [1, 1]) == (3.0, pytest.approx(1.0))
    assert mean_and_stderr([2.0], [1]) == (2.0, None)


def test_divergence_from_oneself_is_zero_and_from_another_is_kl(tiny, tokens):
    model, ids = tiny("llama"), tokens(1, 40)[0]
    same = compare_on_text(model, {"same": model}, ids, window=20)[1]["same"]
    assert same.kl == 0 and same.top1_agreement == 1 and same.tokens == 38
    other = tiny("llama", seed=3)
    found = compare_on_text(model, {"other": other}, ids, window=40)[1]["other"]
    p, q = (torch.log_softmax(m(ids).logits[0, :-1].double(), -1) for m in (model, other))
    assert found.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.kl_stderr is None, "one window has no spread"
    values, _ = compare_on_text(model, {"other": other}, ids, window=20)
    assert values["other"].value == pytest.approx(perplexity(other, ids, window=20).value, rel=1e-6)


def test_sizes_count_tensors_once(tiny):
    model = tiny("llama", tie_word_embeddings=True)
    found = size(model)
    assert found.stored_bytes == sum(p.numel() for p in model.parameters()) * 4 <= found.resident_bytes
    result = apply([METHODS["rtn"](bits=4, group_size=16)], copy.deepcopy(model))
    taken = sum(r.shape[0] * r.shape[1] * r.bits_per_weight / 8 for r in result.layers)
    kept = sum(k["bytes"] for k in result.kept)
    assert size(result.model).stored_bytes == taken + kept
    assert bits_per_weight(1000, 2000) == 4


def test_peak_memory_sees_what_is_allocated(tiny):
    def grow():
        with peak_above_start(torch.device("cpu")) as peak:
            block = torch.ones(64 << 20)  # 256 MB
            del block
        return peak.bytes

    assert 200e6 < grow() < 400e6
    model = tiny("llama")
    assert peak_memory(model, prompt_tokens=16, new_tokens=2) >= size(model).resident_bytes


def test_dropout_and_autocast_are_off_while_a_model_is_scored(tiny, tokens):
    """Of a model that was trained a moment ago; it stays in the mode of training."""
    model, (ids,) = tiny("gpt2"), tokens(1, 50)
    for part in model.modules():
        part.p = 0.5

    def measured() -> tuple:
        return score_text(model, model, {"t": ids}, window=16), write(model, ids, ends=[], new_tokens=8)

    expected = measured()
    assert expected == measured() and model.train() and expected == measured() and model.training
    with torch.autocast("cpu", torch.bfloat16):
        assert expected == measured() and torch.is_autocast_enabled("cpu")
    assert not deployed(model).training


def test_generations_are_compared_token_by_token(tiny, real):
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    model, tokenizer = real
    (sample,) = generate_samples({"baseline": model, "same": model}, tokenizer, ["Say hello."], new_tokens=5)
    assert sample.texts["baseline"] == sample.texts["same"] != "" and sample.first_difference == {"same": None}


@pytest.fixture
def uncompiled(monkeypatch):
    """Speed is measured, but nothing is compiled for it, which would take most of the time."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)


@pytest.mark.slow
def test_others_are_timed_and_weighed_if_asked(tiny, tokens, uncompiled):
    model, text = tiny("llama"), {"t": tokens(1, 64)[0]}
    made = {bits: apply([METHODS["rtn"](bits=bits, group_size=16)], copy.deepcopy(model)).model for bits in (8, 4, 3)}
    others = {"four": made[4], "three": made[3]}
    scores = evaluate(
        made[8],
        None,
        baseline=model,
        others=others,
        timed=["four"],
        texts=text,
        window=16,
        prompts=(),
        write_tokens=4,
        speed_prompt_tokens=8,
        speed_new_tokens=2,
        speed_rounds=1,
    )
    assert list(scores.metrics) == ["baseline", "compressed", "four", "three"] and not scores.notes
    assert "lossless_speed_up" not in scores.metrics["baseline"] | scores.metrics["three"]
    assert min(scores.metrics[name]["lossless_speed_up"] for name in ("compressed", "four")) > 0
    assert list(scores.speed) == ["baseline", "compressed", "four", "bfloat16", "float32"]
    for name in ("baseline", "compressed", "four"):
        assert scores.metrics[name]["decode_tokens_per_s"] == scores.speed[name].decode_tokens_per_s > 0
        assert scores.metrics[name]["prefill_tokens_per_s"] == scores.speed[name].prefill_tokens_per_s > 0
    assert (
        not {"stored_bytes", "decode_tokens_per_s"} & set(scores.metrics["three"]) and "kl_t" in scores.metrics["three"]
    )
    for name, one in {"four": made[4], "compressed": made[8], "baseline": model}.items():
        assert scores.metrics[name]["stored_bytes"] == size(deployed(one)).stored_bytes, name
    assert scores.metrics["four"]["resident_bytes"] > scores.metrics["four"]["stored_bytes"] / 2
    assert scores.metrics["four"]["bits_per_weight"] < scores.metrics["compressed"]["bits_per_weight"] < 16


@pytest.mark.parametrize("window, expected", [(24, 24), (100, 64)])
def test_the_prompt_of_memory_and_speed_is_no_longer_than_a_window(tiny, tokens, monkeypatch, window, expected):
    """Nor than half of the 128 positions that the model has."""
    asked = []
    monkeypatch.setattr("eval.evaluate.peak_memory", lambda _, prompt_tokens: asked.append(prompt_tokens) or 1)
    model = tiny("llama")
    more = {"texts": {"t": tokens(1, 100)[0]}, "window": window, "speed_rounds": 0, "write_tokens": 0}
    evaluate(copy.deepcopy(model), None, baseline=model, **more)
    assert asked == [expected] * 2


def test_names_of_others_are_checked_before_the_work(tiny, tokens):
    model, text = tiny("llama"), {"t": tokens(1, 64)[0]}
    with pytest.raises(ValueError, match=r"`timed` \(=\['b'\]\) must be among `others` \(=\['a'\]\), which b is not"):
        evaluate(model, None, baseline=model, others={"a": model}, timed=["b"], texts=text, window=16)
    with pytest.raises(ValueError, match="must not be called float32"):
        evaluate(model, None, baseline=model, others={"float32": model}, texts=text, window=16)


@pytest.mark.parametrize("factor, value", [(math.nan, "nan"), (1e6, "inf")])
def test_a_metric_that_is_not_finite_stays_and_is_warned_of(factor, value, tiny, tokens):
    """A diverged model has a perplexity of inf or NaN, which comparisons count against it; it raises nothing."""
    model, broken = tiny("llama"), tiny("llama")
    broken.lm_head.weight.data *= factor
    with pytest.warns(UserWarning, match=rf"perplexity_t of compressed is not finite \({value}\), which counts"):
        scores = score_text(broken, model, {"t": tokens(1, 40)[0]}, window=16)
    assert str(scores["perplexity_t"]) == value and "perplexity_t_stderr" not in scores


@pytest.mark.parametrize(
    "nll, value", [(math.nan, math.nan), (math.inf, math.inf), (800.0, math.inf), (2.0, math.e**2)]
)
def test_any_loss_has_a_perplexity(nll, value):
    assert Perplexity.of([nll * 100, nll * 50], [100, 50]).value == pytest.approx(value, nan_ok=True)


def test_a_record_tells_of_the_others_too(tiny):
    model = tiny("llama")
    results = {bits: apply([METHODS["rtn"](bits=bits, group_size=16)], copy.deepcopy(model)) for bits in (8, 4, 3)}
    results[8].notes, results[4].notes, results[3].notes = ["slow"], ["slow", "emulated"], ["emulated"]
    magnitudes = {key: Magnitudes(2.0, 1.0, 1.0) for key in ("x_before", "x_after", "w_before", "w_after")}
    results[8].folds = [
        FoldRecord(
            name="model.layers.0.input_layernorm",
            kind="norm",
            consumers=("q", "k"),
            alpha=0.5,
            **magnitudes,
            error_before=None,
            error_after=None,
            difference=0.0,
            seconds=0.1,
        )
    ]
    scores = Scores({"baseline": {}, "compressed": {}, "four": {}, "three": {}}, notes=["no speed"])
    run = RunInfo("k", "n", {}, datetime.now(UTC), "c")
    made = record(results[8], scores, run, {"four": results[4], "three": results[3]})
    assert list(made["recipes"]) == ["compressed", "four", "three"] and made["recipes"]["compressed"] == made["recipe"]
    (step,) = made["recipes"]["four"]
    assert (
        step["method"] == "rtn"
        and step["knobs"]["bits"] == 4
        and step["text"] == "rtn(bits=4, group_size=16)"
        and step["source"]
    )
    assert parse_recipe(step["text"]) == results[4].recipe
    assert made["notes"] == ["slow", "four, three: emulated", "no speed"]
    assert made["folds"][0]["consumers"] == ["q", "k"] and made["folds"][0]["x_after"]["max"] == 2.0
    assert not problems_of(made)
    alone = record(results[3], scores, run)
    assert (
        alone["folds"] == [] and list(alone["recipes"]) == ["compressed"] and alone["notes"] == ["emulated", "no speed"]
    )


def test_rows_of_any_record():
    """What is missing or of another type is None or empty; typed rows are read as they are."""
    bare = typed(None)
    assert bare.scores == {} and bare.cache is bare.calibration is bare.run.duration_s is None and bare.models == []
    assert dataclasses.asdict(typed({"layers": 3, "model": "x", "tasks": [], "speed": {"a": None}})) == (
        dataclasses.asdict(bare) | {"speed": {"a": dataclasses.asdict(typed({"speed": {"a": {}}}).speed["a"])}}
    )
    steps = [{"method": "gptq", "knobs": {"bits": 4, "skip": ""}}, {"text": "int8"}]
    made = typed({"recipes": {"other": steps}, "scores": {"other": {"a": 10**400, "b": None, "c": "0.5"}}})
    assert made.recipe_of("other") == "gptq(bits=4), int8" and made.recipe_of("baseline") is None
    assert made.scores == {"other": {"a": math.inf}} and typed(made) is made


def test_records_are_whole_or_refused(tmp_path):
    whole = {
        "schema_version": 1,
        "run": dict.fromkeys(("key", "notebook", "started", "duration_s"), "x"),
        "recipe": [],
        "model": dict.fromkeys(("name", "weights_sha256", "parameters"), "x"),
        "calibration": None,
        "layers": [],
        "scores": {"baseline": {}, "compressed": {}},
        "kernels": {},
        "provenance": dict.fromkeys(
            ("commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"), "x"
        ),
    }
    path = write_record(whole, tmp_path / "record.json")
    assert read_record(path) == whole and [p.name for p in tmp_path.iterdir()] == ["record.json"]
    for key in whole:
        with pytest.raises(ValueError, match=f"`{key}` is missing"):
            write_record({k: v for k, v in whole.items() if k != key}, path)
    assert problems_of({**whole, "scores": {"baseline": {}}}) == ["`scores.compressed` is missing"]
    assert read_record(path) == whole, "a failed write leaves the old record"
    write_record(whole | {"scores": {"baseline": {"m": math.nan}, "compressed": {"m": -math.inf}}}, path)
    rows = typed(json.loads(path.read_text(), parse_constant=pytest.fail))
    assert math.isnan(rows.score("baseline", "m")) and rows.score("compressed", "m") == -math.inf
    path.write_text(json.dumps({**whole, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema_version 99"):
        read_record(path)
    path.write_text('{"schema')
    with pytest.raises(ValueError, match="holds no record"):
        read_record(path)


def test_a_text_that_is_a_file_has_a_short_name(tmp_path):
    """Metrics, parameters and pages hold no path; two files of one name are told apart, a copy is the same text."""
    files = [tmp_path / folder / "text.txt" for folder in ("a", "b", "c")]
    for file, words in zip(files, ("one", "two", "one"), strict=True):
        file.parent.mkdir()
        file.write_text(words)
    one, other, copy = (text_name(str(file)) for file in files)
    assert one == copy != other and one.startswith("text-") and len(one) == len("text-") + 6
    assert text_name("wikitext2") == "wikitext2" and text_name("owner/name") == "owner/name"
    assert short_path(str(files[0])) == "…/a/text.txt"
    info = RunInfo("k", "n", {"eval_corpus": str(files[0])}, datetime.now(UTC), f"papermill -p eval_corpus {files[0]}")
    assert with_short_names(info.parameters) == {"eval_corpus": one}
    assert run_record._shortened(info) == "papermill -p eval_corpus …/a/text.txt"


def test_scores_show_changes_units_and_noise_and_texts_side_by_side():
    """A notebook shows labels instead of keys; speeds within the quartiles, and losses within their error, are noise."""
    speed = {
        "baseline": {"decode_quartiles": (95.0, 105.0), "prefill_quartiles": (900.0, 1100.0)},
        "compressed": {"decode_quartiles": (180.0, 220.0), "prefill_quartiles": (950.0, 1150.0)},
    }
    metrics = {
        "baseline": {"perplexity_a<b": 20.0, "perplexity_a<b_stderr": 0.5, "decode_tokens_per_s": 100.0,
                     "prefill_tokens_per_s": 1000.0, "stored_bytes": 269e6},
        "compressed": {"perplexity_a<b": 20.2, "perplexity_a<b_stderr": 0.5, "kl_a<b": 0.02, "decode_tokens_per_s": 200.0,
                       "prefill_tokens_per_s": 1050.0, "stored_bytes": 113e6},
    }  # fmt: skip
    difference = {"compressed": {"nll_a<b": 0.01, "nll_a<b_stderr": 0.02}}
    samples = [Sample("Why <b>?", {"baseline": "It is so.", "compressed": "It is not."}, {"compressed": 2})]
    shown = Scores(metrics, difference, speed=speed, samples=samples, notes=["a note"])._repr_html_()
    for text in (
        "Perplexity on a&lt;b",
        "<small>MB</small>",
        "113<",
        "≈ +1.0 %",
        "≈ +5.0 %",
        "2.00×",
        "0.42×",
        "a note",
    ):
        assert text in shown, text
    assert "perplexity_" not in shown and "_tokens_per_s" not in shown, "no raw keys"
    good, noise = (CELL_COLOURS[kind] for kind in ("good", "noise"))
    assert f"{good}'>2.00×" in shown and f"{noise}'>≈ +1.0 %" in shown
    assert "Why &lt;b&gt;?" in shown and "It is <span style='text-decoration:underline dotted'>not.</span>" in shown
    assert "It is so.</td>" in shown, "the baseline's text has no mark"
