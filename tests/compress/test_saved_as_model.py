"""A folder that `save_compressed` wrote is a model: to score, and to compress further where that makes sense."""

import pytest
import torch

from compress import apply, calibration, load_model, save_compressed
from compress.checkpoint.fits import check_save_format, linears_to_be
from compress.inputs.skeleton import skeleton
from compress.kv.attach import attached_methods
from compress.linear import compressed_linears, parameter_count, weight_of
from compress.method import settle
from compress.recipe import parse_recipe
from compress.walk.identity import weights_sha256
from eval.machine.size import parameter_count as counted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved models by recipe, with their results."""
    model, tokenizer = load_model("tiny")
    batches = calibration(tokenizer, samples=2, seqlen=32)
    made = {}

    def of(recipe):
        if recipe not in made:
            result = apply(parse_recipe(recipe), load_model("tiny")[0], batches)
            made[recipe] = save_compressed(result, tmp_path_factory.mktemp("saved") / "out", tokenizer), result
        return made[recipe]

    of.batches, of.parameters = batches, parameter_count(model)
    return of


BEFORE_AND_AFTER = [
    ("wanda(pattern='2:4')", "gptq(bits=4, group_size=32, min_tokens=8)"),
    *(
        pytest.param(*recipes, marks=pytest.mark.slow)
        for recipes in (
            ("smoothquant", "int8"),
            ("rtn(bits=8, group_size=-1)", "int8"),
            ("layer_drop(target='mlp', count=1)", "rtn(group_size=32)"),
            ("magnitude(ratio=0.5)", "rtn(bits=4, group_size=32)"),
            ("int8", "layer_drop(target='mlp', count=1)"),
        )
    ),
    ("rtn(bits=4, group_size=32)", "knorm(budget=0.5)"),
    pytest.param(
        "rtn(bits=4, group_size=32, skip='*.mlp.*')",
        "rtn(bits=3, group_size=32, skip='*.self_attn.*')",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("before, after", BEFORE_AND_AFTER)
def test_saved_models_can_be_compressed_further(before, after, folder):
    """As one recipe of both gives it, where both fit into one."""
    path, first = folder(before)
    methods = parse_recipe(after)
    for method in methods:
        method.check(skeleton(str(path)))
    check_save_format("workbench", methods, skeleton(str(path)))
    expected, _ = linears_to_be(settle(methods), skeleton(str(path)))
    model, _ = load_model(str(path))
    result = apply(methods, model, folder.batches)
    if "layer_drop" not in after:
        assert {name: linear.spec() for name, linear in compressed_linears(model).items()} == expected
        if "skip" not in before:
            assert weights_sha256(model) == weights_sha256(folder(f"{before}, {after}")[1].model)
    assert result.identity["name"] == str(path)
    assert result.identity["parameters"] == folder.parameters - sum(drop.parameters for drop in first.drops)
    assert torch.isfinite(model(folder.batches[0]).logits).all()


@pytest.mark.parametrize(
    "before, after, said",
    [
        (
            "rtn(bits=4, group_size=32)",
            "rtn(bits=3, group_size=32)",
            r"take what is stored.*before that compression \(tiny",
        ),
        (
            "rtn(bits=4, group_size=32)",
            "gptq(bits=4, group_size=32)",
            r"q_proj compressed already \(int_group\), and gptq",
        ),
        ("rtn(bits=4, group_size=32)", "smoothquant", "smoothquant can fold nothing"),
        ("rtn(bits=4, group_size=32)", "awq, rtn(group_size=32)", "awq.* cannot take what is stored"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("rtn(bits=4, group_size=32)", "magnitude", "cannot take what is stored"),
                ("rtn(bits=4, group_size=32)", "int8", "cannot take what is stored"),
                ("magnitude(ratio=0.5)", "magnitude(ratio=0.7)", "cannot take what is stored"),
                ("magnitude(ratio=0.5)", "smoothquant, int8", "smoothquant can fold nothing"),
            )
        ),
    ],
)
def test_methods_that_need_original_weights_are_refused_at_plan_and_before_work(before, after, said, folder):
    path, _ = folder(before)
    with pytest.raises(ValueError, match=said):
        for method in settle(parse_recipe(after)):
            method.check(skeleton(str(path)))
    model, _ = load_model(str(path))
    identity = weights_sha256(model)
    with pytest.raises(ValueError, match=said):
        apply(parse_recipe(after), model, folder.batches)
    assert weights_sha256(model) == identity


def test_a_second_policy_is_refused_before_work(folder):
    path, _ = folder("rtn(bits=4, group_size=32, skip='*.mlp.*'), knorm(budget=0.5)")
    model, _ = load_model(str(path))
    assert [str(method) for method in attached_methods(model)] == ["knorm(budget=0.5)"]
    with pytest.raises(ValueError, match=r"snapkv.* cannot be attached beside knorm\(budget=0.5\)"):
        apply(parse_recipe("rtn(group_size=32, skip='*.self_attn.*'), snapkv"), model)
    assert len(compressed_linears(model)) == 8


def test_the_identity_of_a_saved_model(folder):
    path, result = folder("rtn(bits=8, group_size=-1)")
    model, _ = load_model(str(path), dtype="float32")
    assert weights_sha256(model) == weights_sha256(result.model)
    outline = skeleton(str(path))
    assert parameter_count(model) == parameter_count(outline) == counted(model) == folder.parameters
    assert {n: m.spec() for n, m in compressed_linears(outline).items()} == {
        n: m.spec() for n, m in compressed_linears(model).items()
    }
    half, _ = load_model(str(path), dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.model.rotary_emb.inv_freq.dtype == torch.float32
    name, linear = next(iter(compressed_linears(half).items()))
    assert torch.equal(weight_of(linear), weight_of(result.model.get_submodule(name)))
