"""The native step of a decoder writes what the decoder writes, or is refused with a reason."""

import statistics

import pytest
import torch

from compress import METHODS, apply
from compress.recipe import parse_recipe
from eval.speed.attention import fast_attention
from kernels import native
from kernels.step.assemble import native_step, program_of, rooms_of
from kernels.step.cache import static_cache
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import recognise

pytestmark = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)
PROMPT = 12


def varied(model):
    """The model with norms that all differ, as trained ones do: those of a new model are all alike."""
    for name, p in model.named_parameters():
        if "norm" in name:
            p.add_(0.4 * torch.randn_like(p))
    return model


def stepped(model, batch: int = 1, steps: int = 14, length: int = PROMPT):
    """(relative differences of the logits of some steps behind a prompt of this length, the native step)."""
    cache = static_cache(fast_attention(model), 64)
    ids = (torch.arange(batch * length) * 7919 % 96).view(batch, length)

    def prompt():
        cache.reset()
        at = torch.arange(length)[None]
        return model(ids, past_key_values=cache, position_ids=at, use_cache=True).logits[:, -1:].argmax(-1)

    first = prompt()
    step = native_step(model, cache, first, torch.tensor([[length]]), prompt)
    expected, token = [], prompt()
    for place in range(length, length + steps):
        at = torch.tensor([[place]])
        expected.append(
            (token, model(token, past_key_values=cache, position_ids=at, use_cache=True).logits[:, -1].float())
        )
        token = expected[-1][1].argmax(-1, keepdim=True)
    prompt()
    differences = []
    for place, (token, logits) in enumerate(expected, start=length):
        step(token, torch.tensor([[place]]))
        differences.append(float((step.logits - logits).norm() / logits.norm()))
    return differences, step


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "architecture, more",
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"hidden_size": 72, "intermediate_size": 104}),
        ("gemma3_text", {}),
        ("gemma2", {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ],
)
def test_steps_are_those_of_the_model(tiny, architecture, more, batch):
    model = varied(tiny(architecture, **more)).bfloat16()
    differences, step = stepped(model, batch)
    assert max(differences) < 0.05
    assert step.kernels["decode_step"] == {f"cpu {native.isa(torch.bfloat16)}"}


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 7, 8, 9, 20])
def test_prompts_below_at_and_above_the_window(tiny, length):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = varied(tiny("gemma3_text", num_hidden_layers=4, layer_types=kinds, sliding_window=8)).bfloat16()
    assert max(stepped(model, length=length, steps=6)[0]) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("architecture, added", [("llama", 0), ("gemma3_text", 1)])
def test_norms_are_recognised_beside_one_large_weight(tiny, architecture, added):
    """Gemma 3 has norms with a weight of 1,648 among others of about 1, where w and 1 + w look alike in bfloat16."""
    model = varied(tiny(architecture)).bfloat16()
    model.model.norm.weight[-1] = 1648
    cache = static_cache(model, 64)
    model(torch.zeros(1, 4, dtype=torch.long), past_key_values=cache, position_ids=torch.arange(4)[None])
    decoder = recognise(model)
    norm = program_of(decoder, rooms_of(decoder, cache), 1).instructions[-1].before
    assert torch.equal(norm.weight, model.model.norm.weight.float() + added)


@torch.no_grad()
@pytest.mark.parametrize("name, knobs", [("rtn", {"bits": 4, "symmetric": False}), ("rtn", {"bits": 6}), ("nf4", {})])
def test_compressed_weights_and_embeddings(tiny, name, knobs):
    model = tiny("llama", tie_word_embeddings=True)
    recipe = [METHODS[name](**knobs, group_size=32), METHODS["rtn"](bits=8, group_size=32, where="embedding")]
    differences, step = stepped(apply(recipe, model).model.bfloat16())
    assert max(differences) < 0.05 and step.step.program.embedding is not None, (
        "the tied embedding is looked up natively"
    )
    assert "int_matmul" in step.kernels


@pytest.mark.in_turns(2)
@torch.no_grad()
@pytest.mark.parametrize(
    "recipe, op",
    [
        ("qtip(bits=3, states=12), rtn(bits=8, group_size=32, where=embedding)", "trellis_matmul"),
        ("rotate, rtn(bits=4, group_size=16)", "int_matmul"),
        ("rotate(stream=none, heads=False, online=all), rtn(bits=4, group_size=16), activations(bits=8)", "int_matmul"),
        ("rtn(bits=4, group_size=16), activations(bits=4, group_size=16)", "int_matmul"),
        ("gather, rtn(bits=4, group_size=16)", "int_matmul"),
        ("rotate, gather, rtn(bits=4, group_size=16), activations(bits=4, group_size=16, outliers=0.5)", "int_matmul"),
        ("int8", "w8a8_matmul"),
    ],
)
def test_rotated_inputs_rounded_inputs_and_walks(tiny, recipe, op):
    if op == "w8a8_matmul" and not native.w4a8_runs():
        pytest.skip("no AVX512-VNNI")
    model = varied(tiny("llama"))
    batches = [torch.arange(32)[None] * 31 % 96]
    differences, step = stepped(apply(parse_recipe(recipe), model, batches).model.bfloat16())
    limit = 0.3 if "activations(bits=4" in recipe else 0.06  # a code of an input may differ, where two are equally near
    assert statistics.median(differences) < limit
    assert op in step.kernels


@torch.no_grad()
@pytest.mark.parametrize("recipe, op", [
    ("wanda(ratio=0.5)", "linear"), ("wanda(pattern='2:4')", "linear"),
    ("sparsegpt(ratio=0.6, bits=4, group_size=32)", "int_matmul"),
])  # fmt: skip
def test_pruned_weights_are_multiplied_with_their_zeros(tiny, recipe, op):
    model = varied(tiny("llama"))
    differences, step = stepped(apply(parse_recipe(recipe), model, [torch.arange(32)[None] * 31 % 96]).model.bfloat16())
    assert max(differences) < 0.05 and op in step.kernels


@torch.no_grad()
def test_transforms_that_are_not_known_are_refused(tiny):
    rounded = apply(parse_recipe("rtn(bits=4, group_size=16), activations(format=fp8)"), tiny("llama"), []).model
    with pytest.raises(NotNative, match="Rounding"):
        stepped(rounded.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("architecture, reason", [
    ("gpt2", "not a body and a head"), ("phi", "differs"), ("gpt_oss", "block|attention|MLP"),
    ("opt", "norm|body|differs"),
])  # fmt: skip
def test_other_decoders_are_refused(tiny, architecture, reason):
    with pytest.raises(NotNative, match=reason):
        stepped(tiny(architecture).bfloat16())


@torch.no_grad()
def test_changed_models_are_refused(tiny):
    with pytest.raises(NotNative, match="float32"):
        stepped(tiny("llama"))
    hooked = tiny("llama").bfloat16()
    hooked.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(NotNative, match="hooks"):
        stepped(hooked)
    with pytest.raises(NotNative, match="9 tokens"):
        stepped(tiny("llama").bfloat16(), batch=9)
    dynamic = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}).bfloat16()
    with pytest.raises(NotNative, match="dynamic"):
        stepped(dynamic)
    other = tiny("llama").bfloat16()
    other.model.layers[0].self_attn.scaling *= 1.5  # what is read is what the model computes with
    assert max(stepped(other)[0]) < 0.05
    lying = tiny("llama").bfloat16()
    lying.model.layers[0].mlp.__class__ = type(
        "Other", (type(lying.model.layers[0].mlp),), {"forward": lambda m, x: m.up_proj(x)[..., :64]}
    )
    with pytest.raises(NotNative, match="logits differ"):
        stepped(lying)
