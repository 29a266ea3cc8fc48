"""Texts and tasks that are scored through a compressed KV cache, against plain passes with a mask."""

import pytest
import torch

from compress import METHODS
from compress.kv.attach import attached
from eval.evaluate import evaluate
from eval.tasks.harness import _InMemory
from eval.text.perplexity import perplexity
from eval.text.through_cache import PIECE, logits_through_cache


def test_a_cache_that_keeps_all_changes_nothing(any_model, tokens):
    ids = torch.cat(tokens(2, 70))
    expected = any_model(ids).logits
    if any_model.config.model_type == "mistral":  # all of its layers slide: there is nothing to attach a cache to
        with pytest.raises(ValueError, match="nothing to evict"), attached(any_model):
            pass
        return
    with attached(any_model):
        torch.testing.assert_close(logits_through_cache(any_model, ids, piece=16), expected, rtol=1e-4, atol=1e-4)
        behind = logits_through_cache(any_model, ids, prefix=40, piece=7)
    torch.testing.assert_close(behind, expected[:, 40:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no compressed cache attached"):
        logits_through_cache(any_model, ids)


def test_evicted_positions_are_not_seen(tiny, tokens):
    """Against a plain pass under a mask: the first four positions of a prompt and the last of it stay."""
    model, ids, prefix = tiny("llama"), tokens(1, 70)[0], 60
    with attached(model, [METHODS["streaming"](budget=0.25, sinks=4)]):
        found = logits_through_cache(model, ids, prefix=prefix)
    seen = torch.ones(70, 70, dtype=torch.bool).tril()
    seen[prefix:, 4 : prefix - 11] = False  # 15 positions of 60 stay
    mask = torch.zeros(70, 70).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = model(ids, attention_mask=mask[None, None]).logits[:, prefix:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_perplexity_of_a_compressed_cache_is_said_to_be_of_it(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(3, 100), 1)
    base = tiny("llama")
    plain = perplexity(base, ids, window=100).sums
    with attached(model, [METHODS["kv_int"](bits=8, group_size=32)]):
        stored = perplexity(model, ids, window=100).sums
    with attached(model, [METHODS["streaming"](budget=0.1)]):
        scores = evaluate(model, None, baseline=base, texts={"text": ids}, window=100, write_tokens=0, speed_rounds=0)
    assert stored == pytest.approx(plain, rel=2e-2) and stored != plain
    assert scores.metrics["baseline"]["perplexity_text"] != scores.metrics["compressed"]["perplexity_text"]
    assert f"compressed: texts were read in pieces of {PIECE} tokens" in scores.notes[0]


def test_answers_of_a_task_are_scored_behind_what_was_kept(tiny, tokens):
    """lm-eval's own way and ours, on the same requests: the same without eviction, and behind a mask with it."""
    model, ids = tiny("llama"), tokens(1, 70)[0][0].tolist()
    lm = object.__new__(_InMemory)
    vars(lm).update(_model=model, _max_length=128, _device=torch.device("cpu"))
    seen = torch.ones(69, 69, dtype=torch.bool).tril()
    for methods, hidden in (([], slice(0, 0)), ([METHODS["streaming"](budget=0.25, sinks=4)], slice(4, 49))):
        rows = seen.clone()
        rows[60:, hidden] = False  # 61 tokens come before the answer, of which the last is read with it
        mask = torch.zeros(69, 69).masked_fill(~rows, torch.finfo(torch.float32).min)
        logits = model(torch.tensor([ids[:-1]]), attention_mask=mask[None, None]).logits[0, 60:]
        expected = torch.log_softmax(logits, -1)[torch.arange(9), ids[61:]].sum().item()
        with attached(model, methods):
            told, greedy = lm._through_cache(ids[:61], ids[61:])
        assert told == pytest.approx(expected, rel=1e-4) and not greedy
