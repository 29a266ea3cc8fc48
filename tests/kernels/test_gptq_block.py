"""GPTQ's inner loop: against float64, against the grid it rounds to, in pieces as in one, and through the compiler."""

import pytest
import torch

from compress.grid import integer as grid
from kernels.gptq_block import gptq_block
from kernels.gptq_block.cases import _factor, checks
from kernels.registry import recording


def operands(columns=24, steps=24, out=10, groups=3, bits=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(columns, out, generator=g) * 0.02
    U = _factor(torch.randn(4 * columns, columns, generator=g).double()).float()[:steps]
    scale = (0.01 + 0.01 * torch.rand(groups, out, generator=g)) / 2 ** (bits - 2)
    zero = torch.randint(0, 2**bits, (groups, out), generator=g).float()
    return W, U, scale, zero, torch.arange(steps) * groups // steps


@pytest.mark.parametrize("check", checks(torch.device("cpu")), ids=lambda c: c.name)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_agrees_with_float64(check, impl):
    assert check.error(impl) <= check.tolerance


def test_reference_takes_each_column_as_the_grid_does():
    """The loop spelled out with the grid's own functions, bit for bit."""
    W, U, scale, zero, group = operands()
    codes, errors, rest = gptq_block(W, U, scale, zero, group, bits=4, impl="reference")
    W = W.clone()
    for i in range(len(W)):
        s, z = scale[group[i]], zero[group[i]]
        q = grid.quantize(W[i], s, z, 4)
        error = (W[i] - grid.dequantize(q, s, z)) / U[i, i]
        W[i + 1 :].addr_(U[i, i + 1 :], error, alpha=-1)
        assert torch.equal(codes[i].float(), q) and torch.equal(errors[i], error)
    assert rest.shape == (0, 10)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_in_pieces_as_in_one(impl, cut):
    W, U, scale, zero, group = operands(columns=40, steps=40)
    codes, errors, _ = gptq_block(W, U, scale, zero, group, bits=4, impl=impl)
    first = gptq_block(W, U[:cut], scale, zero, group[:cut], bits=4, impl=impl)
    second = gptq_block(first[2], U[cut:, cut:], scale, zero, group[cut:], bits=4, impl=impl)
    assert torch.equal(torch.cat([first[0], second[0]]), codes)
    assert torch.allclose(torch.cat([first[1], second[1]]), errors, atol=1e-6)


def test_nothing_given_is_changed_and_what_ran_is_noted():
    tensors = operands(columns=20, steps=12)
    before = [t.clone() for t in tensors]
    with recording() as used:
        codes, errors, rest = gptq_block(*tensors, bits=4)
    assert used == {"gptq_block": {"cpu"}}
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert codes.dtype == torch.uint8 and codes.max() < 16
    assert codes.shape == errors.shape == (12, 10) and rest.shape == (8, 10)


def test_error_feedback_beats_rounding():
    W, U, scale, zero, group = operands(columns=64, steps=64, out=32, groups=1)
    H = torch.linalg.inv(U.double().t() @ U.double())
    codes, _, _ = gptq_block(W, U, scale, zero, group, bits=4)
    rounded = grid.quantize(W, scale[group], zero[group], 4)

    def loss(q):
        D = (W - (q - zero[group]) * scale[group]).double().t()  # [out, in]
        return (D @ H * D).sum()

    assert loss(codes.float()) < loss(rounded)


def test_bad_arguments_say_what_works():
    W, U, scale, zero, group = operands()
    with pytest.raises(ValueError, match="`impl` \\(='gpu'\\)"):
        gptq_block(W, U, scale, zero, group, bits=4, impl="gpu")
    with pytest.raises(ValueError, match="`impl` \\(='triton'\\) needs"):
        gptq_block(W, U, scale, zero, group, bits=4, impl="triton")
    with pytest.raises(ValueError, match="`U` \\(24, 23\\)"):
        gptq_block(W, U[:, 1:], scale, zero, group, bits=4)
    with pytest.raises(ValueError, match="steps <= 20"):
        gptq_block(W[:20], U[:, :20], scale, zero, group, bits=4)
    with pytest.raises(ValueError, match="`zero` \\(2, 10\\)"):
        gptq_block(W, U, scale, zero[1:], group, bits=4)
    with pytest.raises(ValueError, match="`group` torch.float32"):
        gptq_block(W, U, scale, zero, group.float(), bits=4)
    with pytest.raises(ValueError, match="`W` \\(torch.float64\\) must be float32"):
        gptq_block(W.double(), U, scale, zero, group, bits=4)
    with pytest.raises(ValueError, match="`bits` \\(=9\\)"):
        gptq_block(W, U, scale, zero, group, bits=9)
    with pytest.raises(ValueError, match="`W` \\(24,\\)"):
        gptq_block(W[:, 0], U, scale, zero, group, bits=4)
    with pytest.raises(ValueError, match="`keep`"):
        gptq_block(W, U, scale, zero, group, bits=4, keep=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="`table` torch.float32 \\(1,\\)"):
        gptq_block(W, U, scale, zero, group, bits=4, table=torch.ones(1))


@pytest.mark.in_turns
@pytest.mark.parametrize("use", ["reference", "cpu"])
@pytest.mark.parametrize("batch", [False, True])
def test_registered_op_passes_opcheck(use, batch):
    tensors = operands(columns=12, steps=8)
    if batch:
        tensors = tuple(torch.stack([t, t]) for t in tensors)
    for keep, table in ((None, torch.arange(16.0) - 8), (torch.rand(tensors[0].shape)[..., :8, :] < 0.5, None)):
        torch.library.opcheck(torch.ops.workbench.gptq_block, (*tensors, 4, keep, table, use))


def test_survives_the_compiler_and_export():
    tensors = operands(columns=12, steps=8)

    class Block(torch.nn.Module):
        def forward(self, *tensors):
            return gptq_block(*tensors, bits=4)[1] * 2

    expected = Block()(*tensors)
    assert torch.allclose(torch.compile(Block(), backend="aot_eager", fullgraph=True)(*tensors), expected)
    assert torch.allclose(torch.export.export(Block(), tensors).module()(*tensors), expected)
