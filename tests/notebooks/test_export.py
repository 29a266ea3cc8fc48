"""`workbench export`: a saved model in another format, with its record; what it says, and what it leaves behind."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import apply, load_compressed, save_compressed
from compress.checkpoint import save
from notebooks.batch.cli import main


@pytest.fixture
def saved(tiny, tmp_path, request):
    """A model in the workbench's own format, without a tokenizer; the parameter is the recipe."""
    recipe = getattr(request, "param", "rtn(bits=4, group_size=32)")
    return save_compressed(apply(recipe, tiny("llama").to(torch.bfloat16)), tmp_path / "saved")


RECIPES = {name: "rtn(bits=4, group_size=32)" for name in save.SAVE_FORMATS if name != "workbench"}
RECIPES["bitsandbytes"] = "bnb_nf4(blocksize=32)"


@pytest.mark.parametrize("save_format, saved", RECIPES.items(), indirect=["saved"])
def test_a_checkpoint_is_exported(saved, save_format, capsys, tokens):
    assert main(["export", str(saved), "--format", save_format]) == 0
    target, said = saved.with_name(f"saved-{save_format}"), capsys.readouterr().out
    for path in target.iterdir():
        assert path.name in said and f"{path.stat().st_size:,} bytes" in said
    assert "loaded again by " in said and "MB in the workbench's own format" in said
    if save_format in ("compressed-tensors", "bitsandbytes"):
        ours, theirs = load_compressed(saved), AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        batch = tokens(1)[0]
        assert torch.allclose(ours(batch).logits, theirs(batch).logits, atol=0.05)


def test_the_record_of_a_run_travels(saved, tmp_path, capsys):
    named = ["commit", "dirty", "versions", "hardware", "threads", "dtype", "flags", "command"]
    record = {"schema_version": 1, "run": {"key": "k", "notebook": "gptq", "started": "", "duration_s": 1.0}}
    record |= {"recipe": [], "model": None, "calibration": None, "layers": [], "scores": None, "kernels": {}}
    (saved / "record.json").write_text(json.dumps(record | {"provenance": dict.fromkeys(named)}))
    (saved / "manifest.json").write_text(json.dumps({"key": "k", "files": {}}))
    assert main(["export", str(saved), "--format", "gptq", "--to", str(tmp_path / "to")]) == 0
    assert json.loads((tmp_path / "to" / "record.json").read_text())["run"]["key"] == "k"
    manifest = json.loads((tmp_path / "to" / "manifest.json").read_text())
    assert manifest["key"] == "k" and manifest["save_format"] == "gptq" and "record.json" in manifest["files"]


def test_a_model_that_the_reader_does_not_give_back_is_not_left(saved, capsys, monkeypatch):
    def refuse(*_):
        raise RuntimeError("x.weight differs")

    monkeypatch.setattr(save.GPTQFormat, "verify", refuse)
    before = sorted(saved.parent.iterdir())
    assert main(["export", str(saved), "--format", "gptq"]) == 1
    assert (
        capsys.readouterr().err.endswith("workbench: x.weight differs\n") and sorted(saved.parent.iterdir()) == before
    )
