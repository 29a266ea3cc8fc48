"""A record with every number that JSON can hold, hostile names and missing parts still becomes a page."""

import glob
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.record.reading import plain
from eval.record.schema import read_record
from reports.compare.compare import compare_page, leaderboard
from reports.compare.index import index_page
from reports.compare.outcome import RunOutcome
from reports.page.folds import figures
from reports.page.render import page, render
from reports.parts.text import public

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
