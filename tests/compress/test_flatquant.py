"""FlatQuant changes no output without rounding, shares maps where inputs are shared, and mends what four bits break."""

import copy

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.method import settle
from compress.recipe import parse_recipe
from compress.rotations import flatquant, flattening
from compress.rotations.flattening import Flat, InvertibleFactor, balance, round_through, start_of
from compress.transforms import Kronecker, Rounding

FLAT = METHODS["flatquant"]
ROUNDED = "rtn(bits=4, group_size=16), activations(bits=4)"


def relative(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def trained_map(n, left=0):
    """One whose matrices and factors are not those of the start."""
    flat = Flat(start_of(torch.ones(n), left, 3))
    for p in flat.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return flat


@pytest.mark.parametrize("n, left", [(64, 0), (96, 4), (30, 0), (7, 0)])
def test_the_map_and_the_folded_weight_are_those_of_the_whole_matrix(n, left):
    flat = trained_map(n, left)
    one = flat.result()
    P = one.scale[:, None].double() * torch.kron(one.left.double(), one.right.double())
    x, W = torch.randn(2, 5, n), torch.randn(11, n)
    torch.testing.assert_close(one(x), (x.double() @ P).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.fold(W), (W.double() @ torch.linalg.inv(P).T).float(), rtol=1e-3, atol=1e-3)
    assert relative(one(x) @ one.fold(W).t(), x @ W.t()) < 1e-5
    start = start_of(torch.ones(n), left, 0)
    whole = torch.kron(start.left, start.right)
    torch.testing.assert_close(whole @ whole.t(), torch.eye(n), rtol=1e-4, atol=1e-5)
    for matrix, inverse in map(InvertibleFactor.matrices, (flat.left, flat.right)):
        torch.testing.assert_close(matrix @ inverse.t(), torch.eye(len(matrix)), rtol=1e-4, atol=1e-4)


def test_rounding_is_that_of_the_activations_and_its_gradient_reaches_the_step():
    x = torch.randn(5, 64, requires_grad=True)
    for group in (16, -1):
        y = round_through(x, 4, group)
        torch.testing.assert_close(y, Rounding(4, group_size=group)(x.detach()))
    with torch.no_grad():
        row = x[0].detach()
        top = row.abs().argmax()
        units = row / row[top].abs() * 7
    y[0].sum().backward()
    expected = torch.ones(64)
    expected[top] += (units.round() - units).sum() * row[top].sign() / 7
    torch.testing.assert_close(x.grad[0], expected, rtol=1e-4, atol=1e-4)


def test_no_other_factors_balance_better():
    x, W = torch.randn(50, 16) * torch.rand(16), torch.randn(9, 16) * torch.rand(16)
    unit = x / x.norm(dim=1, keepdim=True)

    def error(s):
        return ((unit * s).square().sum() * (W / s).square().sum()).item()

    s = balance(x, W)
    tried = [error(s * (0.05 * torch.randn(16)).exp()) for _ in range(50)]
    assert error(s) * (1 - 1e-4) < min(tried) and error(s) < 0.8 * error(torch.ones(16))


def test_the_function_stays_and_comes_back_from_disk(any_model, tokens, tmp_path):
    ids = torch.cat(tokens(2, 9))
    expected = any_model(ids).logits
    result = apply([FLAT(steps=2)], any_model, tokens(2))
    assert relative(any_model(ids).logits, expected) < 1e-4
    assert {fold.kind for fold in result.folds} == {"online map"}
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, any_model(ids).logits)
    copied = copy.deepcopy(again).to(torch.bfloat16)
    assert all(m.scale.dtype == torch.float32 for m in copied.modules() if isinstance(m, Kronecker))
    assert relative(copied(ids).logits.float(), expected) < 0.1


def test_inputs_that_are_shared_share_a_map(tiny, tokens):
    model = tiny("llama")
    result = apply([FLAT(steps=1, skip="*.k_proj, *.0.mlp.*")], model, tokens(2))
    groups = {fold.consumers for fold in result.folds if ".1." in fold.name}
    assert groups == {
        tuple(f"model.layers.1.{name}" for name in names)
        for names in (("self_attn.q_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
                      ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    }  # fmt: skip
    mlp = model.model.layers[1].mlp
    assert torch.equal(mlp.gate_proj.transform.left, mlp.up_proj.transform.left)
    assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)
    # What a linear stores is W P⁻ᵀ, and later methods measure their errors on what it meets.
    original, one = tiny("llama").model.layers[1].mlp.up_proj.weight, mlp.up_proj
    P = one.transform.scale[:, None] * torch.kron(one.transform.left, one.transform.right)
    torch.testing.assert_close(one.dequantize() @ P.t(), original, rtol=1e-4, atol=1e-5)


def test_flatquant_lowers_the_error_of_four_bits_on_a_model_with_outliers(tiny, tokens, with_outliers, with_massive):
    *batches, ids = (batch.clamp_min(1) for batch in [*tokens(6), torch.cat(tokens(4, seed=2))])
    for batch in (*batches, ids):
        batch[:, 0] = 0
    plain = with_massive(tiny("llama", initializer_range=0.02))
    model, expected = with_outliers(plain, 20, inside=True), plain(ids).logits
    error = {}
    for text in ("", "rotate, ", "flatquant(steps=0, scales=False), ", "flatquant(steps=24), "):
        result = apply(parse_recipe(text + ROUNDED), copy.deepcopy(model), batches)
        error[text] = relative(result.model(ids).logits, expected)
    plain, rotated, drawn, trained = error.values()
    assert trained < 0.35 * plain and trained < 0.8 * min(rotated, drawn), error


def test_training_rounds_as_the_later_methods_of_the_recipe_do():
    method = settle(parse_recipe("flatquant, gptq(bits=3, group_size=32), activations(format=mxfp4)"))[0]
    assert (method.learn_bits, method.weight_bits, method.weight_columns) == (4, 3, 32)
    assert settle(parse_recipe("flatquant, activations(bits=8, group_size=64)"))[0].learn_columns == 64
    assert settle(parse_recipe("flatquant(learn_bits=8), rtn, activations(bits=4)"))[0].learn_bits == 8


def test_a_killed_run_goes_on_where_it_was(tiny, tokens, tmp_path, monkeypatch):
    ids, whole = tokens(1, 9)[0], apply([FLAT(steps=3)], tiny("llama"), tokens(3))
    calls = []
    monkeypatch.setattr(flatquant, "train", lambda *given: calls.append(given[1]) or flattening.train(*given))
    with monkeypatch.context() as patch:
        patch.setattr(flatquant, "fold_record", lambda *_, **__: 1 / len(calls[:-1]))  # fails in the first block
        with pytest.raises(ZeroDivisionError):
            apply([FLAT(steps=3)], tiny("llama"), tokens(3), work_path=tmp_path)
    again = apply([FLAT(steps=3)], tiny("llama"), tokens(3), work_path=tmp_path)
    assert calls == [0, 1], "the first block was trained once"
    assert torch.equal(again.model(ids).logits, whole.model(ids).logits)


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"left": 7}, r"`left` \(=7\) of flatquant must divide in_features \(=64\).*4, 8"),
        ({"learn_columns": 48}, r"`learn_columns` \(=48\)"),
        ({"weight_columns": 0}, r"`weight_columns` \(=0\) of flatquant must be 'auto', -1"),
        ({"skip": "*"}, r"`skip` \(='\*'\) of flatquant leaves no linear"),
    ],
)
def test_bad_knobs_are_refused_before_any_work(tiny, tokens, knobs, said):
    model = tiny("llama")
    with pytest.raises(ValueError, match=said):
        apply([FLAT(**knobs)], model, tokens())
    assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)


def test_formats_and_modes_without_flatquant_refuse_it(tiny, tokens, tmp_path):
    model = tiny("llama")
    result = apply([FLAT(steps=0, scales=False), METHODS["rtn"](group_size=16)], model)
    for name in ("gguf", "compressed-tensors", "gptq"):
        with pytest.raises(ValueError, match="no place for|cannot transform|transformed first"):
            save_compressed(result, tmp_path / name, save_format=name)
    for method in (FLAT(), METHODS["rotate"]()):
        with pytest.raises(ValueError, match="`model` holds linears of its blocks compressed or rotated already"):
            apply([method], model, tokens())
    with pytest.raises(ValueError, match=r"`calibrate` \(='once'\)"):
        apply([FLAT()], tiny("llama"), tokens(), calibrate="once")
