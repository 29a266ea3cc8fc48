"""Models run in emulated number formats, and given back as they were."""

import json
from pathlib import Path

import pytest
import torch

from compress.floats import E4M3, Float, float_named
from compress.grid.emulate import OPS, emulate, table_softmax
from compress.linear import is_linear, weight_of


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_rounded_while_it_lasts(family, tiny, tokens):
    model, ids = tiny(family), tokens(1)[0]
    linears = {name: weight_of(module) for name, module in model.named_modules() if is_linear(module)}
    before = model(ids).logits
    with emulate(model, "e4m3", inputs=True):
        for name, W in linears.items():
            expected = W.to(torch.float8_e4m3fn).float()
            assert torch.equal(weight_of(model.get_submodule(name)), expected)
        rounded = model(ids).logits
    assert not torch.equal(rounded, before) and (rounded - before).norm() < 0.5 * before.norm()
    with emulate(model, "e8m7"):
        wide = model(ids).logits
    assert (wide - before).norm() < (rounded - before).norm()
    with emulate(model, "mxfp4"), emulate(model, E4M3, rounding="stochastic"):
        assert torch.isfinite(model(ids).logits).all()
    assert torch.equal(model(ids).logits, before)


def test_inputs_are_rounded(tiny, tokens):
    model = tiny("llama")
    linear, seen = model.model.layers[0].mlp.gate_proj, []
    linear.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    with emulate(model, "e2m1", inputs=True):
        model(tokens(1)[0])
        x, y = seen[0]
        assert set(x.abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}
        assert torch.allclose(y, x @ linear.weight.t(), atol=1e-4)


@pytest.mark.parametrize("grid, rounding, what", [("e9x", "nearest", "`grid`"), ("e4m3", "odd", "`rounding`"),
                                                  ("nf4", "up", "`rounding`")])  # fmt: skip
def test_formats_that_there_are_not(grid, rounding, what, tiny):
    with pytest.raises(ValueError, match=what), emulate(tiny("llama"), grid, rounding=rounding):
        pass


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_each_operation_alone_and_all_in_integers(family, tiny, tokens):
    model, ids = tiny(family), tokens(1)[0]
    before, how = model(ids).logits, {"bits": 8, "group_size": 16, "scale_dtype": "tile16"}
    implementation, weights = model.config._attn_implementation, {k: v.clone() for k, v in model.state_dict().items()}
    for op in OPS:
        with emulate(model, "int", ops=(op,), **how):
            change = (model(ids).logits - before).norm() / before.norm()
        assert 0 < change < 0.1, op
    with emulate(model, "int", ops=OPS, inputs=True, **how):
        changes = [(model(ids).logits - before).norm()]
    with emulate(model, "int", ops=OPS, inputs=True, **how | {"bits": 4}):
        changes.append((model(ids).logits - before).norm())
    assert changes[0] < 0.2 * before.norm() and changes[0] < changes[1]
    assert model.config._attn_implementation == implementation and torch.equal(model(ids).logits, before)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_outputs_of_norms_and_activations_lie_on_the_grid(tiny, tokens):
    model, seen = tiny("llama"), []
    with emulate(model, "e2m1", ops=("norms", "activations")):
        for module in (model.model.norm, model.model.layers[0].mlp.act_fn):
            module.register_forward_hook(lambda _, args, output: seen.extend([args[0], output]))
        model(tokens(1)[0])
    assert len(seen) == 4
    for x in seen:
        assert set(x.abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def test_softmax_by_a_table():
    scores = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)) * 4
    scores[..., 30:] = torch.finfo(torch.float32).min
    exact = scores.softmax(-1)
    errors = [(table_softmax(scores, -1, 1 << bits) - exact).abs().sum(-1).mean() for bits in (4, 8, 12)]
    assert errors[0] > errors[1] > errors[2] and errors[1] < 0.05
    by_table = table_softmax(scores, -1, 256)
    assert torch.allclose(by_table.sum(-1), torch.ones(3, 5)) and not by_table[..., 30:].any()
    whole = by_table / by_table.amax(-1, keepdim=True) * 255
    assert torch.allclose(whole, whole.round(), atol=1e-3)


def test_operations_that_there_are_not(tiny):
    with pytest.raises(ValueError, match="`ops`.*rope"), emulate(tiny("llama"), "int", ops=("rope",)):
        pass
    with pytest.raises(ValueError, match="`scale_dtype`"), emulate(tiny("llama"), "int", scale_dtype="e9"):
        pass
    with (
        pytest.raises(ValueError, match=r"`group_size` \(=48\) must divide"),
        emulate(tiny("llama"), "int", group_size=48),
    ):
        pass


GOLDEN = json.loads((Path(__file__).parent / "pychop_golden.json").read_text())  # pychop 0.6.2; `command` wrote it


@pytest.mark.parametrize("name", GOLDEN["formats"])
def test_roundings_are_those_of_pychop_bit_for_bit(name):
    """Of subnormal numbers, of the largest ones, and of values in the middle between two, in both precisions."""
    table = {key: torch.tensor(values, dtype=torch.float64) for key, values in GOLDEN["formats"][name].items()}
    x = table.pop("x")
    exponent, mantissa = map(int, name[1:].split("m"))
    assert set(table) == {"nearest", "up", "down", "zero"} and len(x) > 30 and torch.equal(x, x.float().double())
    assert all((rounded != x).sum() > 20 for rounded in table.values()), "most values are no numbers of the format"
    for ours in (Float(exponent, mantissa, specials=True), float_named(name)):
        for rounding, theirs in table.items():
            for precision in (torch.float64, torch.float32):
                found = ours.round(x.to(precision), rounding).double()
                assert torch.equal(found, theirs) and torch.equal(found.signbit(), theirs.signbit()), rounding
