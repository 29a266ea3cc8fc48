"""Tasks, generations, speed grids, costs and efficiency on the page of a run: what is said is what the record says, to
anybody."""

import copy
import re
from pathlib import Path

import pytest

from eval.record.metrics import METRICS, prefix_of, with_prefix
from eval.record.rows import typed
from eval.record.schema import read_record
from reports.page import evaluation, kv, resources
from reports.page.render import page, scores_table

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
KEYS = ("tasks", "generation", "speed_grid", "cost", "efficiency", "speed")


def against(baseline: float, value: float, half: float, n: int, wrong: int, right: int, p: float) -> dict:
    return {
        "metric": "acc_norm",
        "n": n,
        "baseline": baseline,
        "value": value,
        "recovery": value / baseline,
        "recovery_low": (value - half) / baseline,
        "recovery_high": (value + half) / baseline,
        "difference": value - baseline,
        "difference_low": value - baseline - half,
        "difference_high": value - baseline + half,
        "right_to_wrong": wrong,
        "wrong_to_right": right,
        "same": n - wrong - right,
        "mcnemar_p": p,
    }


def make_evaluated_record(source: str = "gptq") -> dict:
    """A published record with everything that this page may show."""
    made = read_record(next(PUBLISHED.glob(f"{source}-smollm2*.json"))) | {"layers": []}  # its figure takes longest
    made["scores"]["baseline"] |= {
        "acc_norm_reasoning": 0.42,
        "acc_norm_reasoning_stderr": 0.02,
        "acc_facts": 0.61,
        "acc_facts_stderr": 0.03,
        "bits_per_byte_text": 0.9,
    }
    made["scores"]["compressed"] |= {
        "acc_norm_reasoning": 0.36,
        "acc_norm_reasoning_stderr": 0.02,
        "acc_facts": 0.60,
        "acc_facts_stderr": 0.03,
        "bits_per_byte_text": 0.95,
    }
    others = [name for name in made["scores"] if name not in ("baseline", "compressed")][:1]
    text = against(0.9, 0.95, 0.01, 62, 0, 0, 1.0) | {
        "recovery": 0.9 / 0.95,
        "recovery_low": 0.935,
        "recovery_high": 0.96,
        "right_to_wrong": None,
        "wrong_to_right": None,
        "same": None,
        "mcnemar_p": None,
        "metric": "bits_per_byte",
    }
    compared = {
        "reasoning": against(0.42, 0.36, 0.035, 600, 61, 25, 0.0001234),
        "facts": against(0.61, 0.60, 0.03, 300, 9, 6, 0.607),
        "text": text,
    }
    flip = {
        "task": "reasoning",
        "doc_id": 17,
        "doc_hash": "ab",
        "direction": "right to wrong",
        "question": "Why is the sky blue?",
        "gold": " Because of scattering",
        "baseline_answer": " Because of scattering",
        "answer": " Because of the sea",
    }
    made["tasks"] = {
        "settings": {
            "limit": 600,
            "num_fewshot": 0,
            "batch_size": 8,
            "seed": 0,
            "task_path": "",
            "lm_eval": "0.4.13",
            "dtype": "float32",
            "device": "cpu",
            "deterministic": False,
        },
        "rows": [
            {
                "task": "reasoning",
                "metric": "acc_norm",
                "n": 600,
                "num_fewshot": 0,
                "version": 1.0,
                "higher_is_better": True,
            },
            {"task": "facts", "metric": "acc", "n": 300, "num_fewshot": 5, "version": 1.0, "higher_is_better": True},
            {
                "task": "text",
                "metric": "bits_per_byte",
                "n": 62,
                "num_fewshot": 0,
                "version": 2.0,
                "higher_is_better": False,
            },
        ],
        "compared": {"compressed": compared} | {name: copy.deepcopy(compared) for name in others},
        "flips": {"compressed": [flip, flip | {"direction": "wrong to right", "question": "Long. " * 400}]},
        "files": {"compressed": {"reasoning": "samples/compressed.reasoning.jsonl"}},
        "cached": {"compressed": []},
    }
    rows = []
    for temperature in (0.0, 0.5, 1.0):
        base = {
            "temperature": temperature,
            "length": 44.0,
            "length_stderr": 1.5,
            "repetition": 0.12 - 0.1 * temperature,
            "repetition_stderr": 0.02,
            "ended_share": 0.4,
            "ended_share_stderr": 0.1,
            "n": 48 if temperature else 16,
        }
        rows.append(
            base | {"model": "baseline", "first_difference": None, "first_difference_stderr": None, "same_share": None}
        )
        for i, name in enumerate(("compressed", *others)):
            rows.append(
                base
                | {
                    "model": name,
                    "first_difference": 12.0 - 5 * temperature - i,
                    "first_difference_stderr": 1.2,
                    "same_share": 0.1,
                    "same_share_stderr": 0.04,
                    "repetition": 0.2 + 0.05 * i,
                }
            )
    sample = {
        "prompt": "Tell me a story.",
        "temperature": 0.0,
        "seed": None,
        "first_difference": {"compressed": 6},
        "texts": {"baseline": "Once upon a time there was a fox.", "compressed": "Once upon a time there lived a hen."},
    }
    made["generation"] = {
        "settings": {
            "new_tokens": 48,
            "prompts": 16,
            "temperatures": [0.5, 1.0],
            "seeds": 3,
            "dtype": {"baseline": "float32", "compressed": "float32"},
        },
        "rows": rows,
        "samples": [sample, sample | {"temperature": 0.5, "seed": 1}] * 3,
        "file": "samples/generations.jsonl",
    }
    grid, names = [], ("baseline", "compressed", *others)
    for prompt in (64, 512):
        for batch in (1, 4, 8):
            for i, name in enumerate(names):
                decode, prefill = 60.0 * batch**0.8 * (1 + 0.6 * i), 1500.0 - 300 * i
                grid.append(
                    {
                        "model": name,
                        "batch": batch,
                        "prompt_tokens": prompt,
                        "prefill_tokens_per_s": prefill,
                        "prefill_quartiles": [prefill - 40, prefill + 30],
                        "decode_tokens_per_s": decode,
                        "step_tokens_per_s": decode,
                        "decode_quartiles": [decode * 0.95, decode * 1.04],
                        "time_to_first_token_s": batch * prompt / prefill,
                        "execution": "compiled, weights frozen",
                        "prefill_ratio": prefill / 1500,
                        "decode_ratio": 1 + 0.6 * i,
                    }
                )
    made["speed_grid"] = {"settings": {"rounds": 5, "new_tokens": 32}, "rows": grid}
    made["cost"] = {
        "ceilings": {"read_bytes_per_s": 2.1e10, "flops_per_s": 4.0e11, "how": "measured here, 2 threads"},
        "rows": [
            {
                "model": name,
                "batch": batch,
                "context": context,
                "weight_bytes": 2.69e8 / (1 + i),
                "cache_bytes": 46080 * context * batch,
                "flops": 2.7e8 * batch,
                "bound": "memory",
                "predicted_s": (2.69e8 / (1 + i) + 46080 * context * batch) / 2.1e10,
                "measured_s": 0.0165 / (1 + 0.6 * i) * batch**0.2 if context == 512 else None,
            }
            for i, name in enumerate(names)
            for batch in (1, 8)
            for context in (128, 512, 2048, 8192)
        ],
    }
    measured = {
        "memory_use": (2.9e8, "bytes", ""),
        "compute_use": (0.93, "share", "process time over wall time and threads"),
        "latency": (0.016, "s", ""),
        "throughput": (61.0, "tokens/s", ""),
        "compression_rate": (2.4, "×", ""),
        "energy": (None, "J/token", "not measurable here: no permission to read the counters of the CPU"),
    }
    one = {key: dict(zip(("value", "unit", "note"), of, strict=True)) for key, of in measured.items()}
    made["efficiency"] = {name: copy.deepcopy(one) for name in names}
    return made


@pytest.fixture(scope="module")
def record() -> dict:
    return make_evaluated_record()


@pytest.fixture(scope="module")
def html(record) -> str:
    return page(record)


@pytest.fixture(scope="module")
def told(record) -> dict:
    return evaluation.context(typed(record)) | resources.context(typed(record))


def test_scores_are_named_by_their_longest_prefix(record):
    rows = {(row.label, row.detail): row for row in scores_table(typed(record)).rows}
    assert (
        ("Accuracy, by length", "reasoning") in rows
        and ("Accuracy", "facts") in rows
        and ("Bits per byte", "text") in rows
    )
    assert not any("norm" in detail for _, detail in rows)
    assert [value for value, _ in rows["Accuracy, by length", "reasoning"].cells[:2]] == ["42.00", "36.00"]
    assert rows["Bits per byte", "text"].changes[1].kind == "bad", "more bits are worse"


def test_every_prefix_is_its_own_longest():
    for prefix, *_ in METRICS:
        metric = f"{prefix}x" if prefix.endswith("_") else prefix
        assert prefix_of(metric) == prefix and with_prefix([metric, metric, f"{metric}_stderr"], prefix) == [metric]
    assert prefix_of("decode_tokens_per_s_b8_p512") == prefix_of("unheard_of") == prefix_of("acc_") == ""


def test_tasks_say_what_was_compared(told, record):
    tasks = told["tasks"]
    by = {group.of.task: {row.model: row for row in group.rows} for group in tasks["groups"]}
    mine = by["reasoning"]["compressed"]
    assert (mine.value, mine.stderr) == ("36.0", "± 2.0") and mine.recovery == ("85.7 %", "77.4 to 94.0")
    assert (
        mine.difference == ("−6.0", "−9.5 to −2.5")
        and mine.p == "< 0.001"
        and (mine.paired.right_to_wrong, mine.paired.wrong_to_right) == (61, 25)
    )
    assert [by[task]["compressed"].kind for task in by] == ["bad", "", "bad"], "fewer right; within noise; more bits"
    assert by["facts"]["baseline"].recovery == ("", "") and by["text"]["compressed"].paired.right_to_wrong is None
    assert tasks["said"] == [
        "Beyond noise, the compressed model is worse than the baseline on reasoning, text.",
        "On 1 of 3 tasks the difference to the baseline is within the noise at this number of questions.",
    ]
    share = (0.36 / 0.42 + 0.60 / 0.61) / 2
    assert evaluation.recovery_card(typed(record)) == (
        f"{share * 100:.1f} %",
        "of the baseline’s score on 2 tasks, mean",
    ), "bits are no share of right answers"


def test_less_can_be_better(record):
    made = copy.deepcopy(record)
    text = made["tasks"]["compared"]["compressed"]["text"]
    text |= {"difference": -0.05, "difference_low": -0.06, "difference_high": -0.04}
    assert evaluation.context(typed(made))["tasks"]["groups"][2].rows[1].kind == "good"


def test_forest_is_of_points_and_right_is_better(record, monkeypatch):
    drawn = {}
    monkeypatch.setattr(evaluation, "forest", lambda panels, **_: drawn.update(panels) or "")
    evaluation.context(typed(record))
    points, others = drawn.values()
    reasoning, facts = (group[0] for group in points.values())
    assert [round(v, 6) for v in reasoning[1:4]] == [-6.0, -9.5, -2.5] and reasoning.main
    assert facts.low < 0 < facts.high
    bits = next(iter(others.values()))[0]
    assert bits.value == pytest.approx(100 * (0.9 / 0.95 - 1)) and bits.low == pytest.approx(-6.5), (
        "more bits lie on the left"
    )


def test_a_task_that_is_not_finite_keeps_nothing(record):
    made = copy.deepcopy(record)
    (mean, tasks), of = evaluation.mean_recovery(typed(made)), made["tasks"]["compared"]["compressed"]
    lost = of["facts"]["recovery"]
    of["facts"] |= {"value": None, "recovery": None}
    assert evaluation.mean_recovery(typed(made)) == (pytest.approx(mean - lost / tasks), tasks)


def test_a_group_counts_once(record):
    """Its parts are neither in the mean nor in the figure, nor are their flips counted twice, but they can be looked
    at."""
    made = copy.deepcopy(record)
    tasks = made["tasks"]
    for part in ("reasoning_a", "reasoning_b"):
        tasks["rows"].append(tasks["rows"][0] | {"task": part})
        tasks["compared"]["compressed"][part] = against(0.4, 0.1, 0.01, 300, 50, 10, 0.0)
    tasks["groups"] = {"reasoning": ["reasoning_a", "reasoning_b"], "unscored": ["facts"]}
    found = evaluation.context(typed(made))["tasks"]
    assert [group.of.task for group in found["groups"]] == ["reasoning", "facts", "text"]
    assert [group.of.task for group in found["parts"]] == ["reasoning_a", "reasoning_b"]
    assert evaluation.mean_recovery(typed(made)) == evaluation.mean_recovery(typed(record))
    assert found["flips"][0][1:3] == (70, 31)
    assert "reasoning_a" not in found["forest"]
    assert len(page(made | dict.fromkeys(KEYS[1:])).split("2 parts of groups")) == 2


def test_generations_are_side_by_side(told, record, html):
    generation = told["generation"]
    assert [name for name, _ in generation["groups"]] == ["Greedy", "Temperature 0.5", "Temperature 1"]
    rows = html.split("Temperature 0.5</b>")[1].split("</tbody>")[0].split("</tr>")[1:3]
    base, mine = (re.sub(r"<[^>]+>|\s+", " ", row).split() for row in rows)
    assert " ".join(base) == "baseline 44.00 ± 1.5 40.0 ± 10.0 7.0 ± 2.0 48"
    assert " ".join(mine[1:]) == "9.500 ± 1.2 10.0 ± 4.0 44.00 ± 1.5 40.0 ± 10.0 20.0 ± 2.0 48"
    shown = generation["samples"][0].texts
    assert shown[0].shared == "" and shown[1].shared == "Once upon a time there "
    assert [one.shared + one.rest for one in shown] == list(record["generation"]["samples"][0]["texts"].values())
    assert shown[1].how == "differs from token 7 on" and generation["samples"][1].how == "Temperature 0.5, seed 1"
    assert len(generation["samples"]) + len(generation["more"]) == 6 and generation["figure"].count("<svg") == 1


def test_grid(told, record, html):
    grid = told["grid"]
    assert [name for name, _ in grid["groups"]][:2] == ["64 tokens, batch 1", "64 tokens, batch 4"] and len(
        grid["groups"]
    ) == 6
    rows = html.split("64 tokens, batch 1</b>")[1].split("</tbody>")[0].split("</tr>")[1:3]
    assert "×" not in rows[0] and ">1.60×<" in rows[1] and "1,160–1,230" in rows[1]
    assert grid["executed"] == ["baseline, compressed, rtn: compiled, weights frozen"]
    made = copy.deepcopy(record)
    made["speed_grid"]["rows"] = [row for row in made["speed_grid"]["rows"] if row["batch"] == 1]
    assert "tokens of prompt" in resources.context(typed(made))["grid"]["figure"], "one batch: against the length"
    made["speed_grid"]["rows"] *= 200
    many = resources.context(typed(made))["grid"]
    assert (
        sum(len(rows) for _, rows in many["groups"]) == resources.MAX_ROWS and many["left"] == 1200 - resources.MAX_ROWS
    )


def test_cost_says_how_far_it_is_from_the_ceiling(told, record, html):
    cost = told["cost"]
    row = next(
        row
        for row in record["cost"]["rows"]
        if row["measured_s"] and row["model"] == "compressed" and row["batch"] == 1
    )
    shown = next(one for one in cost["rows"] if one.ratio and one.model == "compressed" and one.batch == 1)
    assert shown.ratio == row["measured_s"] / row["predicted_s"] and "<td>134</td>" in html.split('id="cost"')[1]
    assert (
        len(cost["said"]) == 2
        and f"({shown.ratio:.2f}×" not in cost["said"][0]
        and f"{shown.ratio:.2f}×" in cost["said"][1]
    )
    assert cost["read"] == "21.00 GB/s" and cost["flops"] == "0.4000 TFLOP/s"


def test_unmeasurable_metrics_are_marked_on_the_page(told, record, html):
    assert html.count("<small>not measurable here</small>") == 3
    assert "Energy: not measurable here: no permission to read the counters of the CPU" in told["efficiency"]["notes"]
    rows = dict(told["efficiency"]["rows"])
    assert [value for value, _ in rows["compressed"]] == ["290", "93.00", "16.00", "61.00", None, "2.400"]
    made = copy.deepcopy(record)
    made["efficiency"]["rtn"]["energy"]["note"] = "another reason"
    assert "Energy (rtn): another reason" in resources.context(typed(made))["efficiency"]["notes"]


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_nothing_is_shown_of_what_is_not_there(path):
    made = read_record(path)
    without = {key: value for key, value in made.items() if key not in KEYS}
    for record in (without, made | dict.fromkeys(KEYS), made | {key: {} for key in KEYS}):
        assert evaluation.context(typed(record)) == resources.context(typed(record)) == {}


def test_records_with_little_render(record):
    """Every value that may be null is, one key at a time and all together."""
    made = copy.deepcopy(record)
    made["tasks"]["compared"]["compressed"]["facts"] = dict.fromkeys(against(1, 1, 1, 1, 1, 1, 1))
    made["tasks"]["rows"] = [row | {"n": None, "num_fewshot": None, "version": None} for row in made["tasks"]["rows"]]
    made["tasks"] |= {
        "flips": {"compressed": [dict.fromkeys(record["tasks"]["flips"]["compressed"][0])]},
        "files": None,
    }
    made["generation"]["rows"] = [{"model": m, "temperature": 0.0} for m in ("baseline", "compressed")]
    made["generation"] |= {"settings": None, "samples": None, "file": None}
    keep = ("model", "batch", "prompt_tokens")
    made["speed_grid"] = {
        "settings": None,
        "rows": [{key: row[key] for key in keep} for row in record["speed_grid"]["rows"]],
    }
    made["cost"]["ceilings"] = {"read_bytes_per_s": None, "flops_per_s": None, "how": None}
    made["cost"]["rows"] = [row | {"measured_s": None, "bound": None} for row in made["cost"]["rows"][:1]]
    made["efficiency"] = {"compressed": {"energy": None}}
    whole = page(made)
    assert (
        "None"
        not in re.sub(r"<svg.*?</svg>", "", whole, flags=re.S).split('id="tasks"')[1].split("<h2>Every weight</h2>")[0]
    )
    for key in KEYS:
        assert len(page({k: v for k, v in made.items() if k not in KEYS or k == key})) < len(whole)


def test_ids_are_the_pages_own(html):
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) and {"tasks", "generation", "grid", "cost", "efficiency"} <= set(ids)


def test_the_page_of_caches_shows_it_too(html, monkeypatch):
    for figure in ("_pareto", "_by_token", "_survival", "_budgets", "_errors", "_depth", "_speed"):
        monkeypatch.setattr(kv, figure, lambda *_: "")
    sections = ["tasks", "generation", "grid", "cost", "efficiency"]
    for shown in (html, page(make_evaluated_record("kv-eviction"))):
        assert [name for name in re.findall(r'<h2 id="(\w+)"', shown) if name in sections] == sections
        assert shown.count("<script") == 1


@pytest.mark.parametrize("scheme, width", [pytest.param("light", 1280, marks=pytest.mark.slow), ("dark", 320)])
def test_page_in_a_browser(look, html, scheme, width):
    look(html, width, scheme)


@pytest.mark.slow
def test_a_page_stays_small(record):
    made = copy.deepcopy(record)
    names = [f"a model with a long name, number {i}" for i in range(30)]
    tasks, text = made["tasks"], "The quick brown fox & the <lazy> dog. " * 200
    flip = tasks["flips"]["compressed"][0] | {"question": text, "answer": text, "gold": text, "baseline_answer": text}
    for name in names:
        tasks["compared"][name] = tasks["compared"]["compressed"]
        tasks["flips"][name] = [flip] * 24
    sample = made["generation"]["samples"][0]
    made["generation"]["samples"] = [sample | {"texts": dict.fromkeys(["baseline", *names], text)}] * 12
    made["generation"]["rows"] += [row | {"model": name} for row in made["generation"]["rows"][:1] for name in names]
    for key in ("speed_grid", "cost"):
        rows = made[key]["rows"]
        made[key]["rows"] = [
            row | {"model": name} for row in rows[:: 3 if key == "speed_grid" else 6] for name in ["baseline", *names]
        ]
        made[key]["rows"] += made[key]["rows"][:200]
    html = page(made)
    assert len(html.encode()) < 1_000_000
    assert "more models are in the record" in html and "more rows are in the record" in html
