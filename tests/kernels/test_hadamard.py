"""Hadamard transforms: the matrices are what they are called, every path agrees with them, and the compiler takes
them."""

import pytest
import torch

from kernels import native
from kernels.hadamard import cpu, hadamard, hadamard_blocks, hadamard_matrix, turned, widest_block
from kernels.hadamard.cases import checks, exact
from kernels.hadamard.codes import hadamard_codes
from kernels.hadamard.matrix import base, near
from kernels.hadamard.plan import LARGEST_TILE, TALLEST, codes_fit, plan, spread_plan, whole_codes_fit
from kernels.int_matmul import pack
from kernels.registry import recording
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w4a8_matmul.codes import w4a8_codes_matmul

MODELS = {
    576: 36,
    1536: 12,
    4096: 1,
    11008: 344,
    14336: 28,
    28672: 28,
    5120: 20,
    13824: 108,
    18944: 148,
    25600: 100,
    53248: 52,
}


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 52, 60, 68, 76, 84, 100, 108, 148, 344, 576])
def test_matrices_are_hadamard_and_symmetric(n):
    H = hadamard_matrix(n, dtype=torch.float64)
    assert H.shape == (n, n) and (H.abs() == 1).all()
    assert torch.equal(H, H.T)
    assert torch.equal(H @ H, n * torch.eye(n, dtype=torch.float64))


def test_powers_of_two_are_sylvesters():
    H = hadamard_matrix(8)
    assert torch.equal(H[1], torch.tensor([1.0, -1] * 4)) and torch.equal(
        H[7], torch.tensor([1.0, -1, -1, 1, -1, 1, 1, -1])
    )


def test_sizes_of_models_have_a_transform():
    assert {n: base(n) for n in MODELS} == MODELS
    assert all(base(1 << k) == 1 for k in range(17))
    assert [base(n) for n in (-4, 0, 3, 6, 18, 92, 1023)] == [None] * 7
    assert near(92) == [88, 96] and near(1) == [2] and near(577) == [576, 580]


@pytest.mark.parametrize("n", [1, 12, 76, 128, 576, 1536, 4096, 8192, 13824, 14336, 24576, 28672, 32768])
def test_plans_take_sizes_apart(n):
    p = plan(n)
    assert p.a * p.b * p.c == n and p.pa >= p.a and p.pc >= max(16, p.c) and p.pa * p.b * p.pc <= LARGEST_TILE
    assert plan(11008) is None and plan(65536) is None and plan(92) is None


@pytest.mark.parametrize("n", [12, 688, 4096, 11008, 14336, 18944, 28672, 53248, 65536, 131072])
def test_rows_are_shared_by_two_factors(n):
    s = spread_plan(n)
    assert s.p * s.l == n and s.pl >= max(16, s.l) and s.p <= TALLEST
    factors = [hadamard_matrix(order, dtype=torch.float64) for order in (s.p, s.l)]
    x = torch.randn(2, n, dtype=torch.float64)
    y = (factors[0] @ x.view(2, s.p, s.l) @ factors[1]).view(2, n) * n**-0.5
    assert torch.allclose(y, hadamard(x, impl="reference"), atol=1e-10)
    assert spread_plan(262144) is None and spread_plan(92) is None


def test_groups_of_codes_lie_in_one_program():
    assert codes_fit(14336, 128) and codes_fit(28672, 64) and codes_fit(11008, 32)
    assert not any(codes_fit(*each) for each in ((14336, 256), (14336, None), (11008, 64), (688, 2), (14336, 96)))
    assert whole_codes_fit(4096, 64, 8192) and whole_codes_fit(576, None, 576) and not whole_codes_fit(576, None, 1152)


@pytest.mark.in_turns
@pytest.mark.parametrize("check", checks(torch.device("cpu")), ids=lambda c: c.name)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_agrees_with_float64(check, impl):
    if impl in ("reference", *check.impls):
        assert check.error(impl) <= check.tolerance


def test_codes_are_those_of_the_rotated_values_and_what_cannot_be_is_refused():
    x, signs = torch.randn(3, 4, 96).bfloat16(), (torch.randint(2, (96,)) * 2 - 1).to(torch.int8)
    w = pack(torch.randint(16, (20, 96)), torch.rand(20, 6) + 0.1, None, bits=4, group_size=16)
    turned = hadamard((x * signs).unflatten(-1, (-1, 24))).flatten(-2)
    for how in ({"bits": 8}, {"bits": 4, "group": 16, "wide": 2}):
        codes, step = hadamard_codes(x, signs, block=24, **how)
        kernel = {"x_bits": how["bits"], "x_group": how.get("group"), "x_wide": how.get("wide", 0)}
        y = w4a8_codes_matmul(codes, step, w, dtype=x.dtype)
        assert torch.equal(y, w4a8_matmul(turned, w, impl="reference", **kernel))
    for how, said in (
        ({"block": 36}, "`block`"), ({"block": 24, "group": 36}, "`group`"), ({"block": 24, "wide": 2}, "`wide`"),
        ({"block": 24, "bits": 5}, "`bits`"), ({"block": 24, "impl": "triton"}, "`impl`"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            hadamard_codes(x, signs, **how)
    with pytest.raises(ValueError, match="`signs`"):
        hadamard_codes(x, signs[:5], block=24)
    with pytest.raises(ValueError, match="`step`"):
        w4a8_codes_matmul(codes, step[..., :5].contiguous(), w, dtype=x.dtype)
    with pytest.raises(ValueError, match="`codes`"):
        w4a8_codes_matmul(codes.short(), step, w, dtype=x.dtype)


def test_codes_pass_opcheck():
    x, signs = torch.randn(2, 3, 64), torch.ones(64, dtype=torch.int8)
    torch.library.opcheck(torch.ops.workbench.hadamard_codes.default, (x, signs, 32, 4, 16, 1, "reference"))
    w = pack(torch.randint(16, (20, 64)), torch.rand(20, 4), None, bits=4, group_size=16)
    codes, step = hadamard_codes(x, signs, block=32, group=16)
    arguments = (codes, step, w.codes, w.scale, None, None, "rows", 4, 16, [20, 64], torch.float32, False, "reference")
    torch.library.opcheck(torch.ops.workbench.w4a8_codes_matmul.default, arguments)


@pytest.mark.parametrize("n", [12, 64, 576, 688])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_is_its_own_inverse_and_keeps_lengths(n, impl):
    x = torch.randn(7, n)
    y = hadamard(x, impl=impl)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(hadamard(y, impl=impl), x, atol=1e-5)


@pytest.mark.skipif(native.why_not() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("n", [16, 48, 144, 192, 576, 1536, 2304, 5120])
def test_rows_of_every_instruction_set(n):
    """Factors shorter and longer than a vector, several blocks in a row, numbers of rows that four does not divide."""
    block = widest_block(n, 640)
    assert cpu.in_rows(torch.ones(1, n), block)
    signs, gains = torch.randint(2, (n,)) * 2.0 - 1, torch.rand(n) + 0.5
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        x = torch.randn(7, n).to(dtype)
        blocks = (x.double() * signs).unflatten(-1, (-1, block))
        expected = (blocks @ hadamard_matrix(block, dtype=torch.float64)).flatten(-2) * gains * 0.5
        for isa in filter(native.runs, native.ISAS):
            y = torch.ops.workbench.hadamard_rows(x, signs, cpu._padded(block), gains, 0.5, isa)
            assert y.dtype == dtype and (y - expected).abs().max() < tolerance * expected.abs().max(), isa


@pytest.mark.parametrize("n", [576, 40, 230])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signs_and_gains_go_with_the_transform(n, dtype):
    """In whole rows and in blocks; also where a gradient is wanted, and for rows that C++ does not take."""
    x, signs, gains = torch.randn(2, 3, n).to(dtype), torch.randint(2, (n,)) * 2.0 - 1, torch.rand(n)
    expected = (hadamard_blocks(x.float() * signs) * gains).to(dtype)
    found = turned(x, signs, gains)
    assert found.shape == x.shape and found.dtype == dtype
    assert torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5)
    leaf = x.clone().requires_grad_()
    weights = torch.randn(n)
    (turned(leaf, signs, gains).float() * weights).sum().backward()
    gradient = hadamard_blocks((weights * gains)[None])[0] * signs
    assert torch.allclose(leaf.grad[0, 0].float(), gradient, rtol=2e-2, atol=2e-2)
    factors = gains.clone().requires_grad_()
    turned(x, signs, factors).float().sum().backward()
    assert factors.grad is not None and turned(x[:0], signs, gains).shape == (0, 3, n)


def test_rows_that_do_not_fit_are_refused():
    if native.why_not():
        pytest.skip("needs the C++ kernels")
    op, x = torch.ops.workbench.hadamard_rows, torch.ones(2, 48)
    factors = cpu._padded(48)
    for bad in ((torch.ones(2, 40), None, factors, None), (x, torch.ones(40), factors, None), (x, None, cpu._padded(64), None),
                (x.half(), None, factors, None), (x, None, [torch.ones(12, 12)], None)):  # fmt: skip
        with pytest.raises(RuntimeError, match="hadamard_rows"):
            op(*bad, 1.0, "auto")


def test_many_rows_are_taken_in_parts():
    x = torch.randn(1100, 512)
    assert torch.allclose(hadamard(x).double(), exact(x), atol=1e-4)


def test_float64_stays_exact():
    x = torch.randn(3, 5, 96, dtype=torch.float64)
    with recording() as used:
        y = hadamard(x)
    assert used == {"hadamard": {"reference"}}
    assert y.dtype == torch.float64 and torch.allclose(y, exact(x), atol=1e-12)


def test_gradient_is_the_transform_itself():
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: hadamard(x, scale=0.3), (x,))
    x = torch.randn(4, 64, requires_grad=True)
    g = torch.randn(4, 64)
    hadamard(x).backward(g)
    assert torch.allclose(x.grad, hadamard(g), atol=1e-6)


def test_rotating_input_and_weight_changes_no_product():
    x, W = torch.randn(5, 576), torch.randn(30, 576)
    assert torch.allclose(hadamard(x) @ hadamard(W).T, x @ W.T, atol=1e-3)


def test_bad_arguments_say_what_works():
    with pytest.raises(ValueError, match="not 92; near it: 88 and 96"):
        hadamard(torch.randn(2, 92))
    with pytest.raises(ValueError, match="not 0; near it: 1"):
        hadamard(torch.randn(2, 0))
    with pytest.raises(ValueError, match="`n` = .* not 18"):
        hadamard_matrix(18)
    with pytest.raises(ValueError, match="`impl` \\(='gpu'\\)"):
        hadamard(torch.randn(2, 8), impl="gpu")
    with pytest.raises(ValueError, match="'reference' or 'cpu' works"):
        hadamard(torch.randn(2, 8), impl="triton")
    with pytest.raises(ValueError, match="`impl` \\(='cpu'\\) does not take torch.float64"):
        hadamard(torch.randn(2, 8).double(), impl="cpu")
    with pytest.raises(ValueError, match="`x` \\(torch.int64\\)"):
        hadamard(torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("use", ["reference", "cpu"])
@pytest.mark.parametrize("n", [1, 12, 64])
def test_registered_op_passes_opcheck(use, n):
    x = torch.randn(3, n, requires_grad=True)
    torch.library.opcheck(torch.ops.workbench.hadamard, (x, 0.5, use))
    torch.library.opcheck(torch.ops.workbench.hadamard, (torch.randn(n, 6).t(), 0.5, use))


def test_survives_the_compiler_and_export(backend):
    class Rotated(torch.nn.Module):
        def forward(self, x):
            return hadamard(x) * 2

    x = torch.randn(6, 48).bfloat16()
    expected = Rotated()(x)
    assert torch.equal(torch.compile(Rotated(), fullgraph=True, backend=backend)(x), expected)
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    exported = torch.export.export(Rotated(), (x,), dynamic_shapes=(rows,)).module()
    assert torch.equal(exported(x), expected) and exported(x[:3]).shape == (3, 48)
