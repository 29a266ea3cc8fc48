"""What every page has: contents, links around it, its data, tables that a telephone shows; and figures and tables that
notebooks show, trusted or not."""

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import pytest

from eval.record.noise import wilson
from eval.record.schema import read_record
from reports.compare.compare import RunOutcome, compare_page, leaderboard
from reports.page import answers
from reports.page.render import page, render
from reports.parts.figures import Figures
from reports.parts.files import Report, links_of, with_links
from reports.parts.plots import apart

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"


@pytest.fixture(scope="module")
def record() -> dict:
    return read_record(next(PUBLISHED.glob("recipe-smollm2*.json")))


@pytest.fixture(scope="module")
def html(record) -> str:
    return page(record)


@pytest.fixture(scope="module")
def outcome(record) -> RunOutcome:
    return RunOutcome("recipe", "recipe", "finished", record=record)


def test_contents_lead_to_every_heading(html):
    contents = re.search(r"On this page.*?</details>", html, re.S)[0]
    ids = re.findall(r"<h2[^>]* id=\"([^\"]+)\"", html)
    assert re.findall(r'href="#([^"]+)"', contents) == ids == list(dict.fromkeys(ids)) and "provenance" in ids
    assert len(ids) == html.count("<h2")


def test_a_page_holds_its_record_and_its_numbers(record, html):
    packed = re.search(r"data:application/gzip;base64,([^\"]+)", html)[1]
    assert json.loads(gzip.decompress(b64decode(packed))) == json.loads(json.dumps(record))
    lines = list(csv.DictReader(io.StringIO(b64decode(re.search(r"data:text/csv;base64,([^\"]+)", html)[1]).decode())))
    own = record["scores"]["compressed"]
    found = {line["metric"]: line for line in lines if line["model"] == "compressed"}
    assert set(found) == {metric for metric in own if not metric.endswith("_stderr")}
    assert all(float(line["value"]) == own[metric] for metric, line in found.items())
    assert float(found["kl_wikitext2"]["stderr"]) == own["kl_wikitext2_stderr"]


def test_links_are_put_in_and_read_again(html):
    links = {"all runs": "../index.html", "comparison: a & b <c>": "../sweeps/a b/comparison.html"}
    linked = with_links(html, links)
    assert links_of(linked) == links and links_of(html) == {} and "<c>" not in linked.split("<main>")[0]
    assert with_links(linked, {}) == html


@pytest.mark.parametrize("width", [390, 1280])
def test_no_number_is_cut(browser, html, outcome, width):
    for shown in (html, compare_page([outcome])):
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.set_content(shown)
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = tab.evaluate(
            """[...document.querySelectorAll("table.stacked td, figure svg")].filter(one => {
              const box = one.getBoundingClientRect(), text = one.textContent.trim();
              return text && (box.width < 1 || box.right > innerWidth + 1 || one.scrollWidth > one.clientWidth + 1);
            }).map(one => one.textContent.slice(0, 60))"""
        )
        assert not cut if width == 390 else tab.evaluate("document.querySelectorAll('table.stacked').length > 3")
        tab.close()


def test_commands_are_copied_and_the_record_is_downloaded(browser, record, html, tmp_path):
    (tmp_path / "page.html").write_text(html)
    context = browser.new_context(accept_downloads=True)
    tab = context.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    tab.get_by_role("button", name="Copy").click()
    tab.get_by_role("button", name="Copied").wait_for()
    with tab.expect_download() as waiting:
        tab.get_by_role("link", name="everything (JSON)").click()
    assert waiting.value.suggested_filename == f"{record['run']['key']}.json"
    assert json.loads(Path(waiting.value.path()).read_text()) == json.loads(json.dumps(record))
    context.close()


def test_a_figure_is_inline_where_scripts_run_and_a_picture_elsewhere(browser, outcome):
    from reports.compare.pareto import plane_models, planes
    from reports.compare.variants import variants

    drawn = planes(plane_models(variants([outcome])))[0].figure
    shown = Figures("", {"Front": drawn})._repr_html_()
    tab = browser.new_page()
    tab.set_content(shown)
    titles = tab.evaluate("[...document.querySelectorAll('svg title')].map(one => one.textContent)")
    assert tab.locator("img").count() == 0 and any("gptq(bits=4" in one and "on the front" in one for one in titles)
    tab.set_content(re.sub("<script>.*?</script>", "", shown, flags=re.S))
    tab.wait_for_function("document.querySelector('img').naturalWidth > 100")
    assert tab.locator("svg").count() == 0
    tab.close()


def test_a_leaderboard_in_a_cell_is_sorted_and_filtered(browser, outcome):
    shown = leaderboard([outcome])._repr_html_()
    tab = browser.new_page()
    tab.set_content(shown)
    column = next(i for i, name in enumerate(leaderboard([outcome]).head) if name.startswith("stored"))
    tab.locator("thead button").nth(column).click()
    values = tab.evaluate(
        f"[...document.querySelectorAll('tbody tr:not([data-pinned])')].map(r => +r.cells[{column}].dataset.value)"
    )
    assert values == sorted(values) and len(values) == 5
    tab.get_by_label("Filter the recipes").fill("smoothquant")
    assert tab.locator("tbody tr:not([data-pinned]):visible").count() == 1
    tab.close()
    plain = re.sub("<(script|style)>.*?</(script|style)>", "", shown, flags=re.S)
    assert plain.count("<tr") == 7 and "smoothquant(alpha=0.5), int8" in plain, "it can be read without scripts"


def test_papermills_notebook_links_from_its_own_folder(tmp_path):
    """The kernel is started by papermill, in another folder than that of the notebook that papermill writes."""
    (tmp_path / "out").mkdir()
    said = "from reports.parts.files import Report; from pathlib import Path; print(Report(Path('report.html'))._repr_html_())"
    starter = tmp_path / "papermill"
    starter.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {said!r}], check=True)")
    done = subprocess.run(
        [sys.executable, starter, "a.ipynb", "out/b.ipynb", "-p", "x", "c.ipynb"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(PUBLISHED.parents[1])},
    )  # fmt: skip
    assert "href='../report.html'" in done.stdout
    assert "href='report.html'" in Report(Path("report.html"))._repr_html_()


def test_shares_of_few_answers_have_a_width():
    assert wilson(1.0, 4) == pytest.approx((0.5101, 1.0), abs=1e-4) and wilson(0.0, 4)[1] == pytest.approx(
        0.4899, abs=1e-4
    )
    low, high = wilson(0.84, 100)
    assert (low, high) == pytest.approx((0.7558, 0.8990), abs=1e-4)


def test_legends_have_digits_that_differ():
    assert apart([0.01, 0.0123, 0.0149]) == ["0.01", "0.012", "0.015"]
    assert len(set(apart([1.0001, 1.0002, 1.0003]))) == 3


def test_every_question_can_be_read(tmp_path, record):
    lines = {
        "baseline": [("Paris", 1.0, [-1.0, -3.0]), ("Rome", 0.0, [-2.0, -1.0])],
        "compressed": [("Rome", 0.0, [-3.0, -1.0]), ("Rome", 0.0, [-2.0, -1.5])],
    }
    files = {}
    for model, of in lines.items():
        made = [
            {"doc_id": i, "doc_hash": str(i), "question": f"Capital {i}?", "gold": "Paris", "answer": answer,
             "right": right, "loglikelihoods": logs, "choices": ["Paris", "Rome"]}
            for i, (answer, right, logs) in enumerate(of)
        ]  # fmt: skip
        (tmp_path / "samples").mkdir(exist_ok=True)
        (tmp_path / "samples" / f"{model}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
        files[model] = {"capitals": f"samples/{model}.jsonl"}
    made = {**record, "tasks": {**record["tasks"], "files": files}}
    shown = render(made, tmp_path / "report.html").path.read_text()
    assert "Question by question" in shown and "right to wrong" in shown and "88 %" in shown
    assert "Question by question" not in page(made), "a record by itself has no files"
    from eval.record.rows import typed

    found = answers.context(typed(made), tmp_path)
    assert [one.changed for one in found.questions] == ["right to wrong", "same answer"]
    assert found.questions[0].answers[1].p == pytest.approx(1 / (1 + 2.718281828**-2))
    elsewhere = {**record, "tasks": {**record["tasks"], "files": {m: {"a": "../../etc/passwd"} for m in files}}}
    assert answers.context(typed(elsewhere), tmp_path) is None
