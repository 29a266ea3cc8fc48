"""What notebooks show of inputs: ranges of what weights meet, and pictures of the inputs with the largest channels."""

import copy

import pytest
import torch

from compress import METHODS, apply
from notebooks.study.inputs import inputs_of
from notebooks.study.precision import below_full, each_before


def test_ranges_are_those_of_what_the_weights_meet(tiny, tokens, with_outliers):
    model, batches = with_outliers(tiny("llama"), 20), tokens(2)
    small = apply([METHODS["rotate"](), METHODS["activations"](bits=4)], copy.deepcopy(model)).model
    inputs = inputs_of({"16 bits": model, "compressed": small}, batches)
    assert len(inputs.pictures) == 2 and {len(row) for row in inputs.pictures.values()} == {2}
    (title,) = (one for one in inputs.pictures if one.endswith("gate_proj"))
    block = int(title.split()[1])
    seen, name = [], f"model.layers.{block}.mlp.gate_proj"
    handle = model.model.layers[block].mlp.gate_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    model(batches[0])
    handle.remove()
    largest = seen[0].abs().amax(0)
    found = inputs.found()["16 bits"][name]
    assert found.max == pytest.approx(largest.max().item()) and found.median == pytest.approx(largest.median())
    centred = seen[0].double() - seen[0].double().mean(1, keepdim=True)
    kurtosis = (centred.pow(4).mean(1) / centred.square().mean(1) ** 2).mean().item()
    assert found.kurtosis == pytest.approx(kurtosis, rel=1e-4)
    assert len(inputs.found()["compressed"]) == 8, "linears that share an input are one row"
    rotated = inputs.found()["compressed"][name]
    assert rotated.outlier < 0.5 * found.outlier
    picture = inputs.pictures[title]["16 bits"]
    expected = seen[0].abs() / seen[0].square().mean(1, keepdim=True).sqrt()
    assert torch.allclose(torch.from_numpy(picture), expected, atol=1e-5)
    html = inputs._repr_html_()
    assert html.count("<img") == 3 and "16 bits" in html and "could not be drawn" not in html


def test_recipes_from_bits():
    assert below_full(4, "rtn(bits=4)") == "rtn(bits=4)" and below_full(16, "rtn(bits=16)") == ""
    assert each_before("a: smoothquant; rotate", "rtn") == "a: smoothquant, rtn; rotate, rtn"
    assert each_before("", "rtn") == "" and each_before("rotate", "") == "rotate"
