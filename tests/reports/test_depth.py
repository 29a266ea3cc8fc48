"""The part of a page on how a model uses its depth."""

import pytest

from eval.record.rows import typed
from reports.page import depth
from reports.page.depth import figures, rank_correlation
from reports.page.render import page

ROWS = [
    {
        "block": block, "attention": 0.4 / (block + 1), "attention_cosine": 0.0, "mlp": 0.5 / (block + 1),
        "mlp_cosine": 0.0, "turned": 0.1 / (block + 1), "later": 0.3 if block < 3 else None,
        "output": 0.8 / (block + 1), "lens": 3.0 - block, "lens_agreement": block / 3,
    }
    for block in range(4)
]  # fmt: skip


def test_the_page_says_what_the_rows_say():
    record = {"run": {"key": "k", "notebook": "pruning"}, "provenance": {}, "layers": [], "depth": ROWS}
    shown = depth.context(typed(record))
    assert "lose without a block is 1.00" in " ".join(shown["said"]) and "Behind block 2 of 4" in " ".join(
        shown["said"]
    )
    html = page(record)
    assert "How the model uses its depth" in html and html.count('<tr><th scope="row">') >= 4
    assert "How the model uses its depth" not in page({**record, "depth": None})
    made = figures(typed(record).depth)._repr_html_()
    assert "What every block adds" in made and "not measured" in figures([])._repr_html_()


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation([1, 2, None], [1, 2, 3]) is None and rank_correlation([1, 1, 1], [1, 2, 3]) is None
