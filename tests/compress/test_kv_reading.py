"""Sparse reading: each token reads the positions that it should, whatever the batch, the storage and the path; nothing
is evicted."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compress import METHODS, apply
from compress.kv import attach, attached, detach
from compress.kv.eviction.knorm import KNorm
from compress.kv.layer import EXACT
from compress.kv.reading.method import LayerQuery
from compress.kv.reading.quest import bounds
from compress.kv.reading.reader import Reader, choose, masked
from compress.kv.storage import Slab, joined
from compress.kv.timed import FilledCache
from compress.method import settle
from kernels.kv_decode import kv_decode, list_of
from kernels.registry import recording

NEAR = {"rtol": 1e-3, "atol": 1e-3}
READINGS = {
    "quest": lambda **more: METHODS["quest"](**{"page": 4, "full_layers": 0, "budget": 0.3, **more}),
    "tidaldecode": lambda **more: METHODS["tidaldecode"](**{"full_layers": 0, "again": 0.0, "budget": 0.3, **more}),
    "shadowkv": lambda **more: METHODS["shadowkv"](**{"chunk": 2, "budget": 0.3, **more}),
}
LOSSLESS = {"shadowkv": {"rank_share": 1.0}}  # knobs with which what is read is as it came
CODES = METHODS["kv_int"](bits=8, group_size=32, residual=20)


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 40)), (torch.arange(40) >= torch.tensor([[0], [9]])).long()


def test_pages_are_chosen_by_their_scores():
    """Of rows that begin anywhere; the last page comes in any case, and lists, masks and plain words agree."""
    torch.manual_seed(0)
    scores, starts, length, page = torch.rand(2, 3, 4, 8), torch.tensor([[0, 5, 29], [12, 30, 3]]), 30, 4
    tokens, wanted = length - starts, torch.tensor([[12, 7, 1], [30, 9, 4]])
    pages = choose(scores, tokens, page, wanted, 30)
    mask = masked(pages, starts, length, page)
    for b in range(2):
        for h in range(3):
            start, count = int(starts[b, h]), -(-int(tokens[b, h]) // page)
            for t in range(4):
                order = sorted(range(count), key=lambda p, s=scores[b, h, t]: -(9 if p == count - 1 else float(s[p])))
                chosen = order[: -(-int(wanted[b, h]) // page)]
                expected = {n for p in chosen for n in range(start + 4 * p, start + 4 * p + 4) if n < length}
                assert set(mask[b, h, t].nonzero()[:, 0].tolist()) == expected
                many = -(-wanted // page)
                found = list_of(scores[:, :, t], starts, tokens, page=page, pages=many, most=8, behind=1)
                assert found.indices[b, h, : int(found.lengths[b, h])].tolist() == [*sorted(expected), length]


def test_bounds_bound_and_grow_with_the_slab():
    torch.manual_seed(1)
    k, new = torch.randn(2, 2, 37, 8), torch.randn(2, 2, 9, 8)
    starts = torch.tensor([[0, 3], [5, 0]])
    slab = Slab(k, k, starts, METHODS["kv_int"](bits=8, group_size=32, residual=4).precision)
    bounds(slab, 4)
    for token in new.split([1, 1, 1, 6], 2):
        slab.append(token, token)
        low, high = bounds(slab, 4).view.chunk(2, -1)
    assert low.shape == (2, 2, 12, 8)
    q, near = torch.randn(2, 2, 3, 8), 0.05  # keys that became codes after they were noted have moved a little
    edges = q[:, :, :, None] * low[:, :, None], q[:, :, :, None] * high[:, :, None]
    most = torch.maximum(*edges).sum(-1)  # [B, H, 3, P]
    for b in range(2):
        for h in range(2):
            row = slab.dense()[0][b, h, starts[b, h] :]
            for p, keys in enumerate(row.split(4)):
                assert torch.all((low[b, h, p] - keys.amin(0)).abs() < near)
                assert torch.all((high[b, h, p] - keys.amax(0)).abs() < near)
                assert torch.all(most[b, h, :, p] >= (q[b, h] @ keys.mT).amax(-1) - 8 * near)
    slab.drop_last(2)
    assert not slab.notes, "bounds of tokens that were taken back are forgotten"


@pytest.mark.in_turns
@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
def test_a_batch_is_its_rows(tiny, padded, tokens, architecture, name):
    """With padding, through `generate`; and all is kept. gpt-oss has sinks, which only the mask knows."""
    model, (ids, mask) = tiny(architecture), padded
    model = model if architecture == "gpt_oss" else model.double()  # so that noise settles no tie
    model.generation_config.eos_token_id = None
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with attached(model, [READINGS[name]()]):
        both = model.generate(ids, attention_mask=mask, **more)
        for i, row in enumerate(mask.bool()):
            alone = model.generate(ids[i : i + 1, row], attention_mask=mask[i : i + 1, row], **more)
            assert torch.equal(alone.sequences[0, -6:], both.sequences[i, -6:])
    assert all(layer.lengths.tolist() == [[45] * h, [36] * h] for layer in both.past_key_values.own
               for h in [layer.lengths.shape[1]])  # fmt: skip


@pytest.mark.parametrize(
    "name, storage",
    [(n, s) for n in READINGS for s in ([], [CODES]) if not (s and METHODS[n].joins)],
    ids=lambda x: x if isinstance(x, str) else str(8 if x else 16),
)
def test_the_kernel_and_the_mask_read_the_same(tiny, tokens, padded, name, storage):
    """For one token, and token by token or in one pass where an evaluation looks."""
    (ids, mask), more, found = padded, torch.cat(tokens(2, 5, seed=4)), {}
    model, full = tiny("llama"), torch.ones(2, 5, dtype=torch.long)
    with attached(model, [READINGS[name](), *storage]) as attachment:
        for by_kernel in (True, False):
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids, mask)
            with recording() as ran:
                steps = [
                    read(model, cache, more[:, i : i + 1], torch.cat([mask, full[:, : i + 1]], 1)) for i in range(5)
                ]
            assert ("kv_decode" in ran or "kv_decode_ranked" in ran) == by_kernel
            found[by_kernel] = torch.cat(steps, 1)
        first = attachment.cache()
        read(model, first, ids[:1])
        first.paused = True
        paused = read(model, first, more[:1])
    assert_close(found[True], found[False], **NEAR)
    assert_close(paused[:, :1], found[True][:1, :1], **NEAR)
    with attached(model, storage) as attachment:
        cache = attachment.cache()
        read(model, cache, ids, mask)
        whole = read(model, cache, more[:, :1], torch.cat([mask, full[:, :1]], 1))
    assert not torch.allclose(whole, found[True][:, :1], **NEAR), "something was left out"


@pytest.mark.parametrize("name", READINGS)
def test_with_the_whole_budget_everything_is_read(tiny, tokens, padded, name):
    model, (ids, mask) = tiny("llama"), padded
    step, longer = torch.cat(tokens(2, 1, seed=3)), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    found = []
    make = lambda budget: READINGS[name](budget=budget, **LOSSLESS.get(name, {}))  # noqa: E731
    for methods in ([], [make(1.0)], [make(64)]):
        with attached(model, methods) as attachment:
            cache = attachment.cache()
            read(model, cache, ids, mask)
            found.append(read(model, cache, step, longer))
    assert_close(found[1], found[0], **NEAR)
    assert_close(found[2], found[0], **NEAR)


def test_tidaldecode_reads_what_its_first_layer_attended_to(tiny, tokens):
    """Written out: the second layer sees the positions with the most attention of all heads of the first, and its own
    token."""
    model, ids, step = tiny("llama"), tokens(1, 40)[0], tokens(1, 1, seed=3)[0]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    weights = eager(torch.cat([ids, step], 1), output_attentions=True).attentions[0][0, :, -1, :40]
    kept = weights.sum(0)
    kept[-1] = torch.inf
    top = kept.topk(12).indices
    for by_kernel in (True, False):
        with attached(model, [READINGS["tidaldecode"](budget=0.3)]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids)
            read(model, cache, step)
        for head in range(2):
            if by_kernel:
                chosen = cache.reader.lists[0].indices[0, head, : int(cache.reader.lists[0].lengths[0, head])].tolist()
            else:
                chosen = [*cache.reader.last[0][0, head, 0].tolist(), 40]
            assert set(chosen) == {*top.tolist(), 40} and len(chosen) == 13


def test_roles_of_layers():
    roles = METHODS["tidaldecode"]().roles(10)
    assert [r.reads_all for r in roles] == [True] * 3 + [False] * 3 + [True] + [False] * 3
    assert [i for i, r in enumerate(roles) if r.chooses] == [2, 6]
    roles = METHODS["quest"]().roles(4)
    assert [tuple(r) for r in roles] == [(True, False)] * 2 + [(False, True)] * 2
    assert [tuple(r) for r in METHODS["tidaldecode"](full_layers=9).roles(2)] == [(True, False)] * 2


def test_layers_with_the_same_rows_share_the_number_of_pages():
    """And no others do: rows that begin elsewhere, or that are longer, have numbers of their own."""
    reader = Reader(READINGS["quest"](), [0])
    for starts, length in (((0, 0), 40), ((0, 0), 40), ((0, 17), 40), ((0, 17), 41), ((0, 0), 40)):
        k, v = torch.randn(2, 1, 2, length, 32)
        slab = Slab(k, v, torch.tensor([starts]), EXACT)
        wanted, most = reader.reading.share(slab, length)
        pages, at_most = reader._pages_of(slab)
        assert torch.equal(pages, (wanted + 3) // 4) and at_most == -(-most // 4)


@pytest.mark.parametrize("allocation", ["uniform", "ada"])
def test_quest_reads_what_an_eviction_left(tiny, padded, tokens, allocation):
    """Heads of different lengths, evicted from while text is written, whose attention is counted all the same."""
    model, (ids, mask) = tiny("llama"), padded
    h2o = METHODS["h2o"](budget=16, allocation=allocation, decoding=True)
    found = []
    for by_kernel in (True, False):
        with attached(model, [h2o, READINGS["quest"](budget=0.5)]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids, mask)
            for i in range(14):
                longer = torch.cat([mask, torch.ones(2, i + 1, dtype=torch.long)], 1)
                logits = read(model, cache, ids[:, i : i + 1], longer)
            assert sum(int(layer.lengths.sum()) for layer in cache.own) <= 2 * 2 * 2 * (16 + 8)
        found.append(logits)
    assert_close(*found, **NEAR)


@pytest.mark.parametrize("name", ["quest", "shadowkv"])
def test_rows_are_reordered_and_caches_copied(tiny, padded, name):
    model, (ids, mask) = tiny("llama"), padded
    longer = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    with attached(model, [READINGS[name]()]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids, mask)
        read(model, cache, ids[:, :1], longer[:, :-1])
        turned, copied = copy.deepcopy(cache), copy.deepcopy(cache)
        turned.reorder_cache(torch.tensor([1, 0]))
        expected = read(model, cache, ids[:, 1:2], longer)
        assert_close(read(model, copied, ids[:, 1:2], longer), expected, **NEAR)
        assert_close(read(model, turned, ids[:, 1:2].flip(0), longer.flip(0)), expected.flip(0), **NEAR)
        assert cache.nbytes > sum(x.nbytes for layer in cache.own for x in joined(layer.slabs)[:2]) or name != "quest"


def test_impossible_combinations_of_readings_are_refused(tiny):
    model = tiny("llama")
    for methods, message in (
        ([METHODS["quest"](), METHODS["tidaldecode"]()], "both decide which positions are read"),
        ([METHODS["tidaldecode"](), KNorm()], "lets layers read the positions that another layer chose"),
        ([KNorm(), METHODS["tidaldecode"]()], "lets layers read the positions that another layer chose"),
    ):
        with pytest.raises(ValueError, match=message):
            settle(methods)
        with pytest.raises(ValueError):
            attach(model, methods)
        detach(model)
    with pytest.raises(ValueError, match=r"`budget` \(=0\) of quest"):
        METHODS["quest"](budget=0)


def test_a_recipe_attaches_a_reading(tiny, padded):
    model = tiny("llama")
    recipe = [METHODS["knorm"](budget=0.5), METHODS["kv_int"](), READINGS["quest"]()]
    result = apply(recipe, model)
    assert len(result.notes) == 3
    cache = result.model(padded[0], use_cache=True).past_key_values
    assert (cache.policy, cache.storage, cache.reader.reading) == tuple(recipe)


@pytest.mark.parametrize("name", [name for name in READINGS if not METHODS[name].joins])
def test_made_up_caches_read_as_many_positions_as_they_should(tiny, monkeypatch, name):
    """And the lists hold distinct positions of the row."""
    model, read_positions = tiny("llama").bfloat16(), []

    def spy(q, cache, lengths, *, starts=None, indices=None, **more):
        if indices is not None:
            for row, n in zip(indices.flatten(0, 1), lengths.flatten(), strict=True):
                used = row[: int(n)].tolist()
                read_positions.append(len(used))
                assert len(set(used)) == len(used) and used[-1] == max(used)
        return kv_decode(q, cache, lengths, starts=starts, indices=indices, **more)

    def listing(q, cache, ranked, **more):
        chosen = ranked.listed()
        return spy(q, cache, chosen.lengths, indices=chosen.indices, **more)

    monkeypatch.setattr("compress.kv.storage.kv_decode", spy)
    monkeypatch.setattr("compress.kv.storage.kv_decode_ranked", listing)
    with attached(model):
        cache = FilledCache(model, 120, None, None, READINGS[name](budget=0.25))
    for context in (120, 60):
        read_positions.clear()
        with attached(model):
            model(torch.tensor([[1]]), past_key_values=cache.at(context))
        layers = 2 if name == "quest" else 1
        assert len(read_positions) == 2 * layers and all(abs(n - context / 4) <= 5 for n in read_positions)


def test_quest_scores_are_shares_of_the_heads_that_share(tiny):
    torch.manual_seed(0)
    k = torch.randn(1, 2, 16, 8)
    slab, q = Slab(k, k, torch.zeros(1, 2), METHODS["kv_int"](bits=8).precision), torch.randn(1, 4, 2, 8)
    scores = READINGS["quest"]().scores(LayerQuery(slab, q, 0.3))
    assert scores.shape == (1, 2, 2, 4) and torch.allclose(scores.sum(-1), torch.ones(1, 2, 2))
    pages, each = joined([slab])[0][0].unflatten(1, (4, 4)), []
    for head in range(4):
        bound = torch.stack(
            [torch.maximum(q[0, head, 0] * p.amin(0), q[0, head, 0] * p.amax(0)).sum() for p in pages[head // 2]]
        )
        each.append((bound * 0.3).softmax(0))
    assert torch.allclose(scores[0, :, 0], torch.stack(each).unflatten(0, (2, 2)).mean(1), atol=1e-5)
