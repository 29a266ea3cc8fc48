"""GPTAQ against the paper's algorithm in float64, and the two streams that its statistics are made of."""

import pytest
import torch

from compress import METHODS, apply
from compress.walk.hessian import factorise
from compress.walk.statistics import Collector
from compress.weights.gptaq import correction
from compress.weights.gptq import column_order, gptq

GPTAQ = METHODS["gptaq"]


def streams():
    """W [24, 32], and what the linear reads after compressed blocks and in the unquantised model, [400, 32] each."""
    mixing = torch.randn(32, 32)
    X = torch.randn(400, 32) @ mixing
    return torch.randn(24, 32), X, X + 0.2 * torch.randn(400, 32) @ mixing + 0.1 * X.roll(1, 1)


@pytest.mark.parametrize("order", ["none", "activation"])
def test_the_papers_algorithm_in_float64(order):
    W, X, original = streams()
    H, C = 2 / 400 * X.T @ X, 2 / 400 * (original - X).T @ X
    order = column_order(H.diagonal(), order, 32)
    factor = factorise(H, 0.01, order)
    corrected = W + W @ correction(C, factor)
    stored = gptq(corrected, factor, bits=4, group_size=32, refit=False)
    scale = stored.packed.scale[:, 0].double()
    damped = (H + 0.01 * H.diagonal().mean() * torch.eye(32))[order][:, order].double()
    U = torch.linalg.cholesky(torch.linalg.inv(damped)).T  # H⁻¹ = Uᵀ U
    P = (C[order][:, order].double() @ U.T).triu(1) @ U
    w, weights = W[:, order].double(), W[:, order].double()
    expected = torch.empty_like(w)
    for j in range(32):
        expected[:, j] = (w[:, j] / scale).round().clamp(-8, 7) * scale
        error = (w[:, j] - expected[:, j]) / U[j, j]
        w[:, j:] += weights[:, j : j + 1] * P[j, j:] - error[:, None] * U[j, j:]
    same = (stored.dequantize()[:, order].double() - expected).abs() < 1e-6
    assert same.double().mean() > 0.99, "a weight half-way between two codes may go either way"


def test_its_outputs_are_nearer_to_those_of_the_unquantised_model():
    W, X, original = streams()
    H, C = 2 / 400 * X.T @ X, 2 / 400 * (original - X).T @ X
    factor = factorise(H, 0.01, column_order(H.diagonal(), "group", 8))
    loss = {}
    for alpha in (0.0, 0.5, 1.0):
        stored = gptq(W + alpha * W @ correction(C, factor), factor, bits=3, group_size=8)
        loss[alpha] = (X @ stored.dequantize().T - original @ W.T).square().sum()
    assert loss[1.0] < loss[0.5] < loss[0.0]


@pytest.mark.parametrize("held", [1 << 29, 0])
def test_statistics_pair_the_two_streams(tiny, tokens, monkeypatch, held):
    """What the walk collected, against hooks on the compressed and on the original model."""
    monkeypatch.setattr("compress.walk.original.lockstep.HELD_BYTES", held)
    name, seen, batches = "model.layers.1.mlp.gate_proj", {}, tokens()
    solve = GPTAQ.solve

    def spy(self, W, statistics):
        seen[statistics.name] = {key: value.clone() for key, value in statistics.values.items()}
        return solve(self, W, statistics)

    monkeypatch.setattr(GPTAQ, "solve", spy)
    model = apply([GPTAQ(bits=3, group_size=16, min_tokens=8)], tiny("llama"), batches).model
    read = []
    for one in (model, tiny("llama")):
        inputs = []
        handle = one.get_submodule(name).register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0]))
        [one(batch) for batch in batches]
        handle.remove()
        read.append(torch.cat(inputs))
    X, original = read
    difference = original - X
    n = X.shape[0] * X.shape[1]
    C = 2 / n * difference.flatten(0, 1).T @ X.flatten(0, 1)
    assert torch.allclose(seen[name]["cross"], C, atol=1e-5 * C.abs().max().item() + 1e-6)
    assert torch.allclose(seen[name]["cross_starts"], difference[:, 0], atol=1e-5)
    first = seen["model.layers.0.self_attn.q_proj"]
    assert not first["cross"].any() and not first["cross_starts"].any(), "the streams begin alike"


def test_alpha_0_is_without_and_inputs_of_chosen_tokens_are_not_paired(tiny, tokens):
    plain = apply([METHODS["gptq"](bits=3, group_size=16, min_tokens=8)], tiny("mixtral"), tokens()).model
    same = apply([GPTAQ(bits=3, group_size=16, min_tokens=8, alpha=0.0)], tiny("mixtral"), tokens()).model
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), same.state_dict().values(), strict=True))
    collector = Collector("x", GPTAQ.statistics, 16, torch.device("cpu"))
    collector.update(torch.randn(5, 16), original=torch.randn(5, 16))
    values = collector.result().values
    assert values["cross"].shape == values["cross_starts"].shape == (0, 16)


def test_calibrated_once_it_is_gptq_and_says_so(tiny, tokens):
    """In a pass of the model as it is there is no second stream: nothing is kept of it, and the record says it."""
    knobs = {"bits": 3, "group_size": 16, "min_tokens": 8}
    plain = apply([METHODS["gptq"](**knobs)], tiny("llama"), tokens(), calibrate="once").model
    result = apply([GPTAQ(**knobs)], tiny("llama"), tokens(), calibrate="once")
    states = plain.state_dict().values(), result.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert all(any("plain GPTQ" in note for note in layer.notes) for layer in result.layers)
