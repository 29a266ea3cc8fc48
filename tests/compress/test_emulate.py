"""Models run in emulated number formats, and given back as they were."""

import pytest
import torch

from compress.grid.emulate import emulate
from compress.grid.floats import E4M3
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
