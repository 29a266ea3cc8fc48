"""Several weights that multiply one input give together what each gives by itself."""

import pytest
import torch

from compress import apply
from compress.recipe import parse_recipe
from kernels import native
from kernels.registry import recording
from kernels.sparse_matmul import skips_zeros
from kernels.step.joined import joined
from kernels.support.deploy import deployed

pytestmark = pytest.mark.skipif(not native.tiles() and not native.w4a8_runs(), reason="no loops for prompts here")


@torch.no_grad()
@pytest.mark.parametrize("tokens", [17, 40, 200])
@pytest.mark.parametrize("recipe, op", [
    ("rtn(bits=4, group_size=32)", "int_matmul"),
    ("rtn(bits=3, group_size=32, symmetric=False)", "int_matmul"),
    ("rtn(bits=4, group_size=32, grid=iq4_nl)", "lut_matmul"),
    ("nf4(group_size=32)", "lut_matmul"),
    ("rtn(bits=4, group_size=32), activations(bits=8)", "w4a8_matmul"),
    ("rtn(bits=4, group_size=32, grid=iq4_nl), activations(bits=8)", "w4a8_matmul"),
    ("rtn(bits=8, group_size=32, symmetric=False), activations(bits=8)", "w4a8_matmul"),
    ("int8", "w8a8_matmul"),
    ("wanda(ratio=0.5)", "sparse_matmul"),
])  # fmt: skip
def test_products_are_those_of_each_by_itself(tiny, recipe, op, tokens):
    model = tiny("qwen2", hidden_size=96, intermediate_size=224)  # with biases, and a last strip that is not full
    model = deployed(apply(parse_recipe(recipe), model, [torch.arange(32)[None] * 31 % 96]).model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for linears in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        x = torch.randn(2, tokens, 96).bfloat16()
        together = joined(linears)
        if op != "w4a8_matmul" and native.tiles() != "amx" and (op == "w8a8_matmul" or not native.tiles()):
            assert together is None
            continue
        if op == "sparse_matmul" and not (native.tiles() and skips_zeros(x.dtype, x.device, 96)):
            assert together is None
            continue
        assert together is not None
        with recording() as ran:
            found = together(x)
        isa = native.isa(x.dtype, 2 * tokens > native.most_in_loops() or op == "sparse_matmul")
        if op in ("w4a8_matmul", "w8a8_matmul"):
            isa = native.integers(many=True)
            isa = isa if "bits=8, group" in recipe else native.matrices() or isa  # which takes no zero points of 8 bits
        assert ran == {op: {f"cpu {isa}"}}
        for linear, y in zip(linears, found, strict=True):
            expected = linear(x)
            assert y.shape == expected.shape and y.dtype == expected.dtype
            if linear.bias is None:
                assert torch.equal(y, expected)
            else:
                assert torch.allclose(y.float(), expected.float(), rtol=0.01, atol=0.01)


@torch.no_grad()
def test_others_are_left_alone(tiny):
    model = tiny("llama").bfloat16()
    assert joined([model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj]) is None
    recipe = parse_recipe("wanda(ratio=0.5, where='blocks'), low_rank(rank=2)")
    sparse = apply(recipe, tiny("llama"), [torch.arange(32)[None] * 31 % 96]).model.bfloat16()
    assert joined([sparse.model.layers[0].mlp.gate_proj, sparse.model.layers[0].mlp.up_proj]) is None
