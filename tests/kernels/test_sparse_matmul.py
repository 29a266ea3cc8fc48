"""Products with weights whose zeros are not stored, against float64, and in the formats that store them."""

import copy
import ctypes
import mmap

import pytest
import torch

from compress.formats import Bitmap, Dense, Sparse24Weight
from compress.linear import CompressedLinear
from kernels import native
from kernels.linear import tiles
from kernels.registry import recording
from kernels.sparse_matmul import SparseRows, dense_rows, skips_zeros, sparse_matmul
from kernels.sparse_matmul.cases import checks, contests, sparse_rows
from kernels.support.declarations import TimedSizes
from kernels.support.deploy import deployed

CPU = torch.device("cpu")
SKIPS = skips_zeros(torch.bfloat16, CPU, 32)
needs_loops = pytest.mark.skipif(not SKIPS, reason="no C++ kernels, or no AVX2 on this processor")


@pytest.mark.parametrize("check", checks(CPU), ids=lambda check: check.name)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_agrees_with_float64(check, impl):
    if impl not in ("reference", *check.impls):
        pytest.skip("not for these tensors here")
    y, expected = check.run(impl), check.expected()
    assert y.shape == expected.shape and (y - expected).norm() <= check.tolerance * expected.norm()


@needs_loops
@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
def test_a_tokens_result_does_not_depend_on_the_others(tokens):
    """So that steps that verify guesses give the same bits; beyond 8 tokens the products are those of tiles or oneDNN's."""
    W = torch.randn(70, 576, dtype=torch.bfloat16)
    w, x = sparse_rows(W, torch.rand(W.shape) < 0.5), torch.randn(tokens, 576, dtype=torch.bfloat16)
    together, alone = sparse_matmul(x, w), torch.cat([sparse_matmul(one[None], w) for one in x])
    assert torch.equal(together, alone) if tokens <= 8 else torch.allclose(together, alone, rtol=0.02, atol=0.3)


@pytest.mark.skipif(not SKIPS or not native.tiles(), reason="no C++ kernels, AVX512-VBMI2 or tiles here")
@pytest.mark.parametrize("isa, tokens", [("auto", 37), ("avx512 tiles", 37), ("auto", 600)])
def test_tiles_of_kept_entries_are_those_of_the_dense_weights(isa, tokens):
    """Several weights, of which one ends within a strip and one has no entries, more strips than are taken together, and
    more tokens than a block holds."""
    x = torch.randn(2, tokens, 352, dtype=torch.bfloat16)
    shapes = [(700, 352), (37, 352), (16, 352)]
    whole = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    keeps = [torch.rand(shape) < share for shape, share in zip(shapes, (0.5, 0.9, 0.0), strict=True)]
    rows = [sparse_rows(W, keep) for W, keep in zip(whole, keeps, strict=True)]
    masks, values, starts = zip(*((w.mask, w.values, w.starts) for w in rows), strict=True)
    found = torch.ops.workbench.kept_tiles(x, masks, values, starts, isa)
    laid_out = [tiles.in_tiles(W * keep) for W, keep in zip(whole, keeps, strict=True)]
    expected = tiles.products(x, laid_out, [len(W) for W in whole], isa)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not found[2].any()


@pytest.mark.skipif(not SKIPS or not native.tiles(), reason="no AVX512-VBMI2 or tiles on this processor")
def test_many_tokens_go_through_tiles_and_few_do_not():
    W = torch.randn(40, 64, dtype=torch.bfloat16)
    w = sparse_rows(W, W > 0)
    for tokens, expected in (
        (8, f"cpu {native.rows_isa(torch.bfloat16, 64, kept=True)}"),
        (9, f"cpu {native.tiles()}"),
    ):
        with recording() as ran:
            y = sparse_matmul(torch.ones(tokens, 64, dtype=torch.bfloat16), w)
        assert ran["sparse_matmul"] == {expected} and torch.allclose(
            y[0].float(), (W * (W > 0)).float().sum(1), rtol=0.01
        )


@needs_loops
def test_nothing_is_read_behind_the_last_value():
    """The values end with a page, behind which no memory may be read: vectors that pass the end would end the process."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    for kept in range(1, 40):
        keep = torch.zeros(3, 64, dtype=torch.bool)
        keep.view(-1)[torch.randperm(192)[:kept]] = True
        W = torch.randn(3, 64, dtype=torch.bfloat16)
        w = sparse_rows(W, keep)
        values = torch.frombuffer(memory, dtype=torch.bfloat16, count=kept, offset=mmap.PAGESIZE - 2 * kept)
        values.copy_(w.values)
        for count in (2, 20):
            x = torch.randn(count, 64, dtype=torch.bfloat16)
            y = sparse_matmul(x, SparseRows(w.mask, values, w.starts))
            assert torch.allclose(y.float(), x.float() @ (W * keep).float().t(), rtol=0.02, atol=0.05)
        assert torch.equal(dense_rows(w), W * keep)


@needs_loops
@pytest.mark.parametrize("pattern", ["half", "2:4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formats_multiply_without_zeros_in_16_bits(pattern, dtype):
    W = torch.randn(50, 96)
    keep = torch.rand(50, 96) < 0.5
    if pattern == "2:4":
        keep = torch.tensor([True, False, False, True]).expand(50, 24, 4).reshape(50, 96)
    form = (Sparse24Weight if pattern == "2:4" else Bitmap).from_plain(Dense((W * keep).to(dtype)), keep)
    form.for_compute(dtype, CPU)
    x = torch.randn(2, 3, 96, dtype=dtype)
    with recording() as ran:
        y = form.matmul(x)
    assert torch.allclose(y.float(), x.float() @ (W * keep).t(), rtol=0.02, atol=0.2)
    assert ("sparse_matmul" in ran) == (dtype != torch.float32) == (form.plain is None)
    assert ran.get("sparse_matmul", {"cpu avx512"}) <= {
        "cpu avx2",
        "cpu avx512",
        "cpu avx512bf16",
        "cpu avx512 tiles",
        "cpu amx",
    }
    other = copy.deepcopy(form)
    other.load_state_dict(type(form).from_plain(Dense((W * keep * 2).to(dtype)), keep).state_dict())
    assert torch.allclose(other.matmul(x), 2 * y, rtol=0.02, atol=0.2), "laid out anew"
    wide = copy.deepcopy(form).float()
    wide.for_compute(torch.float32, CPU)
    assert wide.plain is not None and wide.starts is None and wide.matmul(x.float()).dtype == torch.float32


@needs_loops
@pytest.mark.parametrize("pattern", ["half", "2:4"])
def test_a_float32_model_is_deployed_without_zeros_and_back(pattern):
    W = torch.randn(32, 64)
    keep = W > 0 if pattern == "half" else torch.tensor([True, False, False, True]).expand(32, 16, 4).reshape(32, 64)
    form = (Sparse24Weight if pattern == "2:4" else Bitmap).from_plain(Dense(W * keep), keep)
    linear, x = CompressedLinear([form], None, dtype=torch.float32), torch.randn(2, 64)
    expected = x @ (W * keep).t()
    half = deployed(torch.nn.Sequential(linear))
    assert half[0].parts[0].rows is not None and half[0].parts[0].plain is None
    assert torch.allclose(half(x.bfloat16()).float(), expected, rtol=0.03, atol=0.2)
    back = deployed(half, torch.float32)
    assert back[0].parts[0].rows is None and torch.allclose(back(x), expected, rtol=0.03, atol=0.2)


def test_few_zeros_integers_and_other_processors_keep_the_dense_weight():
    keep = torch.rand(50, 96) < 0.95
    form = Bitmap.from_plain(Dense((torch.randn(50, 96) * keep).bfloat16()), keep)
    form.for_compute(torch.bfloat16, CPU)
    assert form.plain is not None and form.rows is None


def test_gradients_of_the_input_go_through_the_reference():
    W = torch.randn(16, 64, dtype=torch.bfloat16)
    w, x = sparse_rows(W, W > 0), torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    sparse_matmul(x, w).sum().backward()
    assert torch.allclose(x.grad[0].float(), (W * (W > 0)).float().sum(0), rtol=0.02, atol=0.1)


@needs_loops
def test_the_compiler_takes_the_op():
    W = torch.randn(16, 64, dtype=torch.bfloat16)
    w = sparse_rows(W, W > 0)
    arguments = (torch.randn(3, 64, dtype=torch.bfloat16), w.mask, w.values, w.starts)
    torch.library.opcheck(torch.ops.workbench.sparse_matmul.default, arguments)
    if native.tiles():
        x = torch.randn(20, 64, dtype=torch.bfloat16)
        torch.library.opcheck(torch.ops.workbench.kept_tiles.default, (x, [w.mask], [w.values], [w.starts], "auto"))
        assert torch.equal(torch.compile(sparse_matmul, fullgraph=True, backend="eager")(x, w), sparse_matmul(x, w))


@needs_loops
def test_contests_name_every_contestant():
    found = list(contests(CPU, True, TimedSizes()))
    assert found and all({"cpu", "dense rows"} < set(one.contestants) for one in found)


@pytest.mark.parametrize(
    "x, how, word",
    [
        (torch.randn(2, 32), {}, "weight's torch.bfloat16"),
        (torch.randn(2, 40, dtype=torch.bfloat16), {}, "in_features"),
        (torch.randn(2, 64, dtype=torch.bfloat16), {"impl": "gpu"}, "`impl` (='gpu')"),
        (torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True), {"impl": "cpu"}, "without gradients"),
        (torch.randn(2, 64, dtype=torch.bfloat16), {"impl": "triton"}, "a CUDA tensor or TRITON_INTERPRET=1"),
    ],
)
def test_wrong_input_is_refused(x, how, word):
    W = torch.randn(16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=word.replace("(", r"\(").replace(")", r"\)")):
        sparse_matmul(x, sparse_rows(W, W > 0), **how)


@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels here")
def test_kernels_refuse_parts_that_do_not_fit():
    W = torch.randn(16, 64, dtype=torch.bfloat16)
    w = sparse_rows(W, W > 0)
    if SKIPS and native.tiles():
        x = torch.zeros(9, 64, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="kept_tiles: a mask"):
            torch.ops.workbench.kept_tiles(x, [w.mask], [w.values[:-1]], [w.starts], "auto")
        with pytest.raises(RuntimeError, match="`isa` "):
            torch.ops.workbench.kept_tiles(x, [w.mask], [w.values], [w.starts], "neon")
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.workbench.kept_rows(w.mask, w.values[:-1], w.starts, 0, 16)
    with pytest.raises(RuntimeError, match="no such rows"):
        torch.ops.workbench.kept_rows(w.mask, w.values, w.starts, 0, 17)
