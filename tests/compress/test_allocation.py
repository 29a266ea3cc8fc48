"""Which linear loses how much: as many in all as asked, and the least distortion that the curves allow."""

import copy
import itertools

import pytest
import torch

from compress import METHODS, apply
from compress.allocation.sparsity import LEVELS, STEP, allocate, distortion_curves, global_ratios
from compress.linear import CompressedLinear
from compress.walk.blocks import targets
from compress.walk.resume import BlockStore


def zeros(model) -> tuple[int, int]:
    linears = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    return sum(int((m.dequantize() == 0).sum()) for m in linears), sum(m.out_features * m.in_features for m in linears)


def test_dynamic_program_finds_the_least(monkeypatch):
    """Against every combination, on random curves with few choices."""
    monkeypatch.setattr("compress.allocation.sparsity.STEP", 0.1)
    choices = [0.1 * i for i in range(9)]
    generator = torch.Generator().manual_seed(3)
    for trial in range(5):
        weights = {"a": 400, "b": 1200, "c": 800, "d": 400}
        curves = {}
        for name in weights:
            steps = torch.rand(len(LEVELS), generator=generator).cumsum(0) * 10 ** float(
                torch.rand(1, generator=generator)
            )
            curves[name] = dict(zip(LEVELS, (steps**2).tolist(), strict=True))

        def cost(name, ratio, curves=curves):
            levels = [0.0, *LEVELS]
            roots = [0.0, *(curves[name][level] ** 0.5 for level in LEVELS)]
            at = next(i for i in range(1, len(levels)) if ratio <= levels[i] + 1e-9)
            share = (ratio - levels[at - 1]) / (levels[at] - levels[at - 1])
            return (roots[at - 1] + share * (roots[at] - roots[at - 1])) ** 2

        ratio = (0.2, 0.4, 0.5, 0.6, 0.7)[trial]
        found = allocate(curves, weights, ratio)
        assert sum(found[n] * w for n, w in weights.items()) >= ratio * 2800 - 1e-6
        least = min(
            sum(cost(n, r) for n, r in zip(weights, several, strict=True))
            for several in itertools.product(choices, repeat=4)
            if sum(r * w for r, w in zip(several, weights.values(), strict=True)) >= ratio * 2800 - 1e-6
        )
        assert sum(cost(n, r) for n, r in found.items()) == pytest.approx(least, rel=1e-9)


def test_sizes_with_nothing_in_common():
    """No weight count divides another: at least as much goes, and hardly more."""
    weights = {f"l{i}": 99_991 + 1_237 * i for i in range(40)}
    curves = {name: {level: (i + 1) * level**3 for level in LEVELS} for i, name in enumerate(weights)}
    found = allocate(curves, weights, 0.37)
    gone = sum(found[n] * w for n, w in weights.items()) / sum(weights.values())
    assert 0.37 <= gone < 0.375
    ratios = list(found.values())
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > ratios[-1] + 2 * STEP, "what costs less loses more"


@pytest.mark.parametrize("name", ["magnitude", "random"])
def test_global_compares_all_linears(tiny, name):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(0.3)
    method = METHODS[name](ratio=0.4, allocation="global")
    ratios = global_ratios(model, targets(model), method.scores, 0.4)
    small = apply([method], copy.deepcopy(model)).model
    gone, of = zeros(small)
    assert gone / of == pytest.approx(0.4, abs=1e-3)
    if name == "magnitude":
        linears = {n: m for n, m in small.named_modules() if isinstance(m, CompressedLinear)}
        kept = min(m.dequantize()[m.dequantize() != 0].abs().min().item() for m in linears.values())
        lost = max(model.get_submodule(n).weight[m.dequantize() == 0].abs().max().item() for n, m in linears.items())
        assert lost <= kept, "nothing that went is larger than anything that stays"
        assert ratios["model.layers.0.mlp.up_proj"] == max(ratios.values()) > 0.6


@pytest.mark.parametrize(
    "name", ["wanda", *(pytest.param(name, marks=pytest.mark.slow) for name in ("magnitude", "sparsegpt"))]
)
def test_adaptive(tiny, tokens, name):
    """As many go as asked; the measured distortions add up to less than the same ratio everywhere; the record has the
    curves."""
    model = tiny("llama", num_hidden_layers=3)
    with torch.no_grad():  # linears that matter differently
        for i, block in enumerate(model.model.layers):
            block.mlp.down_proj.weight.mul_((0.05, 1, 2)[i])
    method = METHODS[name](ratio=0.5, allocation="adaptive", curve_tokens=40)
    result = apply([method], copy.deepcopy(model), tokens())
    gone, of = zeros(result.model)
    assert 0.49 < gone / of < 0.52
    sparsity = {layer.name: layer.sparsity for layer in result.layers}
    assert all(set(layer.distortion) == {f"{level:g}" for level in LEVELS} for layer in result.layers)
    assert sparsity["model.layers.0.mlp.down_proj"] > sparsity["model.layers.2.mlp.down_proj"] + 0.1
    assert len({round(s, 2) for s in sparsity.values()}) > 5


def test_a_curve_is_what_pruning_that_linear_alone_does(tiny, tokens):
    model, batches = tiny("qwen2"), tokens(3, 20)
    methods = {level: METHODS["magnitude"](ratio=level) for level in LEVELS}
    curves = distortion_curves(model, methods, batches, tokens=50, device=torch.device("cpu"))
    assert len(curves) == 14 and all(set(curve) == set(LEVELS) for curve in curves.values())
    name = "model.layers.1.self_attn.v_proj"
    alone = copy.deepcopy(model)
    W = alone.get_submodule(name).weight
    smallest = W.abs().flatten().argsort()[: int(0.4 * W.numel())]
    with torch.no_grad():
        W.view(-1)[smallest] = 0
    few = [batches[0], batches[1], batches[2][:, :10]]
    kls = []
    for batch in few:
        p, q = (m(batch).logits.log_softmax(-1) for m in (model, alone))
        kls.append((p.exp() * (p - q)).sum(-1).flatten())
    assert curves[name][0.4] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)


def test_every_architecture_has_curves(one_of_each_kind, tokens):
    ids, model = tokens(1, 9)[0], one_of_each_kind
    before = model(ids).logits
    result = apply([METHODS["magnitude"](ratio=0.1, allocation="adaptive", curve_tokens=16)], model, tokens(2, 16))
    assert result.layers and all(layer.distortion for layer in result.layers)
    assert ((result.model(ids).logits - before).norm() / before.norm()).item() < 0.5


def test_curves_are_kept_and_serve_other_ratios(tiny, tokens, tmp_path, monkeypatch):
    model = tiny("llama")
    first = apply(
        [METHODS["magnitude"](ratio=0.5, allocation="adaptive")], copy.deepcopy(model), tokens(), work_path=tmp_path
    )
    asked = []
    put = BlockStore.put
    monkeypatch.setattr(BlockStore, "put", lambda self, *a: (asked.append(self.folder.name), put(self, *a))[1])
    second = apply(
        [METHODS["magnitude"](ratio=0.3, allocation="adaptive")], copy.deepcopy(model), tokens(), work_path=tmp_path
    )
    assert [layer.distortion for layer in first.layers] == [layer.distortion for layer in second.layers]
    assert asked and not any("curves" in name for name in asked), "no curve was measured again"


def test_bad_input(tiny, tokens):
    for method, knobs, message in (
        ("wanda", {"allocation": "global"}, r"`allocation` \(='global'\) of wanda: .*'adaptive' or 'uniform'"),
        ("magnitude", {"allocation": "adaptive", "pattern": "2:4"}, r"`allocation` \(='adaptive'\).*`pattern`"),
        ("wanda", {"allocation": "adaptive", "ratio": 0.95}, r"`ratio` \(=0.95\).*at most 0.8"),
        ("wanda", {"allocation": "layerwise"}, r"`allocation`.*one of uniform, adaptive, global"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS[method](**knobs)
    with pytest.raises(ValueError, match="`batches` is empty, and magnitude needs calibration"):
        apply([METHODS["magnitude"](allocation="adaptive")], tiny("llama"))
    with pytest.raises(ValueError, match="`batches` is empty"):
        apply([METHODS["wanda"]()], tiny("llama"), None)
