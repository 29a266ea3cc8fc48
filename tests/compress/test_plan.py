"""Plans: what can be refused is refused before a compression begins, and nothing of the model has changed by then."""

import pytest
import torch
from torch import nn

from compress import METHODS, apply
from compress.apply import run
from compress.inputs.skeleton import skeleton
from compress.kv import identity
from compress.linear import CompressedLinear
from compress.plan import check_recipe, plan
from compress.result import makeup
from compress.walk.finite import NotFinite

GPTQ = "gptq(bits=3, group_size=16, min_tokens=8)"


def test_a_plan_changes_nothing(tiny, tokens):
    """Whether a method fits the model or not, also where only its shapes are known."""
    model, outline, batches = tiny("mixtral"), skeleton("tiny"), tokens(2, 20)
    before, shapes, planned = makeup(model), makeup(outline), set()
    for name, method in METHODS.items():
        for check in (lambda m: plan(m, model, batches), lambda m: check_recipe(m, outline, outline=True)):
            try:
                check(method(**{"group_size": 16} if "group_size" in method.knobs() else {}))
                planned.add(name)
            except ValueError:
                continue
        assert makeup(model) == before and makeup(outline) == shapes, name
    assert {"rtn", "gptq", "smoothquant", "snapkv"} <= planned


def test_a_plan_that_is_run_is_what_apply_does(tiny, tokens):
    one, two, batches = tiny("llama"), tiny("llama"), tokens(4, 30)
    made = plan(f"smoothquant, {GPTQ}", one, batches, calibrate="sequential")
    assert made.processes == 1 and made.device.type == "cpu" and made.usage.predicted_peak > 0
    assert [method.name for method in made.recipe] == ["smoothquant", "gptq"] and made.calibration["samples"] == 4
    result, same = run(made), apply(f"smoothquant, {GPTQ}", two, batches)
    assert result.model is one and result.seconds >= made.seconds and result.usage is made.usage
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert (result.recipe, result.asked, result.identity) == (same.recipe, same.asked, same.identity)
    with pytest.raises(ValueError, match="its model has changed since it was planned"):
        run(made)


CHANGES = {
    "a weight in place": lambda model, batches: model.lm_head.weight.mul_(2),
    "a weight past its version": lambda model, batches: model.lm_head.weight.data.mul_(2),
    "a new weight": lambda model, batches: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)),
    "the dtype": lambda model, batches: model.bfloat16(),
    "a stored buffer": lambda model, batches: model.model.layers[0].steps.add_(1),
    "a hook": lambda model, batches: model.model.layers[0].register_forward_hook(lambda *_: None),
    "tokens": lambda model, batches: batches[0].fill_(3),
    "the number of batches": lambda model, batches: batches.pop(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_since_it_was_planned_is_not_compressed(change, tiny, tokens):
    """The record would name the weights and the tokens of the plan."""
    model, batches = tiny("llama"), tokens(4, 30)
    model.model.layers[0].register_buffer("steps", torch.zeros(1))
    early = plan(GPTQ, model, batches)
    change(model, batches)
    before, late = makeup(model), plan("rtn(group_size=16)", model)
    with pytest.raises(ValueError, match="changed since"):
        run(early)
    assert makeup(model) == before and run(late).model is model


@pytest.mark.parametrize("call", [True, False], ids=["called in it", "a model that was made in it"])
def test_in_inference_mode_the_result_is_the_same(call, tiny, tokens):
    """Its tensors do not tell that they were written to."""
    plain, model, batches = tiny("llama"), tiny("llama"), tokens(4, 30)
    apply(f"smoothquant, {GPTQ}", plain, batches)
    with torch.inference_mode():
        for part in model.modules() if not call else ():
            own = {name: nn.Parameter(p.clone(), False) for name, p in part._parameters.items() if p is not None}
            part._parameters.update(own)
    assert model.lm_head.weight.is_inference() is not call
    with torch.inference_mode(call):
        apply(f"smoothquant, {GPTQ}", model, batches)
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("recipe", [GPTQ, "awq(group_size=16)", "smoothquant, rtn(group_size=16)", "rotate"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(recipe, value, tiny, tokens):
    """Also where a method of the recipe runs the model before the weights are read."""
    model = tiny("llama")
    model.model.layers[0].mlp.down_proj.weight[1, 2] = value
    with pytest.raises(NotFinite, match=r"its weight model\.layers\.0\.mlp\.down_proj\.weight holds NaN or infinity"):
        plan(recipe, model, tokens(4, 30))


def test_dropout_and_autocast_are_off_while_a_model_is_compressed(tiny, tokens):
    """Of a model that was trained a moment ago; it stays in the mode of training."""
    models = [tiny("gpt2") for _ in range(2)]
    for model, training in zip(models, (False, True), strict=True):
        for part in model.modules():
            part.p = 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=training):
            apply(GPTQ, model.train(training), tokens(4, 30))
        assert model.training is training
    assert all(map(torch.equal, *(model.state_dict().values() for model in models)))


@pytest.mark.parametrize(
    "recipe, given, message",
    [
        ("rtn(group_size=7)", {}, "`group_size`"),
        (GPTQ, {"batches": ()}, "`batches` is empty, and gptq needs calibration"),
        ("rotate, rtn(group_size=16)", {"calibrate": "once"}, "rotate changes the inputs"),
        ("rtn(group_size=16)", {"calibrate": "twice"}, "`calibrate`"),
        ("rtn(group_size=16)", {"processes": 0}, "`processes`"),
        ("rtn(group_size=16)", {"device": "cuda:99"}, "`device`"),
        ("rtn(group_size=16)", {"max_memory": 1000}, "`max_memory`"),
        ("nf4, rtn", {}, "cannot follow"),
    ],
)
def test_a_plan_refuses(recipe, given, message, tiny, tokens):
    with pytest.raises(ValueError, match=message):
        plan(recipe, tiny("llama"), **{"batches": tokens(2, 20), **given})


def test_blocks_that_cannot_be_walked_are_refused_by_the_plan(tiny, tokens):
    """Before an earlier method of the recipe has changed the model."""
    model = tiny("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
    before = makeup(model)
    with pytest.raises(ValueError, match="blocks do not form a chain"):
        plan(f"rotate, {GPTQ}", model, tokens(2, 20))
    assert makeup(model) == before


def test_attention_that_no_small_copy_shows_is_compared_by_the_plan(tiny, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(identity, "small_copy", lambda config: None)
    monkeypatch.setattr(identity, "_agreed", set())
    monkeypatch.setattr(identity, "_difference", lambda found, wanted, routed: float(found is not wanted))
    with pytest.raises(ValueError, match="its logits differ by 1"):
        plan("rtn(group_size=16), snapkv", model)
    assert not any(isinstance(module, CompressedLinear) for module in model.modules())
