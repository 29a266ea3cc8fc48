"""Channels in descending order change no output, are shared where inputs are shared, and give outliers 8 bits."""

import copy

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.linear import compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe
from compress.transforms import Permutation, Rounding, parted
from kernels import native
from kernels.registry import recording

GATHER = METHODS["gather"]
ROUNDED = "rtn(bits=8, group_size=16), "
FOUR, WIDE = "activations(bits=4, group_size=16)", "activations(bits=4, group_size=16, outliers=0.1)"


def relative(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def test_the_function_stays_and_comes_back_from_disk(any_model, tokens, tmp_path):
    ids = torch.cat(tokens(2, 9))
    expected = any_model(ids).logits
    result = apply([GATHER()], any_model, tokens(2))
    assert relative(any_model(ids).logits, expected) < 1e-4
    assert all(layer.error < 1e-8 for layer in result.layers)
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, any_model(ids).logits)
    copied = copy.deepcopy(again).to(torch.bfloat16)
    assert all(not m.order.is_floating_point() for m in copied.modules() if isinstance(m, Permutation))
    assert relative(copied(ids).logits.float(), expected) < 0.1


def test_channels_come_in_descending_order_and_linears_of_one_input_share_it(tiny, tokens):
    model, batches = tiny("llama"), tokens(3)
    apply([GATHER(skip="*.k_proj")], model, batches)
    block = model.model.layers[1]
    q, k, v = block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj
    read = []
    q.register_forward_pre_hook(lambda _, args: read.append(q.transform(args[0]).flatten(0, -2)))
    for batch in batches:
        model(batch)
    absmax = torch.cat(read).abs().amax(0)
    assert (absmax.diff() <= 1e-5 * absmax[0]).all() and absmax[0] > absmax[-1]
    assert torch.equal(q.transform.order, v.transform.order) and isinstance(k, torch.nn.Linear)
    original = tiny("llama").model.layers[1].self_attn.q_proj.weight
    assert torch.equal(q.transform.back(q.transform(original)), original)
    assert torch.equal(q.dequantize(), q.transform(original))


@pytest.mark.parametrize(
    "before", ["", "rotate, ", *(pytest.param(b, marks=pytest.mark.slow) for b in ("flatquant, ", "smoothquant, "))]
)
def test_later_methods_see_ordered_channels_and_round_the_first_groups_to_eight_bits(before, tiny, tokens, tmp_path):
    model, batches = tiny("llama"), tokens(3)
    result = apply(parse_recipe(f"{before}gather, {ROUNDED}{WIDE}"), model, batches)
    for linear in compressed_linears(model).values():
        steps, rounding = parted(linear.transform)
        assert isinstance(steps[-1], Permutation) and isinstance(rounding, Rounding)
        assert rounding.order is None and rounding.wide == 1
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(batches[0]).logits, model(batches[0]).logits)


def test_linears_that_were_left_out_are_gathered_by_the_rounding(tiny, tokens):
    model = tiny("llama")
    apply(parse_recipe(f"gather(skip='*.k_proj'), {ROUNDED}{WIDE}"), model, tokens(3))
    attention = model.model.layers[0].self_attn
    assert parted(attention.q_proj.transform)[1].order is None
    assert parted(attention.k_proj.transform)[1].order is not None


def test_rounding_after_it_gives_what_gathering_in_the_rounding_gives(tiny, tokens):
    """Of an input that nothing before it has changed, the same channels are rounded in the same groups."""
    recipes = (f"gather, {WIDE}", WIDE)
    ordered, other = (
        apply(parse_recipe(text), tiny("llama"), tokens(3)).model.model.layers[0].self_attn.q_proj.transform
        for text in recipes
    )
    x = torch.randn(2, 7, 64)
    assert torch.equal(ordered.steps[0].back(ordered(x)), other(x))


@pytest.mark.in_turns
@pytest.mark.parametrize("between", ["rtn(bits=4, group_size=16)", "svdquant(rank=4), rtn(bits=4, group_size=16)"])
@pytest.mark.parametrize("grid", ["", ", grid=iq4_nl"])
def test_integers_are_multiplied_by_integers_and_give_what_rounding_says(between, grid, tiny, tokens):
    """The product of codes, in the order of the channels, is that of the rounded input and the stored weight."""
    recipe = f"gather, {between.replace('=16', f'=16{grid}')}, {WIDE}"
    model, g = apply(parse_recipe(recipe), tiny("llama"), tokens(3)).model, torch.Generator().manual_seed(0)
    for linear in compressed_linears(model).values():
        x = torch.randn(2, 9, linear.in_features, generator=g)
        (order,), rounding = parted(linear.transform)
        expected = sum(
            order(x) @ part.dequantize().t() if part.exact else rounding(order(x)) @ part.dequantize().t()
            for part in linear.parts
        )
        with recording() as ran:
            y = linear(x)
        assert relative(y, expected) < 1e-5
        assert not native.w4a8_runs() or ran["w4a8_matmul"] == {f"cpu {native.matrices() or native.integers()}"}


def test_gather_lowers_the_error_of_four_bits_on_a_model_with_outliers(tiny, tokens, with_outliers):
    batches, ids = tokens(6), torch.cat(tokens(4, seed=2))
    plain = tiny("llama", initializer_range=0.02)
    model, expected = with_outliers(plain, 20, inside=True), plain(ids).logits
    error = {
        text: relative(apply(parse_recipe(text), copy.deepcopy(model), batches).model(ids).logits, expected)
        for text in (f"{ROUNDED}{FOUR}", f"gather, {ROUNDED}{FOUR}", f"gather, {ROUNDED}{WIDE}")
    }
    plain, ordered, gathered = error.values()
    assert gathered < ordered < plain and gathered < 0.6 * plain, error


def test_a_killed_run_goes_on_where_it_was(tiny, tokens, tmp_path, monkeypatch):
    ids, whole = tokens(1, 9)[0], apply([GATHER()], tiny("llama"), tokens(3))
    solved, solve = [], GATHER.solve

    def fails_in_the_second_block(self, W, statistics):
        solved.append(statistics.name)
        return 1 / 0 if ".1." in statistics.name else solve(self, W, statistics)

    with monkeypatch.context() as patch:
        patch.setattr(GATHER, "solve", fails_in_the_second_block)
        with pytest.raises(ZeroDivisionError):
            apply([GATHER()], tiny("llama"), tokens(3), work_path=tmp_path)
    monkeypatch.setattr(GATHER, "solve", lambda self, W, s: solved.append(s.name) or solve(self, W, s))
    again = apply([GATHER()], tiny("llama"), tokens(3), work_path=tmp_path)
    assert len([name for name in solved if ".0." in name]) == 7, "the first block was solved once"
    assert torch.equal(again.model(ids).logits, whole.model(ids).logits)


def test_combinations_with_gather_that_are_impossible_are_refused(tiny, tokens, tmp_path):
    for after in ("rotate", "flatquant", "smoothquant", "awq"):
        with pytest.raises(ValueError, match=f"gather must come after {after}"):
            settle(parse_recipe(f"gather, {after}"))
    settle(parse_recipe("gather, svdquant, rtn"))
    with pytest.raises(ValueError, match=r"`where` \(='all'\) of gather"):
        GATHER(where="all")
    with pytest.raises(ValueError, match=r"`calibrate` \(='once'\)"):
        apply([GATHER()], tiny("llama"), tokens(), calibrate="once")
    model = tiny("llama")
    result = apply(parse_recipe("gather, rtn(group_size=16)"), model, tokens())
    for name in ("gguf", "compressed-tensors", "gptq"):
        with pytest.raises(ValueError, match="no place for|cannot transform|transformed first"):
            save_compressed(result, tmp_path / name, save_format=name)
    with pytest.raises(ValueError, match="`model` holds .* compressed already"):
        apply([GATHER()], model, tokens())
