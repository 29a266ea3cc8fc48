"""A record with every number that JSON can hold, hostile names and missing parts still becomes a page."""

import glob
import json
import math
import re
from pathlib import Path

import pytest

from eval.record.reading import plain
from eval.record.schema import read_record
from reports.compare.compare import compare_page, leaderboard
from reports.compare.index import index_page
from reports.compare.outcome import RunOutcome
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
