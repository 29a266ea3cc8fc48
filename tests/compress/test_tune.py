"""Block-wise tuning: what is trained is what is stored, its gradients are right, and blocks come nearer to the
original."""

import pytest
import torch

from compress import apply
from compress.formats import Bitmap, CodebookGroup, IntGroup, Sparse24Weight
from compress.formats.scales import ScaleRule
from compress.linear import compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe
from compress.tuning import training

CODES, SCALE = torch.randint(0, 8, (6, 32)), torch.randn(6, 4) * 0.1
KEEP = torch.tensor([True, False, False, True]).repeat(6, 8)
INTS = IntGroup.from_codes(CODES, SCALE, None, bits=3, group_size=8)
FORMATS = {
    "symmetric": INTS,
    "asymmetric": IntGroup.from_codes(CODES, SCALE, torch.randint(0, 8, (6, 4)), bits=3, group_size=8),
    "bitmap": Bitmap.from_plain(IntGroup.from_codes(CODES * KEEP + 4 * ~KEEP, SCALE, None, bits=3, group_size=8), KEEP),
    "2:4": Sparse24Weight.from_plain(
        IntGroup.from_codes(CODES * KEEP + 4 * ~KEEP, SCALE, None, bits=3, group_size=8), KEEP
    ),
    "6-bit scales": IntGroup.from_codes(
        CODES,
        (rule := ScaleRule.fit("int6", SCALE.abs(), 8)).rounded(SCALE),
        None,
        bits=3,
        group_size=8,
        scales=rule.stored(rule.rounded(SCALE)),
    ),
    "table": CodebookGroup.from_codes(CODES, torch.randn(8), SCALE, group_size=8),
    "tables": CodebookGroup.from_codes(CODES, torch.randn(6, 8), SCALE, group_size=8),
    "nested": CodebookGroup.from_codes(CODES, torch.randn(8), SCALE, group_size=8, double_quant=True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_trainable_view_equals_the_stored_weight(name):
    stored = FORMATS[name]
    original = stored.dequantize() + 0.02 * torch.randn(stored.shape)
    view = stored.trainable(original)
    assert torch.equal(view.weight(), stored.dequantize()), "the side of a code changes no weight"
    parameters = [view.offsets, *([] if view.factors is None else [view.factors])]
    gradients = torch.autograd.grad(view.weight().square().sum(), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 2 * gradient.sign() * torch.rand(gradient.shape)
    after = view.stored()
    assert torch.equal(view.weight(), after.dequantize()) and not torch.equal(after.dequantize(), stored.dequantize())
    assert after.spec() == stored.spec() and after.nbytes == stored.nbytes
    if name in ("bitmap", "2:4"):
        assert torch.equal(after.dequantize() != 0, (after.dequantize() != 0) & KEEP)


@pytest.mark.parametrize("name", ["symmetric", "asymmetric", "bitmap", "2:4", "table", "from the middle"])
def test_gradients_are_those_of_the_line_through_the_steps(name):
    """Against float64: W = (latent code - zero) * scale * exp(factor), without any rounding; a table's line goes through
    the neighbours of each entry, and at its ends through one of them."""
    stored = FORMATS["table" if name == "from the middle" else name]
    view, target = stored.trainable(), torch.randn(stored.shape)
    view.chosen = name == "from the middle"
    view.from_the_middle()
    by_offset, by_factor = torch.autograd.grad(((view.weight() - target) ** 2).sum(), (view.offsets, view.factors))
    W = stored.dequantize().double()
    slope = 2 * (W - target)  # of the loss by W
    scale = view.scale.double().repeat_interleave(W.shape[1] // view.scale.shape[1], 1)
    kept = KEEP if name in ("bitmap", "2:4") else torch.ones_like(KEEP)
    step = torch.ones_like(W)
    if isinstance(stored, CodebookGroup):
        table = stored.rows().table.double()
        entries = table.sort().values
        around = torch.cat([2 * entries[:1] - entries[1:2], entries, 2 * entries[-1:] - entries[-2:-1]])
        step = ((around[2:] - around[:-2]) / 2)[torch.searchsorted(entries, table[CODES])]
    reach = 10 if name == "from the middle" else 1
    assert torch.allclose(by_offset.double(), reach * slope * scale * step * kept, atol=1e-4)
    assert torch.allclose(by_factor.double(), (slope * W).view(*view.scale.shape, -1).sum(-1), atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_collected_gradients_are_those_of_the_weight(name):
    """`collect` computes them itself, in less time than autograd takes."""
    stored = FORMATS[name]
    view = stored.trainable(stored.dequantize() + 0.02 * torch.randn(stored.shape))
    gradient, parameters = torch.randn(stored.shape), dict(view.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(view.weight(), parameters.values(), gradient), strict=True))
    for times in (1, 2):
        view.collect(gradient)
        for key, parameter in parameters.items():
            assert torch.allclose(parameter.grad, times * expected[key], rtol=1e-5, atol=1e-6), "they are added"
    view.fix_codes()
    if view.factors is not None:
        view.factors.grad = None
        view.collect(gradient)
        assert torch.allclose(view.factors.grad, expected["factors"], rtol=1e-5, atol=1e-6)


def loss(model, original, batches, index):
    """Of one block's output on the stream of each model, as the formula of `token_loss` says, in float64."""
    seen = {}
    handles = [
        m.model.layers[index].register_forward_hook(
            lambda _, __, out, m=m: seen.update({m: out[0] if isinstance(out, tuple) else out})
        )
        for m in (model, original)
    ]
    losses = []
    for batch in batches:
        model(batch), original(batch)
        y, wanted = seen[model].double(), seen[original].double()
        error = (y - wanted).square().sum(-1)[0] / wanted.square().sum(-1)[0]
        losses.append((torch.cat([error[:1].repeat(63), error])).mean().item())
    for handle in handles:
        handle.remove()
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "recipe",
    [
        "gptq(bits=3, group_size=16, min_tokens=8)",
        pytest.param("rtn(bits=2, group_size=16)", marks=pytest.mark.slow),
    ],
)
def test_blocks_come_nearer_and_the_record_says_how_near(recipe, tiny, tokens):
    batches, original = tokens(), tiny("llama")
    before = apply(parse_recipe(recipe), tiny("llama"), batches)
    after = apply(parse_recipe(f"{recipe}, tune(steps=60)"), tiny("llama"), batches)
    for index in range(2):
        now = loss(after.model, original, batches, index)
        assert now < 0.9 * loss(before.model, original, batches, index)
        noted = {r.notes[-1] for r in after.layers if f"layers.{index}." in r.name}
        assert len(noted) == 1 and float(noted.pop().split()[-1]) == pytest.approx(now, rel=2e-3)
    assert after.bits_per_weight == before.bits_per_weight
    assert [r.rtn_error for r in after.layers] == [r.rtn_error for r in before.layers]


def test_zeros_stay_zeros_and_what_makes_it_worse_is_not_kept(tiny, tokens, monkeypatch):
    recipe = "magnitude(ratio=0.1), rtn(bits=4, group_size=16)"  # too few zeros for a bitmap to pay
    before = apply(parse_recipe(recipe), tiny("llama"), tokens())
    after = apply(parse_recipe(f"{recipe}, tune(steps=10, norm_rate=0.001)"), tiny("llama"), tokens())
    for name, linear in compressed_linears(before.model).items():
        zero = linear.dequantize() == 0
        assert (compressed_linears(after.model)[name].dequantize()[zero] == 0).all()
    assert not torch.equal(
        before.model.model.layers[0].input_layernorm.weight, after.model.model.layers[0].input_layernorm.weight
    )
    worse = apply(parse_recipe(f"{recipe}, tune(steps=2, rate=1.0, norm_rate=0.9)"), tiny("llama"), tokens())
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.model.state_dict().values(), worse.model.state_dict().values(), strict=True)
    )
    assert worse.layers[0].notes[-1].startswith("not tuned")


@pytest.mark.slow
def test_killed_and_started_again(tiny, tokens, tmp_path, monkeypatch):
    recipe = parse_recipe("rtn(bits=3, group_size=16), tune(steps=5, norm_rate=0.001)")
    expected = apply(recipe, tiny("llama", num_hidden_layers=3), tokens())
    train, left = training.train, [2]

    def killed(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr("compress.tuning.blocks.train", killed)
    with pytest.raises(KeyboardInterrupt):
        apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    result = apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    assert "tuned by an earlier, interrupted run" in result.layers[0].notes
    assert "tuned by an earlier, interrupted run" not in result.layers[-1].notes
    for a, b in zip(result.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_refused_where_nothing_is_stored_before():
    with pytest.raises(ValueError, match="a weight quantiser before it works"):
        settle(parse_recipe("tune"))
    with pytest.raises(ValueError, match="cannot follow"):
        settle(parse_recipe("rtn, tune, nf4"))
