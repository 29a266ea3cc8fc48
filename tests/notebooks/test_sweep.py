"""What a sweep stands for, what a run's key depends on, and what is refused before anything starts."""

import json
import re

import nbformat
import pytest

from compress.checkpoint.gguf.embedded import EMBEDDED
from compress.inputs import hub
from compress.inputs import model as models
from eval.record.schema import read_record
from kernels.support import source
from notebooks.batch.cli import main
from notebooks.batch.plan import plan, run_sweep
from notebooks.batch.sweep import MOST, SWEEPS, is_sweep, read_sweep, single
from notebooks.batch.sweep.estimate import estimated_seconds, written_seconds
from notebooks.study import identity as identities
from notebooks.study.identity import identity, key_of, run_key
from notebooks.study.parameters import check_parameters, read_parameters

ROOT = SWEEPS.parents[1]
README = ROOT / "README.md"


def given(sweep) -> list[dict]:
    return [{name: run.values[name] for name in run.varied} for run in sweep.runs]


def test_a_grid_is_every_combination_and_a_list_one_run_each(sweep):
    made = read_sweep(sweep(grid={"number": [1, 2], "share": [0.1, 0.2]}, list=[{"seconds": 1.0}, {"does": "pass"}]))
    assert len(made.runs) == 8 and len({run.key for run in made.runs}) == 8
    assert {
        (run.values["number"], run.values["share"], run.values["seconds"], run.values["does"]) for run in made.runs
    } == {(n, s, *other) for n in (1, 2) for s in (0.1, 0.2) for other in ((1.0, ""), (0.0, "pass"))}


def test_exclude_takes_combinations_out_and_include_puts_runs_in(sweep):
    made = read_sweep(
        sweep(
            grid={"number": [1, 2], "share": [0.1, 0.2]},
            exclude=[{"number": 1, "share": 0.2}, {"share": 0.1}],
            include=[{"number": 7}],
            base={"does": "pass"},
        )
    )
    assert [(run.values["number"], run.values["share"]) for run in made.runs] == [(2, 0.2), (7, 0.5)]
    assert {run.values["does"] for run in made.runs} == {"pass"}


def test_only_what_is_included_runs_where_there_is_no_grid(sweep):
    assert given(read_sweep(sweep(include=[{"number": 3}, {"number": 4}]))) == [{"number": 3}, {"number": 4}]
    assert len(read_sweep(sweep()).runs) == 1


def test_the_same_run_twice_is_one_run(sweep):
    assert len(read_sweep(sweep(grid={"share": [1, 1.0, 0.5]}, include=[{"share": 0.5, "number": 0}])).runs) == 2


def test_several_notebooks_share_a_base_as_far_as_they_have_its_parameters(sweep):
    text = """
        title: Two notebooks
        base: {device: cpu, bits: 3}
        runs:
          - {notebook: trivial.ipynb, grid: {number: [1, 2]}}
          - {notebook: gptq, base: {model_name: tiny}}
        """
    made = read_sweep(sweep(text=text))
    assert made.title == "Two notebooks" and len(made.runs) == 3
    assert (
        "bits" not in made.runs[0].values
        and made.runs[2].values["bits"] == 3
        and made.runs[2].values["model_name"] == "tiny"
    )


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"grid": {"numbr": [1]}}, "`numbr` (=1) is not a parameter of this notebook; did you mean `number`?"),
        ({"grid": {"number": ["one"]}}, "`number` (='one') must be int, not str"),
        ({"grid": {"number": [True]}}, "`number` (=True) must be int, not bool"),
        ({"grid": {"number": [1, -1]}}, "`number` (=-1) must not be negative"),
        ({"grid": {"number": 3}}, "`number` (=3) of `grid`"),
        ({"grid": {"number": []}}, "`number` (=[]) of `grid`"),
        ({"list": [3]}, "`list` of s.yml"),
        ({"grid": {"number": [1]}, "exclude": [{"number": 2}]}, "leaves nothing out"),
        ({"grid": {"number": [1]}, "exclude": [{"number": 1}]}, "stands for no run"),
        ({"base": {"nothing": 1}, "grid": {"number": [1]}}, "`nothing` (=1) of `base` is a parameter of no notebook"),
        ({"grd": {"number": [1]}}, "`grd` is not a key of s.yml"),
        ({"timeout_s": -1}, "`timeout_s` (=-1)"),
        ({"timeout_s": "1h"}, "`timeout_s` (='1h') of s.yml must be a number"),
        ({"runs": []}, "`runs` of s.yml must be a list"),
        ({"runs": [{"grid": {}}]}, "`notebook` is missing in s.yml, runs[0]"),
        ({"notebook": "gptk"}, "`notebook` (='gptk') is not there"),
        ({"grid": {"number": list(range(200)), "seconds": list(range(200))}}, f"{MOST:,} are the most"),
        (
            {"include": [{"number": i} for i in range(MOST + 1)]},
            f"gives the sweep {MOST + 1:,} runs; {MOST:,} are the most",
        ),
    ],
)
def test_a_bad_sweep_is_refused_and_says_why(keys, told, sweep):
    path = sweep(text=str(keys).replace("'", '"')) if "runs" in keys else sweep(**keys)
    with pytest.raises(ValueError) as caught:
        read_sweep(path)
    assert told in str(caught.value)


def test_every_problem_is_told_at_once(sweep):
    with pytest.raises(ValueError, match="has 3 problems") as caught:
        read_sweep(sweep(grid={"number": [1, -1, -2]}, include=[{"share": "much"}]))
    assert "(=-1)" in str(caught.value) and "(=-2)" in str(caught.value) and "'much'" in str(caught.value)


def test_yaml_without_its_traps(sweep):
    """A key that is there twice would lose runs; 1e-3 would be text."""
    path = sweep()
    path.write_text("notebook: trivial.ipynb\ngrid: {number: [1]}\ngrid: {number: [2]}")
    with pytest.raises(ValueError, match="`grid` is there twice"):
        read_sweep(path)
    path.write_text("notebook: trivial.ipynb\ngrid: {3: [1]}")
    with pytest.raises(ValueError, match="the key 3 must be text"):
        read_sweep(path)
    path.write_text("notebook: trivial.ipynb\nbase: {share: 1e-3}")
    assert read_sweep(path).runs[0].values["share"] == 0.001


def test_paths_begin_where_the_sweep_lies(sweep, tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("words")
    path = sweep(base={"does": "words.txt", "run_path": "mine"})
    monkeypatch.chdir("/")
    values = read_sweep(path).runs[0].values
    assert values["does"] == str(tmp_path / "words.txt") and values["run_path"] == str(tmp_path / "mine")
    with pytest.raises(ValueError, match="`run_path` .* is that of 2 runs"):
        read_sweep(sweep(grid={"number": [1, 2]}, base={"run_path": "mine"}))


@pytest.mark.parametrize(
    "text, told", [("a: [", "cannot be read"), ("- a", "must be a mapping"), ("", "must be a mapping")]
)
def test_files_that_are_no_sweep_are_refused(text, told, sweep):
    path = sweep()
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_sweep(path)
    with pytest.raises(ValueError, match="is not there; give a .yml file, or one known by name: .*quickstart"):
        read_sweep("slowstart")


@pytest.mark.parametrize(
    "values, told",
    [
        ({"bits": 7}, "`bits` (=7) of gptq must be one of"),
        ({"damp": -1.0}, "`damp` (=-1.0) of gptq"),
        ({"scale": "best"}, "`scale` (='best') of gptq"),
    ],
)
def test_knobs_are_checked_by_the_notebooks_own_cells(values, told):
    """Ranges are the methods' own: nothing says them twice."""
    with pytest.raises(ValueError) as caught:
        single("gptq", values)
    assert told in str(caught.value)


@pytest.fixture
def gemma(monkeypatch):
    """The embedded Gemma, whose package is optional, stood in for by the embedded model that is always there."""
    monkeypatch.setitem(EMBEDDED, "gemma3-270m", EMBEDDED["smollm2-135m"])


@pytest.mark.parametrize("name", sorted(path.stem for path in SWEEPS.glob("*.yml")))
def test_every_sweep_of_ours_makes_sense(name, gemma, request):
    if re.search(r"\b(c4|wikitext2|essays|tasks)\b", (SWEEPS / f"{name}.yml").read_text()):  # from the hub or a folder
        request.getfixturevalue("data")
    made = read_sweep(name)
    assert made.runs and made.description and made.timeout_s


def shortened(value):
    """wanda{0.3} for wanda(ratio={0.3}): as `curves` was written when the records were published."""
    return re.sub(r"\(\w+=(\{[^}]*\})\)", r"\1", value) if isinstance(value, str) else value


def test_the_sweeps_of_the_readme_are_what_was_published(gemma, data):
    """Their runs have the parameters of the records that the README's tables are made from."""
    runs = read_sweep("readme").runs + read_sweep("families").runs
    tables = re.findall(r" ([^ ]+?\.json)", "\n".join(re.findall(r"<!-- workbench .*? -->", README.read_text())))
    published = [read_record(ROOT / name)["run"] for name in dict.fromkeys(tables)]
    assert published
    for run in published:
        assert any(
            one.notebook == run["notebook"]
            and all(shortened(one.values.get(name)) == shortened(value) for name, value in run["parameters"].items())
            for one in runs
        ), run["key"]


def test_notebooks_that_write_no_record_are_no_runs():
    with pytest.raises(ValueError, match="`notebook` \\(='compare'\\) writes no record"):
        single("compare", {})


def test_sweeps_and_notebooks_are_told_apart():
    assert is_sweep("quickstart") and is_sweep("a/b.yml") and not is_sweep("gptq") and not is_sweep("x.ipynb")


def test_names_that_are_near_are_said_of_sweeps_and_notebooks():
    with pytest.raises(ValueError, match=r"`what` \(='familys'\) is neither.*did you mean families\?.*notebooks: "):
        is_sweep("familys")
    with pytest.raises(ValueError, match=r"did you mean gptq\?"):
        is_sweep("gptqq")
    with pytest.raises(ValueError, match=r"`notebook` \(='pruing'\).*did you mean pruning\?"):
        read_parameters("pruing")


def values_of(book, **given):
    return check_parameters(given, read_parameters(book))


def test_a_key_is_of_what_is_computed_and_not_of_how_it_is_written(trivial):
    key = run_key(trivial, values_of(trivial, number=1))
    assert key == run_key(trivial, values_of(trivial, number=1, run_path="/elsewhere")) and key.startswith("trivial-")
    assert run_key(trivial, values_of(trivial, share=1)) == run_key(trivial, values_of(trivial, share=1.0))
    assert key != run_key(trivial, values_of(trivial, number=2))
    book = nbformat.read(trivial, as_version=4)
    book.cells[0].source += "\n\nMore words."
    reworded = book.cells[4].source.replace('print("working on", number)', "print('working on',number)")
    book.cells[4].source = f"# a comment\n\n{reworded}"
    nbformat.write(book, trivial)
    assert key == run_key(trivial, values_of(trivial, number=1))
    book.cells[4].source += "\nnumber = number + 1"
    nbformat.write(book, trivial)
    assert key != run_key(trivial, values_of(trivial, number=1))


@pytest.mark.parametrize(
    "part, function",
    [
        ("versions", "versions"),
        ("device", "device_class"),
        ("threads", "thread_count"),
        ("native", "native_compiler"),
        ("revisions", "hub_revisions"),
    ],
)
def test_a_key_depends_on_versions_device_threads_compiler_and_revisions(trivial, part, function, monkeypatch):
    before = identity(trivial, values_of(trivial))
    monkeypatch.setattr(identities, function, lambda *_: "another")
    after = identity(trivial, values_of(trivial))
    assert [name for name in before if before[name] != after[name]] == [part]
    assert key_of(trivial, {}, before) != key_of(trivial, {}, after)


def test_a_limit_of_the_instructions_is_part_of_a_key(trivial, monkeypatch):
    monkeypatch.delenv("WORKBENCH_ISA", raising=False)
    before = identity(trivial, values_of(trivial))
    monkeypatch.setenv("WORKBENCH_ISA", "portable")
    after = identity(trivial, values_of(trivial))
    assert [name for name in before if before[name] != after[name]] == ["device"]


@pytest.mark.parametrize("name", ["g++", "clang++", None])
def test_the_compiler_of_a_key_is_the_one_that_builds_the_kernels(tmp_path, monkeypatch, name):
    """Also if it is clang++; without a compiler, it counts whether there is a library that was built earlier."""
    if name:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} 7\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("WORKBENCH_NATIVE", raising=False)
    compiler_of = identities.native_compiler.__wrapped__
    for built in (None, tmp_path):
        monkeypatch.setattr(identities, "built_library", lambda folder, built=built: built)
        earlier = "no C++ compiler, but a library that was built earlier" if built else "no C++ compiler"
        assert compiler_of() == (f"{name} 7" if name else earlier)


def test_comments_docstrings_and_layout_do_not_change_the_hash_of_code(tmp_path):
    """And the workbench's own code is no part of a run's key."""
    python, cpp = tmp_path / "a.py", tmp_path / "b.cpp"
    python.write_text('"""Says something."""\ndef f(x):\n    """What it does."""\n    return x + 1  # one\n')
    cpp.write_text("int f() { return 1; } // one")
    before = source.code_sha256(tmp_path)
    python.write_text("# other words\ndef f( x ):\n\n    return (x + 1)\n")
    cpp.write_text("int f() {\n  /* 1 */ return 1;\n}\n")
    assert source.code_sha256(tmp_path) == before
    python.write_text("def f(x):\n    return x + 2\n")
    assert source.code_sha256(tmp_path) != before
    assert "code" not in identity("gptq", values_of("gptq"))


def test_a_run_takes_the_place_of_no_foreign_folder(sweep, tmp_path):
    """Neither alone nor in a sweep: a mount point, a folder with other things in it, the project, a file."""
    (tmp_path / "thesis.tex").write_text("years")
    for path, why in (
        ("/proc", "is a mount point"),
        (str(tmp_path), "holds other things than a run"),
        (str(tmp_path / "thesis.tex"), "is a file"),
        (str(ROOT), "holds the workbench itself"),
    ):
        with pytest.raises(ValueError, match=f"`run_path` .*{why}"):
            read_sweep(sweep(base={"run_path": path}))
        with pytest.raises(ValueError, match=f"`run_path` .*{why}"):
            single("gptq", {"run_path": path})
    for refused in (
        lambda: single("gptq", {"save_path": str(tmp_path), "model_name": "tiny"}),
        lambda: read_sweep(sweep(base={"save_path": str(tmp_path)})),
    ):
        with pytest.raises(ValueError, match="`save_path` .*was not saved by this run"):
            refused()


def test_the_revision_in_the_key_is_the_one_that_is_loaded(tmp_path, monkeypatch):
    """That of the cache when the run is planned; in a batch run the planned one, whatever the cache holds by then."""
    head = tmp_path / "models--owner--name" / "refs" / "main"
    head.parent.mkdir(parents=True)
    head.write_text("aaaa")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", lambda *_, **how: asked.append(how) or 1 / 0)
    for planned, loaded in ((None, "aaaa"), ("bbbb", "bbbb")):
        hub.revision.cache_clear()
        if planned:
            monkeypatch.setenv(hub.REVISIONS, json.dumps({"models/owner/name": planned}))
        revisions = identities.hub_revisions({"model_name": "owner/name", "corpus": "pydocs"})
        assert revisions == {"models/owner/name": loaded}
        with pytest.raises(ValueError, match="cannot be read: division by zero"):
            models.load_model("owner/name")
        assert asked.pop()["revision"] == loaded
    hub.revision.cache_clear()


def test_a_key_is_of_the_content_of_files(trivial, tmp_path):
    """A model's folder and a text's file count by what is in them, wherever they lie."""
    values = values_of("gptq", model_name="tiny")
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in texts:
        file.write_text("the same words")
    one, other = (run_key("gptq", values | {"corpus": str(file)}) for file in texts)
    assert one != other, "what was asked for is a parameter, too"
    texts[0].write_text("other words")
    assert run_key("gptq", values | {"corpus": str(texts[0])}) != one
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = identity("gptq", values | {"model_name": str(folder)})
    (folder / "config.json").write_text("{ }")
    assert identity("gptq", values | {"model_name": str(folder)})["model"] != before["model"]
    assert key_of("gptq", values, before) != key_of("gptq", values, before | {"model": "another"})


def test_a_plan_says_what_will_be_done(sweep, tmp_path):
    made = plan(sweep(grid={"number": [1, 2]}), runs=tmp_path / "runs")
    assert [row.does for row in made.rows] == ["run", "run"] and made.seconds is None
    assert (
        "number=1" in str(made)
        and "2 runs: 0 done, 2 to run, about ? one after another" in str(made)
        and "<table>" in made._repr_html_()
    )
    assert not (tmp_path / "runs").exists(), "a plan writes nothing"


_BOMB = ", ".join(["&a0 [x,x,x,x,x,x,x,x]"] + [f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)])


@pytest.mark.parametrize(
    "text",
    [
        f"notebook: trivial.ipynb\nbase: {{does: [{_BOMB}]}}",
        f"notebook: trivial.ipynb\ntitle: [{_BOMB}]",
        f"notebook: trivial.ipynb\ngrid: {{number: {{a: [{_BOMB}]}}}}",
        f"notebook: trivial.ipynb\ngrid: {{number: [1]}}\nexclude: [{{number: [{_BOMB}]}}]",
        "notebook: trivial.ipynb\nbase: &a {does: [*a]}",
    ],
)
def test_aliases_that_multiply_are_refused(text, sweep):
    """A few hundred bytes of YAML stand for 10**11 values, or for one that holds itself."""
    with pytest.raises(ValueError, match="with its aliases it stands for more than 1\\d\\d,\\d\\d\\d values") as caught:
        read_sweep(sweep(text=text))
    assert len(str(caught.value)) < 1000


def test_messages_are_short_however_long_the_values_are(sweep):
    """Lists, texts, whole numbers of thousands of digits, keys, and the number of problems."""
    long = "[" + ", ".join(["1"] * 100_000) + "]"
    huge = "0x1" + "0" * 10_000
    for text, said in (
        (f"notebook: trivial.ipynb\nbase: {{number: {long}}}", "`number` .=.1, 1, "),
        (f"notebook: trivial.ipynb\ntitle: {long}", "`title` .=.1, 1, "),
        (f"notebook: trivial.ipynb\nbase: {{does: {huge}}}", "a number of 40,001 bits"),
        (f"notebook: trivial.ipynb\nbase: {{number: {'x' * 100_000}}}", "`number` .*100,000 characters"),
        (f"notebook: trivial.ipynb\n{'k' * 1_000}: 1", "is not a key"),
        (f"notebook: trivial.ipynb\ngrid: {{number: [{', '.join(f'n{i}' for i in range(3000))}]}}", "and 2,950 more"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            read_sweep(sweep(text=text))
        assert len(str(caught.value)) < 20_000
    shared = "base: &b {number: 1, seconds: 0.0}\nruns:\n- {notebook: trivial.ipynb, base: *b}"
    assert read_sweep(sweep(text=shared)).runs[0].values["number"] == 1, "an alias alone is no harm"


# Command lines


@pytest.mark.parametrize("given", (["-p", "number=x"], ["-p", "number", "x"], ["--parameter", "number=x"]))
def test_parameters_may_be_given_with_an_equals_sign(given, trivial, runs, capsys):
    assert main(["--runs", str(runs), "plan", str(trivial), *given]) == 2
    assert "`number` (='x') must be int, not str" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said", [("4.5", "(=4.5) must be int, not float"), ("true", "(=True) must be int, not bool")]
)
def test_a_value_of_another_type_is_said_as_it_was_given(text, said, trivial, runs, capsys):
    assert main(["--runs", str(runs), "plan", str(trivial), "-p", "number", text]) == 2
    assert f"`number` {said}" in capsys.readouterr().err


# Times


@pytest.mark.parametrize("notebook, minutes", [("gptq", 10), ("rotations", 30), ("kv_eviction", 15), ("start_here", 3)])
def test_a_notebook_states_the_time_of_its_defaults(notebook, minutes):
    usual = values_of(notebook)
    assert written_seconds(notebook) == minutes * 60
    assert estimated_seconds(notebook, usual) == pytest.approx(minutes * 60)
    more = usual | {"samples": 2 * usual["samples"]}
    assert minutes * 60 < estimated_seconds(notebook, more) < 2 * minutes * 60


def test_the_estimate_of_a_run_follows_its_model_and_its_recipes():
    usual = values_of("recipe")
    assert estimated_seconds("recipe", usual | {"model_name": "tiny"}) < 60 < estimated_seconds("recipe", usual)
    two = usual | {"compare": "rtn; curve: wanda(ratio={0.3, 0.5})"}
    assert estimated_seconds("recipe", two) == pytest.approx(4 * estimated_seconds("recipe", usual))


def test_finished_runs_of_a_model_tell_how_long_larger_ones_take(tmp_path, monkeypatch, sweep):
    """Four recipes take four times as long as one; with the same parameters the time is that which was measured. Values
    of another version of the notebook scale nothing."""
    runs = "runs: [{notebook: recipe, base: {model_name: tiny, compare: %s}}]"
    (row,) = plan(sweep(text=runs % "''"), runs=tmp_path).rows
    made = {"notebook": "recipe", "values": row.planned.values, "identity": row.planned.identity, "seconds": 100.0}
    monkeypatch.setattr("notebooks.batch.plan.finished_runs", lambda folder: [made | {"finished": "2026-01-01T00:00"}])
    (again,), (larger,) = (plan(sweep(text=runs % more), runs=tmp_path).rows for more in ("''", "rtn; awq; gptq"))
    assert (again.seconds, again.measured, larger.seconds, larger.measured) == (100.0, True, 400.0, False)
    made["values"] = made["values"] | {"tasks": "hellaswag", "samples": None}
    assert plan(sweep(text=runs % "rtn; awq; gptq"), runs=tmp_path).rows[0].seconds == 100.0


def test_a_plan_has_a_time_for_runs_that_were_never_run(sweep, runs):
    shown = str(plan(sweep(text="runs: [{notebook: gptq, base: {model_name: tiny, samples: 64}}]"), runs=runs))
    assert re.search(r" ~\d+ s ", shown) and re.search(r"1 to run, about \d+ s one after another", shown)


# Files that are made before the runs


MIX = {"path": "runs/b.safetensors", "command": "compress.kv.learned.mix runs/a.safetensors"}


@pytest.mark.parametrize(
    "files, told",
    [
        ([{"path": "b.safetensors", "command": MIX["command"]}], "`path` (='b.safetensors') of `files`"),
        ([{"path": "runs/../b", "command": MIX["command"]}], "must begin with runs/"),
        ([{"path": "runs/b", "command": "os.system"}], "must be a module of the package compress"),
        ([{"path": "runs/b"}], "`files` of s.yml must be a list of mappings of `path` and `command`"),
    ],
)
def test_files_of_a_sweep_are_below_its_runs_and_made_by_our_modules(files, told, sweep):
    with pytest.raises(ValueError, match=re.escape(told)):
        read_sweep(sweep(files=files))


def test_a_recipe_may_read_a_file_that_its_sweep_makes(sweep, tmp_path):
    text = """
        files: [{path: runs/b.safetensors, command: compress.commands.train_kvzap --model tiny}]
        runs: [{notebook: kv_eviction, base: {model_name: tiny, recipe: "kvzap(path='runs/FILE')", speed_contexts: []}}]
        """
    planned = plan(sweep(text=text.replace("FILE", "b.safetensors")), runs=tmp_path / "runs")
    assert "made first: python -m compress.commands.train_kvzap --model tiny --out runs/b.safetensors" in str(planned)
    with pytest.raises(ValueError, match="other.safetensors"):
        plan(sweep(text=text.replace("FILE", "other.safetensors")), runs=tmp_path / "runs")


@pytest.mark.slow
def test_files_are_made_before_the_runs_that_read_them(sweep, tmp_path, capfd):
    import torch

    from compress.kv.learned.networks import ScoringNetwork, write

    runs = tmp_path / "elsewhere"
    runs.mkdir()
    write({0: ScoringNetwork(*map(torch.ones, (4, 4, (4, 2), 2, (2, 1), 1)))}, runs / "a.safetensors")
    path = sweep(files=[MIX], base={"does": "assert Path('runs/b.safetensors').is_file()"})
    (outcome,) = run_sweep(path, runs=runs)
    assert outcome.status == "finished", outcome.failure
    assert "making runs/b.safetensors: python -m compress.kv.learned.mix" in capfd.readouterr().out
    assert "made first" not in str(plan(path, runs=runs, force=True)), "it is there"


@pytest.mark.slow
def test_a_command_that_fails_leaves_no_file_and_starts_no_run(sweep, tmp_path):
    class Never:
        def run(self, jobs, stop):
            raise AssertionError("a run was started")

    with pytest.raises(ValueError, match=r"`files`: python -m compress\.nowhere --out runs/b ended with exit status 1"):
        run_sweep(sweep(files=[{"path": "runs/b", "command": "compress.nowhere"}]), runs=tmp_path / "r", engine=Never())
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["sweeps"]
