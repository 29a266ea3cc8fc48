"""The verbs of `workbench` about models, data and finished runs, called as a user calls them."""

import io
import json
import shutil
import sys
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from compress import METHODS, apply, load_model, save_compressed
from eval.record.manifest import seal
from eval.record.schema import read_record
from eval.text import windows
from notebooks.batch import cli
from notebooks.batch.cli import main
from notebooks.batch.leases import take
from notebooks.batch.plan import run_sweep
from notebooks.batch.processes import mark
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.verbs import completion
from notebooks.batch.verbs.compress import complete

ROOT = Path(__file__).resolve().parents[2]
BRIEF = ["--max-windows", "1", "--window", "64", "--speed-rounds", "0"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The random model in 8 bits, in the workbench's own format."""
    model, tokenizer = load_model("tiny", dtype="bfloat16")
    return save_compressed(apply("rtn(bits=8)", model), tmp_path_factory.mktemp("models") / "saved", tokenizer)


@pytest.fixture
def plain(tmp_path) -> Path:
    """A model of others, without a word of what it was made from."""
    model, tokenizer = load_model("tiny", dtype="bfloat16")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def typed(monkeypatch):
    """Gives lines to the standard input, which is no terminal."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_each_line_of_the_input_is_a_prompt_of_its_own(saved, typed, capsys):
    typed("one two\n\nthree\n")
    assert main(["chat", str(saved), "--tokens", "4", "--json"]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in made] == ["one two", "three"]
    assert all(one["answer"]["tokens"] <= 4 and one["answer"]["seconds"] > 0 for one in made)
    typed("three\n")
    assert main(["chat", str(saved), "--tokens", "4"]) == 0
    assert capsys.readouterr().out == f"{made[1]['answer']['text']}\n\n", "the answers do not depend on earlier lines"


def test_a_model_that_does_not_fit_writes_from_disk(saved, typed, capsys):
    typed("one two\n")
    assert main(["chat", str(saved), "--tokens", "4", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["answer"]["text"]
    typed("one two\n")
    assert main(["chat", str(saved), "--tokens", "4", "--json", "--max-memory", "1GB"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["answer"]["text"] == expected and "0.0 are read per token" in said.err
    assert not torch._C._len_torch_function_stack(), "the window is closed"
    assert main(["chat", str(saved), "--max-memory", "1GB", "--beside"]) == 2
    assert "`--max-memory` holds one model" in capsys.readouterr().err
    assert main(["chat", str(saved), "--max-memory", "1kB"]) == 2
    assert "`--max-memory` (=1000 bytes) does not hold two" in capsys.readouterr().err


def test_the_original_writes_beside(saved, plain, typed, capsys, monkeypatch):
    typed("one two\n")
    assert main(["chat", str(saved), "--beside", "--tokens", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["original"]["model"] == "tiny" and made["original"]["text"] == made["answer"]["text"]
    assert main(["chat", str(plain), "--beside"]) == 2
    assert "name one with --baseline" in capsys.readouterr().err
    typed("one two\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["chat", str(plain), "--beside", "--baseline", str(saved), "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and all(line[48:51] == " | " and len(line) <= 99 for line in lines), lines
    text = " ".join(line[:48].strip() for line in lines[1:-1])
    assert text.split() == " ".join(line[51:].strip() for line in lines[1:-1]).split()


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(saved, typed, capsys):
    typed("word " * 3000)
    assert main(["chat", str(saved)]) == 2
    assert "leaves no room for `--tokens` (=128)" in capsys.readouterr().err


def test_a_saved_model_is_scored_against_its_original(saved, tmp_path, capsys):
    assert main(["eval", str(saved), *BRIEF, "--out", str(tmp_path / "scores")]) == 0
    said = capsys.readouterr().out
    assert "KL to the baseline on pydocs" in said and "Bits per weight" in said
    record = read_record(tmp_path / "scores" / "record.json")
    assert record["model"]["name"] == "tiny" and record["recipe"][0]["method"] == "rtn"
    assert record["scores"]["compressed"]["kl_pydocs"] > 0 and (tmp_path / "scores" / "report.html").is_file()
    assert main(["eval", str(saved), *BRIEF, "--out", str(tmp_path / "scores")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_unknown_origin_is_scored_alone(plain, tmp_path, capsys, monkeypatch):
    """Once: there is no second pass over the text, and no copy that is timed or weighed as a baseline."""
    passes = []
    monkeypatch.setattr(windows, "predictions", lambda *args, true=windows.predictions: passes.append(0) or true(*args))
    assert main(["eval", str(plain), *BRIEF[:-1], "1", "--out", str(tmp_path / "scores")]) == 0
    said = capsys.readouterr()
    assert "Perplexity on pydocs" in said.out and "KL" not in said.out and "names no original" in said.err
    assert "There is no baseline" in said.out and len(passes) == 1
    record = read_record(tmp_path / "scores" / "record.json")
    assert record["scores"]["baseline"] == {} == record["difference"] and list(record["speed"]) == ["compressed"]
    assert record["scores"]["compressed"]["bits_per_weight"] == pytest.approx(16, abs=0.1)
    assert "There is no baseline" in (tmp_path / "scores" / "report.html").read_text()
    (plain / "README.md").write_text("---\nbase_model: tiny\n---\n# A model\n")
    assert main(["eval", str(plain), *BRIEF]) == 0
    assert "KL to the baseline on pydocs" in capsys.readouterr().out, "its card names the original"


def test_a_baseline_that_reads_other_tokens_is_refused(plain, saved, capsys):
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    one, other = list(words)[:2]
    words[one], words[other] = words[other], words[one]
    (plain / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["eval", str(saved), *BRIEF, "--baseline", str(plain)]) == 2
    assert "its tokens are not those of" in capsys.readouterr().err


def test_runs_are_listed_filtered_and_deleted(sweep, runs, capsys, monkeypatch):
    here = ["list", "--runs", str(runs)]
    assert main(here) == 0 and "no run" in capsys.readouterr().out
    path = sweep(list=[{"number": 1}, {"number": 2}, {"does": "raise RuntimeError('no')"}])
    keys = [outcome.key for outcome in run_sweep(path, runs=runs)]
    assert main(here) == 0
    said = capsys.readouterr().out
    assert all(key in said for key in keys) and "failed: cell" in said and "finished" in said
    assert main([*here, "--state", "failed"]) == 0
    said = capsys.readouterr().out
    failed = next(key for key in keys if key in said)
    assert sum(key in said for key in keys) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main([*here, "--delete"]) == 2 and "needs a text" in capsys.readouterr().err
    assert main([*here, "trivial", "--delete"]) == 2
    said = capsys.readouterr()
    assert "--yes" in said.err and f"{runs / failed}.failed" in said.out and (runs / f"{failed}.failed").is_dir()
    monkeypatch.setattr("builtins.input", lambda _: "n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main([*here, failed, "--delete"]) == 1 and (runs / f"{failed}.failed").is_dir()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    done = next(key for key in keys if key != failed)
    place = RunFolder(runs / done, done)
    lease = take(place.lease, mark(runs, done))
    assert main([*here, "--delete", "--yes", "trivial"]) == 1, "one of them is running, and stays"
    said = capsys.readouterr()
    lease.release()
    assert f"{done} is running" in said.err and place.complete() and not (runs / f"{failed}.failed").exists()
    assert main([*here, "--delete", done]) == 0 and not place.folder.exists()
    assert done not in (runs / "index.html").read_text()


def test_the_age_of_a_run_is_that_of_its_record(tmp_path, capsys, monkeypatch):
    """Of a run that was copied a moment ago; and no folder is searched for each of many runs."""
    record = json.loads(next((ROOT / "reports" / "published").glob("gptq-smollm2-135m*.json")).read_text())
    record["run"]["started"] = (datetime.now(UTC) - timedelta(days=5)).isoformat(timespec="seconds")
    (run := tmp_path / "key").mkdir()
    (run / "record.json").write_text(json.dumps(record))
    (run / "notebook.ipynb").write_text("{}")
    monkeypatch.setattr(RunFolder, "everything", None)
    assert main(["list", "--runs", str(tmp_path)]) == 0 and capsys.readouterr().out.endswith("5 days\n")


@pytest.mark.parametrize("record", [True, False])
def test_only_runs_are_deleted(record, saved, tmp_path, capsys):
    """In a folder that is not one of runs: a saved model with its record, and a page of another program."""
    model, page = tmp_path / "here" / "model", tmp_path / "here" / "page"
    shutil.copytree(saved, model)
    page.mkdir()
    (page / "manifest.json").write_text('{"name": "a page", "icons": []}')
    seal(model, {"key": "model", "save_format": "workbench"})
    if record:
        source = next((ROOT / "reports" / "published").glob("gptq-smollm2-135m*.json"))
        for folder in (model, page):
            shutil.copy(source, folder / "record.json")
    before = sorted(path.name for path in (tmp_path / "here").rglob("*"))
    for name in ("model", "page"):
        assert main(["list", "--runs", str(tmp_path / "here"), "--delete", "--yes", name]) == 1
        assert f"{name} is no run" in capsys.readouterr().err
    assert set(before) <= {path.name for path in (tmp_path / "here").rglob("*")}


def test_the_page_is_put_beside_a_model_in_the_home_folder(tmp_path, monkeypatch, capsys):
    """The shell leaves the tilde of --out=~/mine to us."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (run := tmp_path / "runs" / "key").mkdir(parents=True)
    shutil.copy(next((ROOT / "reports" / "published").glob("recipe-*.json")), run / "record.json")
    (run / "report.html").write_text("a page")
    values = {"save_path": "~/mine", "save_format": "workbench", "recipe": "rtn", "model_name": "tiny"}
    complete(types.SimpleNamespace(values=values, key="key"), tmp_path / "runs")
    assert (tmp_path / "home" / "mine" / "report.html").is_file() and not (tmp_path / "~").exists()
    assert f"workbench eval {tmp_path / 'home' / 'mine'}" in capsys.readouterr().out


def test_data_that_a_sweep_needs_are_found_or_missed(tmp_path, monkeypatch, capsys):
    sweep = tmp_path / "mine.yml"
    sweep.write_text("notebook: recipe\nbase: {model_name: tiny}\n")
    assert main(["data", str(sweep)]) == 0
    assert "3 of 3 are there" in capsys.readouterr().out
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "nowhere"))
    sweep.write_text(
        "notebook: recipe\nbase: {model_name: tiny, tasks: [piqa]}\ngrid: {corpus: [c4, essays, pydocs]}\n"
    )
    assert main(["data", str(sweep)]) == 1
    said = capsys.readouterr().out
    assert "3 of 6 are there" in said and said.count("missing") == 3 and f"{tmp_path / 'nowhere'}, which is not" in said
    assert "cannot be reached" in said and main(["data", "nothing"]) == 2


def test_two_runs_pass_a_gate_or_not(tmp_path, capsys):
    published = ROOT / "reports" / "published"
    a = next(published.glob("gptq-smollm2-135m*.json"))
    lost = json.loads(a.read_text())
    lost["scores"]["compressed"].pop("kl_wikitext2")
    (tmp_path / "lost.json").write_text(json.dumps(lost))
    gate = tmp_path / "gate.yml"
    gate.write_text("kl_wikitext2: {max_ratio: 1.1}\nstored_bytes: {max: 1e9, min: 1}\n")
    command = ["--runs", str(tmp_path / "runs"), "compare", "--gate", str(gate)]
    assert main([*command, str(a), str(a)]) == 2, "one run is no pair"
    capsys.readouterr()
    (tmp_path / "again.json").write_text(a.read_text())
    assert main([*command, str(a), str(tmp_path / "again.json")]) == 0
    assert "The gate holds: 3 limits kept." in capsys.readouterr().out
    assert main([*command, str(a), str(tmp_path / "lost.json")]) == 1
    assert "missing in the second run" in capsys.readouterr().out
    gate.write_text("kl: {max: 1}\nkl: {max: 2}\n")
    assert main([*command, str(a), str(a)]) == 2 and "`kl` is there twice" in capsys.readouterr().err


def test_an_interrupt_is_said(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_plan", interrupt)
    assert main(["plan", "gptq"]) == 130 and capsys.readouterr().err == "workbench: interrupted\n"


def test_the_shell_completes_words_where_argcomplete_is_installed(monkeypatch):
    """A stand-in for argcomplete, which the tests do not install."""
    seen = {}

    def autocomplete(parser):
        for action in completion._actions(parser):
            if hasattr(action, "completer"):
                seen[action.dest] = action.completer(prefix="", parsed_args=types.SimpleNamespace(runs=None))

    fake = types.SimpleNamespace(autocomplete=autocomplete, FilesCompleter=lambda: lambda prefix: ["a file"])
    monkeypatch.setitem(sys.modules, "argcomplete", fake)
    with pytest.raises(SystemExit):
        main([])
    assert not seen, "nothing is imported unless the shell asks"
    monkeypatch.setenv(completion.ASKED, "1")
    with pytest.raises(SystemExit):
        main([])
    assert {"gptq", "quickstart", "a file"} <= set(seen["what"]) and set(seen["recipe"]) == set(METHODS)
    assert "gguf" in seen["format"] and "smollm2-135m" in seen["model"]
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.long
def test_a_model_is_compressed_once_and_lies_wherever_it_is_asked_for(tmp_path, runs, capsys):
    """One run of the notebook; what comes behind it copies, exports, and overwrites nothing."""
    own = ["-p", "samples", "2", "-p", "seqlen", "64", "-p", "window", "64", "-p", "max_windows", "1"]
    own += ["-p", "speed_rounds", "0", "-p", "write_tokens", "0", "--runs", str(runs)]
    command = ["compress", "tiny", "rtn(bits=8, group_size=-1)", *own, "--out"]
    assert main([*command, str(tmp_path / "m")]) == 0
    said = capsys.readouterr().out
    assert "KL 0.0" in said and "workbench chat" in said
    assert {"model.safetensors", "record.json", "report.html", "manifest.json"} <= {
        p.name for p in (tmp_path / "m").iterdir()
    }
    (tmp_path / "m" / "notes.txt").write_text("mine")
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    assert main([*command, str(tmp_path / "m")]) == 0 and "finished before" in capsys.readouterr().out
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "m" / "report.html").unlink()
    assert main([*command, str(tmp_path / "other")]) == 0 and "was copied from" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "ct"), "--format", "compressed-tensors"]) == 0
    assert (
        "was copied from" in capsys.readouterr().out
        and "quantization_config" in (tmp_path / "ct" / "config.json").read_text()
    )
    assert not (tmp_path / "other" / "notes.txt").exists() or (tmp_path / "m" / "notes.txt").read_text() == "mine"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years")
    assert main([*command, str(tmp_path / "taken")]) == 2
    assert "`--out` (=" in capsys.readouterr().err and len(list((tmp_path / "runs").glob("recipe-tiny-*"))) == 1
