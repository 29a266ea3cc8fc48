"""Pages about many runs and about papers: every run is there, tables sort as numbers, nothing runs that should not."""

import copy
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from eval.record.rows import typed
from eval.record.schema import read_record
from reports.compare.index import MAX_ROWS, _accuracy, index_page, index_row, render_index
from reports.compare.outcome import RunOutcome
from reports.compare.papers import agrees, papers_page, recorded, render_papers
from reports.page.verdict import verdict
from reports.parts.files import LIMIT_BYTES, environment

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "reports" / "published").glob("*.json"))
LEDGER = yaml.safe_load((ROOT / "seeds" / "papers.yml").read_text())
WRITES = r"^(workbench run|papermill|make bench|python -m compress\.commands)| (--out|--write|>) "  # a record
GONE = ["--one-process"]  # of `kernels.harness.validate`, which has no other way now
EVIL = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
FAILURE = {"kind": "out of memory", "cell": 4, "cell_title": "Compress", "error": "Traceback\nRuntimeError: no "
                                                                                  "room", "lines": [],
           "peak_memory_bytes": 9e9, "seconds": 131.0, "attempts": 1}  # fmt: skip
SORTABLE = """{% include "sortable.html" %}<div class="scroll"><table class="sortable" data-filter="Filter" data-rows="things">
<thead><tr><th scope="col">name</th><th scope="col" data-first="descending">value</th>
<th scope="col" data-fixed>fixed</th></tr></thead>
<tbody>{% for name, value in rows %}<tr{{ " data-pinned" if name == "base" }}><th scope="row">{{ name }}</th>
<td data-value="{{ value }}">{{ value }} units</td><td>x</td></tr>{% endfor %}</tbody></table></div>"""


def outcome_of(record: dict) -> RunOutcome:
    run, command = record["run"], record["provenance"]["command"]
    return RunOutcome(run["key"], run["notebook"], "finished", run["key"], record, None, run["parameters"], command)


@pytest.fixture(scope="module")
def outcomes() -> list[RunOutcome]:
    """All published runs and one of each other kind."""
    asked = {"model_name": "smollm2-135m"}
    return [
        RunOutcome("waiting-1", "gptq", "waiting", parameters=asked),
        *(outcome_of(read_record(path)) for path in PUBLISHED),
        RunOutcome("failed-1", "gptq", "failed", "failed/failed-1", failure=FAILURE, parameters=asked),
        RunOutcome("running-1", "pruning", "running", parameters=asked),
    ]


def cells_of(html: str) -> dict[str, list[str]]:
    """The attribute data-value (or the text) of each cell, by the key of the run."""
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", html, flags=re.S)
    found = [
        [value or text for value, text in re.findall(r'<t[hd][^>]*?(?:data-value="([^"]*)")?>(.*?)</t[hd]>', row)]
        for row in rows
    ]
    return {cells[0]: cells for cells in found}


def order_in(tab) -> list[str]:
    return tab.eval_on_selector_all(
        "tbody tr:not([hidden]) th", "cells => cells.map(c => c.dataset.value ?? c.textContent)"
    )


def test_every_run_is_there_with_its_files(outcomes):
    html = index_page(outcomes, comparisons={"quickstart": "sweeps/quick start.html"})
    rows = cells_of(html)
    assert list(rows)[:2] == ["running-1", "failed-1"] and list(rows)[-1] == "waiting-1" and len(rows) == len(outcomes)
    started = [one[4] for one in rows.values() if one[4]]
    assert started == sorted(started, reverse=True) and len(started) == len(PUBLISHED)
    for status, count in (("finished", len(PUBLISHED)), ("failed", 1), ("running", 1), ("waiting", 1)):
        assert re.search(rf"<b[^>]*>{count}</b><span>{status}</span>", html)
    for outcome in outcomes:
        there = [f'href="{outcome.href}/{file}"' in html for file in ("report.html", "notebook.ipynb", "record.json")]
        assert all(there) if outcome.status == "finished" else not any(there)
    assert 'href="sweeps/quick%20start.html"' in html and 'href="failed/failed-1"' in html
    assert "Compress: RuntimeError: no room" in html and rows["failed-1"][1] == "failed out of memory"
    assert rows["failed-1"][5] == "131.0" and "smollm2-135m" in rows["waiting-1"][3]


def test_headline_numbers_are_the_records(outcomes):
    rows = cells_of(index_page(outcomes))
    for outcome in outcomes:
        record, cells = outcome.record, rows[outcome.key]
        if record is None:
            assert all(not value.strip() for value in cells[6:]), "nothing is known of it"
            continue
        kept, smaller = map(float, cells[6:8])
        base, small = record["scores"]["baseline"], record["scores"]["compressed"]
        if record.get("cache"):
            answers = [row for row in record["cache"]["answers"] if row["variant"] in ("full", "compressed")]
            exact = {
                v: [x for row in answers if row["variant"] == v for x in row["exact"]] for v in ("full", "compressed")
            }
            assert kept == pytest.approx(sum(exact["compressed"]) / sum(exact["full"]))
            sizes = record["cache"]["cache_bytes"]
            assert smaller == pytest.approx(sum(sizes["full"].values()) / sum(sizes["compressed"].values()))
            assert bool(cells[8].strip()) == bool(record["cache"]["speed"]), "nothing is said of what was not timed"
        else:
            kept_of_tasks = [
                one["recovery"] for one in record.get("tasks", {}).get("compared", {}).get("compressed", {}).values()
            ]
            text = next(name for name in base if name.startswith("perplexity_") and not name.endswith("_stderr"))
            by_text = base[text] / small[text]
            assert kept == pytest.approx(sum(kept_of_tasks) / len(kept_of_tasks) if kept_of_tasks else by_text)
            assert smaller == pytest.approx(base["stored_bytes"] / small["stored_bytes"])
            if record["speed"]:
                assert float(cells[8]) == small["decode_tokens_per_s"] / base["decode_tokens_per_s"]
            else:
                assert not cells[8].strip(), "nothing is said of what was not timed"


def test_tasks_come_before_perplexity():
    made = copy.deepcopy(outcome_of(read_record(PUBLISHED[0])))
    made.record["tasks"] = {
        "rows": [{"task": "t", "metric": "acc", "n": 9}],
        "compared": {"compressed": {"t": {"recovery": 0.975}}},
    }
    html = index_page([made])
    assert (
        cells_of(html)[made.key][6] == "0.975"
        and "97.5 %<br><small>of 1 task</small>" in html
        and "perplexity, wikitext2" in html
    )


@pytest.mark.parametrize("value", ["NaN", "Infinity", None])
def test_a_lost_perplexity_keeps_nothing(value):
    record = copy.deepcopy(
        next(r for p in PUBLISHED if "perplexity_wikitext2" in (r := read_record(p))["scores"]["compressed"])
    )
    record["tasks"] = {}
    record["scores"]["compressed"]["perplexity_wikitext2"] = value
    share, said = _accuracy(typed(record))
    assert share == 0.0 and said == [("not finite", "perplexity, wikitext2")]
    assert value is None or any(
        "perplexity on wikitext2 is not finite" in sentence for sentence in verdict(typed(record))
    )


def test_runs_without_scores_are_listed():
    record = read_record(PUBLISHED[0]) | {
        "scores": None,
        "model": None,
        "recipe": [],
        "layers": [],
        "bench": {"checks": []},
    }
    made = [
        outcome_of(record),
        RunOutcome("a", "b", "failed"),
        RunOutcome("c", "d", "finished", "e"),
        RunOutcome("f", "g", "failed", failure={"kind": "timeout"}),
        RunOutcome("h", "i", "finished", "", {"scores": None}),
    ]
    assert len(cells_of(index_page(made))) == 5
    assert "No run has been started" in index_page([])


@pytest.mark.slow
def test_many_runs_fit_on_a_page(outcomes, tmp_path):
    """Those that failed are still there; how many were left out is said."""
    long = copy.deepcopy(outcomes[1].record)
    long["recipe"] = [{"method": "gptq", "knobs": {}, "text": "<&>" * 400}]
    many = [
        RunOutcome(f"run-{i}-{'k' * 300}", "gptq", "finished", f"run-{i}-{'k' * 300}", long)
        for i in range(2 * MAX_ROWS)
    ]
    report = render_index(list(map(index_row, [*many, outcomes[-2]])), tmp_path / "index.html")
    html = report.path.read_text()
    shown = len(cells_of(html))
    assert len(html.encode()) <= LIMIT_BYTES and "failed-1" in html and shown > 100
    assert f"{2 * MAX_ROWS + 1 - shown:,} more runs are not listed" in html and f"<b>{2 * MAX_ROWS:,}</b>" in html
    assert list(tmp_path.iterdir()) == [report.path]


@pytest.fixture(scope="module")
def tab(browser):
    """A page with one sortable table: numbers that text would sort wrongly, one that is not there, and a pinned row."""
    rows = [("b", "10"), ("base", "5"), ("C", "0.9"), ("a", "0.123"), ("none", ""), ("d", "-3e2"), ("e", "0.9")]
    tab = browser.new_page()
    tab.set_content(environment().from_string(SORTABLE).render(rows=rows), wait_until="load")
    yield tab
    tab.close()


def test_columns_sort_as_numbers_by_keyboard(tab):
    assert [b.text_content() for b in tab.query_selector_all("thead button")] == ["name", "value"]
    head = tab.locator("thead th").nth(1)
    head.locator("button").focus()
    tab.keyboard.press("Enter")
    assert (
        order_in(tab) == ["base", "b", "C", "e", "a", "d", "none"] and head.get_attribute("aria-sort") == "descending"
    )
    tab.keyboard.press("Space")
    assert order_in(tab) == ["base", "d", "a", "C", "e", "b", "none"] and head.get_attribute("aria-sort") == "ascending"
    assert tab.evaluate("document.activeElement.textContent") == "value", "the focus stays"


def test_columns_sort_as_text(tab):
    tab.locator("thead button").nth(0).click()
    assert order_in(tab) == ["base", "a", "b", "C", "d", "e", "none"]
    assert tab.eval_on_selector_all("[aria-sort]", "heads => heads.map(h => h.textContent)") == ["name"], (
        "one column at a time"
    )
    tab.locator("thead button").nth(0).click()
    assert order_in(tab) == ["base", "none", "e", "d", "C", "b", "a"]


def test_rows_filter(tab):
    box, said = tab.get_by_label("Filter"), tab.locator("[role=status]")
    assert said.text_content() == "6 of 6 things shown" and box.get_attribute("type") == "search"
    box.fill("0.9  E ")
    assert set(order_in(tab)) == {"base", "e"} and said.text_content() == "1 of 6 things shown"
    box.fill("no such thing")
    assert order_in(tab) == ["base"] and said.text_content() == "0 of 6 things shown"
    box.fill("")
    assert len(order_in(tab)) == 7


def test_index_sorts_in_the_browser(browser, outcomes, tmp_path):
    report = render_index(list(map(index_row, outcomes)), tmp_path / "index.html")
    tab = browser.new_page()
    tab.goto(report.path.as_uri())
    tab.get_by_role("button", name="took").click()
    values = tab.eval_on_selector_all("tbody tr", "rows => rows.map(r => r.cells[5].dataset.value)")
    numbers = [float(value) for value in values if value]
    assert numbers == sorted(numbers, reverse=True) and len(numbers) == len(PUBLISHED) + 1 and values[-2:] == ["", ""]
    tab.get_by_label("Filter the runs").fill("failed memory")
    assert (
        order_in(tab) == ["failed-1"]
        and tab.locator("[role=status]").text_content() == f"1 of {len(outcomes)} runs shown"
    )
    tab.close()


def test_readable_without_javascript(browser, outcomes, tmp_path):
    report = render_index(list(map(index_row, outcomes)), tmp_path / "index.html")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(report.path.as_uri())
    assert tab.locator("tbody tr").count() == len(outcomes) and tab.locator("tbody tr").last.is_visible()
    assert tab.locator("input, button").count() == 0, "nothing that would do nothing"
    context.close()


SLOWLY = [pytest.param(*other, marks=pytest.mark.slow) for other in (("dark", 1280), ("light", 320))]


@pytest.mark.parametrize("scheme, width", [("light", 1280), *SLOWLY, ("dark", 320)])
def test_index_in_a_browser(look, outcomes, scheme, width):
    look(index_page(outcomes, comparisons={"quickstart": "compare.html"}), width, scheme)


@pytest.mark.parametrize("scheme, width", [pytest.param("light", 1280, marks=pytest.mark.slow), ("dark", 320)])
def test_papers_in_a_browser(look, scheme, width):
    html = papers_page(LEDGER, records={"gptq": "../reports/published/gptq.html"}, root="..")
    look(html, width, scheme)


def test_papers_say_what_the_ledger_says():
    measured = [m for e in LEDGER for m in e["measured"] or []]
    command, *_, other = (m["command"] for m in measured if "record" not in m)
    paper = next(e["id"] for e in LEDGER if other in [m["command"] for m in e["measured"] or []])
    html = papers_page(LEDGER, records={command: "reports/one.html", paper: "two.html"}, root="..")
    assert html.count("<section") == len(LEDGER) and html.count("not measured here") == sum(
        not e["measured"] for e in LEDGER
    )
    assert html.count('href="reports/one.html"') == sum(m["command"] == command for m in measured)
    assert html.count('href="../reports/published/') == sum("record" in m for m in measured)
    assert html.count("the order that the paper claims") == sum(bool(e["measured"]) for e in LEDGER)
    assert 'href="two.html"' in html and 'href="https://arxiv.org/abs/2210.17323"' in html
    for entry in LEDGER:
        assert f'href="../{entry["module"]}"' in html and f'id="{entry["id"]}"' in html
    assert 'href="../' not in papers_page(LEDGER), "no code beside the page"


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry["id"])
def test_figures_of_the_ledger_are_those_of_the_records(entry):
    """A measurement without a record cites the command that writes one. With one, every number of the value with decimals
    is a figure of it, unless it is a knob's (`budget=0.25`); settings are not values."""
    assert entry["order"], "whether the order that the paper claims appears"
    for one in entry["measured"] or []:
        assert "that README" not in one["command"] and "parameters that" not in one["command"], "a command to paste"
        if "record" not in one:
            assert re.search(WRITES, one["command"]), one["command"]
            continue
        file = ROOT / "reports" / "published" / one["record"]["file"]
        lines = file.suffix == ".jsonl"
        record = [json.loads(line) for line in file.read_text().splitlines()] if lines else json.loads(file.read_text())
        figures = {figure.partition(" ")[0].lstrip("+-") for figure in one["record"]["figures"].values()}
        assert figures and set(re.findall(r"(?<![\w.=,])\d[\d,]*\.\d+", one["value"])) <= figures
        if lines:
            assert re.search(WRITES, one["command"]), one["command"]
        else:
            command = record["provenance" if "provenance" in record else "run"]["command"]
            assert shlex.split(one["command"]) == [part for part in shlex.split(command) if part not in GONE]
        for path, figure in one["record"]["figures"].items():
            shown = re.escape(figure.partition(" ")[0])
            assert re.search(rf"(?<![\d.]){shown}(?!\d|\.\d)", one["value"]), figure
            assert agrees(figure, recorded(record, path)), (figure, recorded(record, path))


def test_figures_are_read_with_their_units():
    record = {"a": {"b": 0.8749, "c": 1.0}, "d": {"e.f": 113095296}, "rounds": [3.0, 1.0, 2.0]}
    assert agrees("2.0", recorded(record, "rounds")) and agrees("3.0", recorded(record, "rounds / 0"))
    assert agrees("0.87", recorded(record, "a / b")) and not agrees("0.88", recorded(record, "a / b"))
    assert agrees("87 %", recorded(record, "a / b")) and agrees("87 of 100", recorded(record, "a / b"))
    assert agrees("113.1 MB", recorded(record, "d / e.f")) and agrees("113,095,296", recorded(record, "d / e.f"))
    assert agrees("3.0", recorded({"a": {"b and c": 3.0}}, "a / b and c"))
    assert agrees("0.94", recorded(record, "a / b and a / c")) and agrees(
        "-12.5 %", recorded(record, "a / b over a / c")
    )
    with pytest.raises(ValueError, match=r"`figures` \(='much'\)"):
        agrees("much", 1.0)
    with pytest.raises(KeyError):
        recorded(record, "a / d")


def test_names_and_links_cannot_run(browser, tmp_path, outcomes):
    bad = "javascript:document.title='owned'"
    record = copy.deepcopy(outcomes[1].record)
    record["recipe"] = [{"method": EVIL, "knobs": {}, "text": EVIL}]
    record["model"]["name"] = record["run"]["started"] = EVIL
    failure = dict.fromkeys(("kind", "cell_title", "error"), EVIL) | {"seconds": 3}
    made = [
        RunOutcome(EVIL, EVIL, "finished", bad, record),
        RunOutcome("b", "c", "failed", "//evil.example", failure=failure),
        RunOutcome("d", "e", EVIL, EVIL, parameters={"model_name": EVIL}),
    ]
    entry = {
        "id": EVIL,
        "title": EVIL,
        "paper": bad,
        "claim": dict.fromkeys(("metric", "value", "setting"), EVIL),
        "module": bad,
        "notebook": EVIL,
        "measured": [dict.fromkeys(("metric", "value", "setting", "command"), EVIL)],
    }
    reports = [
        render_index(
            list(map(index_row, made)), tmp_path / "index.html", comparisons={EVIL: bad, "b": "//evil.example/x"}
        ),
        render_papers([entry], tmp_path / "papers.html", records={EVIL: bad}, root=".."),
    ]
    for report, scripts in zip(reports, (2, 1), strict=True):
        tab = browser.new_page()
        tab.goto(report.path.as_uri())
        assert tab.evaluate("document.querySelectorAll('script').length") == scripts
        assert tab.evaluate("document.querySelectorAll('img').length") == 0 and "owned" not in tab.title()
        links = tab.evaluate(
            "[...document.querySelectorAll('a')].map(a => new URL(a.href).protocol + new URL(a.href).host)"
        )
        assert len(links) > 2 and set(links) == {"file:"}
        tab.close()
