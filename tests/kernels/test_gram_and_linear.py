"""Gram matrices and dense products: float32 all the way, faster paths equal to torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels import native
from kernels.gram import gram, mirror_, symmetric
from kernels.gram.cases import checks as gram_checks
from kernels.linear import fast_linear, linear, tiles
from kernels.linear.onednn import MANY, lays_out
from kernels.linear.prepacked import PrepackedLinear, prepack
from kernels.linear.rows import FEW, products, rows_fit
from kernels.registry import recording


@pytest.mark.parametrize("impl", ["reference", "cpu", "auto"])
@pytest.mark.parametrize("tokens, columns", [(1, 1), (7, 33), (300, 257), (64, 600)])
def test_gram_is_float32_exact(impl, tokens, columns):
    x = torch.randn(tokens, columns)
    H = gram(x[tokens // 2 :], gram(x[: tokens // 2], impl=impl), impl=impl)
    exact = x.double().T @ x.double()
    assert ((symmetric(H).double() - exact).norm() / exact.norm()).item() < 2e-6


def test_gram_takes_16_bit_activations_without_losing_digits():
    x = torch.randn(512, 40).bfloat16() * 100
    exact = x.double().T @ x.double()
    assert ((symmetric(gram(x)).double() - exact).norm() / exact.norm()).item() < 2e-6


def test_gram_of_nothing_and_bad_arguments():
    assert gram(torch.zeros(0, 4)).abs().sum() == 0
    with pytest.raises(ValueError, match="`x`"):
        gram(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="`H`"):
        gram(torch.zeros(2, 3), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="`impl`"):
        gram(torch.zeros(2, 3), impl="tf32")


def test_gram_says_what_works():
    with pytest.raises(ValueError, match="floating-point"):
        gram(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(ValueError, match="`H` must be contiguous"):
        gram(torch.zeros(2, 3), torch.zeros(3, 6)[:, ::2])
    with pytest.raises(ValueError, match="`impl` \\(='cpu'\\)"):
        gram(torch.zeros(2, 3, device="meta"), impl="cpu")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        gram(torch.zeros(2, 3), impl="triton")


def test_gram_adds_in_place_whatever_the_strides():
    x, H = torch.randn(24, 14).bfloat16().t()[:, ::3], torch.randn(8, 8)
    exact = H.double() + x.double().T @ x.double()
    with recording() as used:
        assert gram(x, H) is H
    assert used["gram"] == {"cpu"}
    assert torch.allclose(H.triu().double(), exact.triu(), atol=1e-5)


@pytest.mark.parametrize("use", ["reference", "cpu"])
def test_gram_is_an_op_that_compiles_and_exports(use, backend):
    x, H = torch.randn(5, 6), torch.zeros(6, 6)
    torch.library.opcheck(torch.ops.workbench.gram, (x, H, use))
    expected = symmetric(gram(x, impl=use))
    compiled = torch.compile(lambda x: symmetric(gram(x, impl=use)), fullgraph=True, backend=backend)
    assert torch.allclose(compiled(x), expected)

    class Module(nn.Module):
        def forward(self, x, H):
            return symmetric(gram(x, H, impl=use))

    assert torch.allclose(torch.export.export(Module(), (x, H)).module()(x, H.clone()), expected)


@pytest.mark.parametrize("check", gram_checks(torch.device("cpu")), ids=lambda c: c.name)
def test_gram_checks(check):
    for impl in ("reference", "cpu"):
        assert check.error(impl) <= check.tolerance


@pytest.mark.parametrize("shape", [(1, 3, 5), (40, 64, 96), (7, 1, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_paths_agree(shape, bias):
    tokens, columns, out = shape
    x, W, b = torch.randn(2, tokens, columns), torch.randn(out, columns), torch.randn(out) if bias else None
    exact = F.linear(x.double(), W.double(), None if b is None else b.double())
    for impl in ("reference", "cpu", "auto"):
        assert torch.allclose(linear(x, W, b, impl=impl).double(), exact, atol=1e-4)


def test_fast_linear_covers_modules_and_leaves_gradients_alone(monkeypatch):
    monkeypatch.setattr("kernels.linear.faster_than_torch", lambda: True)
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    with recording() as used, fast_linear(), torch.no_grad():
        y = layer(x)
    assert used["linear"] == {"cpu"}
    assert torch.allclose(y, layer(x), atol=1e-5)
    with recording() as used, fast_linear():
        layer(x).sum().backward()
    assert used["linear"] == {"reference"} and layer.weight.grad is not None


def test_linear_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="`impl`"):
        linear(torch.randn(1, 2), torch.randn(3, 2), impl="fast")
    with pytest.raises(ValueError, match="float32"):
        linear(torch.randn(1, 2).bfloat16(), torch.randn(3, 2).bfloat16(), impl="cpu")


OPERANDS = {
    "a bias with strides": lambda x, W, b: (x, W, torch.stack([b, -b], 1)[:, 0]),
    "a bias for all outputs": lambda x, W, b: (x, W, b[:1]),
    "a bias without dimensions": lambda x, W, b: (x, W, b[0]),
    "a bias for each token": lambda x, W, b: (x, W, b.expand(len(x), -1).clone()),
    "a bias of another dtype": lambda x, W, b: (x, W, b.double()),
    "a bias on another device": lambda x, W, b: (x, W, b.to("meta")),
    "a bias that is too long": lambda x, W, b: (x, W, torch.cat([b, b])),
    "a weight of other columns": lambda x, W, b: (x, torch.cat([W, W], 1), b),
    "a weight of one row": lambda x, W, b: (x, W[0], None),
    "a transposed weight": lambda x, W, b: (x, W.t().contiguous().t(), b),
    "an expanded weight": lambda x, W, b: (x, W[:1].expand(len(W), -1), b),
    "a transposed input": lambda x, W, b: (x.t().contiguous().t(), W, b),
    "no outputs": lambda x, W, b: (x, W[:0], b[:0]),
    "no columns": lambda x, W, b: (x[:, :0], W[:, :0], b),
    "no tokens": lambda x, W, b: (x[:0], W, b),
    "everything on meta": lambda x, W, b: (x.to("meta"), W.to("meta"), b.to("meta")),
    "a number as an input": lambda x, W, b: (x[0, 0], W, b),
}


@pytest.mark.parametrize("operands", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [MANY, 2 * MANY])  # by the kernel for few tokens, if it is there, and in float32
def test_fast_products_give_what_torch_gives_or_refuse_what_it_refuses(dtype, tokens, operands, monkeypatch):
    monkeypatch.setattr("kernels.linear.emulates", lambda _: True)
    monkeypatch.setattr("kernels.linear.onednn.SLAB", 7 * 48)
    x, W, b = operands(*(torch.randn(*shape).to(dtype) for shape in ((tokens, 48), (40, 48), (40,))))
    try:
        expected = F.linear(x, W, b)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)), fast_linear():
            F.linear(x, W, b)
        return
    with fast_linear():
        found = F.linear(input=x, weight=W, bias=b)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    if found.device.type == "cpu":
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=4 * torch.finfo(dtype).eps * 48**0.5)


def test_fast_products_leave_alone_what_torch_computes_otherwise():
    """Gradients of a bias alone, derivatives in forward mode, autocast, and weights of classes of others."""
    x, W = torch.randn(4, 48), torch.randn(40, 48)

    class OfOthers(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "its own product" if func is F.linear else super().__torch_function__(func, types, args, kwargs)

    bias = torch.zeros(40, requires_grad=True)
    with fast_linear(), torch.enable_grad():
        F.linear(x, W, bias).sum().backward()
        tangent = torch.func.jvp(lambda x: F.linear(x, W), (x,), (x,))[1]
        assert F.linear(x, W.as_subclass(OfOthers)) == "its own product"
    with fast_linear(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, W).dtype == torch.bfloat16
    assert torch.equal(bias.grad, torch.full((40,), 4.0))
    torch.testing.assert_close(tangent, x @ W.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_processors_without_16_bit_products_compute_those_of_many_tokens_in_float32(dtype, monkeypatch):
    """Rounded once, also by a layer that is prepacked; those of few tokens by a kernel for them, and torch computes those
    with gradients."""
    monkeypatch.setattr("kernels.linear.emulates", lambda _: True)
    monkeypatch.setattr("kernels.linear.prepacked.emulates", lambda _: True)
    monkeypatch.setattr("kernels.linear.onednn.SLAB", 7 * 48)  # 40 rows in slabs of 7
    layer = nn.Linear(48, 40).to(dtype).requires_grad_(False)
    x = torch.randn(2, MANY, 48).to(dtype)
    exact = (x.double() @ layer.weight.double().T + layer.bias.double()).to(dtype)
    ways = [lambda x: linear(x, layer.weight, layer.bias)]
    if dtype == torch.bfloat16 and lays_out(dtype):
        ways.append(PrepackedLinear(layer.weight, layer.bias))
    for way in ways:
        with recording() as ran:
            y = way(x)
        assert ran == {"linear": {"cpu float32"}} and y.dtype == dtype and y.shape == exact.shape
        assert (y == exact).float().mean() > 0.99
        with recording() as ran:
            few = way(x[:1, :-1])
        assert "cpu float32" not in ran["linear"]
        assert (few == exact[:1, :-1]).float().mean() > 0.99
    kernel = {f"cpu {native.rows_isa(dtype, 48)}"} if rows_fit(layer.weight, MANY) else {"reference"}
    with recording() as ran:
        linear(x[:1], layer.weight, layer.bias)
    assert ran == {"linear": kernel}
    with recording() as ran, torch.enable_grad():
        linear(x.requires_grad_(), layer.weight, layer.bias)
    assert ran == {"linear": {"reference"}}


def test_prepacked_model_computes_the_same(tiny, tokens):
    model = tiny("llama").bfloat16()
    ids = tokens(1)[0]
    expected, found = model(ids).logits.float(), prepack(model)(ids).logits.float()
    assert ((expected - found).norm() / expected.norm()).item() < 2e-2


@pytest.mark.parametrize("size", [1, 100, 1024, 2500])
def test_mirrored_in_place(size):
    H = torch.randn(size, size)
    expected = symmetric(H)
    assert torch.equal(mirror_(H), expected)


@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels")
@pytest.mark.parametrize("isa", ("auto", *native.ISAS))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_products_of_few_tokens_with_rows(isa, dtype):
    """Rows beyond multiples of what a thread takes, columns beyond those of a vector, long and short rows."""
    if isa != "auto" and (not native.runs(isa) or (isa.endswith("bf16") and dtype != torch.bfloat16)):
        pytest.skip(f"{isa} does not run here, or takes another dtype")
    for columns, tokens in ((96, 1), (77, 3), (2080, 4), (33, FEW), (3, 5)):
        x, bias = torch.randn(2, tokens, columns).to(dtype), torch.randn(50).to(dtype)
        weights = [torch.randn(out, columns).to(dtype) for out in (50, 7, 1)]
        given = products(x, weights, [bias, None, None], isa)
        for W, y, b in zip(weights, given, (bias, 0, 0), strict=True):
            exact = x.double() @ W.double().t() + b
            assert y.dtype == dtype and y.shape == exact.shape
            assert ((y.double() - exact).norm() / exact.norm()) < 4e-3
    with pytest.raises(RuntimeError, match="do not fit"):
        products(x, [weights[0].t().contiguous()], [None], isa)


@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels")
@pytest.mark.parametrize("isa", ("auto", *native.ISAS))
@pytest.mark.parametrize("columns", (576, 608, 77))
def test_a_tokens_product_does_not_depend_on_the_others(isa, columns):
    """Bit for bit, as a step that verifies guesses needs; odd and even numbers of vectors, rows that no block takes whole."""
    if isa != "auto" and not native.runs(isa):
        pytest.skip(f"{isa} does not run here")
    x, weights = torch.randn(16, columns).bfloat16(), [torch.randn(out, columns).bfloat16() for out in (50, 7)]
    alone = [products(one[None], weights, [None, None], isa) for one in x]
    for count in range(2, 17):
        for together, each in zip(
            products(x[:count], weights, [None, None], isa), zip(*alone, strict=True), strict=True
        ):
            assert torch.equal(together, torch.cat(each[:count]))


@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels")
def test_products_of_few_tokens_pass_opcheck():
    x, W = torch.randn(2, 40).bfloat16(), torch.randn(6, 40).bfloat16()
    torch.library.opcheck(torch.ops.workbench.half_matmul, (x, [W, W[:3].clone()], [None, None], "auto"))


@pytest.mark.skipif(not native.tiles(), reason="this processor has no tiles")
@pytest.mark.parametrize("isa", ["auto", "avx512 tiles"])
@pytest.mark.parametrize(
    "out, columns, tokens", [(576, 96, 70), (65, 33, 17), (32, 32, 16), (3, 5, 1), (100, 640, 1100)]
)
def test_products_of_weights_in_tiles(out, columns, tokens, isa):
    """With tokens, rows and columns that fill no tile; several weights in one call."""
    weights = [torch.randn(rows, columns).bfloat16() for rows in (out, 40)]
    x = torch.randn(2, tokens, columns).bfloat16()
    found = tiles.products(x, [tiles.in_tiles(w) for w in weights], [len(w) for w in weights], isa)
    for y, w in zip(found, weights, strict=True):
        expected = x.float() @ w.float().t()
        assert y.shape == expected.shape and y.dtype == torch.bfloat16
        assert (y.float() - expected).abs().max() < 0.006 * expected.abs().max()


@pytest.mark.skipif(not native.tiles(), reason="this processor has no tiles")
def test_weights_in_tiles_that_do_not_fit_are_refused():
    w = tiles.in_tiles(torch.randn(40, 64).bfloat16())
    assert w.shape == (2, 2, 2, 16, 32) and w.dtype == torch.int16
    for x, laid_out, outs in (
        (torch.randn(2, 96).bfloat16(), [w], [40]),
        (torch.randn(2, 64), [w], [40]),
        (torch.randn(2, 64).bfloat16(), [w], [70]),
        (torch.randn(2, 64).bfloat16(), [w], [40, 40]),
        (torch.randn(2, 64).bfloat16(), [w[:1]], [40]),
    ):
        with pytest.raises(RuntimeError, match="dense_tiles"):
            tiles.products(x, laid_out, outs)
    with pytest.raises(RuntimeError, match="`isa`"):
        tiles.products(torch.randn(2, 64).bfloat16(), [w], [40], "neon")
    assert tiles.products(torch.randn(0, 64).bfloat16(), [w], [40])[0].shape == (0, 40)
