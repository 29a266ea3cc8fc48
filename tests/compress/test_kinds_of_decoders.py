"""Decoders that are built in other ways than a Llama: handled rightly, or refused before the model changes."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from compress import METHODS, apply, load_compressed, load_model, save_compressed
from compress.checkpoint.compressed_tensors import CompressedTensors
from compress.checkpoint.fits import check_save_format
from compress.checkpoint.gptq import Layout
from compress.checkpoint.interop.foreign import load_quantized
from compress.checkpoint.interop.schemes import PACKED, Scheme, fused_linears, vllm_remarks
from compress.classes import auto_class
from compress.dropped import Dropped, drop_part, dropped_parts, parts_of
from compress.embedding import find_ends
from compress.inputs.on_disk import load_on_disk
from compress.inputs.skeleton import skeleton
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks, kept_weights, targets
from compress.walk.capture import Tail, advance, block_calls

CPU = torch.device("cpu")
BASE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DELTA = {**LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
GEMMA4 = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "sliding_window": 8,
          "vocab_size_per_layer_input": 96, "global_head_dim": 32,
          "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
KINDS: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon": {"head_dim": None, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
               "bias": False},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8,
                     "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96, "laurel_rank": 8,
                     "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": GEMMA4,
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96, "multi_query": True},
    "gpt_neo": {"num_hidden_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]],
                "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama": {},
    "mamba": {"state_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
                   "layers_block_type": ["mamba", "attention", "mlp"]},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_5_text": DELTA,
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8,
               "mamba_headdim": 16, "n_mamba_heads": 8, "chunk_size": 8, "use_shared_mlp_adapter": True,
               "adapter_rank": 4, "num_mem_blocks": 1},
    "zaya": {},
}  # fmt: skip


def built(architecture: str, **more) -> nn.Module:
    torch.manual_seed(0)
    settings = {**BASE, **KINDS[architecture], **more}
    config = AutoConfig.for_model(architecture, **{k: v for k, v in settings.items() if v is not None})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(3)
        if not p.isfinite().all():  # some classes leave parameters of states unset
            p.copy_(torch.randn(p.shape) * 0.05)
    return model


def state(model: nn.Module) -> dict:
    """All that a user could see of a model: weights, numbers of layers, the config."""
    numbers = {n: m.layer_idx for n, m in model.named_modules() if hasattr(m, "layer_idx")}
    return {"weights": {n: t.clone() for n, t in model.state_dict().items()}, "numbers": numbers,
            "config": json.dumps(model.config.to_dict(), sort_keys=True, default=str)}  # fmt: skip


def same(a: dict, b: dict) -> bool:
    weights = a["weights"].keys() == b["weights"].keys() and all(
        torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"]
    )
    return weights and a["numbers"] == b["numbers"] and a["config"] == b["config"]


# Blocks that return more than their hidden state.


@pytest.mark.parametrize("architecture", ["bamba", "zaya", "rwkv", "openai-gpt", "gpt_neo"])
def test_blocks_that_return_more_than_a_hidden_state(architecture, tokens):
    """Each block run by itself on the output of the one before, and the rest of the model behind the last."""
    model, batches = built(architecture), tokens(3, 16)
    _, blocks = find_blocks(model)
    calls = block_calls(model, blocks, batches, stacked=False)
    for index, block in enumerate(blocks):
        advance(block, calls, index, CPU)
    tail = Tail(model, blocks, batches, stacked=False)
    for i, batch in enumerate(batches):
        expected = model(batch, use_cache=False).logits
        assert torch.allclose(tail.logits(i, calls[i].hidden), expected, atol=1e-4 * expected.abs().max().item())


def test_states_passed_beside_the_hidden_state_are_kept_between_runs(tokens):
    """Zaya's routers read the states of the routers before them."""
    model = built("zaya")
    _, blocks = find_blocks(model)
    [call] = block_calls(model, blocks, tokens(1))
    assert call.passed and not call.passed_to(0)
    other = copy.copy(call)
    advance(blocks[0], [call], 0, CPU)
    kept = call.passed_to(1)
    assert kept and not other.passed_to(1), "copies go through the blocks by themselves"
    other.take(1, {name: tensor.clone() for name, tensor in kept.items()})
    other.hidden = call.hidden
    for one in (call, other):
        advance(blocks[1], [one], 1, CPU)
    assert torch.equal(call.hidden, other.hidden)


def test_a_model_that_cannot_run_is_refused_with_its_experts_as_they_were(tokens):
    """DeepSeek's keys of queries are cut by `head_dim` if it is not that of the rotated part."""
    more = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **BASE | more))
    before = state(model)
    with pytest.raises(ValueError, match=r"`model` \(DeepseekV3ForCausalLM\) cannot run the first batch: RuntimeError"):
        apply([METHODS["gptq"](bits=4, group_size=32)], model, tokens(2, 8))
    assert same(state(model), before)


# Drops.


def step_by_step(model, ids, mask, new):
    """Greedy, without any cache."""
    for _ in range(new):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
    return ids


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "architecture, target, layers",
    [
        ("lfm2", "attention", "2"),  # a short convolution, the last layer with a state
        ("lfm2", "attention", "1"),  # the only attention, which counts the positions
        ("qwen3_5_text", "attention", "2"),
        ("qwen3_5_text", "attention", "1"),
        ("qwen3_5_text", "mlp", "0"),
        ("nemotron_h", "attention", "0"),
        ("nemotron_h", "attention", "1"),
        ("falcon_h1", "attention", "0"),  # two mixers in a block, which share a layer of the cache
        ("gpt_neo", "attention", "1"),
        ("lfm2", "block", "0"),
        ("qwen3_5_text", "block", "2"),
        ("nemotron_h", "block", "2"),
        ("falcon_h1", "block", "1"),
    ],
)
def test_drops_of_any_mixer_decode_and_come_back(architecture, target, layers, tokens, tmp_path):
    model = built(architecture)
    result = apply([METHODS["layer_drop"](target=target, layers=layers)], model, tokens(2, 16))
    model.generation_config.eos_token_id = None
    ids = torch.cat(tokens(2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    written = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(written, step_by_step(model, ids, mask, 4))
    path = save_compressed(result, tmp_path / "out")
    again = load_compressed(path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert dropped_parts(again).keys() == dropped_parts(model).keys()
    if target == "block":
        theirs = AutoModelForCausalLM.from_pretrained(path).eval()
        assert torch.allclose(theirs(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    "architecture, knobs, said",
    [
        ("gemma4_text", {"target": "block", "count": 1}, "its config cannot describe it without the blocks 0"),
        ("gemma3n_text", {"target": "block", "layers": "3"}, "its config cannot describe it without the blocks 3"),
        ("gemma4_text", {"target": "mlp", "count": 1}, "does not run without attention and MLP"),
        ("rwkv", {"target": "attention", "count": 1}, "layer_drop"),
        ("rwkv", {"target": "mlp", "count": 1, "iterative": True}, "layer_drop"),
    ],
)
def test_drops_that_a_model_cannot_take_leave_it_as_it_was(architecture, knobs, said, tokens):
    model = built(architecture)
    before, ids = state(model), tokens(1, 8)[0]
    logits = model(ids, use_cache=False).logits
    with pytest.raises(ValueError, match=said):
        apply([METHODS["layer_drop"](**knobs)], model, tokens(2, 16))
    assert same(state(model), before) and torch.equal(model(ids, use_cache=False).logits, logits)


def test_a_drop_that_fails_half_way_is_undone(tokens, monkeypatch):
    model = built("llama")
    before = state(model)
    errors = iter([0.0, 1.0])
    monkeypatch.setattr("compress.pruning.layer_drop.decoding_error", lambda *_: next(errors))
    with pytest.raises(ValueError, match="the model is as it was"):
        apply([METHODS["layer_drop"](target="block", count=2, iterative=True)], model, tokens(2, 8))
    assert same(state(model), before) and not dropped_parts(model)


def test_a_refused_drop_undoes_the_drops_before_it(tokens, monkeypatch):
    model = built("llama")
    before = state(model)
    errors = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr("compress.pruning.layer_drop.decoding_error", lambda *_: next(errors))
    recipe = parse_recipe("layer_drop(target=block, layers='1'), layer_drop(target=mlp, layers='0')")
    with pytest.raises(ValueError, match="the model is as it was"):
        apply(recipe, model, tokens(2, 8))
    assert same(state(model), before) and not dropped_parts(model) and next(errors, None) is None


def test_two_mixers_of_a_block_count_a_token_once():
    model = built("falcon_h1")
    block = find_blocks(model)[1][0]
    assert len(parts_of(block)["attention"]) == 2
    drop_part(block, "attention", {"self_attn": 2})
    assert sorted(p.layer_idx is None for p in block.modules() if isinstance(p, Dropped)) == [False, True]


# Weights that no method takes.


@pytest.mark.parametrize(
    "architecture, narrow, taken",
    [
        ("mamba", "backbone.layers.0.mixer.dt_proj", "backbone.layers.0.mixer.in_proj"),
        ("gemma3n_text", "model.layers.1.altup.prediction_coefs", "model.layers.1.mlp.up_proj"),
    ],
)
def test_narrow_matrices_stay_with_the_reason(architecture, narrow, taken):
    model = built(architecture)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], model)
    reasons = {weight["name"]: weight["reason"] for weight in result.kept}
    columns = model.get_submodule(narrow).in_features
    assert reasons[f"{narrow}.weight"] == f"narrow: it has {columns} columns, and the residual stream has 64"
    assert taken in {layer.name for layer in result.layers}


def test_weights_that_blocks_share_stay_one(tokens, tmp_path):
    """Zamba 2 uses one transformer in several blocks."""
    model = built("zamba2")
    result = apply([METHODS["gptq"](bits=4, group_size=32, min_tokens=1)], model, tokens(2, 16))
    first, second = (f"model.layers.{i}.shared_transformer.self_attn.o_proj" for i in (1, 3))
    assert first not in targets(model) and second not in targets(model)
    assert model.get_submodule(first).weight is model.get_submodule(second).weight
    reasons = {weight["name"]: weight["reason"] for weight in kept_weights(model, [""])}
    assert reasons[f"{first}.weight"] == f"{second} has the same weight, which is stored once"
    ids = tokens(1, 8)[0]
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    with pytest.raises(ValueError, match="in several blocks, where rotate would rotate it several times"):
        METHODS["rotate"]().check(built("zamba2"))


# Head and embedding.


def folder_of(tmp_path, tokenizer, *, said: bool, head: bool):
    """A saved Llama whose config says that head and embedding are tied, or not, and whose file has a head or not."""
    model, folder = built("llama", tie_word_embeddings=False), tmp_path / "m"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if not head:
        del tensors["lm_head.weight"]
        model.lm_head.weight = model.model.embed_tokens.weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": said}))
    return folder, model


@pytest.mark.in_turns
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("weights", ["memory", "disk"])
def test_the_loaded_weights_decide_whether_the_head_is_tied(tmp_path, real, tokens, weights, head):
    """The config says that the head is tied: a file with a head of its own is loaded, planned and saved with it."""
    folder, expected = folder_of(tmp_path, real[1], said=True, head=head)
    ids = tokens(1, 8)[0]
    model = load_model(str(folder), weights=weights, offload_path=tmp_path / "away")[0]
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert model.config.tie_word_embeddings is not head and find_ends(model).tied is not head
    assert find_ends(skeleton(str(folder))).tied is not head
    if weights == "memory":
        model.tie_weights()
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.in_turns
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("save_format", ["workbench", "compressed-tensors", "gptq"])
def test_a_model_whose_config_is_wrong_about_its_head_is_saved_as_it_is(tmp_path, tokens, save_format, tied):
    model = built("llama", tie_word_embeddings=not tied)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        model.lm_head.weight = nn.Parameter(torch.randn(96, 64) / 8, requires_grad=False)
    result = apply([METHODS["rtn"](bits=4, group_size=32, scale_dtype="bfloat16")], model.to(torch.bfloat16))
    path = save_compressed(result, tmp_path / "out", save_format=save_format)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied
    ids = tokens(1, 8)[0]
    again = load_compressed(path) if save_format == "workbench" else load_quantized(path, torch.bfloat16)
    assert find_ends(again).tied is tied
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=0.05)
    config = json.loads((path / "config.json").read_text())
    if save_format != "workbench":  # the same files with the other config
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        again = load_quantized(path, torch.bfloat16)
        assert find_ends(again).tied is tied
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=0.05)


def test_a_missing_head_is_refused_where_the_config_says_it_is_untied(tmp_path, real):
    folder, _ = folder_of(tmp_path, real[1], said=False, head=False)
    with pytest.raises(ValueError, match="lacks 1 of the weights: lm_head.weight"):
        load_model(str(folder))
    with pytest.raises(ValueError, match="lacks 1 of the weights: lm_head.weight"):
        load_on_disk(folder, torch.float32, home="cpu", offload_path=tmp_path / "away")


# Exports.


@pytest.mark.parametrize(
    "architecture, said", [("falcon", "is a FalconLinear"), ("gpt_bigcode", "initialises transformer.h.0")]
)
def test_models_that_transformers_cannot_build_quantised_are_refused_before_any_work(architecture, said):
    recipe, model = [METHODS["rtn"](bits=4, group_size=32)], built(architecture)
    with pytest.raises(ValueError, match=f"{said}.*'workbench' or 'gptq' works"):
        check_save_format("compressed-tensors", recipe, model)
    check_save_format("compressed-tensors", [METHODS["magnitude"](ratio=0.5)], model)  # weights as they always are


def test_a_model_with_float32_tensors_of_its_own_is_verified(tmp_path):
    """XGLM's attention cannot run in float64, in which rounding is measured."""
    result = apply([METHODS["rtn"](bits=4, group_size=32, scale_dtype="float16")], built("xglm"))
    save_compressed(result, tmp_path / "out", save_format="compressed-tensors")


@pytest.mark.parametrize(
    "children, fused",
    [
        (("q_proj", "k_proj", "v_proj", "o_proj"), {"qkv_proj": ("q_proj", "k_proj", "v_proj")}),
        (("q_proj", "k_proj", "o_proj"), {"qkv_proj": ("q_proj", "k_proj")}),  # keys serve as values
        (("gate_proj", "up_proj", "down_proj"), {"gate_up_proj": ("gate_proj", "up_proj")}),
        (("w1", "w2", "w3"), {"w13": ("w1", "w3")}),
        (("q_a_proj", "kv_a_proj_with_mqa"), {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}),
        (
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
            {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")},
        ),
        (("q_proj", "v_proj", "up_proj"), {}),
    ],
)
def test_every_pair_that_vllm_fuses_gets_its_remark(children, fused):
    model = nn.ModuleDict({"mixer": nn.ModuleDict({name: nn.Linear(64, 64, device="meta") for name in children})})
    found = {f"mixer.{one}": [f"mixer.{n}" for n in names] for one, names in fused.items()}
    assert fused_linears(model) == found
    scheme = Scheme(PACKED, 4, True, "group", 32)
    assert not vllm_remarks({f"mixer.{name}": scheme for name in children}, model)
    for names in found.values():
        apart = {f"mixer.{name}": scheme for name in children} | {names[-1]: Scheme(PACKED, 4, True, "group", 64)}
        [remark] = vllm_remarks(apart, model)
        assert remark.startswith(f"vLLM does not load this: it multiplies {', '.join(names)} as one")
    other = {f"mixer.{name}": scheme for name in children} | {n: Scheme(PACKED, 8, True, "group", 32)
             for names in found.values() for n in names}  # fmt: skip
    if found and len(other) > sum(map(len, found.values())):
        patterns = Layout(scheme, other, 1)._dynamic(_Headless(model))
        assert all(any(one.replace(".", r"\.") in pattern for pattern in patterns) for one in found)


class _Headless(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mixer = model["mixer"]

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("outputs, remarks", [((32, 32), 0), ((32, 16), 1), ((64, 128), 0), ((4, 4), 1)])
def test_outputs_that_marlin_does_not_take_get_their_remark(outputs, remarks):
    """The fused linears together count."""
    one, other = (nn.Linear(64, size, device="meta") for size in outputs)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_proj": one, "up_proj": other})})
    scheme = Scheme(PACKED, 4, True, "group", 32)
    found = vllm_remarks({"mlp.gate_proj": scheme, "mlp.up_proj": scheme}, model)
    assert len(found) == remarks and all(str(sum(outputs)) in remark for remark in found)


@pytest.mark.parametrize("save_format", ["workbench", "compressed-tensors"])
@pytest.mark.parametrize("settings", [{"temperature": 0.6, "do_sample": False}, {"pad_token_id": -1}])
def test_settings_of_generate_are_saved_as_they_are(tmp_path, save_format, settings):
    """transformers loads settings that contradict each other, and refuses to save them."""
    model = built("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], model)
    saved = GenerationConfig.from_pretrained(save_compressed(result, tmp_path / "out", save_format=save_format))
    assert {name: getattr(saved, name) for name in settings} == settings


def test_a_decoder_with_images_loads_by_name_with_all_its_weights(tmp_path, real, tokens):
    """transformers would take the decoder of Qwen 3.5 alone."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    numbers = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = AutoConfig.for_model("qwen3_5", text_config={**BASE, **DELTA}, vision_config=vision, **numbers)
    model = AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path / "m")
    real[1].save_pretrained(tmp_path / "m")
    loaded, _ = load_model(str(tmp_path / "m"))
    assert type(loaded) is type(model) and type(skeleton(str(tmp_path / "m"))) is type(model)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], loaded)
    assert result.layers and not any("visual" in layer.name for layer in result.layers)
    ids = tokens(1, 8, vocabulary=80)[0]
    assert "AutoModelForImageTextToText.from_pretrained" in CompressedTensors().how_to_load(loaded)
    assert auto_class(loaded.config) is AutoModelForImageTextToText
    for save_format in ("workbench", "compressed-tensors"):
        path = save_compressed(result, tmp_path / save_format, save_format=save_format)
        again, _ = load_model(str(path)) if save_format == "workbench" else (load_quantized(path, torch.float32), None)
        assert type(again) is type(model) and torch.allclose(again(ids).logits, loaded(ids).logits, atol=1e-4)
        stored = load_file(path / "model.safetensors")
        assert {n for n in load_file(tmp_path / "m" / "model.safetensors") if "visual" in n} <= stored.keys()


def test_a_decoder_without_attention_is_saved(tmp_path, tokens):
    """Transformers' own cache serves no such model: what is saved is compared without one."""
    model = built("lfm2", layer_types=["conv"] * 3)
    result = apply([METHODS["rtn"](group_size=16)], model, tokens(1, 8))
    save_compressed(result, tmp_path / "m")
    ids = tokens(1, 8)[0]
    assert torch.equal(load_compressed(tmp_path / "m")(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
