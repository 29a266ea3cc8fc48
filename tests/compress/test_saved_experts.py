"""Experts in compressed-tensors: stored one by one, under the names that transformers itself writes, and read again."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress import METHODS, apply, save_compressed
from compress.checkpoint.compressed_tensors import CompressedTensors
from compress.checkpoint.fits import check_save_format
from compress.checkpoint.interop.foreign import load_quantized
from compress.checkpoint.save_format import Verification
from compress.linear import compressed_linears

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES = {
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 32},
    "olmoe": {**GROUPED, "num_experts": 4},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": 1},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_group": 2},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "sliding_window": 8},
}
SCHEMES = {
    "W4A16": METHODS["rtn"](bits=4, group_size=16),
    "FP8": METHODS["fp8"](),
    "INT8": METHODS["int8"](),
    "pruned": METHODS["magnitude"](ratio=0.5),
}


def in_family(family: str, **more) -> nn.Module:
    """A tiny random model of a family of FAMILIES, in evaluation mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for p in model.parameters():  # initial weights are so small that experts hardly differ
        if p.dim() > 1:
            p.mul_(4)
    return model


def stored_weights(folder) -> dict[str, torch.Tensor]:
    """Every weight of a folder in float32, decoded by the compressed-tensors library, by its stored name."""
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    weights = {}
    for name in stored:
        owner, _, key = name.rpartition(".")
        if key not in ("weight", "weight_packed"):
            continue
        parts = {k.removeprefix(f"{owner}."): t for k, t in stored.items() if k.startswith(f"{owner}.")}
        if "weight_scale" in parts:
            (group,) = QuantizationConfig.model_validate(config).config_groups.values()
            parts = BaseCompressor.get_value_from_registry(group.format).decompress(parts, group)
        weights[f"{owner}.weight"] = parts["weight"].float()
    return weights


@pytest.mark.parametrize(
    "family, scheme",
    [
        pytest.param(
            family, scheme, marks=[pytest.mark.slow] * (family != "mixtral" and (scheme != "W4A16" or turn % 2))
        )
        for turn, family in enumerate(FAMILIES)
        if family != "gpt_oss"
        for scheme in SCHEMES
    ],
)
def test_names_and_weights_are_those_that_transformers_writes(tmp_path, family, scheme):
    """The dequantised model, fused again and saved by transformers itself, is the independent answer."""
    model = in_family(family)
    plain = in_family(family)  # the same weights, with fused experts
    path = save_compressed(apply([SCHEMES[scheme]], model), tmp_path / "out", save_format="compressed-tensors")
    for name, linear in compressed_linears(model).items():
        if ".experts." in name:
            owner, _, expert = name.rpartition(".")
            plain.get_parameter(owner).data[int(expert)] = linear.dequantize()
        else:
            plain.get_submodule(name).weight.data = linear.dequantize()
    plain.save_pretrained(tmp_path / "plain")
    expected, found = load_file(tmp_path / "plain" / "model.safetensors"), stored_weights(path)
    assert found.keys() == {name for name in expected if name.endswith("weight")}
    for name, W in found.items():
        assert torch.allclose(W, expected[name], rtol=1e-6, atol=0), name
    if scheme != "pruned":
        again = load_quantized(path, torch.float32)
        assert torch.equal(again(torch.arange(20)[None]).logits, model(torch.arange(20)[None]).logits)
    if scheme == "INT8":
        remarks = Verification.read(path).remarks
        assert any("transformers 5.23 refuses it, because it does not read experts whose" in one for one in remarks)
        assert "transformers (with" not in (path / "README.md").read_text()
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            AutoModelForCausalLM.from_pretrained(path)
    elif scheme != "FP8":  # transformers does not round the activations of experts
        ids = torch.arange(20)[None]
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    "recipe, unread",
    [
        ([METHODS["rtn"](bits=4, group_size=16, symmetric=False)], "experts with zero points"),
        ([METHODS["rtn"](bits=4, group_size=16, skip="*experts*")], "experts that are not quantised"),
        pytest.param([METHODS["fp8"](weights="block")], "experts with a scale per block", marks=pytest.mark.slow),
        ([METHODS["fp8"](skip="*experts*")], ""),
        pytest.param(
            [METHODS["layer_drop"](count=1, target="block")], "", marks=pytest.mark.slow
        ),  # fused experts stay
    ],
)
def test_experts_that_only_vllm_reads_are_named(tokens, tmp_path, recipe, unread):
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    model = in_family("mixtral", **wide)
    check_save_format("compressed-tensors", recipe, model)
    path = save_compressed(apply(recipe, model, tokens()), tmp_path / "out", save_format="compressed-tensors")
    remarks = " ".join(Verification.read(path).remarks)
    assert ("transformers 5.23 refuses it" in remarks) == bool(unread) and unread in remarks
    quantised = "quantization_config" in json.loads((path / "config.json").read_text())
    again = load_quantized(path, torch.float32) if quantised else AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(20)[None]
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)


def test_several_schemes_name_the_experts_by_one_pattern(tmp_path):
    model = in_family("qwen2_moe")
    apply([METHODS["rtn"](bits=4, group_size=16, skip="*self_attn*")], model)
    result = apply([METHODS["fp8"](skip="*mlp*")], model)
    path = save_compressed(result, tmp_path / "out", save_format="compressed-tensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert r"re:.*\.experts\.\d+\..*" in groups["pack-quantized"] and config["format"] == "mixed-precision"
    assert "model.layers.0.self_attn.q_proj" in groups["float-quantized"]
    assert {"model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate", "lm_head"} <= set(config["ignore"])


@pytest.mark.parametrize(
    "family, recipe, said",
    [
        ("gpt_oss", [METHODS["rtn"](bits=4, group_size=16)], "experts are stored as one tensor .*gate_up_proj"),
        ("mixtral", [METHODS["int8"](activations="tensor")], "vLLM has no experts of this kind"),
        ("mixtral", [METHODS["rtn"](bits=4, group_size=16, skip="*down_proj*")], "take one scheme for all experts"),
        ("mixtral", [METHODS["rtn"](bits=4, group_size=16, symmetric=False)], "48 rows of each .* no multiple of 32"),
    ],
)
def test_experts_that_no_reader_takes_are_refused_before_any_work(family, recipe, said):
    model = in_family(family, intermediate_size=48)
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=said):
        check_save_format("compressed-tensors", recipe, model)
    assert model.state_dict().keys() == before


def test_another_router_is_noticed(monkeypatch, tmp_path):
    """Tokens follow the choices of the model in memory, so that these are compared by themselves."""
    result = apply([SCHEMES["W4A16"]], in_family("qwen3_moe"))
    write = CompressedTensors.write

    def flawed(self, checkpoint, folder):
        write(self, checkpoint, folder)
        config = json.loads((folder / "config.json").read_text())
        config["norm_topk_prob"] = not config["norm_topk_prob"]
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(CompressedTensors, "write", flawed)
    with pytest.raises(RuntimeError, match="chooses or weighs other experts for .*% of the tokens in model.layers.0"):
        save_compressed(result, tmp_path / "out", save_format="compressed-tensors")


def test_experts_that_calibration_never_reached_are_on_the_card(tokens, tmp_path):
    result = apply([METHODS["gptq"](group_size=16)], in_family("qwen2_moe", num_experts=16), tokens(1, 4))
    unreached = [r for r in result.layers if not r.tokens]
    assert unreached and all("no calibration tokens: the error is that of the weights" in r.notes for r in unreached)
    path = save_compressed(result, tmp_path / "out", save_format="compressed-tensors")
    said = f"No calibration token reached {len(unreached)} of the {len(result.layers)} compressed weights"
    assert said in (path / "README.md").read_text()
