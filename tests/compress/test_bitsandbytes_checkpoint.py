"""bitsandbytes' own checkpoints: transformers loads them, and they are what it writes itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from compress import METHODS, apply, save_compressed
from compress.checkpoint.fits import check_save_format
from compress.checkpoint.interop import bitsandbytes
from compress.checkpoint.interop.bitsandbytes import Bitsandbytes
from compress.checkpoint.save import check_holds
from compress.formats import BnbInt8, BnbNF4
from compress.linear import CompressedLinear
from kernels.support.deploy import cast

pytest.importorskip("bitsandbytes")

SAVE_FORMAT = "bitsandbytes"
ALIGNED = {"intermediate_size": 128}  # so that blocks of 64 weights end where rows do
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
THEIRS = {  # a recipe, and transformers' settings for the same
    "bnb_nf4": NF4 | {"bnb_4bit_use_double_quant": True},
    "bnb_nf4(double_quant=False)": NF4,
    "bnb_int8": {"load_in_8bit": True},
    "bnb_int8(threshold=2.0)": {"load_in_8bit": True, "llm_int8_threshold": 2.0},
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("recipe", THEIRS)
def test_the_files_are_those_of_transformers_itself(tiny, tmp_path, recipe):
    model = cast(tiny("qwen2", **ALIGNED), torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **THEIRS[recipe])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto", quantization_config=config)
    theirs.save_pretrained(tmp_path / "theirs")
    save_compressed(apply(recipe, model), tmp_path / "ours", save_format=SAVE_FORMAT)
    wanted, found = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "ours"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        if "quant_state" in name:
            assert json.loads(bytes(found[name].tolist())) == json.loads(bytes(tensor.tolist()))
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.in_turns
@pytest.mark.parametrize("recipe", ["bnb_nf4", "bnb_nf4(blocksize=32, skip='*k_proj')", "bnb_int8(threshold=0)"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_same_model(tiny, tokens, tmp_path, recipe, tied):
    model = cast(tiny("qwen2", tie_word_embeddings=tied, **ALIGNED), torch.bfloat16)
    folder = save_compressed(apply(recipe, model), tmp_path / "out", save_format=SAVE_FORMAT)
    (ids,) = tokens(1)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():  # its kernel for CPUs takes no part in training
        ours, theirs = model(ids).logits, loaded(ids).logits
    assert (ours - theirs).norm() < 0.01 * ours.norm()
    said = json.loads((folder / "verification.json").read_text())
    assert "with bitsandbytes" in said["reader"] and said["agreement"].startswith("40 of 40 greedy tokens the same")
    assert "pip install accelerate bitsandbytes" in (folder / "README.md").read_text()


def test_a_changed_code_is_named(tiny, tmp_path, monkeypatch):
    write = Bitsandbytes.write

    def flawed(self, checkpoint, folder):
        write(self, checkpoint, folder)
        stored = load_file(folder / "model.safetensors")
        stored["model.layers.1.mlp.up_proj.weight"][0, 0] ^= 1
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(Bitsandbytes, "write", flawed)
    with pytest.raises(RuntimeError, match=r"model.layers.1.mlp.up_proj.weight is another one .*: 1 of 8192 values"):
        save_compressed(apply("bnb_nf4", tiny("llama", **ALIGNED)), tmp_path / "out", save_format=SAVE_FORMAT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["bnb_nf4", "bnb_int8"])
def test_wrong_products_of_the_right_weights_are_refused(tiny, tmp_path, monkeypatch, recipe):
    """Their difference from products of dense weights is not taken for rounding."""
    load = bitsandbytes._load

    def flawed(folder, model):
        loaded = load(folder, model)  # the model of dense weights computes without the forward of these linears
        for block in loaded.model.layers:
            forward = block.mlp.down_proj.forward
            block.mlp.down_proj.forward = lambda x, forward=forward: -forward(x)
        return loaded

    monkeypatch.setattr(bitsandbytes, "_load", flawed)
    with pytest.raises(RuntimeError, match="same weights .* different logits: "):
        save_compressed(apply(recipe, tiny("llama", **ALIGNED)), tmp_path / "out", save_format=SAVE_FORMAT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe, said",
    [
        ("rtn(bits=4, group_size=16)", "stored as int_group, and this format holds what `bnb_nf4` or `bnb_int8`"),
        ("bnb_nf4", "blocks of 64 weights run across its rows of 96"),
        ("layer_drop(count=1, target=block)", "no weight of it is stored in a format of bitsandbytes"),
    ],
)
def test_other_models_are_refused(tiny, recipe, said):
    with pytest.raises(ValueError, match=said):
        check_save_format(SAVE_FORMAT, recipe, tiny("llama"))


def test_experts_are_refused(tiny):
    with pytest.raises(ValueError, match="experts are stored as one tensor"):
        check_save_format(SAVE_FORMAT, [METHODS["bnb_nf4"](blocksize=32)], tiny("mixtral"))


def test_one_configuration_holds_for_all_linears(tiny):
    model = tiny("llama", **ALIGNED)
    up, down = (128, 64), (64, 128)
    for one, other in [
        (BnbNF4.spec_of(up, blocksize=64), BnbInt8.spec_of(down, threshold=6.0)),
        (BnbInt8.spec_of(up, threshold=0.0), BnbInt8.spec_of(down, threshold=6.0)),
    ]:
        stored = {"model.layers.0.mlp.up_proj": one, "model.layers.0.mlp.down_proj": other}
        linears = {name: CompressedLinear.spec_of([part], bias=False) for name, part in stored.items()}
        with pytest.raises(ValueError, match="have no place in one configuration"):
            check_holds(SAVE_FORMAT, model, linears)
