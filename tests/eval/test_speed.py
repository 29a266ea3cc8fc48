"""Speed runs measure the model that they say they measure. No timing is asserted, but for ratios with wide margins."""

import copy

import pytest
import torch
from transformers import StaticCache

from compress import METHODS, apply
from eval.speed import Variant, _round, fold_attention, measure_speed, standard_variants


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
    else:
        cache = StaticCache(config=model.config, max_cache_len=64)
        variant.prefill(prompt, past_key_values=cache, use_cache=True)
        step = torch.compile(
            lambda t, p: variant.decode(t, past_key_values=cache, position_ids=p).logits[:, -1].argmax(-1, keepdim=True),
            fullgraph=True,
        )
        token, found = torch.tensor([[expected[0]]]), []
        for i in range(5):
            token = step(token, torch.tensor([[12 + i]]))
            found.append(token.item())
        assert found == expected[1:]


def test_variants_run_in_turns_and_name_their_kernels(tiny):
    model = tiny("llama", hidden_size=64)
    result = apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model))
    variants = standard_variants(model, result.model)
    for variant in variants.values():
        variant.compiled = False
    speeds = measure_speed(variants, prompt_tokens=96, new_tokens=3, rounds=2)
    assert list(speeds) == ["baseline", "compressed", "bfloat16", "float32"]
    assert speeds["compressed"].kernels["int_matmul"] == ["cpu dequantise", "cpu int4pack"]
    assert speeds["baseline"].kernels["linear"] == ["cpu prepacked"]
    assert speeds["float32"].dtype == "float32" and speeds["baseline"].dtype == "bfloat16"
    for speed in speeds.values():
        low, high = speed.decode_quartiles
        assert 0 < low <= speed.decode_tokens_per_s <= high and speed.time_to_first_token_s > 0


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
