"""The integer product: packing is exact, every implementation agrees with float64, and it survives the compiler."""

import pytest
import torch

from kernels.int_matmul import BITS, dequantize, int_matmul, pack, tiles_fit, to_rows, to_tiles, unpack
from kernels.int_matmul import cpu as cpu_paths
from kernels.int_matmul.layout import pack_bits, unpack_bits
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


@pytest.mark.parametrize("bits", [b for b in BITS if b <= 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(192, 128, 32), (80, 192, 64), (16, 128, 128), (272, 256, 256)])
def test_tiles_agree_for_few_and_many_tokens(bits, symmetric, dtype, shape):
    codes, zero, w, exact = make(*shape, bits, symmetric)
    tiles = to_tiles(w, dtype)
    assert torch.equal(unpack(tiles)[0].long(), codes)
    if dtype == torch.bfloat16:  # the scales' own dtype: the way back is exact
        back = to_rows(tiles)
        assert torch.equal(back.codes, w.codes) and torch.equal(back.scale, w.scale)
    for tokens in (1, 3, cpu_paths.CROSSOVER - 1, cpu_paths.CROSSOVER, 300):
        x = torch.randn(tokens, shape[1]).to(dtype)
        with recording() as used:
            y = int_matmul(x, tiles)
        assert used["int_matmul"] == {"cpu int4pack" if tokens < cpu_paths.CROSSOVER else "cpu dequantise"}
        assert y.dtype == dtype
        assert rms(y, x.double() @ exact.T) < (1e-2 if dtype == torch.bfloat16 else 2e-3)
        assert rms(int_matmul(x, tiles, impl="reference"), x.double() @ exact.T) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_strides_and_empty_batches(layout):
    _, _, w, exact = make(64, 64, 32, 4, True)
    dtype = torch.float32 if layout == "rows" else torch.bfloat16
    w = w if layout == "rows" else to_tiles(w, dtype)
    x = torch.randn(64, 6).to(dtype).t()[::2]  # not contiguous
    assert rms(int_matmul(x, w), x.double() @ exact.T) < 1e-2
    assert int_matmul(x[:0], w).shape == (0, 64)
    assert int_matmul(torch.zeros(2, 0, 64, dtype=dtype), w).shape == (2, 0, 64)


def test_bad_arguments_say_what_would_do():
    codes, _, w, _ = make(64, 64, 32, 4, True)
    with pytest.raises(ValueError, match="`bits` \\(=7\\)"):
        pack(codes, w.scale, None, bits=7, group_size=32)
    with pytest.raises(ValueError, match="`scale`"):
        pack(codes, w.scale, None, bits=4, group_size=48)
    with pytest.raises(ValueError, match="in_features \\(=64\\)"):
        int_matmul(torch.randn(2, 63), w)
    with pytest.raises(ValueError, match="`impl` \\(='triton'\\)"):
        int_matmul(torch.randn(2, 64), w, impl="triton")
    with pytest.raises(ValueError, match="needs tiles"):
        int_matmul(torch.randn(2, 64), w, impl="cpu")


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


@pytest.mark.parametrize("layout", ["rows", "tiles"])
@pytest.mark.parametrize("tokens", [2, 100])
def test_survives_the_compiler(layout, tokens):
    _, _, w, _ = make(64, 64, 32, 4, True)
    x = torch.randn(tokens, 64)
    if layout == "tiles":
        w, x = to_tiles(w, torch.bfloat16), x.bfloat16()
    compiled = torch.compile(lambda x: int_matmul(x, w) * 2, fullgraph=True)
    with recording() as used:
        y = compiled(x)
    assert used["int_matmul"], "the implementation is noted when the graph is traced"
    assert torch.allclose(y, int_matmul(x, w) * 2)


def test_frozen_graphs_keep_the_weight_packed():
    """Freezing folds what depends on constants alone; the dequantised weight must not become one."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, _, w, _ = make(64, 64, 32, 4, True)
            self.w = to_tiles(w, torch.bfloat16)
            for key in ("codes", "scale"):
                self.register_buffer(key, getattr(self.w, key))

        def forward(self, x):
            return int_matmul(x, self.w._replace(codes=self.codes, scale=self.scale))

    layer, x = Layer().eval(), torch.randn(100, 64).bfloat16()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        from torch._inductor.utils import run_and_get_code

        y, code = run_and_get_code(torch.compile(layer), x)
    assert torch.allclose(y, layer(x))
    assert "workbench.int_matmul" in "".join(code) and "_frozen_param" in "".join(code)
