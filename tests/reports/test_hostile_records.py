"""A record with every number that JSON can hold, hostile names and missing parts still becomes a page."""

import copy
import glob
import json
import math
import re
from functools import reduce
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.record.reading import plain
from eval.record.rows import typed
from eval.record.schema import read_record
from reports.compare.compare import compare_page, leaderboard
from reports.compare.index import index_page
from reports.compare.outcome import RunOutcome
from reports.page import depth, search, serving
from reports.page.folds import figures
from reports.page.render import page, render
from reports.parts.text import coded, public

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
NAME = "$x_{$ <script>alert(1)</script> " + "long" * 300
RAW = re.compile(r"<script>alert|<img")
NUMBERS = (math.nan, 1e308, 0.0, -1.0, 10**400)  # the last one is read as infinity


def hostile(value, number, key=""):
    """The same record with this number in place of all floats, and with this name in place of most texts."""
    if isinstance(value, dict):
        return {k: hostile(v, number, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, number, key) for v in value]
    if isinstance(value, float):
        return number
    return (
        NAME if isinstance(value, str) and key in ("name", "text", "prompt", "dtype", "execution", "corpus") else value
    )


SLOWER = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("kv-eviction", "pruning", "smoothquant-smollm2"))


def test_names_in_sentences_are_code_and_nothing_else_is():
    assert coded("`bits` (=<b>) is not `a&b`") == "<code>bits</code> (=&lt;b&gt;) is not <code>a&amp;b</code>"
    assert coded("one ` alone, and ``") == "one ` alone, and ``"


@pytest.mark.parametrize("kind", ["recipe", *SLOWER])
def test_no_number_breaks_a_page(kind, tmp_path):
    path = max(glob.glob(str(PUBLISHED / f"{kind}*.json")))  # of several the newest, as their names end with the date
    record = read_record(path)
    record["layers"], record["folds"] = record["layers"][:14], record["folds"][:4]
    for number in NUMBERS:
        made = json.loads(json.dumps(plain(hostile(record, number))))
        html = render(made, tmp_path / ("n" * 300)).path.read_text()
        assert not RAW.search(html) and "mathdefault" not in html and "could not be drawn" not in html, number
        assert "not finite" in html or number in (1e308, 0.0, -1.0)
        if number > -1:  # pages about many runs: NaN and negative numbers alone
            continue
        runs = [RunOutcome(key, "gptq", "finished", key, made) for key in ("a", NAME)]
        assert not RAW.search(compare_page(runs) + index_page(runs) + leaderboard(runs)._repr_html_())
    bare = record | dict.fromkeys(("layers", "folds", "drops", "strengths", "speed", "samples", "tasks", "generation"))
    for key in ("scores", "model", "provenance", "run", "recipe", "kept", "texts", "difference", "kernels"):
        assert "<h1" in page(bare | {key: None})


POINT = {"bytes": 2_000_000, "loss": 0.1, "decode": 90.0, "prefill": 900.0}
LAYER = {"name": "a", "choice": "rtn", "bytes": 9, "loss": 0.1, "fewer": [7, 0.2], "more": [11, 0.05]}
SEARCHED = {
    "max_bytes": 2e6, "min_decode": 80.0, "min_prefill": 800.0, "max_kl": 0.2, "minimised": "loss", "kept": 0,
    "rounds": [{"point": POINT, "factor": 1.1, "divergence": 0.1, "bytes": 2_000_000, "decode": 88.0, "prefill": 8.0,
                "minutes": minutes} for minutes in (0.0, 2.0)],
    "front": [POINT] * 3, "choices": ["rtn"], "decode_ratio": {"rtn": 2.0}, "prefill_ratio": {"rtn": 2.0},
    "original": [50.0, 500.0], "layers": 1, "used": {"rtn": 7}, "uniform": "rtn", "uniform_point": POINT,
    "picked": [LAYER], "max_ttft": 0.3, "prompt": 256,
}  # fmt: skip
COMBINED = {
    "weights": "a", "cache": "b", "weight_bytes": 900, "cache_bytes": 10, "room": 9, "sequences": 7, "batch": 7,
    "alone": 3.0, "tokens_per_s": 20.0, "bound": "memory", "least": 919, "loss": 0.1,
}  # fmt: skip
SERVED = {
    "memory": 1000, "context": 8, "max_kl": 0.2, "aim": "sequences", "device": "here", "by_shapes": COMBINED,
    "found": [COMBINED], "kept": 0, "divergence": 0.1, "divergence_stderr": 0.01, "tried": 2, "factor": 1.1,
    "rounds": [{"sequences": 7, "peak_bytes": 980, "cache_bytes": 70, "tokens_per_s": 18.0}],
    "weights": {"a": "rtn"}, "caches": {"b": "kv_int"}, "windows": 2, "scored": 4, "batch": 7,
}  # fmt: skip

WORK = {"block": 3, "attention": 0.2, "attention_cosine": 0.1, "mlp": 0.3, "mlp_cosine": 0.1, "turned": 0.2, "later": 1.1,
        "output": 0.4, "lens": 2.0, "lens_agreement": 0.3}  # fmt: skip


def places(value, at=()):
    """The keys that lead to every value of a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, of in inner:
        yield (*at, key)
        yield from places(of, (*at, key))


@pytest.mark.parametrize("name, part, context", [
    ("search", SEARCHED, search.context), ("serving", SERVED, serving.context),
    ("depth", [{**WORK, "block": block} for block in range(4)], depth.context),
])  # fmt: skip
def test_no_damaged_choice_breaks_its_part_of_a_page(name, part, context, monkeypatch):
    """Each value in turn is missing, of another type, 0, or out of range, and in the end all numbers are."""
    scores = {"baseline": {}, "compressed": {"kl_a": 0.1, "perplexity_a": 9.0, "decode_tokens_per_s": 80.0}}
    assert context(typed({name: part, "scores": scores}))["said"]
    for figure in ("against", "by_depth"):  # are drawn for all numbers below
        monkeypatch.setattr(search.plots, figure, lambda lines, **how: "")
    for *parents, key in places(part):
        for value in (None, 0, -1, 99, [0, 0], [], {}, "x", "NaN"):
            made = copy.deepcopy(part)
            reduce(lambda of, at: of[at], parents, made)[key] = value
            context(typed({name: made, "scores": scores}))
    monkeypatch.undo()
    for number in (None, *NUMBERS):
        made = plain({name: hostile(part, number), "scores": hostile(scores, number)})
        assert "<h1" in page(json.loads(json.dumps(made))), number


def test_pages_about_many_runs_do_not_hold_their_choices():
    record = {"run": {"notebook": "n"}, "provenance": {}, "layers": [], "search": SEARCHED, "serving": SERVED}
    held = RunOutcome.of("a", "finished", record, Path("record.json")).measured
    assert held.search is None and held.serving is None


EVIL = '"><img src=x onerror="window.owned=1"><script>1</script>'
STRUCTURE = {  # texts of a record that its readers compare with their own
    "baseline", "compressed", "full", "acc", "acc_norm", "bits_per_byte", "right to wrong", "wrong to right",
    "agnostic", "another", "turns", "visible", "follow-up", "timed",
}  # fmt: skip


def with_evil(value, names):
    """The same record with this text in place of all others, and of the names of its models and caches."""
    if isinstance(value, dict):
        return {f"{EVIL}{names.index(key)}" if key in names else key: with_evil(of, names) for key, of in value.items()}
    if isinstance(value, list):
        return [with_evil(of, names) for of in value]
    return EVIL if isinstance(value, str) and value not in STRUCTURE else value


class Active(HTMLParser):
    """Everything of a page that could run or lead elsewhere."""

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "img", "iframe", "object", "embed", "form", "base"):
            self.found.append(tag)
        for name, value in attributes:
            scheme = value.partition(":")[0] if name == "href" and ":" in (value or "") else ""
            if (
                name.startswith("on")
                or scheme not in ("", "data")
                or (name == "href" and (value or "").startswith("//"))
            ):
                self.found.append(f"{name}={value}")


@pytest.mark.parametrize(
    "kind",
    [
        "kv-eviction",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("recipe", "pruning", "smoothquant-smollm2")),
    ],
)
def test_no_text_of_a_record_runs_or_leads_elsewhere(kind, tmp_path):
    record = read_record(max(glob.glob(str(PUBLISHED / f"{kind}*.json"))))
    record["layers"], record["folds"] = record["layers"][:14], record["folds"][:4]
    scores = record["scores"] | ((record.get("cache") or {}).get("seconds") or {})
    made = with_evil(record, [name for name in scores if name not in STRUCTURE])
    for part, entry in (("tasks", {"files": {EVIL: {EVIL: "javascript:1", "b": "//evil.example/x"}}}),
                        ("generation", {"file": "javascript:1"})):  # fmt: skip
        made[part] = (made.get(part) or {}) | entry
    own, html = (render(one, tmp_path / "page.html").path.read_text() for one in (record, made))
    assert Active(html).found == Active(own).found and len(Active(own).found) <= 4
    assert "&lt;img src=x onerror" in html, "the text is there, as text"
    shown = [figures(one["folds"])._repr_html_() for one in (record, made)]
    assert Active(shown[1]).found == Active(shown[0]).found


def test_exceptions_show_neither_signatures_nor_paths():
    text = public("403: https://cdn.example/a?Expires=1&Signature=abc at /home/me/models/x.safetensors (1/2 of a/b)")
    assert text == "403: https://cdn.example/a?… at …/x.safetensors (1/2 of a/b)"
    failure = {
        "kind": "cell",
        "error": "OSError: /root/secret/run.json",
        "lines": [f"File {text}", "at /root/secret/y"],
    }
    runs = [RunOutcome("a", "gptq", "failed", "a", failure=failure)]
    assert "secret" not in compare_page(runs) + index_page(runs) and "…/run.json" in compare_page(runs)
