"""Narrower models: which units go, what is left, and what cannot be made narrower."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import METHODS, apply, load_compressed, save_compressed
from compress.linear import parameter_count, weight_of
from compress.plan import plan
from compress.pruning.width import Width, _by_activations, _by_gradients
from compress.walk.blocks import find_blocks
from reports.page.pruning import figures

CPU = torch.device("cpu")


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.in_turns
@pytest.mark.parametrize("target", ["mlp", "heads"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2", "opt"])
def test_what_is_left_computes_as_the_model_with_zeros(kind, target, tiny, tokens):
    model, text = tiny(kind), tokens(4, 24)
    recipe = f"width(target={target}, ratio=0.5, multiple=1)"
    if target == "heads" and kind in ("gpt2", "opt"):  # the config derives the size of a head from the width
        with pytest.raises(ValueError, match="no config of"):
            plan(recipe, model, text)
        return
    size, settings = parameter_count(model), model.config.get_text_config()
    result = apply(recipe, model, text)
    assert parameter_count(model) < size
    assert sum(drop.parameters for drop in result.drops) == size - parameter_count(model)
    assert result.drops[0].left * 2 == result.drops[0].of and result.model is model
    assert model.config.get_text_config() is settings
    # Every module is one that the changed config makes.
    skeleton = type(model)(model.config)
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    out = model.generate(text[0][:, :8], max_new_tokens=4, do_sample=False)
    assert torch.equal(out[:, 8:9], logits(model, text[0][:, :8])[:, -1:].argmax(-1))


def test_a_narrower_model_is_loaded_by_transformers_and_by_us(tiny, tokens, tmp_path):
    model, text = tiny("llama"), tokens(4, 24)
    apply("width(ratio=0.5, multiple=1), width(target=heads, ratio=0.5)", model, text)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again, text[0]), logits(model, text[0]))
    quantised = apply("width(ratio=0.5, multiple=1), rtn(bits=4, group_size=8)", tiny("llama"), text)
    save_compressed(quantised, tmp_path / "ours")
    (drop, *_) = quantised.drops
    assert f"Of {drop.of} units in each block {drop.left} are left" in (tmp_path / "ours" / "README.md").read_text()
    assert torch.equal(logits(load_compressed(tmp_path / "ours"), text[0]), logits(quantised.model, text[0]))


def test_the_least_important_units_go(tiny, tokens):
    """Two units of four are made so small that both metrics must find them."""
    for metric in ("activation", "taylor"):
        model, text = tiny("llama"), tokens(4, 24)
        _, blocks = find_blocks(model)
        down = blocks[1].mlp.down_proj
        width = down.in_features
        weak = torch.randperm(width, generator=torch.Generator().manual_seed(1))[: width // 2].sort().values
        with torch.no_grad():
            down.weight[:, weak] *= 1e-4
        strong = down.weight.detach()[:, [i for i in range(width) if i not in weak.tolist()]].clone()
        apply(f"width(ratio=0.5, multiple=1, metric={metric})", model, text)
        assert torch.equal(find_blocks(model)[1][1].mlp.down_proj.weight, strong)


def test_metrics_are_what_their_papers_define(tiny, tokens):
    model, text = tiny("llama").double(), tokens(3, 16)
    method, (_, blocks) = Width(multiple=1), find_blocks(model)
    units = method.units(model)
    seen = []
    handle = blocks[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0]))
    by_hand = []
    for batch in text:
        model(batch)
    handle.remove()
    added = sum(a.square().sum(0) for a in seen) * blocks[0].mlp.down_proj.weight.square().sum(0)
    assert torch.allclose(_by_activations(model, units, text, CPU)[0].double(), added, rtol=1e-4)
    # The derivative by a factor of the unit, which stands at 1.
    for batch in text:
        factor = torch.ones(blocks[0].mlp.down_proj.in_features, dtype=torch.float64, requires_grad=True)
        handle = blocks[0].mlp.down_proj.register_forward_pre_hook(lambda _, args, factor=factor: (args[0] * factor,))
        model(batch, labels=batch).loss.backward()
        handle.remove()
        by_hand.append(factor.grad.square())
    assert torch.allclose(_by_gradients(model, units, text, CPU)[0].double(), sum(by_hand), rtol=1e-4)
    assert all(not p.requires_grad or p.grad is not None for p in model.parameters())


def test_other_places_of_units_are_found_out(tiny, tokens, monkeypatch):
    """Units that lie elsewhere than they are taken for: nothing of the model changes."""
    model, text = tiny("llama"), tokens(4, 24)
    right = Width.units

    def wrong(self, model):
        units = right(self, model)
        for its in units.values():
            its.rows["mlp.gate_proj"].copy_(its.rows["mlp.gate_proj"].flip(0))
        return units

    monkeypatch.setattr(Width, "units", wrong)
    before = {name: p.clone() for name, p in model.named_parameters()}
    config = model.config.to_dict()
    with pytest.raises(ValueError, match="lie in another order"):
        apply("width(ratio=0.5, multiple=1)", model, text)
    assert model.config.to_dict() == config
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_drops_before_it(tiny, tokens):
    model, text = tiny("llama"), tokens(4, 24)
    result = apply("layer_drop(target=mlp, layers='0'), width(ratio=0.5, multiple=1)", model, text)
    assert [drop.block for drop in result.drops if drop.kind == "units"] == [1]
    said = figures(result.layers, result.drops).said
    assert (
        f"Narrower: {result.drops[-1].left} of {result.drops[-1].of} units are left" in said
        and "MLPs of block 0" in said
    )
    assert "units in each block left" in str(result) and "1 of 2 dropped" in str(result)


@pytest.mark.parametrize(
    ("kind", "knobs", "told"),
    [
        ("llama", "ratio=0.001", "`ratio` (=0.001) of width would leave"),
        ("llama", "ratio=1.0", "`ratio` (=1) of width would leave 0 of"),
        ("llama", "target=heads, ratio=0.9", "groups of heads: some must go, and some must stay, at least 1"),
        ("olmo2", "target=heads, ratio=0.5", "no config of Olmo2ForCausalLM describes the smaller model"),
        ("gpt_oss", "target=heads, ratio=0.5", "no config of GptOssForCausalLM describes the smaller model"),
        ("mixtral", "ratio=0.5, multiple=1", "has a mixture of experts in place of an MLP"),
        ("llama", "target=units", "must be one of mlp, heads"),
    ],
)
def test_what_cannot_be_narrower(kind, knobs, told, tiny, tokens):
    with pytest.raises(ValueError) as caught:
        plan(f"width({knobs})", tiny(kind), tokens(4, 24))
    assert told in str(caught.value)


def test_stored_weights_are_refused(tiny, tokens):
    model = apply("rtn(bits=4, group_size=16)", tiny("llama"), tokens(4, 24)).model
    with pytest.raises(ValueError, match="compressed"):
        plan("width(multiple=1)", model, tokens(4, 24))


def test_gradients_are_taken_where_the_model_lies(tiny, tokens):
    """Blocks go to the device one by one; the whole model does not."""
    there, text = torch.device("cuda"), tokens(4, 24)
    with pytest.raises(ValueError, match=r"`device` \(='cuda'\): metric='taylor' of width .* where it lies, on cpu"):
        Width(metric="taylor").check_run(tiny("llama"), text, there, 1)
    Width(metric="taylor").check_run(tiny("llama"), text, CPU, 1)
    Width(metric="activation").check_run(tiny("llama"), text, there, 1)


def test_it_comes_before_what_stores(tiny, tokens):
    with pytest.raises(ValueError, match="must come before"):
        plan("rtn(bits=4), width(ratio=0.5, multiple=1)", tiny("llama"), tokens(4, 24))
    assert METHODS["width"].needs_calibration and weight_of(tiny("llama").lm_head).dtype == torch.float32
