"""A budget of bytes that is shared out among layers: kept, least in loss, and told in the record."""

import copy
import itertools

import pytest
import torch

from compress import METHODS, apply
from compress.allocation.candidates import measure
from compress.allocation.importance import z_scores
from compress.allocation.predictions import PredictionLoss, ScaledLoss
from compress.allocation.program import BudgetProgram, Choice
from compress.allocation.sensitivity import FisherLoss
from compress.apply import apply_each
from compress.checkpoint.fits import check_save_format
from compress.linear import weight_of
from compress.recipe import parse_recipe, parse_recipes
from compress.walk.blocks import targets
from compress.walk.fisher import fisher
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from compress.weights.finequant import group_size, group_sizes
from eval.machine.size import size
from reports.page.allocation import figures

CPU = torch.device("cpu")
CHOICES = "gptq(bits={2, 3, 4, 8}, group_size=16, min_tokens=8)"


def mixed(budget_mb, **knobs):
    return METHODS["mixed"](**{"budget_mb": budget_mb, "choices": CHOICES, "tokens": 96, **knobs})


def stored(result) -> int:
    return size(copy.deepcopy(result.model).to(torch.bfloat16)).stored_bytes


@pytest.mark.parametrize("seed", range(6))
def test_program_finds_the_least(monkeypatch, seed):
    """Against every combination, with sizes that have much or nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    unit = (64, 1)[seed % 2]
    layers = {
        f"l{i}": [
            Choice(
                unit * int(torch.randint(1, 400, (1,), generator=generator)), float(torch.rand(1, generator=generator))
            )
            for _ in range(4)
        ]
        for i in range(5)
    }
    program = BudgetProgram(layers)
    every = [
        Choice(sum(c.cost for c in several), sum(c.loss for c in several))
        for several in itertools.product(*layers.values())
    ]
    smallest = min(choice.cost for choice in every)
    assert program.smallest == smallest
    for budget in (smallest, smallest + 100 * unit, smallest + 450.5 * unit, 1e9):
        found = program.of(program.within(budget))
        assert found.cost <= budget
        assert found.loss == pytest.approx(min(choice.loss for choice in every if choice.cost <= budget), abs=1e-12)
    costs, losses = zip(*program.curve(), strict=True)
    assert list(losses) == sorted(losses, reverse=True) and costs[0] == smallest
    with pytest.raises(ValueError, match="less than the smallest choices cost"):
        program.within(smallest - 1)
    monkeypatch.setattr("compress.allocation.program.MOST_STATES", 16)  # coarse: within the budget all the same
    assert BudgetProgram(layers).of(BudgetProgram(layers).within(smallest + 450 * unit)).cost <= smallest + 450 * unit


@pytest.mark.parametrize("seed", range(4))
def test_program_finds_the_smallest_within_a_loss(seed):
    """Against every combination."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(1, most, (1,), generator=generator))

    layers = {f"l{i}": [Choice(drawn(400), drawn(1000) / 1000) for _ in range(4)] for i in range(5)}
    program = BudgetProgram(layers)
    every = [
        Choice(sum(c.cost for c in several), sum(c.loss for c in several))
        for several in itertools.product(*layers.values())
    ]
    best = min(choice.loss for choice in every)
    for most in (best + 1e-9, best + 0.3, best + 1, 10):
        found = program.of(program.losing(most))
        assert found.loss <= most + 1e-12
        assert found.cost == min(choice.cost for choice in every if choice.loss <= most + 1e-12)
    with pytest.raises(ValueError, match="less than the best choices lose"):
        program.losing(best - 0.001)


def test_the_smallest_model_within_a_loss_is_on_the_curve(tiny, tokens):
    """It loses what it may, and a budget of its size finds the same choices; the page says which question it answers."""
    model, batches = tiny("llama", num_hidden_layers=2), tokens()
    knobs = {"choices": CHOICES, "tokens": 96}
    loose = apply([METHODS["mixed"](max_loss=0.05, **knobs)], copy.deepcopy(model), batches)
    tight = apply([METHODS["mixed"](max_loss=0.005, **knobs)], copy.deepcopy(model), batches)
    assert loose.allocation.chosen[1] <= 0.05 and tight.allocation.chosen[1] <= 0.005
    assert stored(loose) == loose.allocation.chosen[0] < stored(tight) == tight.allocation.chosen[0]
    again = apply([mixed(stored(loose) / 1e6 + 1e-6)], copy.deepcopy(model), batches)
    assert again.allocation.chosen == pytest.approx(loose.allocation.chosen)
    assert loose.allocation.max_loss == 0.05 and loose.allocation.budget_bytes is None
    assert "the smallest in which" in figures(loose.layers, loose.allocation)._repr_html_()
    assert "A budget of" in figures(again.layers, again.allocation)._repr_html_()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_loss": 0.1, "budget_mb": 80}, r"`max_loss` \(=0.1\) and `budget_mb` \(=80\) of mixed are two ways"),
        ({"max_loss": 0.1, "loss": "cosine"}, r"`max_loss` \(=0.1\) of mixed needs a `loss` that is one, kl"),
        ({"max_loss": -1.0}, "`max_loss`"),
    ],
)
def test_a_loss_that_says_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        METHODS["mixed"](choices=CHOICES, **knobs)


def test_a_loss_that_cannot_be_reached_names_the_least(tiny, tokens):
    knobs = {"choices": "rtn(bits=2, group_size=16)", "tokens": 96}
    with pytest.raises(
        ValueError, match=r"`max_loss` \(=1e-06\) of mixed cannot be reached: .*lose, [\d.]+; more bits"
    ):
        apply([METHODS["mixed"](max_loss=1e-6, **knobs)], tiny("llama"), tokens())


def test_the_budget_holds_and_is_used(tiny, tokens):
    model, batches = tiny("llama", num_hidden_layers=3), tokens()
    with torch.no_grad():  # a layer that hardly matters, and one that matters much
        model.model.layers[0].mlp.down_proj.weight.mul_(0.02)
        model.model.layers[2].mlp.down_proj.weight.mul_(3)
    half = sum(p.numel() for p in model.parameters()) * 2e-6
    result = apply([mixed(0.56 * half)], copy.deepcopy(model), batches)
    assert 0.52 * half * 1e6 < stored(result) <= 0.56 * half * 1e6
    assert stored(result) == result.allocation.chosen[0]
    by_name = {layer.name.removeprefix("model.layers."): layer for layer in result.layers}
    assert by_name["0.mlp.down_proj"].bits_per_weight < by_name["2.mlp.down_proj"].bits_per_weight
    for i in range(3):
        assert len({by_name[f"{i}.self_attn.{x}_proj"].choice for x in "qkv"}) == 1
        assert by_name[f"{i}.mlp.gate_proj"].choice == by_name[f"{i}.mlp.up_proj"].choice
    assert len({layer.choice for layer in result.layers}) > 1
    assert all(layer.choice in layer.choices and len(layer.choices) == 4 for layer in result.layers)
    (cost, loss), curve = result.allocation.chosen, result.allocation.curve
    assert min(loss_ for cost_, loss_ in curve if cost_ <= cost) >= loss - 1e-12, "nothing smaller loses less"
    even = {choice: sum({r.choices[choice] for r in result.layers}) for choice in result.layers[0].choices}
    assert loss < min(even[choice] for choice in even if "bits=2" in choice or "bits=3" in choice)


def test_a_budget_that_cannot_be_reached_names_one_that_can(tiny, tokens):
    model = tiny("llama")
    with pytest.raises(
        ValueError, match=r"`budget_mb` \(=0.01\) of mixed cannot be reached.* takes ([\d.]+) MB"
    ) as error:
        apply([mixed(0.01)], model, tokens())
    smallest = float(str(error.value).split(" takes ")[1].split()[0])
    assert stored(apply([mixed(smallest + 0.005)], model, tokens())) <= (smallest + 0.005) * 1e6


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_the_estimate_ranks_as_the_measured_loss(tiny, tokens, architecture):
    model, batches = (
        tiny(architecture, num_hidden_layers=3) if architecture == "llama" else tiny(architecture),
        tokens(12),
    )
    methods = {str(bits): METHODS["rtn"](bits=bits, group_size=16) for bits in (2, 3, 4, 6)}
    losses = {"kl": PredictionLoss(model, batches, CPU), "fisher": FisherLoss(fisher(model, batches, device=CPU))}
    found = {
        kind: measure(model, methods, batches, loss, names=list(targets(model)), together=False, device=CPU)
        for kind, loss in losses.items()
    }
    scaled = ScaledLoss(PredictionLoss(model, batches, CPU))
    names = list(targets(model))
    for name, one in measure(model, methods, batches, scaled, names=names, together=False, device=CPU).items():
        measured = found["kl"][name].choices
        assert one.choices["2"].loss == pytest.approx(measured["2"].loss), "the first choice is measured"
        assert all(one.choices[bits].loss == pytest.approx(measured[bits].loss, rel=0.6) for bits in ("3", "4"))
    logs = [
        torch.tensor([choice.loss for one in found[kind].values() for choice in one.choices.values()]).log()
        for kind in losses
    ]
    assert torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in logs]))[0, 1] > 0.85
    assert (logs[0] - logs[1]).abs().median() < 1.0, "within a factor of e, half of them"


def test_fisher_loss_is_its_formula(tiny, tokens):
    """A plain sum over rows and tokens, in float64."""
    model, batches = tiny("llama"), tokens(4)
    F = fisher(model, batches, device=CPU)
    name = "model.layers.0.self_attn.q_proj"
    inputs = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for batch in batches:
        model(batch)
    handle.remove()
    X = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).double()
    method = METHODS["rtn"](bits=3, group_size=16)
    (part,) = method.solve(weight_of(model.get_submodule(name)), None)
    D = (weight_of(model.get_submodule(name)) - part.dequantize()).double()
    G = F[name].double().sum(1) / X.square().mean(0).sum()
    expected = 0.5 * (G * (X @ D.t()).square().mean(0)).sum().item()
    found = measure(model, {"3": method}, batches, FisherLoss(F), names=[name], together=False, device=CPU)
    assert found[name].choices["3"].loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kl", pytest.param("fisher", marks=pytest.mark.slow)])
def test_once_and_resume_and_other_budgets(tiny, tokens, tmp_path, monkeypatch, loss):
    model, batches = tiny("llama"), tokens()
    half = sum(p.numel() for p in model.parameters()) * 2e-6
    one = mixed(0.5 * half, loss=loss)
    plain = apply([one], copy.deepcopy(model), batches)
    written = []
    put = BlockStore.put
    monkeypatch.setattr(BlockStore, "put", lambda self, *a: (written.append(self.folder.name), put(self, *a))[1])
    kept = apply([one], copy.deepcopy(model), batches, work_path=tmp_path)
    assert [r.choice for r in kept.layers] == [r.choice for r in plain.layers]
    assert any("losses" in name for name in written)
    written.clear()
    again = apply([mixed(0.6 * half, loss=loss)], copy.deepcopy(model), batches, work_path=tmp_path)
    assert written and not any("losses" in name or "fisher" in name for name in written), "losses serve other budgets"
    assert again.allocation.chosen[0] > kept.allocation.chosen[0]
    once = apply_each({"a": [one]}, model, batches, calibrate="once")["a"]
    assert [r.choice for r in once.layers] == [r.choice for r in plain.layers]
    assert any("mixed: the losses" in note for note in once.notes)


@pytest.mark.parametrize(
    "loss, tied", [pytest.param("kl", True, marks=pytest.mark.slow), ("kl_scaled", False), ("fisher", True)]
)
def test_the_embedding_takes_part(tiny, tokens, loss, tied):
    """In the same budget, with choices of its own."""
    model = tiny("llama", tie_word_embeddings=tied)
    half = sum(p.numel() for p in model.parameters()) * 2e-6
    choices = "rtn(bits={3, 4}, group_size=16); rtn(bits={2, 4, 8}, group_size=32, where='embedding')"
    result = apply([mixed(0.35 * half, loss=loss, choices=choices)], copy.deepcopy(model), tokens())
    assert 0.3 * half * 1e6 < stored(result) <= 0.35 * half * 1e6
    assert stored(result) == result.allocation.chosen[0] and result.recipe[0].where == "all"
    ends = [layer for layer in result.layers if ".layers." not in layer.name]
    assert len(ends) == (1 if tied else 2)
    assert all(len(end.choices) == 3 and "embedding" in end.choice for end in ends)
    with pytest.raises(ValueError, match=r"`loss` \(='shuffled'\) of mixed orders blocks"):
        mixed(1, choices=choices, loss="shuffled")


@pytest.mark.parametrize("rule", ["cosine", pytest.param("zscore", marks=pytest.mark.slow), "shuffled"])
def test_rules_give_whole_blocks_their_bits(tiny, tokens, rule):
    model = tiny("llama", num_hidden_layers=4)
    half = sum(p.numel() for p in model.parameters()) * 2e-6
    result = apply([mixed(0.45 * half, loss=rule)], copy.deepcopy(model), tokens())
    assert stored(result) <= 0.45 * half * 1e6
    blocks = [{r.choice for r in result.layers if f".{i}." in r.name} for i in range(4)]
    assert all(len(one) == 1 for one in blocks) and len(set.union(*blocks)) > 1
    if rule == "zscore":
        scores = z_scores(model, list(targets(model)), CPU)
        bits = [next(r.bits_per_weight for r in result.layers if f".{i}." in r.name) for i in range(4)]
        order = sorted(range(4), key=lambda i: scores[i])
        assert [bits[i] for i in order] == sorted(bits), "more important, more bits"


def test_choices_in_a_recipe_and_what_is_refused(tiny, tokens):
    text = 'mixed(budget_mb=80, choices="gptq(bits={3, 4}); nf4")'
    (method,) = parse_recipe(text)
    assert len(method.methods) == 3 and parse_recipe(str(method)) == [method]
    assert list(parse_recipes(f"a: {text}; nf4")) == ["a", "nf4"]
    for choices, message in (
        ("gptq(bit=4)", "`bit` is not a knob of gptq"),
        ("smoothquant", "`choices` of `mixed`.*smoothquant is not a method"),
        ("awq(bits=4)", "must be one method that stores a weight by itself"),
        ("mixed", "must be one method"),
        ("gptq, nf4", "must be one method.*semicolons"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS["mixed"](choices=choices)
    with pytest.raises(ValueError, match=r"`choices` \(=''\) of mixed must name"):
        apply([METHODS["mixed"]()], tiny("llama"), tokens())
    with pytest.raises(ValueError, match="`group_size`"):
        apply([mixed(1, choices="rtn(bits={3, 4}, group_size=48)")], tiny("llama"), tokens())
    with pytest.raises(ValueError, match=r"`loss` \(='fisher'\) of mixed"):
        apply([METHODS["wanda"](), mixed(1, loss="fisher")], tiny("llama"), tokens())
    check_save_format("gptq", [mixed(1, choices="gptq(bits={4, 8}, group_size=32)")], tiny("llama"))
    with pytest.raises(ValueError, match="nf4"):
        check_save_format("gptq", [mixed(1, choices="gptq(bits=4, group_size=32); nf4")], tiny("llama"))
    pruned = apply([METHODS["wanda"](), mixed(0.2)], tiny("llama"), tokens())
    assert all(layer.sparsity > 0.49 for layer in pruned.layers), "zeros stay"


def test_group_sizes_follow_the_ranges():
    """A matrix of equal ranges keeps whole rows; one with few large columns gets small groups, but for them."""
    finequant = METHODS["finequant"](bits=4, alpha=10.0)
    even = torch.rand(8, 256) - 0.5
    outliers = even.clone()
    outliers[:, 3] *= 20
    (one,), (other,) = (finequant.solve(W, LayerStatistics(0, {})) for W in (even, outliers))
    assert one.group_size == 256 and other.group_size == 16
    assert group_sizes(576, 32) == [576, 288, 144, 72, 36]
    normal = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    tails = normal * normal.abs().sqrt()
    assert group_size(tails, 25.0, 16) < group_size(normal, 25.0, 16), "heavier tails, smaller groups"
    found = [group_size(normal, alpha, 16) for alpha in (5.0, 25.0, 100.0, 400.0)]
    assert found == sorted(set(found)), "each threshold has a size of its own"
    (coarse,) = METHODS["rtn"](bits=4, group_size=256).solve(outliers, LayerStatistics(0, {}))
    assert (outliers - other.dequantize()).norm() < 0.3 * (outliers - coarse.dequantize()).norm()
