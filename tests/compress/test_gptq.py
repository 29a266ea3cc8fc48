"""GPTQ against an independent implementation, its own bounds, and hard inputs."""

import pytest
import torch

from compress import METHODS, apply
from compress.grid.nearest import rtn
from compress.walk.hessian import factorise
from compress.walk.statistics import Collector
from compress.weights.gptq import column_order, gptq


def problem(out=24, columns=96, tokens=400, seed=0):
    """A weight and a Hessian with strongly correlated, unequal inputs, as activations are."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns) * 0.5
    x = torch.randn(tokens, columns, generator=g) @ mix * torch.rand(columns, generator=g).mul(3).exp()
    return torch.randn(out, columns, generator=g), 2 / tokens * x.T @ x


def loss(W, Q, H):
    D = (W - Q).double()
    return (D @ H.double() * D).sum().item()


def naive(W, H, scale, zero, bits, order, group_size, damp):
    """GPTQ as optimal brain quantisation states it: after each column, remove it from the inverse Hessian. float64."""
    W, H = W.double()[:, order].clone(), H.double()[order][:, order].clone()
    H += torch.eye(len(H)) * damp * H.diagonal().mean()
    inverse = torch.linalg.inv(H)
    codes = torch.zeros_like(W)
    for i in range(W.shape[1]):
        s, z = scale[:, order[i] // group_size].double(), zero[:, order[i] // group_size].double()
        codes[:, i] = ((W[:, i] / s).round() + z).clamp(0, 2**bits - 1)
        error = (W[:, i] - (codes[:, i] - z) * s) / inverse[i, i]
        W[:, i:] -= error[:, None] * inverse[i, i:]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return natural


@pytest.mark.in_turns
@pytest.mark.parametrize("order_name", ["none", "activation", "group"])
@pytest.mark.parametrize("bits, symmetric", [(4, True), (3, False), (8, True)])
def test_agrees_with_the_naive_algorithm(order_name, bits, symmetric):
    W, H = problem(columns=320)  # more than one block of 128
    order = column_order(H.diagonal(), order_name, 32)
    factor = factorise(H, 0.01, order)
    result = gptq(W, factor, bits=bits, group_size=32, symmetric=symmetric, scale="absmax", refit=False)
    scale = result.scale.float()
    from kernels.int_matmul import unpack

    codes, zero = unpack(result.packed)
    expected = naive(W, H, scale, zero.expand(scale.shape), bits, order, 32, 0.01)
    # Some roundings lie on an edge that float32 takes differently, and every later column then differs a little.
    assert (codes == expected).double().mean() > (0.9 if bits == 8 else 0.97)
    Q = (expected - zero.expand(scale.shape).repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    assert loss(W, result.dequantize(), H) == pytest.approx(loss(W, Q, H), rel=0.02)


@pytest.mark.in_turns
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [16, 96])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", ["none", "activation", "group"])
def test_beats_rounding_on_the_same_grid(bits, group_size, symmetric, order):
    W, H = problem()
    factor = factorise(H, 0.01, column_order(H.diagonal(), order, group_size))
    grid = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    # Two symmetric bits that just cover a group clip half a step of its largest weight: there, only search is sure to
    # win.
    for scale in ("search",) if bits == 2 and symmetric else ("absmax", "search"):
        Q = gptq(W, factor, **grid, scale=scale, refit=order != "activation")
        assert loss(W, Q.dequantize(), H) < loss(W, rtn(W, **grid, scale=scale).dequantize(), H)


def test_factor_pulls_what_gptq_pushes():
    """Against the paper's form in float64: the inverse's factor, and every error pushed on to all later columns."""
    W, H = problem()
    order = column_order(H.diagonal(), "activation", 16)
    factor = factorise(H, 0.01, order)
    damped = (H + torch.eye(len(H)) * 0.01 * H.diagonal().mean())[order][:, order].double()
    assert torch.equal(factor.R, factor.R.triu())
    assert torch.allclose(factor.R.double() @ factor.R.double().T, damped, rtol=1e-5, atol=1e-5)
    U = torch.linalg.cholesky(torch.linalg.inv(damped)).T  # H⁻¹ = Uᵀ U
    assert torch.allclose(factor.diagonal.double(), U.diagonal(), rtol=1e-3)
    assert torch.allclose(factor.inverse(20, 50).double(), U[20:50, 20:50], rtol=1e-3, atol=1e-4)
    Wt, errors = W.t()[order], torch.randn(W.shape[1], W.shape[0]) / 10
    pushed = Wt.double()
    for i in range(33):
        q = Wt[i] - errors[i]
        pushed[i:] -= torch.outer(U[i, i:], (pushed[i] - q) / U[i, i])
    assert torch.allclose(factor.updated(Wt, errors, 33, 70).double(), pushed[33:70], atol=1e-3)


def test_first_tokens_count_sink_weight_times():
    x = torch.randn(3, 40, 16)
    collector = Collector("x", METHODS["gptq"].statistics, 16, x.device)
    for part in x.split(2):
        collector.update(part)
    statistics = collector.result()
    rows = torch.cat([x.flatten(0, 1), x[:, 0], x[:, 0]])
    method, H = METHODS["gptq"](sink_weight=3), 2 / 120 * rows.T @ rows
    factor = factorise(statistics.values["gram"], 0.0, torch.arange(16), method.first_tokens(statistics))
    assert torch.allclose(factor.R @ factor.R.T, H, atol=1e-4)
    assert torch.allclose(method.diagonal(statistics), H.diagonal(), atol=1e-4)
    assert METHODS["gptq"](sink_weight=1).first_tokens(statistics) is None


def test_orders_are_permutations_and_group_order_keeps_groups_whole():
    diagonal = torch.rand(96)
    for order in ("none", "activation", "group"):
        assert sorted(column_order(diagonal, order, 16).tolist()) == list(range(96))
    groups = column_order(diagonal, "group", 16).view(-1, 16) // 16
    assert (groups == groups[:, :1]).all()
    first = column_order(diagonal, "group", 16)[0]
    assert first == diagonal.argmax()


def test_dead_columns_get_zero_and_a_note():
    W, H = problem()
    dead = [3, 50]
    H[dead] = 0
    H[:, dead] = 0
    factor = factorise(H, 0.01, column_order(H.diagonal(), "group", 16))
    assert factor.dead.sum() == 2 and "2 input columns are always 0" in factor.notes[0]
    Q = gptq(W, factor, bits=4, group_size=16)
    assert (Q.dequantize()[:, dead] == 0).all() and torch.isfinite(Q.dequantize()).all()


def test_damping_rises_and_is_recorded():
    x = torch.randn(4, 96)  # rank 4 of 96
    factor = factorise(2 / 4 * x.T @ x, 0.0, torch.arange(96))
    assert factor.damp > 0 and "damping raised from 0" in factor.notes[0]
    Q = gptq(torch.randn(8, 96), factor, bits=4, group_size=16)
    assert torch.isfinite(Q.dequantize()).all()


def test_hopeless_hessians_are_errors():
    with pytest.raises(ValueError, match="NaN or infinity"):
        factorise(torch.full((8, 8), float("nan")), 0.01, torch.arange(8))
    with pytest.raises(ValueError, match="`damp`"):
        factorise(-torch.ones(8, 8) * 1e6 + torch.eye(8), 0.01, torch.arange(8))


def test_experts_with_few_tokens_are_rounded_and_say_so(tiny, tokens):
    result = apply([METHODS["gptq"](group_size=16, min_tokens=10**6)], tiny("mixtral"), tokens())
    assert all(
        "rounded to nearest" in r.notes[0] and r.error == pytest.approx(r.rtn_error, rel=0.6) for r in result.layers
    )
    result = apply([METHODS["gptq"](group_size=16, min_tokens=40)], tiny("qwen3_moe"), tokens())
    rounded = [r for r in result.layers if any("rounded to nearest" in n for n in r.notes)]
    assert all(("experts" in r.name) and r.tokens < 40 for r in rounded) and 0 < len(rounded) < len(result.layers)


def test_shared_input_shares_one_factor(tiny, tokens, monkeypatch):
    made = []
    monkeypatch.setattr("compress.weights.gptq.factorise", lambda *a: made.append(1) or factorise(*a))
    apply([METHODS["gptq"](group_size=16, min_tokens=8)], tiny("llama"), tokens())
    assert len(made) == 2 * 4  # per block: q/k/v, o, gate/up, down
