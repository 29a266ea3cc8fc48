"""2:4 sparse weights: exact storage, held against CUTLASS's own reading of the same pattern; the product on any
device."""

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from kernels.registry import recording
from kernels.sparse24_matmul import compress24, decompress24, library, sparse24_matmul, to_library, to_rows
from kernels.sparse24_matmul.cases import checks, contests, prune24
from kernels.support.declarations import OWN, relative_rms

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", checks(CPU), ids=lambda c: c.name)
def test_reference_is_right(check):
    assert check.error("reference") <= check.tolerance


@pytest.mark.parametrize("shape", [(1, 4), (3, 12), (32, 64), (7, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_loses_nothing(shape, dtype):
    W = prune24(torch.randn(shape)).to(dtype)
    W[torch.rand(shape) < 0.3] = 0  # fours with one nonzero, or none
    w = compress24(W)
    assert w.values.shape == (shape[0], shape[1] // 2) and w.values.dtype == dtype
    assert w.places.shape == (shape[0], -(-shape[1] // 8)) and w.places.dtype == torch.uint8
    assert torch.equal(decompress24(w), W)


def test_places_are_two_bits_each_low_bits_first():
    W = torch.tensor([[0.0, 5, 0, 7, 1, 2, 0, 0, 0, 0, 3, 4]])
    w = compress24(W)
    assert w.values.tolist() == [[5, 7, 1, 2, 3, 4]]
    assert w.places.tolist() == [[(1 | 3 << 2) | (0 | 1 << 2) << 4, 2 | 3 << 2]]


@pytest.mark.parametrize("shape", [(32, 64), (64, 192), (33, 68)])
def test_cutlass_reads_the_same_weight(shape):
    """An independent reader: torch's conversions for CUTLASS, which run on a CPU."""
    W = prune24(torch.randn(shape)).bfloat16()
    w = compress24(W)
    theirs = to_library(w, "cutlass")
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(theirs.values, theirs.places)[: shape[0], : shape[1]], W)
    assert torch.equal(decompress24(theirs), W)
    back = to_rows(theirs)
    assert torch.equal(back.values, w.values) and torch.equal(back.places, w.places) and back.shape == shape
    if shape[0] % 32 == shape[1] % 64 == 0:  # kept values lie in the same order
        assert torch.equal(theirs.values, w.values)
    x = torch.randn(5, shape[1]).bfloat16()
    assert relative_rms(sparse24_matmul(x, theirs), x.double() @ W.double().t()) < 1e-2


def test_bad_arguments_say_what_works():
    with pytest.raises(ValueError, match="multiple of 4"):
        compress24(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="more than two nonzeros in 2 of its 4"):
        compress24(torch.tensor([[1.0, 2, 3, 0], [1, 0, 2, 0], [1, 2, 3, 4], [0, 0, 0, 0]]))
    w = compress24(prune24(torch.randn(8, 16)))
    with pytest.raises(ValueError, match="in_features \\(=16\\)"):
        sparse24_matmul(torch.randn(2, 15), w)
    with pytest.raises(ValueError, match="`impl` \\(='triton'\\)"):
        sparse24_matmul(torch.randn(2, 16), w, impl="triton")
    with pytest.raises(ValueError, match="to_library"):
        sparse24_matmul(torch.randn(2, 16), w, impl="library")
    with pytest.raises(ValueError, match="sm_80"):
        to_library(w)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        to_library(w, "cutlass")


def test_auto_says_what_ran_and_empty_batches_pass():
    w = compress24(prune24(torch.randn(8, 16)))
    with recording() as used:
        assert sparse24_matmul(torch.randn(2, 0, 16), w).shape == (2, 0, 8)
        assert sparse24_matmul(torch.randn(3, 16), w).shape == (3, 8)
    assert used["sparse24_matmul"] == {"reference"}
    assert library(CPU) is None and list(contests(CPU, True, OWN)) == []


@pytest.mark.parametrize("layout", ["rows", "cutlass"])
def test_registered_op_passes_opcheck_and_survives_the_compiler(layout, backend):
    w = compress24(prune24(torch.randn(32, 64)).bfloat16())
    w = w if layout == "rows" else to_library(w, layout)
    x = torch.randn(2, 3, 64).bfloat16()
    torch.library.opcheck(torch.ops.workbench.sparse24_matmul, (x, w.values, w.places, w.layout, *w.shape, "reference"))
    compiled = torch.compile(lambda x: sparse24_matmul(x, w) * 2, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(x), sparse24_matmul(x, w) * 2)


def test_exports():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = compress24(prune24(torch.randn(8, 16)))
            self.register_buffer("values", self.w.values)
            self.register_buffer("places", self.w.places)

        def forward(self, x):
            return sparse24_matmul(x, self.w._replace(values=self.values, places=self.places))

    layer, x = Layer(), torch.randn(3, 16)
    assert torch.allclose(torch.export.export(layer, (x,)).module()(x), layer(x))
