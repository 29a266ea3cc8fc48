"""The integer product: packing is exact, every implementation agrees with float64, and it survives the compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.formats.int_group import IntGroup
from compress.linear import CompressedLinear
from kernels import compiler, native
from kernels.compiler import place
from kernels.int_matmul import (
    BITS,
    dequantize,
    int_matmul,
    look_up,
    pack,
    panels,
    panels_fit,
    tiles,
    tiles_fit,
    to_panels,
    to_rows,
    to_tiles,
    unpack,
)
from kernels.int_matmul.layout import pack_bits, unpack_bits
from kernels.lut_matmul import NF4, pack_codebook
from kernels.lut_matmul import to_panels as codebook_panels
from kernels.registry import recording

SHAPES = [(192, 128, 32), (80, 192, 64), (33, 60, 12), (16, 64, 64), (5, 7, 7), (1, 8, 8)]  # out, in, group_size


def make(out, columns, group_size, bits, symmetric, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out, columns), generator=g)
    scale = ((torch.rand(out, columns // group_size, generator=g) - 0.3) * 0.1).bfloat16()
    zero = None if symmetric else torch.randint(0, 1 << bits, (out, columns // group_size), generator=g)
    shift = zero.repeat_interleave(group_size, 1) if zero is not None else 1 << (bits - 1)
    exact = (codes - shift).double() * scale.double().repeat_interleave(group_size, 1)
    return codes, zero, pack(codes, scale, zero, bits=bits, group_size=group_size), exact


def rms(y, exact):
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-9)).item()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 64])
def test_packing_is_reversible_and_tight(bits, n):
    codes = torch.randint(0, 1 << bits, (5, n))
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (5, -(-n // 8) * bits)
    assert torch.equal(unpack_bits(packed, bits, n).long(), codes)


def test_packing_is_a_little_endian_stream_of_bits():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]])
    stream = sum(int(c) << (3 * i) for i, c in enumerate(codes[0]))
    assert bytes(pack_bits(codes, 3)[0].tolist()) == stream.to_bytes(3, "little")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_exact(bits, symmetric, shape):
    codes, _, w, exact = make(*shape, bits, symmetric)
    assert torch.equal(unpack(w)[0].long(), codes)
    assert torch.equal(dequantize(w).double(), exact.float().double())
    x = torch.randn(2, 3, shape[1])
    assert rms(int_matmul(x, w), x.double() @ exact.T) < 1e-5


@pytest.mark.in_turns
@pytest.mark.parametrize("bits", [b for b in BITS if b <= 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(192, 128, 32), (80, 192, 64), (16, 128, 128), (272, 256, 256)])
def test_tiles_agree_for_few_and_many_tokens(bits, symmetric, dtype, shape):
    codes, zero, w, exact = make(*shape, bits, symmetric)
    w4 = to_tiles(w, dtype)
    assert torch.equal(unpack(to_rows(w4))[0].long(), codes)
    if dtype == torch.bfloat16:  # the scales' own dtype: the way back is exact
        back = to_rows(w4)
        assert torch.equal(back.codes, w.codes) and torch.equal(back.scale, w.scale)
    for tokens in (1, 3, tiles.CROSSOVER - 1, tiles.CROSSOVER, 300):
        x = torch.randn(tokens, shape[1]).to(dtype)
        with recording() as used:
            y = int_matmul(x, w4)
        assert used["int_matmul"] == {"cpu int4pack" if tokens < tiles.CROSSOVER else "cpu dequantise"}
        assert y.dtype == dtype
        assert rms(y, x.double() @ exact.T) < (1e-2 if dtype == torch.bfloat16 else 2e-3)
        assert rms(int_matmul(x, w4, impl="reference"), x.double() @ exact.T) < (
            1e-2 if dtype == torch.bfloat16 else 2e-3
        )


needs_native = pytest.mark.skipif(native.why_not() is not None, reason=f"no C++ kernels here: {native.why_not()}")
PANELS = native.why_not() is None and native.isa(torch.float32) != "portable"  # else torch's own products run
ISAS = [isa for isa in ("avx512vnni", "avx2 pairs", *native.ISAS) if native.why_not() is None and native.runs(isa)]
# Instruction sets that multiply inputs as integers, by which bits.
INTEGERS = {"avx512vnni": BITS, "avx2 pairs": BITS[:-1]}
TILES = {"amx": ["amx", "avx512 tiles"], "avx512 tiles": ["avx512 tiles"]}.get(native.tiles(), [])


@pytest.mark.in_turns
@needs_native
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (192, 128, 32),
        (80, 192, 64),
        (16, 128, 128),
        (33, 40, 8),
        (1, 8, 8),
        (17, 96, 96),
        (40, 320, 320),
        (20, 336, 48),
    ],
)
def test_panels_lose_nothing_and_agree_for_few_and_many_tokens(bits, symmetric, shape):
    codes, zero, w, exact = make(*shape, bits, symmetric)
    laid = to_panels(w)
    back = to_rows(laid)
    assert torch.equal(back.codes, w.codes) and torch.equal(back.scale, w.scale)
    assert (zero is None and back.zero is None) or torch.equal(back.zero, w.zero)
    assert torch.equal(dequantize(laid), dequantize(w))
    ids = torch.randint(0, shape[0], (5,))
    assert torch.equal(look_up(laid, ids), dequantize(w)[ids]) and torch.equal(look_up(w, ids), dequantize(w)[ids])
    for dtype, tolerance in ((torch.bfloat16, 5e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)):
        for tokens in (1, 2, 3, 8, 9, 64, 130):
            x = torch.randn(tokens, shape[1]).to(dtype)
            with recording() as used:
                y = int_matmul(x, laid)
            own = f"cpu {native.isa(dtype, tokens > native.most_in_loops())}"
            assert used["int_matmul"] == {own if PANELS else "reference"} and y.dtype == dtype
            if PANELS:
                assert rms(y, x.double() @ exact.T) < tolerance, (dtype, tokens)
            else:
                assert torch.equal(y, int_matmul(x, w, impl="reference"))


@needs_native
@pytest.mark.parametrize("isa", ISAS + TILES)
def test_every_instruction_set_computes_the_same(isa):
    for symmetric in (True, False):
        for scale_dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bits in INTEGERS.get(isa, BITS):
                _, _, w, _ = make(50, 192, 64, bits, symmetric)
                w = to_panels(w._replace(scale=w.scale.to(scale_dtype)))
                exact = dequantize(w).double()
                for tokens in (1, 2, 3, 5, 7, 8, 9, 19, 33):
                    x = torch.randn(tokens, 192).bfloat16()
                    assert rms(panels.matmul(x, w, isa), x.double() @ exact.T) < 4e-3, (bits, scale_dtype, tokens)


@needs_native
@pytest.mark.skipif(not TILES, reason="no tiles here")
@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("columns, group_size, out", [(40, 8, 33), (672, 96, 65), (1000, 200, 17), (2048, 2048, 40)])
def test_tiles_take_every_shape(columns, group_size, out, threads, isa):
    """Columns that fill no tile or several chunks of them, rows that fill no panel or pair of panels, one to many tiles
    of tokens, and more than meet a decoded chunk; a token with an infinity or a NaN spoils no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for bits in (3, 4):
            _, _, w, exact = make(out, columns, group_size, bits, False)
            for tokens in (9, 16, 17, 47, 1040):
                x = torch.randn(tokens, columns).bfloat16()
                y = panels.matmul(x, to_panels(w), isa)
                assert rms(y, x.double() @ exact.T) < 4e-3
                x[0, 3], x[1, -1] = torch.inf, torch.nan
                spoilt = panels.matmul(x, to_panels(w), isa)
                assert not spoilt[:2].isfinite().any() and torch.equal(spoilt[2:], y[2:])
    finally:
        torch.set_num_threads(before)


def by_integers(isa):
    return pytest.param(isa, marks=pytest.mark.skipif(isa not in ISAS, reason="this processor lacks it"))


@pytest.mark.parametrize("isa", map(by_integers, INTEGERS))
@pytest.mark.parametrize(
    "bits, columns, group_size", [(8, 4096, 4096), (4, 1032, 1032), (6, 1536, 1536), (4, 2096, 2096)]
)
def test_sums_of_integers_never_overflow(bits, columns, group_size, isa):
    """The largest codes by the largest inputs, all of one sign, in groups that are cut into pieces."""
    if bits not in INTEGERS[isa]:
        pytest.skip(f"no loops for {bits} bits")
    codes, x = (
        torch.full((20, columns), (1 << bits) - 1),
        torch.full((9, columns), torch.finfo(torch.bfloat16).max / 1e34),
    )
    w = to_panels(pack(codes, torch.ones(20, 1), torch.zeros(20, 1).long(), bits=bits, group_size=group_size))
    for tokens in (1, 9):
        y = panels.matmul(x[:tokens].bfloat16(), w, isa).double()
        assert rms(y, x[:tokens].bfloat16().double() @ dequantize(w).double().T) < 4e-3


@pytest.mark.parametrize("isa", map(by_integers, INTEGERS))
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("bits, group_size", [(3, 32), (4, 16), (4, 256), (8, 64)])
def test_inputs_as_integers_are_as_good_as_floats(bits, group_size, tokens, isa):
    """Their rounding is far below that of the result; one large element costs the columns around it alone; a row with a
    NaN or an infinity becomes NaN; the smallest numbers, and those that nearly are a power of two, stay what they are.
    """
    if bits not in INTEGERS[isa]:
        pytest.skip(f"no loops for {bits} bits")
    _, _, w, exact = make(96, 512, group_size, bits, True)
    w = to_panels(w)
    x = torch.randn(tokens, 512)
    x[:, 7] *= 1000
    x = x.bfloat16()
    expected = x.double() @ exact.T
    floats = native.isa(torch.bfloat16)  # a processor with VNNI may lack products of bfloat16
    errors = {name: rms(panels.matmul(x, w, name), expected) for name in (isa, floats)}
    assert errors[isa] < 1.1 * errors[floats]
    x[:, 7] = 0
    calm = panels.matmul(x, w, isa)
    x[0, 7], x[1, 100], x[2, 100] = 3e38, torch.inf, torch.nan
    y = panels.matmul(x, w, isa)
    assert y[1:3].isnan().all() and torch.equal(y[3:], calm[3:])
    for value, unit in ((2.0**-126, 2.0**-126), (2.0**-110, 2.0**-110), (0.0, 1.0), (2 - 2**-7, 1.0), (2**-7 - 2, 1.0)):
        x = torch.full((tokens, 512), value).bfloat16()
        assert rms(panels.matmul(x, w, isa).double() / unit, x.double() / unit @ exact.T) < 4e-3


@pytest.mark.parametrize("isa", map(by_integers, INTEGERS))
def test_tables_without_integers_are_multiplied_as_floats(isa):
    laid = pack_codebook(torch.randint(16, (32, 64)), NF4, torch.rand(32, 2), group_size=32)
    laid = codebook_panels(laid)
    arguments = (torch.randn(native.FEW, 64).bfloat16(), laid.codes, laid.scale, laid.table, None, 32)
    with pytest.raises(RuntimeError, match="does not take this table"):
        torch.ops.workbench.panels_matmul(*arguments, isa)
    by_floats = torch.ops.workbench.panels_matmul(*arguments, native.isa(torch.bfloat16))
    assert torch.equal(torch.ops.workbench.panels_matmul(*arguments, "auto"), by_floats)
    integers = laid.table.mul(100).round()
    y = torch.ops.workbench.panels_matmul(*arguments[:3], integers, None, 32, "auto")
    words = torch.ops.workbench.panels_matmul(*arguments[:3], integers, None, 32, isa)
    if isa == ("avx512vnni" if native.runs("avx512vnni") else isa):  # which the best of this machine takes
        assert torch.equal(y, words)
    assert rms(words, y.double()) < 4e-3


@needs_native
def test_an_unknown_instruction_set_is_refused():
    w = to_panels(make(16, 64, 64, 4, True)[2])
    with pytest.raises(RuntimeError, match="avx1024"):
        panels.matmul(torch.randn(1, 64), w, "avx1024")
    with pytest.raises(RuntimeError, match="do not fit"):
        panels.matmul(torch.randn(1, 72), w)


@needs_native
def test_the_native_op_refuses_what_it_would_misread():
    """Memory that is not there, or of another type, is never read: the op can be called by anyone."""
    w = to_panels(make(33, 64, 32, 4, False)[2])
    x = torch.randn(2, 64)
    for wrong in (
        w._replace(scale=w.scale.double()),
        w._replace(zero=w.zero[:1]),
        w._replace(codes=w.codes[..., :8].contiguous()),
        w._replace(scale=w.scale.mT.contiguous().mT),
        w._replace(scale=w.scale.flatten(1), zero=w.zero.flatten(1)),
        w._replace(codes=w.codes.transpose(0, 1)),
    ):
        with pytest.raises(RuntimeError, match="cannot be read"):
            panels.matmul(x, wrong)
    with pytest.raises(RuntimeError, match="cannot be read"):
        panels.matmul(x.double(), w)
    with pytest.raises(RuntimeError, match="do not fit"):
        panels.matmul(x, w._replace(scale=w.scale[:0], zero=w.zero[:0]))
    nothing = to_panels(pack(torch.zeros(17, 0, dtype=torch.int64), torch.zeros(17, 0), None, bits=4, group_size=8))
    assert torch.equal(int_matmul(torch.randn(3, 0), nothing), torch.zeros(3, 17))
    buffer = torch.randn(2 * 64 + 1).bfloat16()
    odd = buffer[1:].view(2, 64)  # begins between two words
    assert torch.equal(int_matmul(odd, w), int_matmul(odd.clone(), w))


@pytest.mark.skipif(not PANELS, reason="needs the C++ kernels, and more than their portable loops")
@pytest.mark.parametrize("symmetric", [True, False])
def test_panels_are_laid_out_wherever_they_are(symmetric):
    """A compressed model that was on a CPU moves to another device, which lays its panels out as rows there."""
    codes, zero, w, _ = make(33, 64, 32, 4, symmetric)
    part = IntGroup.from_codes(codes, w.scale, zero, bits=4, group_size=32)
    layer = CompressedLinear([part], None, dtype=torch.bfloat16)
    assert part.layout == "panels"
    with torch.device("meta"):  # as some loaders do
        assert torch.equal(to_panels(w).codes, part.codes) and torch.equal(to_rows(part.packed).codes, w.codes)
    layer.to("meta")
    assert (
        part.layout == "rows"
        and part.codes.shape == w.codes.shape
        and part.nbytes == layer.nbytes == w.codes.nbytes + sum(t.nbytes for t in (w.scale, w.zero) if t is not None)
    )


@pytest.mark.slow
def test_without_a_compiler_torchs_kernel_takes_over_and_says_so(tmp_path):
    code = (
        "import torch; from kernels import native; from kernels.registry import recording\n"
        "from compress.formats.int_group import IntGroup; from compress.linear import CompressedLinear\n"
        "part = IntGroup.from_codes(torch.randint(0, 16, (64, 64)), torch.rand(64, 2), None, bits=4, group_size=32)\n"
        "layer = CompressedLinear([part], None, dtype=torch.bfloat16)\n"
        "with recording() as used: layer(torch.randn(2, 64).bfloat16())\n"
        "print(native.why_not(), part.layout, used['int_matmul'])\n"
    )
    told = {"WORKBENCH_NATIVE": ("0", "WORKBENCH_NATIVE=0"), "CXX": ("/bin/false", "failed")}
    for variable, (value, reason) in told.items():
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "WORKBENCH_CACHE": str(tmp_path), variable: value},
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr[-500:]
        assert reason in done.stdout
        assert "tiles {'cpu int4pack'}" in done.stdout


def test_whatever_keeps_the_kernels_from_being_built_is_a_reason_and_no_error(monkeypatch, tmp_path, capsys):
    load = native._load_once.__wrapped__
    for name in ("WORKBENCH_NATIVE", "WORKBENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", '"g++')
    assert "No closing quotation" in load() and "slower ones take their place" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "g++ -DODD")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # the same as none, says its specification
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert place(native.HERE, ["g++"]).is_relative_to(tmp_path / ".cache")
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert "home directory" in load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    (tmp_path / "a file").touch()
    assert "a file" in load()  # looked for without a home, and cannot be written
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert "no C++ compiler" in load() and "no C++ compiler" in capsys.readouterr().err


LAYOUTS = ["rows", "tiles", pytest.param("panels", marks=needs_native)]


def lay_out(w, layout):
    return {"rows": lambda: w, "tiles": lambda: to_tiles(w, torch.bfloat16), "panels": lambda: to_panels(w)}[layout]()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_empty_batches(layout):
    _, _, w, exact = make(64, 64, 32, 4, True)
    dtype = torch.bfloat16 if layout == "tiles" else torch.float32
    w = lay_out(w, layout)
    x = torch.randn(64, 6).to(dtype).t()[::2]  # not contiguous
    assert rms(int_matmul(x, w), x.double() @ exact.T) < 1e-2
    assert int_matmul(x[:0], w).shape == (0, 64)
    assert int_matmul(torch.zeros(2, 0, 64, dtype=dtype), w).shape == (2, 0, 64)


def test_bad_arguments_say_what_works():
    codes, _, w, _ = make(64, 64, 32, 4, True)
    with pytest.raises(ValueError, match="`bits` \\(=7\\)"):
        pack(codes, w.scale, None, bits=7, group_size=32)
    with pytest.raises(ValueError, match="`scale`"):
        pack(codes, w.scale, None, bits=4, group_size=48)
    with pytest.raises(ValueError, match="in_features \\(=64\\)"):
        int_matmul(torch.randn(2, 63), w)
    with pytest.raises(ValueError, match="`impl` \\(='triton'\\) needs rows on a CUDA GPU"):
        int_matmul(torch.randn(2, 64), w, impl="triton")
    with pytest.raises(ValueError, match="needs panels"):
        int_matmul(torch.randn(2, 64), w, impl="cpu")


@needs_native
def test_panels_are_refused_where_the_kernel_would_be_wrong():
    cpu, w = torch.device("cpu"), make(33, 64, 32, 4, True)[2]
    assert panels_fit(w, torch.float32, cpu) == PANELS
    assert not panels_fit(w, torch.float64, cpu)
    assert not panels_fit(w, torch.float32, torch.device("meta"))
    assert not panels_fit(make(33, 60, 12, 4, True)[2], torch.float32, cpu)
    assert panels_fit(make(33, 64, 32, 5, True)[2], torch.float32, cpu) == PANELS


def test_tiles_are_refused_where_the_kernel_would_be_wrong():
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert tiles_fit((64, 64), 4, 32, bf16, cpu)
    assert not tiles_fit((64, 64), 4, 32, torch.float32, cpu)  # torch's kernel is scalar there
    assert not tiles_fit((33, 64), 4, 32, bf16, cpu)
    assert not tiles_fit((64, 60), 4, 12, bf16, cpu)
    assert not tiles_fit((64, 64), 8, 32, bf16, cpu)
    assert not tiles_fit((64, 64), 4, 32, bf16, torch.device("meta"))


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_registered_op_passes_opcheck(layout):
    _, _, w, _ = make(64, 64, 32, 4, False)
    x = torch.randn(3, 64)
    if layout == "tiles":
        w, x = to_tiles(w, torch.bfloat16), x.bfloat16()
    use = "reference" if layout == "rows" else "cpu dequantise"
    arguments = (x, w.codes, w.scale, w.zero, w.layout, w.bits, w.group_size, *w.shape, use)
    torch.library.opcheck(torch.ops.workbench.int_matmul, arguments)


@needs_native
def test_the_native_op_passes_opcheck():
    w = to_panels(make(33, 64, 32, 4, False)[2])
    for x in (torch.randn(3, 64), torch.randn(2, 9, 64).bfloat16()):
        torch.library.opcheck(torch.ops.workbench.panels_matmul, (x, w.codes, w.scale, None, w.zero, 33, "auto"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_survives_export(layout):
    w = lay_out(make(64, 64, 32, 4, False)[2], layout)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return int_matmul(x, w)

    x = torch.randn(3, 64).bfloat16()
    exported = torch.export.export(Layer(), (x,)).module()
    assert torch.equal(exported(x), int_matmul(x, w))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [2, 100])
def test_survives_the_compiler(layout, tokens, backend):
    _, _, w, _ = make(64, 64, 32, 4, True)
    x = torch.randn(tokens, 64)
    w = lay_out(w, layout)
    if layout == "tiles":
        x = x.bfloat16()
    compiled = torch.compile(lambda x: int_matmul(x, w) * 2, fullgraph=True, backend=backend)
    with recording() as used:
        y = compiled(x)
    assert used["int_matmul"], "the implementation is noted when the graph is traced"
    assert torch.allclose(y, int_matmul(x, w) * 2)


@pytest.mark.parametrize("layout", ["tiles", pytest.param("panels", marks=needs_native)])
def test_frozen_graphs_keep_the_weight_packed(layout):
    """Freezing folds what depends on constants alone; the dequantised weight must not become one."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, _, w, _ = make(64, 64, 32, 4, True)
            self.w = lay_out(w, layout)
            for key in ("codes", "scale"):
                self.register_buffer(key, getattr(self.w, key))

        def forward(self, x):
            return int_matmul(x, self.w._replace(codes=self.codes, scale=self.scale))

    layer, x = Layer().eval(), torch.randn(100, 64).bfloat16()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        from torch._inductor.utils import run_and_get_code

        y, code = run_and_get_code(torch.compile(layer), x)
    assert torch.allclose(y, layer(x))
    assert {"tiles": "workbench.int_matmul", "panels": "workbench.panels_matmul"}[layout] in "".join(
        code
    ) and "_frozen_param" in "".join(code)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows_are_in_the_order_of_other_tools(bits):
    """A wrong order would still come back through our own reader; two others were asked (by
    seeds/peers/pack_golden.py of commit a3c90abb)."""
    golden = json.loads((Path(__file__).parent / "packing_golden.json").read_text())
    out, columns = 32, 64
    n, k = torch.meshgrid(torch.arange(out), torch.arange(columns), indexing="ij")
    codes = (n * 7919 + k * 104729 + n * k * 31) % 8191 % (1 << bits)
    words = pack_bits(codes, bits).view(torch.int32)  # [out, in * bits / 32]
    assert torch.equal(words, torch.tensor(golden["compressed-tensors"]["words"][str(bits)], dtype=torch.int32))
    assert torch.equal(words.t(), torch.tensor(golden["gptqmodel"]["words"][str(bits)], dtype=torch.int32))
