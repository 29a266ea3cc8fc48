"""Recovery: the divergence and its gradients are right, what is trained is what is stored, and a model comes nearer to
the original without a byte more."""

import math

import pytest
import torch
import torch.nn.functional as F

from compress import METHODS, apply, calibration, held_out, load_compressed, load_model, save_compressed
from compress.apply import apply_each
from compress.formats import Bitmap, CodebookGroup, Dense, IntGroup
from compress.formats.eight_bit import EightBit
from compress.grid.tables import TABLES, padded
from compress.linear import CompressedLinear, compressed_linears
from compress.method import settle
from compress.plan import plan
from compress.recipe import parse_recipe
from compress.recover import learned, loop
from compress.recover import teacher as predictions
from compress.recover.at_head import AtHead
from compress.recover.divergence import divergence, likeliest
from compress.recover.learned import DistilledLinear, learning
from compress.transforms import ChainedTransform, Hadamard, Rounding
from compress.walk.resume import BlockStore
from compress.weights.qtip import qtip, signs_for, turn
from kernels.w8a8_matmul import quantize_weight

QUICK = "steps=12, minutes=0, batch=2"


@pytest.fixture
def peaked(tiny):
    """A tiny model whose predictions are not uniform, so that compression changes them by more than rounding."""

    def make(architecture="llama"):
        torch.manual_seed(0)
        model = tiny(architecture)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0 if "embed" in name else 2.0)
        return model

    return make


def kl(model, original, batches):
    """Mean KL(original | model) over all positions, in float64."""
    total = []
    for ids in batches:
        p, q = (m(ids).logits[0].detach().double().log_softmax(-1) for m in (original, model))
        total.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(total).mean().item()


def test_the_divergence_over_all_tokens_is_that_of_torch():
    teacher, student = torch.randn(5, 40), torch.randn(5, 40)
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    ids, logp = likeliest(teacher, 40)
    forward, reverse = (divergence(student, ids, logp, loss) for loss in ("forward", "reverse"))
    assert torch.allclose(forward, F.kl_div(q, p, reduction="none", log_target=True).sum(-1), atol=1e-5)
    assert torch.allclose(reverse, F.kl_div(p, q, reduction="none", log_target=True).sum(-1), atol=1e-5)
    both = divergence(student, ids, logp, "both")
    assert ((both >= torch.minimum(forward, reverse) - 1e-6) & (both <= torch.maximum(forward, reverse) + 1e-6)).all()
    fewer = divergence(student, *likeliest(teacher, 8))
    assert ((fewer > 0) & (fewer <= forward + 1e-6)).all(), "tokens that count as one cannot tell models apart further"
    ids, logp = likeliest(teacher, 8)
    exact, order = p.sort(descending=True)
    assert torch.equal(ids.sort().values, order[:, :8].sort().values)
    assert torch.allclose(logp, p.gather(-1, ids), atol=1e-6)


def test_the_less_certain_model_is_drawn_to_the_other():
    certain, unsure = torch.tensor([[8.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.0, 0.0]])
    for teacher, student, nearer in ((certain, unsure, "forward"), (unsure, certain, "reverse")):
        ids, logp = likeliest(teacher, 4)
        made = {loss: divergence(student, ids, logp, loss).item() for loss in ("forward", "reverse", "both")}
        other = made["forward" if nearer == "reverse" else "reverse"]
        assert abs(made["both"] - made[nearer]) < abs(made["both"] - other)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt", "qwen3_moe", "cohere", "granite"])
def test_pieces_of_logits_are_those_of_the_whole_window(architecture, tiny, tokens):
    """Whatever follows the head (a factor, a cap), the model's own code computes it."""
    model, ids = tiny(architecture), tokens(1, 20)[0]
    at_head = AtHead(model)
    assert at_head.splits
    hidden = at_head.hidden(ids)
    pieces = torch.cat([at_head.logits(piece) for piece in hidden.split(7)])
    assert torch.allclose(pieces, model(ids).logits[0].float(), atol=1e-5)
    assert "forward" not in vars(model.base_model)


STORED = {
    "integers": lambda W: [IntGroup.from_codes(W.mul(4).round().clamp(-4, 3).add(4).to(torch.uint8), torch.full((24, 4), 0.25), None, bits=3, group_size=8)],
    "a table": lambda W: [CodebookGroup.from_codes(W.mul(4).round().clamp(-4, 3).add(4).to(torch.uint8), torch.randn(8), torch.full((24, 4), 0.5), group_size=8)],
    "integers and a dense part": lambda W: [*STORED["integers"](W), Dense(0.1 * torch.randn(24, 32))],
    "walks": lambda W: [qtip(W, None, signs_for(32, 0), bits=3, states=12)],
    "half zeros": lambda W: [Bitmap.from_plain(Dense(W * (W > 0)), W > 0)],
}  # fmt: skip
TRANSFORMS = {
    "none": lambda: None,
    "rotation": lambda: Hadamard(torch.randn(32).sign(), 32),
    "rotation and rounding": lambda: ChainedTransform([Hadamard(torch.randn(32).sign(), 32), Rounding(8)]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("stored", STORED)
def test_the_stand_computes_as_the_stored_linear(stored, transform):
    torch.manual_seed(1)
    x = torch.randn(5, 32, requires_grad=True)
    linear = CompressedLinear(
        STORED[stored](torch.randn(24, 32)), torch.randn(24), dtype=torch.float32, transform=TRANSFORMS[transform]()
    )
    stand = DistilledLinear(linear, "weights", False, None, torch.float32)
    y = stand(x)
    assert torch.allclose(y, linear(x.detach()), atol=2e-2 if "rounding" in transform else 1e-4)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    turned = (
        torch.eye(32) if transform == "none" else linear.transform(torch.eye(32)) if transform == "rotation" else None
    )
    if turned is not None:  # x' = x T, y = x T W'
        assert torch.allclose(gradient, (turned @ linear.dequantize().t()).sum(-1).expand(5, 32), atol=1e-4)
    again = stand.stored()
    assert torch.equal(again.dequantize(), linear.dequantize()) and again.nbytes == linear.nbytes


def test_factors_of_walks_have_the_gradients_of_the_weight():
    """Those of row and column, by differences; and the stored weight is the one that was trained."""
    W = torch.randn(24, 32)
    stored = qtip(W, None, signs_for(32, 0), bits=3, states=12)
    view, G = stored.trainable_scales(), torch.randn(24, 32)
    assert torch.equal(view.weight(), stored.dequantize()) and view.stored().nbytes == stored.nbytes
    view.row, view.column = view.row.float(), view.column.float()  # differences are smaller than bfloat16's steps
    view.collect(G)
    for parameter in (view.offsets, view.factors):
        for i in (0, 7):
            losses = []
            for step in (1e-2, -1e-2):
                parameter.data[i] = step
                losses.append((view.weight() * G).sum().item())
            parameter.data[i] = 0
            assert parameter.grad[i].item() == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=1e-2, abs=1e-3)
    view.on_turned_inputs()
    before = [parameter.grad.clone() for parameter in (view.offsets, view.factors)]
    view.offsets.grad = view.factors.grad = None
    view.collect(turn(G, signs_for(32, 0)))
    for parameter, gradient in zip((view.offsets, view.factors), before, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-4)
    view = stored.trainable_scales()
    with torch.no_grad():
        view.offsets += 0.1 * torch.randn(24)
        view.factors += 0.1 * torch.randn(32)
    assert torch.equal(view.stored().dequantize(), view.weight()) and torch.equal(view.stored().codes, stored.codes)


@pytest.mark.parametrize(
    "recipe",
    [
        "rtn(bits=3, group_size=16)",
        "qtip(bits=2, states=12, min_tokens=8)",
        pytest.param("rtn(bits=4, group_size=16, grid=iq4_nl, scale_dtype=int6)", marks=pytest.mark.slow),
        "rotate, rtn(bits=3, group_size=16), activations(bits=8)",
    ],
)
def test_scales_learn_and_codes_and_bytes_stay(recipe, peaked, tokens):
    text, original = tokens(12, 24), peaked()
    before = apply(recipe, peaked(), text).model
    result = apply(f"{recipe}, distil({QUICK})", peaked(), text)
    (record,) = result.recoveries
    assert kl(result.model, original, text[:-1]) < kl(before, original, text[:-1]), record
    assert record.curve[0].step == 0 and record.kept > 0 and record.curve[-1].divergence < record.curve[0].divergence
    for name, linear in compressed_linears(result.model).items():
        was = compressed_linears(before)[name]
        assert linear.spec() == was.spec() and linear.nbytes == was.nbytes
        for key, tensor in linear.state_dict().items():
            if key.endswith(("codes", "zero")) and "scale" not in key:
                assert torch.equal(tensor, was.state_dict()[key]), f"{name}.{key}"
    moved = [one for one in result.layers if any("distil" in note for note in one.notes)]
    assert len(moved) == len(result.layers)


def test_what_was_scored_is_what_the_model_has(peaked, tokens):
    """The last score of the held-out windows, computed again with the stored model."""
    text, original = tokens(12, 24), peaked()
    result = apply(f"rtn(bits=3, group_size=16), distil({QUICK})", peaked(), text)
    (record,) = result.recoveries
    kept = next(point for point in record.curve if point.step == record.kept)
    assert kl(result.model, original, text[-1:]) == pytest.approx(kept.divergence, rel=0.02)


def test_zeros_stay_and_weights_learn(peaked, tokens):
    text, original = tokens(12, 24), peaked()
    pruned = "sparsegpt(pattern='2:4', min_tokens=8)"
    before = apply(pruned, peaked(), text).model
    after = apply(f"{pruned}, distil(train=weights, rate=0.01, {QUICK})", peaked(), text).model
    assert kl(after, original, text[:-1]) < kl(before, original, text[:-1])
    for name, linear in compressed_linears(after).items():
        was = compressed_linears(before)[name]
        assert torch.equal(linear.dequantize() != 0, was.dequantize() != 0) and linear.nbytes == was.nbytes


def test_plain_linears_learn_after_blocks_were_dropped(peaked, tokens):
    text, original = tokens(12, 24), peaked()
    before = apply("layer_drop(target=mlp, count=1)", peaked(), text).model
    after = apply(f"layer_drop(target=mlp, count=1), distil(train=weights, rate=0.003, {QUICK})", peaked(), text)
    assert kl(after.model, original, text[:-1]) < kl(before, original, text[:-1])
    assert after.model.dtype == original.dtype and not any(p.grad is not None for p in after.model.parameters())


def test_pruned_distilled_quantised_distilled(peaked, tokens):
    """GPUSQ's recipe: the zeros stay through all of it, and every training lowers its own score."""
    recipe = (
        f"sparsegpt(pattern='2:4', min_tokens=8), distil(train=weights, rate=0.01, {QUICK}), "
        f"gptq(bits=4, group_size=16, min_tokens=8), distil({QUICK})"
    )
    result = apply(recipe, peaked(), tokens(12, 24))
    assert [record.kept > 0 for record in result.recoveries] == [True, True]
    for linear in compressed_linears(result.model).values():
        zeros = (linear.dequantize().unflatten(1, (-1, 4)) == 0).sum(-1)
        assert (zeros >= 2).all()


def test_a_distilled_model_is_saved_with_its_norms(peaked, tokens, tmp_path):
    result = apply(f"rtn(bits=3, group_size=16), distil({QUICK})", peaked(), tokens(12, 24))
    norms = [row for row in result.kept if row["name"].endswith("norm.weight")]
    assert norms and all(row["reason"].startswith("trained by distil(") for row in norms)
    save_compressed(result, tmp_path / "saved")
    again, ids = load_compressed(tmp_path / "saved"), tokens(1, 24)[0]
    assert torch.equal(again(ids).logits, result.model(ids).logits)


def test_a_bias_beside_a_part_that_rounds_its_input_is_scored():
    """The product is that of the kernel, and the bias that learns is added to it."""
    torch.manual_seed(0)
    weight = EightBit(quantize_weight(torch.randn(24, 32), torch.int8))
    linear = CompressedLinear([weight], torch.randn(24), dtype=torch.float32)
    stand, x = DistilledLinear(linear, "scales", False, None, torch.float32), torch.randn(5, 32)
    assert torch.allclose(stand(x), linear(x), atol=1e-5)
    with torch.no_grad():
        stand.b += 1
    assert torch.allclose(stand(x), linear(x) + 1, atol=1e-5)


@pytest.mark.parametrize("pruned", ["wanda(ratio=0.5)", "sparsegpt(pattern='2:4', min_tokens=8)"])
def test_scales_are_all_that_learns_by_default(pruned, peaked, tokens):
    """Floats that pruning left do not learn with train=scales; norms do."""
    text = tokens(12, 24)
    before, after = (apply(recipe, peaked(), text).model for recipe in (pruned, f"{pruned}, distil({QUICK})"))
    for name, linear in compressed_linears(after).items():
        assert torch.equal(linear.dequantize(), compressed_linears(before)[name].dequantize()), name


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "stored", ["gptq(grid=nf4, group_size=16, min_tokens=8)", "gptq(bits=4, group_size=16, min_tokens=8)"]
)
@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_zeros_stay_in_every_format(stored, ratio, peaked, tokens):
    """Also where they are codes like others, because a mask would take more bytes than it saves."""
    text, pruned = tokens(12, 24), f"wanda(ratio={ratio}), {stored}"
    before = apply(pruned, peaked(), text).model
    after = apply(f"{pruned}, distil(train=weights, rate=0.1, {QUICK})", peaked(), text).model
    for name, linear in compressed_linears(after).items():
        zeros = compressed_linears(before)[name].dequantize() == 0
        assert (linear.dequantize()[zeros] == 0).all(), name


@pytest.mark.parametrize("stored", ["integers", "a table"])
def test_codes_of_error_feedback_begin_in_the_middle_of_their_step(stored):
    """The first updates do not undo them; codes that are the nearest ones begin where the original lies."""
    torch.manual_seed(1)
    (part,) = STORED["integers"](0.3 * torch.randn(24, 32))
    if stored == "a table":
        codes = part.trainable().codes.view(24, 32).int()
        part = CodebookGroup.from_codes(codes, torch.linspace(-1, 1, 8), torch.full((24, 4), 0.5), group_size=8)
    plain = part.trainable()
    codes = plain.codes.int()
    step = torch.ones(()) if plain.steps is None else plain.steps(codes)
    scale = (plain.scale[..., None] * step).expand(plain.grouped).reshape(24, 32)
    near = torch.tensor([0.3, -0.45, 0.0, 0.1]).repeat(24, 8)
    view = part.trainable(part.dequantize() + near * scale)
    view.from_the_middle()
    assert torch.allclose(view.offsets, near, atol=1e-4) and view.reach == 1 and not plain.offsets.any()
    view = part.trainable(part.dequantize() + (near + torch.tensor([0, 0, 0.9, -1.7]).repeat(24, 8)) * scale)
    assert torch.allclose(view.offsets, near.where(near.abs() > 0.2, 0.0), atol=1e-4), (
        "a place outside of a step is none"
    )
    view.from_the_middle()
    assert not view.offsets.any() and torch.equal(view.stored().dequantize(), part.dequantize())
    with torch.no_grad():
        view.offsets += 0.6 / view.reach
    moved = view.stored().dequantize() != part.dequantize()
    assert torch.equal(moved, (codes < view.levels - 1).view(24, 32)), "to the next code, if there is one"


@pytest.mark.parametrize("name", TABLES)
def test_rounding_to_nearest_is_no_sign_of_error_feedback(name):
    """On no grid, however unequal its steps are; a fifth of the codes beside the nearest ones is one."""
    count, table = len(TABLES[name].table), padded(TABLES[name].table, TABLES[name].bits)
    W, scale = torch.randn(24, 64), torch.full((24, 8), 2.5 / table.abs().max().item())
    nearest = (W[..., None] / scale[0, 0] - table).abs().argmin(-1)
    other = (nearest + (torch.rand(W.shape) < 0.2)).clamp(max=count - 1)
    assert not CodebookGroup.from_codes(nearest, table, scale, group_size=8).trainable(W).chosen
    assert CodebookGroup.from_codes(other, table, scale, group_size=8).trainable(W).chosen


def test_pruned_codes_stay_where_they_are_and_others_begin_in_the_middle():
    W, keep = torch.randn(24, 32), torch.rand(24, 32) < 0.5
    linear = CompressedLinear(STORED["integers"](W * keep), None, dtype=torch.float32)
    reaches = [DistilledLinear(linear, "weights", zeros, W, torch.float32).views[0].reach for zeros in (True, False)]
    assert reaches == [1, 10], "without zeros to keep, they look like codes that error feedback chose"


def test_products_are_rounded_whatever_the_embedding_is(tiny, monkeypatch):
    """With a compressed embedding, the first parameter of the model is a matrix in the dtype of products."""
    monkeypatch.setattr(learned, "product_dtype", lambda model: torch.bfloat16)
    model = apply(parse_recipe("rtn(bits=8, group_size=16, where=all)"), tiny("llama")).model
    seen = []
    with learned.learning(model, "weights", "") as (what, _):
        what.prepare()
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        with learned.fast_products(model, what.passes):
            model(torch.arange(5)[None])
    assert seen == [torch.bfloat16]


def test_a_group_without_a_scale_begins_in_the_middle_and_nan_is_no_code():
    codes, scale = torch.full((24, 32), 4, dtype=torch.uint8), torch.full((24, 4), 0.25)
    scale[0] = 0
    view = IntGroup.from_codes(codes, scale, None, bits=3, group_size=8).trainable(torch.zeros(24, 32))
    assert not view.offsets.any() and not view.weight().any()
    with torch.no_grad():
        view.offsets[3, 5] = math.nan
    with pytest.raises(ValueError, match="offsets are NaN"):
        view.weight()


def test_pruned_weights_are_no_sign_of_error_feedback():
    W, keep = torch.randn(24, 32), torch.rand(24, 32) < 0.5
    (plain,) = STORED["integers"](W * keep)
    view = Bitmap.from_plain(plain, keep).trainable(W)
    assert not view.chosen and not view.offsets[~keep].any() and view.offsets[keep].any()


def test_held_out_windows_are_not_of_the_calibration_if_there_are_others():
    _, tokenizer = load_model("tiny")
    batches = calibration(tokenizer, corpus="pydocs", samples=40, seqlen=16)
    scored, trained = METHODS["distil"](windows=32)._text(batches)
    calibrated = {tuple(window[0].tolist()) for window in batches}
    assert [tuple(window[0].tolist()) in calibrated for window in scored] == [False] * 2
    assert [tuple(window[0].tolist()) in calibrated for window in trained] == [True] * 30
    few = METHODS["distil"](windows=32, steps=3, batch=2)._text(batches)
    assert [len(windows) for windows in few] == [2, 6], "three updates do not read more"


class Killed(Exception):
    pass


@pytest.mark.parametrize("train", ["scales", pytest.param("weights", marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_bit_by_bit(train, peaked, tokens, tmp_path, monkeypatch):
    text, recipe = tokens(12, 24), f"rtn(bits=3, group_size=16), distil(train={train}, steps=20, minutes=0)"
    monkeypatch.setattr(loop, "PATIENCE", 100)
    whole = apply(recipe, peaked(), text, work_path=tmp_path / "whole")
    update, count = loop.Loop._update, [0]

    def dies(self):
        count[0] += 1
        if count[0] == 14:
            raise Killed
        update(self)

    monkeypatch.setattr(loop.Loop, "_update", dies)
    with pytest.raises(Killed):
        apply(recipe, peaked(), text, work_path=tmp_path / "killed")
    count[0] = 100
    again = apply(recipe, peaked(), text, work_path=tmp_path / "killed")
    assert count[0] < 100 + 20, "it began with the last score, not anew"
    assert [p.divergence for p in again.recoveries[0].curve] == [p.divergence for p in whole.recoveries[0].curve]
    theirs = whole.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.model.state_dict().items())


@pytest.mark.parametrize(
    ("architecture", "train"),
    [
        ("llama", "scales"),
        ("gemma3_text", "weights"),
        ("mixtral", "scales"),
        ("qwen3_5_text", "norms"),
        ("gpt2", "adapters"),
    ],
)
def test_blocks_that_compute_again_for_gradients_learn_the_same_with_less_memory(
    architecture, train, peaked, tokens, monkeypatch
):
    """And the model's own forward functions are there again."""
    text, kept = tokens(12, 24), []
    first = "rtn(bits=3, group_size=16)" + ", low_rank(rank=2)" * (train == "adapters")
    results, hidden = [], AtHead.hidden

    def measured(self, ids):
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):
            out = hidden(self, ids)
        kept.append(sum(held))
        return out

    monkeypatch.setattr(AtHead, "hidden", measured)
    for knob in (False, True):
        model = peaked(architecture)
        how = f"train={train}, steps=3, minutes=0, gradient_checkpointing={knob}"
        results.append(apply(f"{first}, distil({how})", model, text))
        assert not any("forward" in vars(module) for module in results[-1].model.modules())
    plain, again = results
    assert [p.divergence for p in again.recoveries[0].curve] == [p.divergence for p in plain.recoveries[0].curve]
    theirs = plain.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.model.state_dict().items())
    assert max(kept[len(kept) // 2 :]) < 0.5 * max(kept[: len(kept) // 2])


def test_a_rate_that_does_not_help_any_more_is_lowered(peaked, tokens, tmp_path, monkeypatch):
    """Training goes on from the best state, and a training killed behind it goes on bit by bit."""
    found = [1.0, 0.5, 0.6, 0.7, 0.4, 0.45, 0.44, 0.43, 0.42, 0.41, 0.39]
    monkeypatch.setattr(loop.Loop, "_score", lambda self: found[len(self.state.curve)])
    rates, update, count = [], loop.Loop._update, [0]

    def noted(self):
        count[0] += 1
        if count[0] == 17:
            raise Killed
        update(self)
        rates.append((self.state.step, self._rate()))

    monkeypatch.setattr(loop.Loop, "_update", noted)
    text, recipe = tokens(12, 24), "rtn(bits=3, group_size=16), distil(rate=0.001, steps=20, minutes=0)"
    with pytest.raises(Killed):
        apply(recipe, peaked(), text, work_path=tmp_path / "killed")
    again = apply(recipe, peaked(), text, work_path=tmp_path / "killed")
    rates.clear()
    whole = apply(recipe, peaked(), text)
    (record,) = whole.recoveries
    assert record.ended == "all updates are done, with a rate that was lowered to 6.25e-05" and record.kept == 20
    assert [point.step for point in record.curve] == list(range(0, 21, 2))
    steps = {rate: [step for step, own in rates if own == rate] for rate in (1e-3, 2.5e-4, 6.25e-5)}
    assert steps == {1e-3: list(range(1, 7)), 2.5e-4: list(range(7, 13)), 6.25e-5: list(range(13, 21))}
    theirs = whole.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.model.state_dict().items())


@pytest.mark.parametrize("second, lowered", [(1.01, 4), (1.04, 2)])
def test_a_rate_that_makes_the_model_worse_is_lowered_at_once(second, lowered, peaked, tokens, monkeypatch):
    """And one whose score is within the noise of that before training at the next score."""
    found, rates, update = [1.0, second, 1.01, 0.9, 0.8, 0.7], {}, loop.Loop._update

    def noted(self):
        update(self)
        rates[self.state.step] = self._rate()

    monkeypatch.setattr(loop.Loop, "_score", lambda self: found[min(len(self.state.curve), 5)])
    monkeypatch.setattr(loop.Loop, "_update", noted)
    apply("rtn(bits=3, group_size=16), distil(rate=0.001, steps=20, minutes=0)", peaked(), tokens(12, 24))
    assert max(step for step, rate in rates.items() if rate == 1e-3) == lowered


def test_training_goes_on_from_the_best_state(peaked, tokens, monkeypatch):
    found, lower, states = [1.0, 0.5, 3.0, 0.4], loop.Loop._lower, []

    def noted(self):
        lower(self)
        states.append(all(torch.equal(p, self.best[key]) for key, p in self.latent.items()))

    monkeypatch.setattr(loop.Loop, "_score", lambda self: found[min(len(self.state.curve), 3)])
    monkeypatch.setattr(loop.Loop, "_lower", noted)
    (record,) = apply(f"rtn(bits=3, group_size=16), distil({QUICK})", peaked(), tokens(12, 24)).recoveries
    assert states[0] and record.kept > 2, "after the one that diverged"


def test_a_rate_that_diverges_leaves_the_best_state(peaked, tokens):
    result = apply(f"rtn(bits=3, group_size=16), distil(rate=1.0, {QUICK})", peaked(), tokens(12, 24))
    (record,) = result.recoveries
    scores = {point.step: point.divergence for point in record.curve}
    assert scores[record.kept] == min(scores.values())
    assert math.isfinite(kl(result.model, peaked(), tokens(2, 24)))


def test_nan_names_the_update(peaked, tokens, monkeypatch):
    backward, count = loop.Loop._backward, [0]

    def breaks(self, *which):
        count[0] += 1
        return math.nan if count[0] > 4 else backward(self, *which)

    monkeypatch.setattr(loop.Loop, "_backward", breaks)
    (record,) = apply(f"rtn(bits=3, group_size=16), distil({QUICK})", peaked(), tokens(12, 24)).recoveries
    assert record.ended == "the loss of update 5 was nan" and record.kept <= 4


def test_a_training_killed_before_its_updates_were_counted_goes_on(peaked, tokens, tmp_path, monkeypatch):
    recipe, update, count = "rtn(bits=3, group_size=16), distil(steps=12, minutes=5)", loop.Loop._update, [0]

    def dies(self):
        count[0] += 1
        if count[0] == 3:
            raise Killed
        update(self)

    monkeypatch.setattr(loop, "PATIENCE", 100)
    monkeypatch.setattr(loop.Loop, "_update", dies)
    with pytest.raises(Killed):
        apply(recipe, peaked(), tokens(12, 24), work_path=tmp_path)
    (record,) = apply(recipe, peaked(), tokens(12, 24), work_path=tmp_path).recoveries
    assert record.curve[-1].step == 12


class Clock:
    """Seconds that passes of a model take, in place of `time`: one for each window of 24 tokens."""

    def __init__(self, model):
        self.now = 0.0
        model.model.layers[0].register_forward_hook(self._count)

    def _count(self, _, args, output):
        self.now += args[0].shape[:2].numel() / 24

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(
    ("train", "backward"),
    [("scales", 2.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("weights", 3.0), ("norms", 1.0)))],
)
def test_training_within_minutes_goes_through_the_text_about_once(train, backward, peaked, tokens, monkeypatch):
    model = peaked()
    clock, once = Clock(model), loop.Loop._backward

    def slower(self, numbers, *more):
        clock.now += backward * len(numbers)
        return once(self, numbers, *more)

    monkeypatch.setattr(loop.Loop, "_backward", slower)
    for module in (loop, predictions):
        monkeypatch.setattr(module, "time", clock)
    recipe = f"rtn(bits=3, group_size=16), distil(train={train}, minutes=4, windows=400)"
    (record,) = apply(recipe, model, tokens(400, 24)).recoveries
    written = record.windows - record.held_out
    assert record.windows < 100 and 0.8 < record.curve[-1].tokens / 24 / written < 1.05
    assert record.teacher_seconds + record.curve[-1].seconds == pytest.approx(240, rel=0.1)


def test_predictions_of_a_killed_process_count_in_its_minutes(peaked, tokens, monkeypatch, tmp_path):
    model, text = peaked(), tokens(40, 24)
    clock = Clock(model)
    monkeypatch.setattr(predictions, "time", clock)
    whole, killed = (predictions.Teacher(BlockStore(tmp_path / name)) for name in ("whole", "killed"))
    whole.write(model, text, least=2, seconds=20)
    put = BlockStore.put

    def dies(self, index, *what):
        put(self, index, *what)
        if index == 12:
            raise Killed

    monkeypatch.setattr(BlockStore, "put", dies)
    with pytest.raises(Killed):
        killed.write(model, text, least=2, seconds=20)
    monkeypatch.setattr(BlockStore, "put", put)
    clock.now = 1000.0
    killed.write(model, text, least=2, seconds=20)
    assert 12 < whole.written(40)[0] < 24
    assert killed.written(40) == pytest.approx(whole.written(40), abs=predictions.AT_ONCE)
    later = range(12, killed.written(40)[0])
    for of_killed, of_whole in zip(killed.of(later).values(), whole.of(later).values(), strict=True):
        assert all(map(torch.equal, of_killed, of_whole))


def test_windows_that_one_pass_takes():
    """Of one length each, in order, and no more tokens than a pass may have, unless one window has more."""
    lengths = [256, 256, 256, 200, 256, 600, 600, 2048, 2048, 256, 256]
    windows = [torch.zeros(1, length) for length in lengths]
    assert predictions.together(windows, 2) == [[0, 1], [2], [3], [4], [5], [6], [7], [8], [9, 10]]
    assert predictions.together(windows[:3], 4) == [[0, 1, 2]] and predictions.together([], 4) == []


def test_an_update_of_several_windows_is_the_mean_of_theirs(peaked, tokens, tmp_path, monkeypatch):
    """Gradients of two windows of one length and one of another are those of three passes."""
    monkeypatch.setattr("compress.recover.learned.product_dtype", lambda model: torch.float32)
    model, text = apply("rtn(bits=3, group_size=16)", peaked(), tokens(2, 24)).model, [*tokens(2, 24), *tokens(1, 16)]
    teacher = predictions.Teacher(BlockStore(tmp_path))
    teacher.write(peaked(), text, least=1)
    how = {"steps": 4, "minutes": 0, "batch": 3, "rate": 1e-3, "loss": "forward", "held_out": 0}
    gradients = []
    for passes in (loop.together, lambda windows, most: [[i] for i in range(len(windows))]):
        with learning(model, "scales", "") as (learned, _):
            training = loop.Loop(model, learned, text, teacher, loop.Schedule(**how), name="", store=None)
            learned.prepare()
            training.at_head = AtHead(model)
            for several in passes(text, 3):
                training._backward(several, teacher.of(several), 3)
            learned.collect()
            gradients.append({name: number.grad.clone() for name, number in learned.latent.items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=1e-6), name


@pytest.mark.slow
def test_predictions_are_rounded_as_training_is_and_hardly_move(real, monkeypatch, tmp_path):
    """Where the device multiplies in bfloat16, which this one may only emulate."""
    model, tokenizer = real
    (window,) = calibration(tokenizer, samples=1, seqlen=32)
    exact, rounded = (predictions.Teacher(BlockStore(tmp_path / name)) for name in ("exact", "rounded"))
    for one, dtype in ((exact, torch.float32), (rounded, torch.bfloat16)):
        monkeypatch.setattr(learned, "product_dtype", lambda model, dtype=dtype: dtype)
        one.write(model, [window], least=1)
    ids, logp = rounded.of([0])[0]
    with torch.no_grad():
        apart = divergence(model(window).logits[0], ids.long(), logp).mean()
    assert logp.dtype == torch.float32 and (logp.exp().sum(-1) < 1 + 1e-5).all()
    assert not torch.equal(logp, exact.of([0])[0][1]) and 1e-5 < apart < 1e-3


@pytest.mark.parametrize("rounding", [pytest.param("", marks=pytest.mark.slow), ", activations(bits=8)"])
def test_adapters_learn_and_the_rest_stays(rounding, peaked, tokens, tmp_path):
    recipe, text = f"rtn(bits=3, group_size=16), low_rank(rank=4){rounding}", tokens(12, 24)
    before, original = apply(recipe, peaked(), text).model, peaked()
    result = apply(f"{recipe}, distil(train=adapters, {QUICK})", peaked(), text)
    assert kl(result.model, original, text[:-1]) < kl(before, original, text[:-1])
    for name, linear in compressed_linears(result.model).items():
        codes, factors = linear.parts
        was, former = compressed_linears(before)[name].parts
        assert torch.equal(codes.dequantize(), was.dequantize()) and factors.left.dtype == torch.float16
        assert not torch.equal(factors.dequantize(), former.dequantize()) and factors.nbytes == former.nbytes
    save_compressed(result, tmp_path)
    with torch.no_grad():
        assert torch.equal(load_compressed(tmp_path)(text[0]).logits, result.model(text[0]).logits)


@pytest.mark.parametrize(
    "before", ["rtn(bits=3, group_size=16)", "rtn(bits=3, group_size=16), low_rank(rank=4, bits=8)"]
)
def test_adapters_need_low_rank_parts(before, peaked, tokens):
    with pytest.raises(ValueError, match="no earlier method of the recipe adds a low-rank part in 16 bits"):
        plan(f"{before}, distil(train=adapters)", peaked(), tokens(12, 24))


def test_minutes_bound_the_updates(peaked, tokens):
    recipe = "rtn(bits=3, group_size=16), distil(steps=100000, minutes=0.05)"
    (record,) = apply(recipe, peaked(), tokens(12, 24)).recoveries
    assert loop.TIMED[0] <= record.curve[-1].step < 100000
    assert record.curve[-1].seconds < 20


def test_the_text_is_of_the_same_corpus_and_not_what_is_scored():
    _, tokenizer = load_model("tiny")
    batches = calibration(tokenizer, corpus="pydocs", samples=4, seqlen=32)
    more = calibration(tokenizer, corpus="pydocs", samples=6, seqlen=32)
    assert all(torch.equal(a, b) for a, b in zip(more, [*batches, *batches.further(2)], strict=True))
    first, trained = METHODS["distil"](windows=40)._text(batches)
    assert len(first) == 2 and len(trained) == 38 and torch.equal(trained[0], batches[0])
    assert not any(torch.equal(first[0], b) for b in batches)
    scored = held_out(tokenizer, corpus="pydocs")[0].unfold(0, 16, 1)
    inside = {tuple(row.tolist()) for row in scored}
    assert not inside & {tuple(window[0, 1:17].tolist()) for window in (*first, *trained[:6])}


def test_passes_leave_the_model_as_it_was(peaked, tokens):
    model = apply("rtn(bits=3, group_size=16)", peaked().bfloat16(), tokens(2, 24)).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inverse = {name: buffer.dtype for name, buffer in model.named_buffers()}
    ids = tokens(1, 24)[0]
    logits = model(ids).logits
    with learning(model, "scales", "") as (learned, _):
        AtHead(model).hidden(ids).float().square().sum().backward()
        learned.collect()
        assert all(p.grad is not None for p in learned.latent.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == inverse
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize(
    "trained", [f"distil({QUICK})", pytest.param("tune(steps=4, norm_rate=0.01)", marks=pytest.mark.slow)]
)
def test_models_that_share_memory_keep_their_own_values(trained, peaked, tokens):
    """Norms that learn in one of several results must not change in the others, or in the original."""
    model, text = peaked(), tokens(12, 24)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipes = {"trained": f"rtn(bits=3, group_size=16), {trained}", "not": "rtn(bits=3, group_size=16)"}
    made = apply_each(recipes, model, text)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    alone = apply(recipes["not"], peaked(), text).model.state_dict()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in made["not"].model.state_dict().items())
    norm = "model.norm.weight" if "distil" in trained else "model.layers.0.input_layernorm.weight"
    assert not torch.equal(made["trained"].model.state_dict()[norm], before[norm])


def test_bad_recipes_are_refused_before_any_work(peaked, tokens):
    with pytest.raises(ValueError, match=r"`recipe`: distil\(.*there is none before it"):
        settle(parse_recipe("distil"))
    with pytest.raises(ValueError, match="must come before"):
        settle(parse_recipe("rtn, kv_int, distil"))
    with pytest.raises(ValueError, match=r"`device` \(='cuda'\): distil trains the whole model where it lies, on cpu"):
        METHODS["distil"]().check_run(peaked(), tokens(4, 24), torch.device("cuda"), 1)
    with pytest.raises(ValueError, match=r"`batches` has 1 windows for distil"):
        apply("rtn(bits=3, group_size=16), distil", peaked(), tokens(1, 24))
    with pytest.raises(ValueError, match=r"`calibrate` \(='once'\).* for gptq, and distil changes the weights"):
        apply(f"wanda, distil({QUICK}), gptq(bits=4, group_size=16)", peaked(), tokens(4, 24), calibrate="once")
    with pytest.raises(
        ValueError, match=r"`train` \(='all'\) of distil must be one of scales, weights, adapters, norms"
    ):
        METHODS["distil"](train="all")
