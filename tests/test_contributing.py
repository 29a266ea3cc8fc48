"""Every recipe of CONTRIBUTING.md works from its text alone: its files are written into a copy, and its commands run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^`(?P<path>[\w./-]+)`(?: \(a new file\)|, (?P<where>after|before) (?P<tick>``?)(?P<line>.+?)(?P=tick)):\n\n"
    r"```\w*\n(?P<code>.*?)^```$",
    re.M | re.S,
)
RECIPES = {
    title: text
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    if BLOCK.search(text)
}
FAST = ("A section of a page",)


def copy_of_the_tree(folder: Path) -> Path:
    """The files that git knows, as they are now, without published results."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git, which says which files belong to the tree")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if name and not name.startswith("reports/published/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def write(text: str, folder: Path) -> None:
    """Write the blocks of a recipe: new files, and lines after or before the only line that contains the given one."""
    for block in BLOCK.finditer(text):
        path, code = folder / block["path"], block["code"]
        if block["where"] is None:
            assert not path.exists(), f"{block['path']} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if block["line"] in line]
        assert len(places) == 1, f"{len(places)} lines of {block['path']} contain {block['line']}"
        lines.insert(places[0] + (block["where"] == "after"), code)
        path.write_text("".join(lines), encoding="utf-8")


def environment(folder: Path) -> dict[str, str]:
    """Variables with which `python` is this one, and imports come from the folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": folder}
    return kept | {name: os.pathsep.join(filter(None, (str(own), kept.get(name)))) for name, own in paths.items()}


def test_there_are_six_recipes():
    assert len(RECIPES) == 6 and set(FAST) <= set(RECIPES)
    for title, text in RECIPES.items():
        assert len(re.findall(r"^```sh$", text, re.M)) == 1, f"{title}: one block of commands checks it"
        marked = {block["code"] for block in BLOCK.finditer(text)}
        assert any("def test_" in code for code in marked), f"{title}: has no test of its own"


def run(commands: str, folder: Path) -> None:
    """Run the lines of a shell in a folder, and then ruff, which has nothing to say."""
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        commands += f"{ruff} check -q .\n{ruff} format -q --check .\n"
    ended = subprocess.run(["sh", "-ec", commands], cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-3000:]}"


def test_files_that_the_text_names_are_there():
    new = {block["path"] for block in BLOCK.finditer(TEXT) if block["where"] is None}
    named = set(re.findall(r"`((?:compress|eval|kernels|reports|tests|seeds|notebooks)/[\w./-]+)`", TEXT))
    assert named and not [name for name in named - new if not (ROOT / name).exists()]


@pytest.mark.parametrize("title", [pytest.param(t, marks=[pytest.mark.slow] * (t not in FAST)) for t in RECIPES])
def test_recipe(title, tmp_path):
    folder = copy_of_the_tree(tmp_path / "copy")
    write(RECIPES[title], folder)
    run(re.search(r"^```sh\n(.*?)^```$", RECIPES[title], re.M | re.S)[1], folder)


@pytest.mark.slow
def test_the_method_of_the_notebook_can_be_moved_to_its_file(tmp_path):
    """As the last section of add_a_method.ipynb says."""
    folder = copy_of_the_tree(tmp_path / "copy")
    notebook = json.loads((folder / "notebooks" / "add_a_method.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    code = [cells[cells.index(cell) + 1] for cell in cells if cell.startswith(("## The mathematics", "## The method"))]
    last = cells[-1]
    module = re.search(r"to `(compress/[\w/]+)\.py`", last)[1]
    entry, row = re.search(r'`("\w+": (\w+))`', last), re.search(r'`("\w+": \{.*?\})`', last)[1]
    own, methods, rows = (
        folder / name for name in (f"{module}.py", "compress/__init__.py", "tests/compress/test_methods.py")
    )
    own.write_text('"""Weighted rounding to nearest."""\n\n' + "\n\n\n".join(code) + "\n", encoding="utf-8")
    imported = f"from {module.replace('/', '.')} import {entry[2]}\n"
    text = methods.read_text(encoding="utf-8").replace("from kernels.step", f"{imported}from kernels.step", 1)
    methods.write_text(text.replace("\nMETHODS |= {\n", f"\nMETHODS |= {{\n    {entry[1]},\n"), encoding="utf-8")
    text = rows.read_text(encoding="utf-8")
    rows.write_text(text.replace("\nROWS = {\n", f"\nROWS = {{\n    {row},\n"), encoding="utf-8")
    name = row.split('"')[1]
    run(
        "python -m compress.guide\n"
        f"python -m pytest -q tests/compress/test_methods.py -k '{name} or has_a_row'\n"
        "python -m pytest -q tests/test_house.py -k 'METHODS or places'\n",
        folder,
    )
