"""The comparison page: what is marked better is better beyond noise, nothing is lost, nothing runs, and any browser
shows it."""

import copy
import math
import random
import re
from pathlib import Path

import pytest

from eval.record.schema import read_record
from reports.compare import compare as compare_module
from reports.compare import variants as variants_module
from reports.compare.compare import RunOutcome, compare_page, compare_two, leaderboard, render_comparison
from reports.compare.environment import differences, machines
from reports.compare.excerpts import flips, generations
from reports.compare.heatmap import heat_map
from reports.compare.noise import Amount, Effect, ahead, better, standings
from reports.compare.pareto import axes_of, plane_models, planes
from reports.compare.variants import Quantity, variants
from reports.parts.text import clean, link
from tests.reports.records import record_of

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
LIMIT_BYTES = 1_000_000
EVIL = '$\\frac$"><img src=x onerror="window.owned=1"><script>window.owned=1</script></svg>'
TEXT = "perplexity", "news", "10 × 1,024 tokens"
SIZE, DECODE = Quantity("stored"), Quantity("decode")


def make_record(
    key: str,
    models: dict[str, dict],
    *,
    weights: str = "ab",
    cpu: str = "a CPU",
    decode: float = 50.0,
    windows: int = 10,
) -> dict:
    """A record of a baseline and these models: name -> mb, decode (median), nll and its stderr, recipe."""
    base = {
        "perplexity_news": 20.0,
        "perplexity_news_stderr": 1.0,
        "stored_bytes": 200e6,
        "bits_per_weight": 16.0,
        "decode_tokens_per_s": decode,
        "prefill_tokens_per_s": 900.0,
    }
    scores, difference, recipes = {"baseline": base}, {}, {}
    speed = {
        "baseline": {
            "step_tokens_per_s": decode,
            "decode_quartiles": [decode - 1, decode + 1],
            "prefill_quartiles": [890.0, 910.0],
        }
    }
    for name, own in models.items():
        scores[name] = base | {
            "perplexity_news": 20 * math.exp(own["nll"]),
            "kl_news": own["nll"],
            "kl_news_stderr": own["stderr"],
            "stored_bytes": own["mb"] * 1e6,
            "decode_tokens_per_s": own["decode"],
        }
        difference[name] = {"nll_news": own["nll"], "nll_news_stderr": own["stderr"]}
        recipes[name] = [
            {"method": own.get("recipe", name), "knobs": {}, "source": "", "text": own.get("recipe", name)}
        ]
        speed[name] = {
            "step_tokens_per_s": own["decode"],
            "decode_quartiles": [own["decode"] - 1, own["decode"] + 1],
            "prefill_quartiles": [890.0, 910.0],
        }
    for one in speed.values():
        one["settings"] = {"prompt_tokens": 512, "new_tokens": 32, "batch": 1}
    layers = [
        {
            "name": f"model.layers.{i}.mlp.{kind}",
            "format": "int",
            "bits_per_weight": 4.0,
            "error": 0.001 * (i + 1),
        }
        for i in range(6)
        for kind in ("up_proj", "down_proj")
    ]
    return record_of(
        key,
        "notebook",
        layers,
        cpu=cpu,
        recipe=recipes["compressed"],
        recipes=recipes,
        model={"name": f"model-{weights}", "weights_sha256": weights * 32, "parameters": 100_000_000},
        scores=scores,
        difference=difference,
        speed=speed,
        texts={"news": {"tokens": 1024 * windows, "window": 1024, "stride": None, "windows": windows}},
    )


def make_run(key: str, record: dict | None = None, **more) -> RunOutcome:
    return RunOutcome(key, "notebook", "finished" if record else "waiting", **{"href": key, "record": record, **more})


def one(mb: float, decode: float, nll: float, stderr: float = 0.001, **more) -> dict:
    return {"mb": mb, "decode": decode, "nll": nll, "stderr": stderr, **more}


def with_tasks(record: dict, recovery: dict[str, tuple[float, float, float]], n: int = 400) -> dict:
    """Two tasks, one of them flipped answers and generations."""
    made = copy.deepcopy(record)
    tasks = {"easy": ("acc_norm", 0.6), "hard": ("acc", 0.3)}
    compared: dict = {}
    for name, scores in made["scores"].items():
        for task, (metric, accuracy) in tasks.items():
            share, low, high = (1, 1, 1) if name == "baseline" else recovery[name]
            scores |= {f"{metric}_{task}": accuracy * share, f"{metric}_{task}_stderr": 0.02}
            if name != "baseline":
                compared.setdefault(name, {})[task] = {
                    "metric": metric,
                    "n": n,
                    "baseline": accuracy,
                    "value": accuracy * share,
                    "recovery": share,
                    "recovery_low": low,
                    "recovery_high": high,
                    "difference": 0.0,
                    "difference_low": 0.0,
                    "difference_high": 0.0,
                    "right_to_wrong": 9,
                    "wrong_to_right": 4,
                    "same": n - 13,
                    "mcnemar_p": 0.267,
                }
    flip = {
        "task": "easy",
        "doc_id": 7,
        "doc_hash": "x",
        "direction": "right to wrong",
        "question": "What is red?",
        "gold": "A rose",
        "baseline_answer": "A rose",
        "answer": "The sea",
    }
    made["tasks"] = {
        "settings": {"limit": n},
        "compared": compared,
        "flips": {"compressed": [flip] * 3},
        "cached": {},
        "rows": [
            {"task": task, "metric": metric, "n": n, "num_fewshot": 0, "version": 1, "higher_is_better": True}
            for task, (metric, _) in tasks.items()
        ],
        "files": {"compressed": {"easy": "samples/compressed.easy.jsonl", "hard": "samples/compressed.hard.jsonl"}},
    }
    made["generation"] = {
        "settings": {"new_tokens": 64},
        "file": "samples/generations.jsonl",
        "rows": [
            {
                "model": "compressed",
                "temperature": t,
                "first_difference": 20.0,
                "first_difference_stderr": 2.0,
                "same_share": 0.1,
                "length": 60.0,
                "length_stderr": 1.0,
                "repetition": 0.05,
                "repetition_stderr": 0.01,
                "ended_share": 0.5,
                "n": 32,
            }
            for t in (0, 0.7)
        ],
        "samples": [
            {
                "prompt": "Tell me.",
                "temperature": 0,
                "texts": {"baseline": "Once upon", "compressed": "Once when"},
                "first_difference": {"compressed": 1},
            }
        ],
    }
    return made


def make_sweep() -> list[RunOutcome]:
    """Runs with everything that the page can show."""
    first = make_record("a", {"compressed": one(100, 80, 0.02, recipe="four(bits=4)"), "plain": one(100, 80, 0.08)})
    second = make_record("b", {"compressed": one(60, 90, 0.30, recipe="three(bits=3)")}, decode=51.0)
    third = make_record("c", {"compressed": one(99.9, 81, 0.021, recipe="five")}, cpu="another CPU")
    third["provenance"] |= {"dirty": True, "versions": {"torch": "2.12.0"}}
    failure = {
        "kind": "out of memory",
        "cell": 4,
        "cell_title": "Compress",
        "error": "MemoryError: no",
        "lines": ["\x1b[31mline 1\x1b[0m", "line 2"],
        "peak_memory_bytes": 3e9,
        "seconds": 12.0,
        "attempts": 2,
    }
    return [
        make_run("a", with_tasks(first, {"compressed": (0.98, 0.95, 1.01), "plain": (0.9, 0.86, 0.94)})),
        make_run("b", with_tasks(second, {"compressed": (0.8, 0.76, 0.84)})),
        make_run("c", with_tasks(third, {"compressed": (0.97, 0.94, 1.0)})),
        RunOutcome("d", "notebook", "failed", "d", None, failure, {"bits": 2}, "workbench run d"),
        make_run("e"),
    ]


@pytest.fixture(scope="module")
def published() -> list[RunOutcome]:
    made = [read_record(path) for path in sorted(PUBLISHED.glob("*.json"))]
    return [make_run(one["run"]["key"], one) for one in made]


@pytest.fixture(scope="module")
def page_of_all(published) -> str:
    return compare_page(published)


def standing_of(found: list, name: str) -> tuple:
    (row,) = [row for row in found if row.recipe == name]
    return row.status, row.standing


# ---------------------------------------------------------------- numbers and their noise


def test_the_paired_difference_is_used_where_there_is_one():
    made = make_record("a", {"compressed": one(100, 80, 0.05, 0.002)})
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert v.effects[Quantity(*TEXT)] == pytest.approx((0.05, 0.002)) and v.numbers[SIZE].ratio == 0.5
    del made["difference"]
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    after = 20 * math.exp(0.05)
    assert v.effects[Quantity(*TEXT)] == pytest.approx((0.05, math.hypot(1 / 20, 1 / after))), (
        "else both errors, as if independent"
    )
    del made["scores"]["compressed"]["perplexity_news_stderr"]
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert v.effects[Quantity(*TEXT)].stderr is None


def test_recovery_is_the_records_or_from_both_accuracies():
    made = with_tasks(make_record("a", {"compressed": one(100, 80, 0.05)}), {"compressed": (0.9, 0.88, 0.93)})
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    easy, hard = (
        Quantity("task", "easy acc_norm", "n 400, num_fewshot 0, version 1"),
        Quantity("task", "hard acc", "n 400, num_fewshot 0, version 1"),
    )
    assert v.numbers[easy][:2] == pytest.approx((0.54, 0.02)) and v.numbers[easy][4:] == (0.9, 0.88, 0.93)
    assert v.effects[hard] == pytest.approx((0.1, 0.05 / 3.92))
    made["tasks"] = None
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    expected = 1.96 * math.hypot(0.02 / 0.6, 0.9 * 0.02 / 0.6)
    assert v.numbers[Quantity("task", "easy acc_norm")].ratio_low == pytest.approx(0.9 - expected)
    assert {w.of for w in v.numbers if w.kind == "task"} == {"easy acc_norm", "hard acc"}
    made["scores"]["baseline"] |= {"acc_easy": 0.5}
    assert not any(w.of == "easy acc" for v in variants([make_run("a", made)]) for w in v.numbers), (
        "acc_norm stands for a task that has it"
    )


def test_a_group_stands_for_its_tasks():
    """A score over 57 tasks is one column, and is not counted again with each of them."""
    made = with_tasks(make_record("a", {"compressed": one(100, 80, 0.05)}), {"compressed": (0.9, 0.88, 0.93)})
    made["tasks"] |= {"groups": {"hard": ["easy"]}, "settings": {"chat": True}}
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert [w for w in v.numbers if w.kind == "task"] == [
        Quantity("task", "hard acc", "n 400, num_fewshot 0, version 1, chat")
    ]
    made["tasks"]["groups"] = {"unknown": ["easy", "hard"]}
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert len([w for w in v.numbers if w.kind == "task"]) == 2, "tasks of a group without a score stand for themselves"


def test_noise_decides():
    assert better(Effect(0.0, 0.1), Effect(0.3, 0.1)) and not better(Effect(0.0, 0.1), Effect(0.27, 0.1))
    assert not better(Effect(0.3, 0.1), Effect(0.0, 0.1)) and not better(Effect(0.1, 0.0), Effect(0.1, 0.0))
    assert ahead(Amount(99, -1), Amount(100, -1)) and not ahead(Amount(99.6, -1), Amount(100, -1))
    slow, fast = Amount(100, 1, 98, 102, "a"), Amount(105, 1, 103, 107, "a")
    assert ahead(fast, slow) and not ahead(slow, fast)
    assert not ahead(Amount(105, 1, 101, 107, "a"), slow), "quartiles overlap"
    assert ahead(fast._replace(run="b"), slow, drift=1.04) and not ahead(fast._replace(run="b"), slow, drift=1.06)
    assert ahead(fast, slow, drift=1.06), "within a run, drift is no excuse"
    assert not ahead(Amount(200, 1), Amount(100, 1)), "without an interval, nothing is known"


@pytest.mark.parametrize("sign", [1, -1])
def test_standings_are_those_of_every_pair(sign):
    """Against the plain rule, pair by pair; without noise the front is the Pareto front."""
    rng = random.Random(sign)
    for case in range(30):
        points = []
        for _ in range(14):
            value = rng.choice([rng.uniform(50, 150), 100.0, 100.3])
            spread = rng.choice([None, 0.0, 5.0])
            ends = (None, None) if spread is None or sign < 0 else (value - spread, value + spread)
            effect = Effect(rng.choice([rng.uniform(0, 1), 0.5]), rng.choice([None, 0.0, 0.2] if case % 2 else [0.0]))
            points.append((effect, Amount(value, sign, *ends, rng.choice("ab"))))
        found = standings(points, drift := rng.choice([1.0, 1.1]))
        for i, (effect, amount) in enumerate(points):

            def over(j, effect=effect, amount=amount, points=points, drift=drift):
                e, a = points[j]
                least = a.value <= amount.value * 1.005 if sign < 0 else a.value >= amount.value
                return e.cost <= effect.cost and least and (better(e, effect) or ahead(a, amount, drift))

            by = [j for j in range(14) if j != i and over(j)]
            assert (found[i].status == "dominated") == bool(by)
            assert not by or found[i].by in by
            for j in found[i].alike:
                e, a = points[j]
                assert not (
                    better(e, effect) or better(effect, e) or ahead(a, amount, drift) or ahead(amount, a, drift)
                )
            if found[i].status == "noise":
                assert found[found[i].by].status == "front" and points[found[i].by][0].cost <= effect.cost
        assert any(s.status == "front" for s in found)
    assert standings([]) == []


# ---------------------------------------------------------------- leaderboard


def test_one_round_has_no_spread():
    made = make_record("a", {"compressed": one(100, 80, 0.05)})
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert v.numbers[DECODE][2:4] == (79, 81)
    for timed in made["speed"].values():
        timed["settings"]["rounds"] = 1
    (v,) = [v for v in variants([make_run("a", made)]) if not v.baseline]
    assert v.numbers[DECODE][:4] == (80, None, None, None), "not one of zero"


def test_leaderboard_has_every_model_and_one_baseline_a_machine():
    board = leaderboard(make_sweep())
    assert [row.number for row in board.rows] == [0, 0, 1, 2, 3, 4], "two machines, four models"
    assert [row.recipe for row in board.rows[2:]] == ["four(bits=4)", "five", "plain", "three(bits=3)"], (
        "the least loss first"
    )
    assert sorted(row.run for row in board.rows if not row.number) == ["2 runs", "c"]
    shared = next(row for row in board.rows if row.run == "2 runs")
    cells = {c.what.kind: cell for c, cell in zip(board.columns, shared.cells, strict=True)}
    assert cells["decode"].value == 50.5 and cells["decode"].error == "50.0–51.0" and cells["stored"].text == "200.0"
    assert not any(c.what.kind in ("exact", "cache") for c in board.columns), "nobody has those"
    row = {c.what: cell for c, cell in zip(board.columns, board.rows[2].cells, strict=True)}
    assert row[SIZE].text == "100.0" and row[SIZE].change == "50 %" and row[DECODE].change == "1.60×"
    assert row[Quantity(*TEXT)].change == "+2.0 %" and row[Quantity(*TEXT)].error == "± 1"
    easy = next(cell for what, cell in row.items() if what.of == "easy acc_norm")
    assert (easy.text, easy.error, easy.change) == ("58.8", "± 2", "98.0 % [95.0, 101.0]")


def test_the_best_is_marked_and_what_cannot_be_told_from_it():
    board = leaderboard(make_sweep())
    marks = {
        c.what.kind if c.what.kind != "task" else c.label: [row.cells[i].mark for row in board.rows]
        for i, c in enumerate(board.columns)
    }
    assert marks["easy"] == ["", "", "best", "alike", "", ""], "0.98 and 0.97 are within their noise, 0.9 is not"
    assert marks["perplexity"] == ["", "", "best", "alike", "", ""] and marks["stored"] == ["", "", "", "", "", "best"]
    assert marks["decode"] == ["", "", "", "", "", "best"], "the other machine has one model: nothing to be better than"
    assert set(marks["bits"]) == {""}
    same = [make_run(key, make_record(key, {"compressed": one(100, 80, 0.02)})) for key in "ab"]
    assert not any(cell.mark for row in leaderboard(same).rows for cell in row.cells), (
        "nothing is best where all are the same"
    )


def test_the_fastest_is_that_of_its_machine():
    models = {"compressed": one(100, 80, 0.02), "slow": one(100, 60, 0.02)}
    faster = {name: own | {"decode": 3 * own["decode"]} for name, own in models.items()}
    runs = [make_run(key, make_record(key, of, cpu=key)) for key, of in (("a", models), ("b", faster))]
    board = leaderboard(runs)
    (at,) = (i for i, c in enumerate(board.columns) if c.what == DECODE)
    assert {(row.recipe, row.run): row.cells[at].mark for row in board.rows if row.number} == {
        ("compressed in a", "a"): "best",
        ("slow in a", "a"): "",
        ("compressed in b", "b"): "best",
        ("slow in b", "b"): "",
    }


def test_the_same_recipe_of_two_runs_stands_twice():
    runs = [make_run(key, make_record(key, {"compressed": one(100, 80, 0.02, recipe="four")})) for key in "ab"]
    assert [(row.recipe, row.run) for row in leaderboard(runs).rows if row.number] == [
        ("four in a", "a"),
        ("four in b", "b"),
    ]


def test_models_of_one_recipe_have_names_that_tell_them_apart():
    """By the knobs that differ: the model's own, those of its run's recipe, other parameters, and at last the run."""
    models = {"compressed": one(100, 80, 0.02), "rtn": one(90, 80, 0.03)}
    runs = [make_run(key, make_record(key, models)) for key in "abcd"]
    for run, (bits, group_size, corpus) in zip(
        runs, ((3, 64, "x"), (4, 64, "x"), (4, 32, "x"), (4, 32, "y")), strict=True
    ):
        del run.record["recipes"]["rtn"]
        run.record["recipe"][0]["knobs"] = {"bits": bits, "group_size": group_size, "sequential": True}
        run.record["recipes"]["compressed"][0]["text"] = f"gptq(bits={bits})"
        run.record["run"]["parameters"] = {"corpus": corpus, "window": 512}
    names = [row.recipe for row in leaderboard(runs).rows if row.number]
    assert len(set(names)) == len(names) == 8
    assert {"rtn [bits=3, group_size=64, corpus='x']", "gptq(bits=4) [group_size=64, corpus='x']"} <= set(names)
    assert "gptq(bits=3)" in names, "which no other model has"
    runs[3].record["run"]["parameters"]["corpus"] = "x"
    names = {row.recipe for row in leaderboard([make_run(run.key, run.record) for run in runs]).rows}
    assert {f"gptq(bits=4) [group_size={of}" for of in ("64]", "32] in c", "32] in d")} <= names


def test_leaderboard_shows_itself():
    runs = make_sweep()
    runs[0].record["recipes"]["plain"][0]["text"] = EVIL + "|"
    board = leaderboard(runs)
    said, html = board.markdown(), board._repr_html_()
    lines = said.splitlines()
    assert len(lines) == 2 + len(board.rows) and "★ 60.0 (30 %)" in said and "≈ 97.0" not in lines[0]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, "a bar in a name is no column"
    assert "<img" not in html and html.count("<script") == 1 and html.count("<tr") == 1 + len(board.rows)
    few = leaderboard(runs, most=2)
    assert few.hidden == 2 and "2 more rows not shown." in few.markdown()
    assert [row.name for row in few.rows if row.number] == ["", ""], "the main models come first"
    assert leaderboard([make_run("x")]).rows == ()


# ---------------------------------------------------------------- fronts


def test_equal_sizes_are_told_apart_only_beyond_noise():
    models = {
        "compressed": one(100, 80, 0.100, 0.02),
        "near": one(100.2, 80, 0.12, 0.02),
        "far": one(100, 80, 0.3, 0.02),
        "big": one(150, 80, 0.05),
    }
    by_size, by_speed = planes(plane_models(variants([make_run("a", make_record("a", models))])))
    assert standing_of(by_size.rows, "compressed") == ("front", "on the front; indistinguishable at this n from #3")
    assert standing_of(by_size.rows, "near") == (
        "noise",
        "within the noise of the front: #2 compressed; indistinguishable at this n from #2",
    )
    assert standing_of(by_size.rows, "far") == ("dominated", "dominated by #2 compressed")
    assert [row.recipe for row in by_size.front] == ["compressed", "big", "16-bit baseline"], "from the smallest"
    assert "of 5 models, 3 on the front, from the smallest: #2 compressed, #1 big, the 16-bit baseline." in by_size.said
    assert "1 other cannot be told from it at this n. 1 is dominated." in by_size.said
    assert by_size.said.replace("'", "&#x27;") in by_size.figure, "the figure says what it shows"
    for name in ("#1 big", "#2 compressed", ">3<", ">4<"):
        assert name in by_size.figure
    assert standing_of(by_speed.rows, "16-bit baseline")[0] == "front" and by_speed.order == "from the fastest"


def test_speeds_of_different_machines_are_in_different_planes():
    models = {"compressed": one(100, 80, 0.02), "other": one(90, 85, 0.1)}
    runs = [make_run(key, make_record(key, models, cpu=cpu)) for key, cpu in (("a", "slow"), ("b", "fast"))]
    found = planes(plane_models(variants(runs)))
    assert [plane.about for plane in found] == ["Accuracy against stored bytes"] + 2 * ["Accuracy against decode speed"]
    assert len(found[0].rows) == 5 and [len(plane.rows) for plane in found[1:]] == [3, 3], "bytes are bytes everywhere"
    assert "slow" in found[1].caption and "fast" in found[2].caption
    assert "2 models were timed on another machine" in found[1].caption and "another machine" not in found[0].caption
    html = compare_page(runs)
    assert "Speeds were measured on 2 different machines." in html
    assert "different machines" not in compare_page(runs[:1])


def test_nothing_is_compared_that_was_not_asked_the_same():
    models = {"compressed": one(100, 80, 0.02), "other": one(90, 85, 0.1)}
    runs = [
        make_run("a", make_record("a", models)),
        make_run("b", make_record("b", models, windows=3)),
        make_run("c", make_record("c", models, weights="cd")),
    ]
    found = planes(plane_models(variants(runs)))
    sizes = [plane for plane in found if plane.about.endswith("stored bytes")]
    assert [(plane.model, len(plane.rows)) for plane in sizes] == [("model-ab", 3), ("model-ab", 3), ("model-cd", 3)]
    columns = [c.detail for c in leaderboard(runs).columns if c.label == "perplexity"]
    assert columns == ["news, 10 × 1,024 tokens", "news, 3 × 1,024 tokens"]
    assert all(w.kind == "kl" for v in variants(runs) for axis in axes_of([v, v]) for w in axis.quantities)


def test_tasks_are_the_accuracy_where_they_were_asked():
    text, axis = axes_of(variants(make_sweep()))
    assert text.name.startswith("KL on news"), "which tells models apart with the least data, and so comes first"
    assert axis.name == "accuracy on easy, hard" and len(axis.quantities) == 2
    plane = next(one for one in planes(plane_models(variants(make_sweep()))) if "accuracy" in one.said)
    row = next(row for row in plane.rows if row.recipe == "plain")
    assert row.accuracy == "90.0 %" and row.interval == "88.6 to 91.4", "the mean of two, each 0.08 / 3.92"
    assert standing_of(plane.rows, "five")[0] == "noise" and standing_of(plane.rows, "plain")[0] == "dominated"
    runs = make_sweep()
    for run in runs[1:3]:
        del run.record["tasks"]
        run.record["scores"] = {
            name: {m: v for m, v in own.items() if "acc" not in m} for name, own in run.record["scores"].items()
        }
    assert [axis.quantities[0].kind for axis in axes_of(variants(runs))] == ["kl", "task"], "two of four"
    more = [*runs, make_run("f", make_record("f", {"compressed": one(80, 80, 0.2)}))]
    assert [axis.quantities[0].kind for axis in axes_of(variants(more))] == ["kl"], "two of five are too few"


def test_caches_have_a_front_of_their_own(published):
    of_caches = [
        run
        for run in published
        if (run.record.get("cache") or {}).get("speed") and run.record["model"]["name"] == "smollm2-135m"
    ]
    most = [cast for cast in plane_models(variants(published)) if cast.axis.amount == "cache"]
    assert "n 100" in most[0].axis.name, "of runs with other contexts, the one with the most caches"
    found = [cast for cast in plane_models(variants(of_caches[:1])) if cast.axis.amount == "cache"]
    cache = of_caches[0].record["cache"]
    counts = [len({row["variant"] for row in cache["answers"]}), len(cache["speed"]["tokens_per_s"])]
    assert [cast.kind for cast in found] == ["cache", "behind 8,000 tokens"]
    assert [len(cast.spots) for cast in found] == counts == [57, 5]
    assert "agnostic (number, word at 1024 tokens, n 100)" in found[0].axis.name, (
        "how much was asked is a part of what is compared"
    )
    drawn = planes(found[1:])[0]
    assert (
        drawn.about == "Answers against decode speed behind 8,000 tokens"
        and drawn.rows[0].recipe == "full 16-bit cache"
    )
    columns = {(c.label, c.detail) for c in leaderboard(of_caches[:1]).columns}
    assert {
        ("exact", "agnostic, %"),
        ("KV cache", "1,024 tokens, MB"),
        ("decode", "behind 8,000 tokens, tokens/s"),
    } <= columns


# ---------------------------------------------------------------- the rest of the page


def test_heat_map_has_a_row_per_run_and_the_means_of_its_layers():
    found = variants(make_sweep())
    heat = heat_map(found)
    assert [row.run for row in heat.rows] == ["a", "c", "b"] and heat.kinds == ["mlp.up_proj", "mlp.down_proj"]
    expected = math.exp(sum(math.log(0.001 * i) for i in range(1, 7)) / 6)
    assert heat.rows[0].all == pytest.approx(expected) == pytest.approx(heat.rows[0].cells[1])
    assert heat.rows[0].worst == 5 and heat.rows[0].error == pytest.approx(0.006) and "is 6.00e-03" in heat.said
    assert heat.figure.count("<path") < 60, "cells of a strength are one path"
    assert heat_map(found, 0.01).hidden == 0 and heat_map(variants([make_run("x")])) is None
    bare = make_record("a", {"compressed": one(1, 1, 0.1)})
    bare["layers"] = [{"name": "lm_head", "error": None}, {"name": "lm_head", "error": 0.0}]
    assert heat_map(variants([make_run("a", bare)])).rows[0].worst == 1


def test_only_what_differs_is_told():
    runs = make_sweep()
    runs[1].record["provenance"]["hardware"]["memory_bytes"] += 4096
    told = dict(differences(runs))
    assert set(told) == {"dirty", "versions.torch", "hardware.cpu"}, "a few bytes of memory are no difference"
    assert told["versions.torch"] == [("2.13.0", "2 runs: a, b"), ("2.12.0", "1 run: c")]
    del runs[1].record["provenance"]["flags"]["deterministic"]
    assert ("not recorded", "1 run: b") in dict(differences(runs))["flags.deterministic"]
    many = [make_run(str(i), make_record(str(i), {"compressed": one(1, 1, 1)}, cpu=f"cpu {i}")) for i in range(9)]
    assert differences(many)[0].found[-1] == ("3 more values", "")
    assert list(machines(runs).values()) == [["a", "b"], ["c"]] and differences(runs[:1]) == []


def test_changed_answers_and_texts_are_shared_out_and_linked():
    found = variants(make_sweep())
    told = flips(found)
    assert (
        [row.variant.number for row in told.rows] == [1, 1, 2, 2, 3, 3, 4, 4]
        and len(told.examples) == 9
        and told.more == 0
    )
    assert [v.number for v, _ in told.examples[:3]] == [1, 2, 4], "in turns, so that no recipe crowds out the others"
    assert told.rows[0].href == "a/samples/compressed.easy.jsonl" and told.rows[4].href == "", (
        "no file is known of plain"
    )
    few = flips(found, scale=0.1)
    assert len(few.examples) == 2 and few.more == 7 and len(few.rows) + few.hidden == 8
    made = generations(found)
    assert [one.prompt for one in made.prompts] == ["Tell me."] and [v.number for v, _ in made.prompts[0].texts] == [
        1,
        2,
        4,
    ]
    assert made.files["a/samples/generations.jsonl"] == "a" and len(made.rows) == 6
    old = [make_run("a", make_record("a", {"compressed": one(1, 1, 1)}))]
    assert generations(variants(old)).prompts[0].prompt == "Why?" and flips(variants(old)).rows == []


def test_links_lead_to_files_only():
    assert link("javascript:alert(1)", "x") == "javascript%3Aalert%281%29/x" and link("", "x") == ""
    assert (
        link("runs/a b", 'x"><img') == "runs/a%20b/x%22%3E%3Cimg" and link("../a/", "report.html") == "../a/report.html"
    )
    assert clean("\x1b[1;31mred\x1b[0m\x00 \u202eback") == "red back" and clean("a" * 9, 5) == "aaaa…"


def test_failures_are_always_told():
    html = compare_page(make_sweep())
    for text in (
        "out of memory",
        "in cell 4, Compress",
        "MemoryError: no",
        "line 1\nline 2",
        "Peak memory 3,000.0 MB",
        "After 12 s",
        "2 attempts",
        "3 of 5 runs finished (1 failed, 1 waiting)",
        'href="d/notebook.ipynb"',
        "workbench run d",
        "workbench run a",
    ):
        assert text in html, text
    only = compare_page(
        [RunOutcome("d", "n", "failed"), RunOutcome("e", "n", "failed", failure={"kind": "timeout", "cell": 0})]
    )
    assert "timeout" in only and "in cell 0" in only and "unknown" in only and "No run has a record yet." in only
    assert "What failed" not in compare_page(make_sweep()[:3]) and "0 of 0 runs" in compare_page([])


def test_page_says_what_the_records_say():
    html = compare_page(make_sweep(), title="My <sweep>")
    for text in (
        "My &lt;sweep&gt;",
        "Of 5 models of model-ab, ",
        'data-value="0.588"',
        "indistinguishable at this n",
        "mlp.down_proj",
        "The sea",
        "Once when",
        "differs from token 2 on",
        'href="a/report.html"',
        "2.12.0",
        "another CPU",
        "1.96 of its standard errors",
    ):
        assert text in html, text
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert not re.search(r"@import|url\((?!#)|src=", html) and not re.search(r'href="(?:https?:|//)', html)


def test_records_of_all_ages_are_shown(published, page_of_all):
    assert len(page_of_all.encode()) < LIMIT_BYTES and all(run.key in page_of_all for run in published)
    small = leaderboard([make_run("a", make_record("a", {"compressed": one(100, 80, 1.2e-8, 1e-9)}))])
    assert "1.20e-08 ± 1e-09" in small.markdown()
    bare = make_record("a", {"compressed": one(100, 80, 0.1)})
    for key in ("recipes", "difference", "texts", "speed", "samples", "layers", "calibration"):
        bare[key] = None
    bare["scores"] = {"baseline": {"acc_x": 0.5}, "compressed": {"acc_x": 0.4, "perplexity_y": float("nan")}}
    kernels = {**bare, "recipe": [], "model": None, "scores": None, "bench": {}}
    empty = {**bare, "scores": {"baseline": {}, "compressed": {}}, "recipe": [], "tasks": None, "generation": None}
    html = compare_page([make_run("a", bare), make_run("k", kernels), make_run("z", empty)])
    assert "80.0 %" in html and "no compression" in html and "nan" not in html


@pytest.mark.slow
def test_two_hundred_runs_are_a_megabyte_at_most():
    """Whatever they wrote: the page shows less of everything, and says so; all baselines and failures that it names are
    counted."""
    rng, runs = random.Random(0), []
    for i in range(160):
        models = {
            name: one(
                rng.uniform(40, 150), rng.uniform(40, 120), rng.random(), 0.05, recipe=f"{name} {i} " + "long " * 40
            )
            for name in ("compressed", *(f"m{j}" for j in range(7)))
        }
        record = with_tasks(
            make_record(f"run-{i}", models, cpu=f"cpu {i % 3}"), {name: (0.9, 0.8, 1.0) for name in models}
        )
        record["tasks"]["flips"]["compressed"] = [
            f | {"question": "why " * 5000} for f in record["tasks"]["flips"]["compressed"]
        ]
        record["generation"]["samples"] = [
            {
                "prompt": f"{i} {j} " * 500,
                "temperature": 0,
                "first_difference": {},
                "texts": {"baseline": "b" * 9000, "compressed": "c" * 9000},
            }
            for j in range(12)
        ]
        record["provenance"]["commit"] = f"{i:040d}"
        runs.append(make_run(f"run-{i}", record, command="papermill " * 900))
    failure = {"kind": "cell", "cell": 1, "error": "e" * 9000, "lines": ["l" * 9000] * 500}
    runs += [RunOutcome(f"bad-{i}", "n", "failed", f"bad-{i}", failure=failure) for i in range(40)]
    html = compare_page(runs)
    assert 200_000 < len(html.encode()) <= LIMIT_BYTES
    for what in ("models are", "failures are", "runs are", "prompts are", "recipes are"):
        assert re.search(rf"[\d,]+ more {what} not shown here", html), what
    assert "160 of 200 runs finished (40 failed)" in html and "Speeds were measured on 3 different machines" in html


# ---------------------------------------------------------------- two runs


def two(recovery: dict[str, tuple], nll: float = 0.05, **more) -> tuple[dict, dict]:
    a = make_record("a", {"compressed": one(100, 80, 0.0, 0.003)})
    b = make_record("b", {"compressed": one(50, 120, nll, 0.004)}, **more)
    if recovery:
        a = with_tasks(a, {"compressed": (1.0, 0.98, 1.02)})
        b = with_tasks(b, recovery)
    return a, b


def test_verdict_on_tasks():
    found = compare_two(*two({"compressed": (0.95, 0.93, 0.97)}))
    assert found.exit_code == 1 and "The whole interval is below." in found.text
    easy = found.rows[0]
    error = 1.96 * 0.95 * math.hypot(0.04 / 3.92, 0.04 / 3.92 / 0.95)
    assert easy.metric == "easy (acc_norm)" and (easy.recovery, easy.low, easy.high) == pytest.approx(
        (0.95, 0.95 - error, 0.95 + error)
    )
    assert f"recovery 95.0 % [{(0.95 - error / 2**0.5) * 100:.1f}," in found.text and "the mean of 2" in found.text
    ratios = {row.metric: row.recovery for row in found.rows[2:]}
    assert ratios["stored bytes"] == 0.5 and ratios["decode tokens/s"] == 1.5
    wide = two({"compressed": (0.98, 0.93, 1.03)})
    assert compare_two(*wide).exit_code == 1 and "noise alone could do this" in compare_two(*wide).text
    assert compare_two(*wide, recovery_threshold=0.98).exit_code == 0, "the threshold itself holds"
    assert "The interval reaches below the threshold." in compare_two(*wide, recovery_threshold=0.98).text
    assert "So is the whole interval." in compare_two(*wide, recovery_threshold=0.5).text
    assert "<table>" in found._repr_html_() and found._repr_html_().count("<tr>") == 1 + len(found.rows)


def test_verdict_falls_back_on_perplexity():
    found = compare_two(*two({}))
    share = math.exp(-0.05)
    assert found.rows[0].recovery == pytest.approx(share) and found.rows[0].metric == "perplexity on news"
    assert found.rows[0].high == pytest.approx(share * (1 + 1.96 * 0.005)) and found.exit_code == 1
    assert compare_two(*two({}), recovery_threshold=0.95).exit_code == 0
    a, b = two({}, nll=-0.05)
    assert compare_two(a, b).exit_code == 0 and compare_two(b, a).exit_code == 1, "the order matters"
    for one in (a, b):
        del one["difference"], one["scores"]["compressed"]["perplexity_news_stderr"]
    assert "How far noise reaches is unknown." in compare_two(a, b).text
    del a["scores"]["compressed"]
    assert compare_two(a, b).rows[0].a == 20.0, "a run of the baseline alone"


def test_verdict_refuses_what_cannot_be_compared():
    a, b = two({})
    with pytest.raises(ValueError, match="different models: 'model-ab' in a and 'model-cd' in b"):
        compare_two(a, two({}, weights="cd")[1])
    with pytest.raises(ValueError, match="share no metric of accuracy.*3 × 1,024 tokens"):
        compare_two(a, two({}, windows=3)[1])
    with pytest.raises(ValueError, match="`recovery_threshold` .=0. must be a share above 0"):
        compare_two(a, b, recovery_threshold=0)
    with pytest.raises(ValueError, match="`b` .=.b.. is the record of a run without scores"):
        compare_two(a, {**b, "scores": None})
    few = with_tasks(two({})[1], {"compressed": (0.9, 0.8, 1.0)}, n=10)
    assert compare_two(two({"compressed": (1, 1, 1)})[0], few).rows[0].metric == "perplexity on news", (
        "other questions are other tasks"
    )
    text = compare_two(a, two({}, cpu="another")[1]).text
    assert "Speeds were measured on different machines and are not compared." in text and "Decode" not in text
    assert "Stored bytes: 0.50×." in text


def with_wiki(record, compressed, **more):
    """The record with the perplexity of a second text, 10.0 for the baseline and this for the compressed model, which
    lacks it if that is None; `more` replaces other scores of the compressed model."""
    record["scores"]["baseline"]["perplexity_wiki"] = 10.0
    record["scores"]["compressed"] |= ({} if compressed is None else {"perplexity_wiki": compressed}) | more
    return record


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "NaN"])
def test_a_lost_metric_counts_against_the_model(value):
    """A metric that is not finite, or that the baseline has and the model lacks, fails the gate, puts the model last
    and keeps it out of cards, marks and fronts; the page names it."""
    good = with_wiki(make_record("good", {"compressed": one(100, 80, 0.2)}), 12.0)
    broken = with_wiki(make_record("broken", {"compressed": one(50, 99, 0.01)}), value)
    verdict = compare_two(good, broken, recovery_threshold=0.5)
    assert verdict.exit_code == 1 and "it lost perplexity on wiki, not finite or missing there" in verdict.text
    assert compare_two(broken, good, recovery_threshold=0.5).exit_code == 0
    alone = copy.deepcopy(broken)
    alone["scores"]["compressed"]["perplexity_news"] = math.nan
    assert compare_two(good, alone, recovery_threshold=0.5).exit_code == 1, "all are lost: nothing is left to compare"
    runs = [make_run(record["run"]["key"], record) for record in (good, broken)]
    assert [v.run.key for v in variants(runs) if not v.baseline] == ["good", "broken"]
    board = leaderboard(runs)
    (wiki,) = (i for i, c in enumerate(board.columns) if c.detail == "wiki")
    assert [row.cells[wiki].text for row in board.rows if row.number] == ["12.00", "lost"]
    assert not any(cell.mark == "best" for cell in board.rows[-1].cells)
    assert not any("broken" in row.recipe for plane in planes(plane_models(variants(runs))) for row in plane.rows)
    page = re.sub(r"<[^>]+>", "", compare_page(runs))
    assert "perplexity on wiki of #2 compressed in broken. Such models are ranked last." in page
    assert "2.00×" in page and "4.00×" not in page, "the card of sizes is that of the model that works"


def test_a_metric_of_the_other_run_must_be_there():
    a = with_wiki(make_record("a", {"compressed": one(100, 80, 0.02)}), 12.0)
    b = make_record("b", {"compressed": one(100, 80, 0.02)})
    assert compare_two(a, b).exit_code == 1 and compare_two(b, a).exit_code == 0


def test_ranks_and_cards_compare_shared_measures_only():
    """A mean over other texts is another number."""
    wide = with_wiki(make_record("wide", {"compressed": one(100, 80, 0.02)}), 30.0)
    narrow = make_record("narrow", {"compressed": one(100, 80, 0.03)})
    runs = [make_run(record["run"]["key"], record) for record in (narrow, wide)]
    assert [v.run.key for v in variants(runs) if not v.baseline] == ["wide", "narrow"], "by the text that both have"
    assert "0.0200nats of KL per token, the least loss: #1" in re.sub(r"<[^>]+>|\n *", "", compare_page(runs))
    apart = [
        make_run(key, make_record(key, {"compressed": one(100, 80, 0.02)}, windows=n))
        for key, n in (("a", 3), ("b", 5))
    ]
    assert "least loss" not in compare_page(apart), "no two were measured alike"


# ---------------------------------------------------------------- in a browser


OTHERS = [pytest.param(*other, marks=pytest.mark.slow) for other in (("dark", 1280), ("light", 320))]


def test_texts_shared_by_all_models_are_found_once(monkeypatch):
    """It is looked for among all models: once for every model, a page of 2,000 runs would take minutes."""
    asked, found = [], variants_module.shared
    for module in (variants_module, compare_module):
        monkeypatch.setattr(module, "shared", lambda own, kind: asked.append(kind) or found(own, kind))
    runs = [make_run(str(i), make_record(str(i), {"compressed": one(100, 80, 0.02 * i)})) for i in range(1, 9)]
    compare_page(runs)
    assert 0 < len(asked) < len(runs)


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 320), *OTHERS])
def test_page_in_a_browser(look, scheme, width):
    look(compare_page(make_sweep()), width, scheme)


@pytest.mark.slow  # axe reads 1,200 cells
def test_published_runs_in_a_browser(look, page_of_all):
    look(page_of_all, 320, "light")


def test_sorts_by_numbers_and_filters_with_the_keyboard(browser, tmp_path):
    tab = browser.new_page()
    tab.goto(render_comparison(make_sweep(), tmp_path / "page.html").path.as_uri())

    def column(kind: str) -> list[str]:
        at = next(i for i, head in enumerate(heads) if kind in head)
        return tab.eval_on_selector_all(
            "#board tbody tr", f"rows => rows.filter(r => !r.hidden).map(r => r.cells[{at}].dataset.value)"
        )

    heads = tab.eval_on_selector_all("#board thead th", "heads => heads.map(h => h.textContent)")
    stored = tab.locator("#board thead button", has_text="stored")
    stored.focus()
    tab.keyboard.press("Enter")
    assert column("stored")[2:] == ["60000000", "99900000", "100000000", "100000000"], (
        "not 100 before 60, and baselines stay on top"
    )
    assert tab.locator("#board th[aria-sort]").get_attribute("aria-sort") == "ascending"
    tab.keyboard.press("Enter")
    assert column("stored")[2:] == ["100000000", "100000000", "99900000", "60000000"]
    assert tab.locator("#board th[aria-sort=descending]").count() == 1
    tab.locator("#board thead button", has_text="decode").click()
    assert column("decode")[2:] == ["90", "81", "80", "80"], "the fastest first"
    tab.get_by_label("Filter the recipes").fill("five")
    assert column("recipe") == ["16-bit baseline", "16-bit baseline", "five"]
    assert tab.get_by_text("1 of 4 recipes shown").count() == 1
    tab.close()


def test_readable_without_javascript_and_in_print(browser, tmp_path):
    report = render_comparison(make_sweep(), tmp_path / "page.html")
    assert str(report.path) in report._repr_html_() and [path.name for path in tmp_path.iterdir()] == ["page.html"]
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.goto(report.path.as_uri())
    assert tab.locator("input").count() == tab.locator("#board button").count() == 0
    assert tab.locator("#board tbody tr").count() == 6 and tab.get_by_text("58.8").first.is_visible()
    tab.locator("summary", has_text="side by side").click()
    assert tab.get_by_text("Once when").first.is_visible(), "details open without it"
    tab.pdf(path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    context.close()


def test_model_text_cannot_run(browser, tmp_path):
    runs = make_sweep()
    for run in runs[:2]:
        made = run.record
        made["model"]["name"] = made["provenance"]["command"] = made["provenance"]["hardware"]["cpu"] = EVIL
        made["recipe"][0]["text"] = made["recipes"]["compressed"][0]["text"] = EVIL
        made["provenance"]["versions"][EVIL] = EVIL
        made["scores"][EVIL], made["difference"][EVIL] = made["scores"]["compressed"], made["difference"]["compressed"]
        made["tasks"]["compared"][EVIL] = {EVIL: made["tasks"]["compared"]["compressed"]["easy"]}
        made["tasks"]["rows"][0]["task"] = EVIL
        for scores in made["scores"].values():
            scores |= {f"acc_norm_{EVIL}": 0.5, f"perplexity_{EVIL}": 2.0}
        for flip in made["tasks"]["flips"]["compressed"]:
            flip |= dict.fromkeys(("task", "direction", "question", "gold", "baseline_answer", "answer"), EVIL)
        made["tasks"]["files"]["compressed"] = {"easy": f"javascript:{EVIL}"}
        made["generation"] |= {
            "file": EVIL,
            "samples": [{"prompt": EVIL, "texts": {"baseline": EVIL, "compressed": EVIL}}],
        }
        made["layers"][0]["name"] = f"model.layers.0.{EVIL}"
        made["run"]["key"] = EVIL
    failure = dict.fromkeys(("kind", "cell_title", "error"), EVIL) | {"lines": [EVIL], "cell": EVIL}
    runs[3] = RunOutcome(EVIL, EVIL, "failed", "javascript:window.owned=1//", failure=failure, command=EVIL)
    runs += [RunOutcome(EVIL, EVIL, EVIL, EVIL, runs[0].record)]
    path = render_comparison(runs, tmp_path / "page.html", title=EVIL).path
    tab = browser.new_page()
    tab.goto(path.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("window.owned") is None
    assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    assert tab.evaluate("document.scripts.length") == 2, "our own"
    assert tab.evaluate(
        "[...document.querySelectorAll('*')].every(e => [...e.attributes].every(a => !a.name.startsWith('on')))"
    )
    links = tab.eval_on_selector_all("a", "links => links.map(a => a.href)")
    assert links and all(
        href.startswith(("file:", "data:text/csv;base64,", "data:application/gzip;base64,")) for href in links
    ), "no scheme of theirs"
    assert tab.locator("figure svg").count() >= 3 and tab.get_by_text("onerror").count() > 5, "it is there to read"
    tab.close()
