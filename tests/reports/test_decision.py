"""Which recipe a page says to take: within the loss that was asked for, beyond noise, by a name that tells it apart."""

import copy
from pathlib import Path

import pytest

from eval.record.rows import typed
from eval.record.schema import read_record
from reports.compare.compare import RunOutcome, compare_page
from reports.compare.decision import decisions, standing
from reports.compare.pareto import plane_models
from reports.compare.variants import variants
from reports.page.render import Page, page
from reports.parts.text import measured_up_to

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"


def outcome(name: str) -> RunOutcome:
    path = next(PUBLISHED.glob(f"{name}*.json"))
    return RunOutcome.of(name, "finished", read_record(path), path)


def decided(one: RunOutcome, **asked):
    return decisions(plane_models(variants([one])), numbered=False, **asked)


@pytest.fixture(scope="module")
def weights():
    return outcome("weight-only-smollm2")


def test_smallest_is_within_the_loss_that_was_asked_for(weights):
    spots = plane_models(variants([weights]))[0].spots
    for loss in (0.06, 0.1, 0.2, 0.5, 1.5):
        first = decided(weights, loss=loss)[0].choices[0]
        inside = [s for s in spots if not s.variant.baseline and s.effect.cost <= loss]
        if not inside:
            assert first.name == "" and first.purpose == f"No recipe has a KL of at most {loss:.3g} nats per token"
            continue
        least = min(s.amount.value for s in inside) / 1e6
        assert first.purpose.startswith(f"Smallest with a KL of at most {loss:.3g} nats per token")
        assert float(first.numbers.split(" MB")[0]) <= least * 1.005 + 0.05


def test_an_interval_that_reaches_beyond_the_loss_is_said():
    one = outcome("kv-eviction-smollm2-135m-amd-epyc-zen4-2-cores-2026-11-25")
    assert decided(one)[0].choices[0].numbers.endswith("−4 points, at the end of its interval −10")
    assert decided(one, loss=0.2)[0].choices[0].numbers.endswith("−4 points")


def test_speeds_of_a_disturbed_run_are_said_not_to_count():
    record = copy.deepcopy(read_record(next(PUBLISHED.glob("recipe-smollm2-135m-intel*.json"))))
    for row in record["speed"].values():
        row["load"] = {"others": 0.3, "stolen": 0.0, "seconds": 9.0}
    made = str(decided(RunOutcome("busy", "n", "finished", record=record))[0])
    assert "no speed counts, because other processes took 30 % of the processor while it was timed" in made
    assert "none decodes faster" not in made


def test_what_to_avoid_is_beaten_beyond_noise_and_names_what_to_take(weights):
    made = str(decided(weights)[0])
    assert (
        "Avoid rtn(bits=3), rtn(bits=4), nf4 and 3 more: gptq(bits=4) + rtn(bits=8) is smaller and more accurate."
        in made
    )
    noisy = copy.deepcopy(read_record(next(PUBLISHED.glob("weight-only-smollm2*.json"))))
    for of in noisy["difference"].values():
        for metric in [m for m in of if m.endswith("_stderr")]:
            of[metric] = 9.0
    for of in noisy["scores"].values():
        for metric in [m for m in of if m.endswith("_stderr")]:
            of[metric] = 9.0
    made = str(decided(RunOutcome("noisy", "n", "finished", record=noisy))[0])
    assert "more accurate than another beyond noise" in made and "and more accurate." not in made


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_names_tell_the_models_of_every_published_page_apart(path):
    record = read_record(path)
    made = decided(RunOutcome.of("one", "finished", record, path))
    for one in made:
        named = [c.name for c in one.choices if c.name]
        assert all(len(name) <= 110 for name in named)
        assert one.choices[0].purpose.startswith(("Smallest with a", "No recipe has a"))


def test_pages_begin_with_the_decision(weights):
    text = compare_page([weights])
    first = text[text.index('<p class="verdict">') :].split("</p>")[0]
    assert (
        "No recipe has a KL of at most 0.05 nats per token; most accurate: <b>#1 gptq(bits=4) + rtn(bits=8)</b>"
        in first
    )
    assert text.index("runs finished") > text.index(first)
    text = compare_page([weights], allowed_loss=0.1)
    assert "Smallest with a KL of at most 0.1 nats per token, and most accurate: <b>#1 gptq" in text
    cache = page(read_record(next(PUBLISHED.glob("kv-eviction-gemma3*.json"))))
    first = cache[cache.index('<p class="verdict">') :].split("</p>")[0]
    assert (
        "<b>kv_int(bits=4)</b> (8.8 MB" in first
        and "with the question unknown" in cache.split("</ul>")[0] + cache.split("</ul>")[1]
    )


def test_a_recipe_is_good_or_bad_against_its_neighbours(weights):
    found = variants([weights])
    on = plane_models(found)
    assert standing(on, found, "compressed")[0] == (
        "Bad for its size: gptq(bits=4) + rtn(bits=8) is smaller and more accurate; "
        "bad for its speed: gptq(bits=4) + rtn(bits=8) is as fast and more accurate."
    )
    best = next(v for v in found if v.number == 1)
    assert standing(on, found, best.name)[0].startswith("Good for its size: none of the ")
    alone = read_record(next(PUBLISHED.glob("gptq-smollm2*.json")))
    said = Page.of(typed(alone)).context["verdict"][0]
    assert said.startswith("More accurate than rtn_search, rtn of this page (KL on wikitext2).")


def test_good_for_one_and_bad_for_the_other_is_one_sentence(weights):
    found = variants([weights])
    said = {v.name: " ".join(standing(plane_models(found), found, v.name)) for v in found}
    assert said["awq(bits=3)"] == (
        "Bad for its size: gptq(bits=4) + rtn(bits=8) is smaller and more accurate; but good for its speed: none of the "
        "10 other models of this page is as fast and as accurate."
    )


def test_every_verdict_names_the_largest_model(weights):
    limit = "The largest model measured here has {} million parameters; larger ones may behave otherwise."
    gemma = outcome("smoothquant-gemma3")
    assert compare_page([weights, gemma]).count(limit.format("268")) == 1
    for name, size in (("weight-only-smollm2", "135"), ("kv-eviction-gemma3", "268")):
        verdict = Page.of(typed(read_record(next(PUBLISHED.glob(f"{name}*.json"))))).context["verdict"]
        assert verdict.count(limit.format(size)) == 1
    assert measured_up_to([None]) == [] and "has 8.03 billion" in measured_up_to([None, 8_030_000_000, 1])[0]


@pytest.mark.slow
def test_the_speed_of_early_records_is_called_that_of_the_step():
    record = read_record(next(PUBLISHED.glob("smoothquant-smollm2*.json")))
    shown = page(record)
    assert "Decoding step alone <small>tokens/s" in shown and "speed of the decoding step against" in shown
    record["speed"]["compressed"]["step_tokens_per_s"] = 1.0
    assert "Decode <small>tokens/s" in page(record)
