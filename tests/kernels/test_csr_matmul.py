"""Sparse weights in compressed rows: both implementations against float64, and under the compiler."""

import pytest
import torch

from kernels.csr_matmul import csr_matmul, to_csr
from kernels.csr_matmul.cases import checks, contests
from kernels.csr_matmul.layout import rows_of
from kernels.registry import recording
from kernels.support.declarations import OWN

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", checks(CPU), ids=lambda c: c.name)
@pytest.mark.parametrize("impl", ["reference", "library"])
def test_products_are_right(check, impl):
    assert check.error(impl) <= check.tolerance


def test_entries_lie_row_by_row():
    W = torch.tensor([[0.0, 5, 0], [0, 0, 0], [1, 0, 2]])
    w = to_csr(W, W != 0)
    assert w.values.tolist() == [5, 1, 2] and w.columns.tolist() == [1, 0, 2] and w.offsets.tolist() == [0, 1, 1, 3]
    assert rows_of(w).tolist() == [0, 2, 2]


def test_the_op_survives_the_compiler_and_says_what_ran(backend):
    W = torch.randn(24, 64) * (torch.rand(24, 64) < 0.1)
    w, x = to_csr(W, W != 0), torch.randn(3, 64)
    arguments = (x, w.values, w.columns, w.offsets, 24, 64, "library")
    torch.library.opcheck(torch.ops.workbench.csr_matmul.default, arguments)
    with recording() as ran:
        y = torch.compile(lambda x: csr_matmul(x, w) + 1, fullgraph=True, backend=backend)(x)
    assert torch.allclose(y, x @ W.t() + 1, atol=1e-5) and ran == {"csr_matmul": {"library"}}


def test_bad_arguments_say_what_works():
    w = to_csr(torch.ones(2, 3), torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match=r"must end in in_features \(=3\)"):
        csr_matmul(torch.ones(1, 4), w)
    with pytest.raises(ValueError, match="`impl`"):
        csr_matmul(torch.ones(1, 3), w, impl="triton")


def test_contests_have_the_dense_product_in_them():
    (contest,) = contests(CPU, True, OWN)
    assert {contest.ours, contest.baseline} == contest.contestants.keys()
    for call in contest.contestants.values():
        assert torch.isfinite(call(0)).all()
