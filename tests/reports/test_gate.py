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


def record(scores: dict[str, float]) -> RunRecord:
    return row(RunRecord, {"scores": {"baseline": {}, "compressed": scores}})


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
    "rule, value", [("max", 100), ("min", 0), ("max_ratio", 100), ("max_rise", 100), ("min_ratio", 0)]
)
@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_a_metric_that_the_second_run_lost_is_not_kept(lost, rule, value):
    without = {name: number for name, number in B.items() if name != "perplexity_text"}
    without |= {} if lost is None else {"perplexity_text": lost}
    (checked,) = answer({"perplexity_*": {rule: value}}, without).rows
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
