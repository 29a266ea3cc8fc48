"""Gates: limits by metric that a model keeps or not; a metric that is gone is never kept."""

import math

import pytest

from eval.record.reading import row
from eval.record.rows import RunRecord
from reports.compare.gate import RULES, gate_of

A = {
    "kl_text": 0.10,
    "kl_text_stderr": 0.01,
    "perplexity_text": 10.0,
    "acc_x": 0.50,
    "acc_x_stderr": 0.02,
    "decode": 100.0,
}
B = {
    "kl_text": 0.20,
    "kl_text_stderr": 0.01,
    "perplexity_text": 10.5,
    "acc_x": 0.47,
    "acc_x_stderr": 0.02,
    "decode": 90.0,
}


def record(scores: dict[str, float], **more) -> RunRecord:
    return row(RunRecord, {"scores": {"baseline": {}, "compressed": scores}, **more})


def answer(content, b=B, a=A):
    return gate_of(content, "gate.yml").of(record(a), record(b))


@pytest.mark.parametrize(
    "rules, kept",
    [
        ({"kl_text": {"max": 0.2}}, True), ({"kl_text": {"max": 0.1}}, False), ({"acc_x": {"min": 0.47}}, True),
        ({"acc_x": {"min": 0.48}}, False), ({"perplexity_text": {"max_ratio": 1.05}}, True),
        ({"perplexity_text": {"max_ratio": 1.04}}, False), ({"decode": {"min_ratio": 0.9}}, True),
        ({"decode": {"min_ratio": 0.91}}, False), ({"acc_x": {"max_fall": 0.04}}, True),
        ({"acc_x": {"max_fall": 0.02}}, False), ({"perplexity_text": {"max_rise": 0.5}}, True),
        ({"perplexity_text": {"max_rise": 0.4}}, False), ({"*_text": {"max": 11}, "decode": {"min": 95}}, False),
    ],
)  # fmt: skip
def test_a_limit_is_kept_or_not(rules, kept):
    found = answer(rules)
    assert found.exit_code == int(not kept) and ("holds" in str(found)) is kept
    assert {limit.rule for row in found.rows for limit in [row.limit]} <= RULES.keys()


@pytest.mark.parametrize(
    "metric, rule, value",
    [("perplexity_text", rule, 100) for rule in ("max", "max_ratio", "max_rise")]
    + [("acc_x", "min", 0), ("acc_x", "min_ratio", 0), ("acc_x", "max_fall", 9)],
)
@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_a_metric_that_the_second_run_lost_is_not_kept(lost, metric, rule, value):
    without = {name: number for name, number in B.items() if name != metric}
    without |= {} if lost is None else {metric: lost}
    (checked,) = answer({f"{metric[:-1]}*": {rule: value}}, without).rows
    assert not checked.kept and checked.said == f"{'missing' if lost is None else 'not finite'} in the second run"


def test_a_metric_that_the_first_run_lost_decides_where_it_is_read():
    without = {name: number for name, number in A.items() if name != "perplexity_text"}
    assert answer({"perplexity_text": {"max": 11}}, a=without).exit_code == 0
    found = answer({"perplexity_text": {"max_ratio": 2}}, a=without)
    assert found.exit_code == 1 and "missing in the first run" in str(found)


def test_a_limit_that_noise_alone_could_break_says_so_and_is_not_kept():
    (row,) = answer({"kl_text": {"max": 0.19}}).rows
    assert not row.kept and "noise alone could do this" in row.said
    (row,) = answer({"kl_text": {"max": 0.1}}).rows
    assert not row.kept and "noise" not in row.said


@pytest.mark.parametrize(
    "rule, low, noise",
    [("min", 109, True), ("min", 120, False), ("min_ratio", 1.0, True), ("min_ratio", 1.2, False),
     ("max_fall", -5, True), ("max_fall", -30, False)],
)  # fmt: skip
def test_a_speed_breaks_a_limit_by_more_than_the_spread_of_one_model_timed_twice(rule, low, noise):
    """The one rule of noise: its interval is about ± 5 %, and the quartiles do not matter."""

    def timed(speed: float, **more) -> RunRecord:
        row = {
            "decode_tokens_per_s": speed,
            "decode_quartiles": [speed, speed],
            "settings": {"rounds": 3},
            "spread": {"decode": 0.1},
        }
        return record({"decode_tokens_per_s": speed}, speed={"compressed": row | more})

    gate = gate_of({"decode_tokens_per_s": {rule: low}}, "gate.yml")
    (found,) = gate.of(timed(106.0), timed(105.0)).rows
    assert not found.kept and ("noise alone" in found.said) is noise
    (found,) = gate.of(timed(106.0), timed(50.0, load={"others": 0.5})).rows
    assert not found.kept and "noise alone" in found.said, "a disturbed timing tells nothing"


def test_the_time_to_the_first_token_has_the_noise_of_the_prompt():
    row = {"prefill_tokens_per_s": 500.0, "settings": {"rounds": 3}, "spread": {"prefill": 0.1}}
    own = record({"time_to_first_token_s": 1.0}, speed={"compressed": row})
    for limit, noise in ((0.96, True), (0.9, False)):
        (found,) = gate_of({"time_to_first_token_s": {"max": limit}}, "gate.yml").of(own, own).rows
        assert not found.kept and ("noise alone" in found.said) is noise


def test_runs_that_measured_otherwise_are_not_compared():
    text = {"tokens": 1000, "window": 512, "stride": None, "bos": "once", "windows": 2}
    limits = {"perplexity_text": {"max": 11, "max_ratio": 2}}
    for other, kept in (({}, [True, True]), ({"window": 64}, [True, False])):
        a, b = record(A, texts={"text": text}), record(B, texts={"text": text | other})
        found = gate_of(limits, "gate.yml").of(a, b).rows
        assert [one.kept for one in found] == kept
    assert found[1].said == "the runs cannot be compared: other amounts of text"
    a, b = (
        record(A, texts={"text": one}, tasks={"rows": [{"task": "x", "metric": "acc", "n": n}]})
        for one, n in ((text, 5), (text, 9))
    )
    (found,) = gate_of({"acc_x": {"max_fall": 1}}, "gate.yml").of(a, b).rows
    assert not found.kept and "other questions" in found.said
    early, late = (
        {"rows": [{"task": "x", "metric": "acc", "n": 5}]} | more for more in ({}, {"settings": {"chat": False}})
    )
    (found,) = gate_of({"acc_x": {"max_fall": 1}}, "gate.yml").of(record(A, tasks=early), record(B, tasks=late)).rows
    assert found.kept, "an early record does not say that questions were plain text"


@pytest.mark.parametrize("limits", [{"kl_text": {"min": 0.1}}, {"acc_*": {"max": 0.9, "max_rise": 0.1}}])
def test_a_gate_that_no_bad_model_breaks_is_refused(limits):
    with pytest.raises(ValueError, match="of it is better: it needs one of"):
        answer(limits)
    name, rules = next(iter(limits.items()))
    assert answer({name: rules | {"max": 1.0, "min": 0.0}}).rows, "both sides may be bounded"


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "must name metrics with limits"), ([], "must name metrics with limits"), ({"kl_text": 0.2}, "in braces"),
        ({"kl_text": {"maxx": 0.2}}, "did you mean max?"), ({"kl_text": {"max": "much"}}, "`max` (='much')"),
        ({"kl_text": {"max": math.nan}}, "finite"), ({"kl_texts": {"max": 1}}, "'kl_texts'; there are kl_text"),
    ],
)  # fmt: skip
def test_a_gate_that_cannot_be_read_is_refused(content, said):
    with pytest.raises(ValueError, match=r"`--gate` \(='gate.yml'\)") as error:
        answer(content)
    assert said in str(error.value)
