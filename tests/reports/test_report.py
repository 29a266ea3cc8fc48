"""The page says what the record says, in any browser, to anybody, and lets nothing in."""

import base64
import gzip
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from markupsafe import escape

from eval.record.metrics import number
from eval.record.rows import typed
from eval.record.schema import read_record
from reports.page import allocation as budget
from reports.page import pruning
from reports.page.folds import context, figures
from reports.page.render import Page, compared, cost_figures, layer_figures, page, render, scores_table
from reports.page.verdict import verdict
from reports.parts import labels, plots
from reports.parts.bars import _clear_of
from tests.reports.records import record_of

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
LIMIT_BYTES = 1_000_000


def make_record(layers: int = 30) -> dict:
    kinds = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    speed = {
        "decode_tokens_per_s": 70.0,
        "decode_quartiles": [68.0, 71.0],
        "step_tokens_per_s": 75.0,
        "step_quartiles": [74.0, 76.0],
        "prefill_tokens_per_s": 1500.0,
        "prefill_quartiles": [1480.0, 1510.0],
        "time_to_first_token_s": 0.34,
        "dtype": "bfloat16",
        "execution": "compiled, weights frozen",
        "kernels": {"int_matmul": ["cpu int4pack"]},
        "settings": {"prompt_tokens": 512, "new_tokens": 32, "rounds": 5, "batch": 1},
    }
    base = {
        "perplexity_pydocs": 20.0,
        "perplexity_pydocs_stderr": 0.5,
        "stored_bytes": 269e6,
        "resident_bytes": 269e6,
        "bits_per_weight": 16.0,
        "peak_memory_bytes": 4e8,
        "decode_tokens_per_s": 70.0,
        "prefill_tokens_per_s": 1500.0,
        "time_to_first_token_s": 0.34,
    }
    small = {
        **base,
        "perplexity_pydocs": 21.5,
        "kl_pydocs": 0.1,
        "kl_pydocs_stderr": 0.01,
        "top1_agreement_pydocs": 0.86,
        "stored_bytes": 113e6,
        "bits_per_weight": 6.7,
        "decode_tokens_per_s": 126.0,
        "prefill_tokens_per_s": 1100.0,
    }
    linears = [
        {
            "name": f"model.layers.{i}.{kind}",
            "shape": [576, 576],
            "format": "int_group",
            "bits_per_weight": 4.25,
            "error": 0.002 + 1e-4 * i,
            "rtn_error": 0.008,
            "tokens": 65536,
        }
        for i in range(layers)
        for kind in kinds
    ]
    fast = {"decode_tokens_per_s": 126.0, "prefill_tokens_per_s": 1100.0}
    fast |= {"decode_quartiles": [120.0, 128.0], "prefill_quartiles": [1080.0, 1120.0]}
    return record_of(
        "gptq-x",
        "gptq",
        linears,
        recipe=[
            {"method": "gptq", "knobs": {"bits": 4, "group_size": 64, "symmetric": True}, "source": "arXiv:2210.17323"}
        ],
        model={"name": "smollm2-135m", "weights_sha256": "ab" * 32, "parameters": 134_515_008},
        calibration={"corpus": "pydocs", "samples": 128, "seqlen": 512, "seed": 0, "sha256": "cd" * 32},
        kept=[
            {
                "name": "model.embed_tokens.weight",
                "shape": [49152, 576],
                "bytes": 56_000_000,
                "reason": "not a linear (Embedding)",
            }
        ],
        scores={"baseline": base, "compressed": small, "rtn": {"perplexity_pydocs": 24.0}},
        difference={"compressed": {"nll_pydocs": 0.07, "nll_pydocs_stderr": 0.004}},
        texts={"pydocs": {"tokens": 16000, "window": 1024, "stride": None, "windows": 16}},
        speed={"baseline": speed, "compressed": speed | fast},
        kernels={"int_matmul": "cpu int4pack"},
    )


def make_fold(block: int, producer: str, consumers: tuple[str, ...], alpha: float | None, shown: bool) -> dict:
    """A link whose inputs have one outlier, 40 before and 8 after, among channels of 1."""
    name = f"model.layers.{block}."
    before = [1.0 + 0.1 * (i % 7) for i in range(500)]
    before[100] = 40.0
    channels = {
        "x_before": before,
        "x_after": [min(v, 8.0) for v in before],
        "w_before": [0.5] * 500,
        "w_after": before,
    }
    return {
        "name": name + producer,
        "kind": "norm" if "norm" in producer else "linear",
        "consumers": [name + c for c in consumers],
        "alpha": alpha,
        "x_before": {"max": 40.0, "p99": 3.0, "median": 1.3},
        "x_after": {"max": 8.0, "p99": 2.0, "median": 1.25},
        "w_before": {"max": 0.5, "p99": 0.5, "median": 0.5},
        "w_after": {"max": 20.0, "p99": 2.0, "median": 1.3},
        "error_before": 0.004,
        "error_after": 0.004 if alpha is None else 0.001,
        "difference": 3e-7,
        "seconds": 0.1,
        "notes": ["no alpha lessens the error in 8 bits"] if alpha is None else [],
        "channels": channels if shown else None,
    }


def make_smoothed_record(layers: int = 10) -> dict:
    """A run with folds and recipes to compare with, two of which were timed."""
    made = make_record(layers)
    attention = tuple(f"self_attn.{x}_proj" for x in "qkv")
    made["folds"] = [
        fold
        for i in range(layers)
        for fold in (
            make_fold(i, "input_layernorm", attention, round(0.3 + 0.1 * (i % 5), 1), i < 3),
            make_fold(i, "mlp.up_proj", ("mlp.down_proj",), None if i % 4 == 1 else 0.8, i < 3),
        )
    ]
    steps = [
        {
            "method": "smoothquant",
            "knobs": {"alpha": "search"},
            "source": "2211.10438",
            "text": "smoothquant(alpha='search')",
        },
        {"method": "int8", "knobs": {"skip": ""}, "source": "arXiv:2211.10438", "text": "int8"},
    ]
    base = made["scores"]["baseline"]
    timed = {**base, "kl_pydocs": 0.2, "stored_bytes": 170e6, "bits_per_weight": 10.1, "prefill_tokens_per_s": 2250.0}
    made["scores"] |= {
        "unsmoothed": {**timed, "perplexity_pydocs": 25.0},
        "nf4": {**timed, "perplexity_pydocs": 23.0, "stored_bytes": 99e6},
    }
    made["recipe"] = steps
    made["recipes"] = {
        "compressed": steps,
        "unsmoothed": steps[1:],
        "nf4": [{**steps[1], "method": "nf4", "text": "nf4"}],
    }
    made["notes"] = ["nf4: a note about nf4."]
    fast = made["speed"]["baseline"] | {"prefill_tokens_per_s": 2250.0, "prefill_quartiles": [2200.0, 2300.0]}
    made["speed"] |= {"unsmoothed": fast, "nf4": fast}
    return made


def make_pruned_record(layers: int = 10) -> dict:
    """A run in which layers were dropped and the rest was pruned, layer by layer, with a curve of strengths."""
    made = make_record(layers)
    for i, layer in enumerate(made["layers"]):
        curve = {"0.15": 0.0001 * (1 + i % 7), "0.3": 0.001, "0.5": 0.01, "0.7": 0.1, "0.9": 1.0 + i / 100}
        layer |= {
            "sparsity": 0.3 + 0.04 * (i % 11),
            "distortion": curve,
            "format": "bitmap",
            "rtn_error": None,
            "bits_per_weight": 9.0,
        }
    made["drops"] = [
        {
            "name": f"model.layers.{i}.self_attn",
            "kind": "attention",
            "block": i,
            "importance": 0.01 + 0.02 * abs(i - 6),
            "order": {6: 1, 7: 2}.get(i),
            "parameters": 884_736 if i in (6, 7) else 0,
        }
        for i in range(layers)
    ]
    made["strengths"] = {
        "lines": [
            {
                "recipe": f"{name}(ratio={{}})",
                "points": [
                    {
                        "value": value,
                        "removed_parameters": 1000,
                        "dropped": [],
                        "seconds": 1.0,
                        "scores": {
                            "perplexity_pydocs": cost * float(value),
                            "perplexity_pydocs_stderr": 1.0,
                            "kl_pydocs": 0.1,
                        },
                    }
                    for value in ("0.3", "0.5")
                ],
            }
            for name, cost in (("wanda", 80.0), ("magnitude", 4000.0))
        ]
    }
    return made


def make_kernel_record() -> dict:
    def row(op, detail, tokens, ours, baseline, **more):
        seconds = {"panels": ours, "bfloat16 prepacked": baseline, "other": baseline * 2}
        return {
            "op": op,
            "index": 0,
            "detail": detail,
            "shape": [4096, 4096],
            "tokens": tokens,
            "status": "timed",
            "ours": "panels",
            "baseline": "bfloat16 prepacked",
            "seconds": seconds,
            "quartiles": {k: [v * 0.9, v * 1.1] for k, v in seconds.items()},
            "how": {},
            "notes": {},
            "rounds": 5,
            "speedup": baseline / ours,
            "strongest": "bfloat16 prepacked",
            "goal": None,
            "goal_us": None,
            "goal_met": None,
            "least_bytes": 9e6,
            "flops": 2 * tokens * 4096**2,
            "rate": "bfloat16",
            "roofline": 0.5,
            **more,
        }

    rows = [
        row("int_matmul", "W4 g64", 1, 4e-4, 1.6e-3, goal=2.5, goal_met=True),
        row("int_matmul", "W4 g64", 64, 6e-3, 5e-3, goal=1.7, goal_us=5000.0, goal_bandwidth=0.65, goal_met=False),
        {"op": "gram", "index": 0, "detail": "", "shape": [], "tokens": None, "status": "skipped: budget"},
    ]
    checks = [
        {
            "op": "int_matmul",
            "index": 0,
            "name": "W4",
            "impl": "cpu",
            "error": 1e-3,
            "tolerance": 1e-2,
            "green": True,
            "message": "",
        },
        {
            "op": "gram",
            "index": 0,
            "name": "odd",
            "impl": "cpu",
            "error": None,
            "tolerance": 1e-5,
            "green": False,
            "message": "NaN",
        },
    ]
    made = make_record(layers=1)
    for key in ("kept", "difference", "texts", "speed", "samples"):
        del made[key]
    return made | {
        "recipe": [],
        "model": None,
        "calibration": None,
        "layers": [],
        "scores": None,
        "kernels": {"int_matmul": "cpu, reference"},
        "bench": {
            "run": {"ops": ["int_matmul", "gram"], "meaningful": True, "budget_s": 60.0, "checks_only": False},
            "unfinished": [],
            "environment": {"gpu": None},
            "ceilings": {"bandwidth": 4e10, "rates": {"bfloat16": 4e11, "int8": 9e11}, "notes": []},
            "checks": checks,
            "rows": rows,
            "summary": {"checks": 2, "red": 1},
        },
    }


def folds(of: list[dict]) -> tuple:
    return typed({"folds": of}).folds


def test_the_page_of_a_kernel_benchmark_says_what_was_found():
    html = page(make_kernel_record())
    for text in (
        "Kernels on a CPU",
        "1 of 2 checks failed; a row whose output was wrong at its own shape was not timed.",
        "the faster in 1",
        "from 0.83× to 4.00×",
        "1 contest was not timed",
        "skipped: budget",
        "2.50×, met",
        "1.70× and 5e+03 µs and 65 % of the bandwidth, missed",
        "40 GB/s",
        "0.4 TFLOP/s",
        "0.9 TOP/s",
        "1 of 2</b><span>goals met",
        "NaN",
    ):
        assert text in html, text
    assert html.count("<svg") == 2
    made = make_kernel_record()
    made["bench"]["run"]["meaningful"] = False
    assert "its times mean nothing" in page(made) and "<svg" not in page(made)
    made = make_kernel_record()
    made["bench"] |= {"rows": [], "ceilings": None}
    assert "<svg" not in page(made)


def test_speed_stands_beside_what_memory_allows():
    made = make_record()
    assert "of the memory" not in page(made), "an older record"
    for row, limit in zip(made["speed"].values(), (100.0, 210.0), strict=True):
        row["memory_limit_tokens_per_s"] = limit
    text = page(made)
    assert "<td>70</td>" in text and "<td>60</td>" in text and "A dashed line is" in text


def test_the_page_of_a_kernel_benchmark_says_what_is_not_there():
    made = make_kernel_record()
    made["bench"] |= {"rows": [], "checks": [], "summary": {"checks": 0, "red": 0}}
    made["bench"]["unfinished"] = [{"op": "gram", "phase": "checks", "next": 0}]
    html = page(made)
    assert "No check was made, so nothing was timed." in html and "All 0" not in html and "Every contest" not in html
    assert "The budget ended before all checks of gram were made." in html
    made = make_kernel_record()
    made["bench"]["rows"] = [row for row in made["bench"]["rows"] if row["op"] == "gram"]
    assert "Nothing to time of int_matmul: no path of its own" in page(made)
    made = make_kernel_record()
    first, second, _ = made["bench"]["rows"]
    first |= {"roofline": 1.9, "rounds": 1, "tokens": 0}
    html = page(made)
    assert "1 of them is above the roofline" in html and "<td>–</td><td>400</td>" in html
    assert html.count("<svg") == 1, "no figure of a speed-up against no tokens"
    second |= {"tokens": 0, "shape": [4096, 4096]}
    assert page(made).count("<svg") == 1


def test_page_is_one_small_file_without_network(tmp_path):
    report = render(make_smoothed_record(layers=80), tmp_path / "report.html")
    html = report.path.read_text()
    assert len(html.encode()) < LIMIT_BYTES
    outside = r"""(?:src|href)=["'](?!#|data:(?:text/csv|application/gzip);base64,)[^"']"""
    assert not re.search(outside, html.replace('xlink:href="#', "")), "nothing is fetched"
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert str(report.path) in report._repr_html_() and [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_notebook_shows_the_outline_of_a_page_and_a_link_that_it_can_open(tmp_path, monkeypatch):
    """Verdict, main numbers and one figure; the link starts in the notebook's folder, because file:// is blocked."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    for made in (make_record(), make_smoothed_record(), make_kernel_record()):
        report = render(made, tmp_path / "runs" / "a key" / "report.html")
        shown = report._repr_html_()
        assert "href='../runs/a%20key/report.html'" in shown and "file:" not in shown
        assert shown.count("src='data:image/svg+xml;base64,") == 1 and "<svg" not in shown
        assert all(str(escape(text)) in shown for card in Page.of(typed(made)).cards for text in card)
        assert str(escape(Page.of(typed(made)).context["verdict"][0])) in shown
    assert "href='report.html'" in replace(report, beside=True)._repr_html_()
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "runs" / "in-a-server.ipynb"))
    assert "href='a%20key/report.html'" in report._repr_html_()


def test_figures_where_they_are_measured():
    made = make_smoothed_record()
    result = SimpleNamespace(layers=made["layers"], recipe=["gptq(bits=4)"])
    assert (
        "Error of every layer" in layer_figures(result)._repr_html_()
        and "gptq(bits=4)" in layer_figures(result)._repr_html_()
    )
    assert "No linear was stored" in layer_figures(SimpleNamespace(layers=[], recipe=[]))._repr_html_()
    for model, kl in (("compressed", 0.1), ("unsmoothed", 0.4), ("nf4", 0.02)):
        made["scores"][model]["kl_pydocs"] = kl
        made["scores"][model].setdefault("stored_bytes", 2e8)
    scores = SimpleNamespace(metrics=made["scores"], speed=made["speed"])
    assert list(cost_figures(scores).svgs) == ["Divergence on pydocs against bytes", "Speed"]
    assert cost_figures(scores)._repr_html_().count("<img") == 2
    two = SimpleNamespace(metrics={name: made["scores"][name] for name in ("baseline", "compressed")}, speed={})
    assert list(cost_figures(two).svgs) == ["Size", "Speed"] and cost_figures(two)._repr_html_().count("<img") == 1


def test_page_says_what_the_record_says():
    html = page(make_record())
    for text in (
        "gptq on smollm2-135m",
        "workbench run gptq-x",
        "arXiv:2210.17323",
        "4.25",
        "ffffffffffff",
        "cdcdcdcdcdcdcdcd",
        "torch 2.13.0",
        "128 × 512 tokens of pydocs",
        "cpu int4pack",
        "model.layers.29.mlp.down_proj",
        "model.embed_tokens.weight",
        "Because.",
        "differs from token 1 on",
    ):
        assert text in html, text
    assert "$" not in html, "no tick is written as mathematics"
    assert html.count("<svg") == 3 and len(set(re.findall(r'\bid="([^"]+)"', html))) == len(re.findall(r'\bid="', html))


def test_verdict_is_honest_both_ways():
    made = make_record()
    said = " ".join(verdict(typed(made)))
    assert "113 MB instead of 269 MB in 16 bits (2.38× smaller)" in said
    assert "from 20.00 to 21.50 (+7.5 %; rounding to nearest, absmax scales, gives 24.00)" in said
    assert "decodes 1.80× as fast" in said and "reads a prompt more slowly" in said and "(0.73×)" in said
    assert "within the noise" not in said
    assert "without smoothquant" not in said
    said = " ".join(verdict(typed(make_smoothed_record())))
    assert "gives 24.00; without smoothquant it would be 25.00, +25.0 %)" in said and said.endswith(
        "nf4: a note about nf4."
    )
    made["difference"]["compressed"] = {"nll_pydocs": 0.001, "nll_pydocs_stderr": 0.004}
    assert "At 16,000 tokens that difference is within the noise." in " ".join(verdict(typed(made)))


def test_table_has_units_errors_and_changes():
    rows = {row.label: row for row in scores_table(typed(make_record())).rows}
    assert scores_table(typed(make_record())).models == ["baseline", "compressed", "rtn"]
    assert [value for value, _ in rows["Perplexity"].cells] == ["20.00", "21.50", "24.00"]
    assert rows["Perplexity"].changes[1] == ("+7.5 %", "bad") and rows["Perplexity"].cells[0][1] == "± 0.5"
    assert rows["Decode"].changes[1].kind == "good" and rows["Stored"].cells[1][0] == "113"
    assert rows["KL to the baseline"].cells[0][0] == "–" and rows["KL to the baseline"].changes[1].text == ""


def test_a_change_within_the_noise_is_marked():
    """A loss by its paired interval, a speed by the quartiles of its rounds, a size by half a per cent."""
    made = make_record()
    made["difference"]["compressed"] = {"nll_pydocs": 0.07, "nll_pydocs_stderr": 0.04}
    for name, ends in (("baseline", [9.0, 13.0]), ("compressed", [12.0, 18.0])):
        made["speed"][name] |= {"decode_quartiles": ends, "prefill_quartiles": ends}
    made["scores"]["compressed"]["stored_bytes"] = 0.997 * made["scores"]["baseline"]["stored_bytes"]
    rows = {row.label: row.changes[1] for row in scores_table(typed(made)).rows}
    assert rows["Perplexity"] == ("≈ +7.5 %", "noise") and rows["Stored"] == ("≈ −0.3 %", "noise")
    assert rows["Decode"].kind == rows["Prefill"].kind == "noise", "quartiles overlap"
    assert '<td class="noise">≈ +7.5 %</td>' in page(made)


def test_models_of_a_run_stand_side_by_side():
    html = page(make_smoothed_record())
    found = compared(typed(make_smoothed_record()))
    assert [row.name for row in found["rows"]] == ["baseline", "compressed", "rtn", "unsmoothed", "nf4"]
    assert scores_table(typed(make_smoothed_record())).models == ["baseline", "compressed", "rtn", "unsmoothed"]
    nf4 = re.search(r"<tr><th[^>]*>nf4</th>.*?</tr>", html)[0]
    assert re.findall(r">([^<>]+)</(?:td|span)>", nf4) == [
        "± 0.5",
        "+15.0 %",
        "0.2000",
        "99.0",
        "10.10",
        "≈ 1.00×",
        "1.50×",
    ]
    assert "unsmoothed<br><small>int8</small>" in html and "smoothquant(alpha=&#39;search&#39;), int8" in html
    figure = re.search(r'<svg[^>]*aria-label="Change of the perplexity.*?</svg>', html, re.S)[0]
    for label in ("16-bit baseline", "smoothquant(alpha='search'), int8", "unsmoothed", "nf4"):
        assert label in figure.replace("&#x27;", "'").replace("&#39;", "'"), label
    assert "Change of the perplexity against decoded tokens per second" in html
    assert ">rtn<" not in figure, "what was not weighed has no place in it"
    assert not compared(typed(make_record())) and "Compared in this run" not in page(make_record())
    many = make_record()
    many["scores"] |= {name: {"perplexity_pydocs": 30.0} for name in ("one", "two")}
    assert compared(typed(many))["rows"][-1].name == "two" and compared(typed(many))["by_size"] == "", (
        "two points are no picture"
    )


def test_labels_of_many_models_lie_apart():
    """Models of the same size and nearly the same perplexity: each label in a place of its own, inside the figure."""
    points = [labels.Point(f"recipe number {i} of many, int8", 165.0, 0.05 * i, i == 3) for i in range(8)]
    points += [labels.Point("16-bit baseline", 269.0, 0.0), labels.Point("broken", 165.0, 900.0)]
    svg = labels.scatter(points, key="k", x_label="x", y_label="y", summary="s")
    found = re.findall(r'text-anchor: (\w+)[^"]*" x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]+)', svg)
    texts = [text for text in found if text[3] in {point.label for point in points}]
    assert len(texts) == len(points)
    boxes = []
    for anchor, x, y, text in texts:
        left = float(x) - (5 * len(text) if anchor == "end" else 0)
        box = (left, float(y) - 9, left + 5 * len(text), float(y))
        assert min(box) > 0 and box[2] < 9.6 * 72 and box[3] < 4.2 * 72
        assert not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes), text
        boxes.append(box)


def test_page_shows_what_was_moved():
    html = page(make_smoothed_record())
    told = context(folds(make_smoothed_record()["folds"]))
    assert told["said"].startswith("17 of 20 links were scaled (alpha 0.3 to 0.8, median 0.7)")
    assert "goes from 30.8× to 6.4×" in told["said"] and "moved by more than 3.0e-07 of itself" in told["said"]
    for text in ("input_layernorm\n→ q, k, v", "mlp.up_proj\n→ down"):
        assert all(line in html for line in text.splitlines()), text
    assert all(told[key] for key in ("channels", "magnitudes", "alphas", "errors")) and html.count("<svg") == 9
    assert html.count("no alpha lessens the error in 8 bits") == 3 and "20 links" in html
    one = [{**fold, "alpha": 0.5} for fold in make_smoothed_record()["folds"]]
    assert context(folds(one))["alphas"] == "" and "(alpha 0.5)" in context(folds(one))["said"], (
        "one value needs no figure"
    )
    bare = [{**fold, "channels": None, "error_before": None, "error_after": None, "alpha": None} for fold in one]
    assert (
        context(folds(bare))["channels"] == context(folds(bare))["errors"] == ""
        and "None of 20 links was moved." in context(folds(bare))["said"]
    )
    page(make_smoothed_record() | {"folds": bare})


def test_page_shows_what_was_taken_away():
    made = make_pruned_record()
    html, told = page(made), pruning.context(typed(made))
    assert told["said"][0] == "Dropped: the attention of block 6, 7 (2 of 10; 1.8 M parameters)."
    assert told["said"][1].startswith("49.2 % of the weights of 70 linears are 0, between 30 and 70 % of each.")
    assert all(told[key] for key in ("importance", "sparsity", "distortion", "figures")) and html.count("<svg") == 7
    assert "number 2" in html and "884,736" in html and "magnitude(ratio={})" in html and ">2,000<" in html
    even = [{**layer, "sparsity": 0.5, "distortion": None} for layer in made["layers"]]

    def said(layers, **ratios):
        scores = {"baseline": dict.fromkeys(ratios, 1.0), "compressed": ratios}
        return pruning.context(typed({"layers": layers, "scores": scores}))

    assert said(even)["sparsity"] == said(even)["distortion"] == "", "one share needs no figure"
    assert "as many of each" in said(even)["said"][0]
    assert not said(make_record()["layers"]) and "Removed parts and weights" not in page(make_record())
    slow, fast = (said(even, decode_tokens_per_s=r, prefill_tokens_per_s=1.0)["said"][-1] for r in (1.02, 1.6))
    assert "save no time here: it decodes 1.02× and reads prompts 1.00×" in slow and "decodes 1.60×" in fast
    quantised = [{**layer, "bits_per_weight": 4.0} for layer in even]
    assert len(said(quantised, decode_tokens_per_s=2.0)["said"]) == 1
    by_output = [drop | {"metric": "output"} for drop in made["drops"]]
    assert "1 − cosine between its input" in page(made) and "KL from those" not in page(made)
    assert "KL from those" in page(made | {"drops": by_output}) and "cosine" not in page(made | {"drops": by_output})
    assert pruning.context(typed({"drops": [*made["drops"], *by_output]}))["measure"][0] == "importance"
    shown = pruning.figures(made["layers"], made["drops"])._repr_html_()
    assert shown.count("<img") == 3 and "Nothing was set to 0" in pruning.figures([], [])._repr_html_()


def test_page_shows_how_a_budget_was_shared_out():
    made = make_record(4)
    for i, layer in enumerate(made["layers"]):
        layer |= {"choice": ("gptq(bits=3)", "gptq(bits=5)")[i % 2], "choices": {"gptq(bits=3)": 0.1}}
    allocation = {"loss": "kl", "budget_bytes": 80_000_000, "beside_bytes": 56_000_000, "layers": 16, "seconds": 60.0}
    allocation |= {"chosen": [79_500_000, 0.2], "curve": [[70_000_000, 0.5], [80_000_000, 0.2], [95_000_000, 0.01]]}
    html = page(made | {"allocation": allocation})
    assert html.count("<svg") == page(made).count("<svg") + 2 and "after 56.0 MB for what stays in 16 bits" in html
    assert "takes 79.5 MB. 28 linears are stored: 14 by gptq(bits=3), 14 by gptq(bits=5)." in html
    shown = budget.figures(made["layers"], allocation | {"loss": "random"})._repr_html_()
    assert shown.count("<img") == 1, "a rule predicts no loss"
    assert "No budget" in budget.figures([], None)._repr_html_()


def test_channels_keep_their_peaks():
    """However many channels there are, the largest is drawn, where it is."""
    values = [1.0] * 5000
    values[1234] = 77.0
    at, largest = plots.envelope(values)
    assert len(at) <= 320 and max(largest) == 77.0 and abs(at[largest.index(77.0)] - 1234) < 20


def test_a_figure_is_drawn_once(monkeypatch):
    """The same arguments give the figure that was drawn; others, failures and what cannot be pickled are drawn."""
    monkeypatch.setattr(plots, "_kept", {})
    monkeypatch.setattr(plots, "_MOST_KEPT", 2)
    calls = []

    @plots.drawn
    def draw(values):
        calls.append(list(values))
        return f"<svg>{1 / len(calls[-1])}</svg>"

    assert draw([1.0, 2.0]) == draw([1.0, 2.0]) == "<svg>0.5</svg>" and len(calls) == 1
    assert draw([1.0]) == "<svg>1.0</svg>" and len(calls) == 2
    assert "ZeroDivisionError" in draw([]) and "ZeroDivisionError" in draw([]) and len(calls) == 4
    assert draw(iter([3.0])) == draw(iter([3.0])) and draw(x for x in [3.0]) == draw(x for x in [3.0])
    assert len(calls) == 7 and len(plots._kept) == 2, "a list's iterator is pickled, a generator is not"
    draw([1.0, 2.0])
    assert len(calls) == 8, "the oldest was forgotten"


def test_folds_show_themselves_in_a_notebook():
    shown = figures(make_smoothed_record()["folds"])._repr_html_()
    assert shown.count("<img") == 4 and shown.count("<img") == shown.count("<h4>")
    used = set(re.findall(r"var\(--(\w+)\)", shown))
    assert used and all(f"--{name}:" in shown for name in used), "a notebook has no page to take colours from"
    assert "Nothing was moved" in figures([])._repr_html_()


def test_numbers_keep_their_digits():
    assert [number(v) for v in (0, 1234567.0, 123.456, 20.4567, 0.012345, 0.000012345, None)] == [
        "0",
        "1,234,567",
        "123",
        "20.46",
        "0.01235",
        "1.23e-05",
        "–",
    ]


def test_records_without_the_extras_render():
    made = make_record()
    for key in ("kept", "difference", "texts", "speed", "samples"):
        del made[key]
    made["calibration"] = None
    made["layers"][0]["rtn_error"] = None
    made["scores"] = {"baseline": {"acc_task": 0.5}, "compressed": {"acc_task": 0.4}}
    assert "Accuracy on task" in page(made)
    made["layers"] = []
    assert "<svg" not in page(made)


def in_browsers():
    """One page narrow and dark, one wide and light; all of them in all ways in the slow tests."""
    for make in (make_record, make_smoothed_record, make_pruned_record, make_kernel_record):
        for width, scheme in ((320, "dark"), (1280, "light"), (1280, "dark"), (320, "light")):
            now = (make, width, scheme) in ((make_record, 1280, "light"), (make_pruned_record, 320, "dark"))
            yield pytest.param(make, width, scheme, marks=[] if now else [pytest.mark.slow])


@pytest.mark.parametrize("make, width, scheme", in_browsers())
def test_page_in_a_browser(look, scheme, width, make):
    look(make(), width, scheme)


def test_prints(browser, tmp_path):
    report = render(make_record(), tmp_path / "report.html")
    tab = browser.new_page()
    tab.goto(report.path.as_uri())
    assert tab.pdf(path=str(tmp_path / "report.pdf"))[:4] == b"%PDF"
    assert Path(tmp_path / "report.pdf").stat().st_size > 20_000
    tab.close()


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_published_records_are_whole_and_of_committed_code(path):
    made = read_record(path)
    assert made["provenance"]["dirty"] is False and made["provenance"]["commit"]


def pages():
    """The page of every published record; only those of each notebook's newest run do not count as slow."""
    runs = {path: read_record(path)["run"] for path in PUBLISHED.glob("*.json")}
    newest = {run["notebook"]: path for path, run in sorted(runs.items(), key=lambda item: item[1]["started"])}
    shown = set(newest.values())
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p not in shown)) for p in sorted(runs)]


@pytest.mark.parametrize("path", pages())
def test_published_pages_are_what_their_records_render_to(path):
    published, rendered = path.with_suffix(".html").read_text(), page(read_record(path))
    assert unpacked(published) == unpacked(rendered), "render it again after such a change"


def unpacked(html: str) -> str:
    """A page with the content of its packed data: libraries pack the same bytes in several ways."""
    return re.sub(
        r"data:application/gzip;base64,([^\"]+)",
        lambda data: hashlib.sha256(gzip.decompress(base64.b64decode(data[1]))).hexdigest(),
        html,
    )


def test_the_page_of_a_stale_run_says_so():
    made = read_record(sorted(PUBLISHED.glob("gptq-*.json"))[0])
    assert "This run is stale" in page({**made, "run": made["run"] | {"stale": True}})
    assert "This run is stale" not in page(made)


def test_numbers_of_speed_bars_are_clear_of_the_lines_of_their_limits():
    from matplotlib.figure import Figure

    ax = Figure(figsize=(4.7, 2)).add_subplot()
    bars = [(75.7, 84.0), (290.0, 299.0), (140.0, 250.0)]
    written = [ax.text(value, i, f"\u2002{value:,.0f}", va="center") for i, (value, _) in enumerate(bars)]
    ax.set_xlim(0, 320)
    _clear_of(ax, [(text, limit) for text, (_, limit) in zip(written, bars, strict=True)])
    ax.figure.draw_without_rendering()
    for text, (_, limit) in zip(written, bars, strict=True):
        box, at = text.get_window_extent(), ax.transData.transform((limit, 0))[0]
        assert (at <= box.x0 + 1 or at > box.x1) and box.x1 <= ax.bbox.x1
    assert [text.get_position()[0] for text in written] == [84.0, 299.0, 140.0]


def test_verdict_tiles_table_and_grid_decide_by_one_rule():
    """A decode speed of 1.8 times the baseline's, and what one model that was timed twice says of it."""
    made = make_record()
    grid = [
        {"model": name, "batch": 1, "prompt_tokens": 8, "decode_ratio": ratio, "decode_tokens_per_s": speed}
        for name, speed, ratio in (("baseline", 70.0, None), ("compressed", 126.0, 1.8))
    ]

    def shown(spread: float, others: float = 0.0) -> tuple[str, str, str, str]:
        noise = {"spread": {"decode": spread}, "load": {"others": others, "stolen": 0.0, "seconds": 9.0}}
        made["speed"] = {name: one | noise for name, one in made["speed"].items()}
        run = typed(made | {"speed_grid": {"rows": grid, "settings": {"rounds": 3}, **noise}})
        (tile,) = (text for _, text in Page.of(run).cards if "decode" in text)
        change = next(row.changes[1].kind for row in scores_table(run).rows if row.label == "Decode")
        return " ".join(verdict(run)), tile, change, page(run)

    said, tile, change, html = shown(0.1)
    assert "decodes 1.80× as fast" in said and "noise" not in tile and change == "good"
    assert '<span class="good">1.80×</span>' in html and "differences of up to decode 10.0 %" in html
    for spread, others in ((0.9, 0.0), (0.1, 0.4)):
        said, tile, change, html = shown(spread, others)
        assert ("(it decodes 1.80× as fast" if others else "1.80×, within the noise") in said
        assert tile.endswith("within the noise") and change == "noise"
        assert '<span class="noise">≈ 1.80×</span>' in html
        assert ("Noisy timings:" in html) == ("other processes took 40 %" in said) == bool(others)


def test_earlier_records_must_agree_with_their_own_grid():
    """Half of the weights at zero, multiplied like others: 1.27 times in turns whose quartiles are apart, and 1.04 in the
    same record's grid."""
    (path,) = PUBLISHED.glob("recipe-smollm2-135m-amd-epyc-zen4-2-cores-2026-11-26.json")
    record = read_record(path)
    run = typed(record)
    ends = [run.speed[name].decode_quartiles for name in ("baseline", "sparsegpt(ratio=0.5)")]
    assert ends[1][0] > ends[0][1], "apart"
    assert not run.counts("decode_tokens_per_s", "sparsegpt(ratio=0.5)") and run.counts("decode_tokens_per_s")
    assert typed(record | {"speed_grid": None}).counts("decode_tokens_per_s", "sparsegpt(ratio=0.5)")


def test_a_head_stands_behind_the_last_block():
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    layers = typed({"layers": [{**make_record()["layers"][0], "name": name} for name in names]}).layers
    places = {kind: [block for block, _ in of] for kind, of in plots.by_kind(layers).items()}
    assert places == {"mlp.up_proj": [0, 1], "lm_head": [2]}


def test_a_speed_of_fewer_rounds_is_named():
    """A variant that is far slower than the others is timed less often."""
    made = make_record()
    slow = made["speed"]["baseline"]
    made["speed"]["bfloat16"] = slow | {"settings": slow["settings"] | {"rounds": 2}}
    assert "“bfloat16”, which is far slower, was timed in 2." in page(made)
    made["speed"]["bfloat16"] = slow
    assert "far slower" not in page(made)


def test_another_way_to_run_the_baseline_is_named():
    """On a GPU the strongest of several ways counts, and the page says how each was executed."""
    made = make_record()
    assert "another way" not in page(made)
    made["speed"]["baseline by torch.compile"] = made["speed"]["baseline"] | {"execution": "torch.compile, in part"}
    html = page(made)
    assert "“baseline by torch.compile” is another way to run the same weights" in html
    assert '<td class="text" style="min-width:11rem">torch.compile, in part</td>' in html
