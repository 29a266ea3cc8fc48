"""ZipVL: which tokens are important, what each part loses, and that both parts are read as one."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS, apply, load_compressed, load_model, save_compressed
from compress.kv import attached, attachment_of
from compress.kv.storage import joined
from compress.kv.storing.zipvl import fewest
from compress.kv.timed import FilledCache
from kernels.kv_decode import dequantize_kv, quantize_kv
from kernels.registry import recording
from notebooks.study.caches import cache_recipes, check_caches

ZIPVL, KV_INT = METHODS["zipvl"], METHODS["kv_int"]
SMALL = {"group_size": 32, "residual": 4, "probes": 8, "mass": 0.8}


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def attention_of(model, ids) -> list[Tensor]:
    """By layer, [H_q, n, n] of one row, as transformers' eager attention gives it."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return [one[0] for one in model(ids, output_attentions=True).attentions]


def important_tokens(attention: Tensor, probes: int, mass: float, kv_heads: int) -> list[set[int]]:
    """By kv head, written out with loops."""
    n = attention.shape[-1]
    grouped = attention.unflatten(0, (kv_heads, -1))[:, :, -probes:]  # [H, G, probes, n]
    got = grouped.sum((1, 2)).tolist()
    count = 0
    share = 0.0
    while share < mass - 1e-6:
        count += 1
        share = sum(sum(sorted(head, reverse=True)[:count]) / sum(head) for head in got) / kv_heads
    chosen = []
    for head in got:
        seen_by = [min(probes, n - t) for t in range(n)]
        ranked = sorted(range(n), key=lambda t, head=head, by=seen_by: head[t] / by[t], reverse=True)
        chosen.append(set(ranked[:count]))
    return chosen


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_important_tokens_and_codes_are_those_written_out(tiny, tokens, architecture):
    """What the cache holds, and the logits behind it, against a plain cache whose rows were rounded in place."""
    model, ids, plain = tiny(architecture), tokens(1, 115)[0], DynamicCache()
    model(ids[:, :110], past_key_values=plain)
    with attached(model, [ZIPVL(**{**SMALL, "mass": 0.5})]) as attachment:
        cache = attachment.cache(traces=True)
        read(model, cache, ids[:, :110])
        heads = plain.layers[0].keys.shape[1]
        for layer, exact, attention in zip(cache.own, plain.layers, attention_of(model, ids[:, :110]), strict=True):
            slab, positions = layer.slabs[0], layer.positions.view[0]
            for h, expected in enumerate(important_tokens(attention, 8, 0.5, heads)):
                kept_in = slab.part[0, h]
                assert set(positions[h][kept_in == 2].tolist()) == expected and 0 < len(expected) < 110
                for number, bits, residual in ((1, 2, 0), (2, 4, 4)):
                    at = positions[h][kept_in == number].long()
                    k, v = (x[:, h : h + 1, at].clone() for x in (exact.keys, exact.values))
                    full = max((len(at) - residual) // 32 * 32, 0)
                    if full:
                        coded = dequantize_kv(quantize_kv(k[:, :, :full], v[:, :, :full], bits, 32))
                        k[:, :, :full], v[:, :, :full] = coded
                    exact.keys[:, h, at], exact.values[:, h, at] = k[:, 0], v[:, 0]
        for part in (0, 1):
            assert any(layer.slabs[0].parts[part].coded for layer in cache.own)
        steps = [read(model, cache, ids[:, a:b]) for a, b in ((110, 111), (111, 114), (114, 115))]
    expected = model(ids[:, 110:115], past_key_values=plain).logits
    assert_close(torch.cat(steps, 1), expected, rtol=1e-3, atol=1e-3)


def test_the_fewest_that_reach_a_share():
    got = torch.tensor([[[4.0, 3, 2, 1], [1, 1, 1, 1]], [[8, 0, 0, 0], [8, 0, 0, 0]]])  # two rows of two heads
    assert fewest(got, 0.5).tolist() == [2, 1]  # (0.4 + 0.25) / 2 < 0.5 <= (0.7 + 0.5) / 2
    assert fewest(got, 0.0).tolist() == [1, 1] and fewest(got, 1.0).tolist() == [4, 1]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_both_paths_read_a_padded_batch_alike(tiny, tokens, architecture):
    """And rows are what they are alone, but for the groups in which positions share a scale; in several turns too."""
    model, ids = tiny(architecture), torch.cat(tokens(2, 100))
    mask = (torch.arange(100) >= torch.tensor([[0], [9]])).long()
    logits, parts = {}, {}
    for name, by_kernel, rows in (("kernel", True, [0, 1]), ("plain", False, [0, 1]), ("alone", True, [1])):
        with attached(model, [ZIPVL(bits=8, low_bits=4, rotate_keys=True, **SMALL)]) as attachment:
            cache, at, found = attachment.cache(traces=True), 0, []
            cache.by_kernel = by_kernel
            with recording() as ran:
                for size in (64, 1, 1, 3, 1):
                    found.append(read(model, cache, ids[rows, at : at + size], mask[rows, : at + size]))
                    at += size
                layer = cache.own[-1]
                first = layer.slabs[0].part[-1], layer.positions.view[-1]
                found.append(read(model, cache, ids[rows, at:], mask[rows]))
            assert ("kv_decode" in ran) == by_kernel
        logits[name], parts[name] = torch.cat(found[1:], 1), first
        now = layer.slabs[0].part[-1], layer.positions.view[-1]
        for h in range(len(now[0])):
            lesser = [{*where[h][part[h] == 1].tolist()} for part, where in (first, now)]
            assert lesser[0] < lesser[1]  # what is in fewer bits stays so, and new tokens join it
            assert {*now[1][h][now[0][h] > 0].tolist()} == set(range(91))
    assert_close(logits["kernel"], logits["plain"], rtol=1e-3, atol=1e-3)
    assert_close(logits["alone"][0], logits["kernel"][1], rtol=0.1, atol=0.1)
    for h in range(parts["alone"][0].shape[0]):
        chosen = [{*where[h][part[h] == 2].tolist()} for part, where in (parts["alone"], parts["kernel"])]
        assert chosen[0] == chosen[1]


def test_padding_between_tokens_leaves_the_parts_as_they_are(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 80))
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, 66] = 0  # the first row has no token there
    with attached(model, [ZIPVL(**SMALL)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids[:, :64], mask[:, :64])
        before = cache.own[0].slabs[0].lesser.lengths.clone()
        read(model, cache, ids[:, 64:68], mask[:, :68])
        layer = cache.own[0]
        assert torch.equal(layer.slabs[0].lesser.lengths, before)
        assert layer.lengths.tolist() == [[67, 67], [68, 68]]


def test_bytes_are_those_of_two_precisions_and_follow_the_rows(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 120))
    with attached(model, [ZIPVL(**SMALL)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
        expected = 0
        for layer in cache.own:
            for slab, bits, residual in zip(layer.slabs[0].parts, (2, 4), (0, 4), strict=True):
                n = int(slab.lengths.max())
                full = max((n - residual) // 32 * 32, 0)
                per_row = 2 * full * 16 * bits // 8 + full // 32 * 16 * 4 + full * 4 + 2 * (n - full) * 16 * 4
                expected += 4 * per_row + 4 * 4  # 4 rows of batch and heads, and their starts
            expected += 2 * 8 * 1  # tokens of each row
            expected += 2 * 8 * 1 if layer.since is not None else 0
        assert cache.nbytes == expected
        before = [joined(layer.slabs) for layer in cache.own]
        other = copy.deepcopy(cache)
        other.reorder_cache(torch.tensor([1, 0]))
        for layer, (k, v, starts) in zip(other.own, before, strict=True):
            for now, then in zip(joined(layer.slabs), (k, v, starts), strict=True):
                assert torch.equal(now, then.flip(0))
        other.batch_select_indices(torch.tensor([0]))
        read(model, other, ids[:1, :1])


def test_an_observing_cache_is_divided_as_if_it_had_always_been(tiny, tokens):
    model, ids, zipvl = tiny("llama"), torch.cat(tokens(2, 80)), ZIPVL(**SMALL)
    with attached(model) as attachment:
        observed = attachment.cache(observes=True, traces=True)
        read(model, observed, ids)
        found = observed.compressed(None, zipvl)
    with attached(model, [zipvl]) as attachment:
        whole = attachment.cache(traces=True)
        read(model, whole, ids)
        for a, b in zip(found.own, whole.own, strict=True):
            assert torch.equal(a.positions.view, b.positions.view)
            assert_close(joined(a.slabs), joined(b.slabs), rtol=1e-4, atol=1e-4)
        model.generation_config.eos_token_id = None
        written = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, num_beams=2)
        assert written.shape == (2, 86)


def test_zipvl_composes_with_projections_only_and_is_saved(tiny, tmp_path):
    model, zipvl = tiny("llama"), ZIPVL(**SMALL)
    for other in (METHODS["snapkv"](), METHODS["quest"]()):
        for recipe in ([other, zipvl], [zipvl, other]):
            with pytest.raises(ValueError, match="stores positions apart.*leave one out"):
                apply(recipe, model)
    with pytest.raises(ValueError, match="both decide how positions are stored"):
        apply([KV_INT(), zipvl], model)
    with pytest.raises(ValueError, match="`low_bits` .=4. of zipvl must be below `bits`"):
        ZIPVL(bits=4, low_bits=4)
    with pytest.raises(ValueError, match="two precisions.*leave out the timing"):
        check_caches(model, cache_recipes("zipvl"), [16], [32])
    check_caches(model, cache_recipes("zipvl"), [], [32])
    save_compressed(apply([METHODS["rtn"](bits=8, group_size=16), zipvl], model), tmp_path / "saved")
    loaded = load_compressed(tmp_path / "saved")
    assert attachment_of(loaded).storage == zipvl
    with pytest.raises(ValueError, match="two precisions"):
        FilledCache(tiny("llama"), 64, None, zipvl)


def test_important_tokens_in_more_bits_lose_less():
    """On the embedded model: far less is lost than with 2 bits for all."""
    model, tokenizer = load_model("smollm2-135m")
    text = "The quick brown fox jumps over the lazy dog. " * 3 + "A needle lies in the haystack of the old farm."
    ids = tokenizer(text, return_tensors="pt").input_ids
    more, losses = {"group_size": 32, "residual": 0}, {}
    cache = DynamicCache()
    model(ids[:, :-6], past_key_values=cache)
    exact = model(ids[:, -6:], past_key_values=cache).logits.log_softmax(-1)
    for name, storage in (
        ("two", KV_INT(bits=2, **more)),
        ("divided", ZIPVL(mass=0.9, probes=16, **more)),
    ):
        with attached(model, [storage]) as attachment:
            cache = attachment.cache()
            model(ids[:, :-6], past_key_values=cache, logits_to_keep=1)
            given = model(ids[:, -6:], past_key_values=cache).logits.log_softmax(-1)
        losses[name] = (exact.exp() * (exact - given)).sum(-1).mean().item()
    assert losses["divided"] < 0.5 * losses["two"]
