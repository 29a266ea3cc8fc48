"""Scores against hand computations, and the record that keeps them."""

import copy
import json
import math

import pytest
import torch

from compress import METHODS, apply
from eval.divergence import compare_on_text, divergence
from eval.evaluate import check_evaluation
from eval.generation import first_difference, generate_samples
from eval.memory import peak_above_start, peak_memory
from eval.perplexity import perplexity
from eval.record import problems_of, read_record, write_record
from eval.size import bits_per_weight, size
from eval.windows import mean_and_stderr, windows


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


def test_overlapping_windows_score_each_token_once_with_more_context(tiny, tokens):
    model, ids = tiny("llama"), tokens(1, 40)[0]
    found = perplexity(model, ids, window=16, stride=8)
    parts = [loss_of(model, ids[:, :16], 1)] + [loss_of(model, ids[:, s : s + 16], 8) for s in (8, 16, 24)]
    assert found.tokens == 15 + 3 * 8 == 39, "every token but the first"
    assert found.value == pytest.approx(math.exp(sum(parts) / 39), rel=1e-5)


def test_beginning_of_sequence_goes_before_every_window(tiny, tokens):
    model, ids = tiny("llama"), tokens(1, 30)[0]
    found = perplexity(model, ids, window=11, beginning=[2])
    head = torch.tensor([[2]])
    parts = [loss_of(model, torch.cat([head, ids[:, s : s + 10]], 1), 1) for s in (0, 10, 20)]
    assert found.tokens == 30 and found.value == pytest.approx(math.exp(sum(parts) / 30), rel=1e-5)


def test_limits_and_bad_windows(tokens):
    ids = tokens(1, 50)[0]
    assert len(windows(ids, window=16, limit=2)) == 2
    for bad in ({"window": 1}, {"window": 16, "stride": 0}, {"window": 16, "limit": 0}):
        with pytest.raises(ValueError, match="`window`"):
            windows(ids, **bad)
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
    same = divergence(model, model, ids, window=20)
    assert same.kl == 0 and same.top1_agreement == 1 and same.tokens == 38
    other = tiny("llama", seed=3)
    found = divergence(other, model, ids, window=40)
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


def test_generations_are_compared_token_by_token(tiny, real):
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    model, tokenizer = real
    (sample,) = generate_samples({"baseline": model, "same": model}, tokenizer, ["Say hello."], new_tokens=5)
    assert sample.texts["baseline"] == sample.texts["same"] != "" and sample.first_difference == {"same": None}


def test_records_are_whole_or_refused(tmp_path):
    whole = {
        "schema_version": 1, "run": dict.fromkeys(("key", "notebook", "started", "duration_s"), "x"), "recipe": [],
        "model": dict.fromkeys(("name", "weights_sha256", "parameters"), "x"), "calibration": None, "layers": [],
        "scores": {"baseline": {}, "compressed": {}}, "kernels": {},
        "provenance": dict.fromkeys(("commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"), "x"),
    }  # fmt: skip
    path = write_record(whole, tmp_path / "record.json")
    assert read_record(path) == whole and [p.name for p in tmp_path.iterdir()] == ["record.json"]
    for key in whole:
        with pytest.raises(ValueError, match=f"`{key}` is missing"):
            write_record({k: v for k, v in whole.items() if k != key}, path)
    assert problems_of({**whole, "scores": {"baseline": {}}}) == ["`scores.compressed` is missing"]
    with pytest.raises(ValueError):
        write_record({**whole, "scores": {"baseline": {"m": float("nan")}, "compressed": {}}}, path)
    assert read_record(path) == whole, "a failed write leaves the old record"
    path.write_text(json.dumps({**whole, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema_version 99"):
        read_record(path)
    path.write_text('{"schema')
    with pytest.raises(ValueError, match="holds no record"):
        read_record(path)
