"""GGUF: our codes in its blocks against the package `gguf`, models and tokenizers against transformers' reader."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from compress import METHODS, Result, apply, save_compressed
from compress.checkpoint.gguf import GGUF
from compress.checkpoint.gguf import models as gguf_models
from compress.checkpoint.gguf.tokenizer import from_transformers
from compress.checkpoint.gguf.types import IQ4_NL_VALUES, Grid, encode, encode_floats, grid_of
from compress.checkpoint.save_format import Checkpoint, CheckpointInfo
from compress.formats import CodebookGroup, Dense, EightBit, Format, IntGroup
from compress.formats.masked import masked
from kernels.w8a8_matmul import quantize_weight

SLIDING = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
SETTINGS: dict[str, dict] = {
    "llama": {"attention_bias": True}, "mistral": {}, "qwen2": {}, "qwen3": {}, "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma3_text": {"query_pre_attn_scalar": 16, **SLIDING},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}, "olmo2": {},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05, "logits_scaling": 8.0},
    "qwen2_moe": {}, "qwen3_moe": {"norm_topk_prob": True},
}  # fmt: skip
UNKNOWN = ("smollm3", "granite", "olmo2")  # to transformers' reader: what is verified is the logits of its tensors
KNOBS: dict[str, dict] = {
    "rtn": {"group_size": 32}, "int8": {}, "fp8": {}, "nf4": {"group_size": 32}, "wanda": {"pattern": "2:4"},
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    "The capital of France is Paris.",
    "It's 12:30, and 2024 was a year; f(x) = 3 + 4\n  and spaces",
    "ünïcode 世界",
]


def ints(bits: int, symmetric: bool, group_size: int = 32, dtype: str = "float16", scale: float = 0.01) -> IntGroup:
    codes = torch.randint(0, 1 << bits, (8, 128), dtype=torch.uint8)
    scales = scale * (0.5 + torch.rand(8, 128 // group_size))
    zero = None if symmetric else torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    return IntGroup.from_codes(codes, scales, zero, bits=bits, group_size=group_size, scale_dtype=dtype)


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        (2, True, GGML.Q4_0), (3, True, GGML.Q4_0), (4, True, GGML.Q4_0), (5, True, GGML.Q5_0), (6, True, GGML.Q8_0),
        (8, True, GGML.Q8_0), (3, False, GGML.Q4_0), (4, False, GGML.Q4_1), (5, False, GGML.Q5_1),
        (6, False, GGML.Q8_0), (8, False, GGML.F16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("group_size", [32, 64])
def test_codes_go_into_the_smallest_type_that_holds_them(bits, symmetric, kind, group_size):
    part = ints(bits, symmetric, group_size)
    W = part.dequantize()
    stored = encode(W, grid_of([part]))
    assert stored.kind == kind
    decoded = gguf.dequantize(stored.data, stored.kind)
    if symmetric or kind in (GGML.Q4_0, GGML.Q8_0):
        np.testing.assert_array_equal(decoded, W.numpy())
    assert np.abs(decoded - W.numpy()).max() <= 2**-10 * W.abs().max() and stored.rounding <= 2**-10


@pytest.mark.parametrize("kind", [GGML.Q4_0, GGML.Q5_0, GGML.Q8_0])
def test_blocks_are_byte_for_byte_those_of_the_package(kind):
    data = gguf.quantize(torch.randn(4, 96).numpy(), kind)
    W = torch.from_numpy(gguf.dequantize(data, kind).copy())
    size = gguf.GGML_QUANT_SIZES[kind][1]
    d = torch.from_numpy(data.reshape(-1, size)[:, :2].copy().view(np.float16).astype(np.float32)).view(4, 3)
    codes = (W.view(4, 3, 32) / d[..., None]).round().to(torch.int16).view(4, 96)
    stored = encode(W, Grid(codes, d))
    assert stored.kind == kind and stored.rounding == 0
    np.testing.assert_array_equal(stored.data, data)


def test_a_table_of_IQ4_NL_and_4_bit_floats_go_into_blocks_of_codes():
    codes, scale = torch.randint(0, 16, (8, 64)), (0.5 + torch.rand(8, 2)).half().float()
    own = CodebookGroup.from_codes(codes, torch.tensor(IQ4_NL_VALUES) / 127, scale, group_size=32)
    assert encode(own.dequantize(), grid_of([own])).kind == GGML.IQ4_NL
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e2m1 = CodebookGroup.from_codes(codes, torch.cat([floats, -floats]), scale, group_size=32)
    powers = CodebookGroup.from_codes(codes, torch.cat([floats, -floats]), scale.log2().round().exp2(), group_size=32)
    for part, kind in ((e2m1, GGML.Q5_0), (powers, GGML.MXFP4)):
        stored = encode(part.dequantize(), grid_of([part]))
        assert stored.kind == kind
        np.testing.assert_array_equal(gguf.dequantize(stored.data, stored.kind), part.dequantize().numpy())


def test_blocks_of_MXFP4_are_byte_for_byte_those_of_the_package():
    data = gguf.quantize(torch.randn(4, 96).numpy(), GGML.MXFP4)
    W = torch.from_numpy(gguf.dequantize(data, GGML.MXFP4).copy())
    d = torch.from_numpy(np.exp2(data.reshape(4, 3, 17)[..., 0].astype(np.float32) - 128))
    codes = (W.view(4, 3, 32) / d[..., None]).to(torch.int16).view(4, 96)
    stored = encode(W, Grid(codes, d))
    assert stored.kind == GGML.MXFP4 and stored.rounding == 0
    np.testing.assert_array_equal(stored.data[..., ::17], data[..., ::17])
    np.testing.assert_array_equal(gguf.dequantize(stored.data, GGML.MXFP4), W.numpy())
    nonzero = (W != 0).view(4, 3, 2, 16)  # the package writes -0 where a small weight is below 0
    same = (stored.data == data).reshape(4, 3, 17)[..., 1:]
    assert same[nonzero.all(2).numpy()].all()


def test_scales_may_be_negative_and_are_rounded_only_if_they_are_wider_than_16_bits():
    codes, scale = torch.randint(0, 16, (8, 64), dtype=torch.uint8), torch.tensor([[-0.011, 0.017]]).repeat(8, 1)
    change = {}
    for dtype in ("bfloat16", "float32"):
        part = IntGroup.from_codes(codes, scale, None, bits=4, group_size=32, scale_dtype=dtype)
        stored = encode(part.dequantize(), grid_of([part]))
        assert stored.kind == GGML.Q4_0
        change[dtype] = stored.rounding
    assert change["bfloat16"] == 0 < change["float32"] <= 2**-11


@pytest.mark.parametrize("scale", [1e-7, 1e6], ids=["too small for fp16", "too large for fp16"])
def test_scales_out_of_reach_of_16_bits_cost_bytes_and_no_accuracy(scale):
    part = ints(4, True, dtype="float32", scale=scale)
    W = part.dequantize()
    stored = encode(W, grid_of([part]))
    assert stored.kind == GGML.F32 and stored.rounding == 0


@pytest.mark.parametrize("two_of_four", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_of_pruned_weights_stay_zeros(two_of_four, symmetric):
    part = ints(4, symmetric, dtype="bfloat16")
    keep = torch.tensor([True, False, False, True]).repeat(8, 32)
    zero = torch.full((8, 4), 8) if symmetric else torch.randint(9, 16, (8, 4))
    codes = torch.where(keep, torch.randint(0, 7, (8, 128)), zero.repeat_interleave(32, 1)).to(torch.uint8)
    plain = IntGroup.from_codes(
        codes, part.scale.float(), None if symmetric else zero.to(torch.uint8), bits=4, group_size=32
    )
    stored = masked(plain, keep, two_of_four=two_of_four)
    W = stored.dequantize()
    written = encode(W, grid_of([stored]), keep_zeros=True)
    assert (gguf.dequantize(written.data, written.kind)[~keep.numpy()] == 0).all()
    assert written.kind in (GGML.Q4_0, GGML.Q5_0)  # exactly; Q4_1 would round its offset


def test_weights_that_fit_no_type_of_codes_become_floats():
    odd = ints(4, True, group_size=16)
    assert grid_of([odd]) is None and encode(odd.dequantize(), None).kind == GGML.F16
    dense: list[Format] = [Dense(torch.randn(4, 32).bfloat16() * 2.0**-20), Dense(torch.full((4, 32), 3.0))]
    assert [encode_floats(part.dequantize()).kind for part in dense] == [GGML.BF16, GGML.F16]
    per_channel = EightBit(quantize_weight(torch.randn(16, 64), torch.int8))
    assert encode(per_channel.dequantize(), grid_of([per_channel])).kind == GGML.Q8_0
    assert grid_of([EightBit(quantize_weight(torch.randn(16, 64), torch.float8_e4m3fn))]) is None


def made(architecture: str, tiny: Callable[..., nn.Module], **more) -> nn.Module:
    """A tiny model whose norms and biases matter, too."""
    model = tiny(architecture, **SETTINGS[architecture], **more)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_settings_cover_every_architecture():
    assert set(SETTINGS) == set(gguf_models.ARCHITECTURES)


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=[pytest.mark.slow] * (i % 2)) for i, a in enumerate(SETTINGS)]
)
def test_models_come_back_through_transformers(architecture, tiny, tokens, tmp_path):
    result = apply([METHODS["rtn"](bits=4, group_size=32)], made(architecture, tiny), [])
    save_compressed(result, tmp_path / "out", save_format="gguf")
    (file,) = (tmp_path / "out").glob("*.gguf")
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if architecture == "phi3":  # older versions of llama.cpp do not load it otherwise
        assert reader.fields["phi3.attention.sliding_window"].contents() == 0
    down = "blk.0.ffn_down_exps.weight" if architecture.endswith("moe") else "blk.0.ffn_down.weight"
    assert stored[down].tensor_type == GGML.Q4_0
    card = (file.parent / "README.md").read_text()
    assert ("gguf_file" in card) == (architecture not in UNKNOWN)
    if architecture in UNKNOWN:
        assert "It is loaded by llama.cpp." in card
        return
    # The reader leaves out some settings, and takes Mistral for Llama.
    given = {} if architecture == "mistral" else {"config": result.model.config}
    again = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **given).eval()
    (ids,) = tokens(1)
    expected, found = result.model(ids).logits, again(ids).logits
    assert (expected - found).abs().max() < 0.02 * expected.std()


@pytest.mark.parametrize("skip", ["*experts*", "*experts.gate_up_proj.1*"])
def test_experts_that_are_not_compressed_become_floats(skip, tiny, tmp_path):
    """All of a layer are one tensor, which has one type."""
    saved(
        apply([METHODS["rtn"](bits=4, group_size=32, skip=skip)], tiny("qwen3_moe", norm_topk_prob=True), []), tmp_path
    )
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(next(tmp_path.glob("*.gguf"))).tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == GGML.F16 and kinds["blk.0.attn_q.weight"] == GGML.Q4_0
    assert kinds["blk.0.ffn_down_exps.weight"] == (GGML.F16 if skip == "*experts*" else GGML.Q4_0)


@pytest.mark.parametrize("kind, settings, message", [
    ("qwen3_moe", {"norm_topk_prob": False}, "with `norm_topk_prob` True, not False"),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, "expects experts in every block"),
    ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}, "without the biases of `attention_bias`"),
    ("qwen2_moe", {"tie_word_embeddings": True}, "reads a head of its own for qwen2_moe"),
    ("olmo2", {"tie_word_embeddings": True}, "reads a head of its own for olmo2"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "the keys of every block of smollm3 but each 4th"),
    ("smollm3", {"rope_parameters": LLAMA3}, "rotary positions of the kind llama3 cannot be written"),
    ("smollm3", {"mlp_bias": True}, "without the biases of `mlp_bias`"),
])  # fmt: skip
def test_what_llama_cpp_computes_otherwise_is_refused(kind, settings, message, tiny):
    assert message in gguf_models.problem_of(tiny(kind, **settings))


def test_settings_and_rows_of_what_transformers_does_not_read(tiny, tmp_path):
    """By themselves: what is verified is read back in the way in which it was written."""
    model = made("granite", tiny)
    saved(apply([METHODS["rtn"](bits=8, group_size=32, skip="*q_proj")], model, []), tmp_path)
    reader = gguf.GGUFReader(next(tmp_path.glob("*.gguf")))
    found = {name: reader.fields[f"granite.{name}"].contents() for name in (
        "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    )}  # fmt: skip
    assert found == pytest.approx({
        "embedding_scale": 12, "residual_scale": 0.22, "attention.scale": 0.05, "logit_scale": 8,
    })  # fmt: skip
    (tensor,) = (t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    rows, W = torch.from_numpy(tensor.data.astype(np.float32)), model.model.layers[0].self_attn.q_proj.weight
    for head in range(4):  # of 16 rows, of which i and i + 8 become neighbours
        for i in range(8):
            pair = rows[16 * head + 2 * i : 16 * head + 2 * i + 2]
            torch.testing.assert_close(pair, W[[16 * head + i, 16 * head + i + 8]], rtol=1e-2, atol=1e-3)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(("recipe", "dtype"), [(r, torch.float32) for r in KNOBS] + [("rtn", torch.bfloat16)])
def test_every_kind_of_weight_is_written(recipe, dtype, tiny, tokens, tmp_path):
    verified = saved(apply([METHODS[recipe](**KNOBS[recipe])], tiny("llama").to(dtype), tokens()), tmp_path)
    rounds = any("llama.cpp rounds activations" in remark for remark in verified.remarks)
    floats = any("no type of GGUF holds" in remark for remark in verified.remarks)
    assert (rounds, floats) == (recipe in ("int8", "fp8"), recipe in ("fp8", "nf4"))


def test_a_file_of_mxfp4_names_its_type(tiny, tokens, tmp_path):
    saved(apply([METHODS["rtn"](bits=4, grid="mxfp4", group_size=32)], tiny("llama"), tokens()), tmp_path)
    reader = gguf.GGUFReader(next(tmp_path.glob("*.gguf")))
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    kinds = {
        tensor.tensor_type for tensor in reader.tensors if "blk.0.ffn" in tensor.name and "norm" not in tensor.name
    }
    assert kinds == {GGML.MXFP4}


def saved(result: Result, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None):
    checkpoint = Checkpoint(result.model, tokenizer, CheckpointInfo.of(result))
    GGUF().write(checkpoint, folder)
    return GGUF().verify(checkpoint, folder)


def test_scaled_rotary_frequencies_are_a_tensor(tiny):
    model = tiny("llama", rope_parameters=LLAMA3, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    factors = {entry.name: entry for entry in gguf_models.entries(model)}["rope_freqs.weight"].values()
    plain = 1 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert factors.min() == 1 and factors.max() == 8


def test_verification_sees_a_flipped_byte_and_rows_in_the_wrong_order(tiny, tmp_path, monkeypatch):
    result = apply([METHODS["rtn"](bits=4, group_size=32)], tiny("llama"), [])
    checkpoint = Checkpoint(result.model, None, CheckpointInfo.of(result))
    GGUF().write(checkpoint, tmp_path)
    (file,) = tmp_path.glob("*.gguf")
    content = bytearray(file.read_bytes())
    (tensor,) = (t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.attn_v.weight")
    content[tensor.data_offset + 5] ^= 0x70
    file.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"blk\.1\.attn_v\.weight.*another weight"):
        GGUF().verify(checkpoint, tmp_path)
    file.unlink()
    monkeypatch.setattr(gguf_models, "_rotary_order", lambda *_: None)
    GGUF().write(checkpoint, tmp_path)
    with pytest.raises(RuntimeError, match="gives other logits"):
        GGUF().verify(checkpoint, tmp_path)


def byte_level(split: pre_tokenizers.PreTokenizer, **more) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(**more))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT[:2] * 3, trainers.BpeTrainer(vocab_size=340, special_tokens=special))
    tokenizer = Tokenizer.from_str(trained.to_str().replace('"byte_fallback":false', '"byte_fallback":true'))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


LEVEL = pre_tokenizers.ByteLevel
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gpt-2": lambda: byte_level(LEVEL(add_prefix_space=False)),
    "smollm": lambda: byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), LEVEL(add_prefix_space=False)])),
    "llama-bpe": lambda: byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), LEVEL(add_prefix_space=False, use_regex=False)]
        ),
        ignore_merges=True,
    ),
    "default": sentencepiece,
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("pre", TOKENIZERS)
def test_tokenizers_come_back_through_transformers(pre, tiny, tmp_path):
    tokenizer = TOKENIZERS[pre]()
    model = tiny("llama", vocab_size=len(tokenizer) + 7)  # rows without a token
    result = apply([METHODS["rtn"](bits=4, group_size=32)], model, [])
    verified = saved(result, tmp_path, tokenizer)
    (file,) = tmp_path.glob("*.gguf")
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.pre"].contents() == pre
    assert len(fields["tokenizer.ggml.tokens"].contents()) == model.config.vocab_size
    assert fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32, "llama.cpp takes no other"
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name)
    same = [tokenizer(text).input_ids == again(text).input_ids for text in TEXT]
    said = any("splits" in remark for remark in verified.remarks)
    assert all(same) or (pre == "smollm" and said)  # a pre-tokeniser that this reader does not know


def test_a_tokenizer_that_llama_cpp_does_not_know_is_said(tiny):
    odd = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), LEVEL()]))
    assert "not known here" in from_transformers(odd, tiny("llama", vocab_size=len(odd)).config).remarks[0]
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert "no tokenizer" in from_transformers(words, tiny("llama").config).remarks[0]


@pytest.mark.parametrize(
    ("architecture", "more", "said"),
    [
        ("gpt2", {}, "these can: llama, mistral"),
        ("mixtral", {}, "of the type mixtral"),
        ("llama", {"hidden_act": "gelu"}, "activation silu, not gelu"),
        ("gemma3_text", {"query_pre_attn_scalar": 16}, "sliding window"),
        ("gemma2", {}, "scales attention by"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding windows"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(architecture, more, said, tiny, tmp_path):
    result = apply([METHODS["rtn"](bits=4, group_size=32)], tiny(architecture, **more), [])
    with pytest.raises(ValueError, match=said):
        save_compressed(result, tmp_path / "out", save_format="gguf")
    assert not (tmp_path / "out").exists()
