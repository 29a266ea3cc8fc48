"""A compressed cache changes nothing but what it evicts: for batches, padding, chunks, turns, beams and assistants."""

import copy
import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Cache, DynamicCache, StaticCache

from compress import METHODS, apply
from compress.kv import CacheBatch, CompressedCache, attach, attached, attachment_of, batched, detach, left_alone
from compress.kv.attention import attend
from compress.kv.eviction.knorm import KNorm
from compress.kv.growing import Growing
from compress.kv.policy import ALLOCATIONS, Policy
from kernels import native
from kernels.registry import recording
from kernels.step.accelerate import accelerate

POLICIES = [name for name, method in METHODS.items() if issubclass(method, Policy) and not method.at_every_pass]
SMALL = {"snapkv": {"observed": 4}, "expected_attention": {"future": 16}}  # knobs for short prompts
LATER = {"prefixkv", "d2o"}  # score as others do: one architecture is enough
MODELS = {"llama": {}, "mqa": {"num_key_value_heads": 1}, "gpt2": {}, "gpt_neox": {}, "gemma3_text": {}}
KV_INT, NEAR = METHODS["kv_int"], {"rtol": 1e-3, "atol": 1e-3}


def policy(name: str, **knobs) -> Policy:
    return METHODS[name](**SMALL.get(name, {}), **{"allocation": "uniform", **knobs})


@dataclass(frozen=True, kw_only=True)
class Lopsided(KNorm):
    """The keys of later heads matter more than all those of earlier ones."""

    def scores(self, seen):
        return KNorm.scores(self, seen) + 1000 * torch.arange(seen.keys.shape[1])[:, None]


MIXED = {  # lengths of rows, heads and layers, memories, queries, positions and codes, all of which belong to a row
    "h2o": [policy("h2o", budget=20, allocation="ada", decoding=True)],
    "snapkv": [policy("snapkv", budget=20, allocation="global", decoding=True)],
    "expected_attention": [policy("expected_attention", budget=40, decoding=True), KV_INT(group_size=32, residual=4)],
    "lopsided": [Lopsided(budget=30, allocation="ada")],
}


class Written(NamedTuple):
    tokens: Tensor  # [B, new]
    logits: Tensor  # [B, new, vocabulary]
    cache: Cache


def write(model, ids, mask=None, new=6, **more) -> Written:
    """Greedily."""
    model.generation_config.eos_token_id = None
    more = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True, **more}
    out = model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=new, **more)
    return Written(out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1), out.past_key_values)


def same(a: Written, b: Written, row: int | slice = slice(None)) -> None:
    """Row: of b, as which a was written."""
    assert torch.equal(a.tokens.squeeze(0), b.tokens[row])
    assert_close(a.logits.squeeze(0), b.logits[row], **NEAR)


def rows_alone(model, ids, mask, new=4) -> None:
    """A batch writes what each of its rows writes by itself, without padding."""
    both = write(model, ids, mask, new)
    for i, row in enumerate(mask.bool()):
        same(write(model, ids[i : i + 1, row], new=new), both, i)


def read(model, cache, ids, mask=None) -> Tensor:
    """Logits of a pass over further tokens; mask: of all tokens."""
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 40)), (torch.arange(40) >= torch.tensor([[0], [9]])).long()


def test_every_architecture(any_model, padded):
    """Without a policy nothing changes, whether prompts come in one piece or in chunks, of which a row's first is
    padding alone."""
    if any_model.config.model_type == "mistral":
        with pytest.raises(ValueError, match=r"`model` \(MistralForCausalLM\) has no layer.*sliding_attention"):
            attach(any_model)
        return
    plain = write(any_model, *padded)
    with attached(any_model):
        kept = write(any_model, *padded)
        same(kept, plain)
        assert (
            isinstance(kept.cache, CompressedCache) and len(kept.cache.own) + sum(left_alone(any_model).values()) == 2
        )
        same(write(any_model, *padded, prefill_chunk_size=7), plain)
    with attached(any_model, [policy("snapkv", budget=12, allocation="ada", decoding=True)]):
        rows_alone(any_model, *padded, new=11)


@pytest.mark.parametrize(
    "architecture, name",
    [
        pytest.param(a, n, marks=[] if (turn + at) % len(MODELS) == 0 else [pytest.mark.slow])
        for turn, a in enumerate(MODELS)
        for at, n in enumerate(POLICIES)
        if (a, n) != ("gemma3_text", "knorm") and (a == "llama" or n not in LATER) and not METHODS[n].replaces
    ],
)
def test_a_batch_is_its_rows(tiny, padded, architecture, name):
    """Whatever is evicted: padding is nothing, and rows have nothing to do with each other. (Gemma 3's keys have one
    norm.)"""
    model = tiny(architecture.replace("mqa", "llama"), **MODELS[architecture]).double()  # so that noise settles no tie
    settings = (({"budget": 0.4}, 3), ({"budget": 12, "decoding": True}, 10))[: 1 if METHODS[name].runs_model else 2]
    for turn, allocation in enumerate(ALLOCATIONS):
        knobs, new = settings[turn % len(settings)]
        with attached(model, [policy(name, allocation=allocation, **knobs)]):
            rows_alone(model, *padded, new=new)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", POLICIES)
def test_padding_may_lie_anywhere(tiny, tokens, name):
    """Before every row, or, where a dialogue is read in one go, between its turns."""
    model, ids, mask = tiny("llama"), torch.cat(tokens(2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[:, :5], mask[0, :11], mask[1, 20:28] = 0, 0, 0
    more = {"snapkv": {"observed": 64, "pool": 1}, "kvzip": {"piece": 16}}.get(
        name, {}
    )  # a window longer than a row, and pieces
    for one in (policy(name, budget=12), METHODS[name](budget=0.6, allocation="uniform", **more)):
        with attached(model, [one]):
            rows_alone(model, ids, mask)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "architecture, name",
    [
        (a, n)
        for a in ("llama", "phi", "gpt2", "gemma3_text")
        for n in POLICIES
        if (a == "llama" or n not in LATER) and not METHODS[n].replaces
    ],
)
def test_a_compressed_cache_attends_like_a_plain_cache_without_the_evicted_rows(tiny, tokens, architecture, name):
    model, (ids, more) = tiny(architecture), tokens(2, 40)
    unmerged = {"merged": "none"} if METHODS[name].merges else {}
    for last in (5, 20):  # by the kernel, and with a mask
        parts, plain = more[:, : 3 + last].split([1, 1, 1, last], 1), DynamicCache(config=model.config)
        model(ids, past_key_values=plain)
        with attached(model, [policy(name, budget=15, **unmerged)]) as attachment:
            cache = attachment.cache(traces=True)
            read(model, cache, ids)
            for layer in cache.own:
                at = torch.stack(layer.kept_positions()[0]).long()  # [H, 15]
                assert at.shape[1] == 15 and at.amax() < 40 and torch.all(at.diff(dim=1) > 0)
                held = plain.layers[layer.number]
                index = at[None, ..., None].expand(-1, -1, -1, held.keys.shape[-1])
                held.keys, held.values = held.keys.gather(2, index), held.values.gather(2, index)
            found = torch.cat([read(model, cache, part) for part in parts], 1)
        places = torch.arange(40, 43 + last)[None].split([1, 1, 1, last], 1)
        expected = [
            model(part, position_ids=at, past_key_values=plain).logits for part, at in zip(parts, places, strict=True)
        ]
        assert_close(found, torch.cat(expected, 1), **NEAR)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "storage", [None, *({"bits": bits, "group_size": 32, "residual": 20} for bits in (8, 4, 2))], ids=str
)
def test_the_kernel_and_the_mask_agree(tiny, tokens, storage):
    """For heads of one length and of different ones; `residual` is such that no group becomes codes in a pass that is
    compared."""
    model, ids, mask = tiny("llama"), torch.cat(tokens(2, 126)), (torch.arange(126) >= torch.tensor([[30], [0]])).long()
    for one in (
        [],
        [Lopsided(budget=0.5, allocation="ada")],
        [Lopsided(budget=50, allocation="global", decoding=True)],
    ):
        with attached(model, [*one, *([KV_INT(**storage)] if storage else [])]) as attachment:
            found = {}
            for by_kernel in (True, False):
                cache = attachment.cache()
                cache.by_kernel = by_kernel
                with recording() as ran:
                    found[by_kernel] = [
                        read(model, cache, ids[:, a:b], mask[:, :b]) for a, b in ((0, 120), (120, 121), (121, 126))
                    ]
                assert ("kv_decode" in ran) == by_kernel
                lengths, slabs = cache.own[0].lengths, cache.own[0].slabs
                assert [len(set(row)) for row in lengths.tolist()] == [1 + bool(one)] * 2 and len(slabs) == 1 + bool(
                    one
                )
                cache.reset()
                found[by_kernel].append(write(model, ids, mask, new=30, past_key_values=cache))
        assert_close(found[True][:3], found[False][:3], **NEAR)
        if storage is None or storage["bits"] == 8:
            assert torch.equal(found[True][3].tokens, found[False][3].tokens)
            assert_close(found[True][3].logits, found[False][3].logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_chunks_are_evicted_from_as_they_come(tiny, tokens, monkeypatch, allocation):
    """Two layers of two heads hold the budget at most, and a chunk."""
    model, held, scores = tiny("llama"), [], KNorm.scores
    monkeypatch.setattr(KNorm, "scores", lambda self, seen: held.append(int(seen.valid.sum())) or scores(self, seen))
    with attached(model, [policy("knorm", budget=20, allocation=allocation)]):
        cache = write(model, tokens(1, 100)[0], prefill_chunk_size=10, new=5).cache
    assert sum(int(layer.lengths.sum()) for layer in cache.own) == 2 * 2 * (20 + 4)
    assert max(a + b for a, b in zip(held[::2], held[1::2], strict=True)) == 2 * 2 * (20 + 10)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", [f"none, {a}" for a in ("llama", "gpt2", "opt", "gemma3_text")] + POLICIES)
def test_turns(tiny, tokens, padded, name):
    """A cache that is given back goes on; with padding between the turns, where the second ones differ in length."""
    name, architecture = (None, name[6:]) if name.startswith("none") else (name, "llama")
    model, more = tiny(architecture), torch.cat(tokens(2, 13, seed=5))
    mask = torch.cat([padded[1], torch.ones(2, 19, dtype=torch.long)], 1)
    mask[0, 46:51] = 0
    with attached(model, [policy(name, budget=0.5)] if name else []) as attachment:
        first = write(model, *padded, past_key_values=attachment.cache())
        longer = torch.cat([padded[0], first.tokens, more], 1)
        second = write(model, longer, mask, past_key_values=first.cache)
        kept = (
            (mask.sum(1) * 0.5).round().long() + 5 if name else mask.sum(1) + 5
        )  # the last one that was written is not read
        for layer in second.cache.own:
            assert torch.equal(layer.tokens, mask.sum(1) + 5) and torch.all(layer.lengths == kept[:, None])
        for i, row in enumerate(mask.bool()) if name else []:
            cache = attachment.cache()
            same(write(model, padded[0][i : i + 1, row[:40]], past_key_values=cache), first, i)
            same(write(model, longer[i : i + 1, row], past_key_values=cache), second, i)
    if not name:
        same(second, write(model, longer, mask))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("methods", MIXED.values(), ids=MIXED)
def test_rows_are_reordered_chosen_and_repeated(tiny, tokens, methods):
    """Whatever becomes of the rows, they go on as rows that were read so."""
    model, ids, more = tiny("llama"), torch.cat(tokens(3, 60)), tokens(1, 30, seed=7)[0]
    mask = (torch.arange(90) >= torch.tensor([[0], [7], [15]])).long()
    for change, given, rows in (
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([2, 1]), [2, 1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ):
        found = []
        for now in ([0, 1, 2], rows):
            with attached(model, methods) as attachment:
                cache = attachment.cache()
                read(model, cache, ids[now], mask[now, :60])
                for n in range(30):
                    if n == 4 and now != rows:
                        getattr(cache, change)(given)
                        now = rows
                    logits = read(model, cache, more[:, n : n + 1].expand(len(now), 1), mask[now, : 61 + n])
                    found += [logits] if n >= 4 else []
        assert_close(found[:26], found[26:], **NEAR)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_beams(tiny, padded, architecture):
    model, beams = tiny(architecture), {"num_beams": 3, "new": 12}
    plain = write(model, *padded, **beams)
    with attached(model, [policy("h2o", budget=1.0, decoding=True)]):
        assert torch.equal(write(model, *padded, **beams).tokens, plain.tokens)
    with attached(model, MIXED["h2o"]):
        alone = [write(model, padded[0][:1], **beams), write(model, padded[0][1:, 9:], **beams)]
        assert torch.equal(write(model, *padded, **beams).tokens, torch.cat([one.tokens for one in alone]))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_guesses_are_taken_back(tiny, tokens, monkeypatch, architecture):
    model, ids, taken_back, crop = tiny(architecture), tokens(1, 8)[0].repeat(1, 5), [], CompressedCache.crop
    monkeypatch.setattr(CompressedCache, "crop", lambda self, count: taken_back.append(count) or crop(self, count))
    guess = {"prompt_lookup_num_tokens": 2, "new": 30}
    for methods in ([], [KV_INT(bits=8, group_size=32, residual=4)]):
        with attached(model, methods):
            taken_back.clear()
            assert torch.equal(write(model, ids, **guess).tokens, write(model, ids, new=30).tokens)
            assert any(taken_back), "no guess was wrong"
    with attached(model, [policy("knorm", budget=12)]), pytest.raises(ValueError, match="cannot be taken back"):
        write(model, ids, **guess)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_model_is_left_as_it_was(tiny, padded, architecture):
    model = tiny(architecture)
    plain, logits = write(model, *padded), model(padded[0]).logits

    def state() -> list:
        found = [
            {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()} for module in model.modules()
        ]
        return [found, model.config.to_dict(), model.config._attn_implementation]

    before = state()
    with attached(model, MIXED["h2o"]):
        assert write(model, *padded).cache.policy and state() != before
        assert torch.equal(model(padded[0]).logits, logits) and torch.equal(
            model(padded[0], use_cache=False).logits, logits
        )
    assert state() == before
    same(write(model, *padded), plain)
    with pytest.raises(KeyError), attached(model):
        raise KeyError
    assert state() == before
    outer = attach(model, [KV_INT()])
    with attached(model, [METHODS["h2o"]()]):
        assert attachment_of(model).policy.name == "h2o" and attachment_of(model).storage == KV_INT()
    assert attachment_of(model) is outer and outer.policy is None, "what was attached before the with block stays"
    detach(model)
    for wrong in ([METHODS["h2o"](), METHODS["knorm"]()], [KV_INT(), KV_INT(bits=8)]):
        with pytest.raises(ValueError, match="`methods`"):
            attach(model, wrong)
        assert state() == before, "what cannot be attached leaves nothing behind"


@pytest.mark.parametrize("n", [1, 5, 64, 65])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_under_a_mask_is_that_of_a_softmax(n, heads):
    """Short queries, whose heads are folded, and long ones; a mask for all heads, or one for each."""
    B, H, G, T, D = 2, 2, 3, 90, 8
    q, k, v = (torch.randn(B, h, t, D, dtype=torch.float64) for h, t in ((H * G, n), (H, T), (H, T)))
    mask = torch.rand(B, heads, n, T) < 0.7
    y = attend(q, k, v, mask, scaling=0.3)
    for head in range(H * G):
        scores = q[:, head] @ k[:, head // G].mT * 0.3
        weights = scores.masked_fill(~mask[:, head // G if heads > 1 else 0], -torch.inf).softmax(-1)
        assert_close(y[:, :, head], weights @ v[:, head // G])


def test_copies_stand_by_themselves(tiny, padded):
    model = tiny("llama")
    with attached(model, MIXED["h2o"]):
        other, written = copy.deepcopy(model), write(model, *padded, new=12)
    assert attachment_of(other).model is other and attachment_of(model) is None
    same(write(other, *padded, new=12), written)
    same(write(model, *padded, new=12), write(tiny("llama"), *padded, new=12))
    cache = attachment_of(other).cache()
    first = read(other, cache, *padded)[:, -1:].argmax(-1)
    copied = copy.deepcopy(cache)
    assert copied.model is other, "a cache is copied without its model"
    assert_close(read(other, copied, first), read(other, cache, first))


def test_a_cache_needs_its_attachment(tiny, padded):
    model, other, ids = tiny("llama"), tiny("llama"), padded[0]
    with attached(model) as attachment:
        cache = attachment.cache()
    with pytest.raises(ValueError, match="attached"):
        read(model, cache, ids)
    with attached(other):
        assert torch.equal(other(ids).logits, model(ids).logits), "what was left of the other's pass is gone"


@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_without_some_attention(tiny, padded, tokens, layer):
    model = tiny("llama", num_hidden_layers=3)
    apply([METHODS["layer_drop"](target="attention", layers=layer)], model, tokens())
    plain = write(model, *padded)
    for name in POLICIES:
        with attached(model, [policy(name, budget=1.0)]):
            whole = write(model, *padded)
            same(whole, plain)
            assert [one.seen for one in whole.cache.own] == [45] * 3 and len(whole.cache.filled) == 2
    for allocation in ALLOCATIONS:
        with attached(model, [Lopsided(budget=20, allocation=allocation)]):
            cache = write(model, *padded, new=1).cache
        assert sum(int(one.lengths.sum()) for one in cache.filled) == 2 * 2 * 2 * 20, (
            "layers that are left, rows, heads"
        )


def test_a_recipe_attaches(tiny, padded):
    model = tiny("llama")
    plain = write(model, *padded)
    for recipe in ([policy("snapkv", budget=0.5), KV_INT()], [KV_INT(), policy("snapkv", budget=0.5)]):
        result = apply(recipe, model)
        assert result.model is model and not result.layers and len(result.notes) == 2
        written = write(model, *padded)
        assert written.cache.policy in recipe and written.cache.storage == KV_INT()
        assert written.cache.own[0].lengths.tolist() == [[25, 25], [21, 21]] and not torch.equal(
            written.logits, plain.logits
        )
        detach(model)
        same(write(model, *padded), plain)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_batched_caches_are_asked_as_each_alone(tiny, tokens, architecture):
    """Of any policy, storage and reading; in several passes, one token at a time and several."""
    model, (ids, more) = tiny(architecture).double(), (one[:1] for one in tokens(2, 40))
    recipes = [
        {},
        {"policy": policy("knorm", budget=0.3)},
        {"policy": Lopsided(budget=0.5, allocation="ada")},
        {"storage": KV_INT(group_size=32, residual=4)},
        {"policy": policy("snapkv", budget=0.5), "storage": KV_INT(group_size=32, residual=0, rotate_keys=True)},
        {"reading": METHODS["quest"](budget=16, page=8)},
    ]

    def compressed() -> list[CompressedCache]:
        caches = []
        for recipe in recipes:
            caches.append(CompressedCache(model, **recipe))
            read(model, caches[-1], ids)
            caches[-1].paused = True
        return caches

    with attached(model):
        alone, together = compressed(), compressed()
        batched = CacheBatch(together)
        for begin, end in ((0, 5), (5, 6), (6, 26), (26, 27)):
            piece = more[:, begin:end]
            rows = model(piece.expand(len(recipes), -1), past_key_values=batched).logits
            for cache, row in zip(alone, rows, strict=True):
                assert_close(row[None], model(piece, past_key_values=cache).logits, rtol=1e-9, atol=1e-9)
            assert batched.get_seq_length() == 40 + end
        for a, b in zip(alone, together, strict=True):
            for one, other in zip(a.own, b.own, strict=True):
                assert torch.equal(one.lengths, other.lengths)
        together[1].paused = False
        with pytest.raises(ValueError, match="paused"):
            CacheBatch(together)
        with pytest.raises(ValueError, match="seen"):
            CacheBatch([alone[0], compressed()[0]])


@torch.no_grad()
@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels here")
@pytest.mark.parametrize("dtype, architecture", [
    (torch.float32, "llama"), (torch.bfloat16, "llama"), (torch.float16, "llama"), (torch.float32, "gemma3_text"),
    (torch.bfloat16, "gemma3_text"),
])  # fmt: skip
def test_single_tokens_of_a_batch_are_read_together(tiny, tokens, architecture, dtype, monkeypatch):
    """Rows in several forms and of several lengths, some of which become codes on the way; in 16 bits through the fast
    pass of an accelerated model, because a step does not take so many sequences."""
    model, prompts, more = tiny(architecture), tokens(1, 40)[0], tokens(1, 45, seed=2)[0]
    model = accelerate(model) if dtype == torch.bfloat16 else model.to(dtype)
    recipes = [
        {},
        {"policy": policy("knorm", budget=0.3)},
        {"policy": Lopsided(budget=0.5, allocation="ada")},
        {"storage": KV_INT(group_size=32, residual=4)},
        {"policy": policy("knorm", budget=0.5), "storage": KV_INT(bits=4, group_size=32, rotate_keys=True)},
        {"storage": KV_INT(bits=4, group_size=32, residual=0, rotate_keys=True)},
        {"policy": Lopsided(budget=0.9, allocation="ada"), "storage": KV_INT(bits=4, group_size=32)},
        {"storage": METHODS["kv_fp8"]()},
    ] * 2  # fmt: skip
    together, calls = [], []
    kernel = batched.kv_append_decode
    monkeypatch.setattr(batched, "kv_append_decode", lambda *args, **how: calls.append(1) or kernel(*args, **how))
    with attached(model):
        for recipe in recipes:
            together.append(CompressedCache(model, **recipe))
            read(model, together[-1], prompts)
            together[-1].paused = True
        alone, cache = copy.deepcopy(together), CacheBatch(together)
        layers = len(together[0].own)
        for at in range(45):
            token = more[:, at : at + 1]
            if at in (20, 33):  # these tokens go into each cache by itself, between those of the batch
                for one in (*together, *alone):
                    model(token, past_key_values=one)
                continue
            rows = model(token.expand(len(recipes), -1), past_key_values=cache).logits
            own = torch.cat([model(token, past_key_values=one).logits for one in alone])
            if dtype == torch.float32:
                assert_close(rows, own, rtol=1e-4, atol=1e-4)
            else:
                assert float((rows - own).float().norm() / own.float().norm()) < 0.03
        assert len(calls) > 43 * layers  # in some forms each
        for a, b in zip(alone, together, strict=True):
            for one, other in zip(a.own, b.own, strict=True):
                assert torch.equal(one.lengths, other.lengths) and torch.equal(one.tokens, other.tokens)
                assert [slab.coded for slab in one.slabs] == [slab.coded for slab in other.slabs]


@torch.no_grad()
@pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels here")
def test_padding_among_single_tokens_of_a_batch_is_left_out(tiny, tokens, monkeypatch):
    """A row whose sequence has ended gets padding for some steps, which its cache does not keep."""
    model, prompt, more = tiny("llama"), tokens(1, 40)[0], tokens(1, 12, seed=2)[0]
    calls, kernel = [], batched.kv_append_decode
    monkeypatch.setattr(batched, "kv_append_decode", lambda *args, **how: calls.append(1) or kernel(*args, **how))
    with attached(model):
        caches = []
        for recipe in ({}, {"policy": policy("knorm", budget=0.5), "storage": KV_INT(group_size=32)}):
            caches.append(CompressedCache(model, **recipe))
            read(model, caches[-1], prompt)
            caches[-1].paused = True
        alone, both = copy.deepcopy(caches), CacheBatch(caches)
        for at in range(12):
            token, real = more[:, at : at + 1], torch.tensor([True, not 4 <= at < 8])
            mask = torch.ones(2, 41 + at, dtype=torch.long)
            mask[1, 44 : min(48, 41 + at)] = 0
            rows = model(token.expand(2, -1), past_key_values=both, attention_mask=mask).logits
            for i, (cache, row) in enumerate(zip(alone, rows, strict=True)):
                own = model(token, past_key_values=cache, attention_mask=mask[i : i + 1]).logits
                if real[i]:
                    assert_close(row[None], own, rtol=1e-4, atol=1e-4)
        assert [one.tokens.tolist() for one in (caches[0].own[0], caches[1].own[0])] == [[52], [48]]
        assert calls, "rows without padding are read together"


def test_tensors_grow_by_zeros_whatever_they_held_before():
    """Also where numbers were that are dropped, and behind a tensor that was appended."""
    draw, one, expected = random.Random(0), Growing(torch.ones(1, 2, 3)), torch.ones(1, 2, 3)
    for _ in range(200):
        count = draw.randint(1, 5)
        if draw.random() < 0.5:
            one.extend(count)
            expected = torch.nn.functional.pad(expected, (0, count))
        elif draw.random() < 0.5:
            one.append(torch.full((1, 2, count), 5.0))
            expected = torch.nn.functional.pad(expected, (0, count), value=5.0)
        elif one.length > count:
            one.drop_last(count)
            expected = expected[..., :-count]
        assert torch.equal(one.view, expected)
        one.view[..., -2:] += 1
        expected[..., -2:] += 1


@torch.no_grad()
def test_static_caches_of_an_attached_model_are_what_they_were(tiny):
    """A prompt in a static cache comes without a mask, though the cache has more places than the prompt has tokens."""
    model, ids = tiny("llama"), torch.arange(12)[None] * 31 % 96

    def logits():
        cache = StaticCache(config=model.config, max_cache_len=32)
        return [model(part, past_key_values=cache).logits for part in (ids, ids[:, :1], ids[:, :3])]

    expected = logits()
    attach(model, [METHODS["streaming"](budget=8)])
    for found, same in zip(logits(), expected, strict=True):
        assert_close(found, same, **NEAR)
