"""The notebook that takes any recipe and measures everything, and the one that puts runs side by side."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch

from eval.record.manifest import file_sha256
from eval.record.schema import read_record
from notebooks.batch.cli import main
from notebooks.batch.pages import compared, outcomes, verdict_of, write_all
from notebooks.batch.run_folder import NEEDED, RunFolder
from notebooks.batch.status import runs_folder
from notebooks.study import measures
from notebooks.study.measures import Asked, Unasked
from notebooks.study.parameters import FOLDER

ROOT = FOLDER.parent
PUBLISHED = ROOT / "reports" / "published"
TINY = {
    "model_name": "tiny",
    "samples": 2,
    "seqlen": 64,
    "window": 64,
    "max_windows": 2,
    "speed_rounds": 1,
    "write_tokens": 8,
}


@pytest.fixture
def task_path(tmp_path):
    """A folder with one task of six questions."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": f"{a} + {b} =", "choices": [str(a + b), str(a + b + 1)], "gold": 0}
        for a in (1, 2, 3)
        for b in (4, 5)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 1}\n"
    )
    return str(folder)


@pytest.mark.long
def test_everything_is_measured_and_reported(tmp_path, task_path, monkeypatch, run_cells):
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(measures, "measure_efficiency", partial(measures.measure_efficiency, rounds=1, seconds=0.1))
    monkeypatch.setattr(measures.roofline, "measure", partial(measures.roofline.measure, toy=True))
    given = TINY | {
        "recipe": "rtn(bits=4)",
        "compare": "wider: rtn(bits=8)",
        "tasks": ["sums"],
        "task_path": task_path,
        "task_limit": 4,
        "temperatures": [0.7],
        "write_tokens": 2,
        "speed_batches": [1, 2],
        "speed_prompts": [8],
        "efficiency": True,
        "lossless": True,
        "exact": True,
        "calibrate": "once",
        "run_path": str(tmp_path / "run"),
        "work_path": str(tmp_path / "work"),
    }
    cells = run_cells("recipe", given)
    made = read_record(tmp_path / "run" / "record.json")
    names = ["baseline", "compressed", "wider"]
    parts = {"tasks", "generation", "speed_grid", "efficiency", "cost", "lossless"}
    assert list(made["scores"])[:3] == names and parts <= set(made)
    assert list(made["lossless"]["drafts"]) == names[1:]
    assert all(row["same"] for row in made["lossless"]["speeds"])
    assert all("acc_sums" in made["scores"][name] and "length_tokens_greedy" in made["scores"][name] for name in names)
    assert made["tasks"]["rows"][0]["n"] == 4 and "LayerCast" in made["tasks"]["settings"]["dtype"]
    assert (
        set(made["tasks"]["compared"]) == {"compressed", "wider"}
        and len(list((tmp_path / ".answers").rglob("*.json"))) == 3
    )
    assert {(row["model"], row["batch"]) for row in made["speed_grid"]["rows"]} >= {
        (name, b) for name in names for b in (1, 2)
    }
    assert made["efficiency"]["compressed"]["compression_rate"]["value"] > 1
    assert any("calibrate='once'" in note for note in made["notes"]) and not made["recipe"][0]["knobs"]["sequential"]
    assert any(row["model"] == "compressed" and row["measured_s"] for row in made["cost"]["rows"])
    for file in ("compressed.sums.jsonl", "generations.jsonl"):
        assert (tmp_path / "run" / "samples" / file).stat().st_size > 0
    html = (tmp_path / "run" / "report.html").read_text()
    assert all(f">{title}</h2>" in html for title in ("Tasks", "Generation", "Lossless speed by guesses"))
    assert "<table" in cells["answers"]._repr_html_() and "<table" in cells["costs"]._repr_html_()


@pytest.mark.slow
def test_measures_that_are_not_requested_are_not_made(tmp_path, monkeypatch, run_cells):
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    cells = run_cells("recipe", TINY | {"recipe": "rtn(bits=4)", "run_path": str(tmp_path)})
    made = read_record(tmp_path / "record.json")
    assert (
        not {"tasks", "generation", "speed_grid", "efficiency", "cost", "lossless"} & set(made)
        and "decode_tokens_per_s" in made["scores"]["baseline"]
    )
    for name in ("answers", "written", "speeds", "used", "costs", "guesses"):
        assert isinstance(cells[name], Unasked) and "Not asked for" in cells[name]._repr_html_()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"recipe": "gptk"}, "gptk is not a method"),
        ({"recipe": "int8, smoothquant"}, "must come before"),
        ({"compare": "baseline: rtn"}, "'baseline' is what another model of the run is called"),
        pytest.param({"tasks": ["sums_and_more"]}, "'sums_and_more'", marks=pytest.mark.slow),  # imports lm-eval
        ({"tasks": ["sums"], "few_shot": -2}, "`few_shot` (=-2)"),
        ({"task_limit": -1}, "`task_limit` (=-1)"),
        ({"temperatures": [0.5, "hot"]}, "`temperatures`"),
        ({"typos": 5.0}, "`typos` (=5.0) must be a share of the letters, from 0 to 1"),
        ({"calibrate": "twice"}, "`calibrate` (='twice') must be one of sequential, once"),
    ],
)
def test_recipe_refuses_before_the_model_is_loaded(given, message, task_path, run_cells):
    with pytest.raises(ValueError) as caught:
        run_cells("recipe", {"task_path": task_path} | given, until="load_model(model_name")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"temperatures": [-1.0]}, "`temperatures`"),
        ({"speed_batches": [0]}, "`speed_batches` (=[0])"),
        ({"speed_batches": [1], "speed_prompts": [4096]}, "2048"),
    ],
)
def test_recipe_refuses_before_any_work(given, message, monkeypatch, run_cells):
    monkeypatch.setattr(sys.modules["compress.apply"], "apply", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(ValueError) as caught:
        run_cells("recipe", TINY | given)
    assert message in str(caught.value)


def test_the_asked_check_themselves(tiny):
    with pytest.raises(ValueError, match="`task_limit`"):
        Asked(None, task_limit=-3)
    assert isinstance(Asked(None).answers({}, None), Unasked)
    with pytest.raises(ValueError, match="`speed_batches` compares .* is no cache of transformers"):
        Asked(None, speed_batches=[1], speed_prompts=[8]).check(tiny("rwkv"), None)


@pytest.mark.long
def test_recipe_runs_on_the_real_model(papermill, data):
    """Through papermill; two bits leave nothing of the text, nor of the answers."""
    given = {
        "recipe": "rtn(bits=2, skip='*.[12]?.*')",  # the first 10 of 30 blocks prove the same
        "samples": 1,
        "seqlen": 64,
        "window": 128,
        "max_windows": 1,
        "speed_rounds": 0,
        "write_tokens": 0,
        "task_limit": 5,
        "tasks": ["arc_easy_local"],
    }
    made = papermill("recipe", given)
    base, two = (made["scores"][name] for name in ("baseline", "compressed"))
    assert base["perplexity_pydocs"] < two["perplexity_pydocs"] / 10
    paired = made["tasks"]["compared"]["compressed"]["arc_easy_local"]
    assert paired["n"] == 5 and paired["right_to_wrong"] + paired["wrong_to_right"] + paired["same"] == 5
    assert 1 > base["acc_norm_arc_easy_local"] >= two["acc_norm_arc_easy_local"]


RECORDS = sorted(map(str, PUBLISHED.glob("*smollm2*.json")))


def test_compare_runs_through_papermill(tmp_path, papermill):
    papermill("compare", {"runs": RECORDS, "page": tmp_path / "page.html", "title": "All published"})
    page = (tmp_path / "page.html").read_text()
    assert "All published" in page and len(page.encode()) <= 1_000_000 and page.count("<svg") >= 2
    shown = (tmp_path / "out.ipynb").read_text()
    assert (
        f"{len(RECORDS)} runs: {len(RECORDS)} finished" in shown
        and "No run failed." in shown
        and shown.count("data:image/svg+xml") >= 2
    )


def test_compared_needs_runs(tmp_path):
    with pytest.raises(ValueError, match="nothing stands there yet"):
        compared([], tmp_path)
    with pytest.raises(ValueError, match="'nothing'"):
        compared(["nothing"], tmp_path)
    assert runs_folder(tmp_path) == tmp_path


def test_verdicts_have_an_exit_status(workbench, tmp_path):
    """Of two runs on the same model: good enough for CI, or not."""
    gptq, kv = (next(path for path in RECORDS if name in path) for name in ("/weight-only", "/kv-eviction"))
    same = str(shutil.copy(gptq, tmp_path / "same.json"))
    good = workbench("compare", gptq, same, "--recovery-threshold", "0.99")
    assert good.returncode == 0 and "page: " in good.stdout, good.stderr
    found = outcomes([gptq, next(path for path in RECORDS if "/pruning" in path)], ROOT)
    assert verdict_of(found, 0.1).exit_code == 0 and verdict_of(found, 0.99).exit_code == 1
    compare = ["--runs", str(tmp_path / "runs"), "compare", gptq]
    assert main([*compare, kv]) == 2, "they share no measure of accuracy"
    assert main([*compare, same, "--recovery-threshold", "99"]) == 2
    assert main([*compare, "--recovery-threshold", "0.9"]) == 2, "a verdict needs two"


@pytest.mark.slow
def test_pages_are_made_anew_and_runs_stay_whole(tmp_path, monkeypatch, run_cells):
    """A run's page is not part of what was measured: it may be rendered again."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    folder = tmp_path / "runs" / "one"
    run_cells("recipe", TINY | {"recipe": "rtn(bits=4)", "run_path": str(folder)})
    (folder / "notebook.ipynb").write_text("{}")
    sealed = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in NEEDED}
    (folder / "manifest.json").write_text(json.dumps({"files": sealed}))
    (folder / "report.html").write_text("old")
    assert RunFolder(folder).complete()
    written = write_all(tmp_path / "runs", [])
    assert folder / "report.html" in written and (folder / "report.html").read_text() != "old"
    assert RunFolder(folder).complete()
    index, papers = ((tmp_path / "runs" / name).read_text() for name in ("index.html", "papers.html"))
    assert "rtn" in index and "GPTQ: Accurate" in papers
