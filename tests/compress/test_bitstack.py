"""Stacks of blocks: the decomposition against exact singular vectors, the order, and one file at many sizes."""

import itertools

import pytest
import torch

from compress import METHODS, apply, load_compressed, resize, save_compressed
from compress.allocation.budget import bytes_beside
from compress.allocation.prefix import Stack, falling, in_order, within
from compress.formats import FORMATS, SignStack
from compress.linear import compressed_linears
from compress.weights.bitstack import bitstack, column_scales, leading
from eval.machine.size import size


def made(rows=48, columns=37, rank=2, blocks=4):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(rows, columns, generator=generator)
    scale = torch.rand(columns, generator=generator) + 0.1
    stack = SignStack.from_blocks(bitstack(W, scale, rank=rank, blocks=blocks), torch.arange(blocks, 0, -1.0))
    return W, scale, stack


def sizes_of(model):
    """Blocks in the whole model, and its stored megabytes in 16 bits."""
    blocks = sum(part.blocks for linear in compressed_linears(model).values() for part in linear.parts)
    return blocks, bytes_beside(model, {}) / 1e6


def smallest(model):
    """Megabytes with one block of every weight."""
    parts = [part for linear in compressed_linears(model).values() for part in linear.parts]
    return (bytes_beside(model, {}) - sum((part.blocks - 1) * part.block_bytes for part in parts)) / 1e6


@pytest.fixture
def saved(tiny, tokens, tmp_path):
    """A folder that holds a tiny model with six blocks of every weight."""
    result = apply([METHODS["bitstack"](rank=2, blocks=6)], tiny("llama").to(torch.bfloat16), tokens())
    return save_compressed(result, tmp_path / "saved")


def test_factors_are_the_first_singular_vectors():
    M = torch.randn(40, 30).abs()
    U, S, V = torch.linalg.svd(M)
    for rank in (1, 3, 30):
        left, right = leading(M, rank)
        assert left.shape == (40, rank) and right.shape == (rank, 30)
        least = S[rank:].square().sum()
        assert (M - left @ right).square().sum() <= 1.01 * least + 1e-6
    assert torch.allclose(leading(M, 1)[0] @ leading(M, 1)[1], S[0] * U[:, :1] @ V[:1], atol=1e-3)


def test_each_block_is_signs_times_low_rank_of_what_is_left():
    W, scale, stack = made()
    R = (W * scale).double()
    for number in range(stack.blocks):
        U, S, V = torch.linalg.svd(R.abs())
        exact = R.sign() * ((U[:, :2] * S[:2]) @ V[:2])
        block = stack.block(number).double() * scale
        assert (block - exact).norm() < 0.05 * exact.norm()  # singular values lie close together: not the same basis
        before, R = R.norm(), R - block
        assert R.norm() < 0.8 * before
    assert torch.allclose(stack.dequantize().double(), W.double() - R / scale, atol=1e-5)


def test_large_inputs_count_more():
    W, x = torch.randn(64, 64), torch.randn(500, 64) * torch.logspace(-2, 2, 64)
    H = x.t() @ x
    errors = []
    for scale in (column_scales(W, H), column_scales(W, None)):
        stack = SignStack.from_blocks(bitstack(W, scale, rank=2, blocks=2), torch.zeros(2))
        errors.append((x @ (W - stack.dequantize()).t()).norm())
    assert errors[0] < errors[1]
    assert torch.equal(column_scales(W, torch.zeros(64, 64)), torch.ones(64))
    stack = SignStack.from_blocks(bitstack(W * 0, torch.ones(64), rank=2, blocks=2), torch.zeros(2))
    assert not stack.dequantize().any(), "a matrix of nothing is stored as nothing"


def test_stored_stacks_are_read_back_and_their_bytes_counted():
    W, _, stack = made()
    for stored in (
        stack,
        stack.first(3),
        stack.first(1).followed_by({k: v[1:3] for k, v in stack.state_dict().items()}),
    ):
        again = FORMATS["sign_stack"].from_tensors(stored.spec(), stored.state_dict())
        again.for_compute(torch.float32, torch.device("cpu"))
        assert torch.equal(again.dequantize(), stored.dequantize())
        assert again.nbytes == stored.blocks * (48 * 5 + 2 * 2 * (48 + 37) + 4) == stored.blocks * stack.block_bytes
        x = torch.randn(3, 2, 37)
        assert torch.allclose(again.matmul(x), x @ stored.dequantize().t(), atol=1e-4)
    assert stack.to(torch.bfloat16).left.dtype == torch.float16, "a cast speaks of the activations"


def test_the_order_takes_what_gains_most_per_byte():
    stacks = {"a": Stack([9, 4, 1, 3], 2), "b": Stack([9, 6, 5.9], 10), "c": Stack([0, 0, 0], 1)}
    assert falling([4, 1, 3, 5]) == [4, 3, 3, 3] and falling([1, 2, 9]) == [4, 4, 4]
    assert in_order(stacks) == ["a", "a", "a", "b", "b", "c", "c"]
    with pytest.raises(ValueError, match=r"\(=12\) is less than the first blocks cost, 13"):
        within(stacks, 12)
    counts = [within(stacks, budget) for budget in range(13, 45)]
    for before, after in itertools.pairwise(counts):
        assert all(before[name] <= after[name] for name in stacks), "a larger model holds the smaller one"
    for budget, count in zip(range(13, 45), counts, strict=True):
        spent = sum(stacks[name].cost * number for name, number in count.items())
        assert budget - 10 < spent <= budget or count == {"a": 4, "b": 3, "c": 3}


def test_one_file_at_ten_sizes_up_and_down(saved):
    model = load_compressed(saved)
    ids = torch.arange(24)[None]
    (all_blocks, most), exact = sizes_of(model), model(ids).logits
    least = smallest(model)
    block = max(part.block_bytes for linear in compressed_linears(model).values() for part in linear.parts) / 1e6
    found = {}
    for share in (0.5, 0.0, 1.0, 0.3, 0.9, 0.2, 0.7, 0.1, 0.8, 0.4, 0.6):
        wanted = least + share * (most - least)
        blocks, stored = sizes_of(resize(model, wanted))
        assert wanted - block < stored < wanted + 1e-6, "within one block of the request"
        assert size(model).stored_bytes == pytest.approx(stored * 1e6, abs=1)
        found[share] = blocks, (model(ids).logits - exact).float().norm().item()
    assert [found[share][0] for share in sorted(found)] == sorted(blocks for blocks, _ in found.values())
    assert found[1.0] == (all_blocks, 0.0) and found[0.0][1] > found[0.4][1] > found[0.8][1] > 0
    small, again = resize(model, least), resize(load_compressed(saved), least)
    assert torch.equal(small(ids).logits, again(ids).logits)
    with pytest.raises(ValueError, match=r"`size_mb` \(=0.01\) is too small: with one block of every weight"):
        resize(model, 0.01)


def test_blocks_that_are_missing_are_asked_for(saved, tiny, tokens, tmp_path):
    result = apply([METHODS["bitstack"](rank=2, blocks=4)], tiny("llama"), tokens())
    model, (blocks, most) = result.model, sizes_of(result.model)
    assert sizes_of(resize(model, most + 10))[0] == blocks, "room for more than there is takes all"
    save_compressed(result, tmp_path / "own")
    resize(model, 0.8 * most)
    assert sizes_of(resize(model, 0.7 * most)) == sizes_of(resize(model, 0.7 * most)) < (blocks, most)
    with pytest.raises(ValueError, match=r"`path` \(=None\): blocks of .* are needed"):
        resize(model, most)
    with pytest.raises(ValueError, match="is another model's"):
        resize(model, most, path=saved)
    with pytest.raises(ValueError, match="is not a compressed model"):
        resize(model, most, path=tmp_path)
    assert sizes_of(resize(model, most, path=tmp_path / "own")) == (blocks, most)
    with pytest.raises(ValueError, match="holds no weight that is stored in blocks"):
        resize(tiny("llama"), 10)


def test_a_resized_model_is_saved_as_it_is(saved, tmp_path):
    model, tokens = load_compressed(saved), [torch.arange(16)[None]]
    _, most = sizes_of(model)
    resize(model, 0.75 * most)
    result = apply([METHODS["kv_int"](bits=8)], model, tokens)
    again = load_compressed(save_compressed(result, tmp_path / "smaller"))
    assert sizes_of(again) == sizes_of(model)
    assert sizes_of(resize(again, most)) == sizes_of(model), "the smaller file holds no more"


def test_ranks_and_recipes_that_cannot_be(tiny, tokens):
    with pytest.raises(ValueError, match=r"`rank` \(=33\) of bitstack must be at most 32, the smaller side"):
        apply([METHODS["bitstack"](rank=33)], tiny("llama"), tokens())
    with pytest.raises(ValueError, match=r"`blocks` \(=0\) of bitstack must lie between 1 and 32"):
        METHODS["bitstack"](blocks=0)
    with pytest.raises(ValueError, match=r"`where` \(='all'\) of bitstack"):
        METHODS["bitstack"](where="all")
