"""`fit`: the best choice of every layer under limits, what it says of impossible limits, and recipes with given
choices."""

import copy
import dataclasses
import functools
import itertools
import re

import pytest
import torch

from compress import METHODS, Wishes, apply, calibration, fit, load_compressed, load_model, save_compressed
from compress.allocation.budget import bytes_beside
from compress.allocation.predictions import ScaledLoss, divergence
from compress.checkpoint.fits import check_save_format
from compress.formats import bits_of
from compress.kv.attach import attached_methods, attachment_of
from compress.linear import compressed_linears, sharing_copy
from compress.recipe import parse_recipe
from compress.recover.distil import Prepared
from compress.search.caches import SCORED, cache_choices
from compress.search.choices import STANDARD, search_method
from compress.search.library import measure_library, measure_times
from compress.search.program import NAMES, Costs, LayersProgram
from compress.search.wishes import wishes_of
from compress.walk.blocks import targets
from compress.walk.ends import solve
from compress.walk.finite import NotFinite
from compress.walk.statistics import Collector
from compress.walk.walk import stored_as
from compress.weights.mixed import windows
from eval.machine.size import size
from eval.record.rows import typed
from eval.speed import speed
from notebooks.study.caches import cache_timer
from reports.page import search

BLOCKS = "rtn(bits={2, 4, 8}, group_size=16)"
ENDS = "rtn(bits={4, 8}, group_size=16, where=embedding)"
TEXTS = [f"rtn(bits={bits}, group_size=16)" for bits in (2, 4, 8)]


def chooser(choices=BLOCKS):
    return search_method(choices, tokens=96)


def timer(models):
    """Made-up speeds: the smaller the model, the faster it decodes."""
    sizes = {name: sum(m.nbytes for m in compressed_linears(model).values()) for name, model in models.items()}
    return {name: (100.0, 1000.0) if not one else (100.0 + 1e6 / one, 900.0) for name, one in sizes.items()}


@pytest.fixture
def model(tiny):
    return tiny("llama")


@pytest.fixture
def batches(tokens):
    return tokens()


@pytest.fixture(autouse=True)
def no_losses_of_before(tmp_path, monkeypatch):
    """Each test has a folder of losses of its own; compiled kernels stay where they are."""
    monkeypatch.setattr("compress.search.library.cache_folder", lambda name: tmp_path / name)


@pytest.mark.parametrize("seed", range(4))
def test_the_program_finds_the_least_of_all_combinations(seed):
    """Under two limits, and says so where there are none that keep them."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"l{i}": {f"c{j}": Costs(*torch.rand(4, generator=generator).tolist()) for j in range(3)} for i in range(5)
    }
    program = LayersProgram(layers)
    every = [sum(combination, Costs(0, 0)) for combination in itertools.product(*(c.values() for c in layers.values()))]
    for limits in ({"bytes": 2.5}, {"bytes": 2.2, "decode": 2.2}, {"loss": 1.8, "prefill": 2.0}, {"bytes": 0.1}):
        minimise = "loss" if "bytes" in limits else "bytes"
        kept = [one for one in every if all(getattr(one, name) <= limit for name, limit in limits.items())]
        chosen = program.best(minimise, limits)
        if not kept:
            assert chosen is None
            continue
        found = program.of(chosen)
        assert getattr(found, minimise) == pytest.approx(min(getattr(one, minimise) for one in kept), rel=1e-3)
        assert all(getattr(found, name) <= limit * (1 + 1e-6) for name, limit in limits.items())
    assert set(NAMES) == {"bytes", "loss", "decode", "prefill"}


@pytest.mark.parametrize("limit", [1.0, 1.6, 2.2])
def test_tied_choices_are_taken_together_or_not(limit):
    """The least of all combinations that keep the ties; no uniform choice is a tied one."""
    generator = torch.Generator().manual_seed(3)
    layers = {
        f"l{i}": {f"c{j}": Costs(*torch.rand(4, generator=generator).tolist()) for j in range(2)} for i in range(5)
    }
    for i, loss in enumerate((0.1, 0.2, 0.3, 0.3)):
        layers[f"l{i}"]["gone"] = Costs(0.0, loss)
    tied = [{"l0": "gone", "l1": "gone"}, {"l2": "gone", "l3": "gone"}]
    program = LayersProgram(layers, tied)
    every = [dict(zip(layers, texts, strict=True)) for texts in itertools.product(*layers.values())]
    kept = [one for one in every if all(len({one[n] == "gone" for n in pair}) == 1 for pair in tied)]
    within = [program.of(one).loss for one in kept if program.of(one).bytes <= limit]
    assert program.of(program.best("loss", {"bytes": limit})).loss == pytest.approx(min(within), rel=1e-3)
    assert "gone" not in program.uniform("loss", {"bytes": 9.0}, [["l0", "l1", "l2", "l3"], ["l4"]]).values()
    front = [one.loss for one in program.front("loss", "bytes", {}, 4)]
    assert len(front) == 4 and front == sorted(front, reverse=True)


def test_attention_layers_and_mlps_may_be_left_out(tiny, tokens):
    """Predicted bytes are those of the model that is made, losses those of models without one part, times those of a
    thinner model; the recipe makes the model again."""
    model, batches = tiny("llama", num_hidden_layers=4), tokens()

    def by_weights(models):
        sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
        return {
            name: (1e6 / (sizes[name] + sum(w.nbytes for w in compressed_linears(m).values())),) * 2
            for name, m in models.items()
        }

    method, kinds = chooser("rtn(bits={4, 8}, group_size=16)"), ("attention", "mlp")
    library = measure_library(model, batches, method, kinds=kinds)
    (layers,) = {tuple(names) for names in library.parts["mlp"].values() if "model.layers.1.mlp.gate_proj" in names}
    drop = METHODS["layer_drop"](target="mlp", layers="1")
    gone = apply([drop], copy.deepcopy(model), batches).model
    probes = windows(batches, method.tokens)
    with torch.no_grad():
        expected = divergence([model(ids).logits for ids in probes], [gone(ids).logits for ids in probes])
    assert sum(library.layers[name].choices["without mlp"].loss for name in layers) == pytest.approx(expected, rel=1e-4)
    assert [len(of) for of in library.parts.values()] == [3, 3], "one of each must stay"
    times = measure_times(library.method, model, by_weights, batches=batches, kinds=kinds)
    whole = by_weights({"": model})[""][0]
    thin = by_weights(
        {"": apply([METHODS["layer_drop"](target="mlp", layers="2")], copy.deepcopy(model), batches).model}
    )
    assert times.decode["without mlp"] == pytest.approx(whole / thin[""][0]), "of a model without one of them"
    costs = library.costs(times)
    assert sum(costs[name]["without mlp"].decode for name in layers) == pytest.approx(whole / thin[""][0] - 1)

    wishes = Wishes(max_bytes=0.7 * size(model).stored_bytes, min_decode=1.55, times=True)
    found = fit(model, batches, wishes, method=method, timer=by_weights, drops="mlp, attention")
    kept, used = found.record.rounds[found.record.kept], found.record.used
    assert used["without mlp"] + used["without attention"] > 0 and sum(used.values()) == 28
    assert kept.bytes == kept.point.bytes and len(compressed_linears(found.model)) == sum(list(used.values())[:2])
    again = apply(found.result.recipe, copy.deepcopy(model), batches).model
    assert torch.equal(again(batches[0]).logits, found.model(batches[0]).logits)
    tight = Wishes(max_bytes=0.97 * method.smallest_size(model))  # which only dropping can keep
    found = fit(model, batches, tight, method=method, drops="mlp")
    assert found.record.rounds[found.record.kept].bytes <= tight.max_bytes and found.record.used["without mlp"] > 0
    for wrong in ("head", "mlp, mlp"):
        with pytest.raises(ValueError, match=r"`drops` .* must name parts of blocks"):
            fit(model, batches, wishes, method=method, timer=by_weights, drops=wrong)
    with pytest.raises(ValueError, match=r"`chosen` .* is for 25 linears .* this model has 28"):
        apply(found.result.recipe[1:], copy.deepcopy(model), batches)


def test_parts_whose_linears_are_stored_with_others_stay(tiny, tokens):
    """Phi's queries, keys and values read what its MLP reads, and get the same choice."""
    model, batches = tiny("phi", num_hidden_layers=3), tokens()
    with pytest.warns(UserWarning, match="`drops`: no attention of this model may be left out"):
        library = measure_library(model, batches, chooser(), kinds=("attention",))
    assert library.parts == {"attention": {}} and library.tied == []
    skipping = search_method(BLOCKS, skip="*.0.*", tokens=96)
    library = measure_library(tiny("llama", num_hidden_layers=4), batches, skipping, kinds=("mlp",))
    assert len(library.parts["mlp"]) in (2, 3) and 0 not in library.parts["mlp"]


def test_parts_without_which_a_model_does_not_run_are_refused_before_the_work(tiny, tokens, monkeypatch):
    monkeypatch.setattr("compress.weights.mixed.Mixed.candidates", None)
    with pytest.raises(ValueError, match=r"layer_drop"):
        fit(
            tiny("opt", do_layer_norm_before=False),
            tokens(),
            Wishes(max_bytes=1e9),
            method=chooser(),
            drops="attention",
        )


def test_one_choice_for_all_layers_of_a_kind():
    """Compared with all such combinations; a choice that one layer of a kind lacks is none."""
    generator = torch.Generator().manual_seed(0)
    layers = {
        f"l{i}": {f"c{j}": Costs(*torch.rand(4, generator=generator).tolist()) for j in range(4 - (i == 2))}
        for i in range(5)
    }
    program, kinds = LayersProgram(layers), [["l0", "l1", "l2"], ["l3", "l4"], []]
    assert program.uniform("loss", {"bytes": 0.1}, kinds) is None
    for limit in (2.0, 2.5, 5.0):
        every = [
            dict.fromkeys(kinds[0], f"c{i}") | dict.fromkeys(kinds[1], f"c{j}") for i in range(3) for j in range(4)
        ]
        kept = [one for one in every if program.of(one).bytes <= limit]
        assert program.uniform("loss", {"bytes": limit}, kinds) == (
            min(kept, key=lambda one: program.of(one).loss) if kept else None
        )


def test_limits_are_read_as_users_write_them():
    found = wishes_of(max_bytes="1.5MB", min_decode="2x", max_kl=0.1)
    assert (found.max_bytes, found.min_decode, found.times, found.max_kl) == (1.5e6, 2.0, True, 0.1)
    assert wishes_of(max_bytes="1GiB").max_bytes == 1 << 30 and wishes_of(min_prefill="300").min_prefill == 300
    assert [wishes_of(**one).minimises for one in ({"max_bytes": "1MB"}, {"max_kl": 0.1})] == ["loss", "bytes"]
    assert wishes_of(max_bytes="1MB", max_kl=0.1).minimises == "decode"
    for given, message in (
        ({}, "one of `max_bytes`, `min_decode`"),
        ({"max_bytes": "80 bananas"}, r"`max_bytes` \(='80 bananas'\) must be a number of bytes"),
        ({"max_bytes": "-1MB"}, "`max_bytes` .* must be a number of bytes"),
        ({"min_decode": "fast"}, r"`min_decode` \(='fast'\) must be tokens per second"),
        ({"min_decode": "0"}, r"`min_decode` \(=0.0\) must be a number above 0"),
        ({"max_kl": float("nan")}, r"`max_kl` \(=nan\) must be a number above 0"),
        ({"min_decode": "2x", "min_prefill": "100"}, "both be tokens per second, or both multiples"),
        ({"max_ttft": "200"}, r"`max_ttft` \(='200'\) must be a time above 0 with its unit"),
        ({"max_ttft": "0ms"}, r"`max_ttft` \(='0ms'\) must be a time above 0"),
        ({"max_ttft": "1s", "min_prefill": "9"}, r"`min_prefill` \(=9.0\) and `max_ttft` \(=1.0\) limit the same"),
        ({"max_ttft": "1s", "prompt": 0}, r"`prompt` \(=0\) must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            wishes_of(**given)


def test_a_model_within_bytes_that_loses_least(model, batches):
    """The size of the model that is made is the predicted one, and more bytes lose less."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = []
    for share in (0.4, 0.6):
        limit = share * size(model.to(torch.bfloat16)).stored_bytes
        model.float()
        found = fit(model, batches, Wishes(max_bytes=limit), method=chooser(f"{BLOCKS}; {ENDS}"))
        kept = found.record.rounds[found.record.kept]
        made = size(found.model.to(torch.bfloat16)).stored_bytes
        assert made == pytest.approx(kept.point.bytes, rel=0.002) and made <= limit
        losses.append(kept.divergence)
    assert losses[1] < losses[0] and len({point.bytes for point in found.record.front}) > 3
    assert sum(found.record.used.values()) == len(targets(model, "", "all"))
    assert all(torch.equal(before[name].bfloat16().float(), t) for name, t in model.state_dict().items())


def test_low_rank_zeros_and_activations_in_8_bits_are_choices(model, batches):
    """Beside codes; each has its own bytes, and the model that is made has those of the prediction."""
    method = chooser("int8; fp8; svd(ratio=0.5); sparsegpt(ratio=0.5); rtn(bits=4, group_size=16)")
    library = measure_library(model, batches, method)
    losses = {text: sum(layer.choices[text].loss for layer in library.layers.values()) for text in method.methods}
    assert 0 < losses["int8"] < losses["rtn(bits=4, group_size=16)"] < losses["svd(ratio=0.5)"]
    bytes_of = {text: sum(layer.choices[text].cost for layer in library.layers.values()) for text in method.methods}
    limit = library.beside + (bytes_of["int8"] + bytes_of["rtn(bits=4, group_size=16)"]) / 2
    found = fit(model, batches, Wishes(max_bytes=limit), method=method)
    kept = found.record.rounds[found.record.kept]
    assert kept.bytes == pytest.approx(kept.point.bytes, rel=0.002) and kept.bytes <= limit
    assert {text for text, count in found.record.used.items() if count} >= {"rtn(bits=4, group_size=16)"}
    assert sum(found.record.used[text] for text in ("int8", "fp8")) > 0


def test_a_limit_of_the_loss_is_kept_by_the_model_that_is_made(model, batches):
    """Losses that do not add up are corrected by what whole models lose."""
    free = fit(model, batches, Wishes(max_bytes=1e9), method=chooser())
    smallest = fit(model, batches, Wishes(max_kl=1e3), method=chooser())
    least, most = (one.record.rounds[0].divergence for one in (free, smallest))
    assert least < most and set(filter(smallest.record.used.get, smallest.record.used)) == {TEXTS[0]}
    limit = (least * most) ** 0.5
    found = fit(model, batches, Wishes(max_kl=limit), method=chooser())
    kept = found.record.rounds[found.record.kept]
    assert kept.divergence <= 1.02 * limit and found.record.minimised == "bytes"
    assert not any("is not kept" in sentence for sentence in found.record.sentences())
    broken = dataclasses.replace(found.record, max_kl=kept.divergence / 2)
    assert "The limit of the divergence is not kept" in broken.sentences()[-1]
    assert free.record.rounds[0].point.bytes >= kept.point.bytes > smallest.record.rounds[0].point.bytes


def test_speeds_are_predicted_from_models_with_one_choice(model, batches):
    library = measure_library(model, batches, chooser())
    times = measure_times(library.method, model, timer)
    assert list(times.decode) == TEXTS and times.decode[TEXTS[0]] < times.decode[TEXTS[2]] < 1 < times.prefill[TEXTS[0]]
    program = LayersProgram(library.costs(times))
    for text in TEXTS:
        costs = program.of(dict.fromkeys(library.layers, text))
        assert 1 + costs.decode == pytest.approx(times.decode[text])
    fastest = 1 / times.decode[TEXTS[0]]
    found = fit(model, batches, Wishes(min_decode=(1 + fastest) / 2, times=True), method=chooser(), timer=timer)
    assert found.record.min_decode == pytest.approx(50 * (1 + fastest))
    assert found.record.rounds[0].point.decode >= 0.999 * found.record.min_decode
    assert {TEXTS[0], TEXTS[2]} & set(filter(found.record.used.get, found.record.used))


def test_the_time_until_the_first_token_is_limited(tiny, batches):
    """As the speed of prompts of the given length is; the page shows it in milliseconds."""
    model = tiny("llama", max_position_embeddings=1024)
    rates = {"8": 4000.0, "4": 2000.0, "2": 1000.0}

    def by_bits(models):
        texts = {name: re.findall(r"bits=(\d)", name) for name in models}
        mixed = {name: 3000.0 for name, text in texts.items() if not text} | {"original": 1500.0}
        return {name: (100.0, rates[text[0]] if text else mixed[name]) for name, text in texts.items()}

    limit = wishes_of(max_ttft="200ms", prompt=512)
    assert (limit.max_ttft, limit.least_rate(1, 7.0), limit.least_rate(0, 7.0)) == (0.2, 2560, None)
    both = wishes_of(max_ttft="0.2s", prompt=512, min_decode="2x")
    assert (both.least_rate(0, 1500.0), both.least_rate(1, 1500.0)) == (3000, 2560)
    found = fit(model, batches, limit, method=chooser(), timer=by_bits).record
    assert (found.min_prefill, found.max_ttft, found.prompt) == (2560, 0.2, 512) and not found.broken()
    assert found.rounds[found.kept].point.prefill >= 2559 and found.used[TEXTS[2]]
    assert "prompts at 2,560 tokens/s or more (512 tokens in 200 ms)" in found.sentences()[0]
    scores = {"compressed": {"perplexity_a": 9.0, "kl_a": 0.1, "perplexity_of_a_task": 9.0}}
    rows = search.context(typed({"search": found, "scores": scores}))["wishes"]
    assert [one.name for one in rows if "divergence" in one.name] == ["divergence on a, nats per token"]
    (row,) = (one for one in rows if "first token" in one.name)
    assert (row.name, row.asked, row.measured, row.kept) == (
        "first token after 512 tokens with the full cache, ms (in the search)", "200", "171", "yes",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"`max_ttft` \(=0.1 s for 512 tokens, 5120 tokens/s\) cannot be kept"):
        fit(model, batches, wishes_of(max_ttft="100ms", prompt=512), method=chooser(), timer=by_bits)
    with pytest.raises(ValueError, match=r"`max_ttft` can be 4\d\d.\d ms at best if the other limits are kept"):
        small = 1.05 * chooser().smallest_size(model)
        fit(model, batches, Wishes(max_bytes=small, max_ttft=0.15, prompt=512), method=chooser(), timer=by_bits)


def test_a_made_model_without_numbers_is_named(model, batches, monkeypatch):
    monkeypatch.setattr("compress.search.fit.divergence", lambda *_: float("nan"))
    with pytest.raises(NotFinite, match=r"model that was made are not finite \(divergence nan\); .*rtn\(bits=8"):
        fit(model, batches, Wishes(max_bytes=1e9), method=chooser())


def test_a_later_model_without_numbers_loses_no_earlier_one(model, batches, monkeypatch):
    """Neither one of a second round, nor one that was trained."""
    found = [0.5]
    monkeypatch.setattr("compress.search.fit.divergence", lambda *_: found.pop() if found else float("nan"))
    smallest = chooser().smallest_size(model)
    with pytest.warns(UserWarning, match=r"not finite \(divergence nan\); .* It is left out"):
        record = fit(model, batches, Wishes(max_bytes=1.3 * smallest), method=chooser(), minutes=0.02).record
    assert [one.divergence for one in record.rounds] == [0.5] and record.kept == 0


def test_prompts_must_fit_into_the_model(model):
    with pytest.raises(ValueError, match=r"`prompt` \(=100000\) must be at most \d+: the model has \d+ positions"):
        speed.timer(1, 100_000)({"original": model})
    with pytest.raises(ValueError, match=r"`prompt` \(=100000\) must be less than \d+, the positions of the model"):
        fit(model, [], Wishes(max_ttft=1.0, prompt=100_000), timer=speed.timer(1, 100_000))
    with pytest.raises(ValueError, match=r"`prompt` \(=100000\) must be less than \d+, the positions of the model"):
        fit(model, [], Wishes(min_prefill=2.0, times=True, prompt=100_000), timer=speed.timer(1, 100_000))
    with pytest.raises(ValueError, match=r"`timer` times prompts of 256 tokens, and `prompt` \(=64\) is another"):
        fit(model, [], Wishes(max_ttft=1.0, prompt=64), timer=speed.timer(1))


def test_times_are_kept_for_the_next_search(model, batches, monkeypatch):
    """For the same shapes, choices and kernels; the record says so."""
    asked = []

    def counting(models):
        asked.append(list(models))
        return timer(models)

    limits = Wishes(min_decode=1.01, times=True)
    first, second = (fit(model, batches, limits, method=chooser(), timer=counting).record for _ in range(2))
    assert (first.timed_earlier, second.timed_earlier) == (False, True)
    assert first.decode_ratio == second.decode_ratio and first.original == second.original
    assert sum(len(names) > 2 for names in asked) == 1
    shown = [search.context(typed({"search": one}))["timed_earlier"] for one in (first, second)]
    assert shown == [False, True]
    times = len(asked)
    untimed = fit(model, batches, Wishes(max_bytes=1e9), method=chooser(), timer=counting).record
    assert untimed.original is None and len(asked) == times, "a limit of bytes needs no times"
    monkeypatch.setattr("compress.search.library.code_sha256", lambda *_: "other kernels")
    assert not measure_times(chooser(), model, counting).earlier


def test_an_absolute_limit_is_compared_with_what_is_measured_now(model, batches):
    """Not with the speed that the original had when an earlier search timed the choices."""

    def half_as_fast(models):
        return {name: (rates[0] / 2, rates[1]) for name, rates in timer(models).items()}

    first = fit(model, batches, Wishes(min_decode=101), method=chooser(), timer=timer).record
    record = fit(model, batches, Wishes(min_decode=51), method=chooser(), timer=half_as_fast).record
    assert record.timed_earlier and record.original[0] == first.original[0] / 2
    kept = record.rounds[record.kept]
    assert kept.decode == pytest.approx(kept.point.decode, rel=0.05) and 51 <= kept.decode < 101
    with pytest.raises(ValueError, match=r"`min_decode` \(=101 tokens/s\) cannot be kept"):
        fit(model, batches, Wishes(min_decode=101), method=chooser(TEXTS[2]), timer=half_as_fast)


def test_times_of_a_choice_that_few_layers_can_have_are_theirs(tiny, batches):
    """A group size that divides the columns of `down` alone; the embedding of an untied model takes no time."""
    model = tiny("llama", tie_word_embeddings=False, intermediate_size=128)
    method = search_method(f"{TEXTS[0]}; rtn(bits=8, group_size=128); {ENDS}", tokens=96)
    library = measure_library(model, batches, method)
    times = measure_times(library.method, model, timer)
    assert len(library.ends) == 2 and library.head in library.ends and library.head.endswith("head")
    costs, few = library.costs(times), "rtn(bits=8, group_size=128)"
    assert {name.rpartition(".")[2] for name, own in costs.items() if few in own} == {"down_proj"}
    assert sum(own[few].decode for own in costs.values() if few in own) == pytest.approx(times.decode[few] - 1)
    at_ends = [costs[name][text] for name in library.ends for text in costs[name]]
    assert [bool(one.decode) for one in at_ends] == [name == library.head for name in library.ends for _ in costs[name]]


def test_losses_are_measured_once_for_the_same_question(model, batches, monkeypatch, tmp_path):
    """Also in runs that have work folders of their own, as those of a sweep have."""
    first = measure_library(model, batches, chooser())
    measured = []
    own = ScaledLoss.of
    monkeypatch.setattr(ScaledLoss, "of", lambda self, *args: measured.append(0) or own(self, *args))
    assert measure_library(model, batches, chooser()).layers == first.layers and not measured
    fit(model, batches, Wishes(max_bytes=2e9), method=chooser(), work_path=tmp_path / "other")
    assert not measured
    measure_library(model, batches, search_method(BLOCKS, tokens=48))
    assert measured, "on other tokens"


def test_a_sample_of_rows_tells_the_losses_of_further_choices(model, batches, monkeypatch):
    """In the same bytes; the first choice of each layer, which is measured, needs all rows."""
    method = chooser(f"{BLOCKS}; {ENDS}")
    monkeypatch.setattr(ScaledLoss, "sample", 0)
    whole = measure_library(model, batches, method).layers
    monkeypatch.setattr(ScaledLoss, "sample", 12)
    rows = []
    own = ScaledLoss._scaled
    monkeypatch.setattr(
        ScaledLoss, "_scaled",
        lambda self, solved, measure: rows.extend(len(one.W) for one in solved.values()) or own(self, solved, measure),
    )  # fmt: skip
    sampled = measure_library(model, batches, search_method(f"{BLOCKS}; {ENDS}", tokens=95)).layers
    assert min(rows) < 24 < max(rows)
    for name, layer in whole.items():
        for text, choice in layer.choices.items():
            assert sampled[name].choices[text].cost == choice.cost
        first, *others = layer.choices
        for text in others:
            ratio, near = (one[name].choices[text].loss / one[name].choices[first].loss for one in (whole, sampled))
            assert near == pytest.approx(ratio, rel=0.35), (name, text)


def test_the_best_uniform_recipe_is_made_where_it_may_be_as_good(model, batches, monkeypatch):
    """It wins if it loses less, and the record says so; where it is predicted to be far behind, it is not made."""
    method = chooser(f"{BLOCKS}; {ENDS}")
    library = measure_library(model, batches, method)
    fours = {name: list(layer.choices)[-2] for name, layer in library.layers.items()}  # of the blocks and of the ends
    limit = library.beside + 1.1 * LayersProgram(library.costs(None)).of(fours).bytes
    monkeypatch.setattr("compress.search.fit.NEAR", 0.5)
    alone = fit(model, batches, Wishes(max_bytes=limit), method=method).record
    assert len(alone.rounds) == 1 and "too far behind to be made" in alone.beside_uniform()
    monkeypatch.setattr("compress.search.fit.NEAR", 1e9)
    both = fit(model, batches, Wishes(max_bytes=limit), method=method).record
    assert [one.uniform for one in both.rounds] == [False, True] and both.rounds[1].point.bytes <= limit
    assert both.kept == min(range(2), key=lambda i: both.rounds[i].divergence)
    assert both.uniform.count("rtn(") == 2
    turns = itertools.cycle((0.5, 0.4))
    monkeypatch.setattr("compress.search.fit.divergence", lambda *_: next(turns))
    won = fit(model, batches, Wishes(max_bytes=limit), method=method)
    assert won.record.kept == 1 and "It is the model that was kept" in won.record.beside_uniform()
    assert len({one.choice for one in won.result.layers}) == 2
    largest = fit(model, batches, Wishes(max_bytes=1e9), method=method).record
    assert len(largest.rounds) == 1 and largest.rounds[0].uniform and "that was kept" in largest.beside_uniform()


def test_a_limit_of_speed_is_corrected_by_what_whole_models_reach(model, batches):
    """Mixes run at 0.9 times the speed that the models with one choice predict."""

    def mixes_are_slower(models):
        mixed = set(models) == {"original", "chosen"}
        return {
            name: (rates[0] * (0.9 if mixed and name == "chosen" else 1.0), rates[1])
            for name, rates in timer(models).items()
        }

    library = measure_library(model, batches, chooser())
    fastest = 1 / measure_times(library.method, model, timer).decode[TEXTS[0]]
    wishes = Wishes(min_decode=1 + 0.6 * (fastest - 1), times=True)
    record = fit(model, batches, wishes, method=chooser(), timer=mixes_are_slower).record
    first, second = record.rounds[:2]
    assert first.decode == pytest.approx(0.9 * first.point.decode, rel=0.05) and first.decode < record.min_decode
    assert second.decode == pytest.approx(second.point.decode, rel=0.05) and second.decode > 0.98 * record.min_decode
    assert record.rounds[record.kept].decode > 0.98 * record.min_decode and not record.broken()


def test_a_corrected_limit_that_cannot_be_kept_gives_the_nearest_model(model, batches, monkeypatch):
    """Within all other limits; the record says that the limit is not kept."""
    method = chooser()
    library = measure_library(model, batches, method)
    program = LayersProgram(library.costs(None))
    limit = library.method.smallest_size(model) * 1.3
    near = program.of(program.best("loss", {"bytes": limit - library.beside})).loss
    monkeypatch.setattr("compress.search.fit.divergence", lambda *_: 3 * near)
    record = fit(model, batches, Wishes(max_bytes=limit, max_kl=2 * near), method=method, timer=timer).record
    assert record.minimised == "decode" and len(record.rounds) > 1
    last = record.rounds[-1].point
    assert last.bytes <= limit and last.loss / record.rounds[-1].factor == pytest.approx(near, rel=1e-3)
    assert "The limit of the divergence is not kept" in record.broken()[0]


def test_impossible_limits_say_how_near_one_can_come(model, batches):
    with pytest.raises(ValueError, match=r"`max_bytes` \(=1000\) cannot be kept: .* the whole model takes"):
        fit(model, batches, Wishes(max_bytes=1000), method=chooser())
    with pytest.raises(ValueError, match="`timer` must be given for limits of speed"):
        fit(model, batches, Wishes(min_decode=10), method=chooser())
    with pytest.raises(ValueError, match="or to optimise it"):
        fit(model, batches, Wishes(max_bytes=1e9, max_kl=1.0), method=chooser())
    with pytest.raises(
        ValueError, match=r"`min_decode` \(=1000000 tokens/s\) cannot be kept: the fastest choices reach"
    ):
        fit(model, batches, Wishes(max_bytes=1e9, min_decode=1e6), method=chooser(), timer=timer)
    with pytest.raises(ValueError, match="is for blocks and for the embedding at once"):
        search_method("rtn(bits=4, group_size=16, where=all)")
    with pytest.raises(ValueError, match=r"`timer` gave \(0.0, 1.0\) for original"):
        measure_times(chooser(TEXTS[0]), model, lambda models: dict.fromkeys(models, (0.0, 1.0)))
    with pytest.raises(
        ValueError, match="`max_bytes` can be .* MB at best .*; `max_kl` can be .* nats per token at best"
    ):
        library = measure_library(model, batches, chooser())
        program = LayersProgram(library.costs(None))
        least, smallest = program.of(program.best("loss", {})).loss, library.method.smallest_size(model)
        fit(model, batches, Wishes(max_bytes=smallest + 10, max_kl=2 * least), method=chooser(), timer=timer)
    with pytest.raises(ValueError, match=r"`choices` \(=''\) must name methods, or a standard set"):
        search_method("")


def test_predicted_bytes_of_standard_choices_are_exact():
    """On a width that is no power of two, where fewer columns share the factors of scales."""
    linear = torch.nn.Linear(576, 96, bias=False)
    for text, method in search_method("trellis").methods.items():
        no_inputs = Collector("x", method.statistics, 576, torch.device("cpu")).result()
        new = stored_as("x", linear, linear.weight.detach(), no_inputs, method)
        assert bits_of(method.stores((96, 576))) == pytest.approx(new.bits_per_weight, rel=1e-9), text


@pytest.mark.parametrize("choices", list(STANDARD))
def test_models_of_standard_choices_can_be_saved(choices, model):
    """In the format after which the set is called, each choice everywhere; trellis codes in our own."""
    method = search_method(choices)
    assert len(method.methods) > 1
    check_save_format("workbench" if choices == "trellis" else choices, [method], model, sized=True)


@pytest.mark.parametrize("choices", [
    "trellis", "sparsegpt(ratio=0.5)", "gptq(bits=3, group_size=32, scale_dtype=float16)", "rtn(group_size=32, grid=nf4)",
    "rtn(group_size=32, scale_dtype=e8m0)", "rtn(bits=8)",
])  # fmt: skip
def test_choices_that_files_hold_in_more_bytes_are_refused(choices, model):
    check_save_format("gguf", [search_method(choices)], model)
    with pytest.raises(ValueError, match="in more bytes than `max_bytes` counts; choices=gguf is"):
        check_save_format("gguf", [search_method(choices)], model, sized=True)
    stored = apply("rtn(bits=5, group_size=32, where=embedding)", model).model  # what was stored before is not a choice
    check_save_format("gguf", [search_method("rtn(group_size=32)")], stored, sized=True)


def test_given_choices_are_those_of_the_model(tmp_path, model, batches):
    """The recipe of a search makes the same model again, from its text, and it is saved and loaded."""
    found = fit(model, batches, Wishes(max_bytes=0.5 * size(model).stored_bytes), method=chooser(f"{BLOCKS}; {ENDS}"))
    [method] = found.result.recipe
    again = apply(parse_recipe(str(method)), model, batches)
    assert [one.choice for one in again.layers] == [one.choice for one in found.result.layers]
    ids = batches[0]
    torch.testing.assert_close(again.model(ids).logits, found.model(ids).logits, rtol=0, atol=0)
    save_compressed(again, tmp_path / "saved")
    loaded = load_compressed(tmp_path / "saved")
    torch.testing.assert_close(loaded(ids).logits, again.model(ids).logits)


def test_choices_that_do_not_fit_are_refused(model, batches):
    count = len(targets(model))
    for chosen, message in (
        ("a3!", "must be letters of choices"),
        (f"a{count + 1}", f"is for {count + 1} linears and at least 1 choices; this model has {count} linears"),
        (f"a{count - 1}d", "and `choices` names 3"),
        ("a0", "must be letters of choices"),
    ):
        with pytest.raises(ValueError, match=message):
            apply([METHODS["mixed"](choices=BLOCKS, chosen=chosen)], model, batches)
    with pytest.raises(ValueError, match="whose `where` .* is not 'blocks'"):
        count = len(targets(model, "", "all"))
        apply([METHODS["mixed"](choices=f"{BLOCKS}; {ENDS}", chosen=f"d{count}")], model, batches)


def test_a_table_for_the_embedding_may_be_chosen(model, batches, monkeypatch):
    """Its rows are not solved in portions, which would each have a table, also if another choice could be."""
    monkeypatch.setattr(solve, "ROWS", 32)
    table = "rtn(bits=4, group_size=16, grid=iq4_nl, where=embedding)"
    choices = f"{BLOCKS}; rtn(bits=8, group_size=16, where=embedding); {table}"
    shapes = targets(model, "", "all")
    chosen = "".join("e" if "." not in name or "head" in name or "embed" in name else "c" for name in shapes)
    result = apply([METHODS["mixed"](choices=choices, chosen=chosen)], model, batches)
    assert {one.format for one in result.layers} == {"int_group", "codebook"}


def test_the_best_models_are_trained_and_ranked_again():
    """On other text than they are measured on; what was made without training stays in the record."""
    model, tokenizer = load_model("tiny")
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # its predictions become less uniform
            parameter.mul_((20.0 if "embed" in name else 5.0) if parameter.dim() == 2 else 1.0)
    batches, seen = calibration(tokenizer, samples=4, seqlen=64), []
    limit = Wishes(max_bytes=6.5e6)
    before = fit(model, batches, limit, method=chooser()).record
    at = Prepared.at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "at", lambda store, text, held_out: seen.extend(text) or at(store, text, held_out))
        found = fit(model, batches, limit, method=chooser(), minutes=0.05)
    trained = [one for one in found.record.rounds if one.minutes]
    assert 1 <= len(trained) <= 3 and found.record.rounds[: len(before.rounds)] == before.rounds
    kept = found.record.rounds[found.record.kept]
    assert kept.divergence == min(one.divergence for one in found.record.rounds) and kept.bytes <= limit.max_bytes
    methods = ["mixed", "distil"] if kept.minutes else ["mixed"]  # on a busy machine so little training may not help
    assert [step.name for step in found.result.recipe] == methods
    measured = {tuple(window[0].tolist()) for window in batches.further(4)}
    read = [tuple(window[0].tolist()) for window in seen]
    assert len(read) > 20 and not measured & set(read)
    assert "made again and trained for 0.05 minutes each by distil" in repr(found)
    with pytest.raises(ValueError, match=r"`minutes` .*-1"):
        fit(model, batches, limit, method=chooser(), minutes=-1.0)


@pytest.fixture(scope="module")
def written():
    """A model and calibration windows, with further text of the corpus."""
    model, tokenizer = load_model("tiny")
    return model, calibration(tokenizer, corpus="pydocs", samples=4, seqlen=64)


CACHES = "8 bits: kv_int(bits=8, group_size=32); half: snapkv(budget=0.5)"


def cached_rates(model, caches, context):
    """Made-up speeds behind a context: less than half of those behind a short prompt."""
    smaller = any(type(m).__name__ == "CompressedLinear" for m in model.modules())
    return {name: 40.0 + 20 * bool(methods) + 10 * smaller for name, methods in caches.items()}


def test_the_cache_is_chosen_with_the_weights(written):
    """By hand: its bytes, its loss with the original weights, and the divergence of both together."""
    model, batches = written
    held, choices = cache_choices(CACHES, context=150, batch=40), "rtn(bits={3, 8}, group_size=16)"
    smallest = bytes_beside(apply("rtn(bits=3, group_size=16)", sharing_copy(model)).model, {})
    about = {"method": chooser(choices), "caches": held}
    every = fit(model, batches, Wishes(max_bytes=1e9), **about).record.caches
    assert every.chosen == "full" and every.loss["full"] == 0 <= every.loss["8 bits"] < every.loss["half"]
    heads, channels = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    plain = 40 * model.config.num_hidden_layers * 150 * heads * channels * 2 * 2
    assert plain <= every.bytes["full"] < 2 * plain and every.bytes["half"] < 0.8 * every.bytes["full"]
    limit = smallest + 1.02 * every.bytes["half"]
    found = fit(model, batches, Wishes(max_bytes=limit), **about)
    kept = found.record.rounds[found.record.kept]
    assert found.record.caches.chosen == "half" and kept.bytes <= limit
    assert [str(method) for method in attached_methods(found.model)] == ["snapkv(budget=0.5)"]
    assert str(found.result.recipe[-1]) == "snapkv(budget=0.5)" and "kept as: half" in repr(found)
    texts, rest = batches.texts(150 + SCORED, 4)
    assert [text.shape for text in texts] == [(1, 150 + SCORED)] * 4
    gone = sorted(set(batches.left) - set(rest.left))  # three windows of 64 tokens for each text
    assert torch.equal(torch.cat(texts), torch.cat(batches.cut(gone), 1).reshape(4, -1)[:, : 150 + SCORED])
    pairs = []
    for text in texts:
        cache = attachment_of(found.model).cache()
        found.model(text[:, :150], past_key_values=cache, use_cache=True)
        rows = []
        for i in range(150, 150 + SCORED):
            rows.append(found.model(text[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]])).logits)
            cache.paused = True
        pairs.append((model(text).logits[:, 150:], torch.cat(rows, 1)))
    losses = [divergence([wanted], [given]) for wanted, given in pairs]
    assert kept.divergence == pytest.approx(sum(losses) / len(losses), rel=2e-2)


def test_speeds_behind_a_context_are_those_of_the_cache(written):
    model, batches = written
    about = {"method": chooser("rtn(bits=8, group_size=16)"), "caches": cache_choices(CACHES, context=150)}
    wishes = Wishes(min_decode=1.5, times=True)
    with pytest.raises(ValueError, match="`cache_timer` must be given"):
        fit(model, batches, wishes, timer=timer, **about)
    record = fit(model, batches, wishes, timer=timer, cache_timer=cached_rates, **about).record
    kept = record.rounds[record.kept]
    assert record.original[0] == 40 and record.min_decode == 60 and record.caches.chosen != "full"
    assert kept.decode == pytest.approx(70) and record.caches.decode_ratio["half"] == 1.5
    shown = search.context(typed({"search": record}))
    assert [row.kept for row in shown["wishes"] if row.name.startswith("decoding behind 150")] == ["yes"]
    assert [row[-1] for row in shown["caches"]].count("yes") == 1 and "8 bits" in repr(shown["caches"])


@pytest.mark.parametrize(("caches", "asked", "said"), [
    ("kv_int(bits=8)", {"context": -1}, "`context` (=-1)"),
    ("kv_int(bits=8)", {"context": 8, "batch": 0}, "`batch` (=0)"),
    ("kv_int(bits=8)", {"context": 0, "batch": 4}, "`batch` (=4) counts sequences of `context` tokens"),
    ("gptq(bits=4)", {"context": 8}, "gptq(bits=4, group_size=64) is not a method of the cache"),
    ("quest(budget=0.5)", {"context": 8}, "`caches` (quest(budget=0.5))"),
    ("full: kv_int", {"context": 8}, "is what the cache in 16 bits is called"),
    ("kv_int(bit=8)", {"context": 8}, "did you mean `bits`"),
])  # fmt: skip
def test_wrong_caches_are_refused(caches, asked, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        cache_choices(caches, **asked)


def test_a_context_that_does_not_fit_is_refused_before_the_work(written, monkeypatch):
    monkeypatch.setattr("compress.search.fit.measure_library", None)
    choices, small = (cache_choices(CACHES, context=context) for context in (1 << 20, 50))
    wishes = Wishes(max_bytes=1e9)
    with pytest.raises(ValueError, match=r"`context` \(=1048576\)"):
        fit(written[0], written[1], wishes, method=chooser(), caches=choices)
    with pytest.raises(ValueError, match="`batches` must come from `calibration`"):
        fit(written[0], list(written[1]), wishes, method=chooser(), caches=small)
    assert cache_choices(CACHES, context=0) is None
    with pytest.raises(ValueError, match=r"`drops` \(='mlp, attention'\) and `context` \(=50\)"):
        fit(written[0], written[1], wishes, method=chooser(), caches=small, drops="mlp, attention")
    with pytest.raises(ValueError, match="the smallest of `caches` "):
        least = bytes_beside(apply("rtn(bits=2, group_size=16)", sharing_copy(written[0])).model, {})
        fit(written[0], written[1], Wishes(max_bytes=least + 10), method=chooser(), caches=small)


def test_real_caches_are_timed_behind_the_context(written):
    timed = cache_timer(1, new_tokens=2)
    rates = timed(written[0], cache_choices(CACHES, context=150).methods, 150)
    assert list(rates) == ["full", "8 bits", "half"] and min(rates.values()) > 0
    with pytest.raises(ValueError, match=r"`search_rounds` \(=0\)"):
        cache_timer(0)


def test_the_page_shows_what_was_asked_predicted_and_measured(model, batches):
    found = fit(
        model, batches, Wishes(max_bytes=0.6 * size(model).stored_bytes, min_decode=50), method=chooser(), timer=timer
    )
    scores = {"baseline": {"decode_tokens_per_s": 100.0}, "compressed": {"decode_tokens_per_s": 150.0,
              "stored_bytes": 1e9, "kl_text": 0.2, "perplexity_text": 9.0}}  # fmt: skip
    shown = search.context(typed({"search": found.record, "scores": scores}))
    by_name = {row.name: row for row in shown["wishes"]}
    assert by_name["decoding, tokens/s"].kept == "yes" and by_name["stored, MB"].kept == "no"
    row = functools.partial(search.as_row, "x", 100.0, 1.0, write=str, close=0.02)
    assert [row(got=got).kept for got in (100, 101, 103)] == ["yes", "within 2 %", "no"]
    assert [row(got=got, most=False).kept for got in (100, 99, 97, 0)] == ["yes", "within 2 %", "no", "no"]
    assert by_name["decoding, times the original's speed"].asked == "0.50×"
    assert by_name["decoding, times the original's speed"].measured == "1.50×"
    assert by_name["divergence on text, nats per token"].measured == "0.2000"
    assert shown["timed"] and "svg" in shown["front"] and len(shown["choices"]) == 3
    assert len(shown["layers"]) == found.record.layers == len(found.record.picked)
    sizes = {one.choice: one.bytes for one in found.record.picked if one.name.endswith("down_proj")}
    for one in found.record.picked:
        assert one.bytes <= (one.more or [one.bytes])[0] and (one.fewer or [0])[0] < one.bytes
        assert bool(one.fewer) == (one.choice != TEXTS[0]) and bool(one.more) == (one.choice != TEXTS[2])
    assert sizes and sum(one.bytes for one in found.record.picked) < found.record.rounds[0].bytes
    assert search.context(typed({})) == {} and "The limits are: at most" in repr(found)
