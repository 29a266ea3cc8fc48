"""Bad inputs: each ends with one sentence, at `plan` or `export`, before a model is loaded wherever that can be.

`python tests/notebooks/test_bad_input.py` writes what they print into notebooks/bad_inputs.md.
"""

import contextlib
import io
import json
import os
import re
import resource
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from notebooks.batch.cli import main
from notebooks.batch.preflight import check_run
from notebooks.study.parameters import FOLDER, check_parameters, read_parameters

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks" / "bad_inputs.md"
_DEEP = "[" * 3000 + "]" * 3000
_GPTQ = {"notebook": "gptq", "base": {"model_name": "tiny"}}


def _file(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _damaged(folder: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{" + bytes(20))


def _magic(folder: Path) -> None:
    source = ["%time\n", "number: int = 0  # a number\n", 'run_path: str = ""  # folder']
    cell = {"cell_type": "code", "source": source, "metadata": {"tags": ["parameters"]}, "outputs": []}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "magic.ipynb").write_text(json.dumps(book))


def _two(folder: Path) -> None:
    (folder / "s.yml").write_text(yaml.safe_dump(_GPTQ))
    (folder / "other").mkdir()
    (folder / "other" / "s.yml").write_text(yaml.safe_dump(_GPTQ))
    kept = folder / "runs" / "sweeps" / "s"
    kept.mkdir(parents=True)
    (kept / "plan.json").write_text(json.dumps({"file": str(folder / "s.yml"), "runs": [], "title": "s"}))


def _tasks(folder: Path) -> None:
    (folder / "tasks").mkdir()


def _saved(folder: Path) -> None:
    """A model of 5-bit weights in the workbench's own format, in the folder `saved`: small, random and untied."""
    from transformers import LlamaForCausalLM

    from compress import METHODS, apply, save_compressed
    from compress.inputs.model import tiny_config

    model = LlamaForCausalLM(tiny_config(vocab_size=96)).bfloat16()
    save_compressed(apply([METHODS["rtn"](bits=5, group_size=32)], model), folder / "saved")


def _taken(folder: Path) -> None:
    _saved(folder)
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("years")


def _without_shard(folder: Path) -> None:
    _saved(folder)
    (folder / "saved" / "model.safetensors").unlink()


def _flipped(folder: Path) -> None:
    _saved(folder)
    file = folder / "saved" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 0xFF
    file.write_bytes(content)


@contextlib.contextmanager
def _full_disk(allowed: int) -> Iterator[None]:
    """No file may grow beyond these bytes: what a full disk, or a quota, does to the folder of runs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# (what is wrong, the command after `workbench`, what must be in its folder before, a part of what it says)
CASES: list[tuple[str, str, Callable[[Path], object] | None, str]] = [
    ("A group size that does not divide", "plan gptq -p model_name tiny -p group_size 48", None, "`group_size` (=48)"),
    ("A value outside its range", "plan gptq -p model_name tiny -p bits 7", None, "must be one of"),
    ("A word outside its choices", "plan gptq -p model_name tiny -p dtype float8", None, "must be one of float32"),
    ("A size in an unknown unit", "plan gptq -p model_name tiny -p max_memory 24Gigs",
     None, "`max_memory` (='24Gigs')"),
    ("More memory than this machine has", "plan gptq -p model_name tiny -p weights disk -p max_memory 500TB",
     None, "`max_memory` (='500TB')"),
    ("More guesses than positions", "plan lossless -p model_name tiny -p compare '' -p guess_tokens 99999",
     None, "`guess_tokens` (=99999)"),
    ("More guesses than positions, by a recipe",
     "plan recipe -p model_name tiny -p recipe nf4 -p lossless true -p write_tokens 99999",
     None, "`write_tokens` (=99999)"),
    ("A kind of question that does not exist", "plan kv_eviction -p model_name tiny -p tasks words",
     None, "must be one of word"),
    ("A recipe whose bracket stays open", "plan recipe -p model_name tiny -p recipe 'gptq(bits=4, awq'",
     None, "never closed"),
    ("A recipe without a comma", "plan recipe -p model_name tiny -p recipe 'awq gptq(bits=4)'", None, "comma"),
    ("A corpus that is no valid JSON", "plan gptq -p model_name tiny -p corpus broken.json",
     _file("broken.json", "{"), "JSON"),
    ("A key that a sweep does not have", "plan keys.yml",
     _file("keys.yml", "notebook: gptq\ngird: {bits: [3]}"), "did you mean `grid`?"),
    ("A limit of time with a unit", "run gptq -p model_name tiny --timeout 1h", None, "a number of seconds"),
    ("A parameter that does not exist", "plan gptq -p bitz 4", None, "did you mean `bits`?"),
    ("A missing corpus", "plan gptq -p model_name tiny -p corpus nowhere.txt", None, "there is no such file"),
    ("An unknown corpus", "plan gptq -p model_name tiny -p eval_corpus wikitext3", None, "`eval_corpus`"),
    ("A corpus too short", "plan gptq -p model_name tiny -p corpus short.txt",
     _file("short.txt", "few words " * 9), "`samples`"),
    ("A damaged safetensors file", "plan gptq -p model_name model", _damaged, "is damaged"),
    ("A damaged GGUF file", "plan gptq -p model_name m.gguf", _file("m.gguf", "GGUF" + "x" * 99), "GGUF"),
    ("A path to a single file", "plan gptq -p model_name m.safetensors",
     _file("m.safetensors", "x"), "is a single file"),
    ("A model that is not there", "plan gptq -p model_name /no/such/model", None, "no such file or folder"),
    ("A folder of runs that cannot be written", "--runs /proc/runs plan gptq -p model_name tiny",
     None, "nothing can be written"),
    ("A folder for the model that cannot be written", "plan gptq -p model_name tiny -p save_path /proc/m",
     None, "`save_path` (='/proc/m')"),
    ("A full disk", "plan gptq -p model_name tiny", None, "nothing can be written"),
    ("A number that is not finite", "plan recipe -p model_name tiny -p temperatures '[Infinity]'",
     None, "must be finite"),
    ("A whole number of more than 64 bits", "plan gptq -p model_name tiny -p seed 18446744073709551616",
     None, "below 2**63"),
    ("A magic in the parameters cell", "plan magic.ipynb", _magic, "no magics"),
    ("3,000 nested brackets", "plan deep.yml",
     _file("deep.yml", f"notebook: gptq\nbase: {_DEEP}"), "nested too deeply"),
    ("3,000 nested brackets in a recipe", f"plan recipe -p model_name tiny -p recipe '{_DEEP}'",
     None, "must name methods"),
    ("A device that is not there", "plan gptq -p model_name tiny -p device cuda:9", None, "`device` (='cuda:9')"),
    ("Two sweeps of one name", "plan other/s.yml", _two, "under the same name"),
    ("An `include` of a million runs", "plan big.yml", None, "MB are the most"),
    ("Task files of others", "plan recipe -p model_name tiny -p tasks '[\"own\"]' -p task_path tasks",
     _tasks, "are code"),
    ("A format that cannot hold the recipe",
     "plan gptq -p model_name tiny -p bits 5 -p save_path m -p save_format gptq", None, "'compressed-tensors'"),
    ("Another recipe that a format cannot hold",
     "plan recipe -p model_name tiny -p recipe nf4 -p save_path m -p save_format compressed-tensors", None, "works"),
    ("An unknown format", "plan gptq -p model_name tiny -p save_path m -p save_format gguff",
     None, "must be one of workbench"),
    ("A format without a folder", "plan gptq -p model_name tiny -p save_format gguf", None, "`save_path` is empty"),
    ("A saved model in a format that cannot hold it", "export saved --format gptq", _saved, "works"),
    ("An export to a folder that exists", "export saved --format gguf --to taken", _taken, "exists already"),
    ("An export of another folder", "export tasks --format gguf",
     _tasks, "no checkpoint in the workbench's own format"),
    ("A checkpoint without one of its files", "export saved --format gguf", _without_shard, "lacks model.safetensors"),
    ("A checkpoint with a byte changed", "export saved --format gguf", _flipped, "its sha256 differs"),
    ("A saved model that is not whole, as the model of a run", "plan gptq -p model_name saved",
     _without_shard, "lacks model.safetensors"),
    ("A method that does not exist, for `compress`", "compress tiny gptqq --out m",
     None, "did you mean gptq?"),
    ("A model that is not there, for `compress`", "compress ./nope gptq --out m", None, "`MODEL` (='./nope')"),
    ("A folder that holds other files, for `compress`", "compress tiny gptq --out taken", _taken, "`--out` (="),
    ("A format that cannot hold the recipe, for `compress`",
     "compress tiny nf4 --out m --format gptq", None, "`--format` (='gptq')"),
    ("A format that does not exist, for `compress`", "compress tiny gptq --out m --format ggu",
     None, "did you mean gguf?"),
    ("A folder without a model, for `chat`", "chat tasks", _tasks, "`DIR` (='tasks')"),
    ("An original that is not known, for `chat`", "chat tiny --beside", None, "name one with --baseline"),
    ("A window larger than memory, for `chat`", "chat tiny --max-memory 500TB", None, "`--max-memory` (='500TB')"),
    ("A gate with an unknown limit", "compare a.json b.json --gate gate.yml",
     _file("gate.yml", "kl_pydocs: {maxx: 0.2}"), "did you mean max?"),
    ("A disk that is full half way", "export saved --format compressed-tensors", _saved, "make room"),
]  # fmt: skip
FULL = {"A full disk": 1000, "A disk that is full half way": 30_000}  # bytes that a file may have
HALF_WAY = ("A disk that is full half way",)  # work had begun: the exit status is 1


def answer(case: tuple[str, str, Callable[[Path], object] | None, str], folder: Path) -> tuple[int, str]:
    """The exit status of a case's command, and what it prints, without the paths of this machine."""
    what, command, prepare, _ = case
    if what.startswith("An `include`"):
        (folder / "big.yml").write_text("notebook: gptq\ninclude:\n" + "- {bits: 4}\n" * 1_000_000)
    if prepare:
        prepare(folder)
    before, said = os.getcwd(), io.StringIO()
    limit = _full_disk(FULL[what]) if what in FULL else contextlib.nullcontext()
    place = [] if "--runs" in command else ["--runs", str(folder / "runs")]
    os.chdir(folder)
    try:
        with limit, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            status = main([*place, *shlex.split(command)])
    finally:
        os.chdir(before)
    text = said.getvalue().replace(str(folder.resolve()), "…").replace(str(folder), "…")
    text = re.sub(r"it must be at most [\d.]+ GB", "it must be at most 16.0 GB", text)
    return status, re.sub(r"\d+ free \([\d.]+ GB\)|\d+(\.\d+)? MB free", "0 MB free", text).strip()


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_bad_input_ends_at_plan_with_a_sentence(case, tmp_path, monkeypatch):
    monkeypatch.delenv("WORKBENCH_TRUST", raising=False)
    status, said = answer(case, tmp_path)
    assert status == (1 if case[0] in HALF_WAY else 2) and case[3] in said and "Traceback" not in said, said
    assert said.startswith("workbench: ") and not {"m", "saved-gguf", "saved-compressed-tensors"} & set(
        os.listdir(tmp_path)
    )
    assert len(said) < 1000 and section(case, said) in PAGE.read_text(), "`python tests/notebooks/test_bad_input.py`"


# Parameters that take any number (`seed`), or that only select linears, folders and files; and 0 where it means "none".
_FREE = {"seed", "skip", "save_path", "work_path", "task_path", "run_path", "page", "runs_path", "title"}
_ZERO = {"speed_rounds", "write_tokens", "task_limit", "few_shot", "damp", "sink_weight", "bits", "depths", "batch"}


_QUICK = {"gptq", "kv_eviction"}
_NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb") if path.stem != "compare")


@pytest.mark.parametrize(
    "notebook", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _QUICK)) for name in _NOTEBOOKS]
)
def test_every_parameter_is_checked_at_plan(notebook):
    """A word that means nothing, a negative number, and 0 are refused before anything is loaded."""
    declared = read_parameters(notebook)
    defaults = {name: parameter.default for name, parameter in declared.items()}
    defaults |= {"model_name": "tiny"} if "model_name" in declared else {}
    defaults |= {"storage": "kv_int", "speed_contexts": [512]} if notebook == "kv_eviction" else {}
    refused = 0
    for name, parameter in declared.items():
        kind = str(parameter.type)
        words = ["nonsense"] if "str" in kind and "list" not in kind else []
        numbers = [] if parameter.type is str else [-3] if name in _ZERO else [-3, 0] if "int" in kind else [-3]
        wrong = [*words, *(numbers if parameter.type is not bool and "list" not in kind else [])]
        wrong += [[one] for one in (["nonsense"] if kind == "list[str]" else numbers) if "list" in kind]
        for value in wrong if name not in _FREE else ():
            given = defaults | {name: value} | ({"save_path": "/tmp/none/m"} if name == "save_format" else {})
            with pytest.raises(ValueError, match=r"^(.|\n)*`\w+`"):
                check_run(notebook, check_parameters(given, declared), named=True)
                pytest.fail(f"`{name}` (={value!r}) of {notebook} was accepted")
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    "name, reason", [("DiffLlama", "its logits differ by"), ("DeepseekV3", "multi-head latent attention")]
)
def test_attention_that_no_compressed_cache_serves_ends_at_plan(tmp_path, name, reason):
    """A small model of the same configuration is tried; there are no weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4, architectures=[f"{name}ForCausalLM"])
    config.save_pretrained(tmp_path)
    values = {name: parameter.default for name, parameter in read_parameters("recipe").items()}
    with pytest.raises(ValueError, match=reason):
        check_run("recipe", values | {"model_name": str(tmp_path), "recipe": "snapkv(budget=0.5)"}, named=True)


def test_cells_of_others_are_not_executed_by_a_plan(tmp_path, monkeypatch, trivial, sweep):
    """A notebook that a sweep names has its parameters checked by type; one that the user names is executed."""
    monkeypatch.delenv("WORKBENCH_TRUST")
    text = trivial.read_text().replace("if number < 0", f"open({str(tmp_path / 'executed')!r}, 'w')\\nif number < 0")
    trivial.write_text(text)
    path = sweep(grid={"number": [1]})
    assert main(["--runs", str(tmp_path / "runs"), "plan", str(path)]) == 0 and not (tmp_path / "executed").exists()
    assert main(["--runs", str(tmp_path / "runs"), "plan", str(sweep(grid={"number": ["one"]}))]) == 2
    path = sweep(grid={"number": [1]})
    assert main(["--runs", str(tmp_path / "runs"), "plan", str(path), "--trust", str(tmp_path)]) == 0
    assert (tmp_path / "executed").exists(), "the user trusts its folder"


def write_page() -> None:
    """Write notebooks/bad_inputs.md from what the commands print."""
    import tempfile

    parts = [
        "# Bad inputs",
        "",
        "What `workbench` prints for each. The exit status is 2, and nothing has been written; it is 1 for a disk that",
        "is full half way, which leaves nothing behind either. The commands run in a folder with the files that they",
        "name; `…` stands for it. `saved` is a model that the workbench saved. Written by",
        "`python tests/notebooks/test_bad_input.py`; the test in the same file runs every command and compares.",
    ]
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            status, said = answer(case, Path(folder))
        assert status == (1 if case[0] in HALF_WAY else 2), (case, said)
        parts += ["", section(case, said)]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def section(case: tuple[str, str, Callable[[Path], object] | None, str], said: str) -> str:
    """The section of the page on a case: its command, and what it prints."""
    command = case[1].replace(_DEEP, "[[[…]]]")
    return "\n".join([f"### {case[0]}", "", "```", f"$ workbench {command}", said, "```"])


if __name__ == "__main__":
    write_page()
