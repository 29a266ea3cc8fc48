"""The 8-bit product: quantisation within half a step, integer sums exact to the last bit, scales where they belong."""

import pytest
import torch

from kernels import native
from kernels.registry import recording
from kernels.w8a8_matmul import (
    BLOCK,
    W8,
    prepacked_fits,
    quantize_rows,
    quantize_weight,
    to_prepacked,
    to_rows,
    w8a8_matmul,
)
from kernels.w8a8_matmul import cpu as plain
from kernels.w8a8_matmul.codes import w8a8_codes_matmul
from kernels.w8a8_matmul.layout import encode, has_vnni, in_one_call, integer_dots
from kernels.w8a8_matmul.reference import product

INT8, FP8 = torch.int8, torch.float8_e4m3fn
VNNI, DOTS = has_vnni(), integer_dots(torch.empty(0))
LAYOUTS = [*(["panels"] if DOTS and in_one_call() else []), *(["prepacked"] if VNNI else [])]
needs_vnni = pytest.mark.skipif(not VNNI, reason="this CPU has no AVX512-VNNI")
needs_panels = pytest.mark.skipif("panels" not in LAYOUTS, reason="no int8 dot products, or no C++ kernels")
SHAPES = [(64, 96), (37, 77), (1, 1), (200, 300), (16, 16)]  # out, in


def decode(codes, scale, block=None):
    return codes.double() * scale.double().repeat_interleave(block or codes.shape[-1], -1)[..., : codes.shape[-1]]


def rms(y, exact):
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def every_layout(w):
    """The weight, and what `to_prepacked` makes of it."""
    fits = w.codes.dtype == INT8 and w.scale.dim() == 1
    return [w, *(to_prepacked(w, layout) for layout in LAYOUTS if fits)]


def half_step(codes, scale):
    """Half the distance to the next code, at each code."""
    if codes.dtype == INT8:
        return scale.double() / 2
    exponent = codes.double().abs().clamp_min(2.0**-6).log2().floor()  # below 2^-6 the codes are evenly spaced
    return scale.double() * 2.0 ** (exponent - 3) / 2


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_is_off_by_half_a_step_at_most(kind, dtype):
    x = (torch.randn(50, 333) * torch.logspace(-6, 3, 50)[:, None]).to(dtype)
    codes, scale = quantize_rows(x, kind)
    assert codes.dtype == kind and scale.dtype == torch.float32 and scale.shape == (50, 1)
    # A float8 code just above a power of two may have been rounded up from where the spacing is half as wide: never
    # more.
    assert ((decode(codes, scale) - x.double()).abs() <= half_step(codes, scale) * (1 + 1e-5)).all()
    assert (codes.float().abs().amax(-1) == (127 if kind == INT8 else 448)).all(), (
        "the largest entry takes the largest code"
    )


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_rounding_is_to_nearest_even_and_never_beyond_the_largest_code(kind):
    v = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 1e9, -1e9, 3.4e38])
    if kind == INT8:
        assert encode(v, kind).tolist() == [0, 2, 2, 0, -2, 126, 127, -127, 127]
    else:
        assert encode(v, kind).float().tolist() == [0.5, 1.5, 2.5, -0.5, -1.5, 128, 448, -448, 448]
        near = torch.linspace(440, 1000, 500)
        assert encode(near, kind).float().isfinite().all(), "finite numbers stay finite"
        assert encode(torch.tensor([2.0**-10, 3 * 2.0**-10]), kind).float().tolist() == [0, 2.0**-8]


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_groups_of_columns_have_steps_of_their_own(kind):
    x = torch.randn(3, 5, 300)
    codes, scale = quantize_rows(x, kind, block=BLOCK)
    assert codes.shape == x.shape and scale.shape == (3, 5, 3)
    for i in range(3):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        alone, step = quantize_rows(x[..., part], kind)
        assert torch.equal(codes[..., part].view(torch.uint8), alone.view(torch.uint8)) and torch.equal(
            scale[..., i : i + 1], step
        )


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("static", [False, True])
def test_zeros_stay_zeros_and_what_is_not_finite_is_never_hidden(kind, static):
    x = torch.randn(6, 40)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4] = 0, torch.nan, torch.inf, -torch.inf, 1e-40
    x_scale = torch.tensor(0.05) if static else None
    codes, scale = quantize_rows(x, kind, scale=x_scale)
    assert (codes[0].float() == 0).all() and scale[0].isfinite() and scale[0] > 0
    w = quantize_weight(torch.randn(8, 40), kind)
    for weight in every_layout(w):
        y = w8a8_matmul(x, weight, x_scale=x_scale)
        assert (y[0] == 0).all() and y[1:4].isnan().all() and y[4:].isfinite().all()


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_product_of_quantised_operands(kind, shape, dtype, static):
    w = quantize_weight(torch.randn(shape), kind)
    x = torch.randn(2, 3, shape[1]).to(dtype)
    x_scale = torch.tensor(2.0 / (127 if kind == INT8 else 448)) if static else None
    exact = decode(*quantize_rows(x, kind, scale=x_scale)) @ (w.codes.double() * w.scale.double()[:, None]).T
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    for impl in ("auto", "reference"):
        y = w8a8_matmul(x, w, x_scale=x_scale, impl=impl)
        assert y.dtype == dtype and y.shape == (2, 3, shape[0])
        assert rms(y, exact) < tolerance


def test_eight_bits_are_close_to_the_product_itself():
    x, W = torch.randn(20, 512), torch.randn(64, 512)
    errors = {kind: rms(w8a8_matmul(x, quantize_weight(W, kind)), x.double() @ W.double().T) for kind in (INT8, FP8)}
    assert errors[INT8] < 0.015 and errors[FP8] < 0.05, errors


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (37, 77), (256, 384)])
def test_blocks_have_scales_of_their_own(kind, shape):
    out, columns = shape
    W = torch.randn(shape)
    W[:, : columns // 2] *= 100
    w = quantize_weight(W, kind, BLOCK)
    assert w.scale.shape == (-(-out // BLOCK), -(-columns // BLOCK))
    dense = w.codes.double() * w.scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:out, :columns]
    spacing = w.scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:out, :columns]
    assert ((dense - W).abs() <= half_step(w.codes, spacing) * (1 + 1e-5)).all()
    x = torch.randn(7, columns)
    exact = decode(*quantize_rows(x, kind, block=BLOCK), BLOCK) @ dense.T
    assert rms(w8a8_matmul(x, w), exact) < 1e-6
    x_scale = torch.tensor(0.01)
    exact = decode(*quantize_rows(x, kind, scale=x_scale)) @ dense.T
    assert rms(w8a8_matmul(x, w, x_scale=x_scale), exact) < 1e-6


@pytest.mark.parametrize("columns", [5, 1024, 1025, 14336])
def test_integer_sums_are_exact_with_the_largest_codes(columns):
    a = torch.randint(0, 2, (9, columns), dtype=INT8) * -1 | 1  # -1 and 1
    b = torch.randint(-128, 128, (33, columns)).to(INT8)
    b[0], b[1], b[2] = -128, 127, torch.where(a[0] > 0, 127, -128)
    a = a * 127
    a[1], a[2] = 127, -127
    exact = (a.long() @ b.long().T).to(torch.int32)
    assert torch.equal(product(a, b), exact)
    one = torch.ones(())
    for impl in ("reference", "cpu") if VNNI else ("reference",):
        rows = W8("rows", b, torch.ones(33), (33, columns))
        for w in every_layout(rows) if impl == "cpu" else (rows,):
            for tokens in (1, 2, 9):
                y = w8a8_matmul(a[:tokens].float(), w, x_scale=one, impl=impl)  # codes times 1 times 1
                if w.layout == "prepacked":  # with AMX oneDNN adds parts of a sum in float32
                    rounding = columns * 128 * 127 * 2**-22
                    assert torch.allclose(y, exact[:tokens].float(), rtol=0, atol=rounding)
                else:
                    assert torch.equal(y, exact[:tokens].float()), f"{impl} {w.layout} {tokens}"


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_a_static_scale_clamps(kind):
    largest = 127.0 if kind == INT8 else 448.0
    x = torch.tensor([[3.0, -1000.0, 1000.0, 0.5, 1e30]])
    codes, scale = quantize_rows(x, kind, scale=torch.tensor(0.5))
    assert codes.float().tolist() == [[6, -largest, largest, 1, largest]] and scale.tolist() == [[0.5]]
    w = W8("rows", torch.eye(5).to(kind), torch.ones(5), (5, 5))
    y = w8a8_matmul(x, w, x_scale=torch.tensor(0.5))
    assert y.tolist() == [[3, -largest / 2, largest / 2, 0.5, largest / 2]]


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_the_fast_quantiser_gives_the_same_codes(dtype, static):
    x = (torch.randn(40, 513) * torch.logspace(-3, 2, 40)[:, None]).to(dtype)
    x[3] = 0
    x_scale, kept = torch.tensor(0.02) if static else None, x.clone()
    for mine, reference in zip(plain.quantize(x, x_scale), quantize_rows(x, INT8, scale=x_scale), strict=True):
        assert torch.equal(mine.expand_as(reference), reference)
    assert torch.equal(x, kept), "x is not written to"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (192, 576), (31, 1100)])
def test_prepacking_is_reversible_and_changes_no_bit(shape, layout):
    w = quantize_weight(torch.randn(shape), INT8)
    packed = to_prepacked(w, layout)
    back = to_rows(packed)
    assert packed.layout == layout
    assert torch.equal(back.codes, w.codes) and back.codes.is_contiguous() and back[2:] == w[2:] and to_rows(w) is w
    for tokens, dtype in ((1, torch.float32), (5, torch.bfloat16), (40, torch.float16), (40, torch.bfloat16)):
        x = torch.randn(tokens, shape[1]).to(dtype)
        y = w8a8_matmul(x, w, impl="reference")
        assert torch.equal(w8a8_matmul(x, w), y) and torch.equal(w8a8_matmul(x, packed), y)
        assert torch.equal(w8a8_matmul(x, packed, impl="reference"), y)
        if layout == "prepacked":
            assert torch.equal(plain.w8a8_matmul(x, packed, None), y), "without the C++ op"


@needs_panels
@pytest.mark.parametrize(("threads", "static"), [(1, False), (2, True), (5, False)])
def test_panels_give_the_bits_of_the_reference_however_tokens_are_shared_out(threads, static):
    """Blocks of 1 to 14 tokens, tokens or panels shared among threads, codes down to -128, scales of both signs."""
    x_scale = torch.tensor(0.03) if static else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for out, columns in ((70, 130), (192, 576), (33, 2100)):
            codes = torch.randint(-128, 128, (out, columns)).to(INT8)
            codes[0] = -128
            w = W8("rows", codes, torch.randn(out), (out, columns))
            packed = to_prepacked(w, "panels")
            for tokens in (*range(1, 17), 29, 61, 150, 331):
                x = torch.randn(tokens, columns) * 2
                x[-1], x[tokens // 2, columns // 2] = 0, torch.nan
                dtype = (torch.float32, torch.bfloat16, torch.float16)[tokens % 3]
                y = w8a8_matmul(x.to(dtype), w, x_scale=x_scale, impl="reference")
                mine = w8a8_matmul(x.to(dtype), packed, x_scale=x_scale)
                assert torch.equal(mine.isnan(), y.isnan()) and torch.equal(mine.nan_to_num(), y.nan_to_num()), (
                    out,
                    tokens,
                )
    finally:
        torch.set_num_threads(before)


@needs_panels
def test_panels_are_ordinary_memory():
    """They can be saved, copied and cut out of something larger, at any address."""
    w = to_prepacked(quantize_weight(torch.randn(40, 50), INT8), "panels")
    x = torch.randn(3, 50)
    y, store = w8a8_matmul(x, w), torch.empty(w.codes.numel() + 1, dtype=INT8)
    moved = store[1:].view(w.codes.shape).copy_(w.codes)
    assert moved.data_ptr() % 2 and torch.equal(w8a8_matmul(x, w._replace(codes=moved)), y)
    assert w.codes.numel() == 64 * 52, "rows are filled up to 32, columns to 4"


@needs_vnni
def test_implementations_without_the_cpp_kernels(monkeypatch):
    w, x = quantize_weight(torch.randn(40, 50), INT8), torch.randn(3, 50)
    weights, y = every_layout(w), w8a8_matmul(x, w, impl="reference")
    monkeypatch.setattr(native, "why_not", lambda: "switched off")
    assert to_prepacked(w).layout == "prepacked"
    for weight, name in zip(
        weights, ["cpu int_mm", *("reference" if i == "panels" else "cpu prepacked" for i in LAYOUTS)], strict=True
    ):
        with recording() as used:
            assert torch.equal(w8a8_matmul(x, weight), y)
        assert used["w8a8_matmul"] == {name}
        if name == "reference":
            with pytest.raises(ValueError, match="C\\+\\+ kernels"):
                w8a8_matmul(x, weight, impl="cpu")


@needs_vnni
def test_torchs_own_int8_product_agrees():
    w = quantize_weight(torch.randn(48, 96), INT8)
    x = torch.randn(20, 96)
    codes, scale = quantize_rows(x, INT8)
    peer = torch._int_mm(codes, w.codes.t()).float() * w.scale * scale
    assert torch.equal(w8a8_matmul(x, w, impl="reference"), peer)


def test_torchs_own_fp8_product_agrees():
    w = quantize_weight(torch.randn(48, 96), FP8)
    x = torch.randn(20, 96)
    codes, scale = quantize_rows(x, FP8)
    try:
        peer = torch._scaled_mm(codes, w.codes.t(), scale, w.scale[None], out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no fp8 product on a CPU: {error}")
    assert rms(w8a8_matmul(x, w), peer.double()) < 1e-5


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_strides_and_empty_batches(kind):
    w = quantize_weight(torch.randn(64, 48), kind)
    x = torch.randn(96, 10).t()[::2, ::2]  # [5, 48], not contiguous
    assert torch.equal(w8a8_matmul(x, w), w8a8_matmul(x.contiguous(), w))
    for shape in ((0, 48), (2, 0, 48)):
        for impl in ("auto", "reference", "cpu") if kind == INT8 and VNNI else ("auto", "reference"):
            y = w8a8_matmul(torch.zeros(shape, dtype=torch.bfloat16), w, impl=impl)
            assert y.shape == (*shape[:-1], 64) and y.dtype == torch.bfloat16
    assert w8a8_matmul(torch.randn(48), w).shape == (64,)


def test_bad_arguments_say_what_works():
    w, x = quantize_weight(torch.randn(16, 64), INT8), torch.randn(2, 64)
    wrong = [
        ("in_features \\(=64\\)", lambda: w8a8_matmul(torch.randn(2, 63), w)),
        ("`x` \\(=torch.float64\\)", lambda: w8a8_matmul(x.double(), w)),
        ("`impl` \\(='fast'\\)", lambda: w8a8_matmul(x, w, impl="fast")),
        ("`w.layout` \\(='tiles'\\)", lambda: w8a8_matmul(x, w._replace(layout="tiles"))),
        ("`w.codes` \\(=torch.uint8\\)", lambda: w8a8_matmul(x, w._replace(codes=w.codes.view(torch.uint8)))),
        ("must be contiguous \\(1, 16, 32, 4\\)", lambda: w8a8_matmul(x, w._replace(layout="panels"))),
        ("`layout` \\(='tiles'\\)", lambda: to_prepacked(w, "tiles")),
        ("must be contiguous \\(16, 64\\)", lambda: w8a8_matmul(x, w._replace(codes=w.codes.t().contiguous().t()))),
        ("`w.scale` torch.float32 \\(15,\\)", lambda: w8a8_matmul(x, w._replace(scale=w.scale[:15]))),
        ("`w.scale` torch.float64", lambda: w8a8_matmul(x, w._replace(scale=w.scale.double()))),
        ("`x_scale` must be", lambda: w8a8_matmul(x, w, x_scale=torch.ones(2))),
        ("`x_scale` must be", lambda: w8a8_matmul(x, w, x_scale=torch.ones((), dtype=torch.float64))),
        ("`dtype` \\(=torch.int16\\)", lambda: quantize_rows(x, torch.int16)),
        ("`dtype` \\(=torch.float8_e5m2\\)", lambda: quantize_weight(x, torch.float8_e5m2, BLOCK)),
        ("`block` \\(=64\\)", lambda: quantize_weight(x, INT8, 64)),
        ("finite numbers", lambda: quantize_weight(torch.full((2, 2), torch.nan), INT8)),
        ("`impl` \\(='cpu'\\)", lambda: w8a8_matmul(x, quantize_weight(torch.randn(16, 64), FP8), impl="cpu")),
        ("`w` must be int8 rows", lambda: to_prepacked(quantize_weight(torch.randn(16, 64), FP8))),
        (
            "in_features \\(=131073\\)",
            lambda: w8a8_matmul(
                torch.zeros(1, 131073), W8("rows", torch.zeros(1, 131073, dtype=INT8), torch.ones(1), (1, 131073))
            ),
        ),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    if not torch.cuda.is_available():
        from kernels.interpreter import interpreting

        if not interpreting():
            with pytest.raises(ValueError, match="TRITON_INTERPRET"):
                w8a8_matmul(x, w, impl="triton")


def weights():
    found = [quantize_weight(torch.randn(64, 48), INT8), quantize_weight(torch.randn(64, 48), FP8)]
    found.append(quantize_weight(torch.randn(64, 48), FP8, BLOCK))
    return [*every_layout(found[0]), *found[1:]]


@pytest.mark.parametrize("static", [False, True])
def test_registered_op_passes_opcheck(static):
    """But not with an opaque weight: opcheck wants memory to look at. Compiling, freezing and exporting are tried
    below."""
    for w in weights():
        if w.layout == "rows":
            use = "cpu" if w.codes.dtype == INT8 and VNNI else "reference"
            float8 = w.codes.dtype == FP8
            codes = w.codes.view(INT8) if float8 else w.codes
            arguments = (
                torch.randn(3, 48),
                codes,
                w.scale,
                torch.tensor(0.1) if static else None,
                w.layout,
                64,
                float8,
                use,
            )
            torch.library.opcheck(torch.ops.workbench.w8a8_matmul, arguments)
        elif w.layout == "panels":
            x_scale = torch.tensor(0.1) if static else None
            for x in (torch.randn(3, 48), torch.randn(2, 5, 48, dtype=torch.bfloat16)):
                torch.library.opcheck(torch.ops.workbench.int8_matmul, (x, w.codes, w.scale, x_scale))


class Layer(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w
        self.register_buffer("codes", w.codes)
        self.register_buffer("scale", w.scale)

    def forward(self, x):
        return w8a8_matmul(x, self.w._replace(codes=self.codes, scale=self.scale)) * 2


def test_survives_the_compiler_and_export(backend):
    x = torch.randn(3, 48)
    for w in weights():
        layer = Layer(w)
        y = layer(x)
        with recording() as used:
            assert torch.allclose(torch.compile(layer, fullgraph=True, backend=backend)(x), y)
        assert used["w8a8_matmul"], "the implementation is noted when the graph is traced"
        assert torch.allclose(torch.export.export(layer, (x,)).module()(x), y)


@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_frozen_graphs_keep_the_weight_in_eight_bits(count):
    """Freezing folds what depends on constants alone; a dequantised weight must not become one."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(3, 48)
    for w in weights()[:count]:
        layer = Layer(w).eval()
        with torch.no_grad(), torch._inductor.config.patch(freezing=True):
            y, code = run_and_get_code(torch.compile(layer), x)
        assert torch.allclose(y, layer(x))
        assert any(op in "".join(code) for op in ("workbench.w8a8_matmul", "workbench.int8_matmul"))


@needs_vnni
def test_prepacking_is_refused_where_the_product_would_be_wrong():
    w = quantize_weight(torch.randn(16, 64), INT8)
    assert prepacked_fits(w)
    assert not any(prepacked_fits(other) for other in every_layout(w)[1:])
    assert not prepacked_fits(quantize_weight(torch.randn(16, 64), INT8, BLOCK))
    assert not prepacked_fits(w._replace(codes=w.codes.to("meta")))


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_the_product_of_given_codes_is_that_of_the_call_that_makes_them(dtype):
    x, w = torch.randn(5, 96).bfloat16(), quantize_weight(torch.randn(40, 96), dtype)
    codes, step = quantize_rows(x, dtype)
    y = w8a8_codes_matmul(codes, step, w, dtype=torch.bfloat16)
    assert torch.equal(y, w8a8_matmul(x, w, impl="reference"))
    bits = (codes.view(INT8), step, w.codes.view(INT8), w.scale, torch.bfloat16, dtype == FP8, "reference")
    torch.library.opcheck(torch.ops.workbench.w8a8_codes_matmul.default, bits)


def test_codes_that_do_not_match_are_refused_by_name():
    w, step = quantize_weight(torch.randn(40, 96), INT8), torch.ones(5, 1)
    codes, blocks = torch.zeros(5, 96, dtype=INT8), quantize_weight(torch.randn(40, 96), INT8, BLOCK)
    for arguments, name in (
        ((codes[:, :95], step, w), "codes"), ((codes.to(FP8), step, w), "codes"), ((codes[None], step, w), "codes"),
        ((torch.zeros(5, 97, dtype=INT8)[:, :96], step, w), "codes"), ((codes, step[:4], w), "step"),
        ((codes, step.double(), w), "step"), ((codes, step, blocks), "w"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"`{name}`"):
            w8a8_codes_matmul(*arguments, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="`impl`"):
        w8a8_codes_matmul(codes, step, w, dtype=torch.bfloat16, impl="cpu")
