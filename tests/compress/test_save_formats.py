"""Checkpoints in the formats of others: their own readers give the same model, and independent decoders the same
weights."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import METHODS, apply, load_model, save_compressed
from compress.checkpoint.compressed_tensors import CompressedTensors, plain_part
from compress.checkpoint.fits import check_save_format
from compress.checkpoint.gptq import GPTQFormat
from compress.checkpoint.interop.foreign import load_quantized
from compress.checkpoint.interop.words import from_words, to_words
from compress.checkpoint.save import SAVE_FORMATS
from compress.checkpoint.shards import Shards, write_shards
from compress.inputs.skeleton import skeleton
from compress.linear import compressed_linears, shape_of
from kernels.int_matmul import to_rows, unpack


def decode_words(words: Tensor, bits: int, count: int) -> list[list[int]]:
    """Rows of int32 words to unsigned codes, one by one: element i stands at bit i * bits, low bits first."""
    rows = []
    for row in words.tolist():
        stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([stream >> (i * bits) & (1 << bits) - 1 for i in range(count)])
    return rows


@pytest.fixture
def verification(monkeypatch):
    """What the last verification said."""
    said = []
    for writer in (CompressedTensors, GPTQFormat):

        def listening(self, checkpoint, folder, verify=writer.verify):
            said[:] = [verify(self, checkpoint, folder)]
            return said[0]

        monkeypatch.setattr(writer, "verify", listening)
    return said


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("count", [1, 31, 32, 40, 65])
def test_words_are_a_stream_of_bits(bits, count):
    codes = torch.randint(1 << bits, (3, count))
    words = to_words(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (3, -(-count * bits // 32))
    assert decode_words(words, bits, count) == codes.tolist()
    assert torch.equal(from_words(words, bits, count), codes.to(torch.uint8))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("bits, group_size, symmetric", [(4, 16, True), (3, -1, True), (4, 32, False), (8, -1, False)])
def test_packed_weights_follow_the_description(tiny, tmp_path, verification, bits, group_size, symmetric):
    method = METHODS["rtn"](bits=bits, group_size=group_size, symmetric=symmetric, scale="search")
    model = tiny("llama", tie_word_embeddings=True).to(torch.bfloat16)
    path = save_compressed(apply([method], model), tmp_path / "out", save_format="compressed-tensors")
    stored = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in stored, "tied weights are stored once"
    negative = 0
    for name, linear in compressed_linears(model).items():
        out, columns = linear.parts[0].shape
        scale = stored[f"{name}.weight_scale"]
        assert scale.dtype == torch.bfloat16 and stored[f"{name}.weight_shape"].tolist() == [out, columns]
        codes = torch.tensor(decode_words(stored[f"{name}.weight_packed"], bits, columns))
        zero = torch.full_like(scale, 1 << (bits - 1))
        if not symmetric:
            zero = torch.tensor(decode_words(stored[f"{name}.weight_zero_point"].T, bits, out)).T
        width = columns // scale.shape[1]
        W = (codes - zero.repeat_interleave(width, 1)) * scale.float().repeat_interleave(width, 1)
        assert torch.equal(W, linear.dequantize()), name
        negative += int((scale < 0).sum())
    assert negative > 0 or not symmetric, "the search gives negative scales, which are stored as they are"
    assert re.match(
        r"\d+ of 40 greedy tokens the same.*median position, where rounding explains", verification[0].agreement
    )


RECIPES = {
    "int8": [METHODS["int8"]()],
    "static int8": [METHODS["int8"](activations="tensor")],
    "kept codes": [METHODS["rtn"](bits=8, group_size=-1, scale="search"), METHODS["int8"]()],
    "fp8": [METHODS["fp8"]()],
    "pruned": [METHODS["magnitude"](ratio=0.5)],
    "pruned and quantised": [METHODS["magnitude"](ratio=0.5), METHODS["rtn"](bits=4, group_size=16)],
    "fewer blocks": [METHODS["layer_drop"](count=1, target="block"), METHODS["rtn"](bits=4, group_size=16)],
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_reads_every_kind_of_weight(tiny, tokens, tmp_path, verification, recipe):
    model = tiny("qwen2").to(torch.bfloat16)
    result = apply(RECIPES[recipe], model, tokens())
    path = save_compressed(result, tmp_path / "out", save_format="compressed-tensors")
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and ("quantization_config" in config) == (recipe != "pruned")
    assert "transformers" in verification[0].reader


@pytest.mark.parametrize("bits, group_size, symmetric", [(4, 16, True), (3, -1, True), (2, 32, False), (8, -1, True)])
def test_gptq_weights_follow_the_description(tiny, tmp_path, verification, bits, group_size, symmetric):
    method = METHODS["rtn"](bits=bits, group_size=group_size, symmetric=symmetric, scale="search")
    model = tiny("qwen2").to(torch.bfloat16)
    path = save_compressed(apply([method], model), tmp_path / "out", save_format="gptq")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config == json.loads((path / "quantize_config.json").read_text())
    assert config["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2") and config["group_size"] == group_size
    stored, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    linear = model.get_submodule(name)
    out, columns = linear.parts[0].shape
    codes = torch.tensor(decode_words(stored[f"{name}.qweight"].T, bits, columns))
    zero = torch.tensor(decode_words(stored[f"{name}.qzeros"], bits, out)).T + (1 if symmetric else 0)
    group = stored[f"{name}.g_idx"].long()
    W = (codes - zero[:, group]) * stored[f"{name}.scales"].T.float()[:, group]
    assert torch.equal(W, linear.dequantize())
    if bits == 4:
        assert set(stored[f"{name}.qzeros"].unique().tolist()) == {0x77777777}
    assert verification[0].reader.startswith("a decoder") and "greedy tokens" in verification[0].agreement


def same_codes(model, again) -> None:
    """Every compressed linear of two models holds the same codes and zero points, and scales of the same values."""
    ours, theirs = compressed_linears(model), compressed_linears(again)
    assert ours.keys() == theirs.keys() and ours
    for name, linear in ours.items():
        expected, found = plain_part(linear).state_dict(), plain_part(theirs[name]).state_dict()
        assert expected.keys() == found.keys()
        for key in expected:
            assert torch.equal(expected[key].float(), found[key].float()), f"{name}.{key}"


def test_saving_shows_no_bars_of_the_library_that_reads(tiny, tmp_path, capfd):
    """compressed-tensors writes its bars to the error stream, which notebooks show in red."""
    save_compressed(apply("rtn(group_size=16)", tiny("llama")), tmp_path / "out", save_format="compressed-tensors")
    assert not re.search("Applying|Compressing|Dispatching|Decompressing", capfd.readouterr().err)


@pytest.mark.in_turns
@pytest.mark.parametrize("save_format", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("bits, group_size, symmetric", [(4, 16, True), (3, -1, False), (8, 32, True)])
def test_packed_checkpoints_come_back_code_for_code(tiny, tmp_path, save_format, bits, group_size, symmetric):
    model = tiny("qwen2", tie_word_embeddings=True).to(torch.bfloat16)
    method = METHODS["rtn"](bits=bits, group_size=group_size, symmetric=symmetric, scale="search")
    path = save_compressed(apply([method], model), tmp_path / "out", save_format=save_format)
    again = load_quantized(path, torch.bfloat16)
    same_codes(model, again)
    assert again.lm_head.weight is again.model.embed_tokens.weight and not hasattr(again.config, "quantization_config")


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("recipe", ["int8", "static int8", "kept codes", "fp8"])
def test_rounded_activations_come_back_with_their_steps(tiny, tokens, tmp_path, recipe):
    model = tiny("llama")
    path = save_compressed(apply(RECIPES[recipe], model, tokens()), tmp_path / "out", save_format="compressed-tensors")
    again = load_quantized(path, torch.float32)
    same_codes(model, again)
    ids = torch.cat(tokens(2, 9))
    assert torch.equal(again(ids).logits, model(ids).logits)


ARGUMENTS = {
    "groups of 4 bits": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16}},
    "7 bits, asymmetric": {"weights": {"num_bits": 7, "strategy": "channel", "symmetric": False}},
    "int8 per token": {"weights": {"num_bits": 8, "strategy": "channel"},
                       "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}},
    "fp8 for the whole tensor": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                                 "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                                       "dynamic": True}},
    "fp8 without activations": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                                "format": "float-quantized"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_checkpoints_written_by_compressed_tensors_are_read(tiny, tokens, tmp_path, kind):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    model = tiny("llama")
    groups = {"group_0": {"targets": ["Linear"], **ARGUMENTS[kind]}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    expected = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weights, W = module.quantization_scheme.weights, module.weight.data
        groups_of_w = {
            "group": W.view(len(W), -1, weights.group_size or 1), "channel": W[:, None], "tensor": W.view(1, 1, -1),
        }[weights.strategy]  # fmt: skip
        scale, zero = calculate_qparams(groups_of_w.amin(-1), groups_of_w.amax(-1), weights)
        scale, zero = (t.reshape(module.weight_scale.shape) for t in (scale, zero))
        module.weight_scale.data, module.weight_zero_point.data = scale, zero.to(module.weight_zero_point.dtype)
        codes = quantize(W, scale, zero, weights)
        expected[name] = dequantize(codes, scale, zero, weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    dense = kind == "fp8 without activations"
    if dense:
        with pytest.warns(UserWarning, match="14 linears, model.layers.0"):
            again = load_quantized(tmp_path, torch.float32)
    else:
        again = load_quantized(tmp_path, torch.float32)
        assert compressed_linears(again).keys() == expected.keys()
    for name, W in expected.items():
        assert torch.equal(again.get_submodule(name).weight, W), name


def test_act_order_is_dequantised_with_a_warning(tiny, tmp_path):
    model = tiny("llama")
    path = save_compressed(apply([METHODS["rtn"](group_size=16)], model), tmp_path / "out", save_format="gptq")
    name, file = "model.layers.0.self_attn.q_proj", path / "model.safetensors"
    stored = load_file(file)
    order = torch.randperm(64)
    stored[f"{name}.g_idx"] = stored[f"{name}.g_idx"][order].contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=f"1 linears, {name} first"):
        again = load_quantized(path, torch.float32)
    rows = to_rows(model.get_submodule(name).parts[0].packed)
    codes = unpack(rows)[0].float() - 8
    assert torch.equal(again.get_submodule(name).weight, codes * rows.scale.float()[:, order // 16])


@pytest.mark.parametrize("save_format", ["compressed-tensors", "gptq"])
def test_load_model_takes_such_folders(tmp_path, save_format):
    model, tokenizer = load_model("tiny")
    result = apply([METHODS["rtn"](group_size=32)], model)
    path = save_compressed(result, tmp_path / "out", tokenizer, save_format=save_format)
    again, _ = load_model(str(path), dtype="bfloat16")
    assert again.dtype == torch.bfloat16
    same_codes(model, again)
    assert shape_of(skeleton(str(path)).model.layers[1].mlp.up_proj) == (128, 64), "a plan needs no weights"
    with pytest.raises(ValueError, match="weights='memory' works"):
        load_model(str(path), weights="disk")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"quant_method": "awq"}, "quantised by 'awq'; what can be read: compressed-tensors, gptq"),
        ({"format": "nvfp4-pack-quantized"}, "stored as nvfp4-pack-quantized"),
        ({"transform_config": {"u": 1}}, "has a transform_config"),
    ],
)
def test_unreadable_checkpoints_are_refused(tiny, tmp_path, change, said):
    path = save_compressed(
        apply([METHODS["rtn"](group_size=16)], tiny("llama")), tmp_path / "out", save_format="compressed-tensors"
    )
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        del group["format"]
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        load_quantized(path, torch.float32)


@pytest.mark.in_turns
@pytest.mark.parametrize("architecture", ["gemma3_text", "phi3", "opt", "gpt_neox", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("save_format", ["compressed-tensors", "gptq"])
def test_architectures_are_held_or_refused_before_any_work(tiny, tmp_path, architecture, save_format):
    model, recipe = tiny(architecture), [METHODS["rtn"](bits=4, group_size=16)]
    experts = {"gptq": "its experts are linears of their own", "compressed-tensors": "experts are stored as one tensor"}
    refused = {"gpt2": "lie in Conv1D modules", "gpt_oss": experts[save_format]}.get(architecture)
    if refused:
        with pytest.raises(ValueError, match=refused):
            check_save_format(save_format, recipe, model)
        return
    check_save_format(save_format, recipe, model)
    path = save_compressed(apply(recipe, model), tmp_path / "out", save_format=save_format)
    same_codes(model, load_quantized(path, torch.float32))


def test_blocks_of_fp8_and_what_does_not_fill_them(tiny, tmp_path, verification):
    recipe = [METHODS["fp8"](weights="block")]
    with pytest.raises(ValueError, match="in_features .=64. are no multiple of 128"):
        check_save_format("compressed-tensors", recipe, tiny("llama"))
    model = tiny("llama", hidden_size=128, intermediate_size=384, head_dim=32, num_key_value_heads=4)
    path = save_compressed(apply(recipe, model), tmp_path / "out", save_format="compressed-tensors")
    assert load_file(path / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"].shape == (3, 1)
    same_codes(model, load_quantized(path, torch.float32))


@pytest.mark.parametrize("save_format", ["compressed-tensors", "gptq"])
def test_linears_stored_differently_are_told_apart(tiny, tmp_path, verification, save_format):
    """Two schemes, whose linears are listed, and one linear that is not quantised."""
    rest = "*v_proj, *o_proj, *mlp*"
    model = tiny("llama")
    apply([METHODS["rtn"](bits=4, group_size=16, skip=rest)], model)
    result = apply([METHODS["rtn"](bits=8, group_size=32, skip="*q_proj, *k_proj, *up_proj")], model)
    path = save_compressed(result, tmp_path / "out", save_format=save_format)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if save_format == "gptq":
        assert config["bits"] == 8 and config["dynamic"]["-:^model\\.layers\\.0\\.mlp\\.up_proj$"] == {}
        assert config["dynamic"]["+:^model\\.layers\\.1\\.self_attn\\.q_proj$"]["bits"] == 4
    else:
        groups = {group["weights"]["num_bits"]: group["targets"] for group in config["config_groups"].values()}
        assert "model.layers.1.self_attn.v_proj" in groups[8] and "model.layers.1.self_attn.k_proj" in groups[4]
        assert {"model.layers.0.mlp.up_proj", "lm_head"} < set(config["ignore"])
    assert any("it multiplies model.layers.0.self_attn.q_proj" in said for said in verification[0].remarks)
    same_codes(model, load_quantized(path, torch.float32))


def test_formats_differ_from_linear_to_linear(tiny, tmp_path):
    model = tiny("llama")
    apply([METHODS["rtn"](bits=4, group_size=16, skip="*mlp*")], model)
    result = apply([METHODS["fp8"](skip="*self_attn*")], model)
    path = save_compressed(result, tmp_path / "out", save_format="compressed-tensors")
    assert json.loads((path / "config.json").read_text())["quantization_config"]["format"] == "mixed-precision"
    same_codes(model, load_quantized(path, torch.float32))


@pytest.mark.parametrize("save_format", ["compressed-tensors", "gptq"])
def test_a_wrong_weight_is_named(tiny, tmp_path, monkeypatch, save_format):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    write = SAVE_FORMATS[save_format].write

    def flawed(self, checkpoint, folder):
        write(checkpoint, folder)
        stored = load_file(folder / "model.safetensors")
        for key in ("weight_packed", "qweight"):
            if (name := f"model.layers.1.mlp.up_proj.{key}") in stored:
                stored[name][0, 0] ^= 1
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(SAVE_FORMATS[save_format]), "write", flawed)
    said = r"model.layers.1.mlp.up_proj.weight is another one .*: 1 of 6144 values differ, the first at \[0, 0\]"
    with pytest.raises(RuntimeError, match=said):
        save_compressed(result, tmp_path / "out", save_format=save_format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe, said",
    [
        ([METHODS["nf4"]()], "stored as codebook"),
        ([METHODS["llm_int8"]()], "columns"),
        ([METHODS["layer_drop"](count=1)], "was dropped, and other libraries build every block"),
    ],
)
def test_recipes_that_the_format_cannot_hold_are_refused(tiny, recipe, said):
    with pytest.raises(ValueError, match=said):
        check_save_format("compressed-tensors", recipe, tiny("llama", hidden_size=128))


def test_a_missing_library_is_named_before_any_work(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(ValueError, match="pip install compressed-tensors==0.20.0"):
        check_save_format("compressed-tensors", [METHODS["rtn"](group_size=16)], tiny("llama"))


def test_shards_follow_their_index(tmp_path):
    tensors = {f"t{i}": torch.randn(10, 10) for i in range(5)}
    write_shards(tensors.items(), tmp_path, shard_bytes=900)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    shards = Shards(tmp_path)
    assert all(torch.equal(shards.read(name), tensor) for name, tensor in tensors.items())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-00003.safetensors"):
        Shards(tmp_path)
