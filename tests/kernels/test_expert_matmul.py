"""One product for the tokens of all experts: refusals, views, and registration; its numbers are among `int_matmul`'s
checks."""

import pytest
import torch

from kernels.int_matmul import dequantize, pack
from kernels.int_matmul.experts import expert_matmul, split, stacked
from kernels.registry import recording


def weights(experts=3, out=20, columns=64, group_size=32, symmetric=False):
    groups = columns // group_size
    zero = [None if symmetric else torch.randint(0, 16, (out, groups)) for _ in range(experts)]
    codes, grid = torch.randint(0, 16, (experts, out, columns)), {"bits": 4, "group_size": group_size}
    return [pack(c, torch.rand(out, groups), z, **grid) for c, z in zip(codes, zero, strict=True)]


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_token_meets_its_own_expert(symmetric):
    parts, x = weights(symmetric=symmetric), torch.randn(7, 64)
    w = stacked(parts)
    with recording() as used:
        y = expert_matmul(x, w, torch.tensor([2, 2, 7], dtype=torch.int32))
    assert used == {"expert_matmul": {"reference"}}
    assert torch.allclose(y[:2], x[:2] @ dequantize(parts[0]).t(), atol=1e-4)
    assert torch.allclose(y[2:], x[2:] @ dequantize(parts[2]).t(), atol=1e-4)
    for part, view in zip(parts, split(w, 3), strict=True):
        assert torch.equal(dequantize(part), dequantize(view)) and view.codes.data_ptr() >= w.codes.data_ptr()
        assert view.codes.untyped_storage().data_ptr() == w.codes.untyped_storage().data_ptr()


def test_tensors_of_wrong_shapes_are_refused():
    w, ends = stacked(weights()), torch.tensor([1, 2, 3], dtype=torch.int32)
    for x, weight, until, impl, said in (
        (torch.randn(3, 60), w, ends, "auto", "in_features"),
        (torch.randn(3, 64), w, ends.long(), "auto", "must be int32"),
        (torch.randn(3, 64), w, ends.repeat(3), "auto", "same number"),
        (torch.randn(3, 64), w, ends, "triton", "`impl`"),
        (torch.randn(3, 64), w, ends, "cpu", "`impl`"),
    ):
        with pytest.raises(ValueError, match=said):
            expert_matmul(x, weight, until, impl=impl)


def test_registered_op_passes_opcheck():
    w, ends = stacked(weights()), torch.tensor([1, 1, 4], dtype=torch.int32)
    arguments = (torch.randn(4, 64), w.codes, w.scale, w.zero, ends, 4, 32, [60, 64], "reference")
    torch.library.opcheck(torch.ops.workbench.expert_matmul.default, arguments)
    assert expert_matmul(torch.randn(0, 64), w, ends * 0).shape == (0, 20)
