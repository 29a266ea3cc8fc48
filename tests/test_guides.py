"""The guides: their links lead somewhere, their code runs, their commands exist, and they are short."""

import ast
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from compress import METHODS, load_compressed, load_model
from compress.guide import PAGES, updated
from compress.method import settle
from compress.recipe import parse_recipe
from kernels import native
from notebooks.batch.cli import _parser, main

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)
GUIDES = {str(page.relative_to(ROOT)): page for page in hooks.guides()}
MOST_WORDS = 30_000  # of all README files together
# Texts of the guides that a test replaces: a tiny model, fewer tokens, and paths that exist.
SMALLER = {'"smollm2-135m"': '"tiny"', "samples=32": "samples=2", "samples=16": "samples=2", "samples=8": "samples=2",
           "seqlen=512": "seqlen=64", "seqlen=256": "seqlen=64", "seqlen=128": "seqlen=64", "window=512": "window=64"}  # fmt: skip


def code_of(page: str) -> list[str]:
    """The Python blocks of a guide, in order, with tiny models and few tokens."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDES[page].read_text(encoding="utf-8"), re.M | re.S)
    for text, smaller in SMALLER.items():
        blocks = [block.replace(text, smaller) for block in blocks]
    return blocks


@pytest.mark.parametrize("page", GUIDES)
def test_links_of_a_guide_lead_to_files_and_headings(page):
    for link, file, anchor in hooks.links(GUIDES[page]):
        assert file.exists(), f"{page} links to {link}, which is not there"
        assert not anchor or anchor in hooks.anchors(file), f"{page} links to {link}: no heading has that anchor"


def test_links_are_found_and_code_is_not_taken_for_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "[a](b.md#c-d) `x[0](1)` [`e`](f), [![g](h.png)](i)\n```\n[j](k)\n```\n[l](https://m) ![n](o.svg)\n"
    )
    assert [link for link, _, _ in hooks.links(page)] == ["b.md#c-d", "f", "i", "o.svg"]
    assert hooks.slug("The C++ kernel (`native/panels.cpp`)") == "the-c-kernel-nativepanelscpp"
    assert hooks.slug("[Text](link.md) on a GPU") == "text-on-a-gpu"


def test_files_that_readmes_name_exist():
    for page in (path for path in GUIDES.values() if path.name == "README.md"):
        for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|yml|ipynb|cpp|inc))`", page.read_text(encoding="utf-8")):
            folders = [folder for folder in page.parents if folder == ROOT or ROOT in folder.parents]
            assert any((folder / name).exists() for folder in folders), f"{page.relative_to(ROOT)} names {name}"


def test_readmes_are_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    words = {page: len(path.read_text(encoding="utf-8").split()) for page, path in GUIDES.items()}
    readmes = {page: count for page, count in words.items() if page.endswith("README.md")}
    longest = sorted(readmes.items(), key=lambda item: -item[1])[:5]
    assert sum(readmes.values()) <= MOST_WORDS, f"{sum(readmes.values()):,} words; longest: {longest}"


def test_pages_of_the_site_exist_and_every_readme_is_one_of_them():
    def pages(entries) -> list[str]:
        values = [value for entry in entries for value in entry.values()]
        return [page for value in values for page in ([value] if isinstance(value, str) else pages(value))]

    shown = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(set(shown)) == len(shown) and set(shown) <= GUIDES.keys()
    assert {page for page in GUIDES if page.endswith("README.md")} <= set(shown)


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_methods_are_those_of_METHODS(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert updated(text) == text, "`python -m compress.guide` writes them again"


def test_recipes_in_the_guides_compose():
    """Every recipe in backticks that calls a method of METHODS by name is one that the workbench takes."""
    for page in PAGES:
        for text in re.findall(r"`([a-z0-9_]+[(,][^`]*)`", (ROOT / page).read_text(encoding="utf-8")):
            if re.match(r"\w+", text)[0] in METHODS and "{" not in text:
                settle(parse_recipe(text))


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a block without Python that calls `workbench` or a module or script of ours."""
    found = []
    for name, path in GUIDES.items():
        if path.parent.name == "published" or name in ("CONTRIBUTING.md", "notebooks/bad_inputs.md"):
            continue  # commands of their time; files that are written first; and commands that are refused
        for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(name, line) for line in lines if re.match(r"(?:\S*/bin/)?(?:workbench|python|make) ", line)]
    return found


@pytest.mark.parametrize("page, command", commands())
def test_commands_of_guides_exist(page, command):
    program, *words = shlex.split(command.partition("  #")[0], comments=True)
    if program.endswith("workbench"):
        _parser().parse_args(words)
    elif program.endswith("make"):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert words[0] in targets, f"{page}: there is no target {words[0]}"
    elif words[0] == "-m" and words[1].partition(".")[0] in hooks.FOLDERS:
        assert importlib.util.find_spec(words[1]), f"{page}: there is no module {words[1]}"
    elif words[0].endswith(".py"):
        assert words[0].startswith("my_") or (ROOT / words[0]).exists(), f"{page}: there is no script {words[0]}"


def test_code_of_the_readme_runs_when_pasted(tmp_path, monkeypatch, capsys):
    example, elsewhere = code_of("README.md")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out.startswith("The capital of France is")
    assert (tmp_path / "smollm2-135m-int4" / "model.safetensors").is_file()
    assert main(["export", "smollm2-135m-int4", "--format", "compressed-tensors"]) == 0
    exec(elsewhere.partition("\n\n")[0], namespace := {})
    assert type(namespace["model"]).__name__ == "LlamaForCausalLM" and namespace["tokenizer"] is not None


def test_code_of_the_guide_to_compression_runs_when_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = code_of("compress/README.md")
    exec(block, namespace := {})
    assert len(namespace["result"].layers) > 0 and (tmp_path / "smaller").is_dir()


def test_code_of_the_guide_to_the_cache_runs_when_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in code_of("compress/kv/README.md"):
        exec(block, namespace)
    assert namespace["cache"].nbytes > 0 and (tmp_path / "chunks").is_dir()


def test_code_of_the_guide_to_weights_runs_when_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in code_of("compress/weights/README.md"):
        exec(block, namespace)
    assert namespace["model"] is not None and (tmp_path / "stacked").is_dir()


@pytest.mark.slow
def test_code_of_the_guide_to_large_models_runs_when_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model("tiny")
    model.save_pretrained("big-model")
    tokenizer.save_pretrained("big-model")
    from_disk, script = code_of("compress/walk/README.md")
    exec(from_disk.replace("/fast/disk", str(tmp_path / "disk")), namespace := {})
    assert load_compressed("out") is not None and namespace["result"].usage is not None
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    try:
        exec(script, {})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_code_of_the_guide_to_evaluation_runs_when_pasted(capsys):
    (block,) = code_of("eval/README.md")
    exec(block, {})
    assert len(capsys.readouterr().out.split()) == 2


def test_code_of_the_native_step_runs_when_pasted():
    (block,) = code_of("kernels/step/README.md")
    exec(block, namespace := {})
    assert namespace["token"].shape == (1, 1)


@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels")
def test_code_that_times_steps_of_several_tokens_runs_when_pasted(capsys):
    (block,) = code_of("reports/published/speed-beside-rivals.md")
    assert "* 30" in block
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # the block turns gradients off for all that follows
        exec(block.replace("* 30", "* 1"), {})
    assert list(ast.literal_eval(capsys.readouterr().out)) == [1, 8, 16]


def test_every_python_block_of_a_guide_has_a_test():
    tested = set(re.findall(r'code_of\("(.+?)"\)', Path(__file__).read_text(encoding="utf-8"))) | {"CONTRIBUTING.md"}
    assert {page for page in GUIDES if code_of(page)} == tested
    for page in tested - {"CONTRIBUTING.md"}:
        assert all(ast.parse(block) for block in code_of(page))
