"""Links are found by what flows, with the right producers on every architecture; refusals say why; folds change no
output."""

import copy

import pytest
import torch
from torch import nn

from compress import METHODS, apply
from compress.walk.blocks import find_blocks
from compress.walk.experts import split_experts
from compress.walk.folds.links import _links_of, compared_by_attention, find_links, fold, gain_offset

LLAMA = {
    "input_layernorm": "q_proj k_proj v_proj",
    "self_attn.v_proj": "o_proj",
    "post_attention_layernorm": "gate_proj up_proj",
    "mlp.up_proj": "down_proj",
}
ATTENTION = {"input_layernorm": "q_proj k_proj v_proj", "self_attn.v_proj": "o_proj"}
GEMMA = {("pre_feedforward_layernorm" if k == "post_attention_layernorm" else k): v for k, v in LLAMA.items()}
EXPECTED: dict[str, dict[str, str]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi": {"input_layernorm": "q_proj k_proj v_proj fc1", "self_attn.v_proj": "dense"},
    "phi3": {"input_layernorm": "qkv_proj", "post_attention_layernorm": "gate_up_proj"},
    "opt": {
        "self_attn_layer_norm": "q_proj k_proj v_proj",
        "self_attn.v_proj": "out_proj",
        "final_layer_norm": "fc1",
        "fc1": "fc2",
    },
    "gpt2": {"ln_1": "c_attn", "ln_2": "c_fc"},
    "gpt_neox": {"input_layernorm": "query_key_value", "post_attention_layernorm": "dense_h_to_4h"},
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "qwen2_moe": {**ATTENTION, "mlp.shared_expert.up_proj": "down_proj"},
    "gpt_oss": ATTENTION,
}
LOGITS = torch.arange(30)[None] * 5 % 96


def jolt(model: nn.Module) -> nn.Module:
    """Gains and biases that are not all alike, so that a fold that forgets them shows."""
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(torch.rand_like(p))
    split_experts(model)
    return model


def found(model: nn.Module, block: int = 1) -> tuple[dict[str, str], dict[str, str]]:
    """Of one block, {producer: consumers} and {linear: reason}, names as they are in the block and at their ends."""
    prefix = f"{find_blocks(model)[0]}.{block}."
    links, reasons = find_links(model)
    ends = {
        link.producer.removeprefix(prefix): " ".join(c.rpartition(".")[2] for c in link.consumers)
        for link in links[block]
    }
    return ends, {name.removeprefix(prefix): reason for name, reason in reasons.items() if name.startswith(prefix)}


def test_links_and_their_producers_on_every_architecture(any_model):
    expected = EXPECTED[any_model.config.model_type]
    split_experts(any_model)
    links, reasons = found(any_model)
    assert links == expected
    assert list(links) == list(expected), "in the order of the computation"
    if "experts" in str(reasons):
        up = next(name for name in reasons if "experts.gate_up_proj" in name)
        assert "router" in reasons[up] and "post_attention_layernorm" in reasons[up]
    known = ("is fused", "a router", "no made-up token")
    assert all(any(text in reason for text in known) for reason in reasons.values())
    assert find_links(any_model)[0][0][0].producer.startswith(f"{find_blocks(any_model)[0]}.0.")


def test_a_fold_by_any_scales_changes_no_output(any_model):
    model = jolt(any_model)
    before, weights = model(LOGITS).logits, copy.deepcopy(model.state_dict())
    links, _ = find_links(model)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items()), "looking changes nothing"
    changed = set()
    for link in (link for block in links for link in block):
        fold(model, link, torch.rand(link.width) * 8 + 0.1)
        changed |= {link.producer, *link.consumers}
    assert (model(LOGITS).logits - before).norm() <= 2e-6 * before.norm()
    for name, t in model.state_dict().items():
        owner = name.rpartition(".")[0]
        kept = owner not in changed or (
            name.endswith("bias") and owner not in {link.producer for b in links for link in b}
        )
        assert torch.equal(t, weights[name]) == kept, name


def test_a_fold_divides_what_the_producer_gives(tiny):
    for architecture, offset in {"llama": 0.0, "gemma2": 1.0, "gemma3_text": 1.0, "opt": 0.0, "gpt2": 0.0}.items():
        model = jolt(tiny(architecture))
        for link in find_links(model)[0][0]:
            producer, s = model.get_submodule(link.producer), torch.rand(link.width) + 0.5
            x = torch.randn(3, shape[1] if len(shape := producer.weight.shape) > 1 else shape[0])
            before = producer(x)
            fold(model, link, s)
            assert torch.allclose(producer(x) * s, before, rtol=1e-4, atol=1e-5), (architecture, link.producer)
            assert link.kind == "linear" or gain_offset(producer) == offset


def test_query_heads_that_share_a_value_head_share_its_scales(tiny):
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    link = next(link for link in find_links(model)[0][1] if link.producer.endswith("v_proj"))
    expected = [
        head // 4 * 4 + i for head in range(8) for i in range(4)
    ]  # four query heads to a value head of four channels
    assert link.channels.tolist() == expected and link.width == 8
    values = torch.arange(32.0)
    assert link.largest(values).tolist() == [max(j for j in range(32) if expected[j] == c) for c in range(8)]


def test_a_norm_that_the_residual_reads_too_is_refused(tiny):
    links, reasons = found(tiny("opt", do_layer_norm_before=False))
    assert links == {"self_attn.v_proj": "out_proj", "fc1": "fc2"}
    assert "a residual" in reasons["fc1"] and "self_attn_layer_norm" in reasons["fc1"]
    assert all("block's input itself" in reasons[f"self_attn.{x}_proj"] for x in "qkv")


def test_inputs_with_other_readers_are_not_scaled(tiny, tokens):
    class Leaking(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) + 0.1 * x.tanh()

    model = tiny("llama")
    model.model.layers[0].mlp = Leaking(model.model.layers[0].mlp)
    links, reasons = found(model, 0)
    assert "post_attention_layernorm" not in links and "router" in reasons["mlp.mlp.up_proj"]

    model = tiny("llama")
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[0].self_attn.v_proj.weight
    links, reasons = found(model)
    assert links == {k: v for k, v in LLAMA.items() if k.startswith(("post", "mlp"))}
    assert (
        "self_attn.v_proj is shared with another module" in reasons["self_attn.q_proj"] == reasons["self_attn.o_proj"]
    )

    model = apply([METHODS["rtn"](group_size=32, skip="*mlp*")], tiny("llama")).model
    links, reasons = found(model)
    assert links == {k: v for k, v in LLAMA.items() if k.startswith(("post", "mlp"))}
    assert "stored compressed already" in reasons["self_attn.q_proj"]

    links, _ = found(tiny("llama", hidden_act="relu"))
    assert list(links.values()).count("down_proj") == 1, (
        "behind a ReLU gate might be scaled as well as up, but only one of them is"
    )
    links, reasons = found(tiny("opt", activation_function="gelu"))
    assert "fc1" not in links and "activation function" in reasons["fc2"]


def test_a_gain_that_is_no_product_is_refused(tiny):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64), requires_grad=False)

        def forward(self, x):
            return x / x.norm(dim=-1, keepdim=True) * self.weight.square()

    model = tiny("llama")
    model.model.layers[1].post_attention_layernorm = Odd()
    links, reasons = found(model)
    assert "post_attention_layernorm" not in links and "Odd" in reasons["mlp.up_proj"]


def test_rounding_a_gain_to_16_bits_changes_no_output(tiny):
    """Of 1 + w with w near -1 little is left in bfloat16; the columns take what was really lost."""
    model = jolt(tiny("gemma2")).to(torch.bfloat16)
    link = next(link for link in find_links(model)[0][0] if link.producer.endswith("pre_feedforward_layernorm"))
    norm, up = model.get_submodule(link.producer), model.get_submodule(link.consumers[0])
    before = (1 + norm.weight.float()) * up.weight.float()
    fold(model, link, torch.linspace(20, 90, 64))
    after = (1 + norm.weight.float()) * up.weight.float()
    assert norm.weight.dtype == torch.bfloat16 and norm.weight.max() < -0.85
    assert ((after - before).abs() <= 2**-8 * before.abs()).all(), "only the columns' own rounding is left"


def test_a_check_looks_no_further_than_the_first_link_where_any_will_do(tiny, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "compress.walk.folds.links._links_of", lambda trial, shared: looked.append(trial) or _links_of(trial, shared)
    )
    model = tiny("llama")
    METHODS["smoothquant"]().check(model)
    assert len(looked) == 1
    METHODS["smoothquant"](layers="model.layers.1.mlp.up_proj").check(model)
    assert len(looked) == 3
    with pytest.raises(ValueError, match=r"`layers` \(='\*.9.\*'\) of smoothquant: no linear of the blocks is named"):
        METHODS["smoothquant"](layers="*.9.*").check(model)


def test_a_norms_bias_in_16_bits_is_divided_by_what_its_gain_really_lost(tiny):
    model = jolt(tiny("opt")).to(torch.bfloat16)
    link = find_links(model)[0][0][0]
    norm = model.get_submodule(link.producer)
    gain, bias = norm.weight.float(), norm.bias.float()
    fold(model, link, torch.rand(link.width) * 8 + 0.1)
    assert torch.equal(norm.bias, (bias / (gain / norm.weight.float())).to(torch.bfloat16))


def test_attention_compares_queries_and_keys(any_model):
    """Found by what reaches its softmax; a router's softmax is none of it."""
    split_experts(any_model)
    linears = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}
    expected = set(linears.get(any_model.config.model_type, "q_proj k_proj").split())
    names = compared_by_attention(any_model)
    assert {name.rpartition(".")[2] for name in names} == expected and len(names) == 2 * len(expected)
