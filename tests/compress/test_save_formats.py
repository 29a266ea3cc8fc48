"""Checkpoints in the formats of others: their own readers give the same model, and independent decoders the same
weights."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress import METHODS, apply, save_compressed
from compress.checkpoint.compressed_tensors import CompressedTensors
from compress.checkpoint.gptq import GPTQFormat
from compress.checkpoint.words import from_words, to_words
from compress.linear import compressed_linears


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
    assert "greedy tokens the same" in verification[0].remarks[0]


RECIPES = {
    "int8": [METHODS["int8"]()],
    "static int8": [METHODS["int8"](activations="tensor")],
    "kept codes": [METHODS["rtn"](bits=8, group_size=-1, scale="search"), METHODS["int8"]()],
    "fp8": [METHODS["fp8"]()],
    "pruned": [METHODS["magnitude"](ratio=0.5)],
    "pruned and quantised": [METHODS["magnitude"](ratio=0.5), METHODS["rtn"](bits=4, group_size=16)],
    "fewer blocks": [METHODS["layer_drop"](count=1, target="block"), METHODS["rtn"](bits=4, group_size=16)],
}


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
    assert verification[0].reader.startswith("a decoder") and "greedy tokens" in verification[0].remarks[0]
