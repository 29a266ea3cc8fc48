"""The tables of a README say what records say, and are as the command makes them."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from eval.record.rows import typed
from eval.record.schema import read_record
from notebooks.batch.cli import main
from notebooks.batch.pages import published_papers
from reports.parts.published import QUESTIONS, README, published_files
from reports.parts.table import markdown, rows, strengths_markdown, tasks_markdown, updated

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "reports" / "published").glob("*.json"))


def made_up(name: str = "a-model") -> dict:
    base = {
        "perplexity_a": 20.0,
        "perplexity_a_stderr": 0.5,
        "stored_bytes": 2e8,
        "decode_tokens_per_s": 40.0,
        "prefill_tokens_per_s": 1000.0,
    }
    small = {
        **base,
        "perplexity_a": 20.1,
        "kl_a": 0.00123,
        "kl_a_stderr": 0.0001,
        "stored_bytes": 1e8,
        "prefill_tokens_per_s": 1500.0,
    }
    return {
        "run": {"key": "k"},
        "model": {"name": name},
        "recipe": [{"method": "m", "knobs": {"bits": 8, "order": "x"}}],
        "scores": {
            "baseline": base,
            "compressed": small,
            "plain": {"perplexity_a": 19.0},
            "other": {"perplexity_a": 60.0},
        },
        "speed": {
            name: {
                "decode_tokens_per_s": 40.0,
                "step_tokens_per_s": 45.0,
                "prefill_tokens_per_s": prefill,
                "spread": {"decode": 0.1, "prefill": 0.1},
            }
            for name, prefill in (("baseline", 1000.0), ("compressed", 1500.0))
        },
        "recipes": {
            "plain": [{"method": "n", "knobs": {}, "text": "n(a='|')"}, {"method": "o", "knobs": {}, "text": "o"}]
        },
    }


def test_a_row_for_each_model_against_its_own_baseline():
    assert markdown([made_up()]).splitlines() == [
        "| recipe | perplexity, a | KL, a | stored MB | decode, tokens/s | prefill, tokens/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| 16-bit baseline | 20.00 ± 0.50 | – | 200.0 | 40.0 | 1,000 |",
        "| **`m(bits=8)`** | 20.10 ± 0.50 (+0.50 %) | 0.00123 ± 0.00010 | 100.0 | 40.0 (≈ 1.00×) | 1,500 (1.50×) |",
        "| `n(a='\\|'), o` | 19.00 (−5.0 %) | – | – | – | – |",
        "| other | 60.00 (+200.0 %) | – | – | – | – |",
    ]
    other = made_up("another")
    for of in ("scores", "speed"):
        other[of]["baseline"]["prefill_tokens_per_s"] = 3000.0
    both = markdown([made_up(), other]).splitlines()
    assert both[0].startswith("| model | recipe |") and len(both) == 2 + 2 * 4
    assert (
        both[3].startswith("| a-model | **`m(bits=8)`** |")
        and "1,500 (1.50×)" in both[3]
        and "1,500 (0.50×)" in both[7]
    )
    assert [row.decode_ratio for row in rows(typed(other))] == [1.0, 1.0, None, None]


def test_a_table_of_strengths():
    points = [{"value": v, "scores": {"perplexity_a": p}} for v, p in (("0.3", 21.0), ("0.5", 1234.5))]
    record = made_up() | {"strengths": {"lines": [{"recipe": "wanda(ratio={})", "points": points}]}}
    made = strengths_markdown([record])
    assert made.splitlines() == [
        "| perplexity, a; baseline 20.00 | 0.3 | 0.5 |",
        "| --- | ---: | ---: |",
        "| `wanda(ratio={})` | 21.00 | 1,234 |",
    ]
    text = updated("<!-- workbench strengths r.json -->\n<!-- end -->", {"r.json": record}.__getitem__)
    assert text == f"<!-- workbench strengths r.json -->\n\n{made}\n<!-- end -->"
    with pytest.raises(ValueError, match="no scores at several strengths"):
        strengths_markdown([made_up()])


def test_text_between_the_marks_is_made_anew_and_nothing_else(tmp_path):
    before = (
        "# Title\n\n<!-- workbench table one.json -->\nold\n<!-- end -->\n\ntext\n"
        "<!-- workbench table one.json two.json -->\n<!-- end -->\n"
    )
    records = {"one.json": made_up(), "two.json": made_up("another")}
    after = updated(before, records.__getitem__)
    table, both = markdown([made_up()]), markdown(list(records.values()))
    assert after == (
        f"# Title\n\n<!-- workbench table one.json -->\n\n{table}\n<!-- end -->\n\ntext\n"
        f"<!-- workbench table one.json two.json -->\n\n{both}\n<!-- end -->\n"
    )
    assert updated(after, records.__getitem__) == after and updated("no tables", records.__getitem__) == "no tables"
    with pytest.raises(ValueError, match="one.json --> has no <!-- end --> after it"):
        updated(f"<!-- workbench table one.json -->\n{before}", records.__getitem__)
    with pytest.raises(ValueError, match="must name records"):
        updated("<!-- workbench table  -->\n<!-- end -->", records.__getitem__)


def test_command_line_prints_and_updates(tmp_path, capsys):
    source = PUBLISHED[0]
    assert main(["table", str(source)]) == 0
    assert capsys.readouterr().out == markdown([read_record(source)])
    shutil.copy(source, tmp_path / "record.json")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- workbench table record.json -->\n<!-- end -->\n")
    assert main(["table", "--update", str(readme)]) == 0 and "written again" in capsys.readouterr().out
    written = readme.read_text()
    assert markdown([read_record(source)]) in written
    assert main(["table", "--update", str(readme)]) == 0 and "up to date" in capsys.readouterr().out
    assert readme.read_text() == written


def test_command_line_says_what_is_wrong(tmp_path, capsys):
    assert main(["table"]) == 2 and "`table` takes records" in capsys.readouterr().err
    assert main(["table", "nothing.json"]) == 2 and "nothing.json" in capsys.readouterr().err
    assert (
        main(["table", "--update", str(tmp_path / "none.md")]) == 2
        and "there is no such file" in capsys.readouterr().err
    )
    kernels = {**json.loads(PUBLISHED[0].read_text()), "scores": None}
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    assert main(["table", str(tmp_path / "kernels.json")]) == 2 and "no scores of models" in capsys.readouterr().err


def test_the_readmes_are_up_to_date():
    """`workbench table --update README.md` and `workbench table --write reports/published` would change nothing."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert updated(text, lambda name: read_record(ROOT / name)) == text
    folder = ROOT / "reports" / "published"
    for path, written in (published_papers(folder) | published_files(folder)).items():
        assert written == path.read_text(encoding="utf-8"), f"`workbench table --write` changes {path.name}"


def test_the_picture_of_the_readme_is_of_the_record_of_its_table():
    """`make picture` takes it again."""
    spec = importlib.util.spec_from_file_location("picture", Path(__file__).with_name("picture.py"))
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert Image.open(picture.PICTURE).text[picture.RECORD] == picture.digest(picture.record_of_readme())


def test_a_published_folder_has_an_index_and_a_note_with_the_tables_of_each_record(tmp_path, capsys):
    assert main(["table", "--write", str(tmp_path)]) == 2 and "holds no records" in capsys.readouterr().err
    shutil.copy(PUBLISHED[0], tmp_path / "one.json")
    (tmp_path / "one.md").write_text("A note on the record: 3.5 tokens.\n")
    (tmp_path / "other.md").write_text("# A note by itself\n\nMeasured on 2026-11-20: 1,234 tokens.\n")
    assert main(["table", "--write", str(tmp_path)]) == 2 and "['one', 'other']" in capsys.readouterr().err
    questions = "one: {question: 'Fast?', answer: 3.5 tokens}\nother: {question: 'How fast?', answer: '1,234 tokens'}\n"
    (tmp_path / QUESTIONS).write_text(questions)
    for _ in range(2):  # writing again changes nothing
        assert main(["table", "--write", str(tmp_path)]) == 0
    note, record = (tmp_path / "one.md").read_text(), read_record(PUBLISHED[0])
    assert record["provenance"]["command"] in note and markdown([record]) in note
    assert note.endswith("<!-- end -->\n\nA note on the record: 3.5 tokens.\n") and note.count("# ") == 1
    assert (tmp_path / README).read_text().splitlines()[-2:] == [
        f"| Fast? | 3.5 tokens | [note](one.md), [report](one.html) | [record](one.json) | {record['run']['started'][:10]} |",
        "| How fast? | 1,234 tokens | [note](other.md) | – | 2026-11-20 |",
    ]
    (tmp_path / QUESTIONS).write_text(questions.replace("1,234", "1,235"))
    assert (
        main(["table", "--write", str(tmp_path)]) == 2
        and "`other` in questions.yml has numbers" in capsys.readouterr().err
    )


def test_tasks_side_by_side():
    """From what a record keeps of tasks; a score of nothing is no dash."""
    step = {"method": "rtn", "knobs": {}, "text": "rtn(bits=4)"}
    paired = {"metric": "acc", "recovery": 0.5, "right_to_wrong": 3, "wrong_to_right": 1}
    made = {
        "run": {"key": "k"},
        "recipe": [step],
        "recipes": {"compressed": [step]},
        "scores": {
            "baseline": {"acc_sums": 0.5, "acc_sums_stderr": 0.05},
            "compressed": {"acc_sums": 0.25, "acc_sums_stderr": 0.04},
        },
        "tasks": {"rows": [{"task": "sums", "metric": "acc", "n": 20}], "compared": {"compressed": {"sums": paired}}},
    }
    text = tasks_markdown([made])
    assert "| 16-bit baseline | 50.0 ± 5.0 |  |  |" in text and "| `rtn(bits=4)` | 25.0 ± 4.0 | 50 % | 3, 1 |" in text
    assert updated("<!-- workbench tasks x -->\nold\n<!-- end -->", lambda _: made).count("16-bit baseline") == 1
    with pytest.raises(ValueError, match="has no tasks"):
        tasks_markdown([{"run": {"key": "k"}}])
