"""Steps of decoding for a GPU, run op by op on a CPU: the same operations that a CUDA graph would replay."""

import copy
import re
import warnings

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS, apply
from eval.speed.speed import GraphDecoder, TimedModel
from kernels.harness.model_weights import RoundedLinear, made
from kernels.registry import recording
from kernels.step.cache import static_cache
from kernels.step.codes import Coding, coded
from kernels.step.gpu.accelerate import GraphAcceleration
from kernels.step.gpu.body import FusedBody, largest
from kernels.step.gpu.graphs import Graphs, GraphStep, GraphSteps
from kernels.step.gpu.products import Products, StoredLinear
from kernels.tuning import launch_options
from tests.kernels.test_accelerate import LOOKALIKES, lookalike

CPU = torch.device("cpu")
FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")


def compressed(model, name, tokens):
    """The model after a method, or as it is for ""."""
    recipe = {"": [], "rtn": [METHODS["rtn"](bits=4, group_size=16)], "int8": [METHODS["int8"]()]}[name]
    return apply(recipe, model, tokens()).model if recipe else model


def steps_beside_the_model(model, graphs, ids, count=6):
    """Largest relative differences of the logits, and of the keys, of steps behind a prompt from the model's own."""
    cache = DynamicCache(config=model.config)
    token = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
    own, steps, differences = copy.deepcopy(cache), GraphSteps(graphs, cache, len(ids)), []
    for _ in range(count):
        steps(token)
        wanted = model(token, past_key_values=own, use_cache=True).logits[:, -1].float()
        differences.append(float((steps.logits - wanted).norm() / wanted.norm()))
        token = wanted.argmax(-1, keepdim=True)
    steps.finish()
    assert cache.get_seq_length() == own.get_seq_length()
    pairs = [(a.keys, b.keys) for a, b in zip(cache.layers, own.layers, strict=True)]
    return max(differences), max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)


@pytest.mark.in_turns
@pytest.mark.parametrize("method", ["", "rtn", "int8"])
@pytest.mark.parametrize("architecture", FUSED)
@torch.no_grad()
def test_fused_steps_are_the_models(architecture, method, tiny, tokens):
    model = compressed(tiny(architecture), method, tokens)
    graphs = Graphs(model)
    assert graphs.why_not_fused == ""
    logits, keys = steps_beside_the_model(model, graphs, torch.cat(tokens(2, 13)))
    assert max(logits, keys) < (2e-2 if method == "int8" else 1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "phi", "cohere"])
@torch.no_grad()
def test_other_models_take_their_steps_by_their_own_code(architecture, tiny, tokens):
    model = tiny(architecture)
    graphs = Graphs(model)
    assert graphs.why_not_fused
    assert max(steps_beside_the_model(model, graphs, torch.cat(tokens(2, 13)))) < 1e-5


@torch.no_grad()
def test_weights_with_one_input_are_joined(tiny, tokens, monkeypatch):
    monkeypatch.setattr("compress.formats.int_group.panels_fit", lambda *_: False)  # codes in rows, as on a GPU
    model = compressed(tiny("qwen2"), "rtn", tokens)
    graphs = Graphs(model)
    joined = [one.parts[0] for one in graphs._products.values() if len(one.sizes) > len(one.parts)]
    assert len(joined) == 2 * len(model.model.layers) and all(one.bias is not None for one in joined[::2])
    assert max(steps_beside_the_model(model, graphs, torch.cat(tokens(3, 9)))) < 1e-5


@pytest.mark.parametrize("kind, op", [("int8", "w8a8"), ("fp8", "w8a8"), ("w4a8", "w4a8")])
@torch.no_grad()
def test_norms_and_gates_write_the_codes_that_products_read(kind, op):
    """All products read given codes but the one behind the attention, which rounds its input itself."""
    model = made("toy", kind, CPU).float()
    graphs, layers = Graphs(model), model.config.num_hidden_layers
    products = list(graphs._products.values())
    assert len(products) == 3 * layers and all(one.coding and len(one.parts) == 1 for one in products)
    with recording() as ran:
        step = graphs.step(2, 16)
        step()
    assert ran[f"{op}_codes_matmul"] == ran[f"{op}_matmul"] == {"reference"}
    assert max(steps_beside_the_model(model, graphs, torch.arange(18).view(2, 9))) < 2e-2


@torch.no_grad()
def test_codes_are_shared_by_products_that_round_alike():
    """Products with different steps, types or transforms round their inputs themselves; too little memory to join
    weights is no reason to do so."""
    q, k = (RoundedLinear(torch.nn.Linear(128, 64, bias=False).bfloat16(), "int8") for _ in "qk")
    assert Products.of([q, k]).coding == Coding(torch.int8) and len(Products.of([q, k]).parts) == 1
    apart = Products((StoredLinear.of(q), StoredLinear.of(k)), (64, 64), Coding(torch.int8))
    x = coded(torch.randn(3, 128).bfloat16(), Coding(torch.int8))
    assert all(torch.equal(a, b) for a, b in zip(apart(x), Products.of([q, k])(x), strict=True))
    q.x_scale, k.x_scale = torch.tensor([0.1]), torch.tensor(0.1)
    assert Products.of([q, k]).coding.step == 0.1
    k.x_scale = torch.tensor(0.2)
    other = RoundedLinear(torch.nn.Linear(128, 64, bias=False).bfloat16(), "fp8")
    for linears in ([q, k], [k, other], [q, torch.nn.Linear(128, 64)]):
        assert Products.of(linears) == Products(tuple(linears), (64, 64))


@torch.no_grad()
def test_the_environment_says_whether_kernels_of_a_step_start_early(tiny, monkeypatch):
    seen = []
    body = FusedBody.__call__
    monkeypatch.setattr(FusedBody, "__call__", lambda *a: (seen.append(launch_options(CPU)["EARLY"]), body(*a))[1])
    for value, early in ((None, False), ("1", True)):
        if value:
            monkeypatch.setenv("WORKBENCH_EARLY_LAUNCHES", value)
        Graphs(tiny("llama")).step(1, 8)()
        assert seen == [early] and not launch_options(CPU)["EARLY"]
        seen.clear()


@torch.no_grad()
def test_a_wrong_block_is_found_and_the_models_own_code_runs(tiny, monkeypatch):
    model = tiny("llama").bfloat16()
    right = FusedBody.block

    def wrong(self, block, *args):
        y = right(self, block, *args)
        return y if block.index else y * 1.3

    monkeypatch.setattr(FusedBody, "block", wrong)
    assert "block 0 gives another output than a Llama's" in Graphs(model).why_not_fused


@torch.no_grad()
@pytest.mark.parametrize("architecture", LOOKALIKES)
def test_models_that_only_resemble_a_llama_are_not_fused(architecture):
    """Such as a model that scales its queries from position 64 on. EXAONE 4 lacks the norms of fused steps, too."""
    reason = f"{LOOKALIKES[architecture][1]}|reads its input without a norm"
    assert re.search(reason, Graphs(lookalike(architecture)).why_not_fused)


def test_generate_writes_what_transformers_writes(tiny, tokens):
    model = tiny("llama", max_position_embeddings=2048)
    fast, ids = copy.deepcopy(model), torch.cat(tokens(2, 9))
    GraphAcceleration(fast).take_over()
    many = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(fast.generate(ids, **many), model.generate(ids, **many))
    assert "fused" in repr(fast.acceleration)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    assert_close(fast.generate(ids, attention_mask=mask, **many), model.generate(ids, attention_mask=mask, **many))
    first, second = (m.generate(ids, return_dict_in_generate=True, **many) for m in (fast, model))
    again = [m.generate(r.sequences, past_key_values=r.past_key_values, **many)
             for m, r in ((fast, first), (model, second))]  # fmt: skip
    assert torch.equal(*again)
    assert fast.generate(ids, max_new_tokens=5, do_sample=True, top_k=3).shape == (2, 14)
    fast.acceleration.remove()
    assert "generate" not in vars(fast) and not hasattr(fast, "acceleration")


@pytest.mark.in_turns
@pytest.mark.parametrize("most", [1 << 62, 64])
@pytest.mark.parametrize("architecture", FUSED)
def test_sequences_with_padding_take_fused_steps(architecture, most, tiny, tokens, monkeypatch):
    """Over graphs that become too small, of which the last one may lack memory; and in a second turn. A window may end
    within the padding."""
    for name in ("LEAST", "SPARE"):
        monkeypatch.setattr(f"kernels.step.gpu.sizes.{name}", 16)
    steps, step, body = [], GraphStep.__call__, Graphs._body

    def limited(self, batch, positions, room):
        if positions > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return body(self, batch, positions, room)

    monkeypatch.setattr(GraphStep, "__call__", lambda self: (steps.append(1), step(self)))
    monkeypatch.setattr(Graphs, "_body", limited)
    model = tiny(architecture, max_position_embeddings=512)
    ids, mask = torch.cat(tokens(3, 30)), torch.ones(3, 30, dtype=torch.int64)
    mask[0, :7], mask[2, :25] = 0, 0

    def turns():
        many = {"max_new_tokens": 41, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        many |= {"return_dict_in_generate": True, "output_logits": True}
        first = model.generate(ids, attention_mask=mask, **many)
        longer = torch.cat([mask, torch.ones(3, 41, dtype=torch.int64)], 1)
        return first, model.generate(
            first.sequences, attention_mask=longer, past_key_values=first.past_key_values, **many
        )

    expected = turns()
    GraphAcceleration(model).take_over()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if most < 1 << 62 else "error")
        found = turns()
    assert len(steps) == (80 if most == 1 << 62 else 34)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, two.sequences)
        assert_close(torch.stack(one.logits), torch.stack(two.logits), rtol=1e-3, atol=1e-4)
        assert one.past_key_values.get_seq_length() == two.past_key_values.get_seq_length()


@pytest.mark.parametrize(("architecture", "hidden", "reason"), [
    ("llama", slice(3, 5), "not those of sequences with padding at the beginning"),
    ("phi", slice(0, 3), "only fused steps read padded sequences: .*Llama"),
])  # fmt: skip
def test_other_padding_is_left_to_the_models_own_code(architecture, hidden, reason, tiny, tokens):
    model, ids = tiny(architecture), torch.cat(tokens(2, 9))
    mask = torch.ones_like(ids)
    mask[0, hidden] = 0
    many = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **many)
    GraphAcceleration(model).take_over()
    with pytest.warns(UserWarning, match=f"without a CUDA graph: .*{reason}"):
        assert torch.equal(model.generate(ids, **many), expected)


def test_a_changed_model_gets_other_graphs(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(1, 9))
    GraphAcceleration(model).take_over()
    model.generate(ids, max_new_tokens=4, do_sample=False)
    plain = copy.deepcopy(apply([METHODS["rtn"](bits=2, group_size=16)], model).model)
    plain.acceleration.remove()
    many = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **many), plain.generate(ids, **many))


def test_graphs_in_use_are_not_lent_again(tiny, tokens):
    model = tiny("llama")
    acceleration = GraphAcceleration(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(tokens(1, 9)[0], past_key_values=cache)
    first = acceleration.steps(caches[0], 1)
    assert acceleration.steps(caches[1], 1) is None
    first.finish()
    assert acceleration.steps(caches[1], 1) is not None


def test_a_longer_text_gets_a_larger_graph(tiny, tokens, monkeypatch):
    for name in ("LEAST", "SPARE"):
        monkeypatch.setattr(f"kernels.step.gpu.sizes.{name}", 16)
    model = tiny("llama")
    fast, ids = copy.deepcopy(model), torch.cat(tokens(2, 9))
    GraphAcceleration(fast).take_over()
    many = {"max_new_tokens": 50, "do_sample": False}
    assert torch.equal(fast.generate(ids, **many), model.generate(ids, **many))


def test_a_graph_that_cannot_grow_hands_over_to_the_model(tiny, tokens, monkeypatch):
    """What was written stays, and memory that is short for one size does not forbid the others."""
    for name in ("LEAST", "SPARE"):
        monkeypatch.setattr(f"kernels.step.gpu.sizes.{name}", 16)
    model = tiny("llama")
    fast, ids = copy.deepcopy(model), torch.cat(tokens(2, 9))
    GraphAcceleration(fast).take_over()
    body = Graphs._body

    def small(self, batch, positions, room):
        if positions > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return body(self, batch, positions, room)

    monkeypatch.setattr(Graphs, "_body", small)
    many = {"max_new_tokens": 50, "do_sample": False, "return_dict_in_generate": True}
    with pytest.warns(UserWarning, match="the rest is written by the model's own code.*out of memory"):
        found = fast.generate(ids, **many)
    expected = model.generate(ids, **many)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    monkeypatch.setattr(Graphs, "_body", body)
    assert torch.equal(fast.generate(ids, **many).sequences, expected.sequences) and not fast.acceleration.why_not


def test_models_with_hooks_or_modes_run_without_a_graph(tiny, tokens):
    """Hooks run for every token, whenever they were registered; nor does a graph know modes."""
    model, ids, calls = tiny("llama"), tokens(1, 9)[0], []
    GraphAcceleration(model).take_over()
    model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert not model.acceleration.why_not
    hook = model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match=r"without a CUDA graph: model\.layers\.1 has hooks"):
        model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert len(calls) == 6
    hook.remove()
    model.generate(ids, max_new_tokens=6, do_sample=False)
    assert not model.acceleration.why_not
    model.train()
    with pytest.warns(UserWarning, match="the model is in training mode"):
        model.generate(ids, max_new_tokens=6, do_sample=False)


@torch.no_grad()
def test_measured_speed_takes_graphs_steps_behind_its_own_prompt(tiny):
    model = tiny("llama")
    cache = static_cache(model, 64)
    ids, at = (torch.arange(12)[None] * 5) % 90, torch.arange(12)[None]

    def prompt(tokens, positions):
        logits = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    prompt(ids, at), cache.reset()
    decoder = GraphDecoder(TimedModel(model, False, model=model, cache=cache), prompt, 64, 1)
    written = [decoder(ids, at)]
    for place in range(12, 20):
        written.append(decoder(written[-1], torch.tensor([[place]])))
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[:, 12:]
    assert torch.equal(torch.cat(written, 1), expected)
    assert decoder.how(0) == "eager prompt; steps op by op, fused"


@pytest.mark.parametrize("vocabulary", [7, 96, 128, 1024])
def test_the_first_of_equal_logits_is_the_largest(vocabulary):
    logits = torch.randint(4, (5, vocabulary)).float()
    out = torch.zeros(5, 1, dtype=torch.int64)
    assert torch.equal(largest(logits, out), logits.argmax(-1, keepdim=True)) and torch.equal(out, largest(logits))
