"""`workbench repeat`: a recorded run executed again, and which numbers came back."""

import json
import math
import shlex
from pathlib import Path

import pytest

from eval.record.rows import typed
from eval.record.schema import read_record
from notebooks.batch.cli import main
from notebooks.batch.verbs.repeat import command_of, compared, status_of, table

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
RECORD = PUBLISHED / "gptq-smollm2-135m-amd-epyc-zen4-2-cores-2026-11-26.json"
TINY = ["-p", "model_name", "tiny", "-p", "group_size", "-1", "-p", "samples", "2", "-p", "seqlen", "32"]
BRIEF = ["-p", "window", "64", "-p", "max_windows", "1", "-p", "speed_rounds", "0", "-p", "write_tokens", "0"]


def changed(record: dict, **scores: float) -> dict:
    """The record with other scores of the compressed model."""
    copy = json.loads(json.dumps(record))
    copy["scores"]["compressed"] |= scores
    return copy


def said(record: dict, again: dict) -> dict[str, str]:
    rows = compared(typed(record), typed(again))
    return {row.metric: row.said for row in rows if row.model == "compressed"}


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.json")), ids=lambda file: file.stem)
def test_the_command_of_a_published_record_can_be_read(file):
    notebook, given = command_of(str(file))
    assert Path(notebook).suffix == ".ipynb" and all(len(pair) == 2 for pair in given)


def test_a_record_came_back_if_it_differs_by_noise_alone():
    record = read_record(RECORD)
    kl, error = (record["scores"]["compressed"][name] for name in ("kl_wikitext2", "kl_wikitext2_stderr"))
    stored = record["scores"]["compressed"]["stored_bytes"]
    assert set(said(record, record).values()) == {"identical"}
    assert said(record, changed(record, kl_wikitext2=kl + error))["kl_wikitext2"] == "same"
    assert said(record, changed(record, kl_wikitext2=kl + 9 * error))["kl_wikitext2"] == "beyond noise"
    assert said(record, changed(record, stored_bytes=stored * 1.1))["stored_bytes"] == "beyond noise"
    del (lost := changed(record))["scores"]["compressed"]["kl_wikitext2"]
    assert said(record, lost)["kl_wikitext2"] == "not measured"


def test_a_number_that_one_run_lost_did_not_come_back():
    record, lost = read_record(RECORD), changed(read_record(RECORD), kl_wikitext2=math.nan, stored_bytes=math.nan)
    for one, other in ((record, lost), (lost, record)):
        assert {said(one, other)[name] for name in ("kl_wikitext2", "stored_bytes")} == {"beyond noise"}
    assert said(lost, lost)["kl_wikitext2"] == "identical"


def test_a_number_without_an_error_is_compared_only_if_it_is_a_size():
    record = changed(read_record(RECORD), decode_tokens_per_s_b8_p128=100.0, latency_s=1.0, cache_bytes_1024=100.0)
    again = changed(record, decode_tokens_per_s_b8_p128=90.0, latency_s=1.1, cache_bytes_1024=120.0)
    told = said(record, again)
    assert told["decode_tokens_per_s_b8_p128"] == told["latency_s"] == "its noise is not known"
    assert told["cache_bytes_1024"] == "beyond noise"


def test_a_loss_counts_against_the_baseline_of_the_same_run():
    record = read_record(RECORD)
    again = changed(record, perplexity_wikitext2=record["scores"]["compressed"]["perplexity_wikitext2"] * 1.001)
    loss = again["difference"]["compressed"]
    loss["nll_wikitext2"] += 10 * loss["nll_wikitext2_stderr"]  # far less than the error of a perplexity
    assert said(record, again)["perplexity_wikitext2"] == "beyond noise"


def test_speeds_are_compared_on_one_processor_as_multiples_of_the_baseline():
    record = read_record(RECORD)
    elsewhere, faster = changed(record), changed(record, decode_tokens_per_s=1.0)
    elsewhere["provenance"]["hardware"]["cpu"] = "another one"
    elsewhere["scores"]["compressed"]["decode_tokens_per_s"] = 1.0
    for name in ("decode_tokens_per_s", "decode_quartiles"):
        value = faster["speed"]["compressed"][name]
        faster["speed"]["compressed"][name] = [3 * one for one in value] if isinstance(value, list) else 3 * value
    assert said(record, elsewhere)["decode_tokens_per_s"] == "another processor"
    assert said(record, faster)["decode_tokens_per_s"] == "beyond noise"


def test_the_sentence_counts_and_the_status_says_whether_something_differs():
    record = read_record(RECORD)
    same, other = (
        compared(typed(record), typed(record)),
        compared(typed(record), typed(changed(record, stored_bytes=1))),
    )
    assert status_of(same) == 0 and status_of(other) == 1
    assert f"{len(same)} of {len(same)} numbers came back, 0 differ" in table(same)
    assert "1 differ by more than noise" in table(other)


def test_a_run_is_repeated_from_its_record(tmp_path, runs, capsys):
    """The command of a small run in a record of a large one: its sizes differ, and its texts have other names."""
    record = read_record(RECORD)
    record["provenance"]["command"] = shlex.join(["papermill", "notebooks/gptq.ipynb", "out.ipynb", *TINY, *BRIEF])
    (tmp_path / "record.json").write_text(json.dumps(record))
    overridden = ["-p", "seqlen", "48"]
    assert main(["--runs", str(runs), "repeat", str(tmp_path / "record.json"), *overridden]) == 1
    shown = capsys.readouterr().out
    assert "kl_wikitext2" in shown and "not measured" in shown and "differ by more than noise" in shown
    again = read_record(next(runs.glob("*/record.json")))
    assert again["model"]["name"] == "tiny" and again["calibration"]["seqlen"] == 48
    own = next(runs.glob("*/record.json"))
    assert main(["--runs", str(runs), "repeat", str(own)]) == 0
    assert read_record(own)["run"]["started"] != again["run"]["started"], "a run is not compared with itself"


def test_what_is_no_record_is_refused(tmp_path, capsys):
    record = read_record(RECORD)
    record["provenance"]["command"] = "make it"
    (tmp_path / "bare.json").write_text(json.dumps(record))
    assert main(["repeat", str(tmp_path / "bare.json")]) == 2
    assert "does not say which command made it: make it" in capsys.readouterr().err
