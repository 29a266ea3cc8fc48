"""One bit a weight: signs with a scale by row and by group, with error feedback, and a second bit for salient columns."""

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.correction.salient_signs import column_count, salient_signs
from compress.formats import FORMATS, bits_of
from compress.grid.nearest import rtn
from compress.linear import compressed_linears
from compress.walk.hessian import factorise
from compress.weights.gptq import column_order, gptq

SIGNS = {"bits": 1, "grid": "binary"}


def weights(out: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(out, columns) * torch.rand(out, 1).mul(3).exp() * 0.02


def inputs(columns: int = 96, tokens: int = 400) -> torch.Tensor:
    return torch.randn(tokens, columns) @ torch.randn(columns, columns) * torch.rand(columns).mul(3).exp()


@pytest.mark.parametrize("group_size", [-1, 32])
def test_scales_are_mean_magnitudes_and_no_other_is_better(group_size):
    W = weights()
    size = 96 if group_size == -1 else group_size
    Q = rtn(W, group_size=group_size, scale_dtype="float32", **SIGNS).dequantize().double()
    groups, signs = W.double().view(24, -1, size), W.double().sign().view(24, -1, size)
    alpha = groups.abs().mean(-1, keepdim=True)
    assert torch.allclose(Q.view(24, -1, size), alpha * signs, rtol=1e-6)
    best = (groups * signs).sum(-1, keepdim=True) / signs.square().sum(-1, keepdim=True)
    assert torch.allclose(alpha, best), "the solution of least squares"


def test_important_columns_decide_the_scale():
    W, importance = weights(), torch.rand(96).mul(6).exp()
    Q = rtn(W, group_size=48, scale="search", scale_dtype="float32", importance=importance, **SIGNS).dequantize()
    w, d, s = (t.double().view(-1, 2, 48) for t in (W, importance.expand(24, 96), W.sign()))
    best = (d * w * s).sum(-1, keepdim=True) / (d * s * s).sum(-1, keepdim=True)
    assert torch.allclose(Q.double().view(24, 2, 48), best * s, rtol=1e-5)


def test_smaller_groups_and_error_feedback_lose_less():
    W, X = weights(), inputs()
    H = 2 / len(X) * X.T @ X
    factor = factorise(H, 0.01, column_order(H.diagonal(), "group", 16))

    def lost(stored) -> float:
        return float(((W - stored.dequantize()) @ X.T).norm())

    rows, groups = (rtn(W, group_size=size, **SIGNS) for size in (-1, 16))
    corrected = gptq(W, factor, group_size=16, scale="search", **SIGNS)
    assert lost(corrected) < lost(groups) and (W - groups.dequantize()).norm() < (W - rows.dequantize()).norm()
    table = 2 * 32 / W.numel()
    assert groups.bits_per_weight - table == pytest.approx(1 + 16 / 16)
    assert rows.bits_per_weight - table == pytest.approx(1 + 16 / 96)


def test_zeros_stay_small():
    W = torch.zeros(3, 32)
    W[0] = 1.0
    Q = rtn(W, group_size=16, **SIGNS).dequantize()
    assert torch.equal(Q[0], W[0]) and Q[1:].abs().max() < 1e-20


def test_the_second_bit_goes_to_the_columns_whose_error_weighs_most():
    """Without correlations, in float64, with a loop over the columns."""
    R, d = weights().double(), torch.rand(96).mul(5).exp().double()
    stored = salient_signs(R.float(), torch.diag(d).float(), share=0.1)
    gain = [float(d[j] * (R[:, j] ** 2).sum()) for j in range(96)]
    chosen = sorted(sorted(range(96), key=lambda j: -gain[j])[:10])
    expected = torch.zeros_like(R)
    for i in range(24):
        alpha = sum(d[j] * R[i, j].abs() for j in chosen) / sum(d[j] for j in chosen)
        for j in chosen:
            expected[i, j] = alpha * R[i, j].sign()
    assert torch.allclose(stored.dequantize().double(), expected, rtol=2**-8)
    x = torch.randn(5, 96)
    assert torch.allclose(stored.matmul(x), x @ stored.dequantize().T, atol=1e-4)
    again = FORMATS["columns"].from_tensors(stored.spec(), stored.state_dict())
    assert torch.equal(again.dequantize(), stored.dequantize())


def test_no_row_loses_more_where_the_error_is_compensated():
    """Behind GPTQ, whose errors cancel in the output: signs of the error itself would break that."""
    W, X = weights(), inputs()
    H = 2 / len(X) * X.T @ X
    first = gptq(W, factorise(H, 0.01, torch.arange(96)), group_size=96, scale="search", **SIGNS).dequantize()
    R = (W - first).double()
    stored = salient_signs(R.float(), H, share=0.2)
    D, H = stored.dequantize().double(), H.double()
    before, after = ((E @ H * E).sum(1) for E in (R, R - D))
    assert (after <= before * (1 + 1e-4)).all() and after.sum() < 0.97 * before.sum()
    S = stored.chosen.bool()
    for i in range(24):  # no other scale of these signs is better
        b = D[i].sign()
        assert D[i, S].abs().amax() == pytest.approx(abs(float((b @ H @ R[i]) / (b @ H @ b))), rel=2**-7)


def test_the_second_bit_costs_its_share_and_lowers_the_error(tiny, tokens, tmp_path):
    first = "gptq(bits=1, group_size=16, grid=binary, min_tokens=8)"
    alone = apply(first, tiny("llama"), tokens())
    both = apply(f"{first}, salient_signs(share=0.25)", tiny("llama"), tokens())
    before = {layer.name: layer.error for layer in alone.layers}
    after = {layer.name: layer.error for layer in both.layers if "columns" in layer.format}
    assert len(after) == len(before)
    assert sum(after.values()) < sum(before.values())
    method = METHODS["salient_signs"](share=0.25)
    assert bits_of(method.stores((64, 64))) == pytest.approx(0.25 * (1 + 16 / 16) + 2 * 32 / 64**2)
    for linear in compressed_linears(both.model).values():
        shape = (linear.out_features, linear.in_features)
        assert linear.spec()["parts"][1:] == method.stores(shape)
        exact = 2 + column_count(0.25, shape[1]) / shape[1] + 16 / shape[1] + 8 / shape[0]
        tables = 2 * 2 * 32 / (shape[0] * shape[1])
        assert linear.bits_per_weight == pytest.approx(exact + tables)
    again, ids = load_compressed(save_compressed(both, tmp_path / "out")), tokens(1)[0]
    assert torch.allclose(again(ids).logits, both.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("rtn(bits=1, group_size=16)", r"`bits` \(=1\) of rtn: integers have 2, 3, .* signs alone are grid='binary'"),
        ("rtn(bits=2, group_size=16, grid=binary)", r"`grid` \(='binary'\) of rtn has codes of 1 bits"),
        ("magnitude, rtn(bits=1, group_size=16, grid=binary)", r"`grid` \(='binary'\) of rtn has no 0"),
        ("salient_signs", "corrects what an earlier method"),
        ("rtn, salient_signs(share=0.7)", r"`share` \(=0.7\) of salient_signs must lie between 0 and 0.5"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, message, tiny, tokens):
    with pytest.raises(ValueError, match=message):
        apply(recipe, tiny("llama"), tokens())
