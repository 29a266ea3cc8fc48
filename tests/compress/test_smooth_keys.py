"""Keys that share a scale: pairs are scaled before RoPE and outlier channels after it, and attention stays the same."""

import copy

import pytest
import torch
from torch.testing import assert_close

from compress import METHODS, apply, load_compressed, save_compressed
from compress.kv import attached
from compress.kv.precision import Precision
from compress.kv.storage import slabs_of
from compress.linear import CompressedLinear
from eval.text.through_cache import logits_through_cache
from kernels.kv_decode import dequantize_kv, kv_decode, quantize_kv

SMOOTH, KV_INT = METHODS["smooth_keys"], METHODS["kv_int"]


def relative(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def with_gains(model):
    for name, p in model.named_parameters():
        if p.dim() == 1 and "norm" in name:
            p.add_(torch.rand(p.shape))
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "phi", "opt", "gpt_oss"])
def test_the_function_stays(architecture, tiny, tokens):
    """Linears and norms, heads that share a norm or keys, partial RoPE, none at all, biases."""
    model, ids = with_gains(tiny(architecture)), torch.cat(tokens(2, 20))
    expected = model(ids).logits
    before = copy.deepcopy(model.state_dict())
    result = apply([SMOOTH()], model, tokens())
    assert len(result.folds) == 2 and relative(model(ids).logits, expected) < 1e-5
    moved = {name for name, p in model.state_dict().items() if not torch.equal(p, before[name])}
    assert {name.rpartition(".")[0] for name in moved} == {n for f in result.folds for n in (f.name, *f.consumers)}


def test_every_pair_reaches_the_same_length(tiny, tokens):
    """By what k_proj gives on the calibration tokens, head by head; halves are turned together in Llama."""
    model, given = tiny("llama"), []
    apply([SMOOTH()], model, tokens())
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _, __, output: given.append(output))
    for batch in tokens():
        model(batch)
    k = torch.cat(given, 1).view(-1, 2, 2, 8)  # [tokens, heads, halves, pairs]
    longest = k.square().sum(2).sqrt().amax(0)
    assert_close(longest, longest[:, :1].expand(-1, 8), rtol=1e-3, atol=0)


def test_the_largest_pairs_can_be_left(tiny, tokens):
    model, before = uneven(tiny("llama")), uneven(tiny("llama"))
    apply([SMOOTH(leave=1)], model, tokens())
    for one, other in zip(model.model.layers, before.model.layers, strict=True):
        moved = (one.self_attn.k_proj.weight / other.self_attn.k_proj.weight).view(2, 16, 64)
        assert_close(moved[:, [7, 15]], torch.ones(2, 2, 64))  # the pair that was made larger than the others
        assert ((moved - 1).abs().amax(-1) > 1e-3).sum() >= 2 * 12


def test_half_the_strength_is_half_the_way(tiny, tokens):
    model, half, none = (tiny("llama") for _ in range(3))
    for one, alpha in ((model, 1.0), (half, 0.5), (none, 0.0)):
        apply([SMOOTH(alpha=alpha)], one, tokens())
    W, W_half, W_none = (one.model.layers[0].self_attn.k_proj.weight for one in (model, half, none))
    assert_close((W_half / W_none).square(), W / W_none, rtol=1e-3, atol=1e-5)
    assert_close(W_none, tiny("llama").model.layers[0].self_attn.k_proj.weight)


def uneven(model):
    """The model with keys of very different pairs, and one channel that is larger than the one it is turned with."""
    generator = torch.Generator().manual_seed(1)
    for block in model.model.layers:
        k, q = block.self_attn.k_proj.weight.view(2, 16, 64), block.self_attn.q_proj.weight.view(2, 2, 16, 64)
        s = torch.randn(2, 8, generator=generator).mul(0.7).exp().repeat(1, 2)[..., None]
        s[:, 7] *= 30  # of the pair that is turned by hardly a degree
        k *= s
        q /= s[:, None]
    return model


def test_both_scalings_lose_less_than_either(tiny, tokens):
    """In 4 bits with a scale per token; as FireQ finds it."""
    model, ids = uneven(tiny("llama")), torch.cat(tokens(3, 96, seed=5))
    smooth, partly = copy.deepcopy(model), copy.deepcopy(model)
    apply([SMOOTH()], smooth, tokens(3, 96))
    apply([SMOOTH(leave=1)], partly, tokens(3, 96))
    with attached(model, [KV_INT(residual=1000)]):
        expected = logits_through_cache(model, ids, piece=8).log_softmax(-1)
    loss = {}
    for name, one, scaled in (("none", model, 0), ("pre", smooth, 0), ("post", model, 2), ("both", partly, 2)):
        storage = KV_INT(group_size=32, residual=0, keys="token", symmetric=True, outlier_channels=scaled)
        with attached(one, [storage]):
            found = logits_through_cache(one, ids, piece=8).log_softmax(-1)
        loss[name] = (expected.exp() * (expected - found)).sum(-1).mean().item()
    assert loss["both"] < 0.85 * min(loss["pre"], loss["post"]), loss
    assert max(loss["pre"], loss["post"]) < 0.85 * loss["none"], loss


def test_symmetric_codes_are_those_of_plain_rounding():
    k, v = torch.randn(2, 1, 2, 64, 16)
    found, _ = dequantize_kv(quantize_kv(k, v, 4, 32, by_token=True, symmetric=True))
    step = k.abs().amax(-1, keepdim=True) / 7
    assert ((found - (k / step).round() * step).abs() > 0.05 * step).float().mean() < 0.02  # bfloat16 steps
    assert ((found - k).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_by_token_are_the_nearest_of_each_keys_own_grid(bits):
    k, v = torch.randn(2, 1, 2, 70, 16)
    stored = quantize_kv(k, v, bits, 32, by_token=True)
    found, values = dequantize_kv(stored)
    low, high = k[:, :, :64].amin(-1, keepdim=True), k[:, :, :64].amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    assert ((found[:, :, :64] - k[:, :, :64]).abs() <= 0.53 * step + 0.02 * low.abs()).all()  # bfloat16 scales
    assert torch.equal(found[:, :, 64:], k[:, :, 64:])
    assert torch.equal(values, dequantize_kv(quantize_kv(k, v, bits, 32))[1])
    q, lengths = torch.randn(1, 4, 1, 16), torch.full((1, 2), 70)
    scores = (q.view(1, 2, 2, 16) @ found.transpose(-1, -2)).mul(16**-0.5).softmax(-1)
    assert_close(kv_decode(q, stored, lengths).view(1, 2, 2, 16), scores @ values, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no kernel for scales per token"):
        kv_decode(q, stored, lengths, impl="cpu")


def test_outlier_channels_are_scaled_by_powers_of_two_and_back(tokens):
    """Keys that are no codes come back bit for bit, and products with queries do not change."""
    k, v = torch.randn(2, 2, 2, 90, 16, dtype=torch.bfloat16)
    k[:, 0, :, 3] *= 40
    k[:, 1, :, 5] *= 10
    keep = torch.ones(2, 2, 90, dtype=torch.bool)
    keep[1, :, :9] = False
    keep[0, 1, :5] = False
    precision = Precision(8, 32, 20, by_token=True, scaled=1)
    slab = slabs_of(k[:, :, :70], v[:, :, :70], keep[..., :70], precision)[0]
    slab.append(k[:, :, 70:], v[:, :, 70:])
    factors = slab.factors.view.float()
    assert (factors[:, 0].flatten(1).argmin(1) == 3).all() and (factors[:, 1].flatten(1).argmin(1) == 5).all()
    assert ((factors < 1).sum(-1) == 1).all() and torch.equal(factors.log2().round(), factors.log2())
    seen = (k[:, :, :70] * factors * keep[:, :, :70, None]).abs().amax(2)
    second = seen.masked_fill(factors[:, :, 0] < 1, 0).amax(-1)
    assert (seen.amax(-1) >= second).all() and (seen.amax(-1) <= 2 * second).all(), "down to the next, and no further"
    assert torch.equal(slab.dense()[0][:, :, slab.coded :], k[:, :, -slab.k.length :])
    assert relative(slab.dense()[0][:, 1, -80:, 5].float(), k[:, 1, -80:, 5].float()) < 0.05
    q = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16)
    held = dequantize_kv(slab.kv(), torch.float32)[0].repeat_interleave(2, 1)
    out = slab.dense()[0].repeat_interleave(2, 1).float()
    assert_close(slab.queries(q).float() @ held.mT, q.float() @ out.mT, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("methods", [[], [METHODS["snapkv"](budget=40, observed=4, allocation="ada", decoding=True)]])
def test_kernels_and_plain_paths_read_the_same(methods, tiny, tokens):
    """Batches whose rows change places, and evictions, after which factors are found anew."""
    model, ids, found = uneven(tiny("llama")), torch.cat(tokens(2, 80)), []
    for by_kernel in (True, False):
        storage = KV_INT(bits=8, group_size=32, residual=4, keys="token", outlier_channels=2)
        with attached(model, [*methods, storage]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            model(ids[:, :70], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            steps = [model(ids.flip(0)[:, i : i + 1], past_key_values=cache).logits for i in range(70, 80)]
            found.append(torch.cat(steps, 1).flip(0))
        assert all(slab.factors is not None for layer in cache.own for slab in layer.slabs)
    assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    if not methods:
        assert relative(found[0], model(ids).logits[:, 70:]) < 0.05


def test_the_whole_recipe_is_saved_and_loaded(tiny, tokens, tmp_path):
    model, ids = tiny("llama"), tokens(1, 80)[0]
    storage = KV_INT(keys="token", outlier_channels=2, group_size=32)
    result = apply([SMOOTH(), METHODS["rtn"](bits=8, group_size=16), storage], model, tokens())
    loaded = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(*(logits_through_cache(one, ids, piece=8) for one in (model, loaded)))


def test_models_that_cannot_be_smoothed_are_refused_before_any_work(tiny, tokens):
    with pytest.raises(ValueError, match="smooth_keys could scale.*one linear may give both"):
        apply([SMOOTH()], tiny("gpt2"), tokens())
    model = tiny("llama")
    apply([METHODS["rtn"](bits=4, group_size=16)], model)
    assert isinstance(model.model.layers[0].self_attn.k_proj, CompressedLinear)
    with pytest.raises(ValueError, match="stored compressed already"):
        apply([SMOOTH()], model, tokens())
    with pytest.raises(ValueError, match="`symmetric`"):
        KV_INT(symmetric=True)
    for knobs in ({}, {"keys": "token", "rotate_keys": True}):
        with pytest.raises(ValueError, match="`outlier_channels`"):
            KV_INT(outlier_channels=2, **knobs)
