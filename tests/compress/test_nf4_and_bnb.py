"""NF4 as our codebook and as bitsandbytes': the same codes and scales bit for bit, stored small, multiplied right."""

import copy
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from compress import apply, load_compressed, save_compressed
from compress.activations.bnb_int8 import BitsandbytesInt8
from compress.formats import BnbInt8, BnbNF4, CodebookGroup
from compress.formats.codebook import dequantize_scales, dynamic_map, quantize_scales
from compress.linear import CompressedLinear, compressed_linears
from compress.method import settle
from compress.weights.bnb_nf4 import BitsandbytesNF4
from compress.weights.nf4 import NF4, TABLES, nf4
from compress.weights.rtn import RTN
from kernels.lut_matmul import normal_float, unpack_codebook

METHODS = {
    "nf4": lambda: NF4(group_size=16),
    "bnb_nf4": lambda: BitsandbytesNF4(blocksize=32),
    "bnb_int8": lambda: BitsandbytesInt8(),
}


@pytest.fixture
def bnb():
    return pytest.importorskip("bitsandbytes")


def _weights():
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(1024, 1024, generator=generator)
    return {
        "normal": normal * 0.02,
        "bfloat16": normal[:200, :576].bfloat16().float(),
        "skewed": (3 * normal[:300, :192]).exp(),
        "few": normal[:3, :64],
        "constant": torch.ones(8, 128),
        "zero": torch.zeros(8, 128),
        "tiny": normal[:64, :64] * 1e-30,
        "ties": torch.tensor([-1.0, 0.0, 0.0, 0.25, -0.25, 1.0, 0.5, -0.0]).repeat(16, 16),
    }


def _equal_to_bitsandbytes(bnb, W, group_size, table):
    ours = nf4(W, group_size=group_size, table=table)
    packed, state = bnb.functional.quantize_4bit(W, blocksize=group_size, compress_statistics=True, quant_type=table)
    theirs = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).view(W.shape)
    assert torch.equal(unpack_codebook(ours.packed), theirs)
    assert torch.equal(ours.scales.codes, state.absmax)
    assert torch.equal(ours.scales.absmax, state.state2.absmax)
    assert torch.equal(ours.scales.offset, state.offset)
    assert torch.equal(ours.dequantize(), bnb.functional.dequantize_4bit(packed, state))
    wide = nf4(W, group_size=group_size, table=table, double_quant=False)
    packed, state = bnb.functional.quantize_4bit(W, blocksize=group_size, compress_statistics=False, quant_type=table)
    assert torch.equal(wide.scale.flatten(), state.absmax)
    assert torch.equal(wide.dequantize(), bnb.functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", _weights())
@pytest.mark.parametrize("table", TABLES)
def test_codes_and_scales_are_those_of_bitsandbytes(bnb, kind, table):
    for group_size in (32, 64):
        _equal_to_bitsandbytes(bnb, _weights()[kind], group_size, table)


def test_the_dynamic_map_is_that_of_bitsandbytes(bnb):
    assert torch.equal(dynamic_map(), bnb.functional.create_dynamic_map())


@pytest.mark.parametrize("table", TABLES)
def test_every_weight_goes_to_its_nearest_entry(table):
    W = torch.randn(16, 128)
    found = nf4(W, group_size=32, table=table, double_quant=False).dequantize()
    choices = TABLES[table] * W.view(16, 4, 32).abs().amax(-1)[..., None]  # [16, 4, 16]
    best = (W.view(16, 4, 32, 1) - choices[:, :, None]).abs().amin(-1).view(16, 128)
    assert torch.allclose((found - W).abs(), best, atol=1e-6)


def test_scales_in_eight_bits_are_close():
    scale = torch.rand(40, 100) + 0.5
    stored = quantize_scales(scale)
    again = dequantize_scales(stored).view_as(scale)
    assert stored.codes.dtype == torch.uint8 and stored.absmax.shape == (-(-scale.numel() // 256),)
    half_a_step = dynamic_map().diff().max() / 2 * stored.absmax.max()
    assert (again - scale).abs().max() <= half_a_step + 1e-4
    for constant in (0.0, 0.7):
        assert torch.equal(
            dequantize_scales(quantize_scales(torch.full((3, 5), constant))), torch.full((15,), constant)
        )


@pytest.mark.parametrize("double_quant", [True, False])
def test_codebook_counts_its_bytes(double_quant):
    W = torch.randn(256, 1024)
    stored = nf4(W, double_quant=double_quant)
    scales = 4096
    assert stored.nbytes == 256 * 1024 // 2 + 16 * 4 + (scales + scales // 256 * 4 + 4 if double_quant else 4 * scales)
    assert stored.bits_per_weight == pytest.approx(4.127 if double_quant else 4.5, abs=3e-3)
    stored.for_compute(torch.bfloat16, W.device)
    resident = sum(b.nbytes for b in stored.buffers())
    assert resident <= stored.nbytes + (2 * scales if double_quant else 0), (
        "16-bit scales beside what is stored, nothing else"
    )


def _formats():
    W, three = torch.randn(64, 128), normal_float(4, 3)
    steps = torch.rand(64, 4) + 0.1
    return {
        "nf4": lambda: nf4(W),
        "fp4": lambda: nf4(W, group_size=32, table="fp4", double_quant=False),
        "3 bits": lambda: CodebookGroup.from_codes(
            torch.randint(8, (64, 128)), three, steps, group_size=32, double_quant=True
        ),
        "table a row": lambda: CodebookGroup.from_codes(
            torch.randint(16, (64, 128)), torch.randn(64, 16), steps, group_size=32
        ),
        "rows that fill no panel": lambda: nf4(W[:37]),
        "bnb_nf4": lambda: BnbNF4.from_weight(W, blocksize=64, double_quant=True),
        "bnb_nf4, float32 scales": lambda: BnbNF4.from_weight(W, blocksize=32, double_quant=False),
        "bnb_nf4, rows that fill no panel": lambda: BnbNF4.from_weight(W[:37], blocksize=64, double_quant=True),
        "bnb_nf4, blocks across rows": lambda: BnbNF4.from_weight(W[:, :96], blocksize=64, double_quant=True),
        "bnb_int8": lambda: BnbInt8.from_weight(W, threshold=6.0),
        "bnb_int8, all": lambda: BnbInt8.from_weight(W, threshold=0.0),
    }


@pytest.mark.parametrize("kind", _formats())
def test_compressed_linear_is_a_module_like_any_other(kind):
    if kind.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    part = _formats()[kind]()
    (out, columns), bias = part.shape, torch.randn(part.shape[0]).bfloat16().float()
    layer = CompressedLinear([part], bias, dtype=torch.float32)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    W = layer.dequantize()
    assert W.shape == (out, columns) and W.dtype == torch.float32
    x = torch.randn(2, 5, columns)
    tolerance = 1e-5 if part.activation_bits is None else 0.02
    expected = x @ W.t() + bias
    y = layer(x)
    assert (y - expected).norm() <= tolerance * expected.norm()
    with layer.dense():
        assert (layer(x) - y).norm() <= 1e-5 * y.norm(), "an activation that is rounded stays rounded"
    assert layer(x[:, :0]).shape == (2, 0, out)

    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.02), (torch.float32, None)):
        layer = layer.to(dtype)
        got = layer(x.to(dtype))
        assert got.dtype == dtype
        assert torch.equal(got, y) if tolerance is None else (got.float() - y).norm() < tolerance * y.norm()
        wide = torch.randn(2, 5, 2 * columns, dtype=dtype)[..., ::2]
        assert torch.equal(layer(wide), layer(wide.contiguous())), "any strides"
        assert torch.equal(copy.deepcopy(layer)(x.to(dtype)), got)
        for key, tensor in layer.state_dict().items():
            assert key == "bias" or torch.equal(tensor, state[key]), "stored the same, whatever it is laid out for"
        again = CompressedLinear.from_tensors(layer.spec(), layer.state_dict(), dtype)
        assert torch.equal(again(x.to(dtype)), got)
    assert part.nbytes == sum(t.nbytes for k, t in state.items() if k != "bias")

    other = CompressedLinear([_formats()[kind]()], bias.bfloat16(), dtype=torch.bfloat16)
    other.load_state_dict(state)
    assert torch.equal(other(x.bfloat16()), layer.to(torch.bfloat16)(x.bfloat16())), "laid out anew when loaded"


@pytest.mark.parametrize("kind", ["nf4", "bnb_nf4", "bnb_int8"])
def test_a_decode_step_compiles_to_one_graph(kind, backend):
    if kind.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    layer = CompressedLinear([_formats()[kind]()], torch.randn(64), dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for outlier in (1.0, 40.0):
        x = torch.randn(1, 1, 128, dtype=torch.bfloat16)
        x[..., 3] *= outlier
        expected = layer(x).float()
        assert (compiled(x).float() - expected).norm() <= 1e-2 * expected.norm()


def test_products_are_those_of_its_own_modules(bnb):
    W, x = torch.randn(96, 192) * 0.05, torch.randn(7, 192).bfloat16()
    x[:, 11] *= 50
    four = bnb.nn.Linear4bit(192, 96, bias=False, quant_type="nf4")
    four.weight = bnb.nn.Params4bit(W.clone(), requires_grad=False, quant_type="nf4")
    eight = bnb.nn.Linear8bitLt(192, 96, bias=False, has_fp16_weights=False, threshold=6.0)
    eight.load_state_dict({"weight": W})
    parts = BnbNF4.from_weight(W, blocksize=64, double_quant=True), BnbInt8.from_weight(W, threshold=6.0)
    for module, part in zip((four, eight), parts, strict=True):
        part.for_compute(torch.bfloat16, W.device)
        with torch.no_grad():
            assert torch.equal(module.to("cpu").eval()(x), part.matmul(x))


def test_outliers_are_kept_from_the_integers(bnb):
    W, x = torch.randn(96, 192) * 0.05, torch.randn(20, 192)
    x[:, 11] *= 300
    rest = torch.arange(192) != 11

    def error(threshold):
        y = BnbInt8.from_weight(W, threshold=threshold).matmul(x)
        column = BnbInt8.from_weight(W, threshold=threshold).dequantize()[:, 11]
        return (
            (y - x[:, 11:12] * column - x[:, rest] @ W[:, rest].t()).norm() / (x[:, rest] @ W[:, rest].t()).norm()
        ).item()

    assert error(6.0) < 0.02 < 0.3 < error(0.0), "what lies beside the outlier is drowned in steps as wide as it needs"


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", METHODS)
def test_saved_and_loaded_bit_for_bit(name, tiny, tokens, tmp_path):
    if name.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny("gpt2").to(dtype)  # Conv1D, whose weights lie transposed
        before = model(tokens()[0]).logits.float()
        result = apply([METHODS[name]()], model, tokens())
        assert all(record.error < 0.03 for record in result.layers), "the weight is [out, in] whatever holds it"
        assert (result.model(tokens()[0]).logits.float() - before).norm() < 0.3 * before.norm()
        path = save_compressed(result, tmp_path / str(dtype))  # compares
        with safe_open(path / "model.safetensors", "pt") as file:
            assert not [key for key in file.keys() if key.startswith("computed:") and ".parts." in key]  # noqa: SIM118
        again = load_compressed(path)
        assert torch.equal(again(tokens()[1]).logits, result.model(tokens()[1]).logits)
        stored = {n: m.nbytes for n, m in compressed_linears(again).items()}
        assert stored == {n: m.nbytes for n, m in compressed_linears(result.model).items()}


@pytest.mark.slow
def test_without_bitsandbytes_the_rest_works_and_its_methods_say_so(monkeypatch, tiny):
    code = (
        "import sys; sys.modules['bitsandbytes'] = None; from compress.weights.bnb_nf4 import BitsandbytesNF4 as M; M()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for method in (BitsandbytesNF4(), BitsandbytesInt8()):
        with pytest.raises(ValueError, match=r"bitsandbytes is not installed; .*pip install"):
            apply([method], tiny("llama"))


def test_bad_knobs_are_refused_before_any_work(tiny):
    with pytest.raises(ValueError, match=r"`blocksize` \(=48\) of bnb_nf4 must be one of 32, 64"):
        BitsandbytesNF4(blocksize=48)
    with pytest.raises(ValueError, match=r"`table` \(='int4'\) of nf4 must be one of nf4, fp4"):
        NF4(table="int4")
    with pytest.raises(ValueError, match=r"`threshold` \(=-1\) of bnb_int8"):
        BitsandbytesInt8(threshold=-1)
    with pytest.raises(ValueError, match=r"`group_size` \(=40\) must divide in_features"):
        apply([NF4(group_size=40)], tiny("llama"))
    for weights in (RTN(), NF4()):
        with pytest.raises(ValueError, match="bnb_int8 stores weights in int8 itself"):
            settle([weights, BitsandbytesInt8()])
    assert settle([BitsandbytesInt8()]) == [BitsandbytesInt8()]


def test_readers_are_told_what_runs(bnb):
    for method in (BitsandbytesNF4(), BitsandbytesInt8()):
        (remark,) = method.remarks(torch.device("cpu"))
        assert f"bitsandbytes {bnb.__version__}" in remark
        assert method.remarks(torch.device("cuda")) == []


@pytest.mark.slow
def test_on_a_real_model_both_are_the_same(bnb, real):
    """Weights exactly; logits up to the kernels' rounding, which is far below what four bits cost."""
    model, tokenizer = real
    ids = torch.tensor([tokenizer("The history of the telescope begins with the invention of the").input_ids])
    exact = model(ids).logits.float().log_softmax(-1)
    W = model.model.layers[7].mlp.gate_proj.weight.float()
    _equal_to_bitsandbytes(bnb, W, 64, "nf4")
    models = [apply([method], copy.deepcopy(model)).model for method in (NF4(), BitsandbytesNF4())]
    ours, theirs = (compressed_linears(m) for m in models)
    assert ours.keys() == theirs.keys() and len(ours) == 210
    assert all(torch.equal(ours[n].dequantize(), theirs[n].dequantize()) for n in ours)
    logits = [m(ids).logits.float() for m in models]
    assert torch.allclose(logits[0], logits[1], atol=1e-3, rtol=1e-3)

    halves = [m.to(torch.bfloat16)(ids).logits.float().log_softmax(-1) for m in models]
    between = torch.nn.functional.kl_div(halves[1], halves[0], log_target=True, reduction="batchmean") / ids.shape[1]
    cost = torch.nn.functional.kl_div(halves[0], exact, log_target=True, reduction="batchmean") / ids.shape[1]
    assert between < 0.1 * cost and cost < 0.5
    bits = [8 * sum(m.nbytes for m in linears.values()) for linears in (ours, theirs)]
    count = sum(m.in_features * m.out_features for m in ours.values())
    assert bits[0] / count == pytest.approx(4.127, abs=5e-3) and bits[0] < bits[1] < 4.2 * count
