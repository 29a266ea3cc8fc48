"""AWQ: its scales and clipping against what they promise, as a step of recipes, and on a real model against
rounding."""

import copy
import math

import pytest
import torch

from compress import METHODS, apply, held_out
from compress.grid.integer import candidates, dequantize, quantize
from compress.grid.nearest import rtn
from compress.inputs.calibration import calibration
from compress.linear import CompressedLinear
from compress.method import settle
from compress.walk.folds.links import Link
from compress.walk.statistics import Collector
from compress.weights.awq import awq_clip, awq_scales
from eval.text.perplexity import perplexity

AWQ, GPTQ, RTN = METHODS["awq"], METHODS["gptq"], METHODS["rtn"]


def inputs(columns=96, tokens=400, seed=0):
    """Correlated inputs of unequal size, as activations are."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns) * 0.5
    return torch.randn(tokens, columns, generator=g) @ mix * torch.randn(columns, generator=g).exp()


def output_error(W, Q, X):
    return ((W - Q).double() @ X.double().T).square().sum().item()


def test_scales_are_balanced_and_follow_the_inputs():
    x = torch.tensor([0.0, 0.01, 1.0, 100.0])
    assert torch.equal(awq_scales(x, 0.0), torch.ones(4))
    for alpha in (0.3, 0.95):
        s = awq_scales(x, alpha)
        assert torch.isfinite(s).all() and (s > 0).all() and (s * s.max()).min().item() == pytest.approx(1, rel=1e-4)
        assert (s[3] / s[2]).item() == pytest.approx(100**alpha, rel=1e-4) and s[0] == s[1], (
            "an input of 0 counts as a small one"
        )
    assert torch.equal(awq_scales(torch.zeros(4), 0.5), torch.ones(4))


@pytest.mark.parametrize("skip", ["", "b"])
def test_the_alpha_is_the_one_of_least_output_error(skip):
    """Over all consumers that are rounded, measured on the inputs themselves; heads of v are read by several heads of
    o."""
    X, channels = inputs(), torch.arange(48).view(2, 24).repeat_interleave(2, 0).reshape(-1)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(20, 96, generator=g), torch.randn(12, 96, generator=g) * 3]
    collector = Collector("x", AWQ.statistics, 96, torch.device("cpu"))
    for part in X.split(150):
        collector.update(part)
    choice = AWQ(bits=3, group_size=32, strengths=8, skip=skip).choose(
        Link("v", "linear", ("a", "b"), channels), weights, collector.result()
    )
    mean = X.abs().mean(0)
    largest = torch.stack([mean[channels == c].max() for c in range(48)])
    taken = weights[:1] if skip else weights
    errors = []
    for step in range(8):
        s = largest ** (step / 8)
        s = (s / (s.max() * s.min()).sqrt())[channels]
        rounded = [rtn(W * s, bits=3, group_size=32, symmetric=False).dequantize() / s for W in taken]
        errors.append(sum(output_error(W, Q, X) for W, Q in zip(taken, rounded, strict=True)))
    energy = sum(output_error(W, 0 * W, X) for W in taken)
    best = min(range(8), key=errors.__getitem__)
    assert best > 0 and choice.alpha == best / 8 and torch.allclose(choice.s, awq_scales(largest, best / 8))
    assert choice.error_before == pytest.approx(errors[0] / energy, rel=1e-3)
    assert choice.error_after == pytest.approx(errors[best] / energy, rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 96])
def test_clipping_beats_covering_the_groups(bits, symmetric, group_size):
    X, W = inputs(), torch.randn(24, 96)
    H = 2 / len(X) * X.T @ X
    grid = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    clipped, covered = awq_clip(W, H, **grid).dequantize(), rtn(W, **grid).dequantize()
    assert output_error(W, clipped, X) < output_error(W, covered, X) * (1 if bits == 8 else 0.95)


def test_clipping_finds_the_best_of_all_ranges_where_groups_do_not_meet():
    W, H = torch.randn(6, 32), torch.zeros(32, 32)
    for group in (slice(0, 16), slice(16, 32)):
        X = inputs(16, 64, seed=group.start)
        H[group, group] = X.T @ X
    found = awq_clip(W, H, bits=3, group_size=16).dequantize()
    for row in range(6):
        for group in (slice(0, 16), slice(16, 32)):
            w = W[row, group]
            tried = [w - dequantize(quantize(w, s, z, 3), s, z) for s, z in zip(*candidates(w, 3, False), strict=True)]
            least = min((d.double() @ H[group, group].double() @ d.double()).item() for d in tried)
            d = (w - found[row, group]).double()
            assert (d @ H[group, group].double() @ d).item() == pytest.approx(least, rel=1e-4)


def test_groups_make_up_for_one_another():
    X, W = inputs(256, 1000) + 1, torch.randn(64, 256)
    H = X.T @ X
    of = torch.arange(256) // 32
    alone = awq_clip(W, H * (of[:, None] == of), bits=3, group_size=32).dequantize()
    assert output_error(W, awq_clip(W, H, bits=3, group_size=32).dequantize(), X) < 0.9 * output_error(W, alone, X)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_neox", "mixtral"])
def test_folding_changes_no_output(architecture, tiny, tokens):
    model, ids = tiny(architecture), tokens(1, 17)[0]
    before = model(ids).logits
    result = apply([AWQ(bits=3, group_size=16, strengths=5, only_scale=True)], model, tokens())
    after = model(ids).logits
    assert ((after - before).norm() / before.norm()).item() < 1e-4
    assert not result.layers and not any(isinstance(m, CompressedLinear) for m in model.modules())
    moved = [fold for fold in result.folds if fold.alpha is not None]
    assert moved and all(fold.error_after < fold.error_before for fold in moved)


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(a, marks=pytest.mark.slow) for a in ("llama", "qwen3_moe"))]
)
def test_alone_it_scales_and_stores(architecture, tiny, tokens):
    model = tiny(architecture)
    result = apply([AWQ(bits=3, group_size=16, strengths=5)], model, tokens())
    assert result.folds and {record.format for record in result.layers} == {"int_group"}
    assert all(torch.isfinite(m.dequantize()).all() for m in model.modules() if isinstance(m, CompressedLinear))
    reached = [record for record in result.layers if record.tokens]
    assert sum(record.error <= record.rtn_error for record in reached) >= 0.95 * len(reached)


def test_experts_without_tokens(tiny, tokens):
    result = apply([AWQ(bits=3, group_size=16, strengths=5)], tiny("qwen3_moe", num_experts=12), tokens(1, 3))
    idle = [record for record in result.layers if not record.tokens]
    assert idle and all("experts" in r.name and "not clipped: no calibration token came by" in r.notes for r in idle)
    assert all(record.error == record.rtn_error for record in idle)


def test_a_weight_quantiser_that_follows_settles_the_grid(tiny, tokens):
    follower = GPTQ(bits=3, group_size=16, min_tokens=8, scale_dtype="float32", skip="*.0.mlp.down_proj")
    settled, _ = recipe = settle([AWQ(), follower])
    assert (settled.stage, settled.only_scale) == ("transform", True)
    assert (settled.bits, settled.group_size, settled.symmetric, settled.scale_dtype) == (3, 16, True, "float32")
    assert settle(recipe) == recipe, "settled once is settled"
    result = apply([AWQ(strengths=5), follower], tiny("llama"), tokens())
    assert len(result.layers) == 13 and all(r.bits_per_weight == 3 + 32 / 16 for r in result.layers)
    assert "model.layers.0.mlp.up_proj" not in {fold.name for fold in result.folds}, (
        "nothing is gained for what is skipped"
    )
    assert len(result.folds) == 7


def test_recipes_that_do_not_compose_are_refused():
    for recipe, message in (
        (
            [AWQ(bits=3), GPTQ(bits=2)],
            r"`bits` \(=3\) of awq must be what gptq\(bits=2, group_size=64\) rounds to after it: 2",
        ),
        (
            [AWQ(group_size=32), RTN(group_size=16)],
            r"`group_size` \(=32\) of awq must be what rtn\(bits=4, group_size=16\) rounds to",
        ),
        (
            [AWQ(only_scale=False), GPTQ()],
            r"`only_scale` \(=False\) of awq: gptq\(.*\) after it rounds the same weights",
        ),
        ([GPTQ(), AWQ()], r"`recipe`: awq\(.*\) must come before gptq\(.*\)"),
        ([RTN(), AWQ(only_scale=True)], r"`recipe`: awq\(.*\) must come before rtn\(.*\)"),
    ):
        with pytest.raises(ValueError, match=message):
            settle(recipe)
    assert settle([AWQ()])[0].stage == AWQ().stage == "quantize_weights"
    assert settle([AWQ(only_scale=True)])[0].stage == "transform"


def test_bad_knobs_are_refused_before_any_work(tiny, tokens):
    model = tiny("llama")
    for knobs, message in (
        ({"group_size": 48}, r"`group_size` \(=48\) must divide in_features \(=64\)"),
        ({"group_size": 48, "only_scale": True}, r"`group_size` \(=48\) must divide in_features \(=64\)"),
        ({"group_size": 16, "layers": "*.k_norm"}, r"`layers` \(='\*.k_norm'\) of awq"),
        (
            {"group_size": 16, "layers": "*.o_proj", "skip": "*.o_proj"},
            r"but `skip` \(='\*.o_proj'\) names all that read",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            apply([AWQ(**knobs)], model, tokens())
    with pytest.raises(ValueError, match="awq needs calibration"):
        apply([AWQ(group_size=16)], model)
    assert not any(isinstance(m, CompressedLinear) for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, calls, left", [("choose", 4 + 2, 4 - 1), pytest.param("solve", 7 + 3, 2 * 7 - 7, marks=pytest.mark.slow)]
)
def test_killed_runs_go_on_where_they_were(where, calls, left, tiny, tokens, tmp_path, monkeypatch):
    """Killed in the second block while scales are chosen, or while weights are rounded."""
    recipe, batches, method, done = [AWQ(bits=3, group_size=16, strengths=5)], tokens(), getattr(AWQ, where), []
    expected = apply(recipe, tiny("llama"), batches)

    def dies(self, *arguments):
        done.append(1)
        if len(done) == calls:
            raise KeyboardInterrupt
        return method(self, *arguments)

    monkeypatch.setattr(AWQ, where, dies)
    with pytest.raises(KeyboardInterrupt):
        apply(recipe, tiny("llama"), batches, work_path=tmp_path)
    done[:] = [1] * calls
    result = apply(recipe, tiny("llama"), batches, work_path=tmp_path)
    assert len(done) - calls in (left, left + 1), "finished blocks are not done again"
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor), name
    assert [(r.name, r.error) for r in result.layers] == [(r.name, r.error) for r in expected.layers]


@pytest.mark.slow
def test_on_a_real_model_it_beats_rounding(real):
    """The first ten blocks at 3 bits: the errors of all linears that are clipped, and what the perplexity loses."""
    model, tokenizer = real
    ids, later = held_out(tokenizer), "*.layers.1?.*, *.layers.2?.*"
    loss = {"none": math.log(perplexity(model, ids, window=512, limit=2).value)}
    for method in (RTN(bits=3, symmetric=False, skip=later), AWQ(bits=3, strengths=5, skip=later)):
        result = apply([method], copy.deepcopy(model), calibration(tokenizer, samples=2, seqlen=256))
        loss[method.name] = math.log(perplexity(result.model, ids, window=512, limit=2).value) - loss["none"]
    assert 0 < loss["awq"] < 0.7 * loss["rtn"]
    clipped = [r for r in result.layers if not any("not clipped" in note for note in r.notes)]  # all but q and k
    assert len(result.layers) == 70 and len(clipped) == 50 and all(r.error < 0.9 * r.rtn_error for r in clipped)
    assert len(result.folds) == 40 and sum(fold.alpha is not None for fold in result.folds) > 35


def test_queries_and_keys_are_not_clipped(tiny, tokens):
    """As in the authors' code, which leaves out q and k by name."""
    result = apply([METHODS["awq"](group_size=16)], tiny("qwen3"), tokens())
    noted = {r.name.rpartition(".")[2] for r in result.layers if any("not clipped" in note for note in r.notes)}
    assert noted == {"q_proj", "k_proj"}
