"""QTIP: what it stores, against GPTQ on the same inputs, and one file in and out."""

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.formats import FORMATS
from compress.formats.trellis import signs_for, turn, turn_back
from compress.linear import compressed_linears
from compress.walk.hessian import factorise
from compress.weights.gptq import gptq
from compress.weights.qtip import qtip
from kernels.hadamard import hadamard_matrix


def correlated(rows=96, columns=80, tokens=400):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    X = torch.randn(tokens, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), 2 / tokens * X.t() @ X


def rotated_factor(H, signs):
    turned = turn(turn(H, signs).t().contiguous(), signs)
    return factorise(turned, 0.01, torch.arange(len(H)))


def loss(W, stored, H):
    D = W - stored.dequantize()
    return (D @ H * D).sum().item()


@pytest.mark.parametrize("n", [64, 576, 42])
def test_the_rotation_is_orthogonal(n):
    signs = signs_for(n, 0)
    eye = torch.eye(n)
    Q = turn(eye, signs)
    assert torch.allclose(Q @ Q.t(), eye, atol=1e-5) and torch.allclose(turn_back(Q, signs), eye, atol=1e-5)
    assert signs.abs().eq(1).all() and torch.equal(signs, signs_for(n, 0)) and not torch.equal(signs, signs_for(n, 1))
    if n != 42:  # 42 = 21 blocks of 2
        assert torch.allclose(Q, signs[:, None] * hadamard_matrix(n) / n**0.5, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_less_error_than_gptq_on_a_table(bits):
    W, H = correlated()
    signs = signs_for(80, 0)
    stored = qtip(W, rotated_factor(H, signs), signs, bits=bits, states=12)
    plain = qtip(W, None, signs, bits=bits, states=12)
    grid = gptq(
        W, factorise(H, 0.01, torch.arange(80)), bits=bits, group_size=40, grid="iq4_nl" if bits == 4 else f"nl{bits}"
    )
    assert loss(W, stored, H) < 0.9 * loss(W, grid, H) and loss(W, stored, H) < 0.8 * loss(W, plain, H)


def test_stored_bytes_and_values_of_trellis_codes():
    W, _ = correlated(rows=100)
    W[3] = 0
    signs = signs_for(80, 0)
    stored = qtip(W, None, signs, bits=3, states=12)
    # 100 rows are one walk of 112; two bytes a row and a column, a bit for each sign
    assert stored.nbytes == 80 * 112 * 3 // 8 + 2 * 100 + 2 * 80 + 10
    assert stored.spec() == METHODS["qtip"](bits=3, states=12).stores((100, 80))[0]
    assert not stored.dequantize()[3].any() and torch.isfinite(stored.dequantize()).all()
    again = FORMATS["trellis"].from_tensors(stored.spec(), stored.state_dict())
    assert torch.equal(again.dequantize(), stored.dequantize())
    again.for_compute(torch.float32, torch.device("cpu"))
    again.to(torch.bfloat16)
    assert again.row.dtype == torch.bfloat16 and again.flips.dtype == torch.float32
    for tokens in (1, 5, 30):
        x = torch.randn(tokens, 80)
        assert torch.allclose(again.matmul(x), x @ stored.dequantize().t(), atol=2e-3)


def test_saved_and_loaded_and_refused_elsewhere(tiny, tokens, tmp_path):
    recipe = [METHODS["qtip"](bits=2, states=12, min_tokens=8)]
    result = apply(recipe, tiny("llama"), tokens())
    record = result.layers[0]
    assert record.format == "trellis" and 0 < record.error < 0.5
    save_compressed(result, tmp_path / "out")
    again = load_compressed(tmp_path / "out")
    ids = tokens(1, 17)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)
    assert all(linear.parts[0].name == "trellis" for linear in compressed_linears(again).values())
    for other in ("compressed-tensors", "gptq"):
        with pytest.raises(ValueError, match="cannot hold|trellis"):
            save_compressed(result, tmp_path / other, save_format=other)


def test_a_linear_that_few_tokens_reach_is_not_corrected(tiny, tokens):
    result = apply([METHODS["qtip"](bits=2, states=12, min_tokens=10_000)], tiny("llama"), tokens())
    assert all("not corrected" in record.notes[0] for record in result.layers)
