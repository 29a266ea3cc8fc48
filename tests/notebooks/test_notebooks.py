"""Every notebook runs through papermill on the embedded real model, and says clearly what is wrong before it works."""

import ast
import logging
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from papermill import PapermillExecutionError, execute_notebook, inspect_notebook
from papermill.cli import _resolve_type

from compress import load_compressed
from compress.kv.attach import attached_methods
from eval.record.schema import read_record
from eval.speed import kernel_bench
from eval.speed.kernel_bench import plan_kernels
from kernels import native
from notebooks.batch.cli import main
from notebooks.study.parameters import FOLDER, check_parameters, injected, parse_value, read_parameters
from notebooks.study.run import start

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
SMALL = {"samples": 1, "seqlen": 64, "max_windows": 1, "window": 64, "speed_rounds": 1, "write_tokens": 2}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_a_story(name):
    """Title first, one cell of parameters, no definitions, loops or branches, and no outputs committed."""
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs and cell.execution_count is None
        if "parameters" in cell.metadata.get("tags", []):
            assert all(line.count("=") == 1 for line in cell.source.splitlines()), "papermill cannot read other lines"
        kinds = {type(node) for node in ast.walk(ast.parse(cell.source))}
        definitions = {ast.FunctionDef, ast.ClassDef, ast.If} if not name.startswith("add_a_") else set()  # its subject
        assert not kinds & {*definitions, ast.For, ast.While, ast.Lambda}
    for parameter in read_parameters(name).values():
        assert parameter.help, f"{parameter.name} has no help"
        assert check_parameters({parameter.name: parameter.default}, {parameter.name: parameter})


def expect_gptq(made, scores, html):
    base, small, rtn = (scores[k] for k in ("baseline", "compressed", "rtn"))
    assert base["perplexity_pydocs"] < min(small["perplexity_pydocs"], rtn["perplexity_pydocs"])
    saved = sum(layer["shape"][0] * layer["shape"][1] * (16 - layer["bits_per_weight"]) / 8 for layer in made["layers"])
    assert base["stored_bytes"] - small["stored_bytes"] == pytest.approx(saved, rel=0.001)
    assert base["resident_bytes"] - small["resident_bytes"] > 0.9 * saved > 0.01 * base["stored_bytes"]
    assert 0 < small["kl_pydocs"] < rtn["kl_pydocs"]
    if made.get("speed"):
        assert small["decode_tokens_per_s"] > base["decode_tokens_per_s"], (
            "4 bits read fewer bytes: a wide margin below 1.5x"
        )
        prompt_and_step = {f"cpu {native.isa(torch.bfloat16, many)}" for many in (True, False)}
        fast = prompt_and_step if native.why_not() is None else {"cpu dequantise", "cpu int4pack"}
        assert set(made["speed"]["compressed"]["kernels"]["int_matmul"]) == fast
    assert sum(r["error"] < r["rtn_error"] for r in made["layers"]) > 0.9 * len(made["layers"])
    assert "Compared in this run" not in html and "Scales moved" not in html


def expect_start(made, scores, html):
    base, small = (scores[k] for k in ("baseline", "compressed"))
    assert base["perplexity_pydocs"] < small["perplexity_pydocs"] and small["kl_pydocs"] > 0
    saved = sum(layer["shape"][0] * layer["shape"][1] * (16 - layer["bits_per_weight"]) / 8 for layer in made["layers"])
    assert base["stored_bytes"] - small["stored_bytes"] == pytest.approx(saved, rel=0.001)
    assert saved > 0.036 * base["stored_bytes"], "a fifteenth of the blocks in a quarter of their bytes"


def expect_smoothquant(made, scores, html):
    base, small, unsmoothed = (scores[k] for k in ("baseline", "compressed", "unsmoothed"))
    assert (
        small["perplexity_pydocs"] < 1.05 * base["perplexity_pydocs"]
        and 0 < small["kl_pydocs"] < unsmoothed["kl_pydocs"]
    )
    assert (
        small["stored_bytes"] < 0.94 * base["stored_bytes"] and small["resident_bytes"] < 0.94 * base["resident_bytes"]
    )
    assert unsmoothed["stored_bytes"] == small["stored_bytes"], "a fold takes no room"
    assert [step["method"] for step in made["recipes"]["unsmoothed"]] == [made["recipe"][1]["method"]]
    assert len(made["folds"]) == 120 and {fold["alpha"] for fold in made["folds"]} == {0.5}
    assert (
        all(fold["difference"] < 1e-4 for fold in made["folds"])
        and sum(f["channels"] is not None for f in made["folds"]) == 4
    )
    peaks = [[f[when]["max"] / f[when]["median"] for when in ("x_before", "x_after")] for f in made["folds"]]
    assert sum(after < before for before, after in peaks) > 100, "some inputs had no outliers to begin with"
    assert all(f["w_after"] != f["w_before"] for f in made["folds"])
    assert "120 of 120 links were scaled (alpha 0.5)" in html


def expect_pruning(made, scores, html):
    """Comparisons and curves run on the tiny model; the papers' orders are tested on the real one in tests/compress."""
    base, small = (scores[k] for k in ("baseline", "compressed"))
    assert all(layer["sparsity"] == pytest.approx(0.5, abs=0.01) for layer in made["layers"])
    assert {round(layer["bits_per_weight"], 1) for layer in made["layers"]} == {9.0}
    assert small["stored_bytes"] < 0.95 * base["stored_bytes"]
    assert base["perplexity_pydocs"] < small["perplexity_pydocs"] < 30 * base["perplexity_pydocs"]
    assert "Removed parts and weights" in html and "50.0 % of the weights of 35 linears are 0" in html


def expect_rotations(made, scores, html):
    """Of one block, whose inputs go through maps that are hardly trained."""
    base, small, plain = (scores[k] for k in ("baseline", "compressed", "unsmoothed"))
    assert 0 < small["kl_pydocs"] < plain["kl_pydocs"] and base["stored_bytes"] < small["stored_bytes"]
    assert {fold["kind"] for fold in made["folds"]} == {"online map"} and len(made["folds"]) == 4
    assert all(fold["error_after"] < fold["error_before"] for fold in made["folds"])
    seen = made["inputs"]
    assert list(seen) == ["16 bits", "unsmoothed", "compressed"] and {len(one) for one in seen.values()} == {120}
    first = [name for name in seen["compressed"] if ".layers.0." in name]
    assert sum(seen["compressed"][n]["kurtosis"] < seen["16 bits"][n]["kurtosis"] for n in first) > 2
    assert "4 groups of linears are transformed (4 by online map)" in html


FIRST = "*.[5-9].*,*.[12]?.*"  # leaves the first 5 of 30 blocks, where that proves the same
TWO = "*.[2-9].*,*.[12]?.*"  # leaves the first two
FEW = "*.[1-9].*,*.[12]?.*"  # leaves the first one
METHOD_OF = {
    "start_here": "gptq",
    "pruning": "wanda",
    "rotations": "flatquant",
    "recover": "rtn",
    "lossless": "rtn",
    "search": "mixed",
}  # where the notebook is not called after its method


def expect_recover(made, scores, html):
    (record,) = made["recoveries"]["compressed"]
    first, *_, last = record["curve"]
    assert last["step"] == 2 and last["tokens"] == 2 * 2 * 128 and last["divergence"] < first["divergence"]
    saved = sum(layer["shape"][0] * layer["shape"][1] * (16 - layer["bits_per_weight"]) / 8 for layer in made["layers"])
    gone = scores["baseline"]["stored_bytes"] - scores["compressed"]["stored_bytes"]
    assert gone == pytest.approx(saved, rel=0.001), "training takes no room"
    assert scores["compressed"]["kl_pydocs"] > 0 and "Recovery</h2>" in html


def expect_lossless(made, scores, html):
    """Of one block in 3 bits, which guesses most tokens."""
    drafts = made["lossless"]["drafts"]
    assert list(drafts) == ["compressed", "coarse"] and made["lossless"]["speeds"] == []
    assert 0.2 < drafts["compressed"]["acceptance"] == scores["compressed"]["guess_acceptance"] <= 1
    assert 0 < drafts["compressed"]["lengths"]["1"] <= drafts["compressed"]["lengths"]["4"] <= 4
    assert "Lossless speed by guesses</h2>" in html and "accepted of 4" in html


def expect_search(made, scores, html):
    """Of one block and a cache, of which not all can be in many bits."""
    limit, found = 265.4e6, made["search"]
    cache = found["caches"]["bytes"][found["caches"]["chosen"]]
    assert scores["compressed"]["stored_bytes"] + cache <= limit == found["max_bytes"] and found["minimised"] == "loss"
    assert sum(found["used"].values()) == 7 and len(found["front"]) > 3
    assert found["rounds"][0]["point"]["bytes"] == pytest.approx(
        scores["compressed"]["stored_bytes"] + cache, rel=0.001
    )
    assert 100 * 23_040 <= found["caches"]["bytes"]["full"] < 4e6 and "The cache of one sequence is one more" in html
    assert 0 < scores["compressed"]["kl_pydocs"] < 1 and "Asked, predicted, measured</h2>" in html


# Per notebook: parameters beside SMALL, the format of its linears and their number, and what else must hold.
EXPECTED = {
    "start_here": ({"group_size": -1, "skip": TWO, "seqlen": 128, "window": 128}, "int_group", 14, expect_start),
    "gptq": ({"skip": FEW, "write_tokens": 0, "seqlen": 128, "window": 128}, "int_group", 7, expect_gptq),
    "smoothquant": ({"compare": "", "skip": FIRST, "write_tokens": 0}, "eight_bit", 35, expect_smoothquant),
    "rotations": ({"transform": f"flatquant(steps=1, skip={FEW!r})", "weight_bits": 16, "skip": FEW, "beside": "",
                   "seqlen": 64, "write_tokens": 0}, "dense", 7, expect_rotations),
    "pruning": ({"recipe": f"wanda(skip='{FIRST}')", "compare": "", "write_tokens": 0, "depth_windows": 0}, "bitmap", 35,
                expect_pruning),
    "search": ({"choices": "rtn(bits={3,8}, group_size=64)", "max_bytes": "265.4MB", "skip": FEW, "compare": "",
                "context": 100, "caches": "half: snapkv(budget=0.5)", "loss_tokens": 64, "write_tokens": 0},
               "int_group", 7, expect_search),
    "lossless": ({"recipe": f"rtn(bits=3, skip='{FEW}')", "compare": f"coarse: rtn(bits=2, skip='{FEW}')",
                  "guess_tokens": 4, "write_tokens": 0}, "int_group", 7, expect_lossless),
    "recover": ({"recipe": f"rtn(bits=3, skip='{FEW}')", "windows": 4, "steps": 2, "minutes": 0.0, "skip": FEW,
                 "write_tokens": 0, "seqlen": 128, "window": 128}, "int_group", 7, expect_recover),
}  # fmt: skip


@pytest.mark.long
def test_a_method_is_added_in_a_notebook(tmp_path, papermill):
    """The class that the notebook defines is compared with methods of the house; the first blocks are enough."""
    given = {**SMALL, "seqlen": 128, "window": 128, "speed_rounds": 0, "write_tokens": 0, "skip": FEW}
    made = papermill("add_a_method", given)
    assert made["recipe"][0]["text"].startswith("weighted_rtn(") and len(made["layers"]) == 7
    assert sum(layer["error"] < layer["rtn_error"] for layer in made["layers"]) > 4
    small, rounded, best = (made["scores"][name]["kl_pydocs"] for name in ("compressed", "rtn", "gptq"))
    assert 0 < small < rounded and 0 < best < rounded
    assert "weighted_rtn" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_a_policy_is_added_in_a_notebook(tmp_path, papermill):
    """The class that the notebook defines is compared with policies of the house, at the same budgets."""
    given = {"samples": 2, "lengths": [256], "tasks": ["word"], "budget": 0.3, "budgets": [0.3], "speed_contexts": []}
    made = papermill("add_a_policy", given)
    assert made["recipe"][0]["text"] == "value_aware(budget=0.3)" and made["layers"] == []
    scores = made["scores"]
    others = [f"{name}(budget=0.3)" for name in ("snapkv", "knorm", "random_kv", "streaming")]
    assert list(scores) == ["baseline", "compressed", *others]
    assert 0 < scores["compressed"]["kl_word_256_agnostic"] < scores["random_kv(budget=0.3)"]["kl_word_256_agnostic"]
    assert scores["compressed"]["cache_bytes_256"] < 0.4 * scores["baseline"]["cache_bytes_256"]
    assert "value_aware" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_kv_eviction_runs_on_the_real_model(tmp_path, papermill):
    given = {
        "policy": "kvzip",
        "budget": 0.5,
        "compare": "half in 4 bits: kvzip, kv_int",
        "curves": "snapkv(budget={0.5})",
        "samples": 2,
        "lengths": [256],
        "tasks": ["word"],
        "speed_contexts": [],
        "write_tokens": 8,
    }
    made = papermill("kv_eviction", given)
    names = [
        "baseline",
        "compressed",
        "half in 4 bits",
        "snapkv(budget=0.5)",
        "random_kv(budget=0.5)",
        "streaming(budget=0.5)",
    ]
    assert list(made["scores"]) == names and made["recipe"][0]["method"] == "kvzip" and made["layers"] == []
    scores, cache = made["scores"], made["cache"]
    assert {row["visibility"] for row in cache["answers"]} == {"agnostic", "visible", "follow-up"}
    assert scores["baseline"]["exact_word_256_agnostic"] >= 0.5 and scores["baseline"]["kl_word_256_agnostic"] < 1e-5
    assert 0 < scores["compressed"]["kl_word_256_agnostic"] < scores["random_kv(budget=0.5)"]["kl_word_256_agnostic"]
    sizes = [scores[name]["cache_bytes_256"] / scores["baseline"]["cache_bytes_256"] for name in names]
    assert sizes[1] < 0.6 and sizes[2] < 0.4 and sizes[3] < 0.55, sizes  # of 128 positions, up to 95 stay in 16 bits
    assert len(cache["survival"]["compressed"][0]["share"]) == 30 and len(cache["errors"]["compressed"]) == 30
    html = (tmp_path / "run" / "report.html").read_text()
    kept, evicted = (scores[name]["guess_acceptance"] for name in ("compressed", "random_kv(budget=0.5)"))
    assert 0 <= evicted < kept <= 1 and 'id="own-texts"' in html
    assert "-y 'lengths: [256]'" in made["provenance"]["command"]
    assert "ith the question unknown" in html and "half in 4 bits" in html and len(html.encode()) < 1_000_000


@pytest.mark.long
def test_serving_runs_on_the_real_model(tmp_path, papermill):
    """Three sequences, with weights of which one block is compressed."""
    given = {"memory": "600MB", "context": 128, "batch": 3, "weights": f"8 bits: rtn(bits=8, skip='{FEW}')", "max_kl": 1.0,
             "caches": "half: kvzip(budget=0.5), kv_int", "samples": 1, "seqlen": 64, "contexts": 2, "scored_tokens": 16,
             "new_tokens": 1, "cost_device": "l4", "save_path": tmp_path / "saved"}  # fmt: skip
    made = papermill("serve", given)
    found, scores = made["serving"], made["scores"]
    chosen = found["found"][found["kept"]]
    assert (chosen["weights"], chosen["cache"]) == ("8 bits", "half") and len(found["found"]) == 4
    assert [one["sequences"] for one in found["rounds"]] == [3] and found["rounds"][0]["peak_bytes"] < 600e6
    assert 0 < scores["compressed"]["kl_pydocs"] == found["divergence"] < 1 and found["windows"] == 2
    assert scores["compressed"]["cache_bytes"] < 0.5 * scores["baseline"]["cache_bytes"]
    assert [step["method"] for step in made["recipe"]] == ["rtn", "kvzip", "kv_int"] and len(made["layers"]) == 7
    html = (tmp_path / "run" / "report.html").read_text()
    assert "Asked, predicted, measured</h2>" in html and "Combinations of weights and caches" in html
    assert attached_methods(load_compressed(tmp_path / "saved")), "a saved model keeps its cache"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"policy": "snapkw"}, "snapkw is not a method; did you mean snapkv"),
        ({"budget": 1.5}, r"`budget` \(=1.5\) of snapkv must be a share"),
        ({"recipe": "gptq(bits=4)"}, "is no method of the cache"),
        ({"recipe": "snapkv, streaming"}, "both decide which positions stay"),
        ({"compare": "full: kv_int"}, "'full' is what another cache of the run is called"),
        ({"curves": "snapkv"}, "must have its strengths in braces"),
        ({"lengths": "1024"}, "`lengths`"),
    ],
)
def test_kv_eviction_refuses_before_the_model_is_loaded(given, message, run_cells):
    with pytest.raises(ValueError, match=message):
        run_cells("kv_eviction", given, until="load_model(model_name")


def test_the_interrupt_that_ends_a_kernel_is_no_error(tmp_path, monkeypatch, caplog):
    """jupyter_client interrupts a kernel before it asks it to end; ipykernel reports that as an error."""
    log = logging.getLogger("a kernel")
    monkeypatch.setattr("notebooks.study.run.get_ipython", lambda: SimpleNamespace(kernel=SimpleNamespace(log=log)))
    given = {name: parameter.default for name, parameter in read_parameters("gptq").items()}
    for _ in range(2):
        start("gptq", given | {"run_path": str(tmp_path / "run")})
    log.error("KeyboardInterrupt caught in kernel.")
    log.error("something else")
    assert [line.message for line in caplog.records if line.name == "a kernel"] == ["something else"]


ONCE = pytest.param("gptq", True, marks=pytest.mark.slow)  # compiling takes a minute for each model that is timed


@pytest.mark.long
@pytest.mark.parametrize("name, compiled", [*((name, False) for name in EXPECTED), ONCE])
def test_notebook_runs_on_the_real_model(name, compiled, tmp_path, papermill):
    more, stored_as, count, expect = EXPECTED[name]
    saved = (
        tmp_path / "saved" if stored_as == "int_group" else None
    )  # loading it again takes its time, and is the same for all
    given = {**SMALL, **more, "speed_rounds": int(compiled), "save_path": saved or ""}
    if compiled:  # all blocks, so that the fewer bytes show in the speed
        given["skip"], count = "", 210
    made = papermill(name, given, compiled=compiled)
    assert made["model"]["name"] == "smollm2-135m" and made["recipe"][0]["method"] == METHOD_OF.get(name, name)
    assert made["provenance"]["command"].startswith(f"papermill notebooks/{name}.ipynb out.ipynb -p ")
    assert len(made["layers"]) == count and {layer["format"] for layer in made["layers"]} == {stored_as}
    html = (tmp_path / "run" / "report.html").read_text()
    if not compiled:
        assert "Speed was not measured: `speed_rounds` is 0." in made["notes"] and "Speed was not measured" in html
    else:
        assert "decode_tokens_per_s" in made["scores"]["compressed"], made["notes"]
        how = [made["speed"][one]["execution"] for one in ("baseline", "compressed")]
        assert not any(text.startswith("eager") for text in how), how
    assert "smollm2-135m" in html and len(html.encode()) < 1_000_000
    expect(made, made["scores"], html)
    if saved is None:
        return
    assert load_compressed(saved) is not None and read_record(saved / "record.json") == made
    files = sum(p.stat().st_size for p in saved.glob("*.safetensors"))
    assert files == pytest.approx(made["scores"]["compressed"]["stored_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"alpha": 1.5}, "`alpha` (=1.5) of smoothquant must lie between 0 and 1, or be 'search'"),
        ({"alpha": "best"}, "`alpha` (='best') of smoothquant"),
        ({"alpha": True}, "`alpha` (=True) must be float | str"),
        ({"method": "int9"}, "int9 is not a method; did you mean int8?"),
        ({"links": "norms"}, "`links` (='norms') of smoothquant must be one of all, norm"),
        ({"activations": "static"}, "`activations` (='static') of int8 must be one of token, tensor"),
        ({"method": "llm_int8", "activations": "tensor"}, "`activations` is not a knob of llm_int8"),
        ({"recipe": "int8, smoothquant"}, "must come before"),
        ({"recipe": "smoothquant(alpha=0.5) int8"}, "must name methods with their knobs, such as"),
        ({"compare": "int8; bfloat16: int8"}, "'bfloat16' is what another model of the run is called"),
        ({"compare": "int8; unsmoothed: int8"}, "'unsmoothed' is what another model of the run is called"),
        ({"compare": "one: gptq(bits=4), int8"}, "int8 keeps 8-bit weights"),
    ],
)
def test_smoothquant_refuses_before_the_model_is_loaded(given, message, run_cells):
    with pytest.raises(ValueError) as caught:
        run_cells("smoothquant", given, until="load_model(model_name")
    assert message in str(caught.value)


@pytest.mark.slow
def test_smoothquant_takes_whole_recipes(tmp_path, monkeypatch, run_cells):
    """On the tiny model: a recipe of three, another one beside it, and the same without its transform."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    given = {
        "recipe": "smoothquant(alpha='search'), gptq(bits=8, group_size=-1), int8",
        "compare": "weights only: rtn(bits=4)",
        "model_name": "tiny",
        "run_path": str(tmp_path),
        **SMALL,
        "seqlen": 64,
        "window": 64,
    }
    cells = run_cells("smoothquant", given)
    made = read_record(tmp_path / "record.json")
    steps = {name: [step["method"] for step in recipe] for name, recipe in made["recipes"].items()}
    assert steps == {
        "compressed": ["smoothquant", "gptq", "int8"],
        "unsmoothed": ["gptq", "int8"],
        "weights only": ["rtn"],
    }
    assert made["folds"] and {layer["format"] for layer in made["layers"]} == {"eight_bit"}
    assert all("decode_tokens_per_s" in made["scores"][name] for name in ("baseline", *steps))
    assert "<img" in cells["figures"](cells["result"].folds)._repr_html_()
    assert "weights only" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"ratio": 1.0}, "`ratio` (=1.0) of sparsegpt must lie below 1"),
        ({"ratio": -0.5}, "`ratio` (=-0.5) of sparsegpt must lie between 0 and 1"),
        ({"pattern": "4:4"}, "`pattern` (='4:4') must be 'unstructured', or N:M with 0 < N < M"),
        ({"pattern": "2:4", "ratio": 0.7}, "`ratio` (=0.7) of sparsegpt is not that of `pattern`"),
        ({"allocation": "global"}, "`allocation` (='global') of sparsegpt"),
        ({"drop": "heads"}, "`target` (='heads') of layer_drop must be one of attention, mlp, joint, block"),
        ({"drop": "mlp", "drop_count": 0}, "`count` (=0) of layer_drop must lie between 1"),
        ({"method": "obs"}, "obs is not a method"),
        ({"method": ""}, "`recipe` (='') must name methods"),
        ({"curves": "wanda"}, "'wanda' must have its strengths in braces"),
        ({"curves": "wanda(ratio={})"}, "braces hold values, as in {1, 2}"),
        ({"curves": "wanda(ratio={0.5}); wanda(ratio={0.6})"}, "'wanda(ratio={})' twice"),
        ({"curves": "wanda{0.5}"}, "`curves` (='wanda{0.5}') must name methods with their knobs"),
        ({"curves": "magnitude(ratio={0.5, 1.5})"}, "`ratio` (=1.5) of magnitude"),
        ({"compare": "gptq, wanda"}, "must come before"),
    ],
)
def test_pruning_refuses_before_the_model_is_loaded(given, message, run_cells):
    with pytest.raises(ValueError) as caught:
        run_cells("pruning", given, until="load_model(model_name")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"pattern": "3:5"}, "`pattern` (='3:5') of sparsegpt needs rows of a multiple of 5 columns"),
        ({"drop": "block", "drop_count": 2}, "`count` (=2) of layer_drop must leave some of the 2 block layers"),
        ({"curves": "layer_drop(count={1, 2})"}, "`count` (=2) of layer_drop must leave some of the 2 "),
    ],
)
def test_pruning_refuses_before_any_work(given, message, monkeypatch, run_cells):
    """What only the model tells; every check comes before the first recipe is applied."""
    monkeypatch.setattr(sys.modules["compress.apply"], "apply", lambda *_, **__: pytest.fail("work began"))
    given = {"model_name": "tiny", "compare": "", **SMALL, "seqlen": 64, "window": 64, **given}
    with pytest.raises(ValueError) as caught:
        run_cells("pruning", given)
    assert message in str(caught.value)


@pytest.mark.slow
def test_pruning_takes_whole_recipes(tmp_path, monkeypatch, run_cells):
    """On the tiny model: layers dropped, then the rest pruned adaptively and quantised; points that were finished are
    kept."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    given = {
        "recipe": "layer_drop(target=mlp, count=1), wanda(ratio=0.4, allocation=adaptive, curve_tokens=32), "
        "rtn(bits=4)",
        "compare": "half: layer_drop(target=block, count=1)",
        "model_name": "tiny",
        "run_path": str(tmp_path / "run"),
        "work_path": str(tmp_path / "work"),
        "curves": "wanda(ratio={0.2, 0.4}); random(pattern={'1:2', '2:4'})",
        **SMALL,
        "seqlen": 64,
        "window": 64,
    }
    cells = run_cells("pruning", given)
    made = read_record(tmp_path / "run" / "record.json")
    assert [step["method"] for step in made["recipe"]] == ["layer_drop", "wanda", "rtn"]
    assert len(made["drops"]) == 2 and sum(drop["order"] == 1 for drop in made["drops"]) == 1
    assert len(made["layers"]) == 7 + 4 and all(layer["distortion"] for layer in made["layers"])
    shown = cells["figures"](cells["result"].layers, cells["result"].drops)._repr_html_()
    assert shown.count("<img") == 3 and "Dropped: the MLPs" in shown
    html = (tmp_path / "run" / "report.html").read_text()
    assert "Accuracy against strength" in html and "random(pattern={})" in html and "half" in html
    assert [row["block"] for row in made["depth"]] == [0, 1] and "How the model uses its depth" in html
    assert "<td" in cells["curve"]._repr_html_()
    points = sorted((tmp_path / "work" / "strengths").glob("*.json"))
    assert len(points) == 4
    monkeypatch.setattr(
        "notebooks.study.strengths.apply", lambda *_, **__: pytest.fail("a finished point was made again")
    )
    again = cells["score_strengths"](
        cells["lines"], cells["baseline"], cells["batches"], work_path=given["work_path"], **cells["scored"]
    )
    assert again == cells["curve"]


@pytest.mark.parametrize("text, value", [("search", "search"), ("0.7", 0.7), ("1", 1.0), ("0", 0.0)])
def test_alpha_from_a_command_line(text, value):
    """A number or a word, from `workbench run -p alpha` and from papermill's own -p."""
    declared = read_parameters("smoothquant")
    parsed = parse_value(text, declared["alpha"].type)
    assert parsed == value and type(parsed) is type(value)
    assert check_parameters({"alpha": _resolve_type(text)}, declared)["alpha"] == value


@pytest.mark.long
def test_the_kernels_notebook_runs_on_this_machine(tmp_path, papermill):
    given = {"ops": "int_matmul", "toy": True, "tokens": "1", "budget": 120, "device": "cpu"}
    made = papermill("kernels", given)
    bench = made["bench"]
    assert made["model"] is None and set(made["kernels"]) == {"int_matmul"}
    assert bench["summary"]["red"] == 0 and bench["summary"]["timed"] >= 1 and not bench["run"]["meaningful"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "its times mean nothing" in page and "int_matmul W4" in page
    assert "checks passed" in (tmp_path / "out.ipynb").read_text()


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"ops": "gem"}, "`ops` \\(='gem'\\) must be among int_matmul"),
        ({"shapes": "4096by4096"}, "`shapes` \\(='4096by4096'\\) must look like"),
        ({"tokens": "0"}, "`tokens` \\(='0'\\)"),
        ({"dtype": "int8"}, "`dtype` \\(='int8'\\) must be one of bfloat16"),
        ({"device": "tpu"}, "`device` \\(='tpu'\\)"),
        ({"budget": 1.0}, "`budget` \\(=1\\) must be at least"),
        ({"budget": float("nan")}, "`budget` \\(=nan\\)"),
        ({"tokens": "²"}, "`tokens` \\(='²'\\)"),
        ({"tokens": -3}, "`tokens` \\(=-3\\)"),
    ],
)
def test_a_kernel_benchmark_that_makes_no_sense_is_refused_before_it_starts(changes, told):
    with pytest.raises(ValueError, match=told):
        plan_kernels(**changes)


def test_one_number_of_tokens_is_what_papermill_makes_of_it():
    """`-p tokens 3` is an int to papermill and must be taken, also in the command that a record gives to repeat its
    run."""
    declared = read_parameters("kernels")
    given = check_parameters({"tokens": _resolve_type("3"), "shapes": _resolve_type("100x100")}, declared)
    assert plan_kernels(tokens=given["tokens"], shapes=given["shapes"], device="cpu").tokens == (3,)
    assert (
        check_parameters({"tokens": "1, 16"}, declared)["tokens"] == "1, 16"
        and parse_value("3", declared["tokens"].type) == 3
    )
    words = shlex.split(
        start("kernels", {name: p.default for name, p in declared.items()} | {"tokens": 3}).info.command
    )
    assert {words[i + 1]: _resolve_type(words[i + 2]) for i, word in enumerate(words) if word == "-p"} == {"tokens": 3}


def test_a_benchmark_that_dies_leaves_no_record_of_an_earlier_one(tmp_path, monkeypatch):
    """A Python error ends with 1, as red checks do: only what this run wrote to its end counts."""
    for name in ("record.json", "table.txt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(kernel_bench.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1: it printed nothing"):
        kernel_bench.bench_kernels(plan_kernels(device="cpu"), tmp_path)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bitz": "3"}, "`bitz` (='3') is not a parameter of this notebook; did you mean `bits`?"),
        ({"bits": "three"}, "`bits` (='three') must be int, not str"),
        ({"bits": "3.5"}, "`bits` (=3.5) must be int, not float"),
        ({"symmetric": "maybe"}, "`symmetric` (='maybe') must be bool"),
        ({"corpus": "longer than a file's name/" * 20, "bitz": "3"}, "`bitz` (='3') is not a parameter"),
    ],
)
def test_command_line_refuses_before_a_kernel_starts(given, message, capsys, tmp_path):
    arguments = [part for pair in given.items() for part in ("-p", *pair)]
    assert main(["run", "gptq", *arguments, "-p", "run_path", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_command_line_knows_its_notebooks(capsys):
    assert main(["run", "gptk"]) == 2 and "did you mean gptq?" in capsys.readouterr().err
    assert main(["parameters", "gptq"]) == 0 and "group_size: int = 64  number of columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bitz": 3}, "`bitz` (=3) is not a parameter of this notebook; did you mean `bits`?"),
        pytest.param({"window": 100_000}, "`window` (=100000) must be at most 8192", marks=pytest.mark.slow),
    ],
)
def test_plain_papermill_fails_early_with_the_reason(given, message, tmp_path):
    """Through papermill itself, which would only warn; nothing is compressed, nothing half-written is left. The kernel
    starts in the folder of the notebooks, as JupyterLab's do."""

    with pytest.raises(PapermillExecutionError) as caught:
        execute_notebook(
            str(FOLDER / "gptq.ipynb"),
            str(tmp_path / "out.ipynb"),
            cwd=str(FOLDER),
            progress_bar=False,
            parameters={**SMALL, **given, "run_path": str(tmp_path / "run")},
        )
    assert message in caught.value.evalue and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bits": "4"}, "`bits` (='4') must be int"),
        ({"bits": 7}, "`bits` (=7) of gptq must be one of 1, 2, 3, 4, 5, 6, 8"),
        ({"group_size": 48}, "`group_size` (=48) must divide in_features (=64)"),
        ({"samples": 10**6}, "`samples` (=1000000) x `seqlen` (=64)"),
    ],
)
def test_cells_refuse_by_themselves(given, message, tmp_path, run_cells):
    """As in JupyterLab, without papermill."""
    with pytest.raises(ValueError) as caught:
        run_cells("gptq", {"model_name": "tiny", **SMALL, **given, "run_path": str(tmp_path / "run")})
    assert message in str(caught.value) and not (tmp_path / "run").exists()


def test_finished_run_survives_a_failing_one(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "record.json").write_text("finished")
    arguments = ["run", "gptq", "-p", "run_path", str(run), "--runs", str(tmp_path)]
    assert main([*arguments, "-p", "bits", "7"]) == 2 and "`bits` (=7)" in capsys.readouterr().err
    assert main([*arguments, "-p", "model_name", "tiny", "--timeout", "0.1"]) == 1
    assert "timeout" in capsys.readouterr().err
    assert (run / "record.json").read_text() == "finished" and (tmp_path / "run.failed").is_dir()


def test_a_folder_with_other_things_is_never_replaced(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years")
    assert main(["run", "gptq", "-p", "run_path", str(tmp_path)]) == 2
    assert "`run_path`" in capsys.readouterr().err and (tmp_path / "thesis.tex").read_text() == "years"


def test_command_of_a_record_says_what_papermill_understands(tmp_path):
    values = {p.name: p.default for p in read_parameters("gptq").values()}
    changed = {"symmetric": False, "damp": 0.05, "bits": 3, "skip": "*.0.*, *mlp*"}
    command = start("gptq", {**values, **changed, "save_path": str(tmp_path / "new")}).info.command
    words = shlex.split(command)
    given = {words[i + 1]: _resolve_type(words[i + 2]) for i, word in enumerate(words) if word == "-p"}
    assert given == changed
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`save_path`.* cannot be written"):
        start("gptq", {**values, "save_path": str(tmp_path / "file" / "model")})


def test_values_from_a_command_line():
    assert parse_value("010", str) == "010" and parse_value("3", int) == 3 and parse_value("0.5", float) == 0.5
    assert parse_value(str(10**400), float) == 10**400, "checked later, by its name"
    assert parse_value("1", float) == 1.0 and type(parse_value("1", float)) is float
    assert parse_value("true", bool) is True and parse_value("False", bool) is False
    assert parse_value("null", int | None) is None and parse_value("x", int) == "x"
    for text in ('["a", "b"]', "[a, b]", "a,b", "a, b"):
        assert parse_value(text, list[str]) == ["a", "b"]
    assert parse_value("1024", list[int]) == [1024] and parse_value("0.5, 1", list[float]) == [0.5, 1.0]
    assert parse_value("[]", list[int]) == [] == parse_value("", list[str]) and parse_value("1, x", list[int]) == "1, x"


def test_injected_cells_are_found():
    assert injected(["x = 1", '# Parameters\nbits = 3\nname = "a"\n']) == {"bits": 3, "name": "a"}
    assert injected(["# about parameters"]) == {}
    assert injected(["# Parameters\na = f()", "# Parameters\n%time", "# Parameters\na = 1", "# Parameters\na = 2"]) == {
        "a": 2
    }
    (value,) = injected(["# Parameters\nx = float('-inf')"]).values()
    assert value == float("-inf")


@pytest.mark.parametrize("tagged", [0, 1, 2])
def test_given_parameters_take_effect_or_the_run_stops(tagged, tmp_path, forked_kernels):
    """papermill injects at the top without a tagged cell, and behind the first of two: the cells after it win."""
    cell = "bits: int = 4  # bits"
    tags = [{"tags": ["parameters"]} if i < tagged else {} for i in range(2 if tagged == 2 else 1)]
    ends = nbformat.v4.new_code_cell(
        "from notebooks.study.parameters import Parameter, values_in\n"
        "values_in(globals(), {'bits': Parameter('bits', int, 4, '')})"
    )
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [*(nbformat.v4.new_code_cell(cell, metadata=one) for one in tags), ends]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "n.ipynb")
    asked = {"parameters": {"bits": 3}, "progress_bar": False, "cwd": str(FOLDER.parent)}
    if tagged == 1:
        made = execute_notebook(str(tmp_path / "n.ipynb"), str(tmp_path / "out.ipynb"), **asked)
        assert made.cells[-1].outputs[0]["data"]["text/plain"] == "{'bits': 3}"
        return
    with pytest.raises(PapermillExecutionError, match="`bits` .=3. was given, but is 4 where the run starts"):
        execute_notebook(str(tmp_path / "n.ipynb"), str(tmp_path / "out.ipynb"), **asked)


def test_papermill_lists_every_parameter_of_every_notebook():
    """`papermill --help-notebook` reads annotations by a pattern of its own, which has no |."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        listed, declared = inspect_notebook(str(path)), read_parameters(path)
        defaults = {name: ast.literal_eval(one["default"]) for name, one in listed.items()}
        assert defaults == {name: one.default for name, one in declared.items()}, path.name


def test_parameter_cells_must_be_literals(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("bits = 4", metadata={"tags": ["parameters"]})])
    nbformat.write(book, tmp_path / "n.ipynb")
    with pytest.raises(ValueError, match="must read `name: type = literal"):
        read_parameters(tmp_path / "n.ipynb")
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "n.ipynb")
    with pytest.raises(ValueError, match="one cell tagged `parameters`, not 0"):
        read_parameters(tmp_path / "n.ipynb")
