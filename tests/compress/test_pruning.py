"""Pruning keeps what its papers say, zeros stay zero, and what is left is stored small and multiplied right."""

import copy

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from compress import METHODS, apply, held_out, load_compressed, save_compressed
from compress.formats import Bitmap, Dense, IntGroup, Sparse24Weight
from compress.formats.masked import masked
from compress.formats.sparse24 import compress24, to_library
from compress.grid.nearest import rtn
from compress.inputs.calibration import calibration
from compress.linear import CompressedLinear
from compress.pruning.patterns import kept, parse_pattern
from compress.pruning.sparsegpt import sparsegpt
from compress.recipe import parse_recipe
from compress.walk.hessian import factorise
from compress.walk.statistics import Gram, LayerStatistics


def correlated(tokens: int = 400, columns: int = 64) -> torch.Tensor:
    x = torch.randn(tokens, columns) * torch.linspace(0.2, 3, columns)
    return x + 0.7 * x.roll(1, 1)


def linears(model) -> dict[str, CompressedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear)}


@pytest.mark.parametrize(
    "pattern, by_row, per_row", [(None, True, True), (None, False, False), ((2, 4), False, True), ((1, 8), True, True)]
)
def test_masks_keep_the_largest_scores(pattern, by_row, per_row):
    scores = torch.rand(6, 40)
    keep = kept(scores, 0.35, pattern, by_row=by_row)
    if pattern:
        n, m = pattern
        groups, mask = scores.view(6, -1, m), keep.view(6, -1, m)
        assert (mask.sum(-1) == n).all()
        assert (groups.masked_fill(~mask, 9).amin(-1) >= groups.masked_fill(mask, -1).amax(-1)).all()
    else:
        assert keep.sum() == 6 * 26 and (not per_row or (keep.sum(1) == 26).all())
        assert per_row or scores[keep].min() >= scores[~keep].max()


@pytest.mark.parametrize("pattern", ["4:4", "5:4", "0:4", "2-4", "half", ""])
def test_patterns_that_make_no_sense(pattern):
    with pytest.raises(ValueError, match="`pattern`"):
        parse_pattern(pattern)
    with pytest.raises(ValueError, match="`pattern`"):
        METHODS["wanda"](pattern=pattern)


def test_bad_input_is_refused_before_any_work(tiny, tokens):
    with pytest.raises(ValueError, match=r"`ratio` \(=1\.0\) of magnitude must lie below 1"):
        METHODS["magnitude"](ratio=1.0)
    with pytest.raises(ValueError, match=r"`ratio` \(=-0\.1\) of wanda must lie between"):
        METHODS["wanda"](ratio=-0.1)
    with pytest.raises(
        ValueError, match=r"`ratio` \(=0\.3\) of wanda is not that of `pattern` \(='2:4'\), which is 0.5"
    ):
        METHODS["wanda"](ratio=0.3, pattern="2:4")
    assert METHODS["wanda"](ratio=0.75, pattern="1:4").pattern == "1:4"
    model = tiny("llama")
    with pytest.raises(
        ValueError, match=r"`pattern` \(='3:5'\) of sparsegpt needs rows of a multiple of 5 columns; .* has 64"
    ):
        apply([METHODS["sparsegpt"](pattern="3:5")], model, tokens())
    with pytest.raises(ValueError, match="`recipe`.*sparsegpt.*wanda.*keep one"):
        apply(parse_recipe("wanda, sparsegpt"), model, tokens())
    with pytest.raises(ValueError, match="must come before"):
        apply(parse_recipe("gptq(group_size=16), wanda"), model, tokens())
    assert not linears(model)


def test_wanda_is_its_equation(tiny, tokens):
    """|W| ||X||, within rows, written out for the first linear, whose inputs no pruning has changed."""
    model = tiny("llama")
    q = model.model.layers[0].self_attn.q_proj
    W, seen = q.weight.clone(), []
    handle = q.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for batch in tokens():
        model(batch)
    handle.remove()
    norm = torch.cat(seen).square().sum(0).sqrt()
    pruned = weight(apply([METHODS["wanda"]()], model, tokens()).model, "q_proj")
    scores = W.abs() * norm
    assert torch.equal(pruned != 0, scores > scores.sort(1).values[:, [31]])
    assert torch.equal(pruned[pruned != 0], W[pruned != 0])


def weight(model, name: str, block: int = 0) -> torch.Tensor:
    return next(m for n, m in model.named_modules() if n.endswith(f".{block}.self_attn.{name}")).dequantize()


@pytest.mark.parametrize("pattern, ratio", [(None, 0.5), ((2, 4), 0.5), ((4, 8), 0.5), (None, 0.3)])
def test_sparsegpt_is_its_algorithm(pattern, ratio):
    """Column by column in float64, with the inverse Hessian of what is left recomputed for every column."""
    x = correlated()
    W, H = torch.randn(24, 64), Gram(64, torch.device("cpu"))
    H.update(x)
    H = H.result()
    plain, keep = sparsegpt(W, factorise(H, 0.01, torch.arange(64)), ratio=ratio, pattern=pattern)
    w, h = W.double(), H.double() + 0.01 * H.double().diagonal().mean() * torch.eye(64, dtype=torch.float64)
    mask = torch.ones(24, 64, dtype=torch.bool)
    pivots = torch.stack([torch.linalg.inv(h[i:, i:])[0, 0] for i in range(64)])
    if pattern is None:
        mask = kept(w.square() / pivots, ratio, None, by_row=False)
    for i in range(64):
        if pattern and i % pattern[1] == 0:
            span = slice(i, i + pattern[1])
            mask[:, span] = kept((w[:, span].square() / pivots[span]).contiguous(), ratio, pattern, by_row=False)
        inverse = torch.linalg.inv(h[i:, i:])
        error = w[:, i] * ~mask[:, i] / inverse[0, 0]
        w[:, i:] -= error[:, None] * inverse[0]
        w[:, i] *= mask[:, i]
    assert torch.equal(keep, mask)
    assert torch.allclose(plain.weight.double(), w, atol=1e-4)
    by_magnitude = W * kept(W.abs(), ratio, pattern, by_row=False)
    assert (x @ (W - plain.weight).t()).norm() < (x @ (W - by_magnitude).t()).norm()


def test_sparsegpt_quantises_in_the_same_pass(tiny, tokens):
    model, together = tiny("llama"), METHODS["sparsegpt"](pattern="2:4", bits=4, group_size=16, min_tokens=8)
    result = apply([together], model, tokens())
    parts = [m.parts[0] for m in linears(model).values()]
    assert all(isinstance(p, Sparse24Weight) and isinstance(p.values, IntGroup) for p in parts)
    # two codes of 4 bits and a nibble for every four, and a 16-bit scale for every 16 weights
    assert all(r.bits_per_weight == pytest.approx(4 * 0.5 + 1 + 1) for r in result.layers)
    apart = apply(
        parse_recipe("sparsegpt(pattern='2:4', min_tokens=8), rtn(bits=4, group_size=16)"), tiny("llama"), tokens()
    )
    errors = [sum(r.error for r in one.layers) for one in (result, apart)]
    assert errors[0] < errors[1], "one pass makes up for rounding too"


def test_sparsegpt_rounds_to_any_table_that_has_a_zero(tiny, tokens):
    how = {"bits": 4, "grid": "mxfp4", "group_size": 32, "min_tokens": 8}
    result = apply([METHODS["sparsegpt"](**how)], tiny("llama"), tokens())
    for name, linear in linears(result.model).items():
        (part,) = linear.parts
        W = part.dequantize()
        steps = (W / W.view(len(W), -1, 32).abs().amax(-1).log2().floor().exp2().repeat_interleave(32, 1)) * 8
        assert part.name == "codebook" and (W == 0).float().mean() >= 0.5, name
        assert torch.equal(steps.nan_to_num(), steps.nan_to_num().round()), "e2m1 times a power of two"
    apart = apply(
        parse_recipe("sparsegpt(min_tokens=8), rtn(bits=4, grid=mxfp4, group_size=32)"), tiny("llama"), tokens()
    )
    errors = [sum(r.error for r in one.layers) for one in (result, apart)]
    assert errors[0] < errors[1]
    with pytest.raises(ValueError, match=r"`grid` \(='iq4_nl'\) of sparsegpt has no 0"):
        METHODS["sparsegpt"](bits=4, grid="iq4_nl", group_size=32)
    with pytest.raises(ValueError, match=r"`grid` \(='nf4'\) of sparsegpt: `pattern` \(='2:4'\) packs"):
        METHODS["sparsegpt"](bits=4, grid="nf4", pattern="2:4")
    with pytest.raises(ValueError, match=r"`grid` \(='nf4'\) of sparsegpt has codes of 4 bits: `bits` \(=16\)"):
        apply([METHODS["sparsegpt"](grid="nf4")], tiny("llama"), tokens())


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "first, second",
    [
        pytest.param(first, second, marks=[] if (turn + at) % 4 == 0 else [pytest.mark.slow])
        for turn, first in enumerate(
            ("wanda", "sparsegpt(min_tokens=8)", "wanda(pattern='2:4')", "magnitude(pattern='5:8')")
        )
        for at, second in enumerate(
            (
                "gptq(group_size=16, min_tokens=8)",
                "rtn(group_size=16)",
                "gptq(group_size=16, min_tokens=8, order=activation)",
                "gptq(group_size=16, min_tokens=8, symmetric=False, bits=3)",
            )
        )
    ],
)
def test_quantising_keeps_zeros_zero_and_stores_them_no_more(tiny, tokens, first, second):
    model = tiny("llama")
    pruned = linears(apply(parse_recipe(first), copy.deepcopy(model), tokens()).model)
    after = linears(apply(parse_recipe(f"{first}, {second}"), model, tokens()).model)
    for name, linear in pruned.items():
        assert not after[name].dequantize()[linear.dequantize() == 0].any(), name
    wanted = Sparse24Weight if "2:4" in first else Bitmap
    assert all(isinstance(m.parts[0], wanted) for m in after.values())


def test_gptq_makes_up_for_rounding_among_what_is_kept(tiny, tokens):
    errors = {}
    for second in ("gptq(group_size=16, min_tokens=8, bits=3)", "rtn(group_size=16, bits=3)"):
        result = apply(parse_recipe(f"wanda(ratio=0.3), {second}"), tiny("llama"), tokens())
        errors[second[:3]] = sum(r.error for r in result.layers)
    assert errors["gpt"] < errors["rtn"]


def test_two_of_four_are_stored_as_hardware_reads_them():
    """Places are two bits each, low bits first; torch's conversions for CUTLASS, which run on a CPU, are the reader."""
    values, places = compress24(torch.tensor([[0.0, 5, 0, 7, 1, 2, 0, 0, 0, 0, 3, 4]]))
    assert values.tolist() == [[5, 7, 1, 2, 3, 4]]
    assert places.tolist() == [[(1 | 3 << 2) | (0 | 1 << 2) << 4, 2 | 3 << 2]]
    W = torch.randn(33, 68).bfloat16()
    W = W.where(kept(W.abs(), 0.5, parse_pattern("2:4"), by_row=False), 0)
    read = sparse_semi_structured_to_dense_cutlass(*to_library(W, "cutlass"))
    assert read.shape == (64, 128) and torch.equal(read[:33, :68], W)


@pytest.mark.parametrize("shape", [(7, 36), (32, 64), (5, 8)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ints", "asymmetric ints"])
@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
def test_formats_give_back_what_they_took(shape, kind, pattern):
    W = torch.randn(shape)
    keep = kept(W.abs(), 0.6, parse_pattern(pattern), by_row=False)
    plain = Dense((W * keep).to(torch.bfloat16 if kind == "bfloat16" else torch.float32))
    if "ints" in kind:
        plain = rtn(W * keep, bits=4, group_size=4, symmetric=kind == "ints", scale_dtype="float32")
    stored = masked(plain, keep, two_of_four=pattern == "2:4")
    assert type(stored) is (Sparse24Weight if pattern == "2:4" else Bitmap)
    assert torch.equal(stored.dequantize(), plain.dequantize()) and torch.equal(stored.keep(), keep)
    state = {name: tensor.clone() for name, tensor in stored.state_dict().items()}
    again = type(stored).from_tensors(stored.spec(), {name: tensor.clone() for name, tensor in state.items()})
    dtype, full = torch.bfloat16 if kind == "bfloat16" else torch.float32, plain.dequantize().double()
    for one in (stored, again, copy.deepcopy(again)):
        one.for_compute(dtype, torch.device("cpu"))
        x = torch.randn(2, 3, shape[1]).to(dtype)
        expected = x.double() @ full.t()
        assert (one.matmul(x) - expected).norm() / expected.norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert {n: t.shape for n, t in one.state_dict().items()} == {n: t.shape for n, t in state.items()}, (
            "no zeros are stored"
        )
        doubled = {n: 2 * t if n.endswith(("values", "weight", "scale")) else t for n, t in state.items()}
        one.load_state_dict(doubled)
        assert (one.matmul(x) - 2 * expected).norm() / expected.norm() < 3e-2, (
            "what is multiplied follows what was loaded"
        )


def test_bytes_are_those_of_what_is_kept():
    W, keep = torch.randn(64, 128).bfloat16(), torch.zeros(64, 128, dtype=torch.bool)
    keep[:, ::2] = True
    dense = W.nbytes
    assert masked(Dense(W * keep), keep, two_of_four=True).nbytes == 0.5625 * dense
    assert masked(Dense(W * keep), keep).nbytes == (0.5 + 1 / 16) * dense
    keep[:, :125] = True
    assert isinstance(masked(Dense(W * keep), keep), Dense), "a mask would cost more than it saves"


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("recipe", ["wanda", "wanda(pattern='2:4')", "sparsegpt(bits=4, group_size=16, min_tokens=8)"])
def test_pruned_models_are_saved_and_cast(tiny, tokens, tmp_path, recipe):
    result = apply(parse_recipe(recipe), tiny("llama"), tokens())
    result.model.to(torch.bfloat16)
    ids = tokens(1, 17)[0]
    save_compressed(result, tmp_path / "saved")
    assert torch.equal(load_compressed(tmp_path / "saved")(ids).logits, result.model(ids).logits)
    stored = sum(t.nbytes for n, t in result.model.state_dict().items() if ".self_attn." in n or ".mlp." in n)
    full = sum(p.nbytes for n, p in tiny("llama").bfloat16().named_parameters() if ".self_attn." in n or ".mlp." in n)
    assert stored < 0.6 * full


def test_random_is_drawn_by_name_and_seed(tiny):
    one, two = (apply([METHODS["random"](seed=seed)], tiny("llama"), []).model for seed in (0, 1))
    masks = [weight(model, name) != 0 for model, name in ((one, "q_proj"), (two, "q_proj"), (one, "o_proj"))]
    assert all(mask.sum() == mask.numel() // 2 for mask in masks)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


@pytest.mark.slow
def test_orders_of_the_papers_on_the_real_model(real):
    """SparseGPT < Wanda < magnitude at half, and any weights < 4:8 < 2:4, by what the first blocks give afterwards."""
    model, tokenizer = real
    model.model.layers = model.model.layers[:4]
    batches = calibration(tokenizer, corpus="pydocs", samples=6, seqlen=256)
    ids = held_out(tokenizer, corpus="pydocs")[:, :512]
    expected = model.model(ids).last_hidden_state
    off = {}
    for recipe in ("magnitude", "wanda", "sparsegpt", "sparsegpt(pattern='4:8')", "sparsegpt(pattern='2:4')", "random"):
        pruned = apply(parse_recipe(recipe), copy.deepcopy(model), batches).model
        off[recipe] = (pruned.model(ids).last_hidden_state - expected)[:, 1:].norm().item()
    order = ["sparsegpt", "wanda", "magnitude", "random"]
    assert sorted(order, key=off.get) == order, off
    order = ["sparsegpt", "sparsegpt(pattern='4:8')", "sparsegpt(pattern='2:4')"]
    assert sorted(order, key=off.get) == order, off


@pytest.mark.parametrize("pattern, group_size", [("2:4", 16), ("2:4", -1), ("1:3", 16)])
def test_sparsegpt_chooses_scales_for_what_a_group_keeps(pattern, group_size, monkeypatch):
    from compress.grid import integer

    seen, search = [], integer.search

    def noted(weights, *settings, **more):
        seen.append(weights)
        return search(weights, *settings, **more)

    monkeypatch.setattr(integer, "search", noted)
    W = torch.randn(8, 48)
    statistics = LayerStatistics(200, {"gram": torch.eye(48)})
    METHODS["sparsegpt"](pattern=pattern, bits=4, group_size=group_size).solve(W, statistics)
    n, m = parse_pattern(pattern)
    assert sum((weights != 0).sum().item() for weights in seen) == W.numel() * n // m


@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
def test_a_16_bit_model_stores_what_is_kept_in_16_bits(tiny, tokens, pattern):
    """In bytes as in the record; for 2:4 the dtype that the sparse product of GPUs takes."""
    model = tiny("llama").to(torch.bfloat16)
    result = apply([METHODS["wanda"](ratio=0.5, pattern=pattern)], model, tokens())
    for record in result.layers:
        (part,) = model.get_submodule(record.name).parts
        values = part.values.weight if pattern == "2:4" else part.values
        assert values.dtype == torch.bfloat16
        assert record.bits_per_weight == 8 * part.nbytes / (record.shape[0] * record.shape[1]) < 10


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (3, 1), (40, 64)])
def test_of_equal_scores_the_first_go(shape, by_row):
    """As a stable sort orders them."""
    scores = (torch.randn(shape).square() * 3).round()
    for ratio in (0.0, 0.3, 0.5, 0.99):
        groups = scores if by_row else scores.view(1, -1)
        lowest = groups.sort(dim=-1, stable=True).indices[:, : int(ratio * groups.shape[1] + 1e-6)]
        expected = torch.ones_like(groups, dtype=torch.bool).scatter_(1, lowest, False).view(shape)
        assert torch.equal(kept(scores, ratio, None, by_row=by_row), expected), ratio
