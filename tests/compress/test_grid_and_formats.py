"""Grids and formats: nearest codes, scales that search cannot worsen, storage that counts its bytes."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from compress import apply, load_compressed, save_compressed
from compress.formats import FORMATS, Dense, Format, IntGroup
from compress.formats.scales import SCALE_DTYPES
from compress.grid import integer as grid
from compress.grid.nearest import rtn
from compress.linear import CompressedLinear
from compress.plan import plan
from compress.walk.layerwise import LayerwiseMethod


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", list(SCALE_DTYPES))
def test_scales_cover_and_search_never_loses(bits, symmetric, scale_dtype):
    w = torch.randn(7, 5, 32) * torch.rand(7, 5, 1).mul(6).exp()
    importance = torch.rand(32) + 0.1

    def loss(scale, zero, norm):
        q = grid.dequantize(
            grid.quantize(w, scale[..., None], zero[..., None], bits), scale[..., None], zero[..., None]
        )
        return ((q - w).abs().pow(norm) * importance).sum(-1)

    covering = grid.absmax(w, bits, symmetric, scale_dtype)
    for norm in (2.0, 2.4):
        found = grid.search(w, bits, symmetric, scale_dtype, importance=importance, norm=norm)
        clipped = grid.choose(w, bits, symmetric, scale_dtype, how="clip", importance=importance, norm=norm)
        assert (loss(*found, norm) <= loss(*clipped, norm) * (1 + 1e-6)).all() and (clipped[0] > 0).all()
        assert (loss(*clipped, norm) <= loss(*covering, norm) * (1 + 1e-6)).all()
        for scale, zero in (covering, found):
            assert torch.equal(scale, scale.to(SCALE_DTYPES[scale_dtype]).float()), "scales are what is stored"
            assert (zero == zero.round()).all() and (zero >= 0).all() and (zero < 1 << bits).all()
            if symmetric:
                assert (zero == 1 << (bits - 1)).all()


def test_groups_of_zeros_and_constants():
    for symmetric in (True, False):
        for value in (0.0, 1e-30, 3.0, -3.0):
            W = torch.full((2, 16), value)
            for scale in ("absmax", "search"):
                Q = rtn(W, bits=4, group_size=8, symmetric=symmetric, scale=scale).dequantize()
                assert torch.isfinite(Q).all() and (Q - W).abs().max() <= max(0.08 * abs(value), 1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_group_counts_its_bytes_and_comes_back(bits, symmetric):
    stored = rtn(torch.randn(48, 128), bits=bits, group_size=32, symmetric=symmetric)
    zeros = 0 if symmetric else 48 * bits  # 4 groups, padded to 8
    assert stored.nbytes == 48 * 128 * bits // 8 + 48 * 4 * 2 + zeros
    again = FORMATS["int_group"].from_tensors(stored.spec(), stored.state_dict())
    assert torch.equal(again.dequantize(), stored.dequantize())


@pytest.mark.parametrize("part", ["int4", "int3_asymmetric", "int8", "dense", "sum"])
def test_compressed_linear_is_a_module_like_any_other(part, backend):
    W, bias = torch.randn(64, 128), torch.randn(64)
    parts = {
        "int4": lambda: [rtn(W, bits=4, group_size=32)],
        "int3_asymmetric": lambda: [rtn(W, bits=3, group_size=32, symmetric=False)],
        "int8": lambda: [rtn(W, bits=8, group_size=-1)],
        "dense": lambda: [Dense(W)],
        "sum": lambda: [rtn(W, bits=4, group_size=32), Dense(torch.randn(64, 128).bfloat16() * 0.01)],
    }[part]()
    layer = CompressedLinear(parts, bias, dtype=torch.float32)
    x = torch.randn(2, 5, 128)
    y = layer(x)
    assert torch.allclose(y, x @ layer.dequantize().T + bias, atol=1e-3)
    with layer.dense():
        assert torch.allclose(layer(x), y, atol=1e-3)
    assert torch.equal(copy.deepcopy(layer)(x), y)

    state = {k: v.clone() for k, v in layer.state_dict().items()}
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert (half(x.bfloat16()).float() - y).norm() / y.norm() < 2e-2
    for key, tensor in half.state_dict().items():  # the weight is stored the same, whatever it is laid out for
        if part != "sum" and part != "dense" and key != "bias":
            assert torch.equal(tensor, state[key]), key

    other = CompressedLinear(copy.deepcopy(parts), torch.zeros(64), dtype=torch.bfloat16)
    other.load_state_dict(state)
    assert torch.equal(other.to(torch.float32)(x).float(), y) or part in ("sum", "dense")
    again = CompressedLinear.from_tensors(layer.spec(), state, torch.float32)
    assert torch.equal(again(x), y)
    compiled = torch.compile(half, fullgraph=True, backend=backend)
    expected = half(x.bfloat16()).float()
    assert (compiled(x.bfloat16()).float() - expected).norm() / expected.norm() < 1e-2
    assert layer.weight.shape == (64, 128) and "bits=" in repr(layer)


def test_stored_size_is_what_the_model_takes():
    layer = CompressedLinear([rtn(torch.randn(64, 128), bits=4, group_size=64)], None, dtype=torch.bfloat16)
    assert layer.bits_per_weight == 4.25
    resident = sum(b.nbytes for b in layer.buffers())
    assert resident <= 64 * 128 * 4.5 / 8, "codes in tiles, scale and offset pairs, and nothing else"
    assert not list(layer.parameters())


def test_conversion_of_any_linear():
    from transformers.pytorch_utils import Conv1D

    from compress.linear import shape_of, weight_of

    conv = Conv1D(24, 16)
    assert shape_of(conv) == (24, 16) and torch.equal(weight_of(conv), conv.weight.T)
    plain = nn.Linear(16, 24)
    assert shape_of(plain) == (24, 16) and torch.equal(weight_of(plain), plain.weight)
    small = CompressedLinear(
        [IntGroup.from_codes(torch.ones(4, 8), torch.ones(4, 1), None, bits=4, group_size=8)], None, dtype=torch.float32
    )
    assert shape_of(small) == (4, 8) and weight_of(small).shape == (4, 8)


class Signs(Format):
    """A new format, as CONTRIBUTING.md describes it: w is the size of its row or its negative."""

    name: ClassVar[str] = "signs"

    def __init__(self, negative, size):
        super().__init__()
        self.shape = tuple(negative.shape)
        self.register_buffer("negative", negative)
        self.register_buffer("size", size)

    def dequantize(self):
        return torch.where(self.negative, -self.size.float(), self.size.float())

    def matmul(self, x):
        return x @ self.dequantize().t().to(x.dtype)

    def spec(self):
        return {"format": self.name, "shape": list(self.shape)}

    @classmethod
    def expected_bits(cls, spec, float_bits, zeros=0.0):
        return 8 + 32 / spec["shape"][1]

    @classmethod
    def from_tensors(cls, spec, tensors):
        return cls(tensors["negative"], tensors["size"])


@dataclass(frozen=True, kw_only=True)
class ToSigns(LayerwiseMethod):
    name: ClassVar[str] = "to_signs"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "this test"

    def stores(self, shape):
        return [{"format": "signs", "shape": list(shape)}]

    def solve(self, W, statistics):
        return [Signs(W < 0, W.abs().mean(1, keepdim=True))]


def test_a_new_format_is_one_class_and_one_name(tiny, tokens, monkeypatch, tmp_path):
    """It is predicted, counted, saved and loaded like the others."""
    monkeypatch.setitem(FORMATS, Signs.name, Signs)
    model = tiny("llama")
    assert plan(ToSigns(), model, tokens(2, 20)).usage.predicted_peak > 0
    result = apply(ToSigns(), model, tokens(2, 20))
    for record in result.layers:
        expected = Signs.expected_bits({"shape": record.shape}, 16)
        assert record.format == "signs" and record.bits_per_weight == pytest.approx(expected)
    save_compressed(result, tmp_path / "saved")
    ids = tokens(1, 9)[0]
    assert torch.equal(load_compressed(tmp_path / "saved")(ids).logits, model(ids).logits)
