"""An accelerated model generates what the model generates, from every kind of cache and batch."""

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache

from compress.apply import apply
from compress.recipe import parse_recipe
from kernels import native
from kernels.registry import recording
from kernels.step import accelerate as accelerated
from kernels.step import forward
from kernels.step.accelerate import accelerate
from kernels.step.between import add_norm, gated
from kernels.step.native import MOST_TOKENS
from kernels.step.outputs import check_outputs
from kernels.step.program import Norm
from kernels.step.recognition import recognise as recognition
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import recognise

pytestmark = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)


def logits(model, ids, mask=None, steps=6):
    """Of a prompt and some steps behind it, float32 [batch, steps + 1, vocabulary]."""
    cache, found = DynamicCache(config=model.config), []
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(steps + 1):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        found.append(out.logits[:, -1].float())
        ids = (31 * ids[:, -1:] + len(found)) % 96
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(found, 1)


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("architecture, more", [
    ("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 8}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
])  # fmt: skip
def test_steps_of_one_sequence_read_several_tokens_and_are_cut_back(tiny, architecture, more, monkeypatch):
    """Logits are those of steps of one token, bit by bit, also where the cache grows, and behind removed positions."""
    monkeypatch.setattr("kernels.step.cache.SPARE", 20)  # free positions
    model = accelerate(tiny(architecture, **more).bfloat16())
    prompt, more_ids = (torch.arange(n)[None] * 7919 % 96 for n in (12, 60))
    rows = []
    for counts in ([1] * 60, [16, 3, 1, 16, 8, 16]):
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache)
        steps, at, found = model.acceleration.steps(cache, 1, max(counts)), 0, []
        for count in counts:
            if count == 3:  # tokens that are removed again
                steps(more_ids[:, :5] + 1)
                steps.cut(5)
            steps(more_ids[:, at : at + count])
            found += steps.logits.clone()
            at += count
        steps.finish()
        assert cache.get_seq_length() == 12 + 60 and (steps.logits.shape[0] == counts[-1])
        rows.append((torch.stack(found), cache.layers[0].keys, cache.layers[-1].values))
    assert all(map(torch.equal, *rows))
    assert model.acceleration.verifies()


@torch.no_grad()
def test_a_step_that_rounds_in_another_way_does_not_verify(tiny, monkeypatch):
    """As it may be with a processor or a format that nobody has tried: then nothing is guessed."""
    model, run = accelerate(tiny("llama").bfloat16()), accelerated._Bound.run

    def other(self, ids, slot):
        largest = run(self, ids, slot)
        if ids.shape[1] > 1:
            self.step.step.logits[-1, 3] += 1e-3
        return largest

    monkeypatch.setattr(accelerated._Bound, "run", other)
    assert not model.acceleration.verifies()


MIXTURES = "moe", "mixtral", "minimax"


def close(found: torch.Tensor, expected: torch.Tensor, architecture: str) -> bool:
    """Are logits [..., vocabulary] close? In a mixture rounding may choose another expert for a few tokens."""
    found, expected = found.float(), expected.float()
    if any(name in architecture for name in MIXTURES):
        each = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(each.median()) < 0.05
    return float((found - expected).norm() / expected.norm()) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("architecture, more", [("llama", {}), ("mistral", {"sliding_window": 8}), ("gemma3_text", {})])
def test_a_second_turn_reads_what_the_first_one_left(tiny, architecture, more, own, monkeypatch):
    """Of a batch with padding, too, longer than it is here and past the windows; attention is ours, or torch's."""
    if own and native.why_not() is not None:
        pytest.skip("attention of ours needs the C++ kernels")
    monkeypatch.setattr(forward, "faster_than_torch", lambda *_: own)
    model = tiny(architecture, **more).bfloat16()
    ids = (torch.arange(2 * 25) * 7919 % 96).view(2, 25)

    def turns(mask):
        cache = DynamicCache(config=model.config)
        found = []
        for begin, end in ((0, 11), (11, 25)):
            seen = {} if mask is None else {"attention_mask": mask[:, :end]}
            found.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True, **seen).logits)
        return torch.cat(found, 1)

    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    expected = [turns(None), turns(padded)]
    accelerate(model)
    for mask, right in zip((None, padded), expected, strict=True):
        with recording() as ran:
            found = turns(mask)
        assert ("prompt_attention" in ran) == own
        real = slice(None) if mask is None else mask.bool()
        assert close(found[real], right[real], architecture)


FACTORS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 13.0,
}


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("batch, padded", [(1, False), (2, False), (3, True), (9, False)])
@pytest.mark.parametrize("architecture, more", [
    ("llama", {}), ("qwen2", {"num_key_value_heads": 1}), ("qwen3", {}), ("mistral", {"sliding_window": 8}),
    ("gemma3_text", {}), ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("granite", FACTORS), ("smollm3", {"no_rope_layers": [1, 0]}), ("phi3", {"partial_rotary_factor": 0.5}),
    ("qwen3_moe", {}), ("qwen2_moe", {}), ("mixtral", {}), ("glm4_moe", {}), ("granitemoe", FACTORS),
    ("olmo2", {}), ("olmo3", {}), ("olmoe", {}), ("minimax_m2", {}), ("exaone4", {}), ("exaone_moe", {}),
    ("glm", {}), ("glm4", {}), ("ernie4_5", {}), ("ernie4_5_moe", {}),
])  # fmt: skip
def test_logits_are_those_of_the_model(tiny, architecture, more, batch, padded):
    model = tiny(architecture, **more).bfloat16()
    ids = (torch.arange(batch * 12) * 7919 % 96).view(batch, 12)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    first = logits(model, ids, mask)[:, :1]
    accelerate(model)
    assert "steps in one call of C++" in repr(model.acceleration)
    with recording() as ran:
        found, accelerated = logits(model, ids, mask), model.acceleration
    assert ("decode_step" in ran) == (batch <= MOST_TOKENS)
    accelerated.remove()
    expected = logits(model, ids, mask)
    assert torch.allclose(first, expected[:, :1])
    assert close(found, expected, architecture)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["ernie4_5_moe", "glm4_moe"])
def test_the_choice_of_experts_has_its_bias(tiny, architecture):
    """A bias of the choice alone, which a model of random weights has as zeros."""
    model = tiny(architecture).bfloat16()
    biases = [
        b for n, b in (*model.named_parameters(), *model.named_buffers()) if n.endswith("e_score_correction_bias")
    ]
    assert biases
    for bias in biases:
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    ids = (torch.arange(12) * 7919 % 96)[None]
    expected = logits(model, ids)
    accelerate(model)
    assert "steps in one call of C++" in repr(model.acceleration)
    assert all(block.mixture.choice.bias is not None for block in recognise(model).blocks if block.mixture)
    found = logits(model, ids)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.05


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["silent expert", "other rule"])
def test_mixtures_that_do_something_else_are_left_alone(tiny, wrong):
    """Whatever their module is called: it is compared with what its experts and its router give."""
    model = tiny("mixtral").bfloat16()
    mlp = model.model.layers[1].mlp
    own = type(mlp).forward
    if wrong == "other rule":
        mlp.gate.forward = lambda x, own=mlp.gate.forward: (lambda logits, w, i: (logits, w * w, i))(*own(x))
    else:
        mlp.__class__ = type("Doubled", (type(mlp),), {"forward": lambda self, x: 2 * own(self, x)})
    with pytest.warns(UserWarning, match="hooks" if wrong == "other rule" else "block 1's mixture .* another rule"):
        accelerate(model)
    assert not hasattr(model, "acceleration")


@torch.no_grad()
def test_rotary_frequencies_that_change_with_the_length(tiny):
    """As Phi-4-mini's: before the change, across it, where transformers reads the text again, and behind it."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.2, 1.4, 1.6],
              "long_factor": [1.0, 3.0, 6.0, 9.0], "original_max_position_embeddings": 48}  # fmt: skip
    more = {"rope_parameters": rotary, "original_max_position_embeddings": 48, "max_position_embeddings": 128}
    own, model = (tiny("phi3", **more).bfloat16() for _ in range(2))
    accelerate(model)
    assert "steps in one call of C++" in repr(model.acceleration)
    ids, reader = (torch.arange(70) * 7919 % 96)[None], model.acceleration._reader
    for length in (20, 44, 60):
        found, expected = logits(model, ids[:, :length], steps=8), logits(own, ids[:, :length], steps=8)
        assert float((found - expected).norm() / expected.norm()) < 0.05
        how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids[:, :length], **how), own.generate(ids[:, :length], **how))
    assert model.acceleration._reader is reader, "frequencies that are written again are no change of the model"


@torch.no_grad()
@pytest.mark.parametrize("wrong, message", [
    ({"logit_scale": 1.1}, "head gives other logits"), ({"embedding_scale": 1.1}, "embedding gives other rows"),
    ({"residual_scale": 0.9}, "block 0 gives another output"),
])  # fmt: skip
def test_other_factors_are_refused(tiny, wrong, message):
    model = tiny("granite", **FACTORS).bfloat16()
    check_outputs(model, decoder := recognise(model))
    scale = {name: getattr(decoder, name) * factor for name, factor in wrong.items()}
    with pytest.raises(NotNative, match=message):
        check_outputs(model, dataclasses.replace(decoder, **scale))


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2_moe"])
@pytest.mark.parametrize("recipe", [
    "rtn(bits=4, group_size=32, grid=iq4_nl)", "rtn(bits=3, group_size=32)", "int8", "magnitude(ratio=0.5)",
    "rtn(bits=4, group_size=32), activations(bits=8)", "rotate, rtn(bits=4, group_size=32)", "qtip(bits=3, states=12)",
])  # fmt: skip
def test_compressed_models_are_accelerated(tiny, tokens, architecture, recipe):
    """Also if one linear gives queries, keys and values, if the residual stream is rotated between the blocks, and if
    there are experts."""
    model = apply(parse_recipe(recipe), tiny(architecture, num_hidden_layers=3), tokens()).model.bfloat16()
    ids = (torch.arange(80) * 7919 % 96).view(2, 40)
    expected = logits(model, ids)
    accelerate(model)
    in_one_call = not (architecture != "llama" and "qtip" in recipe)  # walks of several outputs do not lie apart
    assert ("steps in one call of C++" in repr(model.acceleration)) == in_one_call
    found = logits(model, ids)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2_moe"])
@pytest.mark.parametrize("recipe", ["int8", "int8(activations=tensor)"])
def test_int8_has_steps_where_integers_are_not_multiplied(tiny, tokens, architecture, recipe, monkeypatch):
    """As on most desktops: its codes are multiplied by rounded inputs in floats. Copies and files have the codes alone."""
    monkeypatch.setattr(native, "_integers", lambda: "")
    monkeypatch.setattr("compress.formats.eight_bit.prepacked_fits", lambda w: False)
    model = apply(parse_recipe(recipe), tiny(architecture, num_hidden_layers=3), tokens()).model.bfloat16()
    ids = (torch.arange(80) * 7919 % 96).view(2, 40)
    expected, stored = logits(model, ids), {name: t.clone() for name, t in model.state_dict().items()}
    accelerate(model)
    assert "steps in one call of C++" in repr(model.acceleration)
    found = logits(model, ids)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.05
    assert all(torch.equal(t, stored[name]) for name, t in model.state_dict().items())
    part = next(module for module in model.modules() if getattr(module, "panels", None) is not None)
    assert torch.equal(copy.deepcopy(part).dequantize(), part.dequantize())


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("drops", [
    "layer_drop(layers='0')", "layer_drop(layers='2')", "layer_drop(target=mlp, layers='0')", "layer_drop(target=mlp, layers='1, 2')",
    "layer_drop(layers='0, 2'), layer_drop(target=mlp, layers='1, 2')",
])  # fmt: skip
def test_models_without_some_attention_and_mlps(tiny, tokens, architecture, drops):
    """Every kind of pass: prompts, steps of one and of several sequences, padding, guesses, compressed caches."""
    from compress.kv import attach, attachment_of, detach

    model = apply(parse_recipe(drops), tiny(architecture, num_hidden_layers=3), tokens()).model.bfloat16()
    ids = (torch.arange(36) * 7919 % 96).view(3, 12)
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    asked = (ids[:1], None), (ids, None), (ids, padded)
    expected = [logits(model, *one) for one in asked]
    compressed = parse_recipe("kv_int(bits=8, group_size=32, residual=0)")
    attach(model, compressed)
    caches = [attachment_of(model).cache() for _ in range(2)]
    own = [model(part, past_key_values=caches[0]).logits for part in (ids, ids[:, :1])]
    accelerate(model)
    assert "steps in one call of C++" in repr(model.acceleration) and model.acceleration.verifies()
    with recording() as ran:
        ours = [model(part, past_key_values=caches[1]).logits for part in (ids, ids[:, :1])]
    assert "decode_step" in ran and caches[1].get_seq_length() == caches[0].get_seq_length() == 13
    detach(model)
    with recording() as ran:
        found = [logits(model, *one) for one in asked]
    assert "decode_step" in ran
    for a, b in zip([*ours, *found], [*own, *expected], strict=True):
        assert close(a, b, architecture)
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cache = DynamicCache(config=model.config)
    written = model.generate(ids[:1], past_key_values=cache, **how)
    assert [layer.get_seq_length() for layer in cache.layers] == [19] * 3  # the last token is not read
    assert torch.equal(written, model.generate(ids[:1], prompt_lookup_num_tokens=4, **how))


@torch.no_grad()
def test_generate_beams_and_copies(tiny):
    model = accelerate(tiny("llama").bfloat16())
    ids = torch.arange(10)[None] * 31 % 96
    copied = copy.deepcopy(model)
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        ours = model.generate(ids, num_beams=beams, **how)
        assert ours.shape == (1, 18) and torch.equal(ours, copied.generate(ids, num_beams=beams, **how))


def test_unknown_models_are_not_accelerated_with_a_warning(tiny):
    with pytest.warns(UserWarning, match="not accelerated"):
        model = accelerate(tiny("gpt2"))
    assert not hasattr(model, "acceleration")
    with pytest.raises(ValueError, match="`dtype`"):
        accelerate(model, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", native.ISAS)
def test_operations_between_products_agree_with_torch(isa, dtype):
    if not native.runs(isa):
        pytest.skip(f"no {isa} here")
    torch.manual_seed(1)
    x, up = (3 * torch.randn(5, 37)).to(dtype), torch.randn(5, 37).to(dtype)
    expected = torch.nn.functional.silu(x.float()) * up.float()
    assert torch.allclose(gated(x.clone(), up, "silu", isa).float(), expected, rtol=0.01, atol=1e-3)
    residual, norm = torch.randn(5, 37), Norm(torch.rand(37), 1e-5)
    total = residual + x.float()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    y = add_norm(residual, x, None, norm, torch.empty_like(x), isa)
    assert torch.allclose(residual, total) and torch.allclose(y.float(), expected, rtol=0.01, atol=1e-3)


@torch.no_grad()
def test_weights_lie_in_memory_once_if_that_is_asked(tiny):
    model = accelerate(tiny("llama"), lay_out=False)
    ids = torch.arange(64)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert not model.acceleration._reader.tensors and copy.deepcopy(model).acceleration.lay_out is False


@torch.no_grad()
def test_changes_of_the_model_are_seen_at_the_next_prompt(tiny):
    from compress import METHODS, apply

    ids = torch.arange(12)[None] * 7919 % 96
    model = accelerate(tiny("llama").bfloat16())
    logits(model, ids)
    apply([METHODS["rtn"](bits=3, group_size=16)], model)
    found = logits(model, ids)
    assert "in one call of C++" in repr(model.acceleration)
    accelerated = model.acceleration
    accelerated.remove()
    expected = logits(model, ids)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert accelerate(model, "float16").dtype == torch.float16
    logits(model, ids)
    with pytest.warns(UserWarning, match=r"changed after `accelerate`.*float32.*`model.acceleration.remove\(\)`"):
        logits(model.float(), ids)
    assert "own code" in repr(model.acceleration)


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("recipe", [
    "streaming(budget=8)", "snapkv(budget=0.5, observed=4)", "h2o(budget=0.5)", "kvzip(budget=0.5)", "gemfilter(budget=0.5)",
    "kv_int(bits=4, group_size=32, residual=0)", "quest(budget=8, page=4, full_layers=1)", "keydiff(budget=0.5), kv_int(bits=8)",
])  # fmt: skip
def test_a_compressed_cache_attends_in_fast_passes(tiny, architecture, recipe):
    """In both orders, over several turns, with nearly the logits of the model's own passes; where scores choose what is
    kept, rounding may choose another position of nearly the same score."""
    from compress.kv import attach, attachment_of

    ids, more = torch.arange(48).view(2, 24) * 31 % 96, torch.arange(10).view(2, 5) * 17 % 96
    plain, before, after = (tiny(architecture).bfloat16() for _ in range(3))
    for model in (plain, before):
        attach(model, parse_recipe(recipe))
    accelerate(before)
    attach(accelerate(after), parse_recipe(recipe))
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected, caches, most = None, {}, 0.05 if recipe.startswith(("streaming", "kv_int")) else 0.3
    for name, model in (("plain", plain), ("before", before), ("after", after)):
        cache = caches[name] = attachment_of(model).cache()
        found = [model(part, past_key_values=cache).logits.float() for part in (ids, ids[:, :1], more, ids[:, 2:3])]
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
            assert a.shape == b.shape and float((a - b).norm() / b.norm()) < most
        held, others = (sum(t.nbytes for layer in c.own for t in layer.held) for c in (cache, caches["plain"]))
        assert cache.get_seq_length() == 31 and abs(held - others) <= 0.02 * held
        assert model.generate(ids, **how).shape == (2, 30)
    assert all("own code" not in repr(model.acceleration) for model in (before, after))


@pytest.mark.in_turns
@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("recipe", "share"), [
    ("streaming(budget=8)", 1.0), ("snapkv(budget=0.5, observed=4, allocation=ada)", 1.0), ("h2o(budget=0.5)", 1.0),
    ("kv_int(bits=4, group_size=32, residual=8)", 0.9), ("kv_int(bits=8, group_size=32), keydiff(budget=0.5)", 0.9),
    ("kv_int(bits=2, group_size=32, residual=0, value_bits=3)", 0.9), ("kv_int(bits=4, group_size=32, rotate_keys=True)", 0.6),
    ("kv_int(bits=4, group_size=32, value_bits=3, rotate_values=True)", 0.6),
    ("quest(budget=0.5, page=4, full_layers=0)", 1.0), ("streaming(budget=12), quest(budget=0.75, page=2, full_layers=1)", 1.0),
    ("quest(budget=0.5, page=4, full_layers=0), kv_int(bits=4, group_size=32, rotate_keys=True)", 0.6),
    ("snapkv(budget=0.5, observed=4, allocation=ada), quest(budget=0.5, page=4, full_layers=0)", 1.0),
    ("kv_fp8()", 0.0), ("streaming(budget=8, decoding=True)", 0.0), ("xkv()", 0.0), ("zipvl()", 0.0),
])  # fmt: skip
def test_steps_read_what_layers_lend_as_the_layers_do(tiny, architecture, recipe, share, monkeypatch):
    """A step that puts its keys into the layers' own tensors gives the logits, and leaves the cache, of one that hands
    them over; over groups that become codes, and windows that are moved."""
    from compress.kv import CompressedCache, attach, attachment_of

    model = accelerate(tiny(architecture).bfloat16())
    attach(model, parse_recipe(recipe))
    ids = torch.arange(3 * 24).view(3, 24) * 31 % 96
    lend, lent = CompressedCache.lend, []

    def noted(cache, number):
        given = lend(cache, number)
        if number == len(cache.layers) - 1:  # the last layer sees all positions
            lent.append(given is not None)
        return given

    found = []
    for how in (noted, lambda cache, number: None):
        monkeypatch.setattr(CompressedCache, "lend", how)
        cache = attachment_of(model).cache()
        model(ids, past_key_values=cache)
        logits = [model((ids[:, :1] + i) % 96, past_key_values=cache).logits.float() for i in range(44)]
        found.append((torch.cat(logits, 1), cache))
    (a, own), (b, other) = found
    most = 0.3 if "bits=2" in recipe else 0.05  # rounded differently, a number may become another code
    if "quest" in recipe:  # by token: where pages rank almost alike, one of them may read another page
        assert float(((a - b).norm(dim=(0, 2)) / b.norm(dim=(0, 2))).median()) < 0.02
    else:
        assert float((a - b).norm() / b.norm()) < 0.02
    assert own.get_seq_length() == other.get_seq_length() == 68 and sum(lent) >= share * 44 and (share or not any(lent))
    for one, two in zip(own.own, other.own, strict=True):
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.lengths, two.lengths) and one.fresh == two.fresh
        assert sum(t.nbytes for t in one.held) == sum(t.nbytes for t in two.held)
        for x, y in zip(*((slab.dense() for slab in layer.slabs) for layer in (one, two)), strict=True):
            assert all(float((p - q).float().norm() / q.float().norm()) < most for p, q in zip(x, y, strict=True))
    for one, two in zip(own.layers, other.layers, strict=True):
        assert one.get_seq_length() == two.get_seq_length()
        if one not in own.own:
            assert float((one.keys - two.keys).float().norm() / two.keys.float().norm()) < 0.05


@torch.no_grad()
def test_positions_may_be_ahead_of_the_cache(tiny):
    plain, fast = tiny("llama").bfloat16(), accelerate(tiny("llama").bfloat16())
    ids, at = torch.arange(12)[None] * 31 % 96, torch.arange(500, 512)[None]
    expected, found = (
        m(ids, past_key_values=DynamicCache(config=m.config), position_ids=at).logits.float() for m in (plain, fast)
    )
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.in_turns(2)
@torch.no_grad()
@pytest.mark.parametrize(
    "recipe", ["streaming(budget=8)", "kv_int(bits=4, group_size=32, residual=0)", "quest(budget=0.75, page=2)"]
)
def test_steps_behind_padding_and_a_compressed_cache(tiny, recipe):
    """Prompts with padding go the model's own way, and their steps too where layers with windows keep padding."""
    from compress.kv import attach

    ids = torch.arange(40).view(2, 20) * 31 % 96
    mask = (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    for architecture, native_steps in (("llama", True), ("gemma3_text", False)):
        model, plain = (tiny(architecture).bfloat16() for _ in range(2))
        attach(accelerate(model), parse_recipe(recipe)), attach(plain, parse_recipe(recipe))
        logits(model, ids, mask, steps=0)  # the model has changed, and is looked at anew
        with recording() as ran:
            found = logits(model, ids, mask)
        expected = logits(plain, ids, mask)
        assert ("decode_step" in ran) == native_steps and torch.equal(found[:, 0], expected[:, 0])
        if not native_steps:
            assert torch.equal(found, expected)
        assert float(((found - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))).median()) < 0.05


@torch.no_grad()
def test_calls_that_ask_for_more_get_what_the_model_gives(tiny):
    model = accelerate(tiny("llama").bfloat16())
    ids = torch.arange(10)[None]
    assert isinstance(model(ids, past_key_values=DynamicCache(config=model.config), return_dict=False), tuple)
    model.config.output_hidden_states = True
    assert model(ids, past_key_values=DynamicCache(config=model.config)).hidden_states
    for wrong in ("smollm2-135m", (model, None), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="`model` .* must be a model of transformers"):
            accelerate(wrong)


LOOKALIKES = {  # modules of a Llama, other queries and keys
    "exaone4": (  # no layer rotates, and none beside it does
        {"head_dim": 16, "sliding_window": 16, "layer_types": ["full_attention", "full_attention"]},
        "block 0 makes other queries than a Llama's.* at position 0"),
    "ministral3": (  # scales queries from position 64 on
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
                                             "original_max_position_embeddings": 64}},
        "block 0 makes other queries than a Llama's from its input, different by .* at position 112"),
}  # fmt: skip


def lookalike(architecture: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    config = AutoConfig.for_model(architecture, **sizes, **LOOKALIKES[architecture][0])
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


@torch.no_grad()
@pytest.mark.parametrize("architecture", LOOKALIKES)
def test_models_that_only_resemble_a_llama_are_not_accelerated(architecture):
    """Layers are compared one by one: the logits of so few tokens hardly differ."""
    model, reason = lookalike(architecture), LOOKALIKES[architecture][1]
    attention = model.config._attn_implementation
    ids = torch.arange(12)[None] * 7919 % 96
    expected = logits(model, ids)
    with pytest.warns(UserWarning, match=f"not accelerated: {reason}"):
        accelerate(model)
    assert torch.equal(logits(model, ids), expected) and model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["ernie4_5", "llama"])
def test_pairs_of_channels_that_are_others_in_the_model_are_found(tiny, architecture, monkeypatch):
    own = recognition.turns_neighbours
    monkeypatch.setattr(recognition, "turns_neighbours", lambda attention: not own(attention))
    with pytest.warns(UserWarning, match="not accelerated: block 0 makes other queries than a Llama's.* at position 0"):
        accelerate(tiny(architecture).bfloat16())


@torch.no_grad()
def test_a_window_that_the_model_does_not_have_is_found(tiny, monkeypatch):
    """Logits behind short texts would not show it."""
    monkeypatch.setattr(recognition, "_type_of_layer", lambda attention, config: None)
    with pytest.warns(UserWarning, match="block 1's attention has the sliding_window None, not 64"):
        accelerate(tiny("exaone4", sliding_window=64, layer_types=["sliding_attention", "full_attention"]).bfloat16())


@torch.no_grad()
@pytest.mark.parametrize(
    "part, reason", [("mlp", "block 1 gives another output"), ("model", "its head gives other logits")]
)
def test_factors_that_a_llama_lacks_are_found(tiny, part, reason):
    """An MLP, or logits, times 0.85, of which the configuration says nothing."""
    model = tiny("llama").bfloat16()
    changed = model.model.layers[1].mlp if part == "mlp" else model

    class Scaled(type(changed)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if part == "mlp":
                return 0.85 * output
            output.logits = 0.85 * output.logits
            return output

    changed.__class__ = Scaled
    with pytest.warns(UserWarning, match=f"not accelerated: {reason}"):
        accelerate(model)
    assert not any(module._forward_hooks for module in model.modules())
