"""Texts with typos, and the scores of models that read them."""

from collections import Counter

import pytest

from compress import held_out, load_model
from eval.evaluate import evaluate
from eval.text.perplexity import perplexity
from eval.text.typos import corrupted, with_typos


def test_a_typo_is_a_letter_swapped_left_out_or_replaced_equally_often():
    found = Counter(corrupted("x-", 1, seed) for seed in range(900))
    swapped, left_out = found.pop("-x"), found.pop("-")
    assert all(other[0].isalpha() and other[0] != "x" and other[1:] == "-" for other in found)
    assert len(found) == 25, "each letter but x"
    assert all(240 < count < 360 for count in (swapped, left_out, found.total()))


def test_the_rate_is_that_of_the_letters_and_nothing_else_is_changed():
    text = "x-1 " * 20000
    made = corrupted(text, 0.05)
    letters = [character for character in made if character.isalpha()]
    left_out, replaced = 20000 - len(letters), len(letters) - letters.count("x")
    assert (left_out + replaced) * 3 / 2 / 20000 == pytest.approx(0.05, abs=0.006)
    assert Counter(c for c in made if not c.isalpha()) == {"-": 20000, "1": 20000, " ": 20000}


def test_the_seed_decides_the_typos_and_a_rate_of_0_makes_none():
    text = "A seed decides which letters of a text are typos. " * 20
    assert corrupted(text, 0.1, 3) == corrupted(text, 0.1, 3) != corrupted(text, 0.1, 4) != text
    assert corrupted(text, 0) == text


def test_models_are_scored_on_a_text_and_on_its_copy_with_typos():
    """The copy has scores of its own; those of the text, and what models write, are as without it."""
    model, tokenizer = load_model("tiny")
    texts = {"pydocs": held_out(tokenizer)[:, :2000]}
    how = {"baseline": model, "texts": texts, "window": 64, "max_windows": 2, "speed_rounds": 0, "write_tokens": 4}
    clean, both = (evaluate(model, tokenizer, **how, prompts=(), typos=typos) for typos in (0, 0.2))
    ids = tokenizer(corrupted(tokenizer.decode(texts["pydocs"][0]), 0.2), return_tensors="pt").input_ids
    expected = perplexity(model, ids, window=64, limit=2).value
    for name in ("baseline", "compressed"):
        assert both.metrics[name]["perplexity_pydocs-typos-0.2"] == pytest.approx(expected)
        kept = {metric: value for metric, value in both.metrics[name].items() if "typos" not in metric}
        del kept["peak_memory_bytes"], clean.metrics[name]["peak_memory_bytes"]
        assert kept == clean.metrics[name] and expected != kept["perplexity_pydocs"]
    assert both.metrics["compressed"]["kl_pydocs-typos-0.2"] == 0
    assert list(both.texts) == ["pydocs", "pydocs-typos-0.2"]


def test_a_file_with_typos_has_its_short_name(tmp_path):
    _, tokenizer = load_model("tiny")
    (tmp_path / "words.txt").write_text("some words")
    texts = {str(tmp_path / "words.txt"): tokenizer("some words", return_tensors="pt").input_ids}
    assert list(with_typos(texts, tokenizer, 0.05))[1].startswith("words-")
    assert with_typos(texts, tokenizer, 0) == texts


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_rates_are_shares(rate):
    with pytest.raises(ValueError, match=r"`typos` \(=.*must be a share of the letters, from 0 to 1"):
        corrupted("text", rate)
