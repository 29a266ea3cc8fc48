"""Speed runs measure the model that they say they measure. No timing is asserted, but for ratios with wide margins."""

import copy

import pytest
import torch
from transformers import StaticCache

from compress import METHODS, apply
from eval import speed
from eval.speed import Variant, _round, fold_attention, measure_speed, standard_variants
from kernels import native


def greedy(model, prompt, count):
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("compiled", [False, True])
def test_timed_steps_decode_what_plain_passes_decode(tiny, architecture, compiled):
    """The static cache, the folded attention and the compiler must not change a token."""
    if compiled and architecture not in ("llama", "gemma3_text"):
        pytest.skip("one compile of each kind of attention is enough")
    model = tiny(architecture)
    said = []
    variant = Variant(fold_attention(copy.deepcopy(model)), fold_attention(copy.deepcopy(model)), compiled=compiled)

    def listen(_, args, kwargs, output):
        said.append(output.logits[:, -1].argmax(-1).item())

    if not compiled:
        variant.decode.register_forward_hook(listen, with_kwargs=True)
        variant.prefill.register_forward_hook(listen, with_kwargs=True)
    speed = measure_speed({"one": variant}, prompt_tokens=12, new_tokens=5, rounds=1)["one"]
    assert speed.execution.startswith("compiled") == compiled
    prompt = (torch.arange(12) * 7919 % 96)[None]
    expected = greedy(model, prompt, 6)
    if not compiled:
        assert said[-6:] == expected


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no 16-bit products in oneDNN on this processor")
def test_compiled_steps_are_frozen_and_write_what_the_models_write(tiny, monkeypatch):
    """The very steps that are timed, after all of them were compiled, as they are timed; the baseline's weights prepacked."""
    model = tiny("llama").bfloat16()
    small = apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model)).model
    variants = {name: Variant(m, fold_attention(m), compiled=True) for name, m in (("baseline", model), ("compressed", small))}
    said, measured_round = {}, speed._round

    def listening(variant, *arguments):
        step, written = variant.step, []
        variant.step = lambda token, position: written.append(step(token, position)) or written[-1]
        result = measured_round(variant, *arguments)
        variant.step = step
        said[id(variant)] = [token.item() for token in written]
        return result

    monkeypatch.setattr(speed, "_round", listening)
    speeds = measure_speed(variants, prompt_tokens=12, new_tokens=5, rounds=1)
    assert speeds["baseline"].execution == "compiled, 15 dense weights frozen and prepacked", "seven linears a block, and the head"
    assert speeds["compressed"].execution == "compiled, 1 dense weights frozen and prepacked"
    prompt = (torch.arange(12) * 7919 % 96)[None]
    for variant in variants.values():
        assert said[id(variant)] == greedy(variant.decode, prompt, 6)[1:]


def test_variants_run_in_turns_and_name_their_kernels(tiny):
    model = tiny("llama", hidden_size=64)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model))
    variants = standard_variants(model, result.model)
    for variant in variants.values():
        variant.compiled = False
    speeds = measure_speed(variants, prompt_tokens=96, new_tokens=3, rounds=2)
    assert list(speeds) == ["baseline", "compressed", "bfloat16", "float32"]
    fast = [f"cpu {native.isa(torch.bfloat16)}"] if native.why_not() is None else ["cpu dequantise", "cpu int4pack"]
    assert speeds["compressed"].kernels["int_matmul"] == fast
    assert speeds["baseline"].kernels["linear"] == ["cpu prepacked"]
    assert speeds["float32"].dtype == "float32" and speeds["baseline"].dtype == "bfloat16"
    for one in speeds.values():
        low, high = one.decode_quartiles
        assert 0 < low <= one.decode_tokens_per_s <= high and one.time_to_first_token_s > 0


def test_however_many_variants_all_are_compiled(tiny):
    """torch.compile gives up on code that it has compiled a few times, for whichever model: no variant may suffer from others."""
    model = tiny("llama", num_hidden_layers=1)
    variants = {name: Variant(one := copy.deepcopy(model), one, compiled=True) for name in ("one", "two")}
    with torch._dynamo.config.patch(recompile_limit=1):
        speeds = measure_speed(variants, prompt_tokens=8, new_tokens=2, rounds=1)
    assert all(speed.execution.startswith("compiled") for speed in speeds.values())


def test_models_that_do_not_compile_are_timed_eagerly_and_say_so(tiny):
    model = tiny("llama")
    with pytest.warns(UserWarning, match="does not compile"):
        broken = Variant(model, model, compiled=True)
        model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        speed = measure_speed({"one": broken}, prompt_tokens=4, new_tokens=2, rounds=1)["one"]
    assert speed.execution.startswith("eager (does not compile")


def test_bad_lengths(tiny):
    variant = {"one": Variant(tiny("llama"), tiny("llama"), compiled=False)}
    with pytest.raises(ValueError, match=r"`rounds` \(=0\)"):
        measure_speed(variant, rounds=0)
    with pytest.raises(ValueError, match=r"`prompt_tokens` \(=512\) \+ `new_tokens` \(=32\) must be at most 128"):
        measure_speed(variant)


def test_round_times_every_token(tiny):
    model = tiny("llama")
    variant = Variant(model, model, compiled=False)
    variant.step = lambda token, position: token
    ttft, tokens = _round(variant, StaticCache(config=model.config, max_cache_len=64), 8, 4)
    assert ttft > 0 and len(tokens) == 4
