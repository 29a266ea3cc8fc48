"""Architectures that read a cache in their own ways: served exactly, or refused before anything changes."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from compress import METHODS, accelerate, apply
from compress.kv import CacheBatch, attach, attached, attachment_of
from compress.kv.attach import check_attach
from compress.kv.identity import small_copy
from compress.kv.layer import states_of
from compress.kv.learned import locret
from compress.kv.learned.locret import channels
from compress.kv.rotation import turn_of
from compress.kv.support import attentions_of, keeping_layers, key_shape, key_shapes
from compress.kv.timed import check_timed_model
from compress.walk.experts import has_experts
from tests.architectures import tiny_model

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
SHARING = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3,
           "num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
           "vocab_size_per_layer_input": 96}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "qk_nope_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}  # fmt: skip
MORE = {
    "gemma4_text": {**SHARING, "global_head_dim": 32},
    "gemma3n_text": {**SHARING, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6,
                     "intermediate_size": [96] * 6},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere2": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 4},
    "deepseek_v3": LATENT,
}  # fmt: skip
NEAR = {"rtol": 1e-3, "atol": 1e-3}


def decoder(kind: str, **more) -> nn.Module:
    config = AutoConfig.for_model(kind, **{**SIZES, **MORE.get(kind, {}), **more})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(4)
    return model


@pytest.fixture
def prompts(tokens) -> tuple[Tensor, Tensor]:
    """Two prompts, one with padding, and their mask."""
    return torch.cat(tokens(2, 40)), (torch.arange(40) >= torch.tensor([[0], [9]])).long()


def logits_of(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **more) -> Tensor:
    """The logits of a few written tokens, [B, new, vocabulary]."""
    mask = torch.ones_like(ids) if mask is None else mask
    more = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 5, **more}
    return torch.stack(model.generate(ids, attention_mask=mask, pad_token_id=0, **more).logits, 1)


@pytest.mark.parametrize("kind", ["gemma4_text", pytest.param("gemma3n_text", marks=pytest.mark.slow)])
def test_layers_that_share_keys(kind, prompts):
    """Later layers read the keys of an earlier one: batches, chunks, beams, copies and every policy that keeps all."""
    model, (ids, mask) = decoder(kind), prompts
    assert keeping_layers(model) == [1, 3]
    plain, beams = logits_of(model, ids, mask), model.generate(ids[:1], num_beams=3, max_new_tokens=5, do_sample=False)
    for methods in ([], *([METHODS[name](budget=1.0)] for name in ("snapkv", "kvzip", "expected_attention"))):
        with attached(model, methods):
            assert_close(logits_of(model, ids, mask), plain, **NEAR)
            assert_close(logits_of(model, ids, mask, prefill_chunk_size=7), plain, **NEAR)
            assert torch.equal(model.generate(ids[:1], num_beams=3, max_new_tokens=5, do_sample=False), beams)
    for keep in (1, 4):  # the later layers may compute the last tokens alone
        told = model(ids[:1], logits_to_keep=keep).logits
        with attached(model) as attachment:
            cache = attachment.cache()
            model(ids[:1, :6], past_key_values=cache)
            assert_close(model(ids[:1, 6:], past_key_values=cache, logits_to_keep=keep).logits, told, **NEAR)
            assert_close(model(ids[:1], use_cache=True, logits_to_keep=keep).logits, told, **NEAR)
            assert_close(
                model(ids[:1, :7], use_cache=False, logits_to_keep=keep).logits,
                model(ids[:1, :7]).logits[:, -keep:],
                **NEAR,
            )
    ids, told = ids[:1], model(ids[:1]).logits[:, -1:]
    with attached(model) as attachment:
        cache = attachment.cache(observes=True)
        model(ids[:, :30], past_key_values=cache)
        copies = [cache.compressed(METHODS["h2o"](budget=1.0)), cache.compressed(None)]
        for one in copies:  # further turns
            assert_close(model(ids[:, 30:], past_key_values=one).logits[:, -1:], told, **NEAR)
        for one in (pair := [cache.compressed(METHODS["h2o"](budget=20)) for _ in "ab"]):
            one.paused = True
        alone = model(ids[:, 30:], past_key_values=copy.deepcopy(pair[0])).logits
        both = model(ids[:, 30:].expand(2, -1), past_key_values=CacheBatch(pair)).logits
        assert_close(both, alone.expand(2, -1, -1), **NEAR)
        assert not torch.allclose(alone[:, -1:], told, atol=0.01)  # something was evicted
        assert pair[0].get_seq_length() == 40 and [layer.length for layer in pair[0].own] == [30, 30]
    with pytest.raises(ValueError, match="quest chooses positions for the queries of one layer"):
        attach(model, [METHODS["quest"]()])


@pytest.mark.parametrize("kind, reason", [("diffllama", "its logits differ by"), ("doge", "attention_mask"),
                                          ("deepseek_v3", "multi-head latent attention")])  # fmt: skip
def test_other_attention_is_refused(kind, reason, tokens):
    """While a run is planned, before other methods work, and when a model is attached, which does not change it."""
    model, methods = decoder(kind), [METHODS["snapkv"]()]
    plain, attention = model(tokens(1)[0]).logits, model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        attach(model, methods)
    assert attachment_of(model) is None and model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(model(tokens(1)[0]).logits, plain)
    with pytest.raises(ValueError, match=reason):
        apply([METHODS["rtn"](group_size=-1), *methods], model)
    assert torch.equal(model(tokens(1)[0]).logits, plain)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match=reason):
        methods[0].check(skeleton)
        check_attach(skeleton, methods)


HYBRIDS = ["lfm2", "granitemoehybrid", "qwen3_5_text", "jamba", "falcon_h1", "zamba2"]  # the last two in one layer


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_keep_their_states(kind, tokens):
    """Whatever is evicted: a policy that reads the prompt again leaves them as they were behind the prompt."""
    model, ids = tiny_model(kind, layers=4), tokens(1, 40)[0]
    with attached(model) as attachment:
        model(ids, past_key_values=(plain := attachment.cache()))
    keeping = [layer for layer in plain.own if layer.slabs]
    assert key_shapes(model) == {
        x.number: (x.slabs[0].k.buffer.shape[1], x.slabs[0].k.buffer.shape[3]) for x in keeping
    }
    states = [(name, key, one) for layer in plain.layers for name, key, one in states_of(layer)]
    assert states and plain.nbytes == sum(t.nbytes for x in plain.own for t in x.held) + sum(
        t.nbytes for *_, t in states
    )
    for policy in ("kvzip", "snapkv"):
        with attached(model, METHODS[policy](budget=0.5)) as attachment:
            model(ids, past_key_values=(cache := attachment.cache()))
        found = [one for layer in cache.layers for one in states_of(layer)]
        assert [(name, key) for name, key, _ in found] == [(name, key) for name, key, _ in states]
        for (_, _, one), (_, _, told) in zip(found, states, strict=True):
            assert_close(one, told, **NEAR)
        assert max(layer.length for layer in cache.filled) < 40 and cache.get_seq_length() == 40


def test_only_mixtures_have_experts(real):
    """A list of blocks is none, so that the embedded model is compared with its own rounding in 16 bits."""
    model, _ = real
    assert not has_experts(model) and not has_experts(tiny_model("gpt2"))
    assert all(has_experts(tiny_model(kind)) for kind in ("mixtral", "deepseek_v3", "gpt_oss"))
    with attached(model.bfloat16()) as attachment:
        assert attachment.cache().get_seq_length() == 0


def test_a_module_of_several_layers_turns_its_keys(tokens):
    """Zamba2's attention has no number of its own; its mixers have those of their layers."""
    model, ids = tiny_model("zamba2", layers=4, use_mem_rope=True), tokens(1, 40)[0]
    with attached(model, METHODS["expected_attention"](budget=1.0)) as attachment:
        model(ids, past_key_values=(cache := attachment.cache(observes=True)))
    for layer in (layer for layer in cache.own if layer.slabs):
        turn, at = layer.about["turn"], torch.arange(40)[None]
        back = turn(layer.queries, at, True)
        assert not torch.allclose(back, layer.queries, atol=0.1)
        assert_close(turn(back, at), layer.queries, **NEAR)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_copies_of_hybrids_share_no_state(kind, tokens):
    model, ids = tiny_model(kind, layers=4), tokens(1, 40)[0]
    told = model(ids).logits[:, 30:]
    with attached(model) as attachment:
        cache = attachment.cache(observes=True)
        model(ids[:, :30], past_key_values=cache)
        for _ in "ab":
            one = cache.compressed(METHODS["snapkv"](budget=1.0))
            for at in range(30, 40):  # each writes into its own states
                step = model(ids[:, at : at + 1], past_key_values=one).logits
                assert_close(step[:, 0], told[:, at - 30], **NEAR)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_decode_in_a_batch_of_caches(kind, tokens):
    """Each row with its own states, which the caches have again behind every pass."""
    model, ids = tiny_model(kind, layers=4), torch.cat(tokens(2, 24))
    with attached(model, "kv_int(bits=8, group_size=32)") as attachment:
        caches = [attachment.cache(), attachment.cache()]
        for cache, row in zip(caches, ids.split(1), strict=True):
            model(row[:, :20], past_key_values=cache)
            cache.paused = True
        alone, batch = copy.deepcopy(caches), CacheBatch(caches)
        for at in (20, 21, 22):
            rows = model(ids[:, at : at + 1], past_key_values=batch).logits
            for i, cache in enumerate(alone):
                assert_close(rows[i], model(ids[i : i + 1, at : at + 1], past_key_values=cache).logits[0], **NEAR)
        for mine, other, row in zip(caches, alone, ids.split(1), strict=True):
            assert mine.nbytes == other.nbytes and mine.nbytes_16 == other.nbytes_16
            after, told = (model(row[:, 23:], past_key_values=cache).logits for cache in (mine, other))
            assert_close(after, told, **NEAR)
        (empty := attachment.cache()).paused = True
        with pytest.raises(ValueError, match="states of linear attention must be those behind a prompt"):
            CacheBatch([empty])


@pytest.mark.parametrize(
    "kind, without", [("smollm3", [3]), ("cohere2", [3]), ("exaone4", [3]), ("gemma4_text", []), ("gemma3n_text", []),
                      ("glm4", []), ("llama", []), ("gpt_oss", [])]
)  # fmt: skip
def test_keys_move_as_the_model_moves_them(kind, without, tokens):
    """Keys of one place, turned to another, are those that the model gives there; layers without RoPE keep theirs."""
    model, ids = decoder(kind), tokens(1, 7)[0]
    caches = []
    for start in (0, 23):
        caches.append(DynamicCache(config=model.config))
        at = torch.arange(start, start + 7)[None]
        model(ids, position_ids=at, attention_mask=torch.ones_like(ids), past_key_values=caches[-1])
    for number in attentions_of(model):
        here, there = (getattr(cache.layers[number], "keys", None) for cache in caches)
        if here is None:
            continue
        turn, at = turn_of(model, number), torch.arange(7)[None, -here.shape[2] :]
        assert_close(turn(turn(here, at, True), at + 23), there, **NEAR)
        assert torch.equal(turn(here, at), here) == (number in without)


def test_an_unknown_rotation_is_refused(tokens):
    """HunYuan scales the channels of keys after it has rotated them."""
    model = decoder("hunyuan_v1_dense", head_dim=16)
    for attention in attentions_of(model).values():
        attention.key_layernorm.weight.uniform_(0.2, 2)
    for name in ("expected_attention", "shadowkv"):
        with pytest.raises(ValueError, match="layer 0 rotates its keys in a way that is not known"):
            attach(model, [METHODS[name]()])
    assert attachment_of(model) is None
    with attached(model, [METHODS["snapkv"](budget=1.0)]):
        kept = logits_of(model, tokens(1)[0])
    assert_close(kept, logits_of(model, tokens(1)[0]), **NEAR)


def test_a_cache_that_is_not_compressed_is_told(tiny, tokens):
    """Once for a model: by which call transformers keeps a cache of its own although methods are attached."""
    model, ids, methods = tiny("llama"), tokens(1, 40)[0], [METHODS["streaming"](budget=8)]
    model.generation_config.eos_token_id = None
    for call, how in (
        (lambda: model(ids), "called without `use_cache=True`"),
        (lambda: model.model(ids, use_cache=True), "LlamaModel was called by itself, and not LlamaForCausalLM"),
        (lambda: logits_of(model, ids, cache_implementation="static", disable_compile=True), "it got a StaticCache"),
        (lambda: model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=3), "it got a DynamicCache"),
    ):
        with attached(model, methods), pytest.warns(UserWarning, match=f"not compressed.*{how}") as told:
            call(), call()
        assert len([one for one in told if "not compressed" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attached(model):  # nothing was asked for
            model(ids)
        with attached(model, methods):
            model(ids, use_cache=False), logits_of(model, ids), model(ids, use_cache=True)


def test_caches_of_other_models_and_of_interrupted_passes_are_refused(tiny, tokens):
    ours, other, ids = tiny("llama"), tiny("llama", 1), tokens(1, 40)[0]
    with attached(ours, [METHODS["streaming"](budget=8)]) as attachment:
        with pytest.raises(ValueError, match="the model must be attached"):
            other(ids, past_key_values=attachment.cache())
        with attached(other), pytest.raises(ValueError, match="made for another LlamaForCausalLM"):
            other(ids, past_key_values=attachment.cache())
        cache = attachment.cache()
        ours(ids[:, :20], past_key_values=cache)
        stop = ours.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ours(ids[:, 20:], past_key_values=cache)
        stop.remove()
        with pytest.raises(ValueError, match="an earlier pass over this cache was interrupted"):
            ours(ids[:, 20:], past_key_values=cache)


def test_models_whose_caches_cannot_be_timed_are_refused(tokens):
    """Timed steps read layers of one width, or with a window; methods of learned parts know each layer's width."""
    for kind, reason in (
        ("gemma4_text", "layers that share keys, or that differ in their widths"),
        ("lfm2", r"layers \(conv\)"),
        ("falcon_h1", r"layers \(hybrid\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_timed_model(decoder(kind))
    assert key_shapes(decoder("gemma4_text")) == {1: (2, 32), 3: (2, 32)}
    assert channels(decoder("gemma4_text")) == (4 + 2 * 2) * 32


def test_layers_with_settings_of_their_own(monkeypatch):
    """The larger Gemma 4 has fewer and wider key heads where a layer keeps all positions, and no number for all."""
    model = decoder("gemma4_text", num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=0)
    assert key_shapes(model) == {1: (1, 32), 3: (1, 32), 5: (1, 32)} and channels(model) == (4 + 2) * 32
    small = small_copy(model.config)
    assert key_shapes(small) == key_shapes(model) and key_shape(small, 0) == (2, 16)
    check_attach(model, [METHODS["streaming"](budget=0.5)])
    monkeypatch.setattr(locret, "key_shapes", lambda _: {1: (1, 32), 3: (2, 16)})
    with pytest.raises(ValueError, match=r"differ in their channels \(128, 192\), and networks of locret"):
        channels(model)


def test_an_accelerated_model_in_16_bits_is_attached(real):
    """Its passes round less than transformers' own: of the first token of the trial, these lose a quarter here."""
    model, ids = accelerate(real[0].bfloat16()), torch.arange(9)[None] + 500
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache()).logits
        with attached(model) as attachment:
            found = model(ids, past_key_values=attachment.cache(), use_cache=True).logits
    assert_close(found, expected, rtol=0.05, atol=0.3)
