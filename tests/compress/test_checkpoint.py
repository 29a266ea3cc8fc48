"""Saved means: reloaded, compared, and there by one rename."""

import json

import pytest
import torch
from safetensors.torch import load_file

from compress import METHODS, apply, load_compressed, save_compressed
from eval.machine.size import size


@pytest.mark.parametrize(
    "bits, symmetric, dtype", [(4, True, torch.float32), (3, False, torch.bfloat16), (8, True, torch.bfloat16)]
)
def test_every_architecture_comes_back_bit_for_bit(any_model, tokens, tmp_path, bits, symmetric, dtype):
    any_model.to(dtype)
    result = apply([METHODS["rtn"](bits=bits, group_size=16, symmetric=symmetric)], any_model)
    path = save_compressed(result, tmp_path / "out")
    again = load_compressed(path)
    ids = torch.cat(tokens(2, 9))
    assert torch.equal(again(ids).logits, any_model(ids).logits)
    assert again.dtype == dtype and not again.training
    stored = json.loads((path / "compression.json").read_text())
    assert stored["recipe"][0]["method"] == "rtn" and len(stored["layers"]) == len(result.layers)


def test_file_holds_what_was_counted(tiny, tmp_path):
    result = apply([METHODS["rtn"](bits=4, group_size=16)], tiny("llama", tie_word_embeddings=True))
    path = save_compressed(result, tmp_path / "out")
    tensors = load_file(path / "model.safetensors")
    stored = sum(tensor.nbytes for key, tensor in tensors.items() if not key.startswith("computed:"))
    assert "lm_head.weight" not in tensors, "tied weights are stored once"
    assert stored == size(result.model).stored_bytes
    again = load_compressed(path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_saved_class_is_a_causal_language_model(tiny, tmp_path):
    path = save_compressed(apply([METHODS["rtn"](group_size=16)], tiny("llama")), tmp_path / "out")
    layout = json.loads((path / "workbench.json").read_text())
    (path / "workbench.json").write_text(json.dumps(layout | {"class": "Trainer"}))
    with pytest.raises(ValueError, match="'Trainer' in workbench.json, which is not a causal language model"):
        load_compressed(path)


def test_generates_after_loading(tiny, tokens, tmp_path):
    result = apply([METHODS["gptq"](group_size=16, min_tokens=8)], tiny("llama"), tokens())
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    ids = tokens(1)[0]
    expected, found = (
        m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (result.model, again)
    )
    assert torch.equal(expected, found)


def test_what_is_there_already_stays(tiny, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(ValueError, match="exists already"):
        save_compressed(result, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "precious").exists()


def test_a_wrong_copy_is_not_called_saved(tiny, tmp_path, monkeypatch):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    from compress.checkpoint import workbench

    write = workbench._tensors
    monkeypatch.setattr(
        workbench,
        "_tensors",
        lambda model: {k: (v + 1 if k.endswith("norm.weight") else v) for k, v in write(model).items()},
    )
    with pytest.raises(RuntimeError, match="other logits"):
        save_compressed(result, tmp_path / "out")
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_folders_that_are_not_compressed_models(tmp_path):
    with pytest.raises(ValueError, match="is not a compressed model"):
        load_compressed(tmp_path / "nowhere")
    (tmp_path / "workbench.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="layout version 99"):
        load_compressed(tmp_path)


def test_a_class_that_transformers_lacks_is_refused_before_anything_is_written(tiny, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    result.model.__class__ = type("RemoteForCausalLM", (type(result.model),), {})
    with pytest.raises(ValueError, match="RemoteForCausalLM, which is not a class of transformers"):
        save_compressed(result, tmp_path / "out")
    assert not list(tmp_path.iterdir())
