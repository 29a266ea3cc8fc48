"""Parts that are added to a stored weight: optimal in float64, stored in the bytes that they say, and refused where they
cannot stand."""

import copy

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.correction.low_rank import low_rank
from compress.correction.outlier_entries import outliers
from compress.formats import FORMATS, CsrWeight, LowRankWeight
from compress.formats.csr import entry_count
from compress.grid.nearest import rtn
from compress.linear import CompressedLinear, compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe
from kernels.registry import recording
from kernels.support.declarations import TOLERANCE


def left_over(shape, seed=0):
    """R [out, in], and H [in, in] of inputs of very different magnitudes."""
    torch.manual_seed(seed)
    X = torch.randn(400, shape[1]) * torch.rand(shape[1]).mul(4).exp() @ torch.randn(shape[1], shape[1]) / 8
    return torch.randn(shape), X.t() @ X / 200


def cost(D, H):
    return ((D.double() @ H.double()) * D).sum().item()


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64)])
@pytest.mark.parametrize("weights", ["hessian", "diagonal", "none"])
def test_low_rank_is_the_optimum_that_eckart_and_young_prove(shape, weights):
    R, H = left_over(shape)
    given = {"hessian": H, "diagonal": H.diagonal(), "none": None}[weights]
    full = {"hessian": H, "diagonal": H.diagonal().diag(), "none": torch.eye(shape[1])}[weights].double()
    values, vectors = torch.linalg.eigh(full)
    rest = torch.linalg.svdvals(R.double() @ (vectors * values.clamp_min(0).sqrt()))[8:]
    for bits, slack in ((16, 1.001), (8, 1.01)):
        assert cost(R - low_rank(R, given, rank=8, bits=bits).dequantize(), full) <= slack * rest.square().sum().item()


def test_weighting_by_more_of_the_hessian_leaves_less():
    """The order of the papers: LoRC, LQER, EoRA."""
    R, H = left_over((64, 96))
    left = [cost(R - low_rank(R, given, rank=8).dequantize(), H) for given in (None, H.diagonal(), H)]
    assert left[0] > left[1] > left[2]


def test_outliers_are_the_entries_that_gain_most():
    R, H = left_over((32, 48))
    part = outliers(R, H, share=0.02)
    gain = R.square() * H.diagonal()
    stored = part.dequantize() != 0
    assert stored.sum() == entry_count(0.02, R.shape) and gain[stored].min() >= gain[~stored].max()
    assert torch.allclose(part.dequantize()[stored], R[stored], rtol=1e-3)


def parts_of(kind):
    torch.manual_seed(1)
    W = torch.randn(24, 40)
    return W, {
        "low_rank": lambda: LowRankWeight.from_factors(W[:, :3], torch.randn(3, 40)),
        "low_rank in 8 bits": lambda: LowRankWeight.from_factors(W[:, :3], torch.randn(3, 40), bits=8),
        "csr": lambda: CsrWeight.from_chosen(W, W.abs() > 1.5),
        "an empty csr": lambda: CsrWeight.from_chosen(W, W.abs() > 100),
    }[kind]()


@pytest.mark.parametrize("kind", ["low_rank", "low_rank in 8 bits", "csr", "an empty csr"])
def test_added_parts_multiply_come_back_and_count_their_bytes(kind):
    W, part = parts_of(kind)
    state = part.state_dict()
    if isinstance(part, LowRankWeight):
        assert part.nbytes == 3 * (24 + 40) * part.bits // 8 + (4 * 3 if part.bits == 8 else 0)
    else:
        assert part.nbytes == 4 * int((part.dequantize() != 0).sum()) + 2 * 24
    again = FORMATS[part.name].from_tensors(part.spec(), state)
    assert again.spec() == part.spec() and torch.equal(again.dequantize(), part.dequantize())

    layer = CompressedLinear([rtn(W, bits=4), part], None, dtype=torch.float32)
    x = torch.randn(2, 5, 40)
    assert torch.allclose(layer(x), x @ layer.dequantize().t(), atol=1e-4)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(half.state_dict().values(), layer.state_dict().values(), strict=True))
    assert (half(x.bfloat16()).float() - layer(x)).norm() / layer(x).norm() < 2e-2
    zeros = {name: tensor if name in ("columns", "counts") else tensor * 0 for name, tensor in state.items()}
    other = CompressedLinear([rtn(W, bits=4), part.from_tensors(part.spec(), zeros)], None, dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)), "what is laid out follows what is loaded"


@pytest.mark.parametrize(
    ("shape", "share", "tokens", "dtype"),
    [
        ((48, 512), 0.01, (1,), torch.bfloat16),
        ((37, 65), 0.05, (2, 3), torch.float16),
        ((131, 384), 0.005, (33,), torch.float32),
        ((5, 7), 0.0, (4,), torch.float32),
        ((24, 128), 1.0, (1, 1), torch.float32),
        ((16, 64), 0.1, (0,), torch.bfloat16),
    ],
)
def test_products_of_compressed_rows_are_right(shape, share, tokens, dtype):
    """Against float64, also with x transposed; the op survives the compiler, and says what ran."""
    W = torch.randn(shape).half().float()
    part = CsrWeight.from_chosen(W, torch.rand(shape) < share)
    part.for_compute(dtype, torch.device("cpu"))
    W, x = part.dequantize().double(), torch.randn(*tokens, shape[1]).to(dtype)
    for given in (x, torch.randn(2 * shape[1], 11).to(dtype).t()[:, ::2]):
        with recording() as ran:
            y = part.matmul(given)
        expected = given.double() @ W.t()
        assert y.dtype == dtype and ran == {"csr_matmul": {"library"}} and y.shape == expected.shape
        assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    arguments = (x, part.values_wide, part.columns_wide, part.offsets, shape[0])
    torch.library.opcheck(torch.ops.workbench.csr_matmul.default, arguments)


@pytest.mark.slow
def test_layers_with_added_parts_compile():
    W, low = parts_of("low_rank in 8 bits")
    layer = CompressedLinear([rtn(W, bits=4, group_size=8), low, parts_of("csr")[1]], None, dtype=torch.bfloat16)
    x = torch.randn(1, 40).bfloat16()
    assert torch.allclose(torch.compile(layer, fullgraph=True)(x).float(), layer(x).float(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    "added",
    [
        "low_rank(rank=4, bits=8)",
        "outlier_entries(share=0.05)",
        pytest.param("low_rank(rank=4, weights=none)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("calibrate", ["sequential", pytest.param("once", marks=pytest.mark.slow)])
def test_corrections_lower_the_error_of_every_layer_and_are_saved(added, calibrate, tiny, tokens, tmp_path):
    recipe = parse_recipe(f"rtn(bits=3, group_size=16), {added}")
    before = apply(recipe[:1], tiny("llama"), tokens(), calibrate=calibrate)
    result = apply(recipe, tiny("llama"), tokens(), calibrate=calibrate)
    linears = compressed_linears(result.model)
    for old, new in zip(before.layers, result.layers, strict=True):
        assert new.format == f"int_group+{linears[new.name].parts[1].name}" and new.rtn_error == old.rtn_error
        assert new.bits_per_weight > old.bits_per_weight and new.error < old.error, new.name
    save_compressed(result, tmp_path / "saved")
    again, ids = load_compressed(tmp_path / "saved"), tokens(1, 9)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)
    with pytest.raises(ValueError, match="sum of parts"):
        save_compressed(result, tmp_path / "other", save_format="compressed-tensors")


def test_a_pruned_weight_may_be_corrected_too(tiny, tokens):
    recipe = parse_recipe("magnitude(ratio=0.5), rtn(bits=4, group_size=16), low_rank(rank=8)")
    result = apply(recipe, tiny("llama"), tokens())
    pruned = apply(recipe[:2], tiny("llama"), tokens())
    assert all(a.error < b.error for a, b in zip(result.layers, pruned.layers, strict=True))
    assert {r.format for r in result.layers} == {"bitmap+low_rank"}


@pytest.mark.parametrize(
    "fold",
    [pytest.param("awq(bits=3, group_size=16)", marks=pytest.mark.slow), "smoothquant, rtn(bits=3, group_size=16)"],
)
def test_folds_are_no_error_that_is_corrected(fold, tiny, tokens):
    """Against the scaled weight, not the one before it was scaled."""
    recipe = parse_recipe(f"{fold}, low_rank(rank=4)")
    without = apply(recipe[:-1], tiny("llama"), tokens())
    result = apply(recipe, tiny("llama"), tokens())
    assert all(a.error < b.error for a, b in zip(result.layers, without.layers, strict=True))


def test_corrections_stand_after_what_they_correct():
    for wrong, why in (
        ("low_rank", "none before it stores weights"),
        ("smoothquant, outlier_entries", "none before it stores weights"),
        ("rtn(bits=8, group_size=-1), low_rank, int8", "would store weights anew"),
        ("rtn, low_rank, outlier_entries", "cannot follow"),
        ("rtn, low_rank, wanda", "must come before"),
    ):
        with pytest.raises(ValueError, match=why):
            settle(parse_recipe(wrong))


def test_linears_of_which_nothing_is_stored_stay(tiny, tokens):
    result = apply(parse_recipe("rtn(group_size=16, skip='*.down_proj'), low_rank(rank=2)"), tiny("llama"), tokens())
    assert not any("down_proj" in record.name for record in result.layers)
    model = apply([METHODS["rtn"](group_size=16, skip="*.up_proj")], tiny("llama"), tokens()).model
    with pytest.raises(ValueError, match="compressed already"):
        apply(parse_recipe("rtn(group_size=16, skip='*.q_proj'), low_rank"), model, tokens())


def test_a_table_that_weights_share_is_kept_in_a_work_folder(tiny, tokens, tmp_path):
    recipe, text = "rtn(bits=1, grid=binary, group_size=16), salient_signs(share=0.2)", tokens(4, 17)
    whole = apply(recipe, tiny("llama"), text).model
    for _ in range(2):  # the second run takes all of it from the folder
        again = apply(recipe, tiny("llama"), text, work_path=tmp_path).model
        assert torch.equal(again(text[0]).logits, whole(text[0]).logits)
