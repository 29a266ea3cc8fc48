"""GemFilter's cache is that of a shorter prompt, of the tokens that one layer chose; against the same written out."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d
from torch.testing import assert_close

from compress import METHODS, accelerate, apply
from compress.kv import attach, attached
from compress.kv.eviction.gemfilter import GemFilter
from compress.recipe import parse_recipe

NEAR = {"rtol": 1e-3, "atol": 1e-4}
HALF = GemFilter(budget=0.5, depth=0.5, pool=3)
SHORT = replace(HALF, prefill="short")


def read(model, cache, ids, mask=None) -> Tensor:
    """Logits of a pass over further tokens; mask: of all tokens."""
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def chosen_tokens(model, monkeypatch, ids: Tensor, layer: int, count: int) -> Tensor:
    """Indices of the tokens of one row, by what transformers' own rotation gives a layer's attention."""
    where, turned = sys.modules[type(model).__module__], []
    rotate = where.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(where, "apply_rotary_pos_emb", lambda *args: turned.append(rotate(*args)) or turned[-1])
        model(ids)
    q, k = turned[layer]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    got = (q[0, :, -1:] @ k[0].mT).sum(0)  # [1, T]
    got = avg_pool1d(got, 3, stride=1, padding=1)[0]
    got[-1] = torch.inf
    return got.topk(count).indices.sort().values


@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe"])
def test_later_tokens_are_computed_as_after_the_chosen_tokens_alone(tiny, tokens, monkeypatch, architecture):
    """Also with their positions from 0 on, as the paper has them: rotary attention knows only distances."""
    model, (prompt, more) = tiny(architecture), tokens(2, 40)
    index = chosen_tokens(model, monkeypatch, prompt, 1, 20)
    expected = model(torch.cat([prompt[:, index], more], 1)).logits[:, 20:]
    with attached(model, [HALF]) as attachment:
        cache = attachment.cache(traces=True)
        whole = read(model, cache, prompt)
        assert_close(read(model, cache, more[:, :1]), expected[:, :1], **NEAR)
        assert {int(n) for layer in cache.own for n in layer.lengths.flatten()} == {21}
        for layer in cache.own:
            assert all(torch.equal(row[:20].long(), index) for row in layer.kept_positions()[0])
        for at in range(1, 8):
            assert_close(read(model, cache, more[:, at : at + 1]), expected[:, at : at + 1], **NEAR)
        assert cache.get_seq_length() == 48
    assert_close(whole, model(prompt).logits, **NEAR)


def test_a_batch_is_its_rows(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    following = torch.tensor([[5], [7]])
    with attached(model, [HALF]) as attachment:
        cache = attachment.cache(traces=True)
        read(model, cache, ids, mask)
        together = read(model, cache, following, torch.cat([mask, mask[:, -1:]], 1))
        assert [int(n) for n in cache.own[0].lengths[:, 0]] == [21, 17]  # half of 31, rounded to even, and the new one
        for row, begin in enumerate((0, 9)):
            alone = attachment.cache(traces=True)
            read(model, alone, ids[row : row + 1, begin:])
            assert_close(together[row : row + 1], read(model, alone, following[row : row + 1]), **NEAR)
            for a, b in zip(cache.own, alone.own, strict=True):
                assert torch.equal(a.kept_positions()[row][0], b.kept_positions()[0][0])


@pytest.mark.parametrize("traces", [False, True])
def test_an_observing_cache_is_compressed_as_if_the_policy_had_been_there(tiny, tokens, traces):
    model, (prompt,) = tiny("llama"), tokens(1, 40)
    storage = METHODS["kv_int"](bits=8)
    with attached(model) as attachment:
        observed = attachment.cache(observes=True, traces=traces)
        read(model, observed, prompt)
        for budget in (0.5, 0.25, 7):
            policy = GemFilter(budget=budget, depth=0.5, pool=3)
            made = observed.compressed(policy, storage)
            with attached(model, [policy, storage]) as other:
                cache = other.cache(traces=traces)
                read(model, cache, prompt)
            following = torch.tensor([[5]])
            assert_close(read(model, made, following), read(model, cache, following), **NEAR)
            assert (
                made.own[0].slabs[0].precision.bits == 8 and made.own[0].length == policy.target(torch.tensor(40)) + 1
            )


def test_a_further_turn_chooses_anew_among_what_was_kept(tiny, tokens):
    """Of the second prompt, and of the reply between them, too; a prompt within the budget stays as it is."""
    model, (prompt, reply, further) = tiny("llama"), tokens(3, 12)
    policy = GemFilter(budget=10, depth=0.5, pool=3)
    with attached(model, [policy]) as attachment:
        cache = attachment.cache(traces=True)
        read(model, cache, prompt)
        first = cache.own[0].kept_positions()[0][0].long()
        for at in range(3):
            read(model, cache, reply[:, at : at + 1])
        read(model, cache, further)
        kept = cache.own[0].kept_positions()[0][0].long()
        assert len(first) == len(kept) == 10 and set(kept.tolist()) <= {*first.tolist(), *range(12, 27)}
        text = torch.cat([prompt, reply[:, :3], further], 1)
        expected = model(torch.cat([text[:, kept], torch.tensor([[5]])], 1)).logits[:, -1:]
        assert_close(read(model, cache, torch.tensor([[5]])), expected, **NEAR)
        short = attachment.cache()
        read(model, short, prompt[:, :8])
        assert short.own[0].length == 8 and [len(ids[0]) for ids in short.ids] == [8]


def test_a_recipe_generates(tiny, tokens):
    (prompt,) = tokens(1, 24)
    model = apply(parse_recipe("gemfilter(budget=0.5), kv_int(bits=8)"), tiny("gemma2")).model
    with torch.no_grad():
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert text.shape == (1, 32)


def test_bad_input_is_refused(tiny):
    with pytest.raises(ValueError, match=r"`pool` \(=4\) of gemfilter must be odd, such as 5"):
        GemFilter(pool=4)
    with pytest.raises(ValueError, match="`allocation` .='ada'. of gemfilter must be one of uniform"):
        GemFilter(allocation="ada")
    with pytest.raises(ValueError, match="needs rotary ones, and GPT2LMHeadModel has none; snapkv works"):
        attach(tiny("gpt2"), [GemFilter()])


def last_logits(model, cache, ids, mask=None) -> Tensor:
    """Of a first prompt, as `generate` reads it."""
    mask = torch.ones_like(ids) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)
    how = {"attention_mask": mask, "position_ids": at, "past_key_values": cache, "use_cache": True}
    return model(input_ids=ids, **how, logits_to_keep=1).logits


def test_a_short_prefill_reads_the_chosen_tokens_alone(tiny, tokens, monkeypatch):
    """The first pass ends at the layer that chooses; the cache is the same as with the whole prompt read first."""
    model, (prompt, more) = tiny("llama"), tokens(2, 40)
    index = chosen_tokens(model, monkeypatch, prompt, 1, 20)
    expected = model(torch.cat([prompt[:, index], more], 1)).logits[:, 19:]
    widths: dict[int, list[int]] = {}  # tokens that the MLPs read
    for number, block in enumerate(model.model.layers):
        note = partial(lambda number, block, args: widths.setdefault(number, []).append(args[0].shape[1]), number)
        block.mlp.register_forward_pre_hook(note)
    with attached(model, [SHORT]) as attachment, torch.no_grad():
        cache = attachment.cache(traces=True)
        assert_close(last_logits(model, cache, prompt)[:, -1], expected[:, 0], **NEAR)
        assert widths == {0: [40, 20], 1: [20]}  # layer 1 chooses
        assert cache.get_seq_length() == 40 and int(cache.own[0].tokens) == 40
        for at in range(8):
            assert_close(read(model, cache, more[:, at : at + 1]), expected[:, at + 1 : at + 2], **NEAR)
        for layer in cache.own:
            assert all(torch.equal(row[:20].long(), index) for row in layer.kept_positions()[0])


def test_a_short_prefill_may_leave_one_token(tiny, tokens):
    model, (prompt, more) = tiny("llama"), tokens(2, 20)
    expected = model(torch.cat([prompt[:, -1:], more[:, :3]], 1)).logits
    with attached(model, [replace(SHORT, budget=1)]) as attachment, torch.no_grad():
        cache = attachment.cache()
        assert_close(last_logits(model, cache, prompt)[:, -1], expected[:, 0], **NEAR)
        assert cache.get_seq_length() == 20 and int(cache.own[0].tokens) == 20
        for at in range(3):
            assert_close(read(model, cache, more[:, at : at + 1]), expected[:, at + 1 : at + 2], **NEAR)


def test_a_short_prefill_of_an_accelerated_model(tiny, tokens):
    """Against that of transformers' own modules, to the rounding of bfloat16."""
    (prompt,), found = tokens(1, 40), []
    for model in (tiny("llama").bfloat16(), accelerate(tiny("llama").bfloat16())):
        with attached(model, [SHORT]) as attachment, torch.no_grad():
            cache = attachment.cache(traces=True)
            logits = last_logits(model, cache, prompt)
            found.append((cache.own[0].kept_positions()[0][0].tolist(), logits))
    (kept, logits), (kept_fast, logits_fast) = found
    assert kept == kept_fast and len(kept) == 20
    assert_close(logits_fast, logits, rtol=0.05, atol=0.03)


def test_a_short_prefill_of_a_batch_and_in_codes_leaves_the_cache_of_a_long_one(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    following, further = torch.tensor([[5], [7]]), torch.cat([mask, mask[:, -1:]], 1)
    caches = []
    for policy in (HALF, SHORT):
        with attached(model, [policy, METHODS["kv_int"](bits=8)]) as attachment, torch.no_grad():
            caches.append(attachment.cache())
            last_logits(model, caches[-1], ids, mask)
            caches.append(read(model, caches.pop(), following, further))
    assert_close(*caches, **NEAR)


def test_a_short_prefill_is_for_prompts_of_which_the_last_logits_are_wanted(tiny, tokens):
    model, (prompt,) = tiny("llama"), tokens(1, 40)
    whole = model(prompt).logits
    with attached(model, [SHORT]) as attachment, torch.no_grad():
        assert_close(read(model, attachment.cache(), prompt), whole, **NEAR)
        short = last_logits(model, attachment.cache(), prompt)
        assert not torch.allclose(short[:, -1], whole[:, -1], **NEAR)
        within = last_logits(model, attachment.cache(), prompt[:, :1])  # nothing to leave out
        assert_close(within, model(prompt[:, :1]).logits, **NEAR)
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
        assert text[0, -1] == short[0, -1].argmax()
        how = {"past_key_values": attachment.cache(), "use_cache": True, "logits_to_keep": 1}
        states = model(prompt, output_hidden_states=True, **how).hidden_states
        assert [tuple(x.shape[:2]) for x in states] == [(1, 20)] * (len(model.model.layers) + 1)
    with pytest.raises(ValueError, match=r"`prefill` \(='short'\) of gemfilter: Gemma2\w+ has layers \(sliding_att"):
        attach(tiny("gemma2"), [SHORT])
