"""The page of a run on KV caches, from the record of a real run on the tiny model."""

import copy
import sys

import nbformat
import pytest
import torch

from eval.record.rows import typed
from eval.record.schema import read_record
from notebooks.study.parameters import FOLDER
from reports.page.kv import context
from reports.page.render import page
from reports.parts.caches import cache_rows, speed_rows
from reports.parts.table import cache_markdown, cache_speed_markdown, updated


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Everything that the notebook can find, without compiling."""
    folder, compiled = tmp_path_factory.mktemp("run"), torch.compile
    given = {
        "model_name": "tiny",
        "policy": "expected_attention",
        "allocation": "ada",
        "compare": "in codes: snapkv, kv_int; kv_int(bits=8)",
        "curves": "snapkv(budget={0.5, 0.2})",
        "tasks": ["word", "multi_value"],
        "lengths": [128, 192],
        "samples": 3,
        "speed_contexts": [32, 64],
        "speed_rounds": 1,
        "speed_new_tokens": 2,
        "run_path": str(folder),
    }
    namespace = {}
    torch.compile = lambda step, **_: step
    try:
        for cell in nbformat.read(FOLDER / "kv_eviction.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                exec(cell.source, namespace)
                namespace |= given if "parameters" in cell.metadata.get("tags", []) else {}
    finally:
        torch.compile = compiled
    assert (
        "<img" in namespace["figures"](namespace["made"])._repr_html_()
        and "contexts" in namespace["contexts"]._repr_html_()
    )
    return read_record(folder / "record.json")


def test_title_verdict_and_figures_of_a_page_of_caches(record):
    told = context(typed(record))
    html = page(record)
    assert told["title"] == "tiny with 29 % of its KV cache: expected_attention"
    assert "expected_attention(budget=0.25, allocation=&#39;ada&#39;)" in html, "the knobs are below the title"
    assert [value for value, _ in told["cards"]][0].endswith("×") and len(told["verdict"]) == 5
    assert all(told[key] for key in ("pareto", "by_token", "survival", "budgets", "errors", "depth", "speed"))
    assert "in codes" in html and "random_kv(budget=0.2)" in html and len(html.encode()) < 1_000_000
    names = [row.name for row in cache_rows(typed(record).cache)]
    assert names[:4] == ["full", "compressed", "in codes", "kv_int(bits=8)"] and len(names) == len(set(names)) == 10
    assert [row.name for row in speed_rows(typed(record).cache.speed)][-1] == "full, torch SDPA"
    assert record["cache"]["left_alone"] == {} and record["scores"]["compressed"]["decode_tokens_per_s_64"] > 0


def test_rows_are_what_was_answered(record):
    cache = record["cache"]
    for row in cache_rows(typed(record).cache):
        own = [one for one in cache["answers"] if one["variant"] == row.name and one["visibility"] == "agnostic"]
        exact = [value for one in own for value in one["exact"]]
        assert len(own) == 4 and len(exact) == 12 and row.by["agnostic"].exact == pytest.approx(sum(exact) / 12)
    assert {one["visibility"] for one in cache["answers"] if one["task"] == "multi_value"} == {"agnostic", "visible"}


def test_tables_of_a_readme(record):
    answers, speeds = cache_markdown([record]), cache_speed_markdown([record])
    assert (
        "| full 16-bit cache | 100.0 |" in answers
        and "**`expected_attention(budget=0.25, allocation='ada')`**" in answers
    )
    assert answers.count("\n") == 12 and "64 tokens" in speeds and "full 16-bit cache, torch SDPA" in speeds
    made = updated(
        "<!-- workbench cache a -->\n<!-- end -->\n<!-- workbench cache-speed a -->\n<!-- end -->", lambda _: record
    )
    assert answers in made and speeds in made
    with pytest.raises(ValueError, match="is not of a run on KV caches"):
        cache_markdown([record | {"cache": None}])
    untimed = record | {"cache": record["cache"] | {"speed": None}}
    with pytest.raises(ValueError, match="was not timed"):
        cache_speed_markdown([untimed])
    assert "Speed against context" not in page(untimed)


def test_bytes_outside_of_the_memory_that_attention_reads_are_said(record):
    made = copy.deepcopy(record)
    sizes = made["cache"]["cache_bytes"]["compressed"]
    made["cache"]["elsewhere_bytes"]["compressed"] = {length: size / 4 for length, size in sizes.items()}
    said, before = (context(typed(one))["verdict"] for one in (made, record))
    assert "Of these, 25 % lie outside of the memory that attention reads." in said and len(said) == len(before) + 1


@pytest.mark.parametrize("scheme, width", [("light", 1280), pytest.param("dark", 320, marks=pytest.mark.slow)])
def test_page_in_a_browser(look, record, scheme, width):
    look(record, width, scheme)


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    """What was found of a context is not asked again; of one more recipe, it is asked of that one alone."""
    from compress import load_model
    from eval.contexts import long_context
    from notebooks.study.caches import cache_recipes, haystacks, score_caches

    model, tokenizer = load_model("tiny")
    contexts = haystacks(tokenizer, ["word"], haystack="noise", lengths=[160], count=3).samples
    asked, ask_all = [], long_context._ask_all

    def until(limit):
        def ask(*args):
            if len(asked) == limit:
                raise KeyboardInterrupt
            asked.append(list(args[3]))
            return ask_all(*args)

        return ask

    recipes = cache_recipes("snapkv")
    monkeypatch.setattr(sys.modules["eval.contexts.long_context"], "_ask_all", until(2))
    with pytest.raises(KeyboardInterrupt):
        score_caches(model, recipes, contexts, ["agnostic"], str(tmp_path))
    monkeypatch.setattr(sys.modules["eval.contexts.long_context"], "_ask_all", until(99))
    found = score_caches(model, recipes, contexts, ["agnostic"], str(tmp_path))
    assert (
        asked == 3 * [["full", "compressed"]]
        and found.found().answers == score_caches(model, recipes, contexts, ["agnostic"]).found().answers
    )
    del asked[:]
    recipes = cache_recipes("streaming", compare="also: snapkv")
    more = score_caches(model, recipes, contexts, ["agnostic"], str(tmp_path))
    assert asked == 3 * [["full", "compressed"]]
    assert more.answers["also"] == found.answers["compressed"] and more.answers["compressed"] != more.answers["also"]
    assert more.found() == score_caches(model, recipes, contexts, ["agnostic"], str(tmp_path)).found()
    assert len(asked) == 3
