"""One calibration for many recipes: what is saved is what flows in the model as it is, and a recipe does not notice."""

import copy

import pytest
import torch

from compress import METHODS, apply
from compress.apply import apply_each
from compress.linear import is_linear
from compress.recipe import parse_recipe
from compress.walk import capture
from compress.walk.context import Context
from compress.walk.experts import split_experts
from compress.walk.once import calibrated
from compress.walk.once.calibrated import collect_statistics
from compress.walk.resume import BlockStore
from compress.walk.statistics import PAIRED, STATISTICS, saved
from compress.walk.statistics.saved import SavedStatistics

DEVICE = torch.device("cpu")
RECIPES = [
    "rtn(bits=3, group_size=16)",
    "gptq(bits=3, group_size=16, min_tokens=8)",
    "gptq(bits=4, group_size=16, min_tokens=8, symmetric=False)",
    "awq(bits=3, group_size=16)",
    "awq, gptq(bits=3, group_size=16, min_tokens=8)",
    "smoothquant, int8(activations=tensor)",
    "smoothquant(alpha=search), awq(bits=3, group_size=16)",
    "wanda(ratio=0.5), gptq(bits=4, group_size=16, min_tokens=8)",
    "sparsegpt(ratio=0.5, min_tokens=8)",
    "layer_drop(count=1), gptq(bits=3, group_size=16, min_tokens=8)",
]


def collected(model, batches, folder, needs=tuple(STATISTICS)):
    split_experts(model)
    collect_statistics(model, batches, needs, BlockStore(folder / "+".join(sorted(needs))), device=DEVICE)
    return SavedStatistics(folder, 2)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_saved_statistics_are_those_of_whole_passes_over_the_model(any_model, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "MICRO_BATCH_TOKENS", 48)
    batches, found = tokens(4, 24), {}
    kept = collected(any_model, batches, tmp_path)
    inputs: dict[str, list] = {name: [] for name, m in any_model.named_modules() if is_linear(m)}
    for name in inputs:
        any_model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs[name].append(args[0].flatten(0, -2))
        )
    for batch in batches:
        any_model(batch, use_cache=False)
    for index in range(2):
        for group in kept.groups(index):
            for name in group:
                found[name] = kept.of(name, index, tuple(STATISTICS), DEVICE)
    assert len(found) >= 8
    for name, statistics in found.items():
        X = torch.cat(inputs[name]) if inputs[name] else torch.zeros(0, inputs[name])
        assert statistics.tokens == len(X), name
        expected = 2 / max(len(X), 1) * X.T @ X
        close = {"rtol": 1e-3, "atol": 1e-4 * expected.abs().max().item()}
        assert torch.allclose(statistics.values["gram"], expected, **close), name
        assert torch.equal(statistics.values["gram"], statistics.values["gram"].T)
        assert torch.allclose(statistics.values["absmax"], X.abs().amax(0), rtol=1e-4, atol=1e-5), name
        assert torch.allclose(statistics.values["absmean"], X.abs().mean(0), rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(a, marks=pytest.mark.slow) for a in ("llama", "qwen2_moe"))]
)
def test_recipes_that_share_a_pass_give_what_each_gives_alone(tiny, tokens, tmp_path, monkeypatch, architecture):
    few = {"num_experts": 3} if architecture == "qwen2_moe" else {}
    model, batches, passes = tiny(architecture, **few), tokens(), []
    recipes = {text: parse_recipe(text) for text in (RECIPES if architecture == "llama" else RECIPES[1:7:2])}
    collect = calibrated.collect_statistics
    monkeypatch.setattr(calibrated, "collect_statistics", lambda *a, **k: passes.append(a[2]) or collect(*a, **k))
    shared = apply_each(recipes, model, batches, calibrate="once", work_path=tmp_path)
    dropped = sum("layer_drop" in text for text in recipes)
    assert len(passes) == 1 + dropped, "one pass for all, and one for the model without the layer that was dropped"
    for text, recipe in recipes.items():
        alone = apply(recipe, copy.deepcopy(model), batches, calibrate="once")
        assert equal(alone.model, shared[text].model), text
        plain = [(r.name, r.error, r.rtn_error, r.bits_per_weight, r.notes) for r in alone.layers]
        assert plain == [(r.name, r.error, r.rtn_error, r.bits_per_weight, r.notes) for r in shared[text].layers]
        assert all(m.sequential is False for m in alone.recipe if "sequential" in m.knobs())
        assert any("calibrate='once'" in note for note in alone.notes)
    count = len(passes)
    again = apply(recipes[RECIPES[1]], copy.deepcopy(model), batches, calibrate="once", work_path=tmp_path)
    assert len(passes) == count and equal(again.model, shared[RECIPES[1]].model), "taken from the folder"
    apply(recipes[RECIPES[1]], tiny(architecture, seed=1, **few), batches, calibrate="once", work_path=tmp_path)
    apply(recipes[RECIPES[1]], copy.deepcopy(model), tokens(seed=2), calibrate="once", work_path=tmp_path)
    assert passes[count:] == [("gram", "starts")] * 2, "other weights, or other tokens: other statistics"


def test_blocks_see_what_the_model_gives_as_it_is(tiny, tokens):
    """A block left alone changes nothing for the next one; scales that a method folds do not need a pass either."""
    knobs = {"bits": 2, "group_size": 16, "min_tokens": 8}
    whole, second = (
        apply([METHODS["gptq"](**knobs, skip=skip)], tiny("llama"), tokens(), calibrate="once")
        for skip in ("", "*layers.0.*")
    )
    errors = {r.name: r.error for r in whole.layers}
    assert all(errors[r.name] == r.error for r in second.layers) and len(second.layers) == 7
    for recipe in ("smoothquant, rtn(bits=3, group_size=16)", "awq, rtn(bits=3, group_size=16)"):
        walked, once = (
            apply(parse_recipe(recipe), tiny("gpt2"), tokens(), calibrate=how) for how in ("sequential", "once")
        )
        assert equal(walked.model, once.model)
        assert [(f.name, f.alpha) for f in walked.folds] == [(f.name, f.alpha) for f in once.folds]


def test_statistics_follow_scales_that_are_folded(tiny, tokens, tmp_path):
    """Those of the scaled inputs are derived; they are what the model gives after the folds."""
    model, batches = tiny("llama"), tokens()
    kept = collected(model, batches, tmp_path / "before")
    METHODS["smoothquant"]().apply(model, batches, Context(DEVICE, saved=kept))
    METHODS["awq"](group_size=16, only_scale=True).apply(model, batches, Context(DEVICE, saved=kept))
    after = collected(model, batches, tmp_path / "after")
    for index in range(2):
        for name, *_ in after.groups(index):
            derived, seen = (each.of(name, index, tuple(STATISTICS), DEVICE).values for each in (kept, after))
            assert not any(len(seen[need]) for need in PAIRED), "nothing was compressed: there is no second stream"
            for need in set(STATISTICS) - set(PAIRED):
                largest = seen[need].abs().max().item()
                assert torch.allclose(derived[need], seen[need], rtol=1e-3, atol=1e-4 * largest), (name, need)
            assert torch.equal(derived["gram"], derived["gram"].T)


def test_a_pass_that_is_killed_goes_on_with_the_same_bits(tiny, tokens, tmp_path, monkeypatch):
    recipe, batches, ran = parse_recipe(RECIPES[1]), tokens(), []
    expected = apply(recipe, tiny("llama", num_hidden_layers=4), batches, calibrate="once")
    keep = calibrated.keep_block

    def dies(store, index, *rest):
        ran.append(index)
        if ran == [0, 1, 2]:
            raise KeyboardInterrupt
        keep(store, index, *rest)

    monkeypatch.setattr(calibrated, "keep_block", dies)
    for _ in range(2):
        try:
            result = apply(recipe, tiny("llama", num_hidden_layers=4), batches, calibrate="once", work_path=tmp_path)
        except KeyboardInterrupt:
            continue
    assert ran == [0, 1, 2, 2, 3] and equal(result.model, expected.model)
    assert not list(tmp_path.rglob("after_*"))


def test_disk_is_predicted_and_limited(tiny, tokens, tmp_path, monkeypatch):
    model, sizes = tiny("llama"), []
    check = calibrated.check_room
    monkeypatch.setattr(calibrated, "check_room", lambda folder, size: sizes.append(size) or check(folder, size))
    collected(model, tokens(), tmp_path)
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert 0.9 < sizes[0] / taken <= 1, "up to the headers, which weigh something in files as small as these"
    monkeypatch.setenv(saved.LIMIT, "0.0001")
    with pytest.raises(ValueError, match=r"`calibrate` \(='once'\) would keep statistics of .*WORKBENCH_STATISTICS_GB"):
        apply(parse_recipe(RECIPES[1]), model, tokens(), calibrate="once")
    assert not any("Compressed" in type(m).__name__ for m in model.modules()), "before any work"
    with pytest.raises(ValueError, match=r"`calibrate` \(='twice'\) must be one of sequential, once"):
        apply(parse_recipe(RECIPES[1]), model, tokens(), calibrate="twice")
    for n in (5, saved.PANEL, 2 * saved.PANEL + 7):
        H = torch.randn(n, n)
        H = H + H.T
        assert torch.equal(saved._unpacked(saved._packed(H), n), H)


def test_methods_that_measure_by_separate_passes_are_named(tiny, tokens):
    recipe = parse_recipe("wanda(allocation=adaptive, curve_tokens=24)")
    result = apply(recipe, tiny("llama"), tokens(), calibrate="once")
    assert any("passes of its own: wanda: the distortions" in note for note in result.notes)
    plain = apply(parse_recipe("rtn(group_size=16)"), tiny("llama"), calibrate="once")
    assert not plain.notes and all("no calibration tokens" in str(layer.notes) for layer in plain.layers)
