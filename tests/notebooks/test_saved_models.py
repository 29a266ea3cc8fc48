"""A folder that the workbench saved is a model for every notebook, and a notebook saves in the format asked for."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import METHODS, apply, load_model, save_compressed
from eval.record.schema import read_record

TINY = {"samples": 2, "seqlen": 64, "window": 64, "max_windows": 2, "speed_rounds": 0, "write_tokens": 8}
GIVEN = {
    "gptq": {**TINY, "group_size": 32, "skip": "*.1.*"},  # what is in 8 bits already stays so
    "recipe": {**TINY, "recipe": "smoothquant, int8"},
    "pruning": {**TINY, "recipe": "layer_drop(target=mlp, count=1)", "compare": ""},
    "kv_eviction": {
        "samples": 1, "lengths": [128], "tasks": ["word"], "compare": "", "visibilities": ["agnostic"],
        "speed_contexts": [], "policy": "knorm",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The random model with a block in 8 bits and one as it was, with a tokenizer, in the workbench's own format."""
    model, tokenizer = load_model("tiny", dtype="bfloat16")
    folder = tmp_path_factory.mktemp("models") / "saved"
    return save_compressed(apply([METHODS["rtn"](bits=8, group_size=-1, skip="*.0.*")], model), folder, tokenizer)


@pytest.mark.parametrize(
    "name", ["kv_eviction", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gptq", "recipe", "pruning"))]
)
def test_a_saved_folder_is_a_model_for_a_notebook(name, saved, tmp_path, monkeypatch, run_cells):
    """One of the notebooks saves what it makes, in the format of others."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    places = {"run_path": str(tmp_path / "run")}
    if name == "gptq":
        places |= {"save_path": str(tmp_path / "model"), "save_format": "compressed-tensors"}
    cells = run_cells(name, {**GIVEN[name], "model_name": str(saved), **places})
    made = read_record(tmp_path / "run" / "record.json")
    assert made["model"]["name"] == str(saved) and {"baseline", "compressed"} <= set(made["scores"])
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    if name == "gptq":
        manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
        assert manifest["save_format"] == "compressed-tensors" and {"record.json", "README.md"} <= set(
            manifest["files"]
        )
        card = (tmp_path / "model" / "README.md").read_text()
        assert "perplexity" in card.lower() and made["provenance"]["command"] in card
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
        ids = torch.arange(32)[None]
        assert torch.allclose(loaded(ids).logits, cells["result"].model(ids).logits, atol=0.05)
