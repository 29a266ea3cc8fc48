"""Rotations change no output, spread outliers, are trained and saved; inputs are rounded as elsewhere."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint.on_disk import load_compressed_on_disk
from compress.formats import Dense
from compress.grid.nearest import rtn
from compress.linear import CompressedLinear
from compress.recipe import parse_recipe
from compress.transforms import Hadamard, Permutation, Rounding, followed_by
from compress.transforms.rotation import random_hadamard, random_orthogonal
from compress.transforms.stream import stream_of
from compress.tuning.training import Schedule, TrainedLinear
from compress.walk.blocks import targets
from compress.walk.fisher import fisher
from eval.machine.size import size
from kernels.registry import recording
from kernels.w4a8_matmul import fast
from kernels.w8a8_matmul import quantize_rows

ROTATE, ACTIVATIONS = METHODS["rotate"], METHODS["activations"]
NOT_FOLDED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}  # a router that is no linear reads what the norm gives


def relative(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def with_gains(model, seed=0):
    """The model with norms whose gains differ from channel to channel, as those of real models do."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1 and "norm" in name:
            p.add_(torch.rand(p.shape, generator=generator))
    return model


def test_the_function_stays_and_comes_back_from_disk(any_model, tokens, tmp_path):
    ids = torch.cat(tokens(2, 9))
    expected = with_gains(any_model)(ids).logits
    result = apply([ROTATE()], any_model, tokens(2))
    assert relative(any_model(ids).logits, expected) < 1e-5
    kinds = {fold.kind for fold in result.folds}
    kind = any_model.config.model_type
    behind_a_norm = kind.startswith("gemma")
    assert (stream_of(any_model) is None) == (kind in NOT_FOLDED or behind_a_norm)
    assert all(("not rotated" in str(fold.notes)) == (stream_of(any_model) is None) for fold in result.folds)
    assert "online rotation" in kinds and max(fold.difference for fold in result.folds) < 1e-4
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, any_model(ids).logits)
    assert torch.equal(copy.deepcopy(again)(ids).logits, any_model(ids).logits)


def test_a_tied_head_stays_tied_and_nothing_grows(tiny):
    model = tiny("llama", tie_word_embeddings=True)
    before = size(model).stored_bytes
    apply([ROTATE()], model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert size(model).stored_bytes < before + 1000  # the signs


def test_statistics_are_of_what_the_weights_meet(tiny, tokens):
    model, batches = tiny("llama"), tokens(4)
    apply([ROTATE()], model, batches)
    linear = model.model.layers[1].mlp.down_proj
    seen = []
    handle = linear.register_forward_pre_hook(lambda _, args: seen.append(linear.transform(args[0]).flatten(0, 1)))
    for batch in batches:
        model(batch)
    handle.remove()
    X, W = torch.cat(seen), linear.dequantize()
    three = METHODS["rtn"](bits=3, group_size=16, skip="*layers.0.*,*attn*,*gate*,*up*")
    record = apply([three], model, batches).layers[0]
    D = W - model.model.layers[1].mlp.down_proj.dequantize()
    assert isinstance(model.model.layers[1].mlp.down_proj.transform, Hadamard)
    assert record.error == pytest.approx(((X @ D.t()).square().sum() / (X @ W.t()).square().sum()).item(), rel=1e-4)


def test_fisher_and_tuning_see_what_the_weights_meet(tiny, tokens):
    model, batches = tiny("llama"), tokens(2, 12)
    apply([ROTATE(online="none")], model, batches)
    found = fisher(model, batches[:1], device=torch.device("cpu"))
    whole = copy.deepcopy(model).double().requires_grad_(True)
    cross_entropy(whole(batches[0]).logits[0, :-1], batches[0][0, 1:], reduction="sum").backward()
    for name in targets(model):
        g = whole.get_submodule(name).weight.grad
        torch.testing.assert_close(found[name].double(), g**2 / (batches[0].shape[1] - 1), rtol=2e-3, atol=1e-9)
    model = tiny("llama")
    apply([ROTATE(), METHODS["rtn"](group_size=16)], model, batches)
    linear = model.model.layers[0].mlp.down_proj
    trained, x = (
        TrainedLinear(linear, linear.dequantize(), Schedule(steps=1, batch=1, rate=0.0, scale_rate=0.0)),
        torch.randn(4, 96),
    )
    trained.prepare()
    assert isinstance(linear.transform, Hadamard)
    torch.testing.assert_close(trained(x), linear(x), rtol=1e-4, atol=1e-5)


def test_rounded_inputs_are_those_of_int8(tiny, tokens):
    ids, model = torch.cat(tokens(2, 9)), tiny("llama")
    for static in (False, True):
        recipes = [ACTIVATIONS(static=static), METHODS["int8"](activations="tensor" if static else "token")]
        weights = METHODS["rtn"](bits=8, group_size=-1)  # whose codes int8 keeps
        y, expected = (apply([weights, one], copy.deepcopy(model), tokens()).model(ids).logits for one in recipes)
        assert relative(y, expected) < 1e-4 < relative(model(ids).logits, expected)


def test_rounding_is_that_of_other_implementations():
    x = torch.randn(5, 64) * torch.rand(5, 1) * 9
    codes, step = quantize_rows(x, torch.int8)
    assert torch.allclose(Rounding(8)(x), codes.float() * step, atol=1e-5)
    codes, step = quantize_rows(x, torch.float8_e4m3fn)
    assert relative(Rounding(8, "fp8")(x), codes.float() * step) < 1e-3
    mx = rtn(x, bits=4, group_size=32, grid="mxfp4", scale="absmax", scale_dtype="e8m0").dequantize()
    assert relative(Rounding(4, "mxfp4")(x), x) < 1.2 * relative(mx, x)
    for bits, group in ((4, 16), (8, 64)):
        groups = Rounding(bits, group_size=group)(x).unflatten(-1, (-1, group))
        units = groups / x.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True) * (2 ** (bits - 1) - 1)
        assert torch.allclose(units, units.round(), atol=1e-3)
    assert relative(Rounding(4, "nvfp4")(x), x) < relative(Rounding(4, "mxfp4")(x), x)


@pytest.mark.parametrize("n", [64, 36, 30])
def test_rotations_are_orthogonal(n):
    x = torch.randn(3, n)
    for rotation in (random_hadamard(n, 1), random_orthogonal(n, 1), random_orthogonal(n, 1, fixes_ones=True)):
        y = rotation(x)
        assert torch.allclose(rotation.back(y), x, atol=1e-5) and torch.allclose(y.norm(dim=1), x.norm(dim=1))
    assert torch.allclose(y.mean(1), x.mean(1), atol=1e-5)  # the last one leaves the mean alone


@torch.no_grad()
@pytest.mark.parametrize("inner", [random_hadamard(12, 3), random_orthogonal(12, 3)], ids=["hadamard", "orthogonal"])
def test_a_weight_that_is_read_is_that_of_the_input_before_its_transform(inner):
    """Some models multiply by `linear.weight` themselves, as Jamba does for its steps."""
    W, x = torch.randn(5, 12), torch.randn(3, 12)
    linear = CompressedLinear(
        [Dense(inner(W))], None, dtype=torch.float32, transform=followed_by(inner, Permutation(torch.randperm(12)))
    )
    torch.testing.assert_close(linear(x), x @ linear.weight.t())
    torch.testing.assert_close(
        CompressedLinear([Dense(inner(W))], None, dtype=torch.float32, transform=inner).weight, W
    )


def test_training_lowers_the_loss_of_rounded_inputs_and_resumes(tiny, tokens, tmp_path, monkeypatch):
    from compress.rotations import learned

    monkeypatch.setattr(learned, "RATE", 0.2)
    monkeypatch.setattr(learned, "KEPT", 5)
    model, batches = with_gains(tiny("llama")), tokens(6, 24)
    ids = torch.cat(batches)

    def loss(result):
        rounded = apply([ACTIVATIONS(bits=4)], result.model, batches).model
        return rounded(ids, labels=ids).loss.item()

    drawn = loss(apply([ROTATE()], copy.deepcopy(model), batches))
    whole = apply([ROTATE(steps=20)], copy.deepcopy(model), batches, work_path=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(learned, "_keep", _killed_at(10, learned._keep))
        with pytest.raises(KeyboardInterrupt):
            apply([ROTATE(steps=20)], copy.deepcopy(model), batches, work_path=tmp_path / "killed")
    again = apply([ROTATE(steps=20)], copy.deepcopy(model), batches, work_path=tmp_path / "killed")
    assert torch.equal(again.model(ids).logits, whole.model(ids).logits)
    assert loss(whole) < drawn


def _killed_at(step, keep):
    def kept(store, trained, optimizer, at):
        keep(store, trained, optimizer, at)
        if at == step:
            raise KeyboardInterrupt

    return kept


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"online": "all"}, "stream='none' and heads=False"),
        ({"stream": "none", "heads": False, "online": "none"}, "rotates nothing"),
        ({"stream": "none", "heads": False, "steps": 5}, "trains folded rotations"),
    ],
)
def test_knobs_that_contradict_each_other(knobs, said):
    with pytest.raises(ValueError, match=said):
        ROTATE(**knobs)


def test_impossible_rotations_are_refused_before_any_work(tiny, tokens, tmp_path):
    model = tiny("llama")
    with pytest.raises(ValueError, match="`calibrate` \\(='once'\\)"):
        apply([ROTATE(), METHODS["rtn"](group_size=16)], model, tokens(), calibrate="once")
    with pytest.raises(ValueError, match="`group_size` \\(=48\\) must divide in_features"):
        apply([ACTIVATIONS(bits=4, group_size=48)], model)
    with pytest.raises(ValueError, match="static=|`static`"):
        ACTIVATIONS(static=True, group_size=16)
    result = apply([ROTATE(), METHODS["rtn"](group_size=16)], model)
    with pytest.raises(ValueError, match="rotated already"):
        apply([ROTATE()], model)
    for name in ("gguf", "compressed-tensors", "gptq"):
        with pytest.raises(ValueError, match="no place for transforms"):
            save_compressed(result, tmp_path / name, save_format=name)
    with pytest.raises(ValueError, match="`target` \\(='block'\\) of layer_drop cannot drop blocks"):
        apply([METHODS["layer_drop"](target="block", count=1)], model, tokens())
    folder = save_compressed(result, tmp_path / "workbench")
    with pytest.raises(ValueError, match="`weights` \\(='disk'\\): the residual stream"):
        load_compressed_on_disk(folder)


@pytest.mark.in_turns
@pytest.mark.parametrize("grid", ["int", "iq4_nl", "nf4"])
@pytest.mark.parametrize("knobs", [{"bits": 8}, {"bits": 4, "group_size": 32}, {"bits": 8, "static": True}])
def test_codes_are_multiplied_where_weights_are_integers(tiny, tokens, knobs, grid):
    """In 16 bits a linear gives what the emulation gives, and the record says which kernel multiplied."""
    model = tiny("llama")
    apply([METHODS["rtn"](group_size=16, grid=grid), ACTIVATIONS(**knobs)], model, tokens())
    linear = model.to(torch.bfloat16).model.layers[0].mlp.up_proj
    x = torch.randn(3, 5, 64).to(torch.bfloat16)
    expected = linear.transform(x.float()) @ linear.dequantize().t()
    with recording() as kernels:
        y = linear(x)
    assert y.dtype == torch.bfloat16 and relative(y.float(), expected) < 1e-2
    assert ("w4a8_matmul" in kernels) == (grid != "nf4" and fast(x, linear.parts[0].packed, None))


@pytest.mark.parametrize("inputs", ["activations(bits=8)", "activations(bits=4, group_size=16)"])
def test_a_rotation_and_the_rounding_after_it_in_one_kernel_give_the_same(inputs, tiny, tokens, monkeypatch):
    """As on a GPU, where they are one; here by the reference of that kernel."""
    recipe = f"rotate(stream=none, heads=False, online=all), rtn(bits=4, group_size=16), {inputs}"
    model, ids = apply(parse_recipe(recipe), tiny("llama"), []).model, tokens(2)[0]
    expected = model(ids).logits
    for name in ("fast", "rotates_into_codes", "multiplies_codes"):
        monkeypatch.setattr(f"compress.formats.base.{name}", lambda *_: True)
    with recording() as ran:
        y = model(ids).logits
    assert ran["hadamard_codes"] == ran["w4a8_codes_matmul"] == {"reference"}
    assert ((y - expected).norm() / expected.norm()).item() < 1e-4
