"""Integer weights with activations rounded on the way: the op's own checks, its edges, and what it refuses."""

import pytest
import torch

from compress.transforms import Rounding
from kernels import native
from kernels.int_matmul import int_matmul, pack, to_panels, unpack
from kernels.int_matmul.reference import dequantize as dequantize_integers
from kernels.lut_matmul import NF4, dequantize, pack_codebook
from kernels.lut_matmul import to_panels as codebook_panels
from kernels.registry import recording
from kernels.support.declarations import OWN
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w4a8_matmul.cases import checks, contests
from kernels.w8a8_matmul import quantize_rows

CPU = torch.device("cpu")
NATIVE = native.w4a8_runs()
needs_native = pytest.mark.skipif(not NATIVE, reason="needs AVX512-VNNI or NEON's dot products")
IMPLS = ["reference", pytest.param("cpu", marks=needs_native)]


def weight(out=40, columns=128, bits=4, group_size=32, zeros=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = (out, columns // group_size)
    zero = torch.randint(1 << bits, groups, generator=g) if zeros else None
    codes = torch.randint(1 << bits, (out, columns), generator=g)
    return pack(codes, torch.rand(groups, generator=g) + 0.1, zero, bits=bits, group_size=group_size)


@pytest.mark.parametrize("check", checks(CPU), ids=lambda check: check.name)
def test_check(check):
    for impl in ("reference", *(impl for impl in check.impls if impl != "triton")):
        assert check.error(impl) <= check.tolerance, impl


@needs_native
def test_every_width_runs_natively_and_a_call_says_what_ran():
    assert {name for check in checks(CPU) for name in check.impls} == {"cpu", "triton"}
    x = torch.randn(3, 128)
    for bits in (2, 3, 4, 5, 6, 8):
        with recording() as ran:
            w4a8_matmul(x, to_panels(weight(bits=bits)))
        assert ran == {"w4a8_matmul": {f"cpu {native.integers()}"}}
    with recording() as ran:
        w4a8_matmul(x, weight())
    assert ran["w4a8_matmul"] == {"reference"}


@needs_native
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 100, 260])
def test_codes_that_are_whole_give_the_exact_product(tokens):
    """x of integers up to 127 with a step of 1 is not rounded: the product is int_matmul's, to the last bit."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (tokens, 256), generator=g).float()
    w = weight(50, 256, 4, 64, zeros=True)
    w = w._replace(scale=torch.ones_like(w.scale))
    y = w4a8_matmul(x, to_panels(w), x_scale=torch.ones(()), impl="cpu")
    assert torch.equal(y, int_matmul(x.double().float(), w, impl="reference"))


@needs_native
@pytest.mark.parametrize("tokens", [2, 120])
def test_largest_sums(tokens):
    columns = 1 << 14
    codes = torch.full((17, columns), 0, dtype=torch.uint8)
    w = to_panels(pack(codes, torch.ones(17, 1), None, bits=8, group_size=columns))
    x = torch.ones(tokens, columns)
    assert (w4a8_matmul(x, w, impl="cpu") == -128.0 * columns).all()
    assert (w4a8_matmul(-x, w, impl="cpu") == 128.0 * columns).all()


@pytest.mark.skipif(native.tiles() != "amx", reason="needs AMX")
@pytest.mark.parametrize(
    "bits, zeros", [(2, True), (3, False), (4, False), (4, True), (5, True), (6, False), (8, False)]
)
def test_tiles_multiply_bytes_with_one_scale_for_each_row(bits, zeros):
    x, w, middle = torch.randn(70, 160).bfloat16(), weight(50, 160, bits, 32, zeros), 1 << (bits - 1)
    codes, zero = (part.long() for part in unpack(w))  # zero: [out, groups], or the middle code [1, 1]
    values = codes - zero.expand(-1, 5).repeat_interleave(32, 1)
    top = torch.maximum(zero, (1 << bits) - 1 - zero)
    expected, exact = _by_bytes(x, values, w.scale, top, middle), w4a8_matmul(x, w, impl="reference").float()
    y = w4a8_matmul(x, to_panels(w), impl="cpu").float()
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=2e-3 * expected.abs().max().item())
    assert (y - exact).norm() < 0.012 * exact.norm()


@pytest.mark.skipif(native.tiles() != "amx", reason="needs AMX")
@pytest.mark.parametrize("most", [127, 64, 63, 7])
def test_tiles_take_tables_of_any_integers(most):
    x, g = torch.randn(40, 128).bfloat16(), torch.Generator().manual_seed(3)
    codes, scale = torch.randint(16, (33, 128), generator=g), torch.rand(33, 8, generator=g) + 0.1
    table, times = torch.linspace(-most, most, 16).round(), 127 // most
    w = pack_codebook(codes, table, scale, group_size=16)
    panels = codebook_panels(w)
    with recording() as ran:
        y = w4a8_matmul(x, panels, impl="cpu").float()
    assert ran == {"w4a8_matmul": {"cpu amx"}}
    compiled = torch.compile(lambda x: w4a8_matmul(x, panels, impl="cpu"), fullgraph=True)
    assert torch.equal(compiled(x).float(), y)
    expected = w4a8_matmul(x, w, impl="reference").float()
    assert (y - expected).norm() < 0.012 * expected.norm()
    by_bytes = _by_bytes(x, table[codes].long() * times, scale / times, torch.tensor(most * times), 64)
    torch.testing.assert_close(y, by_bytes, rtol=1e-2, atol=2e-3 * y.abs().max().item())


def _by_bytes(x, values, scale, top, middle):
    """What kernels/native/w4a8_tiles.inc computes, in integers of torch."""
    unit = (scale * top).amax(1, keepdim=True) / 127
    ratio = (scale / unit * (256 * middle)).round().long().repeat_interleave(x.shape[1] // scale.shape[1], 1)
    weights = (values * (128 // middle) * ratio + (1 << 14)) >> 15
    codes, step = quantize_rows(x, torch.int8)
    return (codes.long() @ weights.T).float() * unit.T * step


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [4, 40])
def test_a_token_that_is_not_finite_gives_nan_and_no_other_does(impl, tokens):
    x = torch.randn(tokens, 128)
    x[0, 3], x[1, 60], x[2] = float("nan"), float("inf"), 0.0
    w = to_panels(weight()) if impl == "cpu" else weight()
    for options in ({}, {"x_group": 32}, {"x_scale": torch.tensor(0.1)}):
        y = w4a8_matmul(x, w, impl=impl, **options)
        assert y[:2].isnan().all() and y[3:].isfinite().all() and (y[2] == 0).all()


def looked_up(out, columns, group_size):
    g = torch.Generator().manual_seed(2)
    codes, table = torch.randint(16, (out, columns), generator=g), torch.randint(-127, 128, (16,), generator=g).float()
    return pack_codebook(codes, table, torch.rand(out, columns // group_size, generator=g) + 0.1, group_size=group_size)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [1, 9, 100])
@pytest.mark.parametrize("table", [False, True])
def test_wide_groups_are_those_of_eight_bits_and_the_others_those_of_four(impl, tokens, table):
    """Of x that is 0 outside of some groups, the product is that of a call in which all groups have their bits."""
    g = torch.Generator().manual_seed(3)
    x, group, wide = torch.randn(tokens, 192, generator=g), 32, 2
    rows = looked_up(37, 192, 32) if table else weight(37, 192, 4, 32)
    w = rows if impl == "reference" else (codebook_panels if table else to_panels)(rows)
    for columns, bits in ((slice(wide * group), 8), (slice(wide * group, None), 4)):
        part = torch.zeros_like(x)
        part[:, columns] = x[:, columns]
        y = w4a8_matmul(part, w, x_bits=4, x_group=group, x_wide=wide, impl=impl)
        assert torch.equal(y, w4a8_matmul(part, w, x_bits=bits, x_group=group, impl=impl))
    none, every = (w4a8_matmul(x, w, x_bits=4, x_group=group, x_wide=n, impl=impl) for n in (0, 6))
    assert torch.equal(none, w4a8_matmul(x, w, x_bits=4, x_group=group, impl=impl))
    assert torch.equal(every, w4a8_matmul(x, w, x_bits=8, x_group=group, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_order_is_that_of_the_columns_of_x(impl, tokens, dtype):
    g = torch.Generator().manual_seed(4)
    x, order = torch.randn(tokens, 128, generator=g).to(dtype), torch.randperm(128, generator=g).int()
    w = to_panels(weight()) if impl == "cpu" else weight()
    for how in ({"x_group": 16, "x_wide": 3, "x_bits": 4}, {}, {"x_group": 64, "x_scale": torch.tensor([0.1, 0.2])}):
        y = w4a8_matmul(x, w, x_order=order, impl=impl, **how)
        assert torch.equal(y, w4a8_matmul(x[:, order.long()], w, impl=impl, **how))


@pytest.mark.parametrize("impl", IMPLS)
def test_values_that_are_not_finite_give_rows_of_nan(impl):
    x = torch.randn(5, 128)
    x[0, 3], x[1, 60], x[2] = float("nan"), float("inf"), 0.0
    w = to_panels(weight()) if impl == "cpu" else weight()
    y = w4a8_matmul(x, w, x_bits=4, x_group=32, x_wide=1, x_order=torch.arange(127, -1, -1).int(), impl=impl)
    assert y[:2].isnan().all() and y[3:].isfinite().all() and (y[2] == 0).all()


@needs_native
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_codes_in_two_widths_give_the_sums_of_the_reference(tokens):
    """Scales of 1 and steps that are given: every number is an integer, and sums are exact."""
    g = torch.Generator().manual_seed(5)
    w = looked_up(53, 192, 16)
    w = w._replace(scale=torch.ones_like(w.scale))
    x = torch.randint(-300, 300, (tokens, 192), generator=g).float()
    how = {"x_bits": 4, "x_group": 32, "x_wide": 1, "x_scale": torch.ones(6), "x_order": torch.randperm(192).int()}
    y = w4a8_matmul(x, codebook_panels(w), impl="cpu", **how)
    assert torch.equal(y, w4a8_matmul(x, w, impl="reference", **how))
    ordered = x[:, how["x_order"].long()]
    codes = torch.cat([ordered[:, :32].clamp(-127, 127), ordered[:, 32:].clamp(-7, 7)], 1)
    assert torch.equal(y, codes @ dequantize(w).t())


def test_four_bits_are_coarser_than_eight_and_small_groups_finer_than_rows():
    x, w = torch.randn(20, 128), weight()
    exact = int_matmul(x, w)
    error = [
        (w4a8_matmul(x, w, x_bits=bits, x_group=group) - exact).norm().item()
        for bits, group in ((4, None), (4, 16), (8, None))
    ]
    assert error[0] > error[1] > error[2]
    codes, step = quantize_rows(x, torch.int8, bits=4)
    assert codes.abs().amax() == 7 and torch.allclose(step[:, 0] * 7, x.abs().amax(1))


@needs_native
def test_results_do_not_depend_on_threads_or_on_other_tokens():
    x, w = torch.randn(300, 256), to_panels(weight(600, 256, 4, 64))
    y, threads = w4a8_matmul(x, w), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(y, w4a8_matmul(x, w))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(y[7:9], w4a8_matmul(x[7:9], w))


def test_w4a8_matmul_passes_opcheck_and_torch_compile():
    x, w = torch.randn(2, 3, 128), weight()
    order = torch.randperm(128).int()
    arguments = (x, w.codes, w.scale, None, None, None, order, "rows", 4, 32, [40, 128], 4, 32, 2, False, "reference")
    torch.library.opcheck(torch.ops.workbench.w4a8_matmul.default, arguments)
    if NATIVE:
        w = to_panels(w)
        torch.library.opcheck(
            torch.ops.workbench.panels_w4a8.default, (x, w.codes, w.scale, None, None, 40, 4, 32, None, 2, order),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
    compiled = torch.compile(lambda x: w4a8_matmul(x, w, x_group=64) + 1, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled, w4a8_matmul(x, w, x_group=64) + 1)


def test_impossible_options_are_refused_by_name():
    x, w = torch.randn(2, 96), weight(8, 96, 4, 24)
    for options, name in (
        ({"x_bits": 6}, "x_bits"), ({"x_group": 36}, "x_group"), ({"x_group": 50}, "x_group"),
        ({"x_wide": 2}, "x_wide"), ({"x_wide": -1}, "x_wide"), ({"x_wide": 5, "x_group": 24}, "x_wide"),
        ({"x_order": torch.arange(95).int()}, "x_order"), ({"x_order": torch.arange(96)}, "x_order"),
        ({"x_scale": torch.ones(4)}, "x_scale"), ({"impl": "cpu"}, "impl"), ({"impl": "fast"}, "impl"),
        ({"x_float": True, "x_bits": 4}, "x_float"), ({"x_float": True, "x_wide": 1, "x_group": 24}, "x_float"),
        ({"x_float": True, "impl": "cpu"}, "impl"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"`{name}`"):
            w4a8_matmul(x, w, **options)
    with pytest.raises(ValueError, match="`x`"):
        w4a8_matmul(x[:, :95], w)
    nf4 = pack_codebook(torch.zeros(8, 96, dtype=torch.uint8), NF4, torch.ones(8, 4), group_size=24)
    with pytest.raises(ValueError, match="`w`.*integers"):
        w4a8_matmul(x, nf4)
    if NATIVE:
        with pytest.raises(RuntimeError, match="`x_order` holds numbers that are no columns"):
            w4a8_matmul(x, to_panels(weight(8, 96, 4, 24)), x_order=torch.arange(1, 97).int())
        with pytest.raises(RuntimeError, match="integers"):
            w4a8_matmul(x, codebook_panels(nf4))
    assert w4a8_matmul(x, w, x_group=8).isfinite().all() and w4a8_matmul(x, w, x_group=48).isfinite().all()


@pytest.mark.parametrize("group, static", [(-1, False), (32, False), (-1, True)])
def test_float8_is_what_a_recipe_rounds_to(group, static):
    """`activations(format=fp8)`, which is emulated where no kernel takes it."""
    x, w = torch.randn(5, 128) * 3, weight()
    step = torch.tensor(0.01) if static else None
    rounding = Rounding(8, "fp8", group_size=group, step=step)
    assert rounding.in_float8 and not rounding.in_integers
    y = w4a8_matmul(x, w, x_group=None if group == -1 else group, x_scale=step, x_float=True, impl="reference")
    torch.testing.assert_close(y, rounding(x) @ dequantize_integers(w).float().t(), rtol=1e-5, atol=1e-4)


@needs_native
def test_contests_compare_the_same_product():
    for contest in contests(CPU, True, OWN):
        ours, other = (contest.contestants[name](0).float() for name in ("cpu", "int_matmul"))
        assert (ours - other).norm() < 0.03 * other.norm()
