"""The matrix of architectures: every decoder of transformers has a row or a reason, and the page says what happens."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures import ARCHITECTURES, LEFT_OUT, USUAL
from tests.columns import COLUMNS
from tests.matrix import PAGE, cells_of, row_of

# One of each kind of difference; the slow tests take all rows.
OF_A_KIND = ("gpt2", "nemotron_h", "falcon", "deepseek_v3")
made_with = f"transformers {transformers.__version__}," in PAGE.read_text()
same_version = pytest.mark.skipif(not made_with, reason="the page was made with another version of transformers")


def test_every_decoder_of_transformers_has_a_row_or_a_reason():
    rows, left_out = {name.partition(":")[0] for name in ARCHITECTURES}, [n for own in LEFT_OUT.values() for n in own]
    assert not rows & set(left_out) and len(left_out) == len(set(left_out)) and set(USUAL) <= rows
    if made_with:
        assert rows | set(left_out) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_no_cell_of_the_page_is_wrong():
    rows = row_of(PAGE.read_text())
    assert list(rows) == list(ARCHITECTURES), "every row, in the order of the table"
    assert all(list(row) == list(COLUMNS) for row in rows.values())
    assert {cell for row in rows.values() for cell in row.values()} <= {"yes", "refused", "–"}


@same_version
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_A_KIND)) for name in ARCHITECTURES],
)
def test_cells_are_those_of_the_page(architecture):
    made = cells_of(architecture)
    problems = {column: cell for column, cell in made.items() if cell.result in ("wrong", "error")}
    assert not problems
    found = {column: "–" if cell.result == "moot" else cell.result for column, cell in made.items()}
    assert row_of(PAGE.read_text()).get(architecture, found) == found  # the page names rows that were not tried yet
