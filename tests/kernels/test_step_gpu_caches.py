"""Steps of decoding for a GPU behind compressed caches, run op by op on a CPU."""

import json
import re
import weakref
from collections import Counter

import pytest
import torch
from transformers import StoppingCriteria

from compress.kv import attach
from compress.recipe import parse_recipe
from kernels.harness.model import main
from kernels.harness.model_cache import FORMS, TimedCache, read_bytes
from kernels.harness.model_weights import made
from kernels.step.gpu import stored_steps
from kernels.step.gpu.accelerate import GraphAcceleration
from kernels.step.gpu.graphs import Graphs, GraphStep
from kernels.step.gpu.sizes import closer_places, places
from kernels.step.gpu.stored import LayerStore

MANY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True,
        "output_logits": True}  # fmt: skip
RECIPES = {  # the largest number of 149 steps that the model's own code takes
    "kv_int(bits=8)": 0, "kv_int": 0, "kv_int(bits=4, group_size=32, residual=4)": 0, "kv_fp8": 0,
    "kv_fp8(scales=one, group_size=128)": 0, "kv_int(bits=8, group_size=32, residual=0)": 5, "streaming(budget=12)": 0,
    "streaming(budget=12, decoding=True)": 20, "snapkv(budget=0.5, observed=4, allocation=ada)": 0,
    "snapkv(budget=0.5, observed=4, allocation=ada), kv_int(bits=8, group_size=32, residual=4)": 0, "h2o(budget=12)": 0,
    "expected_attention(budget=0.5, future=16), kv_int(group_size=32)": 0, "tova(budget=24, allocation=pyramid)": 0,
    "keydiff(budget=0.5, decoding=True), kv_int(group_size=32, residual=4)": 26, "kvzip(budget=0.5), kv_int": 0,
    "kv_int(group_size=32, rotate_keys=True)": 0, "kv_int(bits=8, group_size=32, residual=4, rotate_values=True)": 0,
    "streaming(budget=0.5), kv_int(group_size=32, residual=0, rotate_keys=True, rotate_values=True)": 6,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch) -> Counter:
    """Small graphs, so that some become too small; counts what is done."""
    done = Counter()

    def counted(owner: type, name: str, what: str) -> None:
        before = getattr(owner, name)

        def call(self, *args):
            done[what] += 1
            return before(self, *args)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr("kernels.step.gpu.sizes.LEAST", 128)
    monkeypatch.setattr("kernels.step.gpu.sizes.SPARE", 16)
    counted(GraphStep, "__call__", "steps")
    counted(stored_steps.Calls, "__call__", "calls")
    counted(LayerStore, "fill", "copies")
    return done


def written(model, ids, new, padding=(), **more):
    """padding: number of padded places at the beginning of each row."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **MANY, **more)


def assert_same_cache(found, expected):
    """The same tokens, counts and codes; a number that was rounded differently may have become the next code."""
    assert found.get_seq_length() == expected.get_seq_length()
    assert found.nbytes < 1.15 * expected.nbytes  # tensors that are appended to have some room
    for one, two in zip(found.own, expected.own, strict=True):
        assert (one.seen, one.fresh, one.evicted) == (two.seen, two.fresh, two.evicted)
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.since, two.since)
        assert torch.equal(one.lengths, two.lengths) and (one.queries is None) == (two.queries is None)
        assert [(s.coded, s.length) for s in one.slabs] == [(s.coded, s.length) for s in two.slabs]
        assert (one.memory is None) == (two.memory is None)
        assert one.memory is None or torch.allclose(one.memory.view, two.memory.view, 1e-4, 1e-4)
        for a, b in zip(one.slabs, two.slabs, strict=True):
            assert torch.equal(a.starts, b.starts)
            pairs = zip((*a.dense(), a.k.view, a.v.view), (*b.dense(), b.k.view, b.v.view), strict=True)
            assert all(float((x - y).norm()) <= 1e-2 * float(y.norm()) for x, y in pairs)
    for one, two in zip(found.layers, expected.layers, strict=True):
        assert one.get_seq_length() == two.get_seq_length()
        if one not in found.own:
            torch.testing.assert_close((one.keys, one.values), (two.keys, two.values), rtol=1e-4, atol=1e-4)
    assert [x.tolist() for x in (*found.ids, *found.masks)] == [x.tolist() for x in (*expected.ids, *expected.masks)]


@pytest.mark.in_turns
@pytest.mark.parametrize(("architecture", "padding"), [("llama", ()), ("gemma3_text", ()), ("llama", (7, 0))])
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=[pytest.mark.slow] * (turn % 2 == 0)) for turn, recipe in enumerate(RECIPES)]
)
def test_steps_are_those_of_the_models_own_code(architecture, padding, recipe, tiny, tokens, small):
    """Over groups that become codes, evictions, and graphs that become too small, with and without padding; and the
    next prompt reads the same cache."""
    model = tiny(architecture, max_position_embeddings=512)
    attach(model, parse_recipe(recipe))
    ids, more = torch.cat(tokens(2, 40)), torch.cat(tokens(2, 9, seed=2))

    def turns():
        first = written(model, ids, 150, padding)
        again = torch.cat([first.sequences, more], 1)
        yield first
        yield written(model, again, 20, padding, past_key_values=first.past_key_values)

    expected = [(turn, turn.past_key_values.get_seq_length()) for turn in turns()]
    GraphAcceleration(model).take_over()
    found = [(turn, turn.past_key_values.get_seq_length()) for turn in turns()]
    assert not model.acceleration.why_not and model.acceleration._graphs.why_not_fused == ""
    assert small["steps"] + small["calls"] == 149 + 19 and small["calls"] <= RECIPES[recipe] * 168 / 149
    for (one, held), (two, other) in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, two.sequences) and held == other
        for a, b in zip(one.logits, two.logits, strict=True):
            assert float((a - b).norm() / b.norm()) < 1e-3
    assert_same_cache(found[-1][0].past_key_values, expected[-1][0].past_key_values)


@pytest.mark.parametrize(("recipe", "copies"), [("kv_int(bits=8)", 3), ("streaming(budget=12)", 1)])
def test_layers_are_copied_where_they_change_alone(recipe, copies, tiny, tokens, small, monkeypatch):
    """Codes of 64 positions are made twice in 130 steps."""
    monkeypatch.setattr("kernels.step.gpu.sizes.LEAST", 1024)
    model = tiny("llama", max_position_embeddings=512)
    attach(model, parse_recipe(recipe))
    GraphAcceleration(model).take_over()
    written(model, tokens(1, 40)[0], 131)
    assert small == Counter(steps=130, copies=copies * len(model.model.layers))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(("recipe", "reason"), [
    ("quest(page=4, budget=12)", "quest reads a part of the positions"), ("kv_int(bits=2)", "holds codes of 2 bits"),
    ("xkv()", "share what they store"),
    ("kv_int(bits=8, value_bits=4)", "holds values of 4 bits"), ("zipvl()", "holds positions in two precisions"),
    ("kv_int(keys=token)", "holds keys with a scale per position"),
    ("h2o(budget=12, decoding=True)", "h2o reads the attention, the queries or the input of every token"),
    ("snapkv(budget=12, decoding=True)", "snapkv reads the attention, the queries or the input"),
])  # fmt: skip
def test_other_caches_are_read_by_the_models_own_code(recipe, reason, tiny, tokens, small):
    model, ids = tiny("llama"), torch.cat(tokens(2, 24))
    attach(model, parse_recipe(recipe))
    expected = written(model, ids, 12).sequences
    GraphAcceleration(model).take_over()
    with pytest.warns(UserWarning, match=f"without a CUDA graph: .*{re.escape(reason)}"):
        found = written(model, ids, 12).sequences
    assert torch.equal(found, expected) and not small["steps"]
    written(model, ids, 12)
    assert reason in repr(model.acceleration)


def test_padding_in_windows_is_left_out(tiny, tokens, small):
    """transformers' layers with a window hold it."""
    model, ids = tiny("gemma3_text", max_position_embeddings=512), torch.cat(tokens(2, 24))
    attach(model, parse_recipe("kv_int"))
    expected = written(model, ids, 150, (20, 0))
    GraphAcceleration(model).take_over()
    found = written(model, ids, 150, (20, 0))
    assert torch.equal(found.sequences, expected.sequences) and small["steps"] == 149
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-3


def test_models_that_are_not_fused_say_so(tiny, tokens):
    model = tiny("phi")
    attach(model, parse_recipe("kv_int"))
    GraphAcceleration(model).take_over()
    with pytest.warns(UserWarning, match="only fused steps read a compressed cache: .*Llama"):
        written(model, tokens(1, 9)[0], 4)


def test_hooks_of_others_still_run(tiny, tokens):
    model, calls = tiny("llama"), []
    attach(model, parse_recipe("kv_int"))
    GraphAcceleration(model).take_over()
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match=r"without a CUDA graph: model\.layers\.1 has hooks"):
        written(model, tokens(1, 9)[0], 6)
    assert len(calls) == 6


def test_a_graph_that_cannot_grow_hands_over_to_the_model(tiny, tokens, small, monkeypatch):
    model, ids = tiny("llama", max_position_embeddings=512), torch.cat(tokens(2, 9))
    attach(model, parse_recipe("kv_int(group_size=32, residual=4)"))
    expected = written(model, ids, 150)
    GraphAcceleration(model).take_over()
    body = Graphs._body

    def limited(self, batch, positions, room):
        if positions > 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return body(self, batch, positions, room)

    monkeypatch.setattr(Graphs, "_body", limited)
    with pytest.warns(UserWarning, match="the rest is written by the model's own code.*out of memory"):
        found = written(model, ids, 150)
    assert torch.equal(found.sequences, expected.sequences) and small["steps"] and small["calls"] > 20
    assert_same_cache(found.past_key_values, expected.past_key_values)
    monkeypatch.setattr(Graphs, "_body", body)
    assert torch.equal(written(model, ids, 150).sequences, expected.sequences) and not model.acceleration.why_not


def test_an_interrupted_text_leaves_its_tokens_in_the_cache(tiny, tokens, small):
    """As many as were read."""

    class Interrupt(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            if ids.shape[1] == 9 + 30:
                raise KeyboardInterrupt
            return torch.zeros(len(ids), dtype=torch.bool)

    model, ids = tiny("llama"), torch.cat(tokens(2, 9))
    cache = attach(model, parse_recipe("kv_int")).cache()
    GraphAcceleration(model).take_over()
    with pytest.raises(KeyboardInterrupt):
        written(model, ids, 60, past_key_values=cache, stopping_criteria=[Interrupt()])
    assert small["steps"] == 29 and {layer.length for layer in cache.own} == {9 + 29} == {cache.get_seq_length()}
    assert not model.acceleration._graphs.in_use


def test_sizes_grow_by_shares_of_a_power_of_two():
    assert [places(n) for n in (1, 1024, 1025, 9000)] == [1024, 1024, 2048, 16384]
    assert [closer_places(n) for n in (1, 1024, 1025, 9000, 33024)] == [1024, 1024, 2048, 9216, 36864]


def test_timed_steps_read_what_is_stored(tmp_path):
    """In each form, also behind an eviction, the logits are the model's own for the same keys and values; fewer bits and
    fewer positions take fewer bytes."""
    out, caches = tmp_path / "model.jsonl", (*FORMS, "16:0.5", "int4:0.75")
    main(["--toy", "--device", "cpu", "--kinds", "bfloat16", "--ways", "fused,own", "--batch", "2", "--no-roofline",
          "--cache", ",".join(caches), "--out", str(out)])  # fmt: skip
    lines = [line for line in map(json.loads, out.read_text().splitlines()) if "way" in line]
    assert [(line["way"], line["cache"]) for line in lines] == [
        *(("fused graph", cache) for cache in caches), ("own graph", "16")]  # fmt: skip
    assert all(line["difference"] < 0.02 for line in lines)
    weights = read_bytes(made("toy", "bfloat16", torch.device("cpu")), 0, 0, TimedCache.named("16"))
    sizes = {line["cache"]: line["least_bytes"] - weights for line in lines}
    each = 2 * 2 * 2  # sequences, layers and heads, with 128 of 160 positions of 64 channels in codes
    assert sizes == {"16": each * 160 * 256, "int8": each * (128 * (128 + 4) + 2 * 64 * 4 + 32 * 256),
                     "int4": each * (128 * (64 + 4) + 2 * 64 * 4 + 32 * 256),
                     "fp8": each * (128 * 128 + 2 * 8 + 32 * 256), "16:0.5": each * 80 * 256,
                     "int4:0.75": each * (64 * (64 + 4) + 64 * 4 + 56 * 256)}  # fmt: skip


def test_models_are_timed_two_at_a_time(tmp_path, monkeypatch):
    """So that all kinds fit a GPU: the first kind beside each other one, whose lines say so. What is timed alone has one
    line for each kind."""
    alive, out = [], tmp_path / "model.jsonl"

    def counted(shape, kind, device):
        model = made(shape, kind, device)
        alive.append((kind, weakref.ref(model)))
        held.append({kind for kind, there in alive if there() is not None})
        return model

    held: list[set[str]] = []
    for name, value in {"made": counted, "READ": 16, "STEPS": 2}.items():
        monkeypatch.setattr(f"kernels.harness.model.{name}", value)
    main(["--toy", "--device", "cpu", "--kinds", "bfloat16,int4,int8", "--ways", "fused,own,prompt,generate", "--batch",
          "1", "--no-roofline", "--out", str(out)])  # fmt: skip
    assert held == [{"bfloat16"}, {"bfloat16", "int4"}, {"bfloat16", "int8"}]
    lines = [line for line in map(json.loads, out.read_text().splitlines()) if "way" in line]
    fused = {kind: f"{kind}, fused graph, 16" for kind in ("bfloat16", "int4", "int8")}
    assert [(line["kind"], line["way"], line["turns"]) for line in lines if line["way"] == "fused graph"] == [
        (kind, "fused graph", turns)
        for turns in ([fused["bfloat16"], "bfloat16, own graph, 16", fused["int4"]], [fused["bfloat16"], fused["int8"]])
        for kind in (turns[0].partition(",")[0], turns[-1].partition(",")[0])]  # fmt: skip
    ways = Counter((line["kind"], line["way"]) for line in lines)
    assert {way: ways["bfloat16", way] for _, way in ways} == {
        "fused graph": 2, "own graph": 1, "prompt": 2, "generate, transformers": 1, "generate": 1}  # fmt: skip
    assert all(ways[kind, way] == 1 for kind in ("int4", "int8") for way in ("fused graph", "prompt", "generate"))


@pytest.mark.parametrize("name", ["int5", "16:0", "int4:1.5", "int4:half", "int4:", ""])
def test_caches_that_are_not_timed_are_refused(name):
    with pytest.raises(ValueError, match=f"`--cache` \\(={name}\\) must be among 16, int8, int4, fp8"):
        TimedCache.named(name)
