"""Policies score as their papers say, budgets add up, codes lose what they say; all against attention that is written
out."""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS
from compress.kv import CompressedCache, attach, attached
from compress.kv import seen as seen_by
from compress.kv.allocation import ADA_FLOOR, ada, kept, over_layers, pyramid, uniform
from compress.kv.policy import ALLOCATIONS, Policy
from compress.kv.rotation import turn_of
from compress.kv.storage import joined
from compress.method import settle

OTHERWISE = ("at_every_pass", "replaces")  # these have tests of their own
POLICIES = [
    name
    for name, method in METHODS.items()
    if issubclass(method, Policy) and not any(getattr(method, kind) for kind in OTHERWISE)
]
SMALL = {"snapkv": {"observed": 4}, "expected_attention": {"future": 16}}  # knobs for short prompts
KV_INT = METHODS["kv_int"]
NEAR = {"rtol": 1e-3, "atol": 1e-4}


def policy(name: str, **knobs) -> Policy:
    return METHODS[name](**SMALL.get(name, {}), **{"allocation": "uniform", **knobs})


def read(model, cache, ids, mask=None) -> Tensor:
    """Logits of a pass over further tokens; mask: of all tokens."""
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def attentions(model, ids) -> list[Tensor]:
    """Of every layer, [H_kv, heads that share one, n, n], as transformers writes them out."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    return [weights[0].unflatten(0, (heads, -1)) for weights in eager(ids, output_attentions=True).attentions]


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    ids, mask = torch.cat(tokens(2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    return ids, mask


@pytest.fixture
def observed(tiny, tokens, monkeypatch):
    """A model, a cache that observed a prompt, and every layer's queries as they were before rotation."""

    def make(architecture: str, **more: bool) -> tuple:
        model, queries = tiny(architecture), []
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.fill_(1.5)
        where = sys.modules[type(model).__module__]
        if rotate := getattr(where, "apply_rotary_pos_emb", None):
            monkeypatch.setattr(
                where, rotate.__name__, lambda q, *args, **more: queries.append(q) or rotate(q, *args, **more)
            )
        with attached(model) as attachment:
            cache = attachment.cache(observes=True, **more)
            queries.clear()  # those of the trial by which the cache learns how keys are rotated
            read(model, cache, tokens(1, 40)[0])
        return model, cache, queries[: len(cache.layers)]

    return make


@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_scores_of_attention(observed, tokens, monkeypatch, architecture, traces):
    """SnapKV, TOVA, H2O; with the model's soft caps, and with its sinks, which take a share; a few queries at a
    time."""
    monkeypatch.setattr("compress.kv.seen.ROWS", 16), monkeypatch.setattr("compress.kv.attention.ROWS", 16)
    model, cache, _ = observed(architecture, traces=traces)
    snapkv, tova, h2o = METHODS["snapkv"](observed=8), METHODS["tova"](), METHODS["h2o"](budget=0.5)
    for layer in cache.own:
        seen, w = (
            layer.seen_by(layer.queries, layer.asked),
            attentions(model, tokens(1, 40)[0])[layer.number],
        )  # [H, G, 40, 40]
        assert_close(seen.attention(40)[0], w, **NEAR)
        assert_close(seen.summed_attention()[0], w.sum((1, 2)), **NEAR)
        assert_close(seen.largest_attention()[0], w.amax((1, 2)), **NEAR)
        remembers = replace(seen, memory=h2o.remember(replace(seen, memory=torch.ones(seen.keys.shape[:3]))))
        smooth = torch.nn.functional.pad(w[:, :, -8:, :32].mean((1, 2)), (2, 2)).unfold(-1, 5, 1).mean(-1)
        for scores, last, expected in (
            (snapkv.scores(seen), 8, smooth),
            (tova.scores(seen), 1, w[:, :, -1, :39].mean((0, 1)).expand(len(w), -1)),
            (h2o.scores(remembers), 10, 1 + w.sum((1, 2))[:, :30]),
        ):
            assert torch.all(scores[0, :, 40 - last :] == torch.inf)
            assert_close(scores[0, :, : 40 - last], expected, **NEAR)


def test_scores_of_keys(observed):
    """Key norms, KeyDiff, StreamingLLM."""
    _, cache, _ = observed("llama")
    for layer in cache.own:
        seen = layer.seen_by(layer.queries, layer.asked)
        norms, differences, streaming = (METHODS[name]().scores(seen)[0] for name in ("knorm", "keydiff", "streaming"))
        for head, keys in enumerate(seen.keys[0]):
            lengths = keys.square().sum(-1).sqrt()
            mean = (keys / lengths[:, None]).mean(0)
            assert_close(norms[head], -lengths)
            assert_close(differences[head], -(keys @ mean) / lengths / mean.square().sum().sqrt())
            assert torch.all(streaming[head, :4] == torch.inf) and torch.all(streaming[head, 4:].diff() > 0)
            assert streaming[head, 4:].isfinite().all()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_kvzip_is_the_most_attention_of_a_second_reading(tiny, tokens, architecture):
    model, prompt = tiny(architecture), tokens(1, 40)[0]
    plain = DynamicCache(config=model.config)
    read(model, plain, prompt)
    with attached(model, [METHODS["kvzip"](budget=1.0)]) as attachment:
        cache = attachment.cache()
        read(model, cache, prompt)
    weights = attentions(model, torch.cat([prompt, prompt], 1))
    for number, layer in enumerate(cache.layers):
        assert layer.get_seq_length() == 40
        if layer in cache.own:
            assert_close(layer.memory.view[0], weights[number][..., 40:, :40].amax((1, 2)), rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(layer.keys, plain.layers[number].keys) and torch.equal(
                layer.values, plain.layers[number].values
            )


def test_kvzip_reads_replies_again_too(tiny, tokens):
    """Else a second turn drops all that was written in the first."""
    model, text = tiny("llama"), tokens(1, 40)[0]
    with attached(model, [METHODS["kvzip"](budget=1.0)]) as attachment:
        cache = attachment.cache()
        for part in text.split([20, *[1] * 10, 10], 1):
            read(model, cache, part)
    assert all(torch.all(layer.memory.view > 0) for layer in cache.own)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "phi", "gemma3_text", "gpt_oss"])
def test_queries_are_turned_forth_and_back(observed, architecture):
    model, cache, queries = observed(architecture)
    for layer in cache.own:
        before, turn = queries[layer.number], turn_of(model, layer.number)
        width = before.shape[-1]
        back = turn(layer.queries, torch.arange(40)[None], True)
        assert not torch.allclose(layer.queries[..., :width], before, atol=0.1)
        assert_close(back[..., :width], before, **NEAR)
        assert torch.equal(back[..., width:], layer.queries[..., width:])
        assert_close(turn(back, torch.arange(40)[None], False), layer.queries, **NEAR)


def test_expected_attention_by_brute_force(observed):
    _, cache, queries = observed("llama")
    method, D = METHODS["expected_attention"](future=7, sinks=3, epsilon=0.02), 16
    turned = torch.zeros(D, D)  # mean over positions to come of the matrix by which columns are rotated
    for j in range(40, 47):
        for a, b in ((i, i + D // 2) for i in range(D // 2)):
            cos, sin = (f(j * 10000 ** (-2 * a / D)) / 7 for f in (math.cos, math.sin))
            turned[[a, b, b, a], [a, b, a, b]] += torch.tensor([cos, cos, sin, -sin])
    for before, layer in zip(queries, cache.own, strict=True):
        found = method.scores(layer.seen_by(layer.queries, layer.asked))[0]
        for head, (keys, values) in enumerate(zip(*(x[0] for x in joined(layer.slabs)[:2]), strict=True)):
            expected, keys = torch.zeros(37), keys[3:]  # sinks do not take part
            for q in before[0, 2 * head : 2 * head + 2, 3:]:
                mean, covariance = turned @ q.mean(0), turned @ torch.cov(q.T, correction=0) @ turned.T
                expected += torch.stack([k @ mean / D**0.5 + k @ covariance @ k / (2 * D) for k in keys]).softmax(0) / 2
            assert torch.all(found[head, :3] == torch.inf)
            assert_close(found[head, 3:], (expected + 0.02) * values[3:].norm(dim=-1), rtol=1e-3, atol=1e-5)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("traces", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", POLICIES)
def test_an_observing_cache_is_compressed_as_if_the_policy_had_been_there(tiny, padded, name, traces):
    """Also once more was read."""
    model, (ids, mask) = tiny("gemma3_text" if name != "knorm" else "llama").double(), padded
    with attached(model) as attachment:
        observed = attachment.cache(observes=True, traces=traces)
        for begin, end in ((0, 30), (30, 40)):
            read(model, observed, ids[:, begin:end], mask[:, :end])
            for allocation in ALLOCATIONS:
                one = policy(name, budget=0.4, allocation=allocation)
                found, whole = observed.compressed(one), CompressedCache(model, one, traces=traces)
                read(model, whole, ids[:, :end], mask[:, :end])
                for a, b in zip(found.own, whole.own, strict=True):
                    assert torch.equal(a.lengths, b.lengths) and a.lengths.max() < end and a.seen == b.seen == end
                    assert_close(joined(a.slabs), joined(b.slabs), rtol=1e-9, atol=1e-9)
                    assert not traces or torch.equal(a.positions.view, b.positions.view)
                longer = torch.cat([mask[:, :end], mask[:, -1:]], 1)
                assert_close(
                    *(read(model, cache, ids[:, :1], longer) for cache in (found, whole)), rtol=1e-6, atol=1e-6
                )


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", POLICIES)
def test_shared_observation_gives_the_same_caches_as_separate_observation(tiny, padded, name):
    """Copies of one observing cache, of several policies and budgets, are those of caches that made one copy alone."""
    model, (ids, mask) = tiny("llama").double(), padded

    def observed() -> CompressedCache:
        cache = attachment.cache(observes=True, traces=True)
        read(model, cache, ids, mask)
        return cache

    with attached(model) as attachment:
        shared = observed()
        for other in ("h2o", "snapkv"):
            shared.compressed(policy(other, budget=0.7))
        for budget in (0.5, 0.2, 4):
            one = policy(name, budget=budget)
            for a, b in zip(shared.compressed(one).own, observed().compressed(one).own, strict=True):
                assert_close(joined(a.slabs), joined(b.slabs), rtol=0, atol=0)
                assert torch.equal(a.positions.view, b.positions.view)
                assert a.memory is None or torch.equal(a.memory.view, b.memory.view)


@pytest.mark.parametrize("name", [name for name in POLICIES if METHODS[name].budget_free])
def test_scores_that_no_budget_changes(observed, name):
    """Policies with `budget_free` keep their word."""
    _, cache, _ = observed("llama")
    layer = cache.own[0]
    seen = layer.seen_by(layer.queries, layer.asked)
    scores = [policy(name, budget=budget, allocation="uniform").scores(seen) for budget in (0.1, 0.5, 30)]
    assert all(torch.equal(scores[0], one) for one in scores[1:]) and not METHODS[name].remembers


def test_places_matter_only_once_something_has_gone(tiny, tokens):
    model = tiny("llama")
    with attached(model, [policy("knorm", budget=10, decoding=True)]) as attachment:
        cache = attachment.cache(traces=True)
        layer, ids = cache.own[0], tokens(1, 40)[0]
        cache.paused = True
        read(model, cache, ids)
        queries, asked = torch.randn(1, 4, 40, 16), torch.ones(1, 40, dtype=torch.bool)
        before = layer.seen_by(queries, asked)
        assert before.places is None
        written_out = replace(before, places=layer.positions.view)
        assert_close(before.attention(40), written_out.attention(40))
        cache.paused = False
        read(model, cache, ids[:, :1])
        for _ in range(8):
            read(model, cache, ids[:, :1])
        assert int(layer.lengths.max()) < layer.seen
        assert layer.seen_by(queries[:, :, :1], asked[:, :1]).places is not None


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("again", ["reset", "crop"])
@pytest.mark.parametrize("name", POLICIES)
def test_an_observing_cache_forgets(tiny, padded, name, again):
    model, ids, one = tiny("llama"), padded[0], policy(name, budget=10)
    with attached(model) as attachment:
        observed, fresh = attachment.cache(observes=True), attachment.cache(observes=True)
        read(model, observed, ids.flip(0))
        observed.compressed(one)
        observed.reset() if again == "reset" else observed.crop(-40)
        for cache in (observed, fresh):
            read(model, cache, ids)
        for a, b in zip(observed.compressed(one).own, fresh.compressed(one).own, strict=True):
            assert_close(joined(a.slabs), joined(b.slabs))
            assert a.memory is None or torch.equal(a.memory.view, b.memory.view)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "name, allocation",
    [
        pytest.param(name, one, marks=[pytest.mark.slow] * ((turn + at) % 2))
        for turn, name in enumerate(name for name in POLICIES if not METHODS[name].runs_model)
        for at, one in enumerate(ALLOCATIONS)
    ],
)
def test_a_budget_is_kept_while_text_is_generated(tiny, padded, tokens, name, allocation):
    """To within the eight tokens between two evictions, however often they come."""
    model, (ids, mask), more, totals = tiny("llama"), padded, tokens(1, 30, seed=9)[0], []
    with attached(model, [policy(name, budget=24, allocation=allocation, decoding=True)]) as attachment:
        cache = attachment.cache(traces=True)
        read(model, cache, ids, mask)
        for token in more.split(1, 1):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            read(model, cache, token.expand(2, 1), mask)
            lengths = torch.stack([layer.lengths for layer in cache.own])  # [layers, B, H]
            assert allocation != "uniform" or 24 <= lengths.min() <= lengths.max() <= 24 + 8
            totals.append(lengths.sum((0, 2)))
    slack = 4 if allocation == "pyramid" else 0  # it rounds
    assert 4 * 24 - slack <= torch.stack(totals).min() and torch.stack(totals).max() <= 4 * (24 + 7) + slack
    for layer in cache.own if name == "streaming" and allocation in ("uniform", "ada") else []:
        assert all(at[:4].tolist() == [0, 1, 2, 3] and len(at) >= 24 for row in layer.kept_positions() for at in row)


def test_rows_are_due_by_themselves(tiny, tokens):
    """A share is more of a longer row, and so is an eighth of it."""
    model, ids, more, found = tiny("llama"), torch.cat(tokens(2, 120)), tokens(1, 40, seed=9)[0], []
    mask = (torch.arange(160) >= torch.tensor([[0], [60]])).long()
    with attached(model, [policy("knorm", budget=0.9, decoding=True)]) as attachment:
        for rows, begin in (([0, 1], 0), ([0], 0), ([1], 60)):
            cache = attachment.cache()
            read(model, cache, ids[rows, begin:], mask[rows, begin:120])
            for n in range(40):
                read(model, cache, more[:, n : n + 1].expand(len(rows), 1), mask[rows, begin : 121 + n])
                found.append(cache.own[0].lengths[:, 0])
    both, alone = (
        torch.stack(found[:40]),
        torch.stack([torch.cat(pair) for pair in zip(found[40:80], found[80:], strict=True)]),
    )
    assert torch.equal(both, alone)
    assert [n for n in range(1, 40) if both[n, 0] < both[n - 1, 0]] != [
        n for n in range(1, 40) if both[n, 1] < both[n - 1, 1]
    ]


@pytest.mark.parametrize("by_kernel", [True, False])
def test_h2o_remembers_all_attention(tiny, tokens, by_kernel):
    model, text = tiny("llama"), tokens(1, 60)[0]
    with attached(model, [METHODS["h2o"](budget=1.0, decoding=True)]) as attachment:
        cache = attachment.cache()
        cache.by_kernel = by_kernel
        for part in text.split([40, 1, 1, 1, 5, 1, 10, 1], 1):
            read(model, cache, part)
    for layer, weights in zip(cache.own, attentions(model, text), strict=True):
        assert_close(layer.memory.view[0], weights.sum((1, 2)), rtol=1e-3, atol=1e-3)


def test_budgets_add_up():
    layers, valid, target = 5, torch.ones(3, 4, 50, dtype=torch.bool), torch.tensor([20, 15, 7])
    valid[1, :, :20], valid[2, :, :43] = False, False
    scores = [torch.rand(3, 4, 50) * torch.rand(1, 4, 1) for _ in range(layers)]
    tokens = valid.sum(-1)
    even = uniform(target, tokens)
    assert even.tolist() == [[20] * 4, [15] * 4, [7] * 4]
    steps = [pyramid(target, tokens, tokens[:, 0], layer, layers) for layer in range(layers)]
    assert torch.all((sum(steps) - layers * even).abs() < layers) and torch.equal(
        pyramid(target, tokens, tokens[:, 0], 0, 1), even
    )
    assert all(torch.all(a >= b) and a[0, 0] > b[0, 0] for a, b in zip(steps, steps[1:], strict=False))
    by_head, over_all = [ada(one, valid, target) for one in scores], over_layers(scores, [valid] * layers, target)
    assert torch.equal(torch.stack(by_head).sum(-1), even.sum(-1).expand(layers, -1))
    assert torch.equal(sum(over_all).sum(-1), layers * even.sum(-1)) and torch.stack(over_all).amin() >= 1
    assert all(torch.all(one >= (even * ADA_FLOOR).long()) for one in by_head) and len(by_head[0][0].unique()) > 1
    assert all(torch.all(one <= tokens) for one in (*steps, *by_head, *over_all))
    stay, every = (torch.cat(found, 1)[0] for found in ([*map(kept, scores, [valid] * layers, over_all)], scores))
    least = (
        every.masked_fill(~stay, torch.inf).amin(1)[stay.sum(1) > 1].min()
    )  # heads that keep one keep it in any case
    assert torch.all(stay | (every < least))
    for i in range(3):
        alone, real, aim = [one[i : i + 1] for one in scores], valid[i : i + 1], target[i : i + 1]
        assert torch.equal(ada(alone[0], real, aim), by_head[0][i : i + 1])
        assert torch.equal(torch.cat(over_layers(alone, [real] * layers, aim)), torch.stack(over_all)[:, i])


def test_budgets_of_heads_that_differ_already_or_not_at_all():
    """What a head that kept little cannot use, others can; heads that cannot be told apart keep the same."""
    valid, every = torch.ones(1, 4, 40, dtype=torch.bool), torch.ones(1, 4, 40, dtype=torch.bool)
    valid[:, 0, :36] = False
    target, scores, certain = torch.tensor([20]), torch.rand(1, 4, 40), torch.full((1, 4, 40), torch.inf)
    assert torch.all(ada(certain, every, target) == 20)
    assert all(torch.all(one == 20) for one in over_layers([certain] * 2, [every] * 2, target))
    assert ada(scores, valid, target).sum() == 4 * 20
    assert sum(one.sum() for one in over_layers([scores, scores], [valid, valid], target)) == 2 * 4 * 20


def test_which_stay():
    inf, valid = torch.inf, torch.ones(1, 4, 6, dtype=torch.bool)
    scores = torch.tensor(
        [[1.0, 5, 5, 5, 2, 9], [inf, 1, inf, 3, inf, 2], [inf, inf, inf, 3, 4, 5], [9, 9, 0, -1, -2, -3]]
    )[None]
    valid[0, 3, :2] = False
    stay = kept(scores, valid, torch.tensor([[3, 4, 2, 3]]))
    assert [row.nonzero().flatten().tolist() for row in stay[0]] == [[2, 3, 5], [0, 2, 3, 4], [1, 2], [2, 3, 4]]
    assert (
        torch.equal(kept(scores, valid, torch.full((1, 4), 9)), valid)
        and not kept(scores, valid, torch.zeros(1, 4)).any()
    )


def test_errors_name_the_knob():
    for name, wrong, message in (
        *(
            ("snapkv", {"budget": budget}, r"`budget` \(=")
            for budget in (0, 0.0, 1.5, -3, -0.5, True, "half", math.nan)
        ),
        ("snapkv", {"allocation": "equal"}, "`allocation`.*uniform, pyramid, ada, global"),
        ("snapkv", {"pool": 4}, "`pool`.*odd"),
        ("kvzip", {"decoding": True}, "`decoding`.*kvzip"),
        ("kv_int", {"bits": 3}, "`bits`"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS[name](**wrong)


@pytest.mark.parametrize("names", [["snapkv", "knorm"], ["kv_int", "snapkv", "kv_int"]], ids=str)
def test_one_policy_and_one_storage(tiny, names):
    methods = [METHODS[name]() for name in names]
    with pytest.raises(ValueError, match="`methods`.*one (policy|storage)"):
        attach(tiny("llama"), methods)
    with pytest.raises(ValueError, match="`recipe`"):
        settle(methods)


@pytest.mark.parametrize(
    "architecture, message", [("llama", "`inputs_embeds`.*`input_ids`"), ("gpt2", "128 positions")]
)
def test_kvzip_needs_tokens_and_positions_to_read_again(tiny, tokens, architecture, message):
    model, ids = tiny(architecture), tokens(1, 100)[0]
    given = {"inputs_embeds": model.get_input_embeddings()(ids)} if architecture == "llama" else {"input_ids": ids}
    with attached(model, [METHODS["kvzip"]()]) as attachment, pytest.raises(ValueError, match=message):
        model(**given, past_key_values=attachment.cache())


@pytest.mark.parametrize("kind", ["plain", "padded", "capped", "sinks", "places"])
@pytest.mark.parametrize("pieces", [(1 << 19, 16), (1, 7)], ids=["at once", "in pieces"])
def test_attention_of_all_queries_is_that_of_a_softmax(kind, pieces, monkeypatch):
    """The largest and the sum, of 23 queries behind 14 positions, written out in float64."""
    monkeypatch.setattr(seen_by, "ON_CPU", pieces)
    B, H, G, T, n, D = 2, 2, 3, 37, 23, 8
    keys, queries = torch.randn(B, H, T, D), torch.randn(B, H * G, n, D)
    valid, asked = torch.ones(B, H, T, dtype=torch.bool), torch.ones(B, n, dtype=torch.bool)
    at, places = torch.arange(T - n, T).expand(B, n), None
    if kind == "padded":
        valid[0, :, :19], asked[0, :5] = False, False
    if kind == "places":  # of each head other positions have gone, all that the first queries see among them
        places = torch.stack([torch.randperm(2 * T)[:T].sort().values for _ in range(B * H)]).view(B, H, T) + T - n + 2
    more = {"softcap": 1.5 if kind == "capped" else None, "sinks": torch.randn(H * G) if kind == "sinks" else None}
    seen = seen_by.Seen(
        keys, keys, valid, queries, asked, 0.7, at, asked.sum(1), 0, lambda x, *_: x, places=places, **more
    )
    expected = torch.zeros(2, B, H, T, dtype=torch.float64)
    for b in range(B):
        for h in range(H * G):
            for i in range(n):
                s = keys[b, h // G].double() @ queries[b, h, i].double() * 0.7
                s = 1.5 * torch.tanh(s / 1.5) if kind == "capped" else s
                order = torch.arange(T) if places is None else places[b, h // G]
                visible = (order <= at[b, i]) & valid[b, h // G]
                weight = s.exp() * visible
                total = weight.sum() + (more["sinks"][h].double().exp() if kind == "sinks" else 0)
                if asked[b, i] and visible.any():
                    expected[0, b, h // G] = torch.maximum(expected[0, b, h // G], weight / total)
                    expected[1, b, h // G] += weight / total
    found = seen.largest_attention()
    torch.testing.assert_close(found.double(), expected[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(seen.summed_attention().double(), expected[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(seen.largest_attention(11), found[..., :11])
