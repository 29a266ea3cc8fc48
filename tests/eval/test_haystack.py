"""Long-context questions: what their tokens say when they are read back, where the needles lie, and what is refused."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from compress import load_model
from eval.contexts.haystack import NOISE, SLACK, TASKS, samples

SENTENCES = [
    f"Story {i} says that the {w} was {'very ' * (i % 7)}{w[::-1]}." for i, w in enumerate(["old", "big", "red"] * 40)
]
DOCUMENTS = [" ".join(SENTENCES[i : i + 8]) for i in range(0, 120, 8)]
WHOLE = {  # what the tokens of a needle say
    **dict.fromkeys(("word", "number"), r" ?The (secret word|pass key) is [\w ]+\."),
    "multi_key": r" ?The secret word of \w+ is \w+\.",
    "multi_value": r" ?One of the secret words of \w+ is \w+\.",
    "variable_tracking": r" ?VAR \w\d = (\d{5}|VAR \w\d)\.",
    "common_words": r"\d+\. \w+",
    "frequent_words": r" ?[a-z]{6}",
    "kv_retrieval": r'"[\da-f]{8}-[\da-f]{4}": [\da-f]{8}-[\da-f]{4},',
}
DEEP = [name for name, task in TASKS.items() if task.deep]


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("tiny")[1]


@pytest.fixture
def draw(tokenizer):
    def make(task, **more):
        return samples(tokenizer, task, **{"documents": DOCUMENTS, "length": 512, "count": 6, **more})

    return make


def same(one, two):
    assert one.task == two.task and one.depth == two.depth and one.length == two.length
    assert torch.equal(one.context, two.context) and len(one.questions) == len(two.questions)
    for p, q in zip(one.questions, two.questions, strict=True):
        assert torch.equal(p.ask, q.ask) and torch.equal(p.answer, q.answer) and p.needles == q.needles


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [256, 1024])
def test_tokens_are_those_of_the_whole_text(tokenizer, draw, task, length):
    beginning = [7]
    for s in draw(task, length=length, beginning=beginning):
        assert s.task == task and s.length == length
        assert length - SLACK <= len(s.context) <= length, "exactly as long as asked for, but for part of a sentence"
        assert s.context[:1].tolist() == beginning
        for q in s.questions:
            whole = torch.cat([s.context[1:], q.ask, q.answer])
            assert tokenizer(tokenizer.decode(whole), add_special_tokens=False).input_ids == whole.tolist()
            assert tokenizer.decode(q.ask).startswith("\n\nThe ") and not tokenizer.decode(q.ask).endswith(" ")
            assert re.fullmatch(r" \S.*\S", tokenizer.decode(q.answer))


@pytest.mark.parametrize("task", TASKS)
def test_needles_are_the_spans_that_hold_the_answer(tokenizer, draw, task):
    for s in draw(task, beginning=[7]):
        for q in s.questions:
            words = tokenizer.decode(q.answer).strip().split(", ")
            held = [tokenizer.decode(s.context[a:b]) for a, b in q.needles]
            assert all(re.fullmatch(WHOLE[task], text) for text in held), "each is a whole needle and no more"
            assert all(any(w in text for w in words) for text in held), "each holds part of the answer"
            assert all(any(w in text for text in held) for w in words), "together they hold all of it"
            rest = tokenizer.decode(
                [t for i, t in enumerate(s.context.tolist()) if not any(a <= i < b for a, b in q.needles)]
            )
            assert not any(re.search(rf"\b{re.escape(w)}\b", rest) for w in words), "and nothing else does"


@pytest.mark.parametrize("task", DEEP)
def test_needle_lies_at_the_depth_and_the_follow_ups_elsewhere(draw, task):
    drawn = draw(task, length=2048, count=10, depths=[0, 0.25, 0.5, 0.75, 1])
    assert [s.depth for s in drawn] == [0, 0.25, 0.5, 0.75, 1] * 2
    for s in drawn:
        (first, end), (second, _) = (q.needles[0] for q in s.questions)
        n = len(s.context)
        assert first / n - 0.06 < s.depth < end / n + 0.06, "but for the needles that come before or after it"
        assert abs(first - second) >= 0.09 * n
        assert (s.depth != 1 or end == n) or task == "kv_retrieval"


@pytest.mark.parametrize("task", DEEP)
def test_depths_are_evenly_spread_by_default(draw, task):
    depths = sorted(s.depth for s in draw(task, length=256, count=30))
    assert 0.05 <= depths[0] < 0.12 and 0.88 < depths[-1] <= 0.95
    assert max(b - a for a, b in zip(depths[:-1], depths[1:], strict=True)) < 0.1


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_samples_whatever_the_count(draw, task):
    few, many, other = draw(task, count=2), draw(task, count=5), draw(task, count=2, seed=1)
    for one, two in zip(few, many[:2], strict=True):
        same(one, two)
    assert len(many) == 5 and not any(torch.equal(a.context, b.context) for a in many for b in many if a is not b)
    assert not torch.equal(few[0].context, other[0].context)


def test_needles_lie_between_whole_sentences(tokenizer, draw):
    for task in ("word", "number", "multi_key", "multi_value", "variable_tracking"):
        for s in draw(task):
            left = re.sub(
                r"(The secret word|The pass key|One of the|VAR).*?\. ?", "", tokenizer.decode(s.context) + " "
            )
            found = re.findall(r"\S.*?\.(?= )", left)
            assert found and set(found) <= set(SENTENCES)
            places = [SENTENCES.index(text) for text in found]
            steps = [(b - a) % len(SENTENCES) for a, b in zip(places[:-1], places[1:], strict=True)]
            assert sum(step > 1 for step in steps) <= 1, "one stretch of text, but for the last gap"


def test_word_and_number_ask_the_same_two_things_the_other_way_around(tokenizer, draw):
    for task, asks in {"word": ["secret word", "pass key"], "number": ["pass key", "secret word"]}.items():
        for s in draw(task):
            assert [tokenizer.decode(q.ask) for q in s.questions] == [f"\n\nThe {ask} is" for ask in asks]
            answers = {ask: tokenizer.decode(q.answer) for ask, q in zip(asks, s.questions, strict=True)}
            assert re.fullmatch(r" \d{5}", answers["pass key"]) and re.fullmatch(
                r" [a-z]+ [a-z]+", answers["secret word"]
            )


def test_lists_count_what_they_ask_for(tokenizer, draw):
    for task, entry in {"common_words": r"\d+\. (\w+)", "frequent_words": r"(\b[a-z]{6}\b)"}.items():
        for length in (256, 1024):
            for s in draw(task, length=length, documents=[]):
                text = tokenizer.decode(s.context).split("words.", 1)[1]
                counts = Counter(re.findall(entry, text)).most_common(4)
                assert ", ".join(word for word, _ in counts[:3]) == tokenizer.decode(s.questions[0].answer).strip()
                assert len({n for _, n in counts}) == 4, "their order is beyond doubt"
                assert len(s.questions[0].needles) == sum(n for _, n in counts[:3]) and s.depth is None


def test_chains_of_variables_hold_together(tokenizer, draw):
    for s in draw("variable_tracking"):
        value, of = {}, re.findall(r"VAR (\w\d) = (?:VAR )?(\w+)\.", tokenizer.decode(s.context))
        for name, source in of:
            value[name] = value.get(source, source)
        for q in s.questions:
            asked = re.search(r"\d{5}", tokenizer.decode(q.ask)).group()
            assert tokenizer.decode(q.answer).strip().split(", ") == [name for name, v in value.items() if v == asked]


def test_short_documents_are_repeated_and_noise_is_a_document(tokenizer, draw):
    for documents in (["Hello there."], NOISE):
        (s,) = draw("word", documents=documents, count=1)
        assert 512 - SLACK <= len(s.context) <= 512
    text = tokenizer.decode(s.context)
    assert text.count("The rain is soft.") > 5 and text.count("The secret word is") == 1


def test_tokenizers_that_put_a_space_before_every_text(stories):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    for task in TASKS:
        for s in samples(tokenizer, task, documents=DOCUMENTS, length=512, count=3):
            assert 512 - SLACK <= len(s.context) <= 512
            for q in s.questions:
                whole = torch.cat([s.context, q.ask, q.answer])
                assert tokenizer(tokenizer.decode(whole), add_special_tokens=False).input_ids == whole.tolist()


def test_bad_arguments_of_contexts_are_refused_with_the_allowed_values(tokenizer, draw):
    with pytest.raises(ValueError, match=r"`task` \(='words'\) must be one of word, number"):
        draw("words")
    for depths in ([0.5, 1.1], [-0.1], []):
        with pytest.raises(ValueError, match="`depths`"):
            draw("word", depths=depths)
    for more in ({"count": 0}, {"length": 0}, {"length": 512.0}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            draw("word", **more)
    for documents in ([], [""], ["no end", "x" * 1000 + "."]):
        with pytest.raises(ValueError, match="`documents` .* no sentence"):
            draw("word", documents=documents)
    with pytest.raises(ValueError, match="must be a list of texts"):
        draw("word", documents="A text. And more.")
    with pytest.raises(ValueError, match="`tokenizer` .* must be a fast one"):
        samples(SimpleNamespace(is_fast=False), "word", documents=DOCUMENTS, length=512, count=1)


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_small_names_one_that_does(draw, task):
    with pytest.raises(ValueError, match=r"`length` \(=24\) is too small for .* works") as refusal:
        draw(task, length=24, beginning=[1, 2])
    enough = int(re.search(r"(\d+) works", str(refusal.value)).group(1))
    assert all(len(s.context) <= enough for s in draw(task, length=enough, beginning=[1, 2]))
