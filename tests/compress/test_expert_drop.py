"""Dropped experts: which go, and that the rest computes as the model in which no token may reach those that are gone."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from compress import apply, load_compressed, save_compressed
from compress.linear import parameter_count
from compress.plan import plan
from compress.pruning.expert_drop import ExpertDrop, _closed, _importance
from compress.smaller import of_settings
from compress.walk.blocks import find_blocks

ARCHITECTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "granitemoe"]


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


class Closed(TorchFunctionMode):
    """While active, products with a router's weight give -inf for experts that are gone."""

    def __init__(self, gone):
        super().__init__()
        self.gone = gone  # by id of a router's weight

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and (gone := self.gone.get(args[1].data_ptr())) is not None:
            output = output.clone()
            output[..., gone] = float("-inf")
        return output


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, a in enumerate(ARCHITECTURES)]
)
def test_what_is_left_computes_as_if_the_others_were_closed(architecture, tiny, tokens):
    model, whole, text = tiny(architecture), tiny(architecture), tokens(4, 24)
    result = apply("expert_drop(ratio=0.25)", model, text)
    assert result.drops and all(drop.left < drop.of for drop in result.drops)
    assert sum(drop.parameters for drop in result.drops) == parameter_count(whole) - parameter_count(model)
    gone = {}
    for drop in result.drops:
        theirs, ours = (find_blocks(m)[1][drop.block].get_submodule(drop.name.split(".", 3)[3]) for m in (whole, model))
        kept = [int((theirs.down_proj == row).flatten(1).all(1).nonzero()[0]) for row in ours.down_proj]
        assert len(kept) == drop.left and kept == sorted(kept)
        for name, p in find_blocks(whole)[1][drop.block].named_parameters():
            if "experts" not in name and p.shape == (drop.of, model.config.hidden_size):
                gone[p.data_ptr()] = [e for e in range(drop.of) if e not in kept]
    assert len(gone) == len(result.drops)
    with Closed(gone):
        closed = logits(whole, text[0])
    assert torch.allclose(logits(model, text[0]), closed, atol=1e-5)
    skeleton = type(model)(model.config)
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_token_reaches_closed_experts(architecture, dtype, tiny, tokens):
    """Some routers multiply by a copy of their weight in float32, and choose by a bias as well."""
    model, ids, method = tiny(architecture).to(dtype), tokens(1, 24)[0], ExpertDrop(ratio=0.25)
    mixtures, reached = method.units(model), {}
    for index, (name, _) in mixtures.items():
        experts = find_blocks(model)[1][index].get_submodule(name)
        experts.register_forward_pre_hook(lambda _, args, index=index: reached.update({index: args[1]}))
    kept = {index: torch.arange(1, 1 + method.left(model, count)) for index, (_, count) in mixtures.items()}
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with _closed(model, of_settings(model, method._settings(model, mixtures)), kept):
        logits(model, ids)
    assert reached.keys() == kept.keys()
    assert all(set(own.flatten().tolist()) <= set(kept[index].tolist()) for index, own in reached.items())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_importance_is_the_papers(tiny, tokens):
    """The mean of g ||f|| over the tokens that reach an expert, from the router's own output."""
    model, text = tiny("mixtral"), tokens(3, 16)
    blocks = find_blocks(model)[1]
    experts, seen = blocks[0].mlp.experts, []
    handle = experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    for batch in text:
        logits(model, batch)
    handle.remove()
    added, count = torch.zeros(experts.num_experts), torch.zeros(experts.num_experts)
    for hidden, index, weights in seen:
        for token in range(len(hidden)):
            for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
                gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                added[expert] += weight * (experts.down_proj[expert] @ (experts.act_fn(gate) * up)).norm().item()
                count[expert] += 1
    names = dict.fromkeys(range(len(blocks)), "mlp.experts")
    assert torch.allclose(
        _importance(model, names, text, torch.device("cpu"), "reap")[0].float(), added / count.clamp_min(1), rtol=1e-4
    )
    assert torch.equal(_importance(model, names, text, torch.device("cpu"), "frequency")[0].float(), count)
    assert blocks[0].mlp.experts is experts


def test_a_smaller_mixture_is_loaded_by_transformers_and_by_us(tiny, tokens, tmp_path):
    model, text = tiny("qwen3_moe"), tokens(4, 24)
    apply("expert_drop(ratio=0.5)", model, text)
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), text[0]), logits(model, text[0])
    )
    stored = apply("expert_drop(ratio=0.5), rtn(bits=4, group_size=8)", tiny("qwen3_moe"), text)
    save_compressed(stored, tmp_path / "ours")
    assert torch.equal(logits(load_compressed(tmp_path / "ours"), text[0]), logits(stored.model, text[0]))
    # gptq walks through the blocks, so that experts are split before any is dropped.
    walked = apply("expert_drop(ratio=0.5), gptq(bits=4, group_size=8, min_tokens=8)", tiny("qwen3_moe"), text)
    assert [drop.left for drop in walked.drops] == [drop.left for drop in stored.drops]
    assert logits(walked.model, text[0]).isfinite().all()


@pytest.mark.parametrize(
    ("architecture", "knobs", "told"),
    [
        ("llama", "", "`model` (LlamaForCausalLM) has no mixture of experts that expert_drop knows"),
        ("mixtral", "ratio=0.0", "`ratio` (=0) of expert_drop would leave"),
        ("mixtral", "ratio=0.9", "that each token reaches must stay"),
        ("mixtral", "metric=random", "must be one of reap, frequency"),
    ],
)
def test_what_cannot_be_dropped(architecture, knobs, told, tiny, tokens):
    with pytest.raises(ValueError) as caught:
        plan(f"expert_drop({knobs})", tiny(architecture), tokens(4, 24))
    assert told in str(caught.value)


def test_other_ways_of_choosing_are_found_out(tiny, tokens, monkeypatch):
    """A router whose order of experts is another one than that of its weight: nothing of the model changes."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    own = MixtralTopKRouter.forward

    def shifted(self, hidden):
        logits, scores, index = own(self, hidden)
        return logits, scores, (index + 1) % self.weight.shape[0]

    model, text = tiny("mixtral"), tokens(4, 24)
    monkeypatch.setattr(MixtralTopKRouter, "forward", shifted)
    before, config = logits(model, text[0]), model.config.to_dict()
    with pytest.raises(ValueError, match="the experts of MixtralForCausalLM are chosen in a way that is not known"):
        apply("expert_drop(ratio=0.25)", model, text)
    assert torch.equal(logits(model, text[0]), before) and model.config.to_dict() == config


def test_groups_of_experts_are_refused(tiny, tokens):
    model = tiny("deepseek_v3")
    model.config.n_group = 2
    with pytest.raises(ValueError, match="chooses among 2 groups of experts"):
        plan("expert_drop", model, tokens(4, 24))


def test_the_model_keeps_its_mode_and_counts_its_experts(tiny, tokens):
    model, text = tiny("mixtral").train(), tokens(4, 24)
    apply("expert_drop(ratio=0.25)", model, text)
    assert all(module.training for module in model.modules())
    assert model.num_experts == model.config.num_local_experts
    assert model(text[0], labels=text[0], output_router_logits=True).loss.isfinite()
