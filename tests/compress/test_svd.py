"""Weights as products of thin matrices: the truncation of SVD-LLM, ranks that keep a size, and ranks by layer."""

import copy
import itertools

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.correction.low_rank import low_rank
from compress.linear import compressed_linears
from compress.weights.svd import LEVELS, rank_of, share_out
from eval.machine.size import size


def stored(model) -> int:
    return size(copy.deepcopy(model).to(torch.bfloat16)).stored_bytes


@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_it_is_the_truncation_that_svd_llm_describes(shape):
    """W ≈ U_r Σ_r V_rᵀ S⁻¹ with U Σ Vᵀ = W S, in float64; what it loses is the root of the dropped squares."""
    out, columns = shape
    W, X = torch.randn(out, columns).double(), torch.randn(500, columns).double() * torch.rand(columns).mul(3).exp()
    H = 2 / len(X) * X.T @ X
    S = torch.linalg.cholesky(H)
    U, sigma, Vh = torch.linalg.svd(W @ S, full_matrices=False)
    expected = U[:, :12] @ torch.diag(sigma[:12]) @ Vh[:12] @ torch.linalg.inv(S)
    found = low_rank(W.float(), H.float(), rank=12).dequantize().double()
    assert (found - expected).norm() < 5e-3 * expected.norm(), "rounded to float16"
    error = ((W - found) @ S).norm()
    assert error == pytest.approx(sigma[12:].square().sum().sqrt().item(), rel=1e-3)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
def test_ranks_take_the_bytes_that_the_ratio_leaves(ratio, bits):
    for out, columns in ((64, 64), (1536, 576), (7, 300)):
        rank = rank_of((out, columns), ratio, bits)
        taken, may = rank * (out + columns) * bits / 8, (1 - ratio) * out * columns * 2
        full = rank == min(out, columns)
        assert (taken <= may + 1e-6 and (full or taken + (out + columns) * bits / 8 > may)) or rank == 1
    assert rank_of((4, 4), 0.95) == 1


def test_models_shrink_by_the_ratio_and_come_back(tiny, tokens, tmp_path):
    model, batches = tiny("llama"), tokens()
    before, lost = stored(model), []
    for ratio in (0.2, 0.5, 0.8):
        result = apply([METHODS["svd"](ratio=ratio)], copy.deepcopy(model), batches)
        shapes = [(one.out_features, one.in_features) for one in compressed_linears(result.model).values()]
        saved = sum(2 * (m * n - rank_of((m, n), ratio) * (m + n)) for m, n in shapes)
        assert before - stored(result.model) == saved >= ratio * sum(2 * m * n for m, n in shapes)
        lost.append(sum(layer.error for layer in result.layers))
        assert all(layer.notes[0].startswith("rank ") for layer in result.layers)
    assert lost == sorted(lost)
    again, ids = load_compressed(save_compressed(result, tmp_path / "out")), tokens(1)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)


def test_inputs_matter_as_the_knob_says(tiny, tokens):
    """By the error of the outputs on the calibration tokens, which the Gram matrix minimises."""
    lost = {}
    for weights in ("hessian", "scale", "none"):
        method = METHODS["svd"](ratio=0.6, weights=weights, sink_weight=1.0, sequential=False)
        layers = apply([method], tiny("llama"), tokens()).layers
        lost[weights] = next(layer.error for layer in layers if layer.name.endswith("0.self_attn.q_proj"))
    assert lost["hessian"] < lost["scale"] and lost["hessian"] < lost["none"]


def test_ratios_are_shared_out_at_the_least_distortion():
    """Against every combination of the measured levels, where all layers have as many weights."""
    generator = torch.Generator().manual_seed(0)
    curves = {}
    for name in "abc":
        steps = torch.rand(len(LEVELS), generator=generator).cumsum(0) + (10.0 if name == "b" else 0.0)
        curves[name] = dict(zip(LEVELS, steps.tolist(), strict=True))
    found = share_out(curves, dict.fromkeys("abc", 1000), 0.4)
    assert sum(found.values()) >= 3 * 0.4 - 1e-9 and found["b"] == 0.0, "it would lose most"

    def lost(ratios: dict[str, float]) -> float:
        """With straight lines between the roots."""
        total = 0.0
        for name, ratio in ratios.items():
            if ratio:
                low = max(level for level in LEVELS if level <= ratio + 1e-9)
                high = min(level for level in LEVELS if level >= ratio - 1e-9)
                share = 0.0 if high == low else (ratio - low) / (high - low)
                root = (1 - share) * curves[name][low] ** 0.5 + share * curves[name][high] ** 0.5
                total += root**2
        return total

    for ratios in itertools.product((0.0, *LEVELS), repeat=3):
        if sum(ratios) >= 1.2 - 1e-9:
            assert lost(found) <= lost(dict(zip("abc", ratios, strict=True))) + 1e-9


def test_layers_that_matter_keep_more(tiny, tokens):
    model, batches = tiny("llama", num_hidden_layers=3), tokens()
    with torch.no_grad():  # a layer that hardly matters, and one that matters much
        model.model.layers[0].mlp.down_proj.weight.mul_(0.02)
        model.model.layers[2].mlp.down_proj.weight.mul_(3)
    ratio = 0.4
    result = apply([METHODS["svd"](ratio=ratio, allocation="adaptive", curve_tokens=64)], copy.deepcopy(model), batches)
    even = apply([METHODS["svd"](ratio=ratio)], copy.deepcopy(model), batches)
    assert stored(result.model) <= stored(even.model) * 1.01
    by_name = {layer.name.removeprefix("model.layers."): layer for layer in result.layers}
    assert by_name["0.mlp.down_proj"].bits_per_weight < by_name["2.mlp.down_proj"].bits_per_weight
    assert set(by_name["0.mlp.down_proj"].distortion) == {f"{level:g}" for level in LEVELS}
    assert any("stays as it is" in note for layer in result.layers for note in layer.notes)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("svd(ratio=0.99)", r"`ratio` \(=0.99\) of svd must lie between 0 and 0.95"),
        ("svd(ratio=0.9, allocation=adaptive)", r"`ratio` \(=0.9\) of svd must be at most 0.8 with `allocation`"),
        ("svd(where=all)", r"`where` \(='all'\) of svd must be 'blocks'"),
        ("wanda, svd", "would fill the zeros that wanda"),
        ("svd, activations", "activations would round nothing after svd"),
        ("svd, gptq", "both are of the kind 'quantize_weights'"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, message, tiny, tokens):
    with pytest.raises(ValueError, match=message):
        apply(recipe, tiny("llama"), tokens())
