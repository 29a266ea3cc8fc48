"""SmoothQuant: equation 4; outliers made for sure, and repaired; searches by their own measure; folds checked, undone,
resumed."""

import copy
import json
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from compress import METHODS, apply
from compress.activations.smoothquant import output_error, smoothing_scales
from compress.inputs.calibration import calibration
from compress.linear import weight_of
from compress.method import settle
from compress.walk.folds import folding
from compress.walk.folds.links import Link, find_links
from compress.walk.statistics import STATISTICS, LayerStatistics


def smoothquant(**knobs):
    return METHODS["smoothquant"](**knobs)


def error(model: nn.Module, y: Tensor, ids: Tensor) -> float:
    return ((model(ids).logits - y).norm() / y.norm()).item()


def divergence(model: nn.Module, logits: Tensor, ids: Tensor) -> float:
    """KL of the model's predictions from those that had `logits`, in nats per token."""
    expected = logits.log_softmax(-1)
    return (expected.exp() * (expected - model(ids).logits.log_softmax(-1))).sum(-1).mean().item()


def test_the_scales_are_those_of_equation_4():
    x, w = torch.tensor([8.0, 0.5, 0.0, 2.0, 1e-30]), torch.tensor([0.5, 2.0, 1.0, 0.0, 1e30])
    assert torch.allclose(smoothing_scales(x, w, 0.5)[:4], torch.tensor([4.0, 0.5, 1.0, 1.0]))
    assert torch.allclose(smoothing_scales(x, w, 1.0)[:2], x[:2]) and torch.allclose(
        smoothing_scales(x, w, 0.0)[:2], 1 / w[:2]
    )
    for alpha in (0.0, 0.3, 1.0):
        s = smoothing_scales(x, w, alpha)
        assert s.isfinite().all() and (s > 0).all()


def test_maxima_are_taken_over_all_that_one_channel_feeds():
    """Two consumers; each of the producer's 3 channels is read twice, as under grouped queries."""
    link = Link("v", "linear", ("a", "b"), torch.tensor([0, 1, 2, 0, 1, 2]))
    weights, rows = [torch.randn(5, 6), torch.randn(4, 6)], torch.randn(50, 6)
    x = rows.abs().amax(0)
    seen = LayerStatistics(50, {"absmax": x, "absmax_rest": torch.zeros(6), "rows": rows})
    choice = smoothquant(alpha=0.4, target="token").choose(link, weights, seen)
    for c in range(3):
        read = [j for j in range(6) if j % 3 == c]
        largest_x = max(x[j].item() for j in read)
        largest_w = max(W[:, j].abs().max().item() for W in weights for j in read)
        assert choice.s[c].item() == pytest.approx(largest_x**0.4 / largest_w**0.6, rel=1e-5)


def test_the_measured_error_is_that_of_rounding_to_8_bits():
    W, X, s = torch.randn(20, 48), torch.randn(30, 48) * torch.rand(48).mul(4).exp(), torch.rand(48) + 0.3
    weight, x = (W * s).double(), (X / s).double()
    y = X.double() @ W.double().t()
    scale = weight.abs().amax(1, keepdim=True) / 127
    for step in (x.abs().amax(1, keepdim=True) / 127, x.abs().amax() / 127):
        rounded = ((x / step).round() * step) @ ((weight / scale).round() * scale).t()
        expected = ((y - rounded).square().sum() / y.square().sum()).item()
        found = output_error(W, X, s, None if step.dim() else step.float(), X @ W.t())
        assert found == pytest.approx(expected, rel=0.02)


def test_smoothing_changes_no_output_and_says_what_it_moved(any_model, tokens):
    ids, batches = tokens(1, 40, seed=5)[0], tokens()
    plain = copy.deepcopy(any_model)
    y = plain(ids).logits
    result = apply([smoothquant()], any_model, batches)
    assert error(result.model, y, ids) < 1e-5
    links, _ = find_links(result.model)
    assert [r.name for r in result.folds] == [link.producer for block in links for link in block]
    assert result.layers == [] and json.dumps([asdict(r) for r in result.folds])
    by_name = {link.producer: link for block in links for link in block}
    for record in result.folds:
        assert record.alpha == 0.5 and record.difference < 1e-5
        if not by_name.keys() & set(record.consumers):  # no later link divided their rows
            w = torch.stack(
                [weight_of(result.model.get_submodule(name)).abs().amax(0) for name in record.consumers]
            ).amax(0)
            assert record.w_after.max == pytest.approx(w.max().item(), rel=1e-4)
        assert record.error_before > 0 and record.error_after > 0
    assert sum(r.channels is not None for r in result.folds) == min(4, len(result.folds))


def test_every_block_sees_what_the_model_gives(tiny, tokens):
    batches, seen = tokens(), {}
    model = tiny("llama", num_hidden_layers=3)
    for name in (f"model.layers.{i}.{linear}" for i in range(3) for linear in ("self_attn.q_proj", "mlp.down_proj")):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, max(seen.get(name, 0), args[0].abs().max().item()))
        )
    for batch in batches:
        model(batch)
    records = {r.consumers[0]: r for r in apply([smoothquant()], tiny("llama", num_hidden_layers=3), batches).folds}
    for name, largest in seen.items():
        assert records[name].x_before.max == pytest.approx(largest, rel=1e-4), name
        assert records[name].x_after.max < largest


def test_outliers_break_int8_and_smoothing_repairs_it(tiny, tokens, with_outliers):
    # Many tokens: a static step, once smoothed, clips every channel beyond what was seen of it.
    plain, batches, ids = tiny("llama"), tokens(20, 60), torch.cat(tokens(4, 30, seed=7))
    spiky, y = with_outliers(plain, 60), plain(ids).logits
    assert error(spiky, y, ids) < 1e-5
    for activations in ("token", "tensor"):
        int8 = METHODS["int8"](activations=activations)
        without = error(apply([int8], copy.deepcopy(plain), batches).model, y, ids)
        broken = error(apply([int8], copy.deepcopy(spiky), batches).model, y, ids)
        for alpha in (0.5, "search"):
            repaired = error(apply([smoothquant(alpha=alpha), int8], copy.deepcopy(spiky), batches).model, y, ids)
            assert broken > 10 * max(without, repaired) and repaired < 1.2 * without, (
                activations,
                alpha,
                without,
                broken,
                repaired,
            )


@pytest.mark.slow
def test_outliers_on_the_real_model(real, with_outliers):
    model, tokenizer = real
    ids, *batches = calibration(tokenizer, samples=3, seqlen=128)
    y, spiky = model(ids).logits, with_outliers(model, 50)
    assert divergence(spiky, y, ids) < 1e-6
    int8 = METHODS["int8"]()
    broken = divergence(apply([int8], copy.deepcopy(spiky)).model, y, ids)
    apply([smoothquant()], spiky, batches)
    repaired = divergence(apply([int8], spiky).model, y, ids)
    without = divergence(apply([int8], model).model, y, ids)
    assert broken > 4 * without and repaired < without, (without, broken, repaired)


def test_a_choice_is_tried_on_tokens_that_had_no_part_in_it():
    """A static step from some tokens cuts off what is larger in others, and the more so the further the channels are
    levelled."""
    for count in (100, 512, 513, 8192):
        x = torch.randn(count, 5)
        statistics = {name: STATISTICS[name](5, x.device) for name in ("rows", "absmax_rest")}
        for part in x.split([3, 0, 50, count - 53]):
            for statistic in statistics.values():
                statistic.update(part)
        sampled = statistics["rows"].result()
        rest = torch.stack([row for row in x if not (row == sampled).all(1).any()] or [torch.zeros(5)])
        assert len(rest) + len(sampled) == count + (count <= 512) and min(count, 513) / 2 <= len(sampled) <= 512
        assert torch.equal(statistics["absmax_rest"].result(), rest.abs().amax(0))
    places = [((row == x).all(1).nonzero() % 512).item() for row in sampled]
    assert len(set(places)) > 100, "of windows of 512 tokens, many places and not every 16th"
    link, W = Link("norm", "norm", ("a",), torch.arange(32)), torch.randn(16, 32)
    X = torch.randn(4096, 32).pow(3)  # long tails: no maximum is the last word
    rows, rest = X[::8], X.view(512, 8, 32)[:, 1:].reshape(-1, 32).abs().amax(0)
    choice = smoothquant(alpha=1.0, target="tensor").choose(
        link, [W], LayerStatistics(4096, {"absmax": X.abs().amax(0), "absmax_rest": rest, "rows": rows})
    )
    s = smoothing_scales(rest, W.abs().amax(0), 1.0)
    assert choice.error_after == pytest.approx(
        output_error(W, rows, s, (rest / s).amax() / 127, rows @ W.t()), rel=1e-4
    )
    assert torch.equal(choice.s, smoothing_scales(X.abs().amax(0), W.abs().amax(0), 1.0))


def test_search_is_never_worse_than_a_half_or_nothing_by_its_own_measure(tiny, tokens, with_outliers):
    batches = tokens()
    for activations in ("token", "tensor"):
        recipe = [METHODS["int8"](activations=activations)]
        model = with_outliers(tiny("llama"), 20)
        searched = apply([smoothquant(alpha="search"), *recipe], copy.deepcopy(model), batches).folds
        half = apply([smoothquant(alpha=0.5), *recipe], copy.deepcopy(model), batches).folds
        # Later scales of a block are chosen on weights that the earlier ones left: compare where nothing went before.
        for mine, other in list(zip(searched, half, strict=True))[::4]:
            assert mine.error_before == other.error_before
            assert mine.error_after <= min(other.error_after, other.error_before)
        assert len({r.alpha for r in searched}) > 1
    link = Link("norm", "norm", ("a",), torch.arange(4))
    W, rows = torch.eye(4), torch.tensor([[127.0, 1, 2, 3], [127.0, 5, 6, 7]])  # on the grid already
    seen = LayerStatistics(2, {"absmax": rows.abs().amax(0), "absmax_rest": torch.zeros(4), "rows": rows})
    choice = smoothquant(alpha="search", target="token").choose(link, [W], seen)
    assert choice.alpha is None and (choice.s == 1).all() and choice.error_after == choice.error_before and choice.notes


def test_a_search_aims_at_what_follows():
    int8 = METHODS["int8"]
    assert settle([smoothquant()])[0].target == "token"
    assert settle([smoothquant(), int8(activations="tensor")])[0].target == "tensor"
    assert (
        settle([smoothquant(), METHODS["gptq"](bits=8, group_size=-1), int8(activations="tensor")])[0].target
        == "tensor"
    )
    assert settle([smoothquant(target="token"), int8(activations="tensor")])[0].target == "token"


@pytest.mark.parametrize("alpha", [1.5, -0.1, float("nan"), "best", True, None])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match=r"`alpha` \(=.*\) of smoothquant must"):
        smoothquant(alpha=alpha)


def test_asking_for_what_cannot_be_smoothed_is_refused_before_any_work(tiny, tokens, monkeypatch):
    monkeypatch.setattr(METHODS["smoothquant"], "choose", lambda *_: pytest.fail("work began"))
    for architecture, knobs, message in (
        (
            "gpt2",
            {"layers": "*.c_attn, *.mlp.c_proj"},
            r"asks for transformer.h.0.mlp.c_proj, but .* activation function",
        ),
        (
            "llama",
            {"layers": "*.fc1"},
            r"`layers` \(='\*.fc1'\) of smoothquant: no linear of the blocks is named \*.fc1",
        ),
        ("llama", {"layers": "*down_proj", "links": "norm"}, r"down_proj, but `links` \(='norm'\)"),
        ("mixtral", {"layers": "*experts*"}, r"gate_up_proj.0, but something that is no linear"),
    ):
        with pytest.raises(ValueError, match=message):
            apply([smoothquant(**knobs)], tiny(architecture), tokens())
    with pytest.raises(ValueError, match="`batches` is empty, and smoothquant needs calibration"):
        apply([smoothquant()], tiny("llama"))


def test_only_what_is_asked_for_is_smoothed(tiny, tokens):
    result = apply([smoothquant(layers="*layers.1*q_proj, *.0.mlp.down_proj")], tiny("llama"), tokens())
    assert [r.name for r in result.folds] == ["model.layers.0.mlp.up_proj", "model.layers.1.input_layernorm"]
    result = apply([smoothquant(links="norm")], tiny("llama"), tokens())
    assert {r.kind for r in result.folds} == {"norm"} and len(result.folds) == 4


def test_an_interrupted_run_goes_on_with_the_same_weights(tiny, tokens, tmp_path, monkeypatch, with_outliers):
    recipe, batches, model = [smoothquant(alpha="search", target="token")], tokens(), with_outliers(tiny("llama"), 30)
    expected = apply(recipe, copy.deepcopy(model), batches)
    choose, chosen = METHODS["smoothquant"].choose, []

    def interrupted(self, link, weights, statistics):
        chosen.append(link.producer)
        if len(chosen) == 6:
            raise KeyboardInterrupt
        return choose(self, link, weights, statistics)

    monkeypatch.setattr(METHODS["smoothquant"], "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply(recipe, copy.deepcopy(model), batches, work_path=tmp_path)
    for again in range(2):
        result = apply(recipe, copy.deepcopy(model), batches, work_path=tmp_path)
        assert len(chosen) == 6 + 4, "the finished block is not chosen for again"
        for name, tensor in expected.model.state_dict().items():
            assert torch.equal(result.model.state_dict()[name], tensor), name
        taken = ["interrupted" in " ".join(r.notes) for r in result.folds]
        assert taken == [True] * 4 + [again == 1] * 4
        for mine, other in zip(result.folds, expected.folds, strict=True):
            assert (mine.alpha, mine.x_after, mine.error_after, mine.channels) == (
                other.alpha,
                other.x_after,
                other.error_after,
                other.channels,
            )


def test_a_wrong_fold_is_found_and_undone(tiny, tokens, monkeypatch, with_outliers):
    model = with_outliers(tiny("qwen2"), 10)
    weights = copy.deepcopy(model.state_dict())
    right = folding.fold

    def forgets_a_consumer(model, link, s):
        short = (
            Link(link.producer, link.kind, link.consumers[:-1], link.channels)
            if "layers.1.mlp" in link.consumers[0]
            else link
        )
        right(model, short, s)

    monkeypatch.setattr(folding, "fold", forgets_a_consumer)
    with pytest.raises(
        RuntimeError, match=r"with model.layers.1.post_attention_layernorm scaled .* block 1 gives differs by"
    ):
        apply([smoothquant()], model, tokens())
    for name, tensor in model.state_dict().items():
        if "layers.1." in name:
            assert torch.equal(tensor, weights[name]), name


def test_a_reader_outside_the_blocks_is_found(tiny, tokens):
    class Tapped(nn.Module):
        """A last norm that also reads what the first block's norm gave."""

        def __init__(self, norm, tap):
            super().__init__()
            self.norm, self.kept = norm, []
            tap.register_forward_hook(lambda _, __, y: self.kept.append(y))

        def forward(self, x):
            return self.norm(x + self.kept[-1])

    model = tiny("llama")
    model.model.norm = Tapped(model.model.norm, model.model.layers[0].input_layernorm)
    ids = tokens(1)[0]
    before = model(ids).logits
    with pytest.raises(RuntimeError, match="something outside the blocks reads what was scaled; the folds were undone"):
        apply([smoothquant()], model, tokens())
    assert torch.allclose(model(ids).logits, before, atol=1e-4)


def test_a_model_in_16_bits_passes_the_check(tiny, tokens):
    for architecture in ("llama", "gemma2", "gpt_oss"):  # the last sends a few tokens to other experts for it
        model = tiny(architecture).to(torch.bfloat16)
        records = apply([smoothquant()], model, tokens()).folds
        assert all(0 < r.difference < 0.02 for r in records) and model.dtype == torch.bfloat16


def test_smoothing_then_storing_measures_the_whole_recipe(tiny, tokens, with_outliers):
    """Errors of the last step are against the smoothed weights, and 8-bit GPTQ under int8 is no worse than rounding
    alone."""
    model, batches = with_outliers(tiny("llama"), 30), tokens(12)
    ids = tokens(1, 60, seed=9)[0]
    y = model(ids).logits
    result = apply(
        [smoothquant(), METHODS["gptq"](bits=8, group_size=-1), METHODS["int8"]()], copy.deepcopy(model), batches
    )
    assert error(result.model, y, ids) < 0.05 and len(result.layers) == 14 and len(result.folds) == 8
    assert all(layer.error < 1e-3 for layer in result.layers)


def test_where_nothing_moves_no_weight_is_touched(tiny, tokens, monkeypatch):
    model = tiny("llama")
    weights = copy.deepcopy(model.state_dict())
    nothing = folding.FoldChoice(torch.ones(64), None)
    monkeypatch.setattr(METHODS["smoothquant"], "choose", lambda *_: nothing)
    records = apply([smoothquant(links="norm")], model, tokens()).folds
    assert all(r.alpha is None and r.difference == 0 and r.x_after == r.x_before for r in records)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
