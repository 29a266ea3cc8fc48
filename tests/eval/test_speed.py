"""Speed runs measure the model that they say they measure. No timing is asserted, but for ratios with wide margins."""

import copy

import pytest
import torch
from transformers import StaticCache

from compress import METHODS, apply
from eval.record.noise import spread
from eval.record.speed import Speed, TimingSettings
from eval.speed import attention, speed
from eval.speed.attention import fast_attention
from eval.speed.speed import BY_COMPILER, BY_GRAPH, TimedModel, _round, measure_speed, standard_variants
from kernels import native
from kernels.linear.onednn import lays_out
from kernels.step import forward
from kernels.step.gpu.accelerate import accelerate_by_graphs
from kernels.step.gpu.compiled import CompiledGraphs
from kernels.step.recognition.parts import NotNative


def greedy(model, prompt, count):
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, prompt.shape[1] :].tolist()


@pytest.fixture
def written(monkeypatch) -> dict[int, list[int]]:
    """{id of a variant: the tokens that its last round wrote}."""
    said, measured_round = {}, speed._round

    def listening(variant, *arguments):
        step, tokens = variant.step, []
        variant.step = lambda *inputs: tokens.append(step(*inputs)) or tokens[-1]
        result = measured_round(variant, *arguments)
        variant.step = step
        said[id(variant)] = [token.item() for token in tokens]
        return result

    monkeypatch.setattr(speed, "_round", listening)
    return said


# compiling takes time; the next test compiles Llama
COMPILED = [pytest.param(a, True, marks=pytest.mark.slow) for a in ("llama", "qwen2", "gpt2", "gemma3_text")]


@pytest.mark.in_turns
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "architecture, compiled", [*((a, False) for a in ("llama", "qwen2", "gpt2", "gemma3_text")), *COMPILED]
)
def test_timed_models_write_the_tokens_of_plain_passes(tiny, written, monkeypatch, architecture, compiled, own):
    """The static cache, the fast attention and the compiler must not change a token."""
    if compiled and (architecture, own) not in (("llama", True), ("gemma3_text", False)):
        pytest.skip("one compile of each kind of attention is enough")
    monkeypatch.setattr(attention, "faster_than_torch", lambda *_: own)
    model = tiny(architecture)
    fast = fast_attention(copy.deepcopy(model))
    variant = TimedModel(fast, compiled=compiled)
    one = measure_speed({"one": variant}, prompt_tokens=12, new_tokens=10, rounds=1)["one"]
    assert one.execution.startswith("eager") != compiled
    read = one.memory_limit_tokens_per_s * sum(p.nbytes for p in model.parameters())
    assert 1e9 < read < 5e12, "bytes per second of some memory"
    assert ("kv_decode" in one.kernels) == (native.why_not() is None)
    assert ("prompt_attention" in one.kernels) == own, "no mask is made for a prompt, in a compiled pass either"
    assert written[id(variant)] == greedy(model, (torch.arange(12) * 7919 % 96)[None], 11), (
        "beyond Gemma's window of 8, too"
    )


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no 16-bit products in oneDNN on this processor"
)
@pytest.mark.parametrize(
    "names", [["compressed"], pytest.param(["baseline", "compressed"], marks=pytest.mark.slow)], ids="-".join
)
def test_fast_passes_write_what_the_models_write(tiny, written, monkeypatch, names):
    """The very passes that are timed, as they are timed; the baseline's weights prepacked, and attention by our
    kernel."""
    for module in (attention, forward):
        monkeypatch.setattr(module, "faster_than_torch", lambda *_: True)
    model = tiny("llama").bfloat16()
    small = apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model)).model
    plain = {name: {"baseline": model, "compressed": small}[name] for name in names}
    variants = {name: TimedModel(m, True, lambda m: (fast_attention(copy.deepcopy(m)), m)) for name, m in plain.items()}
    generated, write = {}, speed.write

    def listening(model, *arguments, **how):
        generated[id(model)] = write(model, *arguments, **how)
        return generated[id(model)]

    monkeypatch.setattr(speed, "write", listening)
    speeds = measure_speed(variants, prompt_tokens=12, new_tokens=5, rounds=1)
    expected = [greedy(plain[name], (torch.arange(12) * 7919 % 96)[None], 6) for name in names]
    assert [one[0].tokens for one in generated.values()] == expected, "by `generate`, which is timed beside the step"
    dense = {"baseline": 15, "compressed": 1}  # seven a block, and the head
    for name, variant in variants.items():
        compiled = f"compiled, {dense[name]} dense weights in fast products; no native step: {native.why_not()}"
        how = compiled if native.why_not() else "native prompt; native step"
        assert speeds[name].execution.removesuffix("; huge pages") == how
        assert written[id(variant)] == greedy(plain[name], (torch.arange(12) * 7919 % 96)[None], 6)
        assert "prompt_attention" in speeds[name].kernels, "in a compiled pass, too"


def test_variants_run_in_turns_and_name_their_kernels(tiny):
    model = tiny("llama", hidden_size=64)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model))
    variants = standard_variants(model, result.model)
    for variant in variants.values():
        variant.compiled = False
    speeds = measure_speed(variants, prompt_tokens=96, new_tokens=3, rounds=2)
    assert list(speeds) == ["baseline", "compressed", "bfloat16", "float32"]
    prompt_and_step = {f"cpu {native.isa(torch.bfloat16, many)}" for many in (True, False)}
    fast = prompt_and_step if native.why_not() is None else {"cpu dequantise", "cpu int4pack"}
    assert set(speeds["compressed"].kernels["int_matmul"]) == fast
    if lays_out(torch.bfloat16):  # oneDNN has no products of it on processors with AVX2 alone
        assert speeds["baseline"].kernels["linear"] == ("cpu prepacked",)
    assert speeds["float32"].dtype == "float32" and speeds["baseline"].dtype == "bfloat16"
    for one in speeds.values():
        for (low, high), median in (
            (one.decode_quartiles, one.decode_tokens_per_s), (one.step_quartiles, one.step_tokens_per_s),
        ):  # fmt: skip
            assert 0 < low <= median <= high and one.time_to_first_token_s > 0


@pytest.mark.parametrize("rates", [(9, 7, 5), (7, 9, 5), (7, 5, 9)])
def test_the_fastest_way_of_the_baseline_counts(rates):
    """Whichever that is; the others keep names that say what they are."""
    names = ["baseline", BY_COMPILER, "bfloat16", "compressed", "float32"]
    speeds = {name: Speed(rate, (), 1.0, (), 1.0, "", name, {}, TimingSettings())
              for name, rate in zip(names, (*rates, 20, 1), strict=True)}  # fmt: skip
    found = speed._strongest_as_baseline(speeds)
    assert found["baseline"].decode_tokens_per_s == 9
    others = {name: one.execution for name, one in found.items() if name != "baseline"}
    graph = others.pop(BY_GRAPH, found["baseline"].execution)
    assert graph == "baseline" and all(name == execution for name, execution in others.items())
    assert {one.execution for one in found.values()} == set(names)


@torch.no_grad()
def test_a_whole_model_in_the_compiler_takes_the_steps_of_its_own_code(tiny, monkeypatch):
    """`torch.compile` is replaced by what it returns on a GPU: something that is called as the model is."""
    asked, ids = [], (torch.arange(12)[None] * 5) % 90
    monkeypatch.setattr(torch, "compile", lambda model, **how: asked.append(how) or (lambda *a, **k: model(*a, **k)))
    model = tiny("llama")
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
    graphs = CompiledGraphs(model)
    accelerate_by_graphs(model, graphs)
    assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None), expected)
    assert asked == [{"mode": "reduce-overhead", "dynamic": False}] and not model.acceleration.why_not
    assert graphs.how == 'torch.compile(mode="reduce-overhead")'
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(NotNative, match="switched off"):
        CompiledGraphs(model).step(1, 64)


def test_the_first_variant_is_timed_twice_in_every_turn(tiny, monkeypatch):
    """The same object again, between the others: no copy is made."""
    models = [tiny("llama", num_hidden_layers=1) for _ in range(3)]
    variants = {name: TimedModel(one, compiled=False) for name, one in zip("abc", models, strict=True)}
    turns, seconds = [], iter([1.0, 1.0, 1.02, 1.0] * 3)

    def times(variant, *_):
        turns.append(variant)
        return (next(seconds), 0.5, 0.25)

    monkeypatch.setattr(speed, "_times", times)
    found = measure_speed(variants, prompt_tokens=4, new_tokens=2, rounds=3)
    a, b, c = variants.values()
    assert turns == [a, b, a, c] * 3
    assert [len(one.ttft_s) for one in (a, b, c)] == [3, 3, 3], "the second timing is not among the results"
    for one in found.values():
        assert one.spread == {"prefill": pytest.approx(spread([1 / 1.02] * 3, 3)), "step": 0.0, "decode": 0.0}
        assert one.load.seconds >= 0 and (one.load.others is None or 0 <= one.load.others <= 1.01)


def test_a_variant_that_is_far_slower_is_timed_less_often(tiny, monkeypatch):
    """As one in emulated products is, whose rounds would take most of the time; its record says in how many rounds."""
    models = {name: tiny("llama", num_hidden_layers=1) for name in ("first", "slow", "other")}
    variants = {name: TimedModel(one, compiled=False) for name, one in models.items()}
    monkeypatch.setattr(speed, "_times", lambda one, *_: (90.0 if one is variants["slow"] else 1.0, 0.1, 0.1))
    found = measure_speed(variants, prompt_tokens=4, new_tokens=2, rounds=5)
    assert {name: one.settings.rounds for name, one in found.items()} == {"first": 5, "slow": 2, "other": 5}
    assert found["slow"].time_to_first_token_s == 90.0


@pytest.mark.slow
def test_however_many_variants_all_are_compiled(tiny):
    """torch.compile gives up on code that it has compiled a few times, for whichever model: no variant may suffer from
    others, and one graph serves all layers."""
    model = tiny("llama", num_hidden_layers=4)
    variants = {name: TimedModel(copy.deepcopy(model), compiled=True) for name in ("one", "two")}
    with torch._dynamo.config.patch(recompile_limit=1):
        speeds = measure_speed(variants, prompt_tokens=8, new_tokens=2, rounds=1)
    assert not any(speed.execution.startswith("eager") for speed in speeds.values())


@pytest.mark.slow
def test_variants_that_memory_does_not_hold_are_timed_in_groups(tiny, monkeypatch, written):
    """The baseline in every group, all others once; what was timed is let go, and all write what they should."""
    model = tiny("llama", num_hidden_layers=1)
    variants = {name: TimedModel(copy.deepcopy(model), compiled=name != "c") for name in ("baseline", "a", "b", "c")}
    alive = []

    def free(variant):
        alive.append([name for name, one in variants.items() if one.model is not None])
        return 1000 - 400 * len(alive[-1])  # two are too many already

    monkeypatch.setattr(speed, "_free_bytes", free)
    found = measure_speed(variants, prompt_tokens=8, new_tokens=2, rounds=2)
    assert all(len(names) <= 2 for names in alive)
    assert [len(variant.ttft_s) for variant in variants.values()] == [6, 2, 2, 2]
    assert found["a"].settings.groups == 3 and not any(variant.model or variant.step for variant in variants.values())
    expected = greedy(model, (torch.arange(8) * 7919 % 96)[None], 3)
    assert all(written[id(variant)] == expected for variant in variants.values())


def test_models_that_do_not_compile_are_timed_eagerly_and_say_so(tiny):
    model = tiny("llama")
    with pytest.warns(UserWarning, match="does not compile"):
        broken = TimedModel(model, compiled=True)
        model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        speed = measure_speed({"one": broken}, prompt_tokens=4, new_tokens=2, rounds=1)["one"]
    assert speed.execution.startswith("eager (does not compile")


def test_a_compiler_that_is_switched_off_is_not_said_to_have_run(tiny, monkeypatch):
    variant = TimedModel(tiny("llama"), compiled=True)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    speed = measure_speed({"one": variant}, prompt_tokens=4, new_tokens=2, rounds=1)["one"]
    assert speed.execution == "eager (the compiler is switched off)"


def test_bad_lengths(tiny):
    variant = {"one": TimedModel(tiny("llama"), compiled=False)}
    with pytest.raises(ValueError, match=r"`rounds` \(=0\)"):
        measure_speed(variant, rounds=0)
    with pytest.raises(ValueError, match=r"`prompt_tokens` \(=512\) \+ `new_tokens` \(=32\) must be at most 128"):
        measure_speed(variant)


def test_round_times_every_token(tiny):
    model = tiny("llama")
    variant = TimedModel(model, compiled=False)
    variant.step, variant.cache = (lambda token, position: token), StaticCache(config=model.config, max_cache_len=64)
    ttft, tokens = _round(variant, 8, 4)
    assert ttft > 0 and len(tokens) == 4
