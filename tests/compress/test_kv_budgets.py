"""Budgets by what layers need, and merging in place of throwing away, against bisection and loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compress import METHODS
from compress.kv import attached
from compress.kv.allocation import by_prefix, by_spread, by_variance
from compress.kv.eviction.d2o import merge_into, most_similar
from compress.kv.policy import ALLOCATIONS, MASS_ALLOCATIONS, Evicting
from compress.kv.storage import joined


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def layers() -> tuple[list[Tensor], list[Tensor]]:
    """Attention of six layers, ever more even, of two rows of 50 and 41 tokens; the first two positions are certain."""
    torch.manual_seed(0)
    scores = [(torch.randn(2, 3, 50) * (3 - i / 2)).exp() for i in range(6)]
    for one in scores:
        one[..., -50:-48] = torch.inf
        one[1, :, 9:11] = torch.inf
    valid = [(torch.arange(50) >= torch.tensor([0, 9])[:, None, None]).expand(2, 3, 50) for _ in scores]
    return scores, valid


def kept_mass(scores: Tensor, count: int) -> float:
    """Of one row [H, T] with two certain positions: the share that the others keep, mean over heads."""
    found = []
    for head in scores:
        finite = head[torch.isfinite(head)].sort(descending=True).values
        found.append((finite[: max(count - 2, 0)].sum() / finite.sum()).item())
    return sum(found) / len(found)


def test_one_share_of_attention_serves_all_layers(layers):
    """As PrefixKV finds it: by bisection."""
    scores, valid = layers
    target = torch.tensor([20, 12])
    counts = by_prefix(scores, valid, target)
    for row, tokens in ((0, 50), (1, 41)):
        own = [one[row, :, 50 - tokens :] for one in scores]
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            needed = [next(n for n in range(2, tokens + 1) if n == tokens or kept_mass(s, n) >= p) for s in own]
            low, high = (p, high) if sum(needed) <= 6 * target[row] else (low, p)
        found = [int(one[row, 0]) for one in counts]
        assert sum(found) == 6 * target[row] and all(torch.all(one[row] == one[row, 0]) for one in counts)
        assert max(kept_mass(s, n - 1) for s, n in zip(own, found, strict=True)) <= low + 1e-6
        assert min(kept_mass(s, n) for s, n in zip(own, found, strict=True)) >= low - 1e-6
        assert found[-1] > 3 * found[0], "the more even a layer's attention, the more it needs"


def test_budgets_follow_the_variance_of_attention(layers):
    scores, valid = layers
    counts = by_variance(scores, valid, torch.tensor([20, 12]))
    for row, target, tokens in ((0, 20, 50), (1, 12, 41)):
        found = [int(one[row, 0]) for one in counts]
        assert sum(found) == 6 * target and all(abs(found[i] - target) <= 1 for i in (0, 1, 5))
        spread = []
        for one in scores:
            mass = one[row, :, 50 - tokens :]
            heads = [h[torch.isfinite(h)] / h[torch.isfinite(h)].mean() for h in mass]
            variances = torch.tensor([(h - 1).square().mean() for h in heads])
            between = (variances - variances.min()) / (variances.max() - variances.min())
            spread.append(between.mean().item())
        weights = [math.exp(-s) for s in spread[2:5]]
        expected = [3 * target * w / sum(weights) for w in weights]
        assert all(abs(n - e) <= 1 for n, e in zip(found[2:5], expected, strict=True))
    scores[3] = scores[3] ** 8  # nearly all attention on a few positions
    counts = by_variance(scores, valid, torch.tensor([20, 12]))
    assert all(int(one[0, 0]) > 20 / math.e for one in counts), "no layer is left with next to nothing"


def test_layers_of_concentrated_attention_keep_half_of_the_even_share(layers):
    """ScaleKV's refiners, told by entropies written out; the others share the rest, and the sum is the uniform one."""
    scores, valid = layers
    scores, valid = scores[::-1], valid[::-1]  # the most even first, where a pyramid would give more as well
    scores[1], scores[4] = scores[4], scores[1]
    counts = by_spread(scores, valid, torch.tensor([20, 12]))
    for row, target, tokens in ((0, 20, 50), (1, 12, 41)):
        spread = []
        for one in scores:
            heads = [h[torch.isfinite(h)] for h in one[row, :, 50 - tokens :]]
            shares = [[x / sum(h.tolist()) for x in h.tolist()] for h in heads]
            spread.append(sum(-sum(p * math.log(p) for p in h) / math.log(len(h)) for h in shares) / 3)
        found = [int(one[row, 0]) for one in counts]
        refiners = sorted(range(6), key=spread.__getitem__)[:3]
        assert refiners != [3, 4, 5] and 1 in refiners
        assert sum(found) == 6 * target and all(torch.all(one[row] == one[row, 0]) for one in counts)
        for i, n in enumerate(found):
            assert abs(n - target * (0.5 if i in refiners else 1.5)) <= 1


def test_drafters_take_no_more_than_there_is(layers):
    """What they cannot use goes to the others."""
    scores, valid = layers
    counts = by_spread(scores, valid, torch.tensor([40, 36]))
    for row, target, tokens in ((0, 40, 50), (1, 36, 41)):
        found = sorted(int(one[row, 0]) for one in counts)
        assert sum(found) == 6 * target and found[3:] == [tokens] * 3
    (alone,) = by_spread(scores[:1], valid[:1], torch.tensor([20, 12]))
    assert torch.equal(alone, torch.tensor([[20] * 3, [12] * 3]))


def test_only_attention_is_shared_out_by_its_sum():
    for allocation in MASS_ALLOCATIONS:
        for name in ("h2o", "snapkv", "tova", "kvzip", "prefixkv", "d2o"):
            assert METHODS[name](allocation=allocation).allocation == allocation
        with pytest.raises(ValueError, match=f"`allocation` .='{allocation}'. shares out attention.*knorm.*uniform"):
            METHODS["knorm"](allocation=allocation)


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["h2o", "snapkv", "prefixkv", "d2o"])
@pytest.mark.parametrize("allocation", MASS_ALLOCATIONS)
def test_a_batch_is_its_rows(tiny, tokens, name, allocation):
    """With padding, while text is generated too; and the budget is kept over all layers."""
    model, ids = tiny("llama", num_hidden_layers=4).double(), torch.cat(tokens(2, 40))
    mask = (torch.arange(40) >= torch.tensor([[0], [9]])).long()
    model.generation_config.eos_token_id = None
    more = {"observed": 4} if name == "snapkv" else {}
    out = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with attached(model, [METHODS[name](budget=12, allocation=allocation, decoding=True, **more)]) as attachment:
        both = model.generate(ids, attention_mask=mask, **out)
        for i, row in enumerate(mask.bool()):
            alone = model.generate(ids[i : i + 1, row], attention_mask=mask[i : i + 1, row], **out)
            assert torch.equal(alone.sequences[0, -10:], both.sequences[i, -10:])
        cache = attachment.cache()
        read(model, cache, ids, mask)
    lengths = torch.stack([layer.lengths for layer in cache.own])  # [layers, B, H]
    assert torch.equal(lengths.sum((0, 2)), torch.tensor([4 * 2 * 12] * 2))


def merged_by_loops(x: Tensor, keys: Tensor, keep: Tensor, valid: Tensor, threshold: float | None):
    """One row [T, D]; threshold None: the mean cosine. Returns x and the threshold."""
    kept, gone = keep.nonzero()[:, 0].tolist(), (valid & ~keep).nonzero()[:, 0].tolist()
    pairs = []
    for i in gone:
        cosines = [torch.cosine_similarity(keys[i], keys[j], dim=0).item() for j in kept]
        best = max(range(len(kept)), key=cosines.__getitem__)
        pairs.append((i, kept[best], cosines[best]))
    threshold = sum(c for *_, c in pairs) / len(pairs) if threshold is None else threshold
    out = x.clone()
    for j in kept:
        joining = [(i, math.exp(c)) for i, at, c in pairs if at == j and c >= threshold]
        total = math.e + sum(w for _, w in joining)
        out[j] = (math.e * x[j] + sum(w * x[i] for i, w in joining)) / total
    return out, threshold


@pytest.mark.parametrize("merged", ["both", "values"])
def test_evicted_rows_join_the_most_similar_ones(monkeypatch, merged):
    monkeypatch.setattr("compress.kv.eviction.d2o.ROWS", 7)
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2, 30, 8) + 0.7, torch.randn(2, 2, 30, 8)
    valid = torch.arange(30) >= torch.tensor([[0, 0], [6, 6]])[..., None]
    keep, d2o = (torch.rand(2, 2, 30) < 0.4) & valid, METHODS["d2o"](merged=merged, smoothing=0.25)
    first = d2o.merge(Evicting(keys, values, keep, valid, None))
    second = d2o.merge(Evicting(keys, values, keep, valid, torch.full((2, 2), 0.9)))
    for b in range(2):
        for h in range(2):
            row = keep[b, h], valid[b, h]
            expected, threshold = merged_by_loops(values[b, h], keys[b, h], *row, None)
            assert_close(first.carried[b, h].item(), threshold, rtol=1e-5, atol=1e-5)
            assert_close(first.values[b, h][keep[b, h]], expected[keep[b, h]], rtol=1e-4, atol=1e-4)
            moved = 0.75 * 0.9 + 0.25 * threshold
            assert_close(second.carried[b, h].item(), moved, rtol=1e-5, atol=1e-5)
            expected, _ = merged_by_loops(values[b, h], keys[b, h], *row, moved)
            assert_close(second.values[b, h][keep[b, h]], expected[keep[b, h]], rtol=1e-4, atol=1e-4)
            of_keys, _ = merged_by_loops(keys[b, h], keys[b, h], *row, None)
            of_keys = of_keys if merged == "both" else keys[b, h]
            assert_close(first.keys[b, h][keep[b, h]], of_keys[keep[b, h]], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first.values, values)


def test_nothing_to_merge_into_changes_nothing():
    keys, none = torch.randn(1, 1, 6, 4), torch.zeros(1, 1, 6, dtype=torch.bool)
    cosine, nearest = most_similar(keys, none)
    assert torch.all(cosine == -torch.inf)
    assert_close(merge_into(keys, nearest, cosine, none), keys)


def test_merging_changes_what_stays_and_not_how_much(tiny, tokens):
    model, ids, found = tiny("llama"), tokens(1, 40)[0], {}
    for merged in ("both", "values", "none"):
        with attached(model, [METHODS["d2o"](budget=12, merged=merged, allocation="uniform")]) as attachment:
            cache = attachment.cache(traces=True)
            read(model, cache, ids)
        found[merged] = joined(cache.own[0].slabs)[:2], cache.own[0].positions.view
    assert all(torch.equal(positions, found["none"][1]) for _, positions in found.values())
    assert torch.equal(found["values"][0][0], found["none"][0][0])
    assert not torch.allclose(found["both"][0][0], found["none"][0][0])
    assert_close(found["values"][0][1], found["both"][0][1])
    assert not torch.allclose(found["values"][0][1], found["none"][0][1])
    assert set(ALLOCATIONS) & set(MASS_ALLOCATIONS) == set()
